"""Time F.moe_topk on the CPU next to a stable sort and to softmax and topk.

::

    python benchmarks/moe/cpu_router.py --threads 1 --out benchmarks/moe/results/cpu_router.json

All three normalize the weights. The order of equal scores is undefined in topk. The logits
differ in every call, so that a branch predictor cannot learn them.

``orders`` sorts the logits in several ways, the best and the worst for the peers. A row
is lost if ours takes more than 1.1 times as long as the faster peer.
"""

import itertools
import statistics
from collections.abc import Callable

from peers import route
from report import parse, progress, show
from shapes import ROUTER_SHAPES

import torch
import torch.nn.functional as F
from torch import Tensor

from measure import interleaved_seconds, ratio_record, save, spread


LOGITS = 16  # tensors of them, in turns


def sort(logits_TE: Tensor, k: int) -> tuple[Tensor, Tensor]:
    scores_TE = logits_TE.softmax(-1)
    order_TE = scores_TE.sort(dim=-1, descending=True, stable=True).indices
    indices_TK = order_TE[:, :k]
    weights_TK = scores_TE.gather(-1, indices_TK)
    return indices_TK, weights_TK / weights_TK.sum(-1, keepdim=True)


PEERS = ("sort", "topk")
ROUTERS = {"moe_topk": F.moe_topk, "sort": sort, "topk": route}
ORDERS: dict[str, Callable[[int, int], Tensor]] = {
    "ascending": lambda T, E: (torch.arange(E) / E).repeat(T, 1),
    "descending": lambda T, E: (torch.arange(E, 0, -1) / E).repeat(T, 1),
    "random": lambda T, E: torch.randn(T, E),
    "equal": lambda T, E: torch.zeros(T, E),
    "few values": lambda T, E: torch.randint(5, (T, E)).float(),
}


def seconds_of(T: int, E: int, k: int, rounds: int, order="random") -> dict:
    calls = {}
    for name, router in ROUTERS.items():
        logits = itertools.cycle([ORDERS[order](T, E) for _ in range(LOGITS)])
        calls[name] = lambda router=router, logits=logits: router(next(logits), k)
    return interleaved_seconds(calls, rounds=rounds)


def measure(shape: tuple[int, int, int], rounds: int) -> dict[str, object]:
    T, E, k = shape
    ours, *others = seconds_of(T, E, k, rounds).values()
    milliseconds = spread(1e3 * s for s in ours)._asdict()
    row = {"T": T, "E": E, "k": k, "milliseconds": milliseconds}
    row |= {f"{p}_to_ours": ratio_record(s, ours) for p, s in zip(PEERS, others)}
    return row


def measure_orders() -> list[dict[str, object]]:
    """Ratios of medians, each in one line of the results."""
    cases = [
        (T, E, k, order)
        for T, E in itertools.product((1, 64), (8, 64, 128, 256, 1024, 4096))
        for k in sorted({1, 2, 8, E // 8, E // 4, E // 2, E})
        for order in ORDERS
        if k <= E
    ]
    rows = []
    with progress("orders", len(cases)) as advance:
        for T, E, k, order in cases:
            rounds = max(21, min(60, 2_000_000 // (T * E)))
            seconds = seconds_of(T, E, k, rounds, order).values()
            ours, *others = map(statistics.median, seconds)
            row = {"T": T, "E": E, "k": k, "order": order}
            row["microseconds"] = round(1e6 * ours, 1)
            ratios = [round(other / ours, 2) for other in others]
            row |= {f"{p}_to_ours": ratio for p, ratio in zip(PEERS, ratios)}
            rows.append(row | {"best_peer_to_ours": min(ratios)})
            advance()
    return rows


def main() -> None:
    args = parse(__doc__, rounds=200, threads=int)
    if args.threads:
        torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    rows = [measure(shape, args.rounds) for shape in ROUTER_SHAPES]
    show("F.moe_topk on the CPU", rows)
    orders = measure_orders()
    lost = [row for row in orders if row["best_peer_to_ours"] < 1 / 1.1]
    show(f"Lost: {len(lost)} of {len(orders)} rows", lost, list(orders[0]))
    save(args.out, rows=rows, orders=orders)


if __name__ == "__main__":
    main()
