# Owner(s): ["module: dsl-native-ops"]
"""Which calls of the MoE ops the Triton kernels take, and what moe_kernel() changes.

Runs without a GPU: the device is mocked. What the kernels compute is tested in
test_moe_triton_interpreter.py.
"""

import logging
import os
import subprocess
import sys
import unittest
from typing import get_args
from unittest import mock

import torch
import torch.nn.functional as F
from torch._native.ops.moe import proven, triton_impl
from torch._native.ops.moe.triton_kernels.experts import (
    GATED_ACTIVATIONS,
    LIMITED_ACTIVATIONS,
    PLAIN_ACTIVATIONS,
)
from torch._native.registry import _graphs
from torch.nn.utils.moe_kernel import _is_registered, moe_kernel, MoeBackend
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
    TestCase,
)
from torch.testing._internal.moe_generators import get_case, MoeCase


def replaced(args, position, value):
    return (*args[:position], value, *args[position + 1 :])


def misaligned(x):
    """``x`` on storage that starts 2 bytes after a 16-byte boundary."""
    return x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)


def mlp_reason(*args, **options):
    return triton_impl.mlp_reason(triton_impl.experts_of(*args, **options))


def mlp_backward_reason(*args, **options):
    return triton_impl.mlp_backward_reason(*triton_impl.backward_of(*args, **options))


class EligibilityTestCase(TestCase):
    """CPU tensors pass for tensors on one GPU of a given compute capability."""

    capability = (9, 0)

    def setUp(self):
        super().setUp()
        # The rule about the kind of device is tested on its own.
        original = triton_impl.device_reason
        is_cuda = mock.PropertyMock(return_value=True)

        def device_reason(tensors, memory=True):
            with mock.patch.object(torch.Tensor, "is_cuda", is_cuda, create=True):
                return original(tensors, memory)

        for patch in (
            mock.patch("torch.nn.utils.moe_kernel._is_registered", lambda b: True),
            mock.patch.object(triton_impl, "device_reason", device_reason),
            mock.patch.object(triton_impl, "capability_of", lambda i: self.capability),
            mock.patch.object(triton_impl.tu, "_try_initialize_driver", lambda: True),
        ):
            patch.start()
            self.addCleanup(patch.stop)

    def args(self, dtype=torch.bfloat16, bias=True, **kwargs):
        case = MoeCase("eligible", dim=32, hidden=48)
        return case.operands(dtype, bias=bias, **kwargs).args()

    def check_error(self, *args, op="_moe_mlp", cond=None, **options):
        """A malformed call is asked for in vain: it raises what the op itself raises."""
        call = getattr(torch.ops.aten, op).default
        with self.assertRaises(Exception) as expected:
            call(*args, **options)
        self.assertIn(f"{op}: ", str(expected.exception))
        cond = cond or getattr(triton_impl, op.replace("_moe", "") + "_cond")
        with moe_kernel(MoeBackend.COMPOSITE):
            self.assertFalse(cond(*args, **options))
        with moe_kernel(MoeBackend):
            with self.assertRaises(type(expected.exception)) as found:
                cond(*args, **options)
        self.assertEqual(str(found.exception), str(expected.exception))


