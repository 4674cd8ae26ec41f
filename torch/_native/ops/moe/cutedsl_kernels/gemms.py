"""The matmuls of the expert MLP, as epilogues of torch._vendor.quack.

Letters: T tokens, D model dim, F expert hidden dim, E experts, R routed rows, g = 2 for
a gated activation else 1. Rows are segmented by ``cu`` (E + 1,) int32; no function
reads or writes a row outside of the segments. ``tokens`` (R,) int32 gathers rows of a
(T, .) operand; None where the operand has the rows already.

The layout of the pre-activations is that of the weight, as for every backend. QuACK
pairs gate and up as adjacent columns. With ``gate_interleaved`` they are adjacent, and the
tile is stored unchanged. Otherwise the weight's rows are relabelled (``concat_layout``),
and the two halves of the pre-activations are two outputs. The backward
kernel reads pairs, so it supports ``gate_interleaved`` and plain activations.

Every schedule is static and no contraction is split over programs: same input, same bits.
"""

import dataclasses
import functools
import hashlib
import pathlib
from collections.abc import Callable

from torch import Tensor
from torch._vendor.quack.activation import (
    act_fn_map,
    dact_fn_map,
    dgate_fn_map,
    gate_fn_map,
)
from torch._vendor.quack.epilogue.frontend import EpiMod, gemm_epilogue
from torch._vendor.quack.epilogue.math import pack, unpack
from torch._vendor.quack.epilogue.ops import ColVecLoad, ColVecReduce
from torch._vendor.quack.gemm_config import GemmConfig
from torch._vendor.quack.gemm_interface import gemm_tuned

from ..triton_kernels.launch import Activation


# QuACK's names of our activations; those without an entry are not supported. It has the erf of
# gelu and geglu only without a gate, and a clamp in only one gated function.
ACTIVATIONS: dict[str, str] = {
    "swiglu": "swiglu",
    "geglu_tanh": "geglu",
    "reglu": "reglu",
    "silu": "silu",
    "relu": "relu",
    "relu2": "relu_sq",
}


def _config(
    capacity: int,
    tile_m: int,
    tile_n: int,
    *,
    pingpong: bool = False,
) -> GemmConfig:
    return GemmConfig(
        tile_m=tile_m,
        tile_n=tile_n,
        pingpong=pingpong,
        cluster_m=2,
        cluster_n=1,
        is_dynamic_persistent=False,
        device_capacity=capacity,
    )


# By major compute capability. sm_90: two warp groups share a tile if the loop is
# long, and take turns (pingpong) if the epilogue is; sm_100: two blocks share one
# matrix instruction. mm and mm_short are the down-projection and the input gradient; mm_short
# has at most MAX_SHORT terms. Chosen by hand, on sm_90 with the model of
# test/python_native/moe_cutedsl_model.py; measured on no GPU.
MAX_SHORT = 512
CONFIGS: dict[int, dict[str, GemmConfig]] = {
    9: {
        "up": _config(9, 128, 256),
        "act_backward": _config(9, 128, 128, pingpong=True),
        "mm": _config(9, 128, 256),
        "mm_short": _config(9, 128, 192, pingpong=True),
        "weight_grad": _config(9, 128, 256),
    },
    10: {
        "up": _config(10, 256, 256),
        "act_backward": _config(10, 256, 128),
        "mm": _config(10, 256, 256),
        "mm_short": _config(10, 256, 256),
        "weight_grad": _config(10, 256, 256),
    },
}


_SOURCE = hashlib.sha256(pathlib.Path(__file__).read_bytes()).hexdigest()[:16]


def _epilogue(name: str, **kwargs) -> Callable[[Callable[..., object]], EpiMod]:
    """``gemm_epilogue`` for a function that captured the activation ``name``.

    QuACK caches compiled kernels, also on disk, by the qualified name of a function, not by its
    source or closure. So the name contains both; otherwise all activations would share the
    kernel of the first one.
    """

    def decorate(function: Callable[..., object]) -> EpiMod:
        function.__qualname__ += f"[{name}, {_SOURCE}]"
        return gemm_epilogue(**kwargs)(function)

    return decorate


@functools.cache
def _up_epilogue(name: str, gated: bool, split: bool, store_preact: bool) -> EpiMod:
    if not gated:

        @_epilogue(name, outputs=("hidden",))
        def up_plain(acc):
            # pyrefly: ignore[not-callable]
            return {"D": acc, "hidden": act_fn_map[name](acc)}

        return up_plain
    if split and store_preact:

        @_epilogue(name, outputs=("hidden", "gate", "up"), mode="acc_pair")
        def up_split(acc):
            gate, up = unpack(acc)
            return {"hidden": gate_fn_map[name](gate, up), "gate": gate, "up": up}

        return up_split

    @_epilogue(name, outputs=("hidden",), mode="acc_pair")
    def up_paired(acc):
        gate, up = unpack(acc)
        return {"D": pack(gate, up), "hidden": gate_fn_map[name](gate, up)}

    return up_paired


@_epilogue("", ops={"score": ColVecLoad("score")})
def _scaled(acc, score):
    return {"D": acc * score}


