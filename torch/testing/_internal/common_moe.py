"""Helpers of the MoE test files: ways to run an op, and checks of what it does."""

import contextlib
import doctest
import functools
import re
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.common_utils import (
    DeterministicGuard,
    parametrize,
    slowTest,
    subtest,
    TestCase,
)
from torch.testing._internal.moe_generators import moe_cases
from torch.testing._internal.moe_reference import ACTIVATIONS, GATED_ACTIVATIONS
from torch.utils._python_dispatch import TorchDispatchMode


if TYPE_CHECKING:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv


def parametrize_named(argument, values):
    """``parametrize`` that names each test by its value."""
    return parametrize(argument, [subtest(v, name=v.name) for v in values])


all_cases = parametrize_named("case", moe_cases())
all_dtypes = parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
# Those with a gate may be interleaved.
ACTIVATION_FORMS = [
    *((name, False) for name in ACTIVATIONS),
    *((name, True) for name in GATED_ACTIVATIONS),
]
all_activations = parametrize("activation,gate_interleaved", ACTIVATION_FORMS)
slow_subtest = functools.partial(subtest, decorators=[slowTest])
TOPK_OPTIONS = {
    "default": {},
    "not_normalized": {"normalize": False},
    "sigmoid": {"score": "sigmoid", "scale": 2.5},
    "groups": {"num_groups": 4, "top_groups": 2},
    "groups_sigmoid": {"score": "sigmoid", "num_groups": 4, "top_groups": 3},
}


def with_backward(name):
    """The overloads of the op ``name`` and of its backward."""
    return tuple(getattr(torch.ops.aten, name + s).default for s in ("", "_backward"))


def call_native(op, *args, **kwargs):
    """Run ``op`` as a user would: the kernel of the operands' device."""
    return op(*args, **kwargs)


def call_composite(op, *args, **kwargs):
    """Run the CompositeExplicitAutograd kernel of ``op``, whatever the device.

    Ops that this kernel calls are dispatched as usual.
    """
    return op._op_dk(torch._C.DispatchKey.CompositeExplicitAutograd, *args, **kwargs)


BACKENDS = {"native": call_native, "composite": call_composite}


def backends_of(op) -> list[str]:
    """Names of the :data:`BACKENDS` that ``op`` has a kernel for in this build."""
    key = "CompositeExplicitAutograd"
    if torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key):
        return list(BACKENDS)
    return ["native"]


def has_cpu_kernel(name: str = "_moe_mlp") -> bool:
    """Whether an op has a kernel on CPU rather than its composite alone.

    In a kernel, the bits of a row do not depend on the other rows. In the composite, matmuls depend on the
    number of rows of an expert, and functions on the position of a value. It also keeps more temporaries.
    """
    return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "CPU")


def bits_of_kernel(name: str = "_moe_mlp") -> dict[str, float]:
    """Tolerances of ``assertEqual``: zero if the op has a kernel that gives the same bits."""
    return {"atol": 0, "rtol": 0} if has_cpu_kernel(name) else {}


def to_meta(value):
    """``value`` with every tensor replaced by a meta tensor of the same shape and strides."""
    return torch.utils._pytree.tree_map_only(Tensor, lambda t: t.to("meta"), value)


def mark_sizes_unbacked(value) -> None:
    """Makes all sizes of the tensors in ``value`` dynamic in torch.compile, except 0 and 1."""
    for x in torch.utils._pytree.tree_leaves(value):
        for dim in range(x.dim() if isinstance(x, Tensor) else 0):
            if x.shape[dim] >= 2:
                torch._dynamo.decorators.mark_unbacked(x, dim)


def traced_size(size: int, kind: str, shape_env: "ShapeEnv") -> int | torch.SymInt:
    """``size`` as a tracer represents it: "static", "backed" or "unbacked"."""
    from torch._dynamo.source import ConstantSource

    if kind == "unbacked":
        return shape_env.create_unbacked_symint()
    if kind == "static":
        return size
    symbol = shape_env.create_symbol(size, source=ConstantSource("size"))
    return shape_env.create_symintnode(symbol, hint=size)


def read_page(test_file: str, name: str) -> str:
    """The documentation page ``name`` of the repository that has ``test_file``."""
    folders = (parent / "docs" / "source" for parent in Path(test_file).parents)
    return next(filter(Path.is_dir, folders)).joinpath(name).read_text()