class TestEligibility(EligibilityTestCase):
    @parametrize("capability", [(8, 0), (9, 0), (10, 0), (10, 3)])
    @parametrize("dtype", [torch.bfloat16, torch.float16])
    def test_served(self, capability, dtype):
        self.capability = capability
        self.assertIsNone(mlp_reason(*self.args(dtype)))
        self.assertIsNone(mlp_reason(*self.args(dtype, bias=False)))
        args = self.args(dtype, weights_dtype=dtype)
        self.assertIsNone(mlp_reason(*args))

    @parametrize("capability", [(7, 5), (8, 6), (8, 9), (9, 1), (12, 0)])
    def test_other_capabilities(self, capability):
        self.capability = capability
        reason = mlp_reason(*self.args())
        self.assertIn(f"compute capability {capability}", reason)

    def test_tables_exist_for_every_served_capability(self):
        from torch._native.ops.moe.triton_kernels.configs import table_for_capability

        for capability in triton_impl._CAPABILITIES:
            self.assertIsNotNone(table_for_capability(*capability))
        self.assertIsNone(table_for_capability(8, 6))

    def test_activation_names_agree_with_the_kernels(self):
        gated, plain = GATED_ACTIVATIONS, PLAIN_ACTIVATIONS
        self.assertEqual(get_args(F._MoeGatedActivation), gated)
        self.assertEqual(get_args(F._MoeActivation), (*gated, *plain))

    @parametrize("dtype", [torch.float32, torch.float64])
    def test_other_dtypes(self, dtype):
        self.assertIn("dtype", mlp_reason(*self.args(dtype)))

    @parametrize(
        "dim,hidden,served",
        [(16, 16, True), (48, 32, True), (24, 32, False), (32, 8, False)],
    )
    def test_alignment_of_sizes(self, dim, hidden, served):
        args = MoeCase("a", dim=dim, hidden=hidden).operands(torch.bfloat16).args()
        self.assertEqual(mlp_reason(*args) is None, served)

    def test_weight_storage(self):
        args = self.args()
        transposed = args[1].transpose(1, 2).contiguous().transpose(1, 2)
        self.assertIsNone(mlp_reason(*replaced(args, 1, transposed)))
        strided = torch.empty(*args[1].shape, 2, dtype=args[1].dtype)[..., 0]
        reason = mlp_reason(*replaced(args, 1, strided))
        self.assertIn("neither of the last two dimensions of w_in", reason)
        reason = mlp_reason(*replaced(args, 2, misaligned(args[2])))
        self.assertIn("w_out is not aligned", reason)

    def test_weight_strides(self):
        # Experts inside: a row's offset passes int32, a tile's does not.
        w = torch.empty(8192, 128, 4096, device="meta", dtype=torch.bfloat16)
        self.assertGreater(8191 * w.stride(0), 2**31)
        self.assertIsNone(triton_impl._weight_reason("w_in", w.transpose(0, 1)))
        self.assertIsNone(triton_impl._weight_reason("w_in", w.permute(1, 2, 0)))
        # The last rows of a tile of 256 would wrap around.
        for stride, served in ((2**23, True), (2**23 + 65536, False)):
            w = torch.empty_strided((2, 512, 64), (64, stride, 1), device="meta")
            for view in (w, w.transpose(1, 2)):
                reason = triton_impl._weight_reason("w_in", view)
                self.assertEqual(reason is None, served, reason)
                if not served:
                    self.assertIn("spans more than int32 can count", reason)

    def test_gate_and_up_as_two_weights(self):
        args = self.args()
        gate, up = (w.contiguous() for w in args[1].chunk(2, 1))

        def reason(gate, up, **kwargs):
            return mlp_reason(*replaced(args, 1, gate)[:9], up, **kwargs)

        def flipped(w):
            return w.transpose(1, 2).contiguous().transpose(1, 2)

        self.assertIsNone(reason(gate, up))
        self.assertIsNone(reason(gate, up, activation="swiglu_oai", limit=3.0))
        self.assertIsNone(reason(flipped(gate), flipped(up)))
        self.assertIn("different dimensions", reason(gate, flipped(up)))
        self.assertIn("w_up is not aligned", reason(gate, misaligned(up)))
        malformed = (
            (gate, up.half(), {}),
            (args[1], up, {}),
            (gate, up[:, :-16], {}),
            (gate, up, {"gate_interleaved": True}),
            (gate, up, {"activation": "silu"}),
        )
        for gate, up, options in malformed:
            self.check_error(*replaced(args, 1, gate)[:9], up, **options)

    @parametrize("activation", [*GATED_ACTIVATIONS, *PLAIN_ACTIVATIONS])
    def test_limit(self, activation):
        options = {"activation": activation, "limit": 5.0}
        args = self.args(activation=activation)
        if activation in LIMITED_ACTIVATIONS:
            self.assertIsNone(mlp_reason(*args, **options))
        else:
            self.check_error(*args, **options)

    @parametrize(
        "position,change",
        [
            subtest((0, lambda x: x[:-1]), name="input"),
            subtest((0, lambda x: x[None]), name="input_dim"),
            subtest((1, lambda x: x[:, :-2]), name="w_in"),
            subtest((2, lambda x: x[:-1]), name="w_out"),
            subtest((3, lambda x: x.long()), name="offs_dtype"),
            subtest((4, lambda x: x[:, :1]), name="topk_weights"),
            subtest((4, lambda x: x.double()), name="topk_weights_dtype"),
            subtest((5, lambda x: None), name="row_slots"),
            subtest((6, lambda x: x.long()), name="slot_rows_dtype"),
            subtest((7, lambda x: x[:, :-1]), name="b_in"),
            subtest((8, lambda x: x.float()), name="b_out_dtype"),
        ],
    )
    def test_malformed_calls(self, position, change):
        args = self.args()
        self.check_error(*replaced(args, position, change(args[position])))

    @parametrize(
        "kwargs",
        [
            {"activation": "tanh"},
            {"activation": "relu", "gate_interleaved": True},
            {"alpha": 1.0},
            {"activation": "swiglu_oai", "limit": 0.0},
        ],
    )
    def test_malformed_activations(self, kwargs):
        self.check_error(*self.args(), **kwargs)

    def test_backward(self):
        args = self.args()
        x, w_in, row_slots = args[0], args[1], args[5]
        preact = x.new_empty(len(row_slots), w_in.shape[1])
        mask = [True] * 7
        for grad_out in (x, x[:1].expand_as(x)):
            self.assertIsNone(mlp_backward_reason(grad_out, *args, preact, mask))
        for grad_out, h in ((x, preact[:0]), (x.float(), preact), (x, preact.float())):
            self.check_error(grad_out, *args, h, mask, op="_moe_mlp_backward")

    def test_validation_does_not_compute(self):
        args = self.args()
        x, w_in, row_slots = args[0], args[1], args[5]
        preact = x.new_empty(len(row_slots), w_in.shape[1])
        logits = torch.randn(8, 4)
        indices, weights = torch.ops.aten._moe_topk(logits, 2)
        calls = {
            "_moe_mlp": args,
            "_moe_mlp_backward": (x, *args, preact, [True] * 7),
            "_moe_topk": (logits, 2),
            "_moe_topk_backward": (weights, logits, indices),
            "_moe_permutation": (indices, 4),
        }
        for op, operands in calls.items():
            with torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU]
            ) as profile:
                triton_impl._validate(op, operands, {})
            names = {event.name for event in profile.events()}
            self.assertLessEqual(
                {name for name in names if name.startswith("aten::")},
                {"aten::empty", "aten::zeros_like", "aten::empty_like"},
            )

    def test_permutation(self):
        reason = triton_impl.permutation_reason
        indices = get_case("uniform").topk_indices()
        self.assertIsNone(reason(indices, 4))
        self.assertIsNone(reason(indices.int(), 4, 64, 8))
        self.assertIsNotNone(reason(indices, 5000))
        for args in ((indices.float(), 4), (indices[0], 4), (indices, 0)):
            self.check_error(*args, op="_moe_permutation")
        self.check_error(indices, 4, num_rows=-1, op="_moe_permutation")
        self.check_error(indices, 4, row_alignment=2**30, op="_moe_permutation")
        # A block of rows past the last one is still counted in int32.
        self.assertIsNone(reason(indices, 4, 2**31 - 4097))
        self.assertIsNotNone(reason(indices, 4, 2**31 - 4096))

    @parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
    @parametrize(
        "num_experts,k,options",
        [
            (64, 8, {}),
            (4096, 32, {"score": "sigmoid"}),
            (160, 6, {"num_groups": 8, "top_groups": 3}),
            (256, 8, {"num_groups": 8, "top_groups": 4, "scale": 2.5}),
        ],
    )
    def test_router_served(self, dtype, num_experts, k, options):
        logits = torch.zeros(3, num_experts, dtype=dtype)
        self.assertIsNone(triton_impl.topk_reason(logits, k, **options))
        bias = torch.zeros(num_experts)
        self.assertIsNone(triton_impl.topk_reason(logits, k, bias, **options))
        indices, weights = torch.zeros(3, k, dtype=torch.int64), torch.zeros(3, k)
        self.assertIsNone(triton_impl.topk_backward_reason(weights, logits, indices))

    @parametrize(
        "num_experts,k,kwargs",
        [
            (64, 33, {}),
            (4097, 2, {}),
            # 1367 groups of 3 experts are padded to 2048 of 4.
            (4101, 2, {"num_groups": 1367, "top_groups": 4}),
            (2049 * 2, 2, {"num_groups": 2049, "top_groups": 2}),
            (8, 2, {"bias": torch.zeros(8, dtype=torch.float64)}),
        ],
    )
    def test_router_left_to_the_composite(self, num_experts, k, kwargs):
        logits = torch.zeros(3, num_experts)
        self.assertIsNotNone(triton_impl.topk_reason(logits, k, **kwargs))

    @parametrize(
        "k,kwargs",
        [
            (0, {}),
            (9, {}),
            (2, {"num_groups": 3, "top_groups": 1}),
            (2, {"num_groups": 4, "top_groups": 5}),
            (2, {"num_groups": 4}),
            (3, {"num_groups": 4, "top_groups": 1}),
            (2, {"score": "tanh"}),
            (2, {"bias": torch.zeros(7)}),
        ],
    )
    def test_malformed_router(self, k, kwargs):
        self.check_error(torch.zeros(3, 8), k, op="_moe_topk", **kwargs)

    def test_router_operands(self):
        reason = triton_impl.topk_reason
        self.assertIsNotNone(reason(torch.zeros(3, 8, dtype=torch.float64), 2))
        self.check_error(torch.zeros(2, 3, 8), 2, op="_moe_topk")
        self.assertIn("copy-on-write", reason(torch._lazy_clone(torch.zeros(3, 8)), 2))
        logits, indices = torch.zeros(3, 8), torch.zeros(3, 2, dtype=torch.int64)
        reason = triton_impl.topk_backward_reason
        self.assertIsNone(reason(torch.zeros(3, 2), logits, indices))
        for args in (
            (torch.zeros(3, 1), logits, indices),
            (torch.zeros(3, 2), logits, indices.int()),
            (torch.zeros(3, 2), logits[:2], indices),
        ):
            self.check_error(*args, op="_moe_topk_backward")
        self.assertIn("dtype", reason(torch.zeros(3, 2).half(), logits, indices))
        self.assertIn("no chosen", reason(torch.zeros(3, 0), logits, indices[:, :0]))
        for i in range(2):
            args = [torch.zeros(3, 2), logits, indices]
            args[2 * i] = args[2 * i].to("meta")
            self.check_error(*args, op="_moe_topk_backward")

    def test_copy_on_write(self):
        args = self.args()
        lazy = torch._lazy_clone(args[0])
        reason = mlp_reason(*replaced(args, 0, lazy))
        self.assertIn("copy-on-write", reason)

    def test_rocm(self):
        from torch._native.ops.moe.triton_kernels import configs

        # gfx90a has the compute capability (9, 0).
        for name, served in (
            ("gfx942:sramecc+:xnack-", True),
            ("gfx950", True),
            ("gfx90a", False),
            ("gfx1100", False),
        ):
            with (
                mock.patch.object(torch.version, "hip", "6.4"),
                mock.patch.object(triton_impl, "_gcn_arch", lambda index: name),
            ):
                reason = mlp_reason(*self.args())
            self.assertEqual(reason is None, served, reason)
            self.assertEqual(configs.table_for_gcn_arch(name) is not None, served)


