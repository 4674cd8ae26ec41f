# mypy: allow-untyped-defs
"""Tokens a second of inference, on GPUs by their expert parallelism and on a CPU."""

from __future__ import annotations

import itertools
from typing import Any, TYPE_CHECKING

from torch.distributed._tools import moe_cost_model as cost
from torch.distributed._tools.moe_arguments import check
from torch.distributed._tools.moe_cpu_model import cpu_experts, cpu_rate
from torch.distributed._tools.moe_exchange_model import all_to_all


if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.distributed._tools.moe_config import MoEConfig
    from torch.distributed._tools.moe_profile import Profile


__all__ = ["cpu_table", "infer", "inference_table"]


def infer(
    p: Profile, model: MoEConfig, tokens: float, context: int, *, ep: int, phase: str,
    domain: int = 0, redundant: int = 0, imbalance: float = 1.0, two_batches: bool = True,
    dtype: str = "fp8",
) -> float:  # fmt: skip
    """Tokens per second and GPU of prefill or decode, data-parallel attention.

    Args:
        p (Profile): the device.
        model (MoEConfig): the model.
        tokens (float): of a GPU: sequences in decode, tokens in prefill.
        context (int): tokens of the cache of a sequence.

    Keyword Args:
        ep (int): ranks that share the experts.
        phase (str): ``"prefill"`` or ``"decode"``.
        domain (int): ranks joined by the fast link; 0 for the device's.
        redundant (int): replicas of experts over all ranks.
        imbalance (float): heaviest expert rank over the mean.
        two_batches (bool): hide exchanges behind the other half of the tokens.
        dtype (str): of weights and products.
    """
    if phase not in ("prefill", "decode"):
        raise ValueError(f"infer: phase must be prefill or decode, got {phase!r}")
    check("infer", tokens=tokens, context=context, ep=ep, domain=domain,
          redundant=redundant, imbalance=imbalance)  # fmt: skip
    half = tokens / 2 if two_batches else tokens
    dev = p.device
    shapes = [(int(n), int(k)) for n, k in model.attention()]
    compute = sum(cost.gemm(p, 1, half, n, k, dtype) for n, k in shapes)
    compute += sum(cost.quantize(p, half * k) for _, k in shapes)
    if phase == "prefill":
        compute += model.core_flops(half, context) / (0.55 * dev.bf16)
    else:
        flops = 4 * half * context * model.heads * model.cached if model.mla else 0
        read = cost.stream(p, half * context * 2 * model.cached, 2)
        compute += cost.smooth_max(read, flops / (0.6 * dev.bf16))
    compute += cost.stream(p, half * model.d * 20, 10)
    gated = model.matrices / 3  # widths as of gated products
    plain = compute + cost.dense_mlp(p, half, model.d, model.dense_f * gated, dtype)
    compute += cost.experts(
        p, half * model.k * imbalance, model.d, model.gated_f, (model.experts + redundant) / ep,
        kernel="deepgemm++", dtype=dtype, tokens=half,
    )  # fmt: skip
    compute += cost.dense_mlp(p, half, model.d, model.shared_f * gated, dtype)
    compute += cost.router(p, half, model.d, model.experts, model.k)
    comm = sum(
        all_to_all(
            p, half, model.d, model.experts, model.k, ep, domain=domain or None, dtype=wire,
            algorithm="hierarchical" if phase == "prefill" else "low_latency",
            node_limit=model.node_limit, imbalance=imbalance, combine=wire == "bf16",
        )
        for wire in (dtype, "bf16")
    )  # fmt: skip
    compute, plain = compute * p.constants.stack, plain * p.constants.stack
    layer = 2 * max(compute, comm) if two_batches else compute + comm
    body = layer * (model.layers - model.dense)
    body += (2 if two_batches else 1) * plain * model.dense
    head = cost.gemm(p, 1, tokens if phase == "decode" else 8, model.vocab, model.d)
    return tokens / (body + head)


