# mypy: allow-untyped-defs
"""A mixture-of-experts model by its sizes: from a table, a configuration, or a module.

>>> MoEConfig.by_name("qwen3-30b-a3b").parameters()
"""

from __future__ import annotations

import math
import warnings
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed._tools.moe_arguments import check, RANGES
from torch.nn.modules.conv import _ConvNd


__all__ = ["MODELS", "MoEConfig", "expert_weights"]


@dataclass(frozen=True)
class MoEConfig:
    """Sizes of a decoder with mixture-of-experts layers.

    Attributes:
        layers, d, f, experts, k: decoder layers, D, F, E, K.
        heads, kv_heads, head_dim, vocab: of attention and of the embedding.
        shared_f: width of the shared experts together.
        dense, dense_f: leading layers without experts, and their width.
        mla, q_lora: multi-head latent attention, and the rank of its queries.
        node_limit: most nodes of a token (group-limited routing).
        window: share of full attention that sliding windows compute.
        mtp: layers of multi-token prediction.
        gated: gate and up projections, else up only.
        biased: experts have biases.
        kv_lora, nope, rope, v_dim: for latent attention: rank of keys and values; widths of a head's
            query without and with position, and of its value.
    """

    layers: int
    d: int
    f: int
    experts: int
    k: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    shared_f: int = 0
    dense: int = 0
    dense_f: int = 0
    mla: bool = False
    node_limit: int = 0
    window: float = 1.0
    mtp: int = 0
    q_lora: int = 0
    gated: bool = True
    biased: bool = False
    kv_lora: int = 512
    nope: int = 128
    rope: int = 64
    v_dim: int = 128

    def __post_init__(self) -> None:
        check("MoEConfig", **{n: v for n, v in vars(self).items() if n in RANGES})
        for name, most in (("k", "experts"), ("dense", "layers")):
            if getattr(self, name) > getattr(self, most):
                raise ValueError(
                    f"MoEConfig: {name} must be at most {most} = {getattr(self, most)}, "
                    f"got {getattr(self, name)}"
                )

    def attention(self, tp: int = 1) -> list[tuple[float, float]]:
        """(n, k) of the projections of one of ``tp`` ranks."""
        h, kv = self.heads / tp, max(self.kv_heads / tp, 1)
        if not self.mla:
            return [((h + 2 * kv) * self.head_dim, self.d), (self.d, h * self.head_dim)]
        query = h * (self.nope + self.rope)
        q: list[tuple[float, float]] = [(query, self.d)]
        if self.q_lora:
            q = [(self.q_lora, self.d), (query, self.q_lora)]
        kv = (h * (self.nope + self.v_dim), self.kv_lora)
        return q + [(self.cached, self.d), kv, (self.d, h * self.v_dim)]

    @property
    def cached(self) -> int:
        """Values per token and layer in the cache of keys and values."""
        if self.mla:
            return self.kv_lora + self.rope
        return 2 * self.kv_heads * self.head_dim

    def core_flops(self, tokens: float, seq: int, tp: int = 1) -> float:
        """FLOPs of causal attention."""
        width = 2 * self.head_dim
        if self.mla:
            width = self.nope + self.rope + self.v_dim
        return tokens * seq * self.window * self.heads / tp * width

    @property
    def matrices(self) -> int:
        return 3 if self.gated else 2

    @property
    def gated_f(self) -> int:
        """Width of gated experts with as many weights, which the models of kernels take."""
        return max(1, round(self.f * self.matrices / 3))

    def parameters(self) -> dict[str, float]:
        """Numbers of parameters: of the routed experts, and of the rest."""
        attention = sum(n * k for n, k in self.attention())
        moe, m = self.layers - self.dense, self.matrices
        other = self.layers * attention + moe * m * self.d * self.shared_f
        other += self.dense * m * self.d * self.dense_f + 2 * self.vocab * self.d
        other += moe * self.d * self.experts
        return {"expert": moe * m * self.d * self.f * self.experts, "other": other}

    def train_flops(self, seq: int) -> float:
        """FLOPs of a training token: six per active parameter, and attention."""
        attention = sum(n * k for n, k in self.attention())
        moe = self.matrices * self.d * (self.f * self.k + self.shared_f)
        moe += self.d * self.experts
        body = self.layers * attention + (self.layers - self.dense) * moe
        body += self.dense * self.matrices * self.d * self.dense_f + self.vocab * self.d
        body += self.mtp * (attention + moe + 2 * self.d**2 + self.vocab * self.d)
        return 6 * body + 3 * (self.layers + self.mtp) * self.core_flops(1, seq)

    @staticmethod
    def by_name(name: str) -> MoEConfig:
        """One of :data:`MODELS`."""
        if name not in MODELS:
            raise ValueError(f"model must be one of {', '.join(MODELS)}, got {name!r}")
        return MODELS[name]

    @staticmethod
    def from_config(config: Any, where: str = "MoEConfig.from_config") -> MoEConfig:
        """From a transformers configuration, or a dict like its ``config.json``.

        Args:
            config: the configuration, or one of several parts with its ``text_config``.
            where (str): prefix of errors, such as a file.
        """

        def read(key: str) -> Any:
            if isinstance(config, dict):
                return config.get(key)
            return getattr(config, key, None)

        config = read("text_config") or config

        def first(size: str, *keys: str, default: int | None = None) -> int:
            for key in keys:
                if (value := read(key)) is not None:
                    check(where, {size: key}, **{size: value})
                    return value
            if default is None:
                raise ValueError(f"{where}: config has none of {keys}")
            return default

        layers, d = first("layers", "num_hidden_layers"), first("d", "hidden_size")
        heads = first("heads", "num_attention_heads")
        f = first("f", "moe_intermediate_size", "intermediate_size")
        shared = first("shared_f", "shared_expert_intermediate_size", default=0)
        shared_experts = ("n_shared_experts", "num_shared_experts")
        shared = shared or first("shared_f", *shared_experts, default=0) * f
        # Llama 4 has one shared expert, and other names for the same things.
        llama4 = str(read("model_type")).startswith("llama4")
        shared = f if llama4 else shared
        wide = ("intermediate_size_mlp",) if llama4 else ("intermediate_size",)
        leading = first("dense", "first_k_dense_replace", default=0)
        every = first(
            "layers", "decoder_sparse_step", "interleave_moe_layer_step", default=1
        )
        plain, types = (read(key) or () for key in ("mlp_only_layers", "layer_types"))
        for key, value in (("mlp_only_layers", plain), ("layer_types", types)):
            if not isinstance(value, (list, tuple)):
                raise ValueError(f"{where}: {key} must be a list, got {value!r}")
        dense = sum(
            i < leading or i in plain or (i + 1) % every > 0 for i in range(layers)
        )
        sliding = sum(t == "sliding_attention" for t in types) / max(len(types), 1)
        window = first("seq", "sliding_window", default=0) if sliding else 0
        groups = first("experts", "n_group", default=0)
        per_token = first("experts", "topk_group", default=0)
        sizes: dict[str, Any] = {
            "layers": layers,
            "d": d,
            "f": f,
            "experts": first(
                "experts", "num_experts", "n_routed_experts", "num_local_experts"
            ),
            "k": first("k", "num_experts_per_tok", "experts_per_token", "moe_topk"),
            "heads": heads,
            "kv_heads": first("kv_heads", "num_key_value_heads", default=heads),
            "head_dim": first("head_dim", "head_dim", "v_head_dim", default=d // heads),
            "vocab": first("vocab", "vocab_size"),
            "shared_f": shared,
            "dense": dense,
            "dense_f": first("dense_f", *wide, default=f) if dense else 0,
            "mla": read("kv_lora_rank") is not None,
            "node_limit": per_token if groups > per_token else 0,
            "window": 1 - sliding / 2 if window else 1.0,
            "mtp": first("mtp", "num_nextn_predict_layers", default=0),
            # No key says it. Of the families in MODELS only this one has biases.
            "biased": read("model_type") == "gpt_oss",
            "q_lora": first("q_lora", "q_lora_rank", default=0),
            "kv_lora": first("q_lora", "kv_lora_rank", default=512),
            "nope": first("head_dim", "qk_nope_head_dim", default=128),
            "rope": first("head_dim", "qk_rope_head_dim", default=64),
            "v_dim": first("head_dim", "v_head_dim", default=128),
        }
        try:
            return MoEConfig(**sizes)
        except ValueError as e:
            raise ValueError(str(e).replace("MoEConfig", where, 1)) from e

    @staticmethod
    def from_module(module: torch.nn.Module) -> MoEConfig:
        """From a module with a transformers configuration, or from the shapes of its
        expert weights (torchtitan's ``w1_EFD``, ``w2_EDF``, ``w3_EFD``, or ``nn.MoE``).

        The module may be on the meta device or fake: only shapes are read. Without a configuration, D is
        that of the embedding if the weights have it, else weights are (E, out, in).
        """
        weights = expert_weights(module)
        if (config := getattr(module, "config", None)) is not None:
            config = getattr(config, "text_config", config)
            found = MoEConfig.from_config(config)
            # Configurations name layers without experts in many ways; the module shows them.
            dense = found.layers - len(weights)
            if found.dense < dense < found.layers:
                width = getattr(config, "intermediate_size", found.f)
                found = replace(found, dense=dense, dense_f=width)
            return found
        if not weights:
            raise ValueError(
                "MoEConfig.from_module: module has neither a .config nor parameters of "
                "three dimensions (E, F, D)"
            )
        name, shapes = next(iter(weights.items()))
        if any(sorted(other) != sorted(shapes) for other in weights.values()):
            warnings.warn(
                f"MoEConfig.from_module: experts of several shapes; those of {name!r} are taken for all",
                stacklevel=2,
            )
        embedding = max(
            (m for m in module.modules() if isinstance(m, torch.nn.Embedding)),
            key=lambda m: m.num_embeddings,
            default=None,
        )
        d, f, gated = _layer_sizes(
            name, shapes, embedding.embedding_dim if embedding else None
        )
        path = name.split(".")
        # Of the experts, what is around them, what is around that: other modules have a k, too.
        nearest = (
            module.get_submodule(".".join(path[:i])) for i in range(len(path), -1, -1)
        )
        top_k = next(
            (int(v) for outer in nearest for m in outer.modules() for n in ("top_k", "k", "topk")
             if isinstance(v := getattr(m, n, None), int) and v > 0),
            1,
        )  # fmt: skip
        head = next((int(v) for m in module.modules() if isinstance(
            v := getattr(m, "head_dim", None), int) and v > 0), min(128, d))  # fmt: skip
        heads = max(d // head, 1)
        return MoEConfig(
            layers=len(weights), d=d, f=f, experts=shapes[0][0], k=top_k, heads=heads,
            kv_heads=heads, head_dim=head, gated=gated,
            vocab=embedding.num_embeddings if embedding else 1,
        )  # fmt: skip


def expert_weights(model: torch.nn.Module) -> dict[str, list[tuple[int, ...]]]:
    """Shapes of the stacked weights of experts, by the names of the modules that hold them.

    Those are two or more parameters of three dimensions with the same first one: of the module, of
    its parametrizations (the original one, of several the largest), or of children with one each,
    as torchtitan's GroupedLinear. One expert is only where the shapes have D and F, unlike the
    embeddings of positions and classes.
    """
    found: defaultdict[str, dict[str, tuple[int, ...]]] = defaultdict(dict)
    for name, module in model.named_modules():
        if isinstance(module, _ConvNd):  # one over time has such a weight, too
            continue
        owner, parametrized, _ = name.partition("parametrizations.")
        for key, q in module.named_parameters(recurse=False):
            if q.dim() == 3 and (not parametrized or key.startswith("original")):
                held = found[owner.rstrip(".")]
                weight = name if parametrized else key
                held[weight] = max(held.get(weight, ()), tuple(q.shape), key=math.prod)
    for name in [n for n, held in found.items() if n and len(held) == 1]:
        found[name.rpartition(".")[0]][name] = next(iter(found.pop(name).values()))
    shapes = {}
    for name, held in found.items():
        # A subclass may have other parameters of three dimensions.
        rows = Counter(shape[0] for shape in held.values()).most_common(1)[0][0]
        shapes[name] = [shape for shape in held.values() if shape[0] == rows]
    return {
        name: s
        for name, s in shapes.items()
        if len(s) > 1 and (s[0][0] > 1 or _possible_sizes(s))
    }


def _possible_sizes(
    shapes: list[tuple[int, ...]], d: int | None = None
) -> set[tuple[int, int, bool]]:
    """D, F and whether there are gates, as they fit the shapes of the weights of a layer.

    Gate, up and down projections have D and F; two of them are one (2F, D) if there are gates.
    """
    pairs = [shape[1:] for shape in shapes]
    sizes = set()
    for size in {*pairs[0]} if d is None else {d}:
        if all(size in pair for pair in pairs):
            widths = [max(a * b // size, 1) for a, b in pairs]
            f = min(widths)
            if {*widths} <= {f, 2 * f}:
                sizes.add((size, f, len(pairs) > 2 or max(widths) > f))
    return sizes


def _layer_sizes(
    name: str, shapes: list[tuple[int, ...]], d: int | None
) -> tuple[int, int, bool]:
    """One of :func:`_possible_sizes`: that of ``d``, else of a first weight (E, out, in)."""
    for size in (d or shapes[0][2], shapes[0][2], None):
        if sizes := _possible_sizes(shapes, size):
            return sizes.pop()
    raise ValueError(
        f"MoEConfig.from_module: {name!r} has weights of shapes {shapes}, which fit no (D, F)"
    )


# Sizes as in the models' published configurations.
# fmt: off
MODELS = {
    "deepseek-v3": MoEConfig(
        61, 7168, 2048, 256, 8, 128, 128, 128, 129280, 2048, 3, 18432, True, 4,
        mtp=1, q_lora=1536,
    ),
    "kimi-k2": MoEConfig(
        61, 7168, 2048, 384, 8, 64, 64, 128, 163840, 2048, 1, 18432, True, q_lora=1536,
    ),
    "qwen3-30b-a3b": MoEConfig(48, 2048, 768, 128, 8, 32, 4, 128, 151936),
    "qwen3-235b-a22b": MoEConfig(94, 4096, 1536, 128, 8, 64, 4, 128, 151936),
    "gpt-oss-120b": MoEConfig(
        36, 2880, 2880, 128, 4, 64, 8, 64, 201088, window=0.55, biased=True
    ),
    "gpt-oss-20b": MoEConfig(
        24, 2880, 2880, 32, 4, 64, 8, 64, 201088, window=0.55, biased=True
    ),
    "olmoe-1b-7b": MoEConfig(16, 2048, 1024, 64, 8, 16, 16, 128, 50304),
    "mixtral-8x7b": MoEConfig(32, 4096, 14336, 8, 2, 32, 8, 128, 32000),
    "mixtral-8x22b": MoEConfig(56, 6144, 16384, 8, 2, 48, 8, 128, 32768),
    "mixtral-8x22b-g8t8": MoEConfig(56, 6144, 2048, 64, 8, 48, 8, 128, 32768),
    "qwen2-57b-a14b": MoEConfig(28, 3584, 2560, 64, 8, 28, 4, 128, 151936, 20480),
    "llama4-scout": MoEConfig(48, 5120, 8192, 16, 1, 40, 8, 128, 202048, 8192),
    "internal-352b": MoEConfig(60, 4096, 14336, 32, 3, 32, 8, 128, 65536),
}
# fmt: on
