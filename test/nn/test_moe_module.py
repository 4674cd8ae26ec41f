# Owner(s): ["module: nn"]
"""nn.MoE: its meaning, parameters, options, and life in the rest of PyTorch."""

import copy
import io
import pickle

import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils.moe import load_balancing_loss, updated_expert_bias
from torch.nn.utils.moe_replay import record_routing, replay_routing
from torch.testing._internal.common_device_type import instantiate_device_type_tests
from torch.testing._internal.common_modules import module_db, ModuleErrorEnum, modules
from torch.testing._internal.common_moe import (
    bits_of_kernel,
    read_page,
    RecordOps,
    run_code_blocks,
)
from torch.testing._internal.common_utils import (
    freeze_rng_state,
    gradcheck,
    instantiate_parametrized_tests,
    noncontiguous_like,
    parametrize,
    run_tests,
    set_default_dtype,
    subtest,
    TemporaryDirectoryName,
    TestCase,
)
from torch.testing._internal.moe_reference import ACTIVATIONS, GATED_ACTIVATIONS


D, H, E, K = 8, 12, 6, 2


def expert(x, w_in, w_out, activation, b_in=None, b_out=None):
    hidden = F.linear(x, w_in, b_in)
    if activation == "relu":
        return F.linear(hidden.relu(), w_out, b_out)
    gate, up = hidden.chunk(2, -1)
    return F.linear(F.silu(gate) * up, w_out, b_out)


def whole(w_in, w_up):
    return w_in if w_up is None else torch.cat([w_in, w_up], -2)


def loop(layer, x):
    """The layer, token by token; softmax router with normalised weights."""
    rows = []
    for token in x.flatten(0, -2):
        logits = layer.router(token)
        weights, chosen = logits.softmax(-1).topk(layer.top_k)
        weights = weights / weights.sum()
        y = 0
        for s, e in zip(weights, chosen.tolist()):
            biases = (layer.b_in[e], layer.b_out[e]) if layer.b_in is not None else ()
            matrices = (whole(layer.w_in, layer.w_up)[e], layer.w_out[e])
            y = y + s * expert(token, *matrices, layer.activation, *biases)
        if layer.shared_w_in is not None:
            w_in = whole(layer.shared_w_in, layer.shared_w_up)
            y = y + expert(token, w_in, layer.shared_w_out, layer.activation)
        rows.append(y)
    return torch.stack(rows).view_as(x)


def make(**kwargs):
    torch.manual_seed(0)
    return nn.MoE(D, H, E, K, dtype=torch.float64, **kwargs)


