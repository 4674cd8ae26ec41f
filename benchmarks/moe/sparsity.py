"""Regimes of sparsity on this CPU: model beside measurement, and the same on H100 and B200.

    python benchmarks/moe/sparsity.py [--plot FILE.png] [--out FILE.json]
    python benchmarks/moe/sparsity.py --check [--gflop 50]   # all rows of cpu_ops.py, or cheap ones
    python benchmarks/moe/sparsity.py --gloo                 # a step of two gloo ranks

First the machine is calibrated (``moe_calibration.calibrate``, ``--calibrate`` seconds), on other
shapes than those measured, with ``--seconds`` per row. Two sweeps over E, K and F have constant
FLOPs (T K F) and constant bytes of weights (E F). Every point has the predicted shares of
computation, memory, communication (8 ranks) and quantisation. ``--clock process`` with one thread
measures process time, for a machine with other jobs.
"""

import itertools
import math
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable

from ep_rank import RankLayer
from peers import bind, make_peers
from report import at, figure, parse, show
from shapes import CPU_ROWS, make_operands, Row, Shape

import torch
import torch.distributed as dist
from torch.distributed._moe.all_to_all import TokenSwitchAllToAll
from torch.distributed._tools import moe_calibration, moe_cost_model as cost
from torch.distributed._tools.moe_cpu_model import cpu_experts, cpu_layer, cpu_rate
from torch.distributed._tools.moe_exchange_model import all_to_all
from torch.distributed._tools.moe_profile import Profile, profile
from torch.distributed.device_mesh import init_device_mesh

from measure import interleaved_seconds, on_gloo_ranks, over_ranks, save


T, D = 512, 1024
# (F, E, K): finer experts at constant FLOPs; then more FLOPs over the same weights.
SWEEPS = {
    "constant FLOPs (K F = 2048)": [
        (2048, 8, 1), (1024, 16, 2), (512, 32, 4), (256, 64, 8), (128, 128, 16),
    ],
    "constant bytes (E F = 16384)": [
        (512, 32, 1), (512, 32, 4), (512, 32, 16), (128, 128, 4), (128, 128, 16),
    ],
}  # fmt: skip
RANKS = 8
CLOCKS = {"wall": time.perf_counter, "process": time.process_time}


def predicted_seconds(p: Profile, row: Row, hit: float) -> float:
    """The model's answer for a row of cpu_ops.py."""
    assert p.cpu is not None
    dtype = {torch.bfloat16: "bf16", torch.float32: "fp32"}[row.dtype]
    return row.layers * cpu_experts(
        p.cpu, *row.shape.sizes().values(), hit=hit, dtype=dtype,
        pass_="fwd+bwd" if row.backward else "fwd", transposed=row.shape.gpt_oss,
    )  # fmt: skip


def compared(row: dict, seconds: float, model: float) -> dict:
    ms = {"ms": 1e3 * seconds, "model_ms": 1e3 * model}
    return row | ms | {"error": model / seconds - 1}


def measure(p: Profile, rows: Iterable[Row], seconds: float, clock: str) -> list[dict]:
    """Measured and predicted seconds of every row."""
    out = []
    for row in rows:
        layers = range(row.layers)
        operands = [make_operands(row.shape, dtype=row.dtype, layer=i) for i in layers]
        hit = statistics.mean(o.ids.unique().numel() for o in operands)
        ours, *_ = make_peers(row.shape)[0]
        steps = []
        for o in operands:
            args = (o.x, o.ids, o.weights, *ours.leaves(o))
            steps.append(bind(ours.call, args, o.grad if row.backward else None))
        calls = [lambda: [step() for step in steps]]
        (got,) = moe_calibration.measure_calls(calls, seconds, CLOCKS[clock], least=1)
        sizes = {"id": row.id, **row.shape.sizes()}
        out.append(compared(sizes, got, predicted_seconds(p, row, hit)))
    show("Measured and predicted", out, ("id", "ms", "model_ms", "error"))
    return out


def summary(rows: list[dict]) -> dict[str, float]:
    size = sorted(abs(r["error"]) for r in rows)
    p90 = size[min(len(size) - 1, int(0.9 * len(size)))]
    median = statistics.median(size)
    result = {"rows": len(size), "median_error": median, "p90_error": p90}
    print({k: round(v, 3) for k, v in result.items()})
    return result


def shares(name: str, f: int, e: int, k: int) -> dict:
    """Predicted shares of a layer on a GPU with 8 ranks, forward and backward."""
    p, tokens, d = profile(name), 4096, 4096
    dtype = {"hopper": "fp8", "blackwell": "mxfp8"}[p.device.generation]
    local = max(e / RANKS, 1)
    parts = cost.expert_shares(
        p, tokens * k, d, f, local, kernel="deepgemm++", dtype=dtype, pass_="fwd+bwd",
        tokens=tokens,
    )  # fmt: skip
    args = (p, tokens, d, e, k, RANKS)
    comm = 2 * all_to_all(*args, domain=8, dtype=dtype, combine=False)
    comm += 2 * all_to_all(*args, domain=8, dtype="bf16", combine=True)
    whole = sum(parts.values()) + comm
    parts["communication"] = comm
    return {"ms": 1e3 * whole, **{n: v / whole for n, v in parts.items()}}


