# Owner(s): ["module: nn"]
"""The operands of the CPU ops beside memory that cannot be read.

Every operand ends where a page without permissions begins, or begins where one ends: a read outside
of it ends the process. Shapes, strides, dtypes and options are drawn from a seed, in a process of
their own, which says what it runs; results are compared with float64 as well.
"""

import ctypes
import functools
import mmap
import random

from test_moe_low_bit import Layer
from test_moe_mlp_kernels import run_python, skip_without_build
from test_moe_mlp_scaled import scaled_args
from test_scaled_grouped_mm_cpu import draw as draw_scaled

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    IS_LINUX,
    parametrize,
    run_tests,
    slowTest,
    TestCase,
)
from torch.testing._internal.moe_generators import MoeCase
from torch.testing._internal.moe_low_bit import LOW_BIT_FORMATS
from torch.testing._internal.moe_quantized_reference import (
    CODES,
    moe_quantize_reference,
    RECIPES,
    ScaledMlp,
)
from torch.testing._internal.moe_reference import (
    ACTIVATIONS,
    error_and_bound,
    GATED_ACTIVATIONS,
    moe_mlp_backward_reference,
    moe_mlp_backward_unfused,
    moe_mlp_reference,
    moe_mlp_unfused,
    moe_permutation_reference,
    moe_topk_reference,
    MoeMlpGrads,
)
from torch.utils._pytree import tree_map_only


aten = torch.ops.aten
E4M3 = torch.float8_e4m3fn
HALVES = (torch.bfloat16, torch.float16)
# Around the vectors, tiles and blocks of the kernels.
EDGES = (1, 2, 3, 7, 8, 9, 15, 16, 17, 24, 31, 32, 33, 48, 63, 64, 65, 72, 96)


def extent(shape, strides):
    """Elements from the first to the last one."""
    return 1 + sum((n - 1) * stride for n, stride in zip(shape, strides))


