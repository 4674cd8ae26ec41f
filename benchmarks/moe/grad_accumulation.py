"""Micro-batches of F.moe_mlp: gradients by autograd, and added to ``.grad`` in the cache.

    python benchmarks/moe/grad_accumulation.py --out benchmarks/moe/results/grad_accumulation.json

A call is forward and backward into an existing ``.grad``, as every micro-batch after the first is, and
every step of an optimizer that zeroes gradients in place. "now" is autograd's way, "fused" is that of
moe_mlp_accumulating; grouped_mm is the peer of the CPU rows. All take turns, on the same weights.
"""

import argparse
import pathlib
from collections.abc import Callable

from peers import sorted_grouped_mm
from report import mib, show
from shapes import ACCUMULATION_SHAPES, make_operands, Operands, Shape

import torch
import torch.nn.functional as F
from torch.nn.utils._moe_grad_accumulation import moe_mlp_accumulating

from measure import (
    interleaved_seconds,
    peak_bytes,
    provenance,
    ratio_record,
    spread,
    write_json,
)


FORMS = {
    "fused": moe_mlp_accumulating,
    "now": F.moe_mlp,
    "grouped_mm": sorted_grouped_mm,
}


def micro_batch(operands: Operands, form: Callable) -> Callable[[], list[torch.Tensor]]:
    """Forward and backward into gradients that exist; returns them."""
    w_in, w_out = (w.detach().requires_grad_() for w in (operands.w_in, operands.w_out))
    w_in.grad, w_out.grad = torch.zeros_like(w_in), torch.zeros_like(w_out)

    def call() -> list[torch.Tensor]:
        x, s = (t.detach().requires_grad_() for t in (operands.x, operands.weights))
        form(x, operands.ids, s, w_in, w_out).backward(operands.grad)
        return [w_in.grad, w_out.grad, x.grad, s.grad]

    return call


def measure(shape: Shape, rounds: int) -> dict[str, object]:
    operands = make_operands(shape, weights_dtype=torch.float32)
    calls = {name: micro_batch(operands, form) for name, form in FORMS.items()}
    for _ in range(2):
        same = [torch.equal(a, b) for a, b in zip(calls["fused"](), calls["now"]())]
        if not all(same):
            raise AssertionError(f"{shape.name}: other bits: {same}")
    seconds = interleaved_seconds(calls, rounds=rounds, warmup=1)
    row: dict[str, object] = {"id": shape.name, "shape": shape.sizes()}
    row["milliseconds"] = {n: spread([1e3 * v for v in s]) for n, s in seconds.items()}
    row["peak_bytes"] = {name: peak_bytes(call) for name, call in calls.items()}
    for name in ("now", "grouped_mm"):
        row[f"{name}_to_fused"] = ratio_record(seconds[name], seconds["fused"])
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, help="JSON to write")
    parser.add_argument("--rounds", type=int, default=11)
    arguments = parser.parse_args()
    rows = [measure(shape, arguments.rounds) for shape in ACCUMULATION_SHAPES]

    def ratio(name: str) -> Callable[[dict], str]:
        return lambda r: "{:.2f} [{:.2f}, {:.2f}]".format(
            r[f"{name}_to_fused"]["median"], *r[f"{name}_to_fused"]["interval"]
        )

    columns = {"T-D-F-E-K": "id", "ms": lambda r: r["milliseconds"]["fused"].median}
    columns |= {f"{n} / fused": ratio(n) for n in ("now", "grouped_mm")}
    columns |= {f"peak MiB, {n}": lambda r, n=n: mib(r["peak_bytes"][n]) for n in FORMS}
    show("A micro-batch after the first, bfloat16", rows, columns)
    if arguments.out:
        write_json({**provenance(), "rows": rows}, arguments.out)


if __name__ == "__main__":
    main()
