"""Show, on the torch that runs this file, what ``F.grouped_mm`` lacks today.

Every row runs a short snippet and records what happened, so that the claims of
RFC.md about the gap can be re-checked against any PyTorch release::

    python benchmarks/moe/grouped_mm_gaps.py --out benchmarks/moe/results/grouped_mm_gaps.json

Each probe returns ``(closed, evidence)``: ``closed`` is True when the gap no
longer exists in this torch.
"""

import pathlib
from collections.abc import Callable

from report import make_parser, show

import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from measure import provenance, write_json


def operands(
    dtype: torch.dtype = torch.bfloat16, offs: tuple[int, ...] = (16, 32)
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """32 rows, two experts, K = N = 32: the smallest legal operands."""
    torch.manual_seed(0)
    mat_a = torch.randn(32, 32, dtype=dtype)
    mat_b = torch.randn(len(offs), 32, 32, dtype=dtype).transpose(-2, -1)
    return mat_a, mat_b, torch.tensor(offs, dtype=torch.int32)


def error_of(function: Callable[[], object]) -> str | None:
    try:
        function()
    except Exception as error:
        return str(error).splitlines()[0]
    return None


def flop_formula() -> tuple[bool, str]:
    mat_a, mat_b, offs = operands()
    with FlopCounterMode(display=False) as counter:
        F.grouped_mm(mat_a, mat_b, offs=offs)
    counted, expected = counter.get_total_flops(), 2 * 32 * 32 * 32
    return counted == expected, f"{counted} FLOPs counted, {expected} executed"


def autocast() -> tuple[bool, str]:
    mat_a, mat_b, offs = operands(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        ours, mm = F.grouped_mm(mat_a, mat_b, offs=offs).dtype, (mat_a @ mat_a).dtype
    return ours == mm, f"under bfloat16 autocast grouped_mm gives {ours}, mm gives {mm}"


def op_info() -> tuple[bool, str]:
    from torch.testing._internal.common_methods_invocations import op_db

    names = [op.name for op in op_db if "grouped_mm" in op.name]
    return bool(names), f"OpInfos whose name has grouped_mm: {names}"


def bias() -> tuple[bool, str]:
    mat_a, mat_b, offs = operands()
    error = error_of(
        lambda: F.grouped_mm(
            mat_a, mat_b, offs=offs, bias=torch.zeros(32, dtype=mat_a.dtype)
        )
    )
    return error is None, error or "accepted"


def expanded_gradient() -> tuple[bool, str]:
    mat_a, mat_b, offs = operands()
    mat_a.requires_grad_()
    error = error_of(lambda: F.grouped_mm(mat_a, mat_b, offs=offs).sum().backward())
    return error is None, error or "out.sum().backward() works"


def decreasing_offs() -> tuple[bool, str]:
    mat_a, mat_b, offs = operands(offs=(24, 8))
    error = error_of(lambda: F.grouped_mm(mat_a, mat_b, offs=offs))
    return error is not None, error or "offs = [24, 8] is accepted without an error"


def tail_rows() -> tuple[bool, str]:
    """Rows at and beyond ``offs[-1]``: are they defined?

    The caching of freed CPU memory makes uninitialised rows visible: blocks of
    the output's size are filled with NaN and freed just before the call.
    """
    mat_a, mat_b, offs = operands(offs=(8, 16))
    dirty = 0
    for _ in range(50):
        poison = [
            torch.full((32, 32), float("nan"), dtype=mat_a.dtype) for _ in range(8)
        ]
        del poison
        dirty += int(F.grouped_mm(mat_a, mat_b, offs=offs)[16:].isnan().any())
    return dirty == 0, f"NaN found in the tail rows in {dirty} of 50 calls"


def row_alignment() -> tuple[bool, str]:
    mat_a = torch.randn(8, 20, dtype=torch.bfloat16)
    mat_b = torch.randn(2, 20, 32, dtype=torch.bfloat16)
    offs = torch.tensor([4, 8], dtype=torch.int32)
    error = error_of(lambda: F.grouped_mm(mat_a, mat_b, offs=offs))
    return error is None, error or "K = 20 in bfloat16 works"


def float64() -> tuple[bool, str]:
    mat_a, mat_b, offs = operands(torch.float64)
    error = error_of(lambda: F.grouped_mm(mat_a, mat_b, offs=offs))
    return error is None, error or "float64 works (gradcheck is possible)"


PROBES = (
    flop_formula,
    autocast,
    op_info,
    bias,
    expanded_gradient,
    decreasing_offs,
    tail_rows,
    row_alignment,
    float64,
)


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=pathlib.Path, help="also write the rows as JSON")
    args = parser.parse_args()
    found = [(probe.__name__, *probe()) for probe in PROBES]
    rows = [dict(zip(("gap", "closed", "evidence"), values)) for values in found]
    show("Gaps of F.grouped_mm", rows)
    if args.out:
        record = {**provenance(), "rows": rows}
        del record["git"]  # the rows are of a torch, not of this tree
        write_json(record, args.out)


if __name__ == "__main__":
    main()
