"""State dicts of Mixture-of-Experts layers with other experts. Prototype: may change.

Experts are rows of the first dimension of some tensors, so indexing adds or removes them and averaging
merges them. Nothing is modified in place: functions return a new dict, which shares its other tensors
with the old one. Load it into a layer with the new number of experts.
"""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor


__all__ = ["merge_experts", "select_experts", "upcycle_mlp"]

# Entries of torch.nn.MoE whose first dimension is the experts.
_NAMES = ("router.weight", "w_in", "w_up", "w_out", "b_in", "b_out", "balance_bias")


def _may_have_experts(
    state: Mapping[str, Tensor], key: str, prefix: str, keys: list[str]
) -> bool:
    """Whether the tensor at ``key`` is of the layer's router or has E rows, and is none of ``keys``."""
    name = key[len(prefix) :]
    if not key.startswith(prefix) or key in keys or name.startswith("shared_w_"):
        return False
    rows = state[keys[0]].shape[:1] if keys else None
    has_rows = "." not in name and getattr(state[key], "shape", ())[:1] == rows
    return has_rows or name.startswith(("router.", "parametrizations."))


def _stacked(
    function: str, state: Mapping[str, Tensor], prefix: str, names: Iterable[str] | None
) -> tuple[list[str], int]:
    """Keys whose tensors have experts in their first dimension, and how many experts."""
    if names is None:
        keys = [prefix + n for n in _NAMES if prefix + n in state]
        if others := [
            key for key in state if _may_have_experts(state, key, prefix, keys)
        ]:
            raise ValueError(
                f"{function}: parametrized tensors may have experts, too, and so may others that torch.nn.MoE "
                "does not have; merge low-rank adapters with remove_parametrizations, or pass names, got "
                f"{others} below the prefix {prefix!r}"
            )
    else:
        keys = [prefix + n for n in names]
        if missing := [key for key in keys if key not in state]:
            raise ValueError(f"{function}: the state dict has no {missing}")
    sizes = {key: state[key].shape[0] if state[key].dim() else None for key in keys}
    if len(set(sizes.values())) != 1 or None in sizes.values():
        raise ValueError(
            f"{function}: tensors of experts must have the same first dimension E, got {sizes} "
            f"below the prefix {prefix!r}"
        )
    return keys, state[keys[0]].shape[0]


def _ids(name: str, experts: Iterable[int], num_experts: int) -> Tensor:
    experts = list(experts)
    ids = torch.tensor(experts, device="cpu")
    # A mask of experts is no list of ids.
    other = ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool
    if other or ids.dim() != 1 or not ((ids >= 0) & (ids < num_experts)).all():
        raise ValueError(
            f"{name} must be ids in [0, E) = [0, {num_experts}), at least one, got {experts}"
        )
    return ids


def select_experts(
    state: Mapping[str, Tensor],
    experts: Sequence[int],
    *,
    prefix: str = "",
    names: Iterable[str] | None = None,
) -> dict[str, Tensor]:
    r"""Keeps, removes, reorders and copies the experts of a layer.

    Expert i of the result is expert ``experts[i]`` of ``state``. Leave an expert out to remove it, or
    list it twice to add a copy. If the router weights are normalised, removing experts has the same
    effect as never choosing them, and a layer with c copies of every expert and ``c * top_k`` computes the same
    function. This does not hold with a ``balance_bias``: the scores of a softmax depend on the number of experts,
    and the bias is added to them.

    Args:
        state: a state dict, of a layer or of a model that has it.
        experts: ids in [0, E), at least one.
        prefix: of the layer's keys, such as "layers.3.mlp.".
        names: of the tensors that have experts in their first dimension. Default: those of
            :class:`torch.nn.MoE` that ``state`` has

    Returns:
        dict[str, Tensor]: in the order of ``state``; tensors of experts are new.

    Raises:
        ValueError: ``state`` has no tensors of experts, their first dimensions differ, an id is
            outside [0, E), or the layer has parametrizations, another router or tensors of its own
            with E rows, and ``names`` does not say which tensors have experts.

    Example::

        >>> layer = torch.nn.MoE(16, 32, num_experts=4, top_k=2)
        >>> state = select_experts(layer.state_dict(), [0, 1, 3])  # without expert 2
        >>> torch.nn.MoE(16, 32, num_experts=3, top_k=2).load_state_dict(state)
        <All keys matched successfully>
    """
    keys, num_experts = _stacked("select_experts", state, prefix, names)
    ids = _ids("select_experts: experts", experts, num_experts)
    result = dict(state)
    for key in keys:
        result[key] = state[key].index_select(0, ids.to(state[key].device))
    return result


