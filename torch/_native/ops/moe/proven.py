"""Records which kernels a GPU has run. Only those run by default.

``torch.nn.utils.moe_kernel.moe_kernel`` selects kernels for a call, and ``torch._inductor.config.triton.moe_kernels``
for compiled graphs. Without them an op runs its Triton kernels on an architecture for which
RUNS has each family of FAMILIES[op]. ``benchmarks/moe/lab/summary.py run.json --prove`` writes the rows
from the results of ``benchmarks/moe/gpu_lab.py``, which launches all kernels itself.
"""

from typing import NamedTuple


class Run(NamedTuple):
    """A family of kernels that agreed with float64 in every case of the lab.

    Attributes:
        family: of benchmarks/moe/lab/checks.py.
        arch: "sm_90", "gfx942".
        card: as the driver names it.
        date: of the run, "2026-11-27".
        versions: of torch and Triton.
    """

    family: str
    arch: str
    card: str
    date: str
    versions: str


# --- runs
RUNS: tuple[Run, ...] = ()
# --- end of runs

_SCALED = ("quantize", "fp8_blockwise", "fp8_rowwise", "mxfp8")
FAMILIES: dict[str, tuple[str, ...]] = {
    "_moe_topk": ("topk",),
    "_moe_topk_backward": ("topk",),
    "_moe_permutation": ("permutation",),
    "_moe_mlp": ("up", "down", "layer", "gpt_oss"),
    "_moe_mlp_backward": (
        *("act_backward", "input_grad", "weight_grad", "weight_grad_not_ragged"),
        *("layer", "gpt_oss"),
    ),
    "_moe_quantize": ("quantize",),
    "_moe_mlp_scaled": _SCALED,
    "_moe_mlp_scaled_backward": _SCALED,
}


def has_run(op: str, arch: str) -> bool:
    """Whether a GPU of ``arch`` has run all kernels of ``op``."""
    on_arch = {run.family for run in RUNS if run.arch == arch}
    return on_arch.issuperset(FAMILIES[op])
