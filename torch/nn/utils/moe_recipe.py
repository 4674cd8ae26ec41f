"""Chooses whether a layer of experts uses FP8. Prototype: may change."""

from __future__ import annotations

import math
from typing import Any, NamedTuple, TYPE_CHECKING

import torch


if TYPE_CHECKING:
    from torch.distributed._tools.moe_config import MoEConfig
    from torch.distributed._tools.moe_profile import Profile


__all__ = ["select_recipe"]

_nn: Any = torch.nn  # whose stubs lack MoE
# Recipes of the formats that the performance model knows.
_OF_FORMAT = {"fp8": "fp8_blockwise", "mxfp8": "mxfp8"}


# Dtypes of the layer without a recipe, and their names in the performance model.
_DTYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}


class _Layer(NamedTuple):
    """T, D, F, E of this rank, K, dtype, and R = T * K."""

    tokens: int
    d: int
    f: int
    experts: int
    k: int
    dtype: torch.dtype

    @property
    def rows(self) -> int:
        return self.tokens * self.k


class _Side(NamedTuple):
    """A candidate, which is a recipe or a dtype, and the milliseconds of its parts."""

    name: str
    parts: dict[str, float]

    @property
    def total(self) -> float:
        return sum(self.parts.values())

    def __str__(self) -> str:
        largest = max(self.parts, key=self.parts.__getitem__)
        return (
            f"{self.name} {self.total:.3g} ms, most of it {largest} "
            f"with {self.parts[largest]:.3g} ms"
        )


def select_recipe(
    config: MoEConfig | torch.nn.Module | str,
    device: Profile | torch.device | str,
    *,
    tokens: int,
    ep: int = 1,
    training: bool = True,
    seconds: float = 1.0,
) -> tuple[str | None, str]:
    r"""The faster recipe of one layer of experts on a device, and why.

    PyTorch does not call this function: the author of a model chooses the recipe. Only times are compared.
    The reason also says how many bytes are saved for backward, and :doc:`/nn.functional.moe_scaled` has a table of
    the errors of FP8.

    If the device is present (a :class:`torch.device` or its name), both sides are timed with uniform random
    routing. For a GPU by name (``"H100"``, ``"B200"``, ...) the performance model predicts the times. The model
    was fitted on published measurements: the reason says "not measured", and differences below the model's
    error do not count. The model assumes the published 8-bit kernels. Without Triton kernels for the GPU, this
    build multiplies the rounded numbers in bfloat16 instead.

    Args:
        config: Sizes of the layer: an :class:`torch.nn.MoE`, another module with expert weights, a
            ``MoEConfig`` of ``torch.distributed._tools.moe_config``, or the name of one of its models.
        device: Where the layer runs, see above. It may also be a GPU profile of ``moe_calibration`` or the
            path of its ``.json``.
        tokens: T of a rank, at least 1.
        ep: Ranks that share the experts. Each has E / ep experts, and the rows of a uniform routing.
        training: Forward and backward; ``False``: forward only.
        seconds: Budget of a measurement. It does not bound the time to make a random layer, nor one
            call of every candidate's forward and backward (on a GPU two).

    Returns:
        ``(recipe, reason)``: ``recipe`` is an argument of :func:`torch.nn.functional.moe_mlp`. It is ``None``
        if the layer's own dtype is as fast (the dtype of its parameters, or bfloat16 if only sizes are given).
        ``reason`` has the milliseconds of both sides and the largest cost of each.

    Raises:
        ValueError: a model or device is not known, a number is out of its range, ``ep`` does not divide the experts,
            a modelled layer has no gate, or a layer has parameters that no recipe takes.
        TypeError: ``config`` or ``device`` is of another type.

    Example::

        >>> from torch.nn.utils.moe_recipe import select_recipe
        >>> recipe, reason = select_recipe("deepseek-v3", "B200", tokens=16384, ep=32)
        >>> recipe
        'mxfp8'
    """
    from torch.distributed._tools.moe_arguments import check
    from torch.distributed._tools.moe_profile import Profile

    check("select_recipe", tokens=tokens, ep=ep, seconds=seconds)
    layer, gated = _layer_of(config, tokens, ep)
    target = _device_of(device)
    if isinstance(target, Profile):
        sides, note, least = _modelled(target, layer, gated, training)
    else:
        sides, note, least = _measured(target, layer, gated, training, seconds)
    own, *low = sides
    if not low:
        return None, f"{own}; {note}"
    best = min(low, key=lambda side: side.total)
    gain = own.total / best.total
    pays = gain > 1 + least
    verdict = (
        f"{gain:.2f} times as fast" if gain >= 1 else f"{1 / gain:.2f} times as slow"
    )
    if gain > 1 and not pays:
        verdict += f", which is less than the error of {least:.0%}"
    reason = f"{best} against {own}: {verdict}; {note}"
    if training:
        reason += f"; {_saved(layer, gated)}"
    return (best.name if pays else None), reason