class TestDevice(TestCase):
    def test_cpu_tensors_are_not_served(self):
        args = MoeCase("cpu", dim=32, hidden=48).operands(torch.bfloat16).args()
        self.assertIn("not CUDA", mlp_reason(*args))
        indices = get_case("uniform").topk_indices()
        self.assertIn("not CUDA", triton_impl.permutation_reason(indices, 4))
        self.assertIn("not CUDA", triton_impl.topk_reason(torch.zeros(3, 8), 2))


class TestSelection(EligibilityTestCase):
    def test_default_is_what_a_gpu_has_run(self):
        args = self.args()
        runs = [
            proven.Run(family, "sm_90", "a card", "2026-11-27", "")
            for family in proven.FAMILIES["_moe_mlp"]
        ]
        elsewhere = [run._replace(arch="sm_80") for run in runs]
        cases = ((runs, True), (runs[1:], False), (elsewhere, False), ((), False))
        for rows, runs_it in cases:
            with (
                mock.patch.object(proven, "RUNS", rows),
                mock.patch.object(triton_impl, "_arch_of", lambda device: "sm_90"),
            ):
                self.assertIs(triton_impl._mlp_cond(*args), runs_it)
                # What the kernels do not serve is the composite's, without an error.
                self.assertFalse(triton_impl._mlp_cond(*self.args(torch.float32)))
                with moe_kernel(MoeBackend.COMPOSITE):
                    self.assertFalse(triton_impl._mlp_cond(*args))

    def test_table_of_runs(self):
        registered = {op for (_, op, _) in _graphs if op.startswith("_moe")}
        if registered:  # a CUDA build
            # Ops of low precision come later than the table.
            there = {op for op in proven.FAMILIES if hasattr(torch.ops.aten, op)}
            self.assertEqual(registered, there)
        families = {family for names in proven.FAMILIES.values() for family in names}
        self.assertLessEqual({run.family for run in proven.RUNS}, families)
        for run in proven.RUNS:
            self.assertTrue(all(run), run)

    def test_triton_where_it_can(self):
        with moe_kernel([MoeBackend.TRITON, MoeBackend.COMPOSITE]):
            self.assertTrue(triton_impl._mlp_cond(*self.args()))
            self.assertFalse(triton_impl._mlp_cond(*self.args(torch.float32)))
        self.assertFalse(triton_impl._mlp_cond(*self.args()))

    def test_triton_only_never_falls_back(self):
        with moe_kernel(MoeBackend.TRITON):
            self.assertTrue(triton_impl._mlp_cond(*self.args()))
            with self.assertRaisesRegex(
                RuntimeError, "_moe_mlp: .*dtype torch.float32"
            ):
                triton_impl._mlp_cond(*self.args(torch.float32))
            with self.assertRaisesRegex(
                RuntimeError, "_moe_permutation: .*num_experts"
            ):
                triton_impl._permutation_cond(get_case("uniform").topk_indices(), 5000)
            with self.assertRaisesRegex(RuntimeError, "_moe_topk: .*k is 40"):
                triton_impl._topk_cond(torch.zeros(2, 64), 40)
            with mock.patch.object(
                triton_impl.tu, "_try_initialize_driver", lambda: False
            ):
                with self.assertRaisesRegex(RuntimeError, "no driver"):
                    triton_impl._mlp_cond(*self.args())

    def test_log_says_which_kernel_runs(self):
        both = moe_kernel([MoeBackend.TRITON, MoeBackend.COMPOSITE])
        with both, self.assertLogs(triton_impl.log, logging.DEBUG) as logs:
            triton_impl._mlp_cond(*self.args())
            triton_impl._mlp_cond(*self.args(torch.float32))
        self.assertIn("_moe_mlp: triton", logs.output[0])
        self.assertIn("_moe_mlp: composite: dtype torch.float32", logs.output[1])


