"""Show, on the torch that runs this file, what ``F.grouped_mm`` lacks today.

Every row runs a short snippet and records what happened, so that the claims of
RFC.md about the gap can be re-checked against any PyTorch release::

    python benchmarks/moe/grouped_mm_gaps.py --out benchmarks/moe/results/grouped_mm_gaps.json

Each probe returns ``(closed, evidence)``: ``closed`` is True when the gap no
longer exists in this torch.
"""

from collections.abc import Callable

from report import parse, show

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from measure import provenance, write_json


def operands(
    dtype: torch.dtype = torch.bfloat16, offs: tuple[int, ...] = (16, 32)
) -> tuple[torch.Tensor, torch.Tensor, dict]:
    """32 rows, two experts, K = N = 32: the smallest legal operands."""
    torch.manual_seed(0)
    mat_a = torch.randn(32, 32, dtype=dtype)
    mat_b = torch.randn(len(offs), 32, 32, dtype=dtype).transpose(-2, -1)
    return mat_a, mat_b, {"offs": torch.tensor(offs, dtype=torch.int32)}


def runs(function: Callable[[], object], good: str) -> tuple[bool, str]:
    """Whether ``function`` runs, and the first line of its error if it does not."""
    try:
        function()
    except Exception as error:
        return False, str(error).splitlines()[0]
    return True, good


def flop_formula() -> tuple[bool, str]:
    mat_a, mat_b, offs = operands()
    with FlopCounterMode(display=False) as counter:
        F.grouped_mm(mat_a, mat_b, **offs)
    counted, expected = counter.get_total_flops(), 2 * 32 * 32 * 32
    return counted == expected, f"{counted} FLOPs counted, {expected} executed"


def autocast() -> tuple[bool, str]:
    mat_a, mat_b, offs = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, mm = F.grouped_mm(mat_a, mat_b, **offs).dtype, (mat_a @ mat_a).dtype
    return ours == mm, f"under bfloat16 autocast grouped_mm gives {ours}, mm gives {mm}"


def op_info() -> tuple[bool, str]:
    from torch.testing._internal.common_methods_invocations import op_db

    names = [op.name for op in op_db if "grouped_mm" in op.name]
    return bool(names), f"OpInfos whose name has grouped_mm: {names}"


def bias() -> tuple[bool, str]:
    mat_a, mat_b, offs = operands()
    zeros = torch.zeros(32, dtype=mat_a.dtype)
    return runs(lambda: F.grouped_mm(mat_a, mat_b, **offs, bias=zeros), "accepted")


def expanded_gradient() -> tuple[bool, str]:
    mat_a, mat_b, offs = operands()
    out = F.grouped_mm(mat_a.requires_grad_(), mat_b, **offs)
    return runs(out.sum().backward, "out.sum().backward() works")


def decreasing_offs() -> tuple[bool, str]:
    mat_a, mat_b, offs = operands(offs=(24, 8))
    good = "offs = [24, 8] is accepted without an error"
    accepted, evidence = runs(lambda: F.grouped_mm(mat_a, mat_b, **offs), good)
    return not accepted, evidence


def tail_rows() -> tuple[bool, str]:
    """Rows at and beyond ``offs[-1]``: are they defined?

    The caching of freed CPU memory makes uninitialised rows visible: blocks of
    the output's size are filled with NaN and freed just before the call.
    """
    mat_a, mat_b, offs = operands(offs=(8, 16))
    dirty = 0
    for _ in range(50):
        poison = [torch.full_like(mat_a, float("nan")) for _ in range(8)]
        del poison
        dirty += int(F.grouped_mm(mat_a, mat_b, **offs)[16:].isnan().any())
    return dirty == 0, f"NaN found in the tail rows in {dirty} of 50 calls"


def row_alignment() -> tuple[bool, str]:
    mat_a = torch.randn(8, 20, dtype=torch.bfloat16)
    mat_b = torch.randn(2, 20, 32, dtype=torch.bfloat16)
    offs = torch.tensor([4, 8], dtype=torch.int32)
    good = "K = 20 in bfloat16 works"
    return runs(lambda: F.grouped_mm(mat_a, mat_b, offs=offs), good)


def float64() -> tuple[bool, str]:
    mat_a, mat_b, offs = operands(torch.float64)
    good = "float64 works (gradcheck is possible)"
    return runs(lambda: F.grouped_mm(mat_a, mat_b, **offs), good)


PROBES = (
    flop_formula, autocast, op_info, bias, expanded_gradient, decreasing_offs, tail_rows,
    row_alignment, float64,
)  # fmt: skip


def main() -> None:
    args = parse(__doc__)
    found = [(probe.__name__, *probe()) for probe in PROBES]
    rows = [dict(zip(("gap", "closed", "evidence"), values)) for values in found]
    show("Gaps of F.grouped_mm", rows)
    if args.out:
        record = {**provenance(), "rows": rows}
        del record["git"]  # the rows are of a torch, not of this tree
        write_json(record, args.out)


if __name__ == "__main__":
    main()