def _layer_of(config: Any, tokens: int, ep: int) -> tuple[_Layer, bool]:
    """The layer of a rank, and whether it has gate and up projections."""
    from torch.distributed._tools.moe_config import expert_weights, MoEConfig

    dtype = torch.bfloat16
    if isinstance(config, torch.nn.Module):
        experts = config.get_submodule(next(iter(expert_weights(config)), ""))
        dtype = next((p.dtype for p in experts.parameters() if p.dim() == 3), dtype)
        if dtype not in _DTYPES:
            raise ValueError(
                f"select_recipe: parameters must be of {', '.join(map(str, _DTYPES))}, got {dtype}"
            )
    if isinstance(config, str):
        config = MoEConfig.by_name(config)
    elif isinstance(config, torch.nn.Module):
        config = MoEConfig.from_module(config)
    if not isinstance(config, MoEConfig):
        raise TypeError(
            "select_recipe: config must be a MoEConfig, the name of one or a module, got "
            f"{type(config).__name__}"
        )
    if config.experts % ep:
        raise ValueError(
            f"select_recipe: ep must divide the experts, {config.experts}, got {ep}"
        )
    local = config.experts // ep
    return _Layer(tokens, config.d, config.f, local, config.k, dtype), config.gated


def _device_of(device: Any) -> Profile | torch.device:
    from torch.distributed._tools.moe_profile import DEVICES, Profile, profile

    if isinstance(device, str):
        if device in DEVICES or device.endswith(".json"):
            device = profile(device)
        else:
            try:
                device = torch.device(device)
            except RuntimeError as e:
                raise ValueError(
                    f"select_recipe: device must be a device of this machine, one of "
                    f"{', '.join(DEVICES)} or the path of a .json profile, got {device!r}"
                ) from e
    if isinstance(device, Profile):
        if device.cpu is not None:
            raise ValueError(
                "select_recipe: a CPU is measured, not modelled: device must be 'cpu', got the "
                f"profile {device.name!r}"
            )
    elif isinstance(device, torch.device):
        accelerator = torch.accelerator.current_accelerator(check_available=True)
        here = ["cpu"] + ([accelerator.type] if accelerator is not None else [])
        if device.type not in here:
            raise ValueError(
                f"select_recipe: a torch.device is measured, so it must be one of {here} on this "
                f"machine, got {device}"
            )
    else:
        raise TypeError(
            "select_recipe: device must be a str, a torch.device or a Profile, got "
            f"{type(device).__name__}"
        )
    return device


