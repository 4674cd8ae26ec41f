# mypy: allow-untyped-defs
"""The search for a layout: those that divide the ranks and fit their memory, fastest first."""

from __future__ import annotations

import dataclasses
import itertools
import math
from dataclasses import dataclass
from typing import Any, TYPE_CHECKING

from torch.distributed._tools.moe_arguments import check, RANGES
from torch.distributed._tools.moe_layout import Layout
from torch.distributed._tools.moe_memory_model import memory
from torch.distributed._tools.moe_step_model import train_step


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed._tools.moe_config import MoEConfig
    from torch.distributed._tools.moe_memory_model import Memory
    from torch.distributed._tools.moe_profile import Profile
    from torch.distributed._tools.moe_step_model import Step
    from torch.distributed._tools.moe_traced_model import Traced


__all__ = ["Found", "Search"]

FILL = 0.95  # of the device's memory
# Most ranks that FSDP shards over: each adds a message of the ring, and a tensor at start.
MOST_SHARDS = 1024
LAYERS_PER_STAGE = 3  # sends between stages are not modelled; fewer would show

Found = tuple[float, Layout, "Step", "Memory"]  # tokens a second and GPU, of a layout


def powers(limit: int) -> list[int]:
    return [2**i for i in range(limit.bit_length())]