def inference_table(
    model: MoEConfig, p: Profile, gpus: int, *, phase: str, tokens: int, context: int,
    imbalance: Callable[[int], float] = lambda ep: 1.0, dtype: str | None = None,
    ep: int | None = None, domain: int = 0,
) -> list[dict[str, Any]]:  # fmt: skip
    """Tokens a second over the EP degrees that fit, best first.

    Args:
        model (MoEConfig): the model.
        p (Profile): the GPU.
        gpus (int): how many; a smaller EP runs copies of the group.

    Keyword Args:
        phase (str): ``"prefill"`` or ``"decode"``.
        tokens (int): of a GPU: tokens in prefill, sequences in decode.
        context (int): tokens of a sequence in the cache.
        imbalance (callable): heaviest expert rank over the mean, of an EP degree.
        dtype (str, optional): of weights and products. Default: FP8 where the device
            multiplies it, else bf16
        ep (int, optional): the only degree to try.
        domain (int): ranks joined by the fast link; 0 for the device's.
    """
    check("inference_table", gpus=gpus, tokens=tokens, context=context, domain=domain)
    dtype = dtype or ("fp8" if "fp8" in p.device.dtypes else "bf16")
    p.check_dtype("inference_table", dtype)
    degrees = [2**i for i in range(gpus.bit_length())] if ep is None else [ep]
    degrees = [e for e in degrees if gpus % e == 0 == model.experts % e]
    if not degrees:
        raise ValueError(
            f"inference_table: ep must divide {gpus} GPUs and {model.experts} experts: "
            f"{[e for e in range(1, gpus + 1) if gpus % e == 0 == model.experts % e]}, got {ep}"
        )
    weights, size = model.parameters(), cost.ITEMSIZE[dtype]
    held = (
        2 * tokens * (context if phase == "decode" else 1) * model.cached * model.layers
    )
    held += tokens * model.d * 20 * (phase == "prefill")
    need = {
        e: (weights["expert"] / e + weights["other"]) * size + held for e in degrees
    }
    out = [
        {
            "ep": e,
            "tokens_per_second_per_gpu": infer(
                p, model, tokens, context, ep=e, phase=phase, domain=domain,
                imbalance=imbalance(e), dtype=dtype,
            ),
            "dtype": dtype,
            "memory": need[e],
            "imbalance": imbalance(e),
        }
        for e in degrees
        if need[e] <= 0.9 * p.device.memory
    ]  # fmt: skip
    if not out:
        least, near = min(need, key=need.__getitem__), ""
        room = 0.9 * p.device.memory - weights["other"] * size - held
        for e in (2**i for i in range(model.experts.bit_length())):
            if model.experts % e == 0 and weights["expert"] * size / e <= room:
                near = f". Nearest that works: gpus={max(e, gpus // e * e)}, ep={e}"
                break
        raise ValueError(
            f"inference_table: {dtype} weights and cache fit on no ep of {gpus} GPUs with "
            f"{p.device.memory / 1e9:.0f} GB; at ep={least} they need "
            f"{need[least] / 1e9:.0f} GB{near}"
        )
    return sorted(out, key=lambda r: -r["tokens_per_second_per_gpu"])


def cpu_table(
    model: MoEConfig, p: Profile, tokens: Sequence[int] = (1, 64, 2048)
) -> list[dict[str, Any]]:
    """Tokens a second of a model on a CPU, by dtype, tokens of a step and pass.

    Attention's cache is not counted; projections and the experts are. A row says whether
    the weights (and, in training, gradients and Adam's moments) fit.
    """
    if p.cpu is None:
        raise ValueError(f"cpu_table: {p.name} is not a profile of a CPU")
    weights, moe = model.parameters(), model.layers - model.dense
    out = []
    for dtype, t, pass_ in itertools.product(
        ("bf16", "fp32"), tokens, ("fwd", "fwd+bwd")
    ):
        if pass_ == "fwd+bwd" and t == 1:
            continue
        experts = cpu_experts(
            p.cpu,
            t,
            model.d,
            model.gated_f,
            model.experts,
            model.k,
            dtype=dtype,
            pass_=pass_,
        )
        dense = 2 * t * weights["other"] / cpu_rate(p.cpu, t, dtype)
        dense = cost.smooth_max(
            dense, weights["other"] * cost.ITEMSIZE[dtype] / p.cpu.memory
        )
        dense *= 3 if pass_ == "fwd+bwd" else 1
        need = sum(weights.values()) * (cost.ITEMSIZE[dtype] if pass_ == "fwd" else 16)
        out.append({
            "dtype": dtype, "tokens": t, "pass": pass_,
            "layer_ms": 1e3 * experts,
            "tokens_per_second": t / (moe * experts + dense),
            "memory": need, "fits": need <= 0.9 * p.device.memory,
        })  # fmt: skip
    return out