@functools.cache
def _act_backward_epilogue(name: str, gated: bool) -> EpiMod:
    # dS pairs the activation with the unscaled gradient, as one fused multiply-add.
    sinks = {
        "outputs": ("hidden",),
        "ops": {"score": ColVecLoad("score")},
        "reduces": {"dot": ColVecReduce("dot", scaled=True)},
    }
    if gated:

        @_epilogue(name, mode="packed_cd_b16x2", **sinks)
        def dact_paired(acc, c, score):
            gate, up = unpack(c)
            d_gate, d_up, a = dgate_fn_map[name](gate, up, acc * score)
            return {"D": pack(d_gate, d_up), "hidden": a * score, "dot": (a, acc)}

        return dact_paired

    @_epilogue(name, **sinks)
    def dact_plain(acc, c, score):
        # pyrefly: ignore[not-callable]
        dh, a = dact_fn_map[name](c, acc * score)
        return {"D": dh, "hidden": a * score, "dot": (a, acc)}

    return dact_plain


def _capacity(x: Tensor) -> int:
    # Not torch.cuda's: the compile gate names a GPU that is absent.
    from torch._vendor.quack.cute_dsl_utils import get_device_capacity

    return get_device_capacity(x.device)[0]


def _config_for(kernel: str, x: Tensor, tokens: Tensor | None = None) -> GemmConfig:
    capacity = _capacity(x)
    config = CONFIGS[capacity][kernel]
    if capacity == 10 and tokens is not None:
        # The other way to gather does not compile: it passes a barrier an
        # argument that CuTe DSL 4.8.0 rejects.
        config = dataclasses.replace(config, use_tma_gather=True)
    return config


def _mm(a: Tensor) -> str:
    return "mm" if a.shape[1] > MAX_SHORT else "mm_short"


def _run(kernel: str, epilogue: EpiMod, a: Tensor, b: Tensor, cu: Tensor, **kwargs):
    return epilogue(
        a,
        b,
        config=_config_for(kernel, a, kwargs.get("A_idx")),
        tuned=False,
        cu_seqlens_m=cu,
        compile_dispatch=False,
        **kwargs,
    )


def up(
    x: Tensor,
    tokens: Tensor | None,
    w_in: Tensor,
    cu: Tensor,
    act: Activation,
    preact: Tensor | None,
    hidden: Tensor,
) -> None:
    """preact (R, g*F) = H = x[tokens] @ w_in[e]^T unless None; hidden (R, F) = act(H).

    Args:
        x: (T, D), or (R, D) without ``tokens``.
        tokens: see above.
        w_in: (E, g*F, D) contiguous.
        cu: see above.
        act: a key of ACTIVATIONS, without limit and alpha.
        preact, hidden: written.
    """
    split = act.gated and not act.gate_interleaved
    out = {"hidden": hidden}
    if preact is not None and split:
        num_hidden = hidden.shape[1]
        out |= {"gate": preact[:, :num_hidden], "up": preact[:, num_hidden:]}
    elif preact is not None:
        out["D"] = preact
    epilogue = _up_epilogue(
        ACTIVATIONS[act.activation], act.gated, split, preact is not None
    )
    _run(
        "up",
        epilogue,
        x,
        w_in.mT,
        cu,
        out=out,
        store_d="D" in out,
        A_idx=tokens,
        concat_layout=("B",) if split else None,
    )


def down(a: Tensor, w: Tensor, cu: Tensor, score: Tensor | None, out: Tensor) -> None:
    """out (R, D) = score * (a @ w[e]^T); ``score`` (R,) float32 or None.

    Args:
        a: (R, F).
        w: (E, D, F) contiguous.
        cu, score: see above.
        out: written.
    """
    if score is None:
        mm(a, w.mT, cu, out)
    else:
        _run(_mm(a), _scaled, a, w.mT, cu, out={"D": out}, score=score)


def act_backward(
    grad: Tensor,
    tokens: Tensor | None,
    w: Tensor,
    cu: Tensor,
    preact: Tensor,
    score: Tensor,
    act: Activation,
    grad_preact: Tensor,
    hidden: Tensor,
) -> Tensor:
    """dH, A' = score * A, and the (R,) float32 <dA', A>, from dA' = grad[tokens] @ w[e].

    Args:
        grad: (T, D), or (R, D) without ``tokens``.
        tokens: see above.
        w: (E, D, F) contiguous.
        cu: see above.
        preact: (R, g*F), gate and up in turn where gated.
        score: (R,) float32.
        act: as for :func:`up`.
        grad_preact, hidden: (R, g*F) and (R, F), written.
    """
    result = _run(
        "act_backward",
        _act_backward_epilogue(ACTIVATIONS[act.activation], act.gated),
        grad,
        w,
        cu,
        C=preact,
        out={"D": grad_preact, "hidden": hidden},
        A_idx=tokens,
        score=score,
    )
    return result["dot"].view(-1)


def mm(a: Tensor, w: Tensor, cu: Tensor, out: Tensor) -> None:
    """out (R, N) = a (R, K) @ w[e], of ``w`` (E, K, N); written."""
    gemm_tuned.fn(a, w, out, cu_seqlens_m=cu, config=_config_for(_mm(a), a))


def weight_grad(
    x: Tensor, tokens: Tensor | None, b: Tensor, cu: Tensor, out: Tensor
) -> None:
    """out[e] (E, D, N) = x[tokens]^T @ b over the rows of e, 0 where there are none.

    Args:
        x: (T, D), or (R, D) without ``tokens``.
        tokens: see above.
        b: (R, N).
        cu: see above.
        out: contiguous in one of its last two dimensions, written.
    """
    config = _config_for("weight_grad", x, tokens)
    gemm_tuned.fn(x.mT, b, out, cu_seqlens_k=cu, A_idx=tokens, config=config)