def _divisors(n: int) -> list[int]:
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return sorted({*small, *(n // i for i in small)})


def _unit(x: dict[str, Any]) -> int:
    """A divisor that the GPUs of a layout must have."""
    return math.lcm(
        x["tp"] * x["pp"] * x["cp"], x["pp"] * x["ep"] * x.get("expert_tp", 1)
    )


@dataclass(frozen=True)
class Search:
    """A model, the GPUs it is planned for, and fixed choices.

    Attributes:
        model, p: the model and the device.
        gpus, batch, seq: GPUs, sequences of a step, tokens of a sequence.
        dtypes: dtypes of products to choose from.
        exposed: share of exchanges that the schedule does not hide.
        traced: the model's work beside its experts, for a CPU.
        fixed: given values of :class:`.Layout`.
    """

    model: MoEConfig
    p: Profile
    gpus: int
    batch: int
    seq: int
    dtypes: tuple[str, ...]
    exposed: float
    traced: Traced | None
    fixed: dict[str, Any]

    @property
    def domain(self) -> int:
        """Ranks joined by the fast link."""
        return self.fixed.get("domain") or self.p.device.domain

    def check(self) -> None:
        """Raises for fixed values that no layout can have, with the nearest possible value."""
        model, gpus, fixed = self.model, self.gpus, self.fixed
        known = [f.name for f in dataclasses.fields(Layout) if f.name != "gpus"]
        if unknown := fixed.keys() - set(known):
            raise ValueError(
                f"plan: {sorted(unknown)} are not dimensions; those are {', '.join(known)}"
            )
        check("plan", **{n: v for n, v in fixed.items() if n in RANGES})
        Layout(**fixed)  # the choices that are names
        whole = {
            "ep": (model.experts, f"the experts, {model.experts}"),
            "tp": (model.heads, f"the attention heads, {model.heads}"),
            "cp": (self.seq, f"the tokens of a sequence, {self.seq}"),
            "expert_tp": (model.f, f"the width of an expert, {model.f}"),
        }
        counts = ("ep", "tp", "pp", "cp", "expert_tp")
        shared = ("tp",) if fixed.get("fsdp") else ()  # who share out a sequence
        for n, what, names in (
            *((n, what, (name,)) for name, (n, what) in whole.items()),
            (math.gcd(self.seq, model.heads), whole["cp"][1], shared),
            (gpus, f"the {gpus} GPUs", (*counts, "replicate")),
        ):
            for name in names:
                value = fixed.get(name, 1)
                if n % value:
                    common = math.gcd(n, gpus, whole.get(name, (0, ""))[0])
                    nearest = min(_divisors(common), key=lambda i: abs(i - value))
                    raise ValueError(
                        f"plan: {name} must divide {what}, got {value}; nearest that works: "
                        f"{name}={nearest}"
                    )
        one_sided = fixed.get("algorithm") == "one_sided"
        linked = "ranks that the fast link joins"
        for name, most, what in (
            ("tp", self.domain, linked),
            *([("ep", self.domain, f"{linked}, with one_sided")] if one_sided else []),
            ("pp", max(1, model.layers // LAYERS_PER_STAGE), "stages of three layers"),
            ("virtual", model.layers // fixed.get("pp", 1), "layers of a stage"),
        ):
            if fixed.get(name, 1) > most:
                raise ValueError(
                    f"plan: {name} must be at most the {most} {what}, got {fixed[name]}"
                )
        for a, b in (("tp", "cp"), ("pp", "ep"), ("ep", "expert_tp")):
            together = math.prod(fixed.get(n, 1) for n in {a, b, "pp"})
            if gpus % together:
                raise ValueError(
                    f"plan: {a} x {b} with pp, {together}, must divide the {gpus} GPUs"
                )

    def options(self, gpus: int) -> Iterator[dict[str, Any]]:
        """Every combination of the searched and fixed values."""
        model, fixed = self.model, self.fixed
        options: dict[str, Sequence[Any]] = {
            "tp": powers(min(8, gpus)),
            "pp": powers(min(32, model.layers, gpus)),
            "cp": (1,),
            "ep": [e for e in powers(min(model.experts, gpus)) if model.experts % e == 0],
            "micro_batch": (1, 2, 4),
            "dtype": self.dtypes,
            "recompute": ("none", "full") if fixed.get("fsdp") else ("selective", "full"),
            "algorithm": ("hierarchical",),  # flat sends more; the reason has its time
        }  # fmt: skip
        options |= {k: (v,) for k, v in fixed.items() if k in options}
        rest = {k: v for k, v in fixed.items() if k not in options}
        for values in itertools.product(*options.values()):
            yield {"node_limit": model.node_limit, **rest, **dict(zip(options, values))}

    def layout(self, x: dict[str, Any], gpus: int, batch: int) -> Layout | None:
        """The layout of a combination, or None where it does not divide."""
        model, seq, domain = self.model, self.seq, self.domain
        tp, pp, ep, virtual = x["tp"], x["pp"], x["ep"], x.get("virtual", 1)
        if (
            gpus % _unit(x)
            or tp > domain
            or model.heads % tp
            or (x.get("fsdp") and not model.mla and model.kv_heads % tp)
            or (x.get("fsdp") and seq % tp)  # ranks of tp share out a sequence
            or (ep > domain and (ep % domain or x["algorithm"] == "one_sided"))
        ):
            return None
        copies = x.get("replicate", 1)  # each has all experts
        if gpus % copies or (gpus // copies) % _unit(x):
            return None
        if (
            pp > 1
            and pp * LAYERS_PER_STAGE > model.layers
            or pp * virtual > model.layers
        ):
            return None
        replicas = x["micro_batch"] * gpus // (tp * pp * x["cp"])
        if batch % replicas or (pp > 1 and batch // replicas < pp):
            return None
        if pp > 1 and "virtual" not in x:
            x = {**x, "virtual": max(1, min(8, model.layers // pp // 2))}
        if x.get("fsdp") and "replicate" not in x:
            x = {**x, "replicate": max(1, gpus // (tp * pp * x["cp"]) // MOST_SHARDS)}
        return Layout(gpus=gpus, **x)

    def candidates(self) -> list[Layout]:
        every = (self.layout(x, self.gpus, self.batch) for x in self.options(self.gpus))
        return [x for x in every if x is not None]

    def memory(self, x: Layout, batch: int | None = None) -> Memory:
        batch = batch or self.batch
        if self.traced is not None:
            return self.traced.memory(self.model, x, self.seq, batch)
        return memory(self.model, x, seq=self.seq, global_batch=batch)

    def step(self, x: Layout, imbalance: float = 1.0) -> Step:
        kw = {"global_batch": self.batch, "seq": self.seq, "imbalance": imbalance}
        if self.traced is not None:
            return self.traced.step(self.p, self.model, x, **kw)
        return train_step(self.p, self.model, x, exposed=self.exposed, **kw)

    def fits(self, m: Memory) -> bool:
        return m.total <= FILL * self.p.device.memory

    def ranked(self, layouts: Sequence[Layout], imbalance: float = 1.0) -> list[Found]:
        """Layouts that fit, best first."""
        out = []
        for x in layouts:
            if self.fits(m := self.memory(x)):
                step = self.step(x, imbalance)
                out.append((step.tokens_per_second, x, step, m))
        out.sort(key=lambda e: -e[0])
        if out:  # among equals, the simplest
            equal = [e for e in out if e[0] > 0.995 * out[0][0]]
            best = min(
                equal, key=lambda e: (e[1].dtype != "bf16", e[1].tp * e[1].pp, e[1].ep)
            )
            out.remove(best)
            out.insert(0, best)
        return out

    def _nearest(self) -> str:
        """The next smaller and the next larger number of GPUs on which something fits."""
        gpus, each = self.gpus, math.ceil(self.batch / self.gpus)
        below: tuple[int, Layout] | None = None
        above: tuple[int, Layout] | None = None

        def fitting(n: int, x: dict[str, Any]) -> Layout | None:
            layout = self.layout(x, n, n * each)
            if layout is None or n * each > RANGES["global_batch"][1]:
                return None
            return layout if self.fits(self.memory(layout, n * each)) else None

        most = min(max(64 * gpus, 1 << 14), int(RANGES["gpus"][1]))
        for x in self.options(most):
            unit = _unit(x)
            low, high = (gpus - 1) // unit, most // unit
            closer = low and (below is None or low * unit > below[0])
            if closer and (y := fitting(low * unit, x)):
                below = (low * unit, y)
            low = gpus // unit + 1
            if low > high or (above is not None and low * unit >= above[0]):
                continue
            if fitting(high * unit, x) is None:
                continue
            while low < high:  # more GPUs share the optimizer's state
                middle = (low + high) // 2
                fit = fitting(middle * unit, x)
                low, high = (low, middle) if fit else (middle + 1, high)
            if above is None or low * unit < above[0]:
                y = fitting(low * unit, x)
                above = (low * unit, y) if y else above
        shown = [
            f"gpus={n}, ep={y.ep} tp={y.tp} pp={y.pp} with a batch of {n * each}"
            for n, y in filter(None, (below, above))
        ]
        return f". Nearest that works: {'; or '.join(shown)}" if shown else ""

    def nothing_fits(self) -> ValueError:
        """Why there is no layout, and the nearest question that has one."""
        gpus, given = self.gpus, self.fixed or "the model"
        if layouts := self.candidates():
            x = min(layouts, key=lambda x: self.memory(x).total)
            return ValueError(
                f"plan: training: nothing fits in {FILL:.0%} of {gigabytes(self.p.device.memory)} "
                f"GB; the smallest that divides {gpus} GPUs, ep={x.ep} tp={x.tp} pp={x.pp} "
                f"recompute={x.recompute}, needs {gigabytes(self.memory(x).total)} GB for weights, "
                f"gradients, optimizer and activations{self._nearest()}"
            )
        batches = set()
        for x in self.options(gpus):
            if not gpus % _unit(x):
                ranks = x["micro_batch"] * gpus // (x["tp"] * x["pp"] * x["cp"])
                least = max(1, x["pp"])
                near = (self.batch // ranks, self.batch // ranks + 1, least)
                batches |= {
                    n * ranks for n in near if n >= least and self.layout(x, gpus, n * ranks)
                }  # fmt: skip
        if batches:
            below = max((n for n in batches if n < self.batch), default=None)
            above = min((n for n in batches if n > self.batch), default=None)
            works = " or ".join(f"global_batch={n}" for n in (below, above) if n)
            return ValueError(
                f"plan: training: no layout divides gpus={gpus}, global_batch={self.batch} and "
                f"{given}: the batch must be a multiple of micro-batch times "
                f"data-parallel ranks, and fill every pipeline; nearest that works: {works}"
            )
        return ValueError(
            f"plan: training: no layout divides gpus={gpus} and {given}: "
            f"tp x pp x cp and pp x ep must divide the GPUs{self._nearest()}"
        )


def gigabytes(nbytes: float) -> str:
    return f"{nbytes / 1e9:,.{0 if nbytes > 1e10 else 3}f}"