def _modelled(
    p: Profile, layer: _Layer, gated: bool, training: bool
) -> tuple[list[_Side], str, float]:
    """The sides, where their times come from, and the smallest gain that counts."""
    from torch.distributed._tools import moe_cost_model as cost, moe_layer_plan
    from torch.distributed._tools.moe_profile import FITTED_PROVENANCE, HELD_OUT_ERROR

    if not gated:
        raise ValueError(
            "select_recipe: only gated layers are modelled; config has no gate, pass a device of "
            "this machine to measure it"
        )
    sizes = (layer.rows, layer.d, layer.f, layer.experts)
    own = _DTYPES[layer.dtype]
    dtypes = (own, *moe_layer_plan.default_dtypes(p)[1:])
    gemms, times = moe_layer_plan.fastest_dtypes(p, *sizes, dtypes)
    named = {
        "forward": "the forward products",
        "dgrad": "the products of the inputs' gradients",
        "wgrad": "the products of the weights' gradients",
    }
    used = list(named) if training else ["forward"]
    error, rows = HELD_OUT_ERROR["gemm"]
    known = f"error {error:.0%} ({rows} rows that calibrated nothing)"
    if p.provenance != FITTED_PROVENANCE:
        known = "its error is not known"
    note = f"modelled for {p.name}, {p.provenance}, not measured, {known}"
    sides = [
        _Side(_OF_FORMAT.get(dtype, _name_of(layer.dtype)),
              {named[g]: 1e3 * times[g][dtype] for g in used})
        for dtype in times["forward"]
    ]  # fmt: skip
    if len(sides) == 1:
        return sides, f"{p.name} multiplies no 8-bit numbers; {note}", error
    low = next(dtype for dtype in times["forward"] if dtype != own)
    quantised = cost.expert_shares(
        p, *sizes, kernel="mcore", dtype=low, pass_="fwd+bwd" if training else "fwd"
    )["quantisation"]
    note = f"quantisation is {1e3 * quantised:.3g} ms of it; {note}"
    if training and gemms["wgrad"] == own and gemms["forward"] != own:
        note = f"weight gradients are faster in {_name_of(layer.dtype)} (hp_wgrad=True); {note}"
    return sides, note, error


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _measured(
    device: torch.device, layer: _Layer, gated: bool, training: bool, seconds: float
) -> tuple[list[_Side], str, float]:
    """As :func:`_modelled`, but measured with a random layer on the device."""
    from torch.distributed._tools.moe_calibration import measure_calls

    gen = torch.Generator("cpu").manual_seed(0)

    dtype = layer.dtype

    def leaf(*shape: int) -> torch.Tensor:
        # Experts are equal, as drawing all of them may take longer than the measurement.
        x = torch.randn(*shape[-2:], generator=gen, dtype=dtype, device="cpu")
        x = x.to(device) * shape[-1] ** -0.5
        return x.expand(shape).contiguous().requires_grad_(training)

    T, D, H, E, K = layer[:5]
    # A rank with fewer than K experts gets at most one choice of each, of more tokens.
    T, K = math.ceil(T * K / min(K, E)), min(K, E)
    x, w_in, w_out = leaf(T, D), leaf(E, (1 + gated) * H, D), leaf(E, D, H)
    ids = torch.rand(T, E, generator=gen, device="cpu").topk(K, 1).indices.to(device)
    weights = torch.full((T, K), 1 / K, device=device, requires_grad=training)
    leaves = (x, weights, w_in, w_out)
    recipes = (None, *_nn.functional._MOE_RECIPES)

    outputs: dict[str | None, torch.Tensor] = {}  # of the first forwards, for backward

    def forward(recipe: str | None) -> object:
        with torch.set_grad_enabled(training):
            y = _nn.functional.moe_mlp(
                x, ids, weights, w_in, w_out,
                activation="swiglu" if gated else "silu", recipe=recipe,
            )  # fmt: skip
        return outputs.setdefault(recipe, y)

    def backward(recipe: str | None) -> object:
        y = outputs[recipe]
        return torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=True)

    passes = (
        {"forward": forward, "backward": backward} if training else {"forward": forward}
    )
    module = getattr(torch, device.type)
    times = measure_calls(
        [lambda f=f, r=r: f(r) for r in recipes for f in passes.values()],
        seconds,
        synchronize=module.synchronize if device.type != "cpu" else lambda: None,
        # A GPU compiles its kernels in the first calls.
        least=0 if device.type == "cpu" else 1,
    )
    rows = iter(times)
    sides = [
        _Side(r or _name_of(dtype), {name: 1e3 * next(rows) for name in passes})
        for r in recipes
    ]
    threads = f" with {torch.get_num_threads()} threads" if device.type == "cpu" else ""
    return (
        sides,
        f"measured on {device}{threads}, (T, D, F, E, K) = {T, D, H, E, K}",
        0.0,
    )


def _saved(layer: _Layer, gated: bool) -> str:
    """Bytes that a layer and its router save for backward. With a recipe, X is saved twice."""
    from torch.distributed._tools.moe_memory_model import saved_bytes

    T, D, H, E, K, dtype = layer
    low, high = (
        saved_bytes(T, T * K, D, H, k=K, num_experts=E, gated=gated, itemsize=itemsize)
        for itemsize in (33 / 32, dtype.itemsize)
    )
    low += (
        T * D * dtype.itemsize
    )  # the router saves its input in this dtype; FP8 would be 2.7 % off
    return (
        f"for backward the layer keeps {low / 2**20:.3g} MiB with a recipe, the router's input in "
        f"{_name_of(dtype)} among it, and {high / 2**20:.3g} without ({low / high:.2f})"
    )