# What a user sees, from a process of its own: imports are counted, logs are configured.
IMPORT_AND_LOG = """
import sys
import torch
assert "torch._native.ops.moe.triton_impl" in sys.modules
loaded = [name for name in ("triton", "cutlass", "torch._inductor") if name in sys.modules]
loaded += [name for name in sys.modules if "ops.moe.triton_kernels." in name]
no_triton = (".experts", ".scaled_operands", ".scaling_rules")
loaded = [name for name in loaded if not name.endswith(no_triton)]
assert not loaded, loaded
assert not torch.cuda.is_initialized()

from torch._native.ops.moe import triton_impl
from torch.nn.utils.moe_kernel import moe_kernel, MoeBackend
assert not triton_impl._topk_cond(torch.zeros(2, 8), 2)
with moe_kernel(MoeBackend):
    assert not triton_impl._topk_cond(torch.zeros(2, 8), 2)
    triton_impl.device_reason = lambda *_: None
    assert triton_impl._topk_cond(torch.zeros(2, 8), 2)
assert "triton" not in sys.modules
assert not torch.cuda.is_initialized()
"""


@unittest.skipIf(
    not torch.backends.cuda.is_built(),
    "torch._native registers Triton kernels in CUDA builds only",
)
class TestRegistration(TestCase):
    def test_import_loads_no_dsl_and_logs_name_the_backend(self):
        env = {**os.environ, "TORCH_LOGS": "+native_dsl"}
        run = subprocess.run(
            [sys.executable, "-c", IMPORT_AND_LOG],
            env=env,
            capture_output=True,
            text=True,
        )
        self.assertEqual(run.returncode, 0, run.stderr)
        self.assertIn("_moe_topk: composite: device is cpu, not CUDA", run.stderr)
        self.assertIn("_moe_topk: triton\n", run.stderr)

    @parametrize(
        "op",
        [
            "_moe_topk",
            "_moe_topk_backward",
            "_moe_permutation",
            "_moe_mlp",
            "_moe_mlp_backward",
        ],
    )
    def test_router_is_installed_for_cuda(self, op):
        from torch._native.registry import _graphs, get_dsl_operations

        self.assertIn(op, get_dsl_operations("triton"))
        nodes = _graphs["aten", op, "CUDA"]
        # After whatever else is installed: it is asked last.
        self.assertEqual(nodes[-1].dsl_name, "triton")
        self.assertTrue(all(node.active for node in nodes))
        self.assertTrue(
            torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{op}", "CUDA")
        )
        self.assertTrue(_is_registered(MoeBackend.TRITON))

    def test_disabled_operation_counts_as_not_there(self):
        import torch.backends.python_native as native

        with native.operations_disabled("_moe_mlp"):
            self.assertFalse(_is_registered(MoeBackend.TRITON))
            with self.assertRaisesRegex(RuntimeError, "not available"):
                with moe_kernel(MoeBackend.TRITON):
                    pass
        self.assertTrue(_is_registered(MoeBackend.TRITON))

    def test_implementation_hands_its_arguments_to_the_launcher(self):
        args = MoeCase("router", dim=32, hidden=48).operands(torch.bfloat16).args()
        sentinel = (torch.zeros(1), torch.ones(1))
        calls = []

        def launcher(plan, *args, **kwargs):
            calls.append((args, kwargs))
            return sentinel

        with (
            mock.patch.object(triton_impl, "device_reason", lambda *_: None),
            mock.patch.object(triton_impl, "launch_plan", lambda index: None),
            mock.patch.object(triton_impl, "on_device", lambda x: mock.MagicMock()),
            mock.patch(
                "torch._native.ops.moe.triton_kernels.launch.moe_mlp_forward", launcher
            ),
        ):
            with moe_kernel(MoeBackend):
                self.assertTrue(triton_impl._mlp_cond(*args, compute_preact=False))
            out = triton_impl._mlp_impl(*args, activation="reglu", compute_preact=False)
        self.assertIs(out, sentinel)
        (((experts,), kwargs),) = calls
        self.assertEqual(len(experts.tensors), sum(x is not None for x in args))
        self.assertEqual(experts.act.activation, "reglu")
        self.assertEqual(kwargs, {"compute_preact": False})


instantiate_parametrized_tests(TestEligibility)
instantiate_parametrized_tests(TestSelection)
instantiate_parametrized_tests(TestRegistration)

if __name__ == "__main__":
    run_tests()
