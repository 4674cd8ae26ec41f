"""Time F.moe_topk on the CPU next to a stable sort and to softmax and topk.

::

    python benchmarks/moe/cpu_router.py --out benchmarks/moe/results/cpu_router.json

All three normalize the weights. The order in which topk puts equal scores is undefined. The logits
are others in every call: what a branch predictor learns from some is of no use for the next.
"""

import argparse
import itertools
import pathlib

from peers import route
from report import show
from shapes import ROUTER_SHAPES

import torch
import torch.nn.functional as F
from torch import Tensor

from measure import (
    interleaved_seconds,
    provenance,
    ratio_record,
    spread,
    write_json,
)


LOGITS = 16  # tensors of them, in turns


def sort(logits_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    scores_TE = logits_TE.softmax(-1)
    order_TE = scores_TE.sort(dim=-1, descending=True, stable=True).indices
    indices_TK = order_TE[:, :k]
    weights_TK = scores_TE.gather(-1, indices_TK)
    return indices_TK, weights_TK / weights_TK.sum(-1, keepdim=True)


ROUTERS = {"moe_topk": F.moe_topk, "sort": sort, "topk": route}


def measure(shape: tuple[int, int, int], rounds: int) -> dict[str, object]:
    T, E, k = shape
    calls = {}
    for name, router in ROUTERS.items():
        logits = itertools.cycle([torch.randn(T, E) for _ in range(LOGITS)])
        calls[name] = lambda router=router, logits=logits: router(next(logits), k)
    seconds = interleaved_seconds(calls, rounds=rounds)
    ours = seconds["moe_topk"]
    row = {
        "T": T,
        "E": E,
        "k": k,
        "milliseconds": spread(1e3 * s for s in ours)._asdict(),
    }
    peers = ("sort", "topk")
    return row | {f"{p}_to_ours": ratio_record(seconds[p], ours) for p in peers}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, help="JSON to write")
    parser.add_argument("--rounds", type=int, default=200, help="calls of each router")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    rows = [measure(shape, arguments.rounds) for shape in ROUTER_SHAPES]
    median = {n: lambda r, n=n: r[n]["median"] for n in list(rows[0])[3:]}
    show("F.moe_topk on the CPU", rows, {"T": "T", "E": "E", "k": "k"} | median)
    if arguments.out:
        write_json({**provenance(), "rows": rows}, arguments.out)


if __name__ == "__main__":
    main()