def cpu_shares(p: Profile, row: dict) -> dict[str, float]:
    """Predicted shares of a measured row: products, and memory with first touches."""
    assert p.cpu is not None
    c = p.cpu
    rows, hit = row["T"] * row["K"], cost.hit_experts(row["E"], row["T"] * row["K"])
    m = rows / hit
    inverse = 1 / cpu_rate(c, m) + 1 / cpu_rate(c, m, in_order=True)
    inverse += 1 / c.rate16 / c.wgrad
    compute = min(1.0, 6e3 * rows * row["F"] * D * inverse / row["model_ms"])
    return {"compute": compute, "memory": 1 - compute}


def sweep(p: Profile, seconds: float, clock: str) -> list[dict]:
    points = [(name, *x) for name, xs in SWEEPS.items() for x in xs]
    rows = [
        Row(Shape(f"sparsity-F{f}-E{e}-K{k}", T, D, f, e, k), backward=True)
        for _, f, e, k in points
    ]
    out = measure(p, rows, seconds, clock)
    for r, (name, f, e, k) in zip(out, points):
        r |= {"sweep": name, "cpu": cpu_shares(p, r)}
        r |= {gpu: shares(gpu, f, e, k) for gpu in ("H100", "B200")}
    return out


def plot(rows: list[dict], path: pathlib.Path) -> None:
    parts = ("compute", "memory", "communication", "quantisation")
    with figure(path, 3, 2, figsize=(9, 8)) as axes:
        for where, line in zip(("cpu", "H100", "B200"), axes):
            for name, panel in zip(SWEEPS, line):
                mine = [r for r in rows if r["sweep"] == name]
                labels = [f"F{r['F']}\nE{r['E']} K{r['K']}" for r in mine]
                key = "model_ms" if where == "cpu" else f"{where}.ms"
                whole = [at(r, key) for r in mine]
                bottom = [0.0] * len(mine)
                for part in parts:
                    heights = [r[where].get(part, 0.0) * w for r, w in zip(mine, whole)]
                    panel.bar(labels, heights, bottom=bottom, label=part)
                    bottom = [a + b for a, b in zip(bottom, heights)]
                if where == "cpu":
                    panel.plot(labels, [r["ms"] for r in mine], "kx", label="measured")
                title = "this CPU" if where == "cpu" else f"{where}, predicted"
                panel.set_title(f"{name}: {title}", fontsize=9)
                panel.set_ylabel("ms, fwd + bwd", fontsize=8)
                panel.tick_params(labelsize=7)
        axes[0][0].legend(fontsize=7)


# (T of a rank, F, E, K) of a step of two gloo ranks.
GLOO = (
    (256, 256, 16, 2), (512, 256, 16, 4), (128, 512, 24, 4), (128, 512, 32, 4),
    (64, 2048, 32, 4),
)  # fmt: skip


def gloo_step(group, tokens: int, f: int, e: int, k: int, pass_: str) -> Callable:
    """A layer on the ranks of ``group``, with all gradients if ``pass_`` is "fwd+bwd"."""
    gen = torch.Generator().manual_seed(dist.get_rank(group))
    ids = torch.rand(tokens, e, generator=gen).topk(k, 1).indices
    layer = RankLayer(TokenSwitchAllToAll(group, e), ids, D, f, e)
    return layer.step if pass_ == "fwd+bwd" else torch.no_grad()(layer.forward)


def gloo(seconds: float, clock: str) -> dict:
    """Calibrates and measures a step on one of two ranks, each with one thread."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
    group = mesh.get_group()
    p = moe_calibration.calibrate(seconds=seconds, group=group, clock=clock)
    cases = list(itertools.product(GLOO, ("fwd", "fwd+bwd")))
    steps = [gloo_step(group, *shape, pass_) for shape, pass_ in cases]
    times = interleaved_seconds(
        dict(enumerate(steps)), rounds=41, warmup=2,
        before=lambda: dist.barrier(group), clock=CLOCKS[clock],
    )  # fmt: skip
    rows = []
    for ((tokens, f, e, k), pass_), into in zip(cases, times.values()):
        (slowest,) = over_ranks([statistics.median(into)])
        model = cpu_layer(p, tokens, D, f, e, k, 2, pass_=pass_)
        sizes = {"pass": pass_, "T": tokens, "F": f, "E": e, "K": k}
        rows.append(compared(sizes, slowest, model))
    return {"rows": rows, "profile": p.to_json()}


def main() -> None:
    args = parse(
        __doc__, check=False, gloo=False, gflop=math.inf, seconds=1.0, calibrate=15.0,
        clock=("wall", "process"), threads=int, plot=pathlib.Path,
    )  # fmt: skip
    if args.threads:
        torch.set_num_threads(args.threads)
    record: dict = {}
    if args.gloo:
        record = on_gloo_ranks(2, gloo, args.calibrate, args.clock)[0]
        show("A step of two gloo ranks", record["rows"])
    else:
        p = moe_calibration.calibrate(seconds=args.calibrate, clock=args.clock)
        print(p.provenance, p.cpu)
        if args.check:
            affordable = 1e9 * args.gflop
            rows = [r for r in CPU_ROWS if r.shape.flops(r.backward) <= affordable]
            record["rows"] = measure(p, rows, args.seconds, args.clock)
            record["left_out"] = [r.id for r in CPU_ROWS if r not in rows]
        else:
            record["rows"] = sweep(p, args.seconds, args.clock)
            if args.plot:
                plot(record["rows"], args.plot)
        record["profile"] = p.to_json()
    record["summary"] = summary(record["rows"])
    save(args.out, **record)


if __name__ == "__main__":
    main()