def run_code_blocks(text: str) -> tuple[int, dict[str, object]]:
    """Runs the Python blocks of a documentation page one after the other.

    Returns:
        tuple: the number of blocks, at least one, and the names that they define.
    """
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    if not blocks:
        raise AssertionError("a page without a Python block")
    names: dict[str, object] = {}
    for block in blocks:
        exec(block, names)
    return len(blocks), names


def run_docstring(thing, names: dict[str, object]) -> None:
    """Runs the examples, at least three, in the docstring of ``thing``. ``names`` are defined there."""
    parser, name = doctest.DocTestParser(), thing.__name__
    test = parser.get_doctest(thing.__doc__, names, name, None, 0)
    failed, tried = doctest.DocTestRunner(verbose=False).run(test)
    if failed or tried < 3:
        raise AssertionError(f"{name}: {failed} of {tried} examples fail")


def fill_uninitialized_memory() -> DeterministicGuard:
    """Fills memory that ops allocate with NaN, or with the largest integer."""
    return DeterministicGuard(True, fill_uninitialized_memory=True)


@contextlib.contextmanager
def num_threads(count: int):
    """Runs ops inside with ``count`` threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class FakeRanksTest(TestCase):
    """Tests in a process group of ``world_size`` ranks. All other ranks are fake."""

    world_size = 8

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        dist.init_process_group("fake", rank=0, world_size=cls.world_size)
        cls.addClassCleanup(dist.destroy_process_group)


class RecordOps(TorchDispatchMode):
    """Records (op, keyword arguments, result) of the ops that run."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        self.calls.append((func, kwargs, result))
        return result

    @property
    def names(self) -> list[str]:
        return [func.overloadpacket.__name__ for func, *_ in self.calls]


class NoHostSyncMode(TorchDispatchMode):
    """Raises on an op for which the host has to read data, for its result or its shape.

    These are ops with a data-dependent tag, such as ``_local_scalar_dense`` of ``item``, and copies
    from another device to the CPU. ``tolist`` reads a CPU tensor without an op, so the mode only
    detects it for tensors of another device.
    """

    DATA_DEPENDENT = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tagged = any(tag in func.tags for tag in self.DATA_DEPENDENT)
        if (tagged and not self._static(func, args, kwargs)) or self._copies_to_host(
            func, args, kwargs
        ):
            raise RuntimeError(f"{func} needs a host sync")
        return func(*args, **kwargs)

    @staticmethod
    def _copies_to_host(func, args, kwargs) -> bool:
        """Whether the op copies to the CPU. ``to``, ``cpu`` and the like call the ops below."""
        aten = torch.ops.aten
        if func is aten._to_copy.default:
            source, target = args[0], kwargs.get("device")
        elif func in (aten.copy_.default, aten.copy.default):
            source, target = args[1], args[0].device
        else:
            return False
        target = source.device if target is None else torch.device(target)
        return target.type == "cpu" and source.device.type != "cpu"

    @staticmethod
    def _static(func, args, kwargs) -> bool:
        """Whether the arguments of a tagged op determine its shape without the data."""
        if func is torch.ops.aten.index.Tensor:
            masks = (torch.bool, torch.uint8)
            return all(i is None or i.dtype not in masks for i in args[1])
        if func is torch.ops.aten.repeat_interleave.Tensor:
            return kwargs.get("output_size") is not None
        return False


@contextlib.contextmanager
def saved_for_backward(exclude=()):
    """Collect what autograd saves: yields a list of tensors, one per storage.

    Args:
        exclude: tensors (parameters) whose storages are not counted.
    """
    storages = {t.untyped_storage().data_ptr() for t in exclude}
    saved: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        key = t.untyped_storage().data_ptr()
        if t.numel() and key not in storages:
            storages.add(key)
            saved.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield saved


def nbytes(tensors) -> int:
    """Bytes of the storages behind ``tensors``: a saved view keeps all of its base alive."""
    return sum(t.untyped_storage().nbytes() for t in tensors)


def saved_bytes_bound(
    dtype: torch.dtype,
    num_tokens: int,
    dim: int,
    gated_hidden: int,
    num_experts: int,
    top_k: int,
) -> int:
    """The most bytes that one MoE layer without padding rows may save, besides parameters.

    Args:
        gated_hidden: g*F
    """
    slots = num_tokens * top_k
    expert_data = dtype.itemsize * (num_tokens * dim + slots * gated_hidden)
    return expert_data + 24 * slots + 8 * num_experts
