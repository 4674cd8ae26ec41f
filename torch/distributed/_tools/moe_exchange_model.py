# mypy: allow-untyped-defs
"""Seconds and bytes of an exchange of tokens, as pure functions of shapes and a profile.

An all-to-all takes a start plus its slowest level. The bytes of a level follow
from the ranks of the K experts of a token. Contract and notation are :mod:`.moe_cost_model`'s.
"""

from __future__ import annotations

import math
from typing import NamedTuple, TYPE_CHECKING

from torch.distributed._tools.moe_arguments import check
from torch.distributed._tools.moe_cost_model import ITEMSIZE, smooth_max, US


if TYPE_CHECKING:
    from torch.distributed._tools.moe_profile import Profile


__all__ = [
    "ALL_TO_ALLS",
    "all_to_all",
    "copies",
    "hit_share",
    "link_seconds",
    "wire_bytes",
]


def link_seconds(
    start: float, rate: float, nbytes: float, messages: float = 1, turn: float = 0.0
) -> float:
    """Seconds of collectives that take ``start`` each, plus bytes to others at ``rate``.

    Bytes of a message beyond ``turn``, unless that is 0, wait for as many bytes of the
    other direction.
    """
    waits = max(0.0, nbytes - messages * turn) if turn else 0.0
    return messages * start + (nbytes + waits) / rate


class Copies(NamedTuple):
    """Copies of a token: to other ranks, to other nodes; and all places, own included."""

    fast: float
    slow: float
    nodes: float
    ranks: float


def hit_share(share: float, num_experts: float, k: int) -> float:
    """Probability that one of the ``k`` experts of a token is in a share of all experts.

    A router chooses different experts, so this is a draw without replacement.
    """
    here = share * num_experts
    return 1 - math.prod(max(0.0, 1 - here / (num_experts - i)) for i in range(k))


def copies(
    ep: int,
    domain: int,
    num_experts: int,
    k: int,
    node_limit: int = 0,
    dedup: bool = True,
) -> Copies:
    """Expected copies of a token with ``k`` different experts of ``num_experts``, all equally likely.

    Args:
        ep (int): ranks that share the experts.
        domain (int): ranks joined by the fast link.
        num_experts (int): E.
        k (int): K.
        node_limit (int): most nodes a token may go to; 0 for any.
        dedup (bool): one copy per rank and one per node, else one per expert.
    """
    nodes = math.ceil(ep / domain)  # one with fewer ranks counts as a full one
    reach = min(nodes, node_limit) if node_limit else nodes
    near = ep if nodes <= reach else reach * domain
    among = max(num_experts * reach / nodes, k)
    to_nodes = reach * hit_share(1 / reach, among, k) if nodes > 1 else 1.0
    ranks = near * hit_share(1 / near, among, k) if ep > 1 else 1.0
    ranks = min(ranks, k) if dedup else k
    slow = (to_nodes if dedup else k) * (1 - 1 / nodes) if nodes > 1 else 0.0
    return Copies(ranks * (1 - 1 / ep), slow, to_nodes, ranks)


class AllToAll(NamedTuple):
    """An algorithm of dispatch and combine.

    Attributes:
        dedup: one copy per rank and per node instead of one per expert.
        setup: counts and a host sync precede it.
        serial: share of the shorter level that the longer one does not hide.
        one_hop: rows that leave the domain do not pass the fast link.
        gathers: passes over the routed rows to order them.
    """

    dedup: bool
    setup: bool
    serial: float
    one_hop: bool
    gathers: int


ALL_TO_ALLS = {
    # One copy per expert, as all_to_all_single after a permutation (NCCL, gloo).
    "flat": AllToAll(False, True, 1.0, True, 2),
    # Once per node, forwarded inside; in one domain once per rank (DeepEP).
    "hierarchical": AllToAll(True, True, 0.0, False, 1),
    # The same copies, but the two levels of a chunk follow each other (HybridEP).
    "staged": AllToAll(True, True, 1.0, False, 0),
    # Straight to the expert's rank, no counts first, for decode (DeepEP, pplx).
    "low_latency": AllToAll(False, False, 0.0, True, 0),
    # Stores into the peers' memory, which only one domain has (TensorRT-LLM on NVL72).
    "one_sided": AllToAll(False, False, 0.0, True, 0),
}


