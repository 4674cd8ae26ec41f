"""Which kernel runs the Mixture-of-Experts functionals on an accelerator."""

import contextlib
import enum
from collections.abc import Iterable, Iterator

import torch


__all__ = ["MoeBackend", "moe_kernel"]


class MoeBackend(enum.Enum):
    """A kernel of :func:`torch.nn.functional.moe_mlp` for tensors on an accelerator.

    Backends do not affect the kernels on CPU.

    Attributes:
        CUTEDSL: Triton kernels around grouped matmuls in the CuTe DSL. The matmuls are
            compiled at their first use. CUDA only, see torch/_native/ops/moe/cutedsl_impl.py
            for what they serve.
        TRITON: fused Triton kernels; CUDA and ROCm, see
            torch/_native/ops/moe/triton_impl.py for what they serve.
        COMPOSITE: other PyTorch operators; any device, dtype and shape.
    """

    # In the order in which they are asked.
    CUTEDSL = "cutedsl"
    TRITON = "triton"
    COMPOSITE = "composite"


# Process-wide, like the flags behind sdpa_kernel(), because backward runs in its own
# threads. None outside of moe_kernel().
_enabled: tuple[MoeBackend, ...] | None = None

# What each backend needs, for the error when it is unavailable.
_NEEDS = {
    MoeBackend.CUTEDSL: "a CUDA build, nvidia-cutlass-dsl in a version of "
    "torch/_native/cutedsl_utils.py and apache-tvm-ffi are needed",
    MoeBackend.TRITON: "a CUDA build with Triton >= 3.6 and TORCH_DISABLE_NATIVE_JIT "
    "unset is needed",
}


def _enabled_backends() -> tuple[MoeBackend, ...]:
    return (MoeBackend.COMPOSITE,) if _enabled is None else _enabled


def _is_chosen() -> bool:
    """Whether a moe_kernel() is active. If not, torch/_native/ops/moe/proven.py adds to the default."""
    return _enabled is not None


def _is_registered(backend: MoeBackend) -> bool:
    from torch._native.registry import _graphs

    nodes = _graphs.get(("aten", "_moe_mlp", "CUDA"), [])
    return any(node.dsl_name == backend.value and node.active for node in nodes)


@contextlib.contextmanager
def moe_kernel(backends: MoeBackend | Iterable[MoeBackend]) -> Iterator[None]:
    r"""Context manager that chooses the kernels of the Mixture-of-Experts functionals.

    .. warning:: This function is a prototype and subject to change.

    By default :attr:`MoeBackend.COMPOSITE` runs every call. The exceptions are GPU architectures on
    which the kernels of :attr:`MoeBackend.TRITON` have been run: torch/_native/ops/moe/proven.py lists
    them by operator, and there are none yet. Inside this context only ``backends`` run. Each call uses the first
    of them, in the order of :class:`MoeBackend`, that supports it. If none does, the call raises
    an error that says why, instead of falling back. ``TORCH_LOGS="+native_dsl"`` shows the choice
    of every call.

    The setting holds for the whole process, not only for the calling thread. It also holds
    for backward passes that run while it is active. It only affects operators in eager mode. For
    :func:`torch.compile`, ``torch._inductor.config.triton.moe_kernels`` decides whether Triton
    kernels replace the operators. If that setting is None, the same list decides.

    Args:
        backends (MoeBackend or Iterable[MoeBackend]): the kernels that may run.

    Raises:
        ValueError: ``backends`` is empty or holds something else.
        RuntimeError: this build or environment has none of ``backends``.

    Example:

    .. code-block:: python

        from torch.nn.utils.moe_kernel import moe_kernel, MoeBackend

        # Triton for the calls that it supports, other operators for the rest
        with moe_kernel([MoeBackend.TRITON, MoeBackend.COMPOSITE]):
            y = torch.nn.functional.moe_mlp(x, indices, weights, w_in, w_out)
    """
    global _enabled
    chosen = (backends,) if isinstance(backends, MoeBackend) else tuple(backends)
    if not chosen or not all(isinstance(b, MoeBackend) for b in chosen):
        raise ValueError(
            "moe_kernel: backends must be one MoeBackend or several, got "
            f"{backends!r}; choose from {[str(b) for b in MoeBackend]}"
        )
    if MoeBackend.COMPOSITE not in chosen and not any(map(_is_registered, chosen)):
        needs = "; ".join(f"for {b}, {_NEEDS[b]}" for b in dict.fromkeys(chosen))
        raise RuntimeError(
            f"moe_kernel: {' and '.join(map(str, chosen))} not available: no such kernel "
            f"is registered for aten::_moe_mlp on CUDA ({needs})"
        )
    if torch.compiler.is_dynamo_compiling():
        torch._dynamo.graph_break(
            msg="moe_kernel() is for operators that run: enter it around the compiled function"
        )
    previous = _enabled
    _enabled = tuple(b for b in MoeBackend if b in chosen)
    try:
        yield
    finally:
        _enabled = previous
