"""Which kernel runs the Mixture-of-Experts functionals on an accelerator."""

import contextlib
import enum
from collections.abc import Iterable, Iterator


__all__ = ["MoeBackend", "moe_kernel"]


class MoeBackend(enum.Enum):
    """A kernel of :func:`torch.nn.functional.moe_mlp` for tensors on an accelerator.

    On CPU no backend selects or excludes a kernel.

    Attributes:
        TRITON: fused Triton kernels; CUDA only, see
            torch/_native/ops/moe/triton_impl.py for what they serve.
        COMPOSITE: other PyTorch operators; any device, dtype and shape.
    """

    TRITON = "triton"
    COMPOSITE = "composite"


# In order of preference. Process-wide, as the flags behind sdpa_kernel() are:
# backward runs in threads of its own.
_enabled: tuple[MoeBackend, ...] = tuple(MoeBackend)


def _enabled_backends() -> tuple[MoeBackend, ...]:
    return _enabled


def _triton_is_registered() -> bool:
    from torch._native.registry import _graphs

    nodes = _graphs.get(("aten", "_moe_mlp", "CUDA"), [])
    return any(node.dsl_name == "triton" and node.active for node in nodes)


@contextlib.contextmanager
def moe_kernel(backends: MoeBackend | Iterable[MoeBackend]) -> Iterator[None]:
    r"""Context manager that restricts the kernels of the Mixture-of-Experts functionals.

    .. warning:: This function is a prototype and subject to change.

    By default the fastest kernel that can run a call runs it, and
    :attr:`MoeBackend.COMPOSITE` runs the rest. Inside this context only
    ``backends`` may; a call that none of them can run raises an error that says
    why, instead of falling back. ``TORCH_LOGS="+native_dsl"`` shows the choice of
    every call.

    The setting holds for the whole process, not only for the calling thread, and
    for the backward passes that run while it is active.

    Args:
        backends (MoeBackend or Iterable[MoeBackend]): the kernels that may run.

    Raises:
        ValueError: ``backends`` is empty or holds something else.
        RuntimeError: only :attr:`MoeBackend.TRITON` is allowed, and this build or
            environment has no Triton kernels.

    Example:

    .. code-block:: python

        from torch.nn.utils.moe_kernel import moe_kernel, MoeBackend

        with moe_kernel(MoeBackend.TRITON):
            y = torch.nn.functional.moe_mlp(x, indices, weights, w_in, w_out)
    """
    global _enabled
    chosen = (backends,) if isinstance(backends, MoeBackend) else tuple(backends)
    if not chosen or not all(isinstance(b, MoeBackend) for b in chosen):
        raise ValueError(
            "moe_kernel: backends must be one MoeBackend or several, got "
            f"{backends!r}; choose from {[str(b) for b in MoeBackend]}"
        )
    if chosen == (MoeBackend.TRITON,) and not _triton_is_registered():
        raise RuntimeError(
            "moe_kernel: MoeBackend.TRITON is not available: no Triton kernel is "
            "registered for aten::_moe_mlp on CUDA (a CUDA build with Triton >= 3.6 "
            "and TORCH_DISABLE_NATIVE_JIT unset is needed)"
        )
    previous = _enabled
    _enabled = chosen
    try:
        yield
    finally:
        _enabled = previous