def merge_experts(
    state: Mapping[str, Tensor],
    groups: Sequence[Sequence[int]],
    *,
    weights: Tensor | None = None,
    prefix: str = "",
    names: Iterable[str] | None = None,
) -> dict[str, Tensor]:
    r"""Averages groups of experts, and their rows of the router.

    Expert i of the result is the mean of the experts ``groups[i]`` of ``state``. Its logit is the mean of
    their logits, so it is chosen about as often as one of them.

    Args:
        state: a state dict, of a layer or of a model that has it.
        groups: ids in [0, E), at least one each. An expert in no group is gone.
        weights: ``(E,)`` finite and not negative, the weight of each expert in its group's mean, such as
            its load. An expert of weight 0 counts as in no group. Default: equal weights
        prefix: of the layer's keys, such as "layers.3.mlp.".
        names: of the tensors that have experts in their first dimension. Default: those of
            :class:`torch.nn.MoE` that ``state`` has

    Returns:
        dict[str, Tensor]: in the order of ``state``; tensors of experts are new. Means are computed in
        at least float32.

    Raises:
        ValueError: as :func:`select_experts`; weights have another shape, are negative or not finite, or
            are all 0 in a group; or a tensor of experts is not floating point or has 8 bits.
    """
    keys, num_experts = _stacked("merge_experts", state, prefix, names)
    groups = list(groups)
    if not groups:
        raise ValueError("merge_experts: groups must have at least one group")
    name = "merge_experts: each of the groups"
    groups = [_ids(name, group, num_experts).tolist() for group in groups]
    if weights is None:
        weights = torch.ones(num_experts, device="cpu")
    weights = torch.as_tensor(weights, dtype=torch.float64, device="cpu").detach()
    if (
        weights.shape != (num_experts,)
        or not (weights.isfinite() & (weights >= 0)).all()
    ):
        raise ValueError(
            f"merge_experts: weights must have shape (E,) = ({num_experts},) and be finite and not "
            f"negative, got {weights.tolist()} of shape {tuple(weights.shape)}"
        )
    if quantized := {k: state[k].dtype for k in keys if not _can_be_averaged(state[k])}:
        raise ValueError(
            f"merge_experts: tensors must be floating point of at least 16 bits, got {quantized}; "
            "dequantize them first"
        )
    members = [sorted({e for e in group if weights[e] > 0}) for group in groups]
    if not all(members):
        raise ValueError("merge_experts: the weights of a group are all 0")
    result = dict(state)
    for key in keys:
        old = state[key]
        dtype = torch.promote_types(old.dtype, torch.float32)
        means = []
        # Not one product with all experts: one that is gone may have NaN or infinities.
        for group, present in zip(groups, members):
            share = torch.stack([weights[e] * group.count(e) for e in present])
            share = (share / share.sum()).to(old.device, dtype)
            ids = torch.tensor(present, device=old.device)
            means.append(torch.tensordot(share, old.index_select(0, ids).to(dtype), 1))
        result[key] = torch.stack(means).to(old.dtype)
    return result


def _can_be_averaged(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and tensor.itemsize >= 2


def upcycle_mlp(
    w_in: Tensor,
    w_out: Tensor,
    num_experts: int,
    *,
    w_up: Tensor | None = None,
    b_in: Tensor | None = None,
    b_out: Tensor | None = None,
    router_std: float = 0.02,
    noise: float = 0.0,
    generator: torch.Generator | None = None,
) -> dict[str, Tensor]:
    r"""Makes a Mixture-of-Experts layer of a dense MLP (sparse upcycling, arXiv:2212.05055).

    Every expert is a copy of the MLP, and the router is random. With ``normalize=True`` and ``noise=0`` the
    layer computes what the MLP did, whatever the router chooses. The experts diverge in training.

    Args:
        w_in: ``(gF, D)`` of the MLP, gate rows first; with ``w_up``, ``(F, D)`` gate rows only.
        w_out: ``(D, F)``.
        num_experts: E, at least 1.
        w_up: ``(F, D)``, for ``separate_up=True``.
        b_in: ``(gF,)``.
        b_out: ``(D,)``.
        router_std: standard deviation of the router's weight.
        noise: standard deviation of the noise added to each expert's weights, relative to that of
            the weight.
        generator: random number generator of the router and the noise.

    Returns:
        dict[str, Tensor]: a state dict of :class:`torch.nn.MoE`.

    Raises:
        ValueError: a weight is not a matrix, shapes do not fit each other, or ``num_experts`` is below 1.

    Example::

        >>> up, down = torch.nn.Linear(16, 2 * 32), torch.nn.Linear(32, 16)
        >>> layer = torch.nn.MoE(16, 32, num_experts=8, top_k=2)
        >>> layer.load_state_dict(upcycle_mlp(up.weight, down.weight, 8))
        <All keys matched successfully>
    """
    if w_in.dim() != 2 or w_out.dim() != 2 or num_experts < 1:
        raise ValueError(
            "upcycle_mlp: w_in must be (gF, D), w_out (D, F) and num_experts at least 1, got "
            f"{tuple(w_in.shape)}, {tuple(w_out.shape)} and {num_experts}"
        )
    D, F = w_out.shape
    rows = {F} if w_up is not None else {F, 2 * F}
    others = {"w_up": (w_up, (F, D)), "b_out": (b_out, (D,))}
    others["b_in"] = b_in, (w_in.shape[0] + (0 if w_up is None else F),)
    for name, (tensor, shape) in {"w_in": (w_in, None), **others}.items():
        sizes = [shape] if shape else [(n, D) for n in sorted(rows)]
        if tensor is not None and tuple(tensor.shape) not in sizes:
            raise ValueError(
                f"upcycle_mlp: {name} must have shape {' or '.join(map(str, sizes))} beside w_out of "
                f"{(D, F)}, got {tuple(tensor.shape)}"
            )

    def drawn(like: Tensor, *shape: int) -> Tensor:
        where = generator.device if generator is not None else like.device
        return torch.randn(shape, generator=generator, device=where).to(like)

    def stack(dense: Tensor) -> Tensor:
        stacked = dense.detach().expand(num_experts, *dense.shape).clone()
        if noise and dense.dim() == 2:
            stacked += noise * dense.detach().std() * drawn(stacked, *stacked.shape)
        return stacked

    router = router_std * drawn(w_in.detach(), num_experts, w_in.shape[1])
    given = {"w_in": w_in, "w_up": w_up, "w_out": w_out, "b_in": b_in, "b_out": b_out}
    state = {name: stack(t) for name, t in given.items() if t is not None}
    return {"router.weight": router} | state
