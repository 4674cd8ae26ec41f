"""The performance model against published rows: errors by level and by source.

    python benchmarks/moe/published.py                  # the table
    python benchmarks/moe/published.py --csv more.csv   # rows that no constant has seen
    python benchmarks/moe/published.py --fit            # the constants of moe_profile.py
    python benchmarks/moe/published.py --inductor       # Inductor's estimate of an all-to-all

Each row of ``published.csv`` is a fact: its source, the number as printed, its
configuration. A third of the configurations calibrate (column ``split``; all rows of
one configuration, from several releases or for dispatch and combine, are on one side).
The split was locked before the model's structure, and ``--fit`` reads only calibrating rows.
Rows of a ``--csv`` file whose id is not in ``published.csv`` are held out.
Not scored: rows that lack a part of their configuration, TPU, Mamba hybrids, memory.

A training row's note may end with what its source's own recipe says, and the version of that
recipe: the exchange, CUDA graphs, whether the exchange overlaps, what is recomputed.
"""

import argparse
import collections
import csv
import dataclasses
import json
import math
import pathlib
import re
import statistics
from typing import Any
from unittest import mock

import torch
from torch._inductor import comm_analysis, config as inductor_config
from torch.distributed._tools import moe_cost_model as cost
from torch.distributed._tools.moe_config import MODELS
from torch.distributed._tools.moe_exchange_model import all_to_all, ALL_TO_ALLS, copies
from torch.distributed._tools.moe_fit import fit as fitted
from torch.distributed._tools.moe_inference_model import infer
from torch.distributed._tools.moe_layout import Layout
from torch.distributed._tools.moe_profile import (
    BOUNDS,
    Constants,
    DEVICES,
    Profile,
    profile,
)
from torch.distributed._tools.moe_step_model import train_step


HERE = pathlib.Path(__file__).resolve().parent
Row = dict[str, str]

KERNELS = {"torchtitan": "grouped_mm", "torch_grouped": "grouped_mm"}
# Others are hierarchical.
ALGORITHMS = {
    "ll": "low_latency", "pplx": "low_latency", "onesided": "one_sided",
    "hybridep": "staged", "a2a": "flat",
}  # fmt: skip


def number(row: Row, key: str, default: float = 0) -> int:
    return int(float(row[key] or default))


def year(row: Row) -> float:
    """Year of the software: from the container's name, else from the publication."""
    if m := re.match(r"(\d\d)\.(\d\d)", row["note"]):
        return 2000 + int(m[1]) + (int(m[2]) - 1) / 12
    known = {
        "folding": 25.0, "megascale": 25.0, "deepseek": 25.0, "modelzoo": 25.8,
        "torchtitan": 25.9, "mcore_paper": 26.0, "primus": 26.2,
    }  # fmt: skip
    return 2000 + known.get(row["source"], 26.0)


def recipe(row: Row) -> str:
    return row["note"].partition("recipe ")[2].partition(": ")[2]


def graphs(row: Row) -> int:
    """CUDA graphs of a training row: 0 none, 1 of parts, 2 of whole layers or the step.
    Those of the router alone save little."""
    said = recipe(row)
    if "graph of the step" in said or "graphs of layers" in said:
        return 2
    return int("graphs attn" in said)


def grouped_rates(p: Profile, dtype: str) -> tuple[float, float]:
    """Rates of torch's grouped products over plain ones, and of weight gradients over these."""
    if dtype in cost.LOW_PRECISION:
        return p.constants.grouped8, 0.80
    return p.constants.grouped16, 0.92


