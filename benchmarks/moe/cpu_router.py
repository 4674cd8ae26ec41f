"""Time F.moe_topk on the CPU next to a stable sort and to softmax and topk.

::

    python benchmarks/moe/cpu_router.py --out benchmarks/moe/results/cpu_router.json

All three normalize the weights. The order in which topk puts equal scores is undefined. The logits
are others in every call: what a branch predictor learns from some is of no use for the next.
"""

import argparse
import itertools
import json
import pathlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from blocks import route
from measure import interleaved_seconds, paired_ratio, provenance, spread


SHAPES = ((1, 128, 8), (64, 128, 8), (512, 64, 8), (2048, 128, 8), (4096, 256, 8))
LOGITS = 16  # tensors of them, in turns


def sort(logits_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    scores_TE = logits_TE.softmax(-1)
    order_TE = scores_TE.sort(dim=-1, descending=True, stable=True).indices
    indices_TK = order_TE[:, :k]
    weights_TK = scores_TE.gather(-1, indices_TK)
    return indices_TK, weights_TK / weights_TK.sum(-1, keepdim=True)


ROUTERS = {"moe_topk": F.moe_topk, "sort": sort, "topk": route}


def measure(shape: tuple[int, int, int], rounds: int) -> dict[str, object]:
    num_tokens, num_experts, k = shape
    tensors = [torch.randn(num_tokens, num_experts) for _ in range(LOGITS)]

    def on_the_next(router: Callable[[Tensor, int], object]) -> Callable[[], object]:
        logits = itertools.cycle(tensors)
        return lambda: router(next(logits), k)

    calls = {name: on_the_next(router) for name, router in ROUTERS.items()}
    seconds = interleaved_seconds(calls, rounds=rounds)
    row: dict[str, object] = {"T": num_tokens, "E": num_experts, "k": k}
    row["milliseconds"] = spread(1e3 * s for s in seconds["moe_topk"])._asdict()
    for name in ("sort", "topk"):
        ratio = paired_ratio(seconds[name], seconds["moe_topk"])
        row[f"{name}_to_ours"] = ratio._asdict()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=pathlib.Path, required=True, help="JSON to write")
    parser.add_argument("--rounds", type=int, default=200, help="calls of each router")
    arguments = parser.parse_args()
    torch.manual_seed(0)
    result = provenance()
    result["rows"] = [measure(shape, arguments.rounds) for shape in SHAPES]
    arguments.out.write_text(json.dumps(result, indent=1) + "\n")
    for row in result["rows"]:
        print(json.dumps(row))


if __name__ == "__main__":
    main()