def _check(
    who: str, algorithm: str, dtype: str, tokens: float, **sizes: int | float
) -> None:
    names = {"rows": "tokens", "gpus": "domain", "experts": "num_experts"}
    check(who, names, rows=tokens, **sizes)
    if sizes["k"] > sizes["experts"]:
        raise ValueError(
            f"{who}: k must be at most num_experts = {sizes['experts']}, got {sizes['k']}"
        )
    for name, value, known in (
        ("algorithm", algorithm, ALL_TO_ALLS),
        ("dtype", dtype, ITEMSIZE),
    ):
        if value not in known:
            raise ValueError(
                f"{who}: {name} must be one of {list(known)}, got {value!r}"
            )


def all_to_all(
    p: Profile,
    tokens: float,
    d: int,
    num_experts: int,
    k: int,
    ep: int,
    *,
    domain: int | None = None,
    dtype: str = "bf16",
    algorithm: str = "hierarchical",
    node_limit: int = 0,
    imbalance: float = 1.0,
    combine: bool = False,
    units: int = 0,
) -> float:
    """Seconds of a dispatch, or of a combine, which moves the same copies back.

    Args:
        p (Profile): the device.
        tokens (float): T of a rank.
        d (int): D.
        num_experts (int): E of all ranks.
        k (int): K.
        ep (int): ranks that share the experts; ``"one_sided"`` needs them in one domain.

    Keyword Args:
        domain (int, optional): ranks joined by the fast link. Default: the device's
        dtype (str): of the rows on the wire.
        algorithm (str): a key of :data:`ALL_TO_ALLS`.
        node_limit (int): most nodes of a token.
        imbalance (float): heaviest rank over mean rank.
        combine (bool): models the combine.
        units (int): SMs of the communication kernel; 0 for as many as needed.
    """
    domain = domain or p.device.domain
    _check("all_to_all", algorithm, dtype, tokens, d=d, experts=num_experts, k=k, ep=ep,
           gpus=domain, node_limit=node_limit, imbalance=imbalance, units=units)  # fmt: skip
    if algorithm == "one_sided" and ep > domain:
        raise ValueError(
            f"all_to_all: ep must be at most the {domain} ranks of a domain, whose memory "
            f"algorithm='one_sided' writes, got {ep}"
        )
    if ep == 1:
        return 0.0
    c, dev, kind = p.constants, p.device, ALL_TO_ALLS[algorithm]
    w = copies(ep, domain, num_experts, k, node_limit, kind.dedup)
    if (
        algorithm == "one_sided"
    ):  # a copy per distinct rank; a router spreads K over them
        w = Copies(min(k, ep) * (1 - 1 / ep), 0.0, 1.0, min(k, ep))
    size = tokens * d * ITEMSIZE[dtype] * imbalance
    crowd = 1 + c.fabric * max(0.0, math.log2(ep / 8))
    turn = p.cpu.turn if p.cpu is not None else 0.0
    fast = link_seconds(0.0, dev.fast * c.fast, size * w.fast, turn=turn)
    fast *= crowd if ep <= domain else 1
    slow = size * w.slow / (dev.slow * c.slow) * crowd
    if kind.one_hop and ep > domain:
        fast *= (domain - 1) / (ep - 1)
    if units:
        handled = w.ranks + (w.nodes if ep > domain else 0)
        per_row = d * ITEMSIZE[dtype] + c.row_bytes
        fast = smooth_max(fast, tokens * handled * per_row / (units * c.unit_rate))
    moved = max(fast, slow) + kind.serial * min(fast, slow)
    if algorithm == "one_sided":  # stores are posted, loads wait for the way back
        moved = smooth_max(moved, c.floor_us * US * (1.0 if combine else 0.25), 2)
    start = c.fast_us if ep <= domain else c.slow_us
    return moved + (start + (c.setup_us if kind.setup else 0.0)) * US


def wire_bytes(
    tokens: float, d: int, num_experts: int, k: int, ep: int, domain: int,
    dtype: str = "bf16", *, node_limit: int = 0, dedup: bool = True,
) -> dict[str, float]:  # fmt: skip
    """Expected bytes a rank sends to others in a dispatch, by level.

    The levels are those of :func:`torch.distributed._moe.wire_bytes.count_wire_bytes`:
    ``flat`` without deduplication between nodes, else ``node`` and ``local``.
    """
    _check("wire_bytes", "flat", dtype, tokens, d=d, experts=num_experts, k=k, ep=ep,
           gpus=domain, node_limit=node_limit)  # fmt: skip
    w = copies(ep, domain, num_experts, k, node_limit, dedup)
    row = d * ITEMSIZE[dtype]
    if not dedup or ep <= domain:
        return {"flat": tokens * row * w.fast}
    # A relay forwards what its node receives, unless it is for itself: by symmetry, one of
    # the domain's ranks is the relay.
    local = w.ranks * (1 - 1 / domain)
    return {"node": tokens * row * w.slow, "local": tokens * row * local}