class Predictor:
    """Predicts the value of a row in its own unit, with constants by GPU generation."""

    def __init__(self, constants: dict[str, Constants] | None = None) -> None:
        self._profiles: dict[str, Profile] = {}
        self._constants = constants or {}

    def profile(self, gpu: str) -> Profile:
        if gpu not in self._profiles:
            p = profile(gpu)
            c = self._constants.get(p.device.generation, p.constants)
            self._profiles[gpu] = dataclasses.replace(p, constants=c)
        return self._profiles[gpu]

    def __call__(self, row: Row) -> float | None:
        method = getattr(self, row["level"], None)
        known = row["gpu"] in DEVICES
        if method is None or not known or "not scor" in row["note"]:
            return None
        return method(row, self.profile(row["gpu"]))

    def gemm(self, r: Row, p: Profile) -> float:
        g, m, n, k = (int(re.search(rf"\b{x}=(\d+)", r["note"])[1]) for x in "GMNK")
        grouped, weights = grouped_rates(p, r["dtype"])
        relative = grouped if r["impl"] == "torch_grouped" else 1.0
        sizes = (m, n, k)
        if r["pass"] == "wgrad":
            relative, sizes = relative * weights, (n, k, m)
        t = cost.gemm(p, g, *sizes, r["dtype"], relative=relative)
        return 2 * g * m * n * k / t / 1e12 if r["unit"] == "TFLOPS" else t * 1e6

    def gemm_fb(self, r: Row, p: Profile) -> float:
        g, rows, n, d = (number(r, x) for x in ("E", "T", "n", "d"))
        m, dtype = rows / g, r["dtype"]
        relative, weights = grouped_rates(p, dtype)
        t = cost.gemm(p, g, m, n, d, dtype, relative=relative)
        t += cost.gemm(p, g, m, d, n, dtype, relative=relative)
        t += cost.gemm(p, g, n, d, m, dtype, relative=relative * weights)
        if dtype in cost.LOW_PRECISION:
            t += 2 * cost.quantize(p, rows * (d + n)) + 2 * cost.quantize(p, g * n * d)
        return t * 1e6

    def quant(self, r: Row, p: Profile) -> float:
        return cost.stream(p, 3.03 * number(r, "T")) * 1e6

    exchange = staticmethod(all_to_all)

    def a2a(self, r: Row, p: Profile) -> float:
        T, d, e, k, ep = (number(r, x) for x in ("T", "d", "E", "K", "EP"))
        domain = number(r, "domain", 8)
        limit = 4 if "top-4" in r["note"] and ep > domain else 0
        units = re.search(r"(\d+) SMs", r["note"])
        algorithm = ALGORITHMS.get(r["impl"], "hierarchical")
        t = self.exchange(
            p, T, d, e, k, ep, domain=domain, dtype=r["dtype"], algorithm=algorithm,
            node_limit=limit, combine=r["pass"] == "combine",
            units=int(units[1]) if units else 0,
        )  # fmt: skip
        if r["unit"] == "us":
            return t * 1e6
        # Published bandwidth counts copies to nodes, or to ranks of one domain, own included.
        w = copies(ep, domain, e, k, limit)
        logical = T * d * cost.ITEMSIZE[r["dtype"]]
        return logical * (w.nodes if ep > domain else w.ranks) / t / 1e9

    def layer_ep(self, r: Row, p: Profile) -> float:
        T, d, f, k, ep = (number(r, x) for x in ("T", "d", "n", "K", "EP"))
        domain, e, dtype = number(r, "domain", 8), number(r, "E"), r["dtype"]
        scale = 1e3 if r["unit"] == "ms" else 1e6
        if r["impl"] == "megamoe":
            return fused_layer(p, T, d, f, e, k, ep, domain, dtype) * scale
        algorithm = ALGORITHMS.get(r["impl"], "hierarchical")
        comm = 2 * all_to_all(p, T, d, e, k, ep, domain=domain, algorithm=algorithm)
        pass_, rows = r["pass"], T * k
        options = {"dtype": dtype, "pass_": pass_, "tokens": T}
        t = cost.experts(p, rows, d, f, e / ep, kernel="mcore", **options)
        t += cost.dense_mlp(p, T, d, number(r, "shared"), dtype, pass_)
        passes = ALL_TO_ALLS[algorithm].gathers
        t += cost.stream(p, 4 * passes * rows * d, 2 * passes) if passes else 0.0
        return (t + comm + cost.router(p, T, d, e, k, pass_)) * scale

    def layer1(self, r: Row, p: Profile) -> float:
        T, d, f, e, k = (number(r, x) for x in ("T", "d", "n", "E", "K"))
        pass_ = "fwd" if r["pass"] == "inference" else r["pass"]
        kernel = KERNELS.get(r["impl"], r["impl"])
        kernel = kernel if kernel in cost.EXPERT_KERNELS else "mcore"
        options = {"dtype": r["dtype"], "pass_": pass_, "tokens": T}
        t = cost.experts(p, T * k, d, f, e, kernel=kernel, **options)
        if r["impl"] == "torchtitan":
            t += cost.router(p, T, d, e, k)
        t += cost.dense_mlp(p, T, d, number(r, "shared"), "bf16", pass_)
        if r["unit"] == "TFLOPS":
            return cost.expert_flops(T * k, d, f, pass_=pass_) / t / 1e12
        return t * 1e3

    def kernel(self, r: Row, p: Profile) -> float:
        T, d, f, e, k = (number(r, x) for x in ("T", "d", "n", "E", "K"))
        rows = T * k
        sizes = {"up": (2 * f, d, 2 * rows * f), "dH": (f, d, 8 * rows * f)}
        n, depth, extra = sizes.get(r["pass"], (d, 2 * f, 0))  # or dX
        return cost.gemm(p, e, rows / e, n, depth, extra_bytes=extra) * 1e3

    def flux(self, r: Row, p: Profile) -> float:
        """Tensor-parallel experts: all-gather before, reduce-scatter after, overlapped."""
        T, d, f, e, k = (number(r, x) for x in ("T", "d", "n", "E", "K"))
        tp, ep = number(r, "TP"), number(r, "EP", 1)
        tokens, up = 8 * T, r["pass"] == "layer0"
        rows, local = tokens * k / ep, e / ep
        n, depth = (f // tp, d) if up else (d, f // tp)
        t = cost.gemm(p, local, rows / local, n, depth)
        t += 0 if up else cost.stream(p, 2 * rows * d + 2 * tokens * d)
        comm = tokens * d * 2 * 7 / 8 / (p.device.fast * p.constants.fast)
        comm += p.constants.fast_us * 1e-6
        return (max(t, comm) + 0.15 * min(t, comm)) * 1e3

    def train(self, r: Row, p: Profile) -> float | None:
        if r["model"] not in MODELS or r["impl"] == "fsdp+ep":
            return None
        model, tp, note = MODELS[r["model"]], number(r, "TP", 1), r["note"]
        if "w/o MTP" in note:
            model = dataclasses.replace(model, mtp=0)
        shared_tp = "expert TP = TP" in note
        shared_tp |= r["source"] == "megascale" and r["impl"] == "mcore"
        said = recipe(r)
        hidden = r["impl"] in ("dualpipe", "megascale")
        flat = "alltoall" in said or r["source"] in ("folding", "megascale")
        algorithm = "staged" if "hybridep" in said else "hierarchical"
        exposed = 0.15 if hidden else None
        if said:
            exposed = p.constants.exposed if "overlap" in said else 1.0
        layout = Layout(
            gpus=number(r, "n_gpus"), ep=number(r, "EP", 1), tp=tp, pp=number(r, "PP", 1),
            cp=8 if r["impl"] == "megascale" else number(r, "CP", 1),
            expert_tp=tp if shared_tp else 1, virtual=number(r, "VP", 1),
            micro_batch=number(r, "mbs", 1), dtype=r["dtype"], recompute="selective",
            algorithm="flat" if flat else algorithm, node_limit=model.node_limit,
            domain=number(r, "domain", 8), graphs=graphs(r),
            kernel="mcore_fused" if "fused experts" in said else "mcore",
        )  # fmt: skip
        seq = number(r, "seq", 4096)
        step = train_step(
            p, model, layout, global_batch=number(r, "gbs", 256), seq=seq,
            exposed=exposed, year=year(r),
        )  # fmt: skip
        per_token = model.train_flops(seq)
        rate = step.tokens_per_second
        units = {"TFLOPS": per_token / 1e12, "%MFU": 100 * per_token / p.device.bf16}
        return rate * units.get(r["unit"], 1)

    def infer(self, r: Row, p: Profile) -> float | None:
        if not number(r, "T") or r["model"] not in MODELS:
            return None
        return 8 * infer(
            p, MODELS[r["model"]], number(r, "T"), number(r, "seq"), ep=number(r, "EP"),
            phase=r["pass"], domain=number(r, "domain", 8),
            redundant=16 if r["impl"] == "rtp-llm" else 32,
            imbalance=1.25 if "imbalance" in r["note"] else 1.0,
        )  # fmt: skip


class InductorPredictor(Predictor):
    """All-to-alls as Inductor estimates them: by bytes and ranks only.

    A switch with two levels is two all-to-alls in a graph: one between nodes, with a row for each
    node of a token, and one inside a node. It gets the longer one's time, or the sum of both if
    they follow each other. The estimate takes link rates from a table, or from
    ``config`` for the device here, and the number of a node's GPUs from the driver; here it is
    the row's domain.
    """

    def __init__(self, direct: bool) -> None:
        super().__init__()
        self.direct = direct

    def __call__(self, row: Row) -> float | None:
        return super().__call__(row) if row["level"] == "a2a" else None

    def exchange(
        self, p: Profile, tokens: float, d: int, e: int, k: int, ep: int, *, domain: int,
        dtype: str, algorithm: str, node_limit: int, **_: Any,
    ) -> float:  # fmt: skip
        kind = ALL_TO_ALLS[algorithm]
        w = copies(ep, domain, e, k, node_limit, kind.dedup)
        row = tokens * d * cost.ITEMSIZE[dtype]
        if ep <= domain or kind.one_hop:
            return self.seconds(p, row * w.ranks, ep, min(ep, domain), domain)
        levels = (
            self.seconds(p, row * w.nodes, ep // domain, 1, domain),
            self.seconds(p, row * w.ranks, domain, domain, domain),
        )
        return max(levels) + kind.serial * min(levels)

    def seconds(
        self, p: Profile, nbytes: float, ranks: int, near: int, domain: int
    ) -> float:
        """Seconds over ``ranks``, ``near`` of them on each node."""
        hopper = p.device.generation == "hopper"
        kind = comm_analysis.NVIDIA_GPU_TYPE
        kind = kind.HOPPER if hopper else kind.BLACKWELL
        table = comm_analysis._GPU_NVLINK_BW[kind]
        with (
            mock.patch.object(torch.cuda, "is_available", lambda: True),
            mock.patch.object(torch.cuda, "device_count", lambda: domain),
            mock.patch.object(comm_analysis, "_has_nvlink", lambda: True),
            mock.patch.object(comm_analysis, "get_gpu_type", lambda: kind),
            mock.patch.object(comm_analysis, "_ranks_per_node", lambda *args: near),
            inductor_config.patch(
                estimate_direct_all_to_all=self.direct,
                # An H800 is a Hopper with fewer links.
                intra_node_bw=table * p.device.fast / (450e9 if hopper else 900e9),
                inter_node_bw=p.device.slow / 1e9,
            ),
        ):
            estimate = comm_analysis.estimate_nccl_collective_runtime_impl
            coll = comm_analysis.NCCL_COLL.ALL_TO_ALL
            return 1e-3 * estimate(int(nbytes), ranks, coll)


def fused_layer(
    p: Profile, T: int, d: int, f: int, e: int, k: int, ep: int, domain: int, dtype: str
) -> float:
    """One kernel for dispatch, both products and combine (DeepGEMM's MegaMoE)."""
    comm = sum(
        all_to_all(p, T, d, e, k, ep, domain=domain, dtype=w, algorithm="one_sided")
        for w in ("fp8", "bf16")
    )
    rows = T * k
    hit = cost.hit_experts(e / ep, rows)
    launch = p.constants.launch_us * 1e-6
    sizes = ((2 * f, d), (d, f))
    t = sum(cost.gemm(p, hit, rows / hit, *size, dtype) - launch for size in sizes)
    return max(t, comm) + 0.15 * min(t, comm)


# ---- fit and table ---------------------------------------------------------------------

# Constants and the levels they are fitted on, bottom up: links, kernels, then the step.
STAGES = (
    (("a2a",), ("fast", "fast_us", "slow", "slow_us", "setup_us", "floor_us", "fabric",
                "unit_rate", "row_bytes")),
    (("gemm", "gemm_fb", "quant", "kernel", "layer1", "layer_ep"),
     ("mma16", "mma8", "memory", "tile_start", "launch_us", "grouped16", "grouped8")),
    (("train", "infer"), ("stack", "host_us", "expert_us", "exposed", "drift")),
)  # fmt: skip
# Constants of the software, not of the GPU: one value for all generations.
SHARED = ("host_us", "expert_us", "exposed", "drift")


def stiffness(name: str) -> float:
    return 0.6 if name in ("mma16", "mma8", "tile_start") else 0.03


def fit(rows: list[Row]) -> dict[str, Constants]:
    """Constants by generation from the rows that calibrate."""
    generations = ("hopper", "blackwell", "cdna")
    values = {g: dataclasses.asdict(Constants()) for g in generations}
    values["blackwell"]["tile_start"] = 100.0  # tiles overlap their ends: tensor memory
    generation = lambda r: profile(r["gpu"]).device.generation
    by_gen = {g: [r for r in rows if generation(r) == g] for g in generations}

    def error(rs: list[Row], constants: dict[str, dict[str, float]]) -> float:
        predict = Predictor({g: Constants(**v) for g, v in constants.items()})
        count = collections.Counter((r["source"], r["level"]) for r in rs)
        total = 0.0
        for r in rs:
            off = abs(math.log((predict(r) or 1e-9) / float(r["value"])))
            total += min(off, 1.0) / count[r["source"], r["level"]] ** 0.5
        return total

    for levels, names in STAGES:
        own = [n for n in names if n not in SHARED]
        for g in generations:
            rs = [r for r in by_gen[g] if r["level"] in levels]
            if not rs:
                continue
            start = {n: values[g][n] for n in own}
            miss = lambda v: error(rs, {**values, g: {**values[g], **v}})
            options = {"bounds": BOUNDS, "stiffness": stiffness}
            values[g].update(fitted(start, miss, **options))
        if shared := [n for n in names if n in SHARED]:
            _fit_shared(rows, levels, shared, values, error)
    rounded = lambda v: {k: float(f"{x:.4g}") for k, x in v.items()}
    return {g: Constants(**rounded(v)) for g, v in values.items()}


def _fit_shared(rows, levels, shared, values, error) -> None:
    """Fits the software's constants, and each generation's ``stack`` again."""
    rs = [r for r in rows if r["level"] in levels]
    start = {n: values["hopper"][n] for n in shared}
    start |= {f"stack {g}": v["stack"] for g, v in values.items()}

    def spread(v: dict[str, float]) -> dict[str, dict[str, float]]:
        common = {n: v[n] for n in shared}
        return {g: {**values[g], **common, "stack": v[f"stack {g}"]} for g in values}

    bounds = {n: BOUNDS[n.split()[0]] for n in start}
    best = fitted(start, lambda v: error(rs, spread(v)), bounds=bounds)
    values.update(spread(best))


def scored(path: pathlib.Path) -> list[Row]:
    """Rows that the model has an answer for, with their split."""
    with open(HERE / "published.csv", newline="") as file:
        ours = csv.DictReader(file)
        known = {r["id"]: r["split"] for r in ours}
    with open(path, newline="") as file:
        given = csv.DictReader(file)
        if missing := {*ours.fieldnames} - {"split", *(given.fieldnames or ())}:
            raise SystemExit(
                f"{path} lacks columns of published.csv: {sorted(missing)}"
            )
        rows = list(given)
    predict = Predictor()
    for r in rows:
        r["split"] = known.get(r["id"], "held out")
    return [r for r in rows if r["split"] != "not scored" and predict(r) is not None]


def errors(rows: list[Row], predict: Predictor) -> list[tuple[float, Row]]:
    """Signed relative errors."""
    return [(predict(r) / float(r["value"]) - 1, r) for r in rows]


def table(errs: list[tuple[float, Row]]) -> list[dict[str, Any]]:
    """Median, 90th percentile and bias of the held-out rows, by level and by source."""
    groups = collections.defaultdict(list)
    for error, row in errs:
        if row["split"] == "held out":
            groups[0, "all"].append(error)
            groups[1, f"level {row['level']}"].append(error)
            groups[2, f"source {row['source']}"].append(error)
        elif row["split"] == "calibration":
            groups[3, "calibration rows"].append(error)
    out = []
    for (_, name), values in sorted(groups.items()):
        size = sorted(map(abs, values))
        out.append({
            "rows": name,
            "n": len(values),
            "median": round(100 * statistics.median(size), 1),
            "p90": round(100 * size[min(len(size) - 1, int(0.9 * len(size)))], 1),
            "bias": round(100 * statistics.median(values), 1),
        })  # fmt: skip
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--csv", type=pathlib.Path, default=HERE / "published.csv")
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--fit", action="store_true")
    parser.add_argument("--inductor", action="store_true")
    args = parser.parse_args()
    if not args.csv.is_file():
        parser.error(f"argument --csv: no file {str(args.csv)!r}")
    if args.json and not args.json.absolute().parent.is_dir():
        parser.error(f"argument --json: no folder {str(args.json.parent)!r}")
    rows = scored(args.csv)
    if args.fit:
        constants = fit([r for r in rows if r["split"] == "calibration"])
        for g, c in constants.items():
            values = [f'        "{k}": {v},' for k, v in dataclasses.asdict(c).items()]
            print("\n".join([f'    "{g}": {{', *values, "    },"]))
        return
    if args.inductor:
        rows = [r for r in rows if r["level"] == "a2a"]
        ring = table(errors(rows, InductorPredictor(direct=False)))[0]
        direct = table(errors(rows, InductorPredictor(direct=True)))
        result = [{**ring, "rows": "all, as a ring"}, *direct]
    else:
        result = table(errors(rows, Predictor()))
    print(f"{'':24}{'n':>5}{'median %':>10}{'p90 %':>8}{'bias %':>8}")
    for r in result:
        print(f"{r['rows']:24}{r['n']:5}{r['median']:10}{r['p90']:8}{r['bias']:+8}")
    if args.json:
        flags = " --inductor" if args.inductor else ""
        command = f"python benchmarks/moe/published.py{flags} --json FILE"
        data = {"command": command, "rows": result}
        args.json.write_text(json.dumps(data, indent=1) + "\n")


if __name__ == "__main__":
    main()