def beside_page(tensor, at_end):
    """``tensor`` with its strides, in memory that ends, or begins, at a page without permissions.

    What else can be read there are bytes of 255: NaN as floats.
    """
    if tensor.numel() == 0:
        return tensor
    span = extent(tensor.shape, tensor.stride())
    size = span * tensor.element_size()
    page = mmap.PAGESIZE
    readable = -(-size // page) * page
    memory = mmap.mmap(-1, readable + 2 * page)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    for at in (0, page + readable):
        if ctypes.CDLL(None).mprotect(ctypes.c_void_p(address + at), page, 0) != 0:
            raise OSError("mprotect failed")
    whole = torch.frombuffer(memory, dtype=torch.uint8, offset=page, count=readable)
    whole.fill_(255)
    part = whole[readable - size :] if at_end else whole[:size]
    part.copy_(tensor.as_strided((span,), (1,)).view(torch.uint8))
    return part.view(tensor.dtype).as_strided(tensor.shape, tensor.stride())


class Draw:
    """What one case is made of, all of it by the seed."""

    def __init__(self, seed):
        self.random = random.Random(seed)
        self.generator = torch.manual_seed(seed)
        self.seed, self.at_end = seed, seed % 2 == 0

    def pick(self, *choices):
        return self.random.choice(choices)

    def upto(self, most):
        return self.random.randint(0, most)

    def dtype(self, *others):
        return self.pick(torch.float32, torch.bfloat16, torch.float16, *others)

    def offs(self, count, rows):
        """End rows of ``count`` experts, with a tail after the last one or not."""
        ends = sorted(self.upto(rows) for _ in range(count))
        ends[-1] = self.pick(ends[-1], rows)
        return torch.tensor(ends, dtype=torch.int32)

    def size(self, multiple=1, vectors=0.5):
        """A size of a layer: whole vectors with probability ``vectors``, else an edge or anything."""
        anything = self.pick(1 + self.upto(280), self.pick(*EDGES))
        is_whole = self.random.random() < vectors
        n = 8 * (1 + self.upto(34)) if is_whole else anything
        return -(-n // multiple) * multiple

    def case(self, multiple=1):
        experts = self.pick(1, 1, 2, 4)
        top_k = self.pick(1, min(experts, 2))
        routings = ["uniform", "zipf", "one_expert", "sentinels"]
        if experts // 2 >= top_k:
            routings.append("empty_experts")
        return MoeCase(
            "drawn",
            num_tokens=self.pick(1, 2, 3, 4, 7, 25),
            dim=self.size(multiple, 0.7),
            hidden=self.size(multiple, 0.3),
            num_experts=experts,
            top_k=top_k,
            routing=self.pick(*routings),
            row_alignment=self.pick(1, 1, 1, 4),
            seed=self.seed,
        )

    def activation(self):
        """Keyword arguments, and whether gate and up are to be tensors of their own."""
        name = self.pick("swiglu", self.pick(*ACTIVATIONS))
        kinds = ("halves", "halves", "interleaved", "apart")
        kind = self.pick(*kinds) if name in GATED_ACTIVATIONS else "plain"
        kwargs = {"activation": name}
        if kind == "interleaved":
            kwargs["gate_interleaved"] = True
        return kwargs, kind == "apart"

    def strided(self, tensor):
        """The same numbers with these or other strides, and bytes of 255 in between."""
        if tensor.numel() == 0 or self.pick(True, False):
            return tensor
        strides, step = [0] * tensor.dim(), self.pick(1, 1, 2)
        for dim in self.random.sample(range(tensor.dim()), tensor.dim()):
            strides[dim] = step
            step = step * tensor.shape[dim] + self.pick(0, 0, 3)
        size = extent(tensor.shape, strides) * tensor.element_size()
        flat = torch.full((size,), 255, dtype=torch.uint8)
        is_byte = tensor.element_size() == 1
        numbers = tensor.view(torch.uint8) if is_byte else tensor
        out = flat.view(numbers.dtype).as_strided(tensor.shape, strides)
        return out.copy_(numbers).view(tensor.dtype)

    def call(self, op, *args, any_strides=True, **kwargs):
        """``op`` with every tensor beside a page."""

        def place(tensor):
            tensor = tensor.detach()
            return beside_page(
                self.strided(tensor) if any_strides else tensor, self.at_end
            )

        args, kwargs = tree_map_only(Tensor, place, (args, kwargs))
        return op(*args, **kwargs)


def permutation(draw):
    experts, shape = 1 + draw.upto(40), (draw.upto(40), 1 + draw.upto(3))
    indices = torch.randint(-1, experts + 1, shape).to(
        draw.pick(torch.int32, torch.int64)
    )
    options = {
        "num_rows": draw.pick(None, draw.upto(100)),
        "row_alignment": draw.pick(1, 1, 4, 8),
    }
    actual = draw.call(aten._moe_permutation.default, indices, experts, **options)
    expected = moe_permutation_reference(indices, experts, **options)
    torch.testing.assert_close(tuple(actual), tuple(expected), rtol=0, atol=0)


def topk(draw):
    experts = draw.pick(*EDGES, 128, 300)
    k = 1 + draw.upto(min(experts, 9) - 1)
    # Drawn with more bits than the scores have, so that hardly two of them are nearly equal.
    logits = torch.randn(draw.pick(0, 1, 3, 17), experts).to(draw.dtype(torch.float64))
    options = {
        "score": draw.pick("softmax", "sigmoid"),
        "normalize": draw.pick(True, False),
        "scale": draw.pick(1.0, 2.5),
    }
    groups = {}
    if experts % 4 == 0 and 2 * k <= experts:
        groups = draw.pick({}, {"num_groups": 4, "top_groups": 2})
    bias = draw.pick(None, torch.randn(experts))
    op = aten._moe_topk.default
    indices, weights = draw.call(op, logits, k, bias, **options, **groups)
    leaf = logits.double().requires_grad_()
    expected, reference = moe_topk_reference(leaf, k, bias=bias, **options, **groups)
    torch.testing.assert_close(indices, expected, rtol=0, atol=0)
    close = functools.partial(torch.testing.assert_close, rtol=1e-4, atol=1e-5)
    close(weights.double(), reference.detach())
    grad = torch.randn_like(weights)
    op = aten._moe_topk_backward.default
    actual = draw.call(op, grad, logits, indices, **options)
    if len(logits) > 0:
        (reference,) = torch.autograd.grad(reference, leaf, grad.double())
        tolerance = 0.01 if logits.dtype in HALVES else 1e-4
        close(actual.double(), reference, rtol=tolerance, atol=tolerance * 0.1)


def check_values(actual, exact, yardstick, dtype, name):
    """Wider than check_close: a few numbers may cancel, and a code may round the other way."""
    error, bound = error_and_bound(actual, exact, yardstick, dtype)
    bound = 16 * (bound + torch.finfo(dtype).eps)
    if not error <= bound:
        raise AssertionError(f"{name}: error {error:.3e} exceeds {bound:.3e} ({dtype})")


def check_grads(grads, references, yardsticks, dtype):
    for name, grad, *others in zip(
        MoeMlpGrads._fields, grads, references, yardsticks, strict=True
    ):
        if others[0] is not None:
            check_values(grad, *others, dtype, name)


def mlp(draw):
    dtype = draw.dtype(torch.float64)
    kwargs, is_apart = draw.activation()
    case = draw.case()
    ops = case.operands(
        dtype,
        activation=kwargs["activation"],
        bias=draw.pick(True, False),
        weights_dtype=draw.pick(None, torch.float32, dtype),
    )
    if is_apart:
        ops = ops.split_gate()
    args = ops.args()
    output, preact = draw.call(aten._moe_mlp.default, *args, **kwargs)
    expected = moe_mlp_reference(*args, **kwargs)
    unfused = moe_mlp_unfused(*args, **kwargs)
    check_values(output, expected[0], unfused[0], dtype, "output")
    check_values(preact, expected[1], unfused[1], dtype, "preact")
    mask = [x is not None for x in ops.differentiable()]
    args = (ops.grad_out, *args)
    grads = draw.call(aten._moe_mlp_backward.default, *args, preact, mask, **kwargs)
    expected = moe_mlp_backward_reference(*args, **kwargs)
    check_grads(grads, expected, moe_mlp_backward_unfused(*args, **kwargs), dtype)


def quantize(draw):
    recipe = draw.pick(*RECIPES)
    is_square = recipe is ScalingType.BlockWise128x128
    shape = [draw.pick(*EDGES, 130) for _ in range(draw.pick(2, 2, 3))]
    if len(shape) == 3:
        shape[0] = draw.pick(1, 2)
    x = torch.randn(shape) * torch.exp2(torch.randint(-10, 10, shape))
    x = x.to(draw.dtype())
    options = {"dim": -1 if is_square else draw.pick(-1, -2)}
    options["dtype"] = draw.pick(E4M3, torch.int8)
    if len(shape) == 2 and not is_square and options["dim"] == -2:
        options["dim"] = 0
        options["offs"] = draw.pick(None, draw.offs(3, shape[0]))
    op = aten._moe_quantize.default
    actual = draw.call(op, x, recipe.value, **options)
    expected = moe_quantize_reference(x, recipe.value, **options)
    for result, reference in zip(actual, expected, strict=True):
        if reference.element_size() == 1:
            result, reference = (t.view(torch.uint8) for t in (result, reference))
        torch.testing.assert_close(
            result, reference, rtol=0, atol=0, equal_nan=True, check_stride=False
        )


def low_bit(draw):
    scaling = draw.pick(*dict.fromkeys(fmt.scaling for fmt in LOW_BIT_FORMATS))
    fmt = draw.pick(*(fmt for fmt in LOW_BIT_FORMATS if fmt.scaling is scaling))
    kwargs, is_apart = draw.activation()
    layout = draw.pick("plain", "plain", "panels")
    int8 = fmt.takes_int8_rows and draw.pick(True, False)
    multiple = 32 if int8 else 16 if layout == "panels" else 2 if fmt.bits < 8 else 1
    case = draw.case(multiple)
    dtype = draw.pick(torch.float32, torch.bfloat16) if int8 else draw.dtype()
    options = {"bias": draw.pick(True, False), "w_up": is_apart, **kwargs}
    layer = Layer(case, fmt, dtype, **options)
    call = functools.partial(draw.call, aten._moe_mlp_scaled.default)
    actual = layer.run(call=call, panels=layout == "panels", int8=int8)
    if int8:
        # test_moe_low_bit.py compares these with float64.
        torch.testing.assert_close(actual, layer.run(int8=True), rtol=0, atol=0)
    else:
        args = layer.plain_args(torch.float64)
        reference, _ = moe_mlp_reference(*args, **kwargs)
        unfused, _ = moe_mlp_unfused(*layer.plain_args(dtype), **kwargs)
        check_values(actual, reference, unfused, dtype, f"{fmt.name}, {layout}")


def scaled(draw):
    """The recipes of training, with weights and input that come quantised or not."""
    a, w = CODES[draw.pick(*CODES)]
    dtype = draw.dtype()
    kwargs, is_apart = draw.activation()
    case = draw.case()
    ops = case.operands(dtype, activation=kwargs["activation"], bias=True)
    if is_apart:
        ops = ops.split_gate()
    kwargs["preact_dtype"] = draw.pick(E4M3, torch.int8, None)
    kwargs["hp_wgrad"] = draw.pick(True, False)
    lists = {}
    if draw.pick(True, False):
        is_square = ScalingType(w) is ScalingType.BlockWise128x128
        for name in ("w_in", "w_out", "w_up"):
            weight = getattr(ops, name)
            if weight is not None:
                pairs = [torch._moe_quantize(weight, w, dim=d) for d in (2, 1)]
                lists[name] = list(pairs[0] if is_square else sum(pairs, ()))
        lists["x"] = torch._moe_quantize(ops.input, a)
    args = scaled_args(ops, **lists)
    recipes = {"recipe_a": [a], "recipe_w": [w]}
    op = aten._moe_mlp_scaled.default
    output, *saved = draw.call(op, *args, **recipes, **kwargs)
    op, args = aten._moe_mlp_scaled_backward.default, (ops.grad_out, *args[1:])
    mask = [x is not None for x in ops.differentiable()]
    grads = draw.call(op, *args, *saved, mask, **recipes, **kwargs)
    product = torch.bfloat16 if dtype is torch.bfloat16 else torch.float32
    exact = ScaledMlp(ops, a, w, **kwargs)
    yardstick = ScaledMlp(ops, a, w, dtype=product, **kwargs)
    check_values(output, exact.forward()[0], yardstick.forward()[0], dtype, "output")
    check_grads(grads, exact.backward(), yardstick.backward(), dtype)


def loop(a, b, offs):
    """grouped_mm as one matmul per group, zero where no group is."""
    if offs is None:
        return a @ b
    spans = [slice(*ends) for ends in zip([0, *offs.tolist()], offs.tolist())]
    if a.dim() == 2 and b.dim() == 2:
        return torch.stack([a[:, span] @ b[span] for span in spans])
    out = a.new_zeros(a.shape[-2], b.shape[-1])
    for group, span in enumerate(spans):
        if a.dim() == 2:
            out[span] = a[span] @ b[group]
        else:
            out[:, span] = a[group] @ b[:, span]
    return out


def grouped_mm(draw):
    dtype = draw.dtype(torch.float64)
    groups, length = draw.pick(1, 2, 4), draw.pick(0, *EDGES)
    k, n, m = (draw.pick(*EDGES) for _ in range(3))
    shapes = draw.pick(
        ((length, k), (groups, k, n)),
        ((groups, m, k), (groups, k, n)),
        ((m, length), (length, n)),
        ((groups, m, k), (k, length)),
    )
    mats = [torch.randn(shape).to(dtype) for shape in shapes]
    is_batched = all(len(shape) == 3 for shape in shapes)
    offs = None if is_batched else draw.offs(groups, length)
    actual = draw.call(F.grouped_mm, *mats, offs=offs)
    exact = loop(*(mat.double() for mat in mats), offs)
    check_values(actual, exact, loop(*mats, offs), dtype, "result")


def scaled_grouped_mm(draw):
    recipe = draw.pick(
        ScalingType.RowWise, ScalingType.BlockWise1x32, ScalingType.BlockWise1x128
    )
    rows, depth, cols = draw.pick(0, 32, 160), draw.pick(128, 256), draw.pick(64, 192)
    offs = draw.offs(3, rows // 32) * 32
    a, scale_a, values_a = draw_scaled(recipe, rows, depth)
    w, scale_w, values_w = draw_scaled(recipe, 3, cols, depth)
    args = (a, w.mT, scale_a, recipe, scale_w, recipe)
    actual = draw.call(F.scaled_grouped_mm, *args, offs=offs, any_strides=False)
    exact = loop(values_a, values_w.mT, offs)
    check_values(actual, exact, exact.bfloat16(), torch.bfloat16, "result")


# How many cases of a seed. Most of the code that is written in intrinsics is in `low_bit`.
CASES = {
    permutation: 1,
    topk: 1,
    mlp: 3,
    quantize: 2,
    low_bit: 20,
    scaled: 1,
    grouped_mm: 2,
    scaled_grouped_mm: 1,
}


def run_cases(first, count):
    """What the process of its own runs."""
    for seed in range(first, first + count):
        torch.set_num_threads(1 + seed % 2)
        for case, times in CASES.items():
            for i in range(times):
                print(f"{case.__name__}, seed {times * seed + i}", flush=True)
                case(Draw(times * seed + i))
    print("done", flush=True)


def read_outside(at_end):
    """A read of 64 bytes before or behind a tensor."""
    x = beside_page(torch.ones(5), at_end)
    print("read outside", flush=True)
    ctypes.string_at(x.data_ptr() + (20 if at_end else -64), 64)
    print("done", flush=True)


class TestMoeGuardPages(TestCase):
    def setUp(self):
        super().setUp()
        if not IS_LINUX:
            self.skipTest("mprotect of Linux")

    def run_here(self, call, **switches):
        """The last line that the process wrote, and all of it that tells what went wrong."""
        code = f"import test_moe_guard_pages as t; t.{call}"
        # Threads that wait do not spin: tests share the cores with others.
        switches["OMP_WAIT_POLICY"] = "passive"
        run = run_python("-X", "faulthandler", "-c", code, **switches)
        lines = run.stdout.splitlines()
        last = lines[-1] if lines else ""
        return last, f"{last}: exit status {run.returncode}\n{run.stderr[-4000:]}"

    def check_cases(self, first, count, **switches):
        last, message = self.run_here(f"run_cases({first}, {count})", **switches)
        self.assertEqual(last, "done", message)

    @parametrize("at_end", [False, True])
    def test_harness(self, at_end):
        last, message = self.run_here(f"read_outside({at_end})")
        self.assertEqual(last, "read outside")
        self.assertIn("Segmentation fault", message)

    def test_cases(self):
        self.check_cases(0, 24)

    @slowTest
    def test_many_cases(self):
        self.check_cases(1000, 1000)

    @parametrize("capability", ["avx2", "default"])
    def test_other_builds(self, capability):
        """The kernels as compiled for CPUs that have less."""
        skip_without_build(self, capability)
        self.check_cases(0, 60, ATEN_CPU_CAPABILITY=capability)


instantiate_parametrized_tests(TestMoeGuardPages)

if __name__ == "__main__":
    run_tests()