class TestMoEModule(TestCase):
    @parametrize(
        "options",
        [
            subtest({}, name="plain"),
            subtest({"bias": True}, name="bias"),
            subtest({"activation": "relu"}, name="relu"),
            subtest({"shared_hidden_dim": 5}, name="shared"),
            subtest(
                {"separate_up": True, "bias": True, "shared_hidden_dim": 5}, name="up"
            ),
            subtest(
                {"activation": "relu", "bias": True, "shared_hidden_dim": 20},
                name="all",
            ),
        ],
    )
    @parametrize("shape", [(9,), (2, 5)])
    def test_means_the_loop(self, options, shape):
        layer = make(**options)
        x = torch.randn(*shape, D, dtype=torch.float64, requires_grad=True)
        leaves = [x, *layer.parameters()]
        output, logits, topk_indices = layer(x, need_routing=True)
        expected = loop(layer, x)
        self.assertEqual(output, expected)
        self.assertEqual(layer(x), output, rtol=0, atol=0)
        self.assertEqual(logits, F.linear(x, layer.router.weight))
        self.assertEqual(topk_indices, logits.topk(K).indices)
        grad = torch.randn_like(expected)
        self.assertEqual(
            torch.autograd.grad(output, leaves, grad),
            torch.autograd.grad(expected, leaves, grad),
        )

    @parametrize("shape", [(5, D), (2, 3, D)])
    def test_output_is_detached_in_place(self, shape):
        # As pipeline schedules with a split backward do.
        output = nn.MoE(D, H, E, K)(torch.randn(shape))
        self.assertFalse(output.detach_().requires_grad)

    def test_gate_interleaved(self):
        """The same layer with the gate and up rows of all experts in another order."""
        options = {"bias": True, "shared_hidden_dim": 5}
        layer, halves = make(gate_interleaved=True, **options), make(**options)
        state = layer.state_dict()
        for name in ("w_in", "b_in"):
            state[name] = torch.cat([state[name][:, ::2], state[name][:, 1::2]], 1)
        w_in = state["shared_w_in"]
        state["shared_w_in"] = torch.cat([w_in[::2], w_in[1::2]])
        halves.load_state_dict(state)
        x = torch.randn(5, D, dtype=torch.float64)
        self.assertEqual(layer(x), halves(x))
        self.assertIn("gate_interleaved=True", repr(layer))

    @parametrize(
        "options",
        [
            subtest({}, name="plain"),
            subtest({"score": "sigmoid", "balance_bias": True}, name="bias"),
            subtest({"num_groups": 3, "top_groups": 2, "scale": 2.5}, name="groups"),
        ],
    )
    def test_replay(self, options):
        layer = make(**options)
        if layer.balance_bias is not None:
            layer.balance_bias.normal_()
        x = torch.randn(2, 5, D, dtype=torch.float64, requires_grad=True)
        leaves = [x, *layer.parameters()]
        with record_routing(layer) as record:
            output = layer(x)
        with torch.no_grad():
            if layer.balance_bias is not None:
                layer.balance_bias.normal_()
        with replay_routing(layer, record):
            replayed, logits, indices = layer(x, need_routing=True)
        self.assertEqual(replayed, output, rtol=0, atol=0)
        self.assertEqual(indices.flatten(0, 1), record[""].long())
        self.assertEqual(logits, F.linear(x, layer.router.weight))
        grad = torch.randn_like(output)
        self.assertEqual(
            torch.autograd.grad(replayed, leaves, grad),
            torch.autograd.grad(output, leaves, grad),
        )
        # Tokens with fewer experts, of another layer's choice.
        ids = torch.tensor([[1, -1, 0], [-1, -1, -1]])
        y = layer(x[0, :2], topk_indices=ids)
        self.assertEqual(y[1], torch.zeros_like(y[1]))

    def test_separate_up(self):
        """The same layer with the up projection in a parameter of its own."""
        options = {"bias": True, "shared_hidden_dim": 5}
        layer, fused = make(separate_up=True, **options), make(**options)
        state = layer.state_dict()
        for name in ("", "shared_"):
            w_up = state.pop(f"{name}w_up")
            state[f"{name}w_in"] = torch.cat([state[f"{name}w_in"], w_up], -2)
        fused.load_state_dict(state)
        x = torch.randn(5, D, dtype=torch.float64)
        self.assertEqual(layer(x), fused(x))
        self.assertIn("separate_up=True", repr(layer))

    def test_router_is_a_linear(self):
        # What LoRA, quantisation and hooks look for.
        layer, x = make(), torch.randn(5, D, dtype=torch.float64)
        names = [n for n, m in layer.named_modules() if isinstance(m, nn.Linear)]
        self.assertEqual(names, ["router"])
        before, _, ids = layer(x, need_routing=True)
        seen = []
        layer.router.register_forward_hook(lambda *args: seen.append(args[2].shape))

        class Lora(nn.Module):
            def __init__(self, base):
                super().__init__()
                self.base = base
                self.down = nn.Linear(D, 1, bias=False, dtype=torch.float64)
                self.up = nn.Linear(1, E, bias=False, dtype=torch.float64)
                nn.init.zeros_(self.up.weight)

            def forward(self, x):
                return self.base(x) + self.up(self.down(x))

        layer.router = Lora(layer.router)
        layer.requires_grad_(False)
        layer.router.up.requires_grad_(True)
        after = layer(x)
        self.assertEqual(after, before, rtol=0, atol=0)
        self.assertEqual(seen, [(5, E)])
        after.sum().backward()
        self.assertGreater(layer.router.up.weight.grad.abs().sum(), 0)

    def test_shared_expert_routes_nothing(self):
        layer = make(shared_hidden_dim=5)
        with RecordOps() as record:
            layer.run_shared(torch.randn(2, 5, D, dtype=torch.float64))
        self.assertIn("_moe_mlp", record.names)
        for name in ("_moe_permutation", "index", "gather", "index_select"):
            self.assertNotIn(name, record.names)

    def test_construction_runs_no_kernel(self):
        with RecordOps() as record:
            make(bias=True, shared_hidden_dim=5)
        self.assertEqual([name for name in record.names if "moe" in name], [])

    def test_run_experts_is_routed_and_shared(self):
        layer, x = make(shared_hidden_dim=5), torch.randn(5, D, dtype=torch.float64)
        output = layer(x)
        _, *routing = layer.route(x)
        self.assertEqual(layer.run_experts(x, *routing), output)
        parts = layer.run_routed(x, *routing), layer.run_shared(x)
        self.assertEqual(parts[0] + parts[1], output)
        self.assertIsNone(make().run_shared(x))

    def test_routing_options_reach_the_router(self):
        options = {
            "score": "sigmoid",
            "normalize": False,
            "num_groups": 3,
            "top_groups": 1,
            "scale": 2.5,
        }
        layer = make(balance_bias=True, **options)
        layer.balance_bias.copy_(torch.randn(E))
        x = torch.randn(7, D, dtype=torch.float64)
        logits, indices, weights = layer.route(x)
        expected = F.moe_topk(logits, K, bias=layer.balance_bias, **options)
        self.assertEqual((indices, weights), expected)
        self.assertNotEqual(indices, F.moe_topk(logits, K)[0])

    @parametrize("activation", ACTIVATIONS)
    def test_gates_of_activations(self, activation):
        # The functional raises where w_in has the rows of another kind of activation.
        layer = make(activation=activation, shared_hidden_dim=5)
        g = 2 if activation in GATED_ACTIVATIONS else 1
        self.assertEqual(layer.w_in.shape, (E, g * H, D))
        x = torch.randn(5, D, dtype=torch.float64)
        self.assertEqual(layer(x).shape, x.shape)

    def test_alpha_and_limit(self):
        options = {"activation": "swiglu_oai", "alpha": 1.25, "limit": 0.5}
        layer = make(shared_hidden_dim=5, **options)
        x = torch.randn(5, D, dtype=torch.float64)
        _, *routing = layer.route(x)
        routed = F.moe_mlp(x, *routing, layer.w_in, layer.w_out, **options)
        everyone = torch.zeros(5, 1, dtype=torch.int64)
        matrices = layer.shared_w_in[None], layer.shared_w_out[None]
        shared = F.moe_mlp(x, everyone, None, *matrices, **options)
        self.assertEqual(layer(x), routed + shared)
        self.assertEqual(layer.run_routed(x, *routing), routed)
        for name in ("alpha", "limit"):
            other = F.moe_mlp(
                x, everyone, None, *matrices, **{**options, name: options[name] * 2}
            )
            self.assertNotEqual(shared, other)
        self.assertIn("alpha=1.25, limit=0.5", repr(layer))

    @parametrize("activation", ("swiglu", "geglu"))
    def test_limit_of_other_gates(self, activation):
        layer = make(activation=activation, limit=0.05)
        x = torch.randn(5, D, dtype=torch.float64)
        _, *routing = layer.route(x)
        expected = F.moe_mlp(
            x, *routing, layer.w_in, layer.w_out, activation=activation, limit=0.05
        )
        self.assertEqual(layer(x), expected)
        layer.limit = None
        self.assertNotEqual(layer(x), expected)

    def test_num_rows_of_the_caller(self):
        layer, x = make(bias=True), torch.randn(5, D, dtype=torch.float64)
        _, *routing = layer.route(x)
        shapes = []

        def pack(tensor):
            shapes.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            bounded = layer.run_routed(x, *routing, 5 * K + 3)
        self.assertEqual(bounded, layer.run_routed(x, *routing))
        # The pre-activations have as many rows.
        self.assertIn((5 * K + 3, 2 * H), shapes)

    def test_balance_bias_starts_in_float32(self):
        for dtype, expected in (
            (torch.bfloat16, torch.float32),
            (torch.float32, torch.float32),
            (torch.float64, torch.float64),
        ):
            layer = nn.MoE(D, H, E, K, balance_bias=True, dtype=dtype)
            self.assertEqual(layer.balance_bias.dtype, expected)
            x = torch.randn(3, D, dtype=dtype)
            self.assertEqual(layer(x).dtype, dtype)
        with set_default_dtype(torch.bfloat16):
            layer = nn.MoE(D, H, E, K, balance_bias=True)
        self.assertEqual(layer.balance_bias.dtype, torch.float32)
        self.assertNotIn("_apply", vars(nn.MoE))
        # A buffer like any other: what a cast does to it, updated_expert_bias says.
        layer = nn.MoE(D, H, E, K, balance_bias=True).bfloat16()
        with self.assertRaisesRegex(TypeError, "must be float32 or float64"):
            updated_expert_bias(layer.balance_bias, torch.zeros(E).long(), 0.001)

    def test_state_dict(self):
        layer = make(bias=True, shared_hidden_dim=5, balance_bias=True)
        layer.balance_bias += 1
        shapes = {name: tuple(t.shape) for name, t in layer.state_dict().items()}
        self.assertEqual(
            shapes,
            {
                "router.weight": (E, D),
                "w_in": (E, 2 * H, D),
                "w_out": (E, D, H),
                "b_in": (E, 2 * H),
                "b_out": (E, D),
                "shared_w_in": (10, D),
                "shared_w_out": (D, 5),
                "balance_bias": (E,),
            },
        )
        other = make(bias=True, shared_hidden_dim=5, balance_bias=True)
        other.load_state_dict(layer.state_dict())
        x = torch.randn(3, D, dtype=torch.float64)
        self.assertEqual(other(x), layer(x))
        self.assertEqual(copy.deepcopy(layer)(x), layer(x))
        self.assertEqual(set(make().state_dict()), {"router.weight", "w_in", "w_out"})
        names = {
            "router.weight",
            "w_in",
            "w_up",
            "w_out",
            "shared_w_in",
            "shared_w_out",
        }
        layer = make(separate_up=True, shared_hidden_dim=5)
        self.assertEqual(set(layer.state_dict()), names | {"shared_w_up"})

    def test_initial_values(self):
        layer = nn.MoE(64, 256, 16, 2, bias=True, shared_hidden_dim=32)
        for name, fan_in in (
            ("router.weight", 64),
            ("w_in", 64),
            ("b_in", 64),
            ("w_out", 256),
            ("b_out", 256),
            ("shared_w_in", 64),
            ("shared_w_out", 32),
        ):
            bound = fan_in**-0.5
            values = layer.get_parameter(name)
            self.assertLessEqual(values.abs().max().item(), bound)
            self.assertGreater(values.abs().max().item(), 0.9 * bound)

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_meta_device_and_dtype(self, dtype):
        layer = nn.MoE(D, H, E, K, device="meta", dtype=dtype, balance_bias=True)
        output = layer(torch.randn(5, D, device="meta", dtype=dtype))
        self.assertEqual(output.device.type, "meta")
        self.assertEqual(output.dtype, dtype)
        # The choice of experts is made in float32 whatever the parameters are.
        self.assertEqual(layer.balance_bias.dtype, torch.float32)
        real = layer.to_empty(device="cpu")
        real.reset_parameters()
        self.assertTrue(real(torch.randn(5, D, dtype=dtype)).isfinite().all())

    def test_ensemble(self):
        layers = [make(shared_hidden_dim=5) for _ in range(3)]
        x = torch.randn(5, D, dtype=torch.float64)
        params, buffers = torch.func.stack_module_state(layers)

        def output(params, buffers):
            args = (layers[0], (params, buffers), (x,))
            return torch.func.functional_call(*args)

        torch.vmap(output)(params, buffers).square().sum().backward()
        for i, layer in enumerate(layers):
            layer(x).square().sum().backward()
            for name, param in layer.named_parameters():
                self.assertEqual(params[name].grad[i], param.grad)

    def test_symbolic_trace(self):
        # A leaf, like all modules of torch.nn.
        layer = nn.Sequential(make(shared_hidden_dim=5))
        x = torch.randn(5, D, dtype=torch.float64)
        self.assertEqual(torch.fx.symbolic_trace(layer)(x), layer(x))

    def test_symbolic_trace_of_its_parts(self):
        class Tracer(torch.fx.Tracer):
            def is_leaf_module(self, m, module_qualified_name):
                return isinstance(m, nn.Linear)

        layer = nn.Sequential(make(shared_hidden_dim=5, balance_bias=True))
        traced = torch.fx.GraphModule(layer, Tracer().trace(layer))
        for shape in ((5, D), (2, 3, D)):
            x = torch.randn(shape, dtype=torch.float64)
            self.assertEqual(traced(x), layer(x))

    @parametrize("backend", ("aot_eager", "inductor"))
    def test_compile(self, backend):
        layer = make(bias=True, shared_hidden_dim=5)
        x = torch.randn(6, D, dtype=torch.float64)
        compiled = torch.compile(layer, fullgraph=True, backend=backend)
        expected = layer(x)
        self.assertEqual(compiled(x), expected)
        expected.sum().backward()
        grads = {n: p.grad.clone() for n, p in layer.named_parameters()}
        layer.zero_grad()
        compiled(x).sum().backward()
        self.assertEqual({n: p.grad for n, p in layer.named_parameters()}, grads)

    def test_graphs_of_changing_numbers_of_tokens(self):
        # The page of torch.compile says how many, and which.
        layer, counter = make(), CompileCounterWithBackend("aot_eager")
        compiled = torch.compile(layer, fullgraph=True, backend=counter)
        for num_tokens, graphs in (
            (6, 1),
            (7, 2),
            (9, 2),
            (1, 3),
            (0, 4),
            (1, 4),
            (30, 4),
        ):
            x = torch.randn(num_tokens, D, dtype=torch.float64)
            with torch.no_grad():
                self.assertEqual(compiled(x), layer(x))
            self.assertEqual(counter.frame_count, graphs, msg=f"T = {num_tokens}")

    @parametrize("dtype", (torch.float32, torch.bfloat16))
    def test_batch_invariant_but_for_its_linear(self, dtype):
        class RowMoE(nn.MoE):  # as the docstring has it
            def route(self, input):
                logits = (input.unsqueeze(-2) * self.router.weight).sum(-1)
                return logits, *F.moe_topk(logits, self.top_k, **self.routing)

        torch.manual_seed(0)
        layer = RowMoE(64, 48, 8, 2, shared_hidden_dim=16, dtype=dtype)
        x = torch.randn(65, 64, dtype=dtype)
        _, ids, weights = layer.route(x)
        whole = layer.run_experts(x, ids, weights)
        for n in (1, 2, 3, 7):
            part = layer.run_experts(x[:n], ids[:n], weights[:n])
            self.assertEqual(part, whole[:n], **bits_of_kernel())
            self.assertEqual(layer(x[:n]), whole[:n], **bits_of_kernel())

    def test_pruned_experts(self):
        layer = make(bias=True, balance_bias=True)
        x = torch.randn(5, D, dtype=torch.float64)
        kept = torch.tensor([0, 2, 3, 5])
        for name in ("w_in", "w_out", "b_in", "b_out"):
            setattr(layer, name, nn.Parameter(getattr(layer, name)[kept]))
        layer.router.weight = nn.Parameter(layer.router.weight[kept])
        layer.balance_bias = layer.balance_bias[kept]
        self.assertEqual(layer.num_experts, 4)
        self.assertIn("num_experts=4, ", repr(layer))
        self.assertEqual(layer(x), loop(layer, x))

    def test_router_without_rows(self):
        class TwoLayers(nn.MoE):
            def __init__(self):
                super().__init__(D, H, E, K)
                self.router = nn.Sequential(nn.Linear(D, 3), nn.ReLU(), nn.Linear(3, E))

        class Packed(nn.MoE):  # two numbers of 4 bits in a byte
            def __init__(self):
                super().__init__(D, H, E, K)
                self.router = nn.Module()
                self.router.weight = torch.zeros(E * D // 2, 1, dtype=torch.uint8)

        self.assertIn(f"num_experts={E}, ", repr(TwoLayers()))
        self.assertEqual(Packed().num_experts, E)
        quantized = torch.ao.quantization.quantize_dynamic(
            nn.Sequential(nn.MoE(D, H, E, K)), {nn.Linear}
        )
        self.assertIn(f"num_experts={E}, ", repr(quantized))
        self.assertEqual(quantized(torch.randn(5, D)).shape, (5, D))

    def test_autocast(self):
        layer = nn.MoE(D, H, E, K, shared_hidden_dim=4)
        with torch.autocast("cpu", torch.bfloat16):
            output = layer(torch.randn(5, D))
        self.assertEqual(output.dtype, torch.bfloat16)
        output.float().sum().backward()
        self.assertEqual({p.grad.dtype for p in layer.parameters()}, {torch.float32})

    def test_training_with_the_loss_and_the_bias(self):
        # One step of each way to balance, as a training loop has them.
        layer = make(balance_bias=True)
        x = torch.randn(64, D, dtype=torch.float64)
        output, logits, topk_indices = layer(x, need_routing=True)
        loss = output.square().mean()
        loss = loss + 0.01 * load_balancing_loss(logits.softmax(-1), topk_indices)
        loss.backward()
        self.assertTrue(all(p.grad.abs().sum() > 0 for p in layer.parameters()))
        counts = topk_indices.flatten().bincount(minlength=E)
        layer.balance_bias = updated_expert_bias(layer.balance_bias, counts, 100.0)
        # A step this large leaves only experts that were below the mean.
        popular = counts * E > 64 * K
        after = layer(x, need_routing=True)[2].flatten().bincount(minlength=E)
        self.assertTrue(popular.any())
        self.assertEqual(after[popular].sum().item(), 0)

    def test_repr(self):
        self.assertExpectedInline(
            repr(nn.MoE(4, 8, 3, 2)),
            """\
MoE(
  4, 8, num_experts=3, top_k=2, activation='swiglu'
  (router): Linear(in_features=4, out_features=3, bias=False)
)""",
        )
        self.assertExpectedInline(
            repr(nn.MoE(4, 8, 3, 2, bias=True, balance_bias=True, shared_hidden_dim=6)),
            """\
MoE(
  4, 8, num_experts=3, top_k=2, activation='swiglu', bias=True, shared_hidden_dim=6, balance_bias=True
  (router): Linear(in_features=4, out_features=3, bias=False)
)""",
        )

    @parametrize("top_k", (0, 7))
    def test_errors(self, top_k):
        message = f"between 1 and num_experts = 6, got {top_k}"
        with self.assertRaisesRegex(ValueError, message):
            nn.MoE(D, H, E, top_k)

    @parametrize(
        "options,message",
        [
            subtest(({"activation": "swigl"}, "activation must be one of .*, got 'swigl'"), name="activation"),
            subtest(({"activation": "relu", "separate_up": True}, "separate_up=True needs a gated activation"), name="up"),
            subtest(({"gate_interleaved": True, "separate_up": True}, "gate_interleaved=True"), name="up_interleaved"),
            subtest(({"hidden_dim": 0}, "hidden_dim must be at least 1, got 0"), name="hidden_dim"),
            subtest(({"shared_hidden_dim": 0}, "shared_hidden_dim must be at least 1, got 0"), name="shared"),
        ],
    )  # fmt: skip
    def test_construction_errors(self, options, message):
        arguments = {"embed_dim": D, "hidden_dim": H, "num_experts": E, "top_k": K}
        with self.assertRaisesRegex(ValueError, message):
            nn.MoE(**{**arguments, **options})

    @parametrize(
        "options,message",
        [
            subtest(({"score": "relu"}, "score must be .*, got 'relu'"), name="score"),
            subtest(({"num_groups": 4, "top_groups": 1}, "num_groups must divide E = 6, got 4"), name="num_groups"),
            subtest(({"num_groups": 6, "top_groups": 1}, r"k must be in \[1, 1\], the number of selectable"), name="selectable"),
            subtest(({"activation": "relu", "gate_interleaved": True}, "gate_interleaved=True needs"), name="interleaved"),
            subtest(({"activation": "swiglu_oai", "limit": 0.0}, "limit must be > 0, got 0"), name="limit"),
        ],
    )  # fmt: skip
    def test_errors_of_the_functionals(self, options, message):
        with self.assertRaisesRegex(ValueError, message):
            nn.MoE(D, H, E, K, **options)(torch.randn(3, D))

    @parametrize("dynamic", (False, True))
    def test_export_and_save(self, dynamic):
        layer = nn.MoE(D, H, E, K, shared_hidden_dim=4, balance_bias=True)
        x = torch.randn(6, D)
        shapes = {"input": {0: torch.export.Dim("tokens")}} if dynamic else None
        program = torch.export.export(layer, (x,), dynamic_shapes=shapes)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        loaded = torch.export.load(file).module()
        for num_tokens in (6, 11) if dynamic else (6,):
            x = torch.randn(num_tokens, D)
            self.assertEqual(loaded(x), layer(x))

    def test_export_with_the_routing(self):
        layer, x = nn.MoE(D, H, E, K), torch.randn(6, D)
        kwargs = {"need_routing": True}
        program = torch.export.export(layer, (x,), kwargs)
        file = io.BytesIO()
        torch.export.save(program, file)
        file.seek(0)
        self.assertEqual(
            torch.export.load(file).module()(x, **kwargs), layer(x, **kwargs)
        )

    def test_aoti_package(self):
        layer, x = nn.MoE(D, H, E, K, shared_hidden_dim=4), torch.randn(6, D)
        with torch.no_grad(), TemporaryDirectoryName() as folder:
            program = torch.export.export(layer, (x,))
            path = torch._inductor.aoti_compile_and_package(
                program, package_path=f"{folder}/moe.pt2"
            )
            self.assertEqual(torch._inductor.aoti_load_package(path)(x), layer(x))

    def test_jit(self):
        layer, x = make(shared_hidden_dim=5), torch.randn(6, D, dtype=torch.float64)
        with torch.no_grad():
            traced = torch.jit.trace(layer, x)
        # Its check traces again without gradients, and wants the same graph.
        for module in (traced, torch.jit.trace(layer, x)):
            output = module(2 * x)
            self.assertEqual(output, layer(2 * x))
            grads = torch.autograd.grad(output.sum(), list(layer.parameters()))
            expected = torch.autograd.grad(layer(2 * x).sum(), list(layer.parameters()))
            self.assertEqual(grads, expected)
        # As the docstring says.
        with self.assertRaisesRegex(
            torch.jit.frontend.NotSupportedError, "keyword-only arguments with defaults"
        ):
            torch.jit.script(layer)

    def test_documentation(self):
        count, namespace = run_code_blocks(read_page(__file__, "nn.moe.md"))
        self.assertGreater(count, 2)
        self.assertTrue(namespace["layer"].router.weight.grad.isfinite().all())

    def test_weights_of_a_class_without_the_op(self):
        class Quantized(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                if func is nn.functional.moe_mlp:
                    raise NotImplementedError("mine")
                return super().__torch_function__(func, types, args, kwargs)

        layer = nn.MoE(4, 6, 3, 2)
        layer.w_out = nn.Parameter(layer.w_out.detach().as_subclass(Quantized))
        with self.assertRaisesRegex(NotImplementedError, "mine") as caught:
            layer(torch.randn(2, 4))
        (note,) = caught.exception.__notes__
        self.assertRegex(note, r"w_out of MoE is a Quantized.*dequantize\(\)")


moe_modules = modules([info for info in module_db if info.module_cls is nn.MoE])


class TestMoEModuleInfo(TestCase):
    """The checks that test_modules.py makes of every module, from the ModuleInfo."""

    def _each(self, module_info, device, dtype, requires_grad=False):
        """Modules, their forward inputs and their ModuleInputs, reproducibly."""
        inputs = module_info.module_inputs_func(
            module_info, device, dtype, requires_grad, training=True
        )
        self.assertGreater(len(inputs), 1)
        for module_input in inputs:
            with freeze_rng_state():
                torch.manual_seed(0)
                arguments = module_input.constructor_input
                kwargs = {**arguments.kwargs, "device": device, "dtype": dtype}
                module = module_info.module_cls(*arguments.args, **kwargs)
            yield module, module_input.forward_input.args, module_input

    @moe_modules
    def test_forward(self, device, dtype, module_info, training):
        for module, args, module_input in self._each(module_info, device, dtype):
            expected = module_input.reference_fn(module, *args)
            self.assertEqual(module(*args), expected)
            self.assertEqual(module.eval()(*args), expected)

    @moe_modules
    def test_factory_kwargs(self, device, dtype, module_info, training):
        for module, _, _ in self._each(module_info, device, dtype):
            for tensor in (*module.parameters(), *module.buffers()):
                self.assertEqual(str(tensor.device), device)
                self.assertEqual(tensor.dtype, dtype)

    @moe_modules
    def test_pickle_and_state_dict(self, device, dtype, module_info, training):
        for module, args, module_input in self._each(module_info, device, dtype):
            expected = module(*args)
            self.assertEqual(pickle.loads(pickle.dumps(module))(*args), expected)
            file = io.BytesIO()
            torch.save(module.state_dict(), file)
            file.seek(0)
            arguments = module_input.constructor_input
            other = module_info.module_cls(*arguments.args, **arguments.kwargs)
            other.to(device, dtype).load_state_dict(torch.load(file))
            self.assertEqual(other(*args), expected)

    @moe_modules
    def test_non_contiguous_tensors(self, device, dtype, module_info, training):
        for module, args, _ in self._each(module_info, device, dtype, True):
            leaves = [args[0], *module.parameters()]
            output = module(*args)
            grad = torch.randn_like(output)
            expected = torch.autograd.grad(output, leaves, grad)
            strided = noncontiguous_like(args[0].detach()).requires_grad_()
            self.assertFalse(strided.is_contiguous())
            actual = module(strided)
            self.assertEqual(actual, output)
            leaves[0] = strided
            self.assertEqual(
                torch.autograd.grad(actual, leaves, noncontiguous_like(grad)), expected
            )

    @modules(
        [info for info in module_db if info.module_cls is nn.MoE],
        allowed_dtypes=[torch.double],
    )
    def test_grad(self, device, dtype, module_info, training):
        for module, args, _ in self._each(module_info, device, dtype, True):
            names = [name for name, _ in module.named_parameters()]

            def function(x, *parameters):
                state = dict(zip(names, parameters))
                kwargs = {"need_routing": True}
                call = torch.func.functional_call(module, state, (x,), kwargs)
                return call[:2]

            self.assertTrue(gradcheck(function, (*args, *module.parameters())))

    @modules(
        [info for info in module_db if info.module_cls is nn.MoE],
        allowed_dtypes=[torch.float],
    )
    def test_errors(self, device, dtype, module_info, training):
        errors = module_info.module_error_inputs_func(
            module_info, device, dtype, requires_grad=False, training=True
        )
        self.assertEqual({e.error_on for e in errors}, set(ModuleErrorEnum))
        for error in errors:
            arguments = error.module_error_input.constructor_input
            forward = error.module_error_input.forward_input
            with self.assertRaisesRegex(error.error_type, error.error_regex):
                module = nn.MoE(*arguments.args, **arguments.kwargs)
                self.assertEqual(error.error_on, ModuleErrorEnum.FORWARD_ERROR)
                module(*forward.args)


instantiate_parametrized_tests(TestMoEModule)
instantiate_device_type_tests(TestMoEModuleInfo, globals(), only_for="cpu")

if __name__ == "__main__":
    run_tests()
