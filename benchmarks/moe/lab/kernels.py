"""Compiles each kernel of a layer ahead, times it beside its prediction, and profiles it.

Predictions are those of results/triton_sass.json and scaled_sass.json, a model of the machine code
on an H100, at their shapes. A kernel is timed by repeating its launch in a layer, on the same operands.
"""

import csv
import dataclasses
import functools
import json
import pathlib
import time
import zlib
from collections.abc import Callable, Iterable, Sequence

from shapes import make_operands, Shape

import torch

from . import loading
from .checks import (
    ACT,
    attempt,
    cases_of,
    FAMILIES,
    GRADIENTS,
    OSS,
    recipe_of,
    scaled_layer,
)
from .loading import generators, hook, hooked, Launch, launch, topk
from measure import interleaved_seconds, spread


RESULTS = pathlib.Path(__file__).resolve().parents[1] / "results"
# Family -> how scaled_sass.json names its kernels.
SCALED_PREFIX = {"fp8_blockwise": "fp8", "fp8_rowwise": "row", "mxfp8": "wide"}
NCU_SECTIONS = ("SpeedOfLight", "MemoryWorkloadAnalysis", "Occupancy", "WarpStateStats")


@functools.cache
def predictions() -> list[dict]:
    """Predictions: shape, family, layer and ``us`` by kernel; none without the records.

    FP8 has only the first shape.
    """
    found = []
    for file in ("triton_sass.json", "scaled_sass.json"):
        if not (RESULTS / file).exists():
            continue
        record = json.loads((RESULTS / file).read_text())
        for layer in record["layers"]:
            family = layer.get("recipe", "layer")
            prefix = SCALED_PREFIX.get(family, "")
            if family != "layer" and layer["name"] != record["layers"][0]["name"]:
                continue
            us = {
                row["kernel"].removeprefix(prefix).strip(): row["us"]
                for row in record["estimates"]
                if row["shape"] == layer["name"] and row["kernel"].startswith(prefix)
            }
            shape = Shape(layer["name"], *(layer[letter] for letter in "TDFEK"))
            found.append({"shape": shape, "family": family, "layer": layer, "us": us})
    return found


def part_of(launched: Launch, shape: Shape) -> str:
    """The part of a launch in the layer, as the predictions name it."""
    name, arguments = launched.name.removeprefix("scaled_"), launched.arguments()
    if name in ("grouped_mm_kernel", "mm_kernel"):
        return "down" if arguments["HAS_SCALE"] else "input_grad"
    if name == "weight_grad_kernel":
        is_in = tuple(arguments["out"].shape) == (shape.E, 2 * shape.F, shape.D)
        return "dw_in" if is_in else "dw_out"
    return name.removesuffix("_kernel")


def tile_of(launched: Launch) -> str:
    a = launched.kwargs
    if not {"BLOCK_M", "BLOCK_N", "BLOCK_K"} <= a.keys():
        return ""
    tile = "x".join(str(a[f"BLOCK_{letter}"]) for letter in "MNK")
    return f"{tile} warps {a['num_warps']} parts {a.get('EPILOGUE_PARTS', 1)}"


def layer_operands(shape: Shape, device: torch.device):
    """:class:`MoeOperands` of a drawn routing for launchers; on "meta" without values."""
    T, D, F, E, K = shape.sizes().values()
    if device.type == "meta":
        return blank_operands(T, D, F, E, K, T * K)
    o = make_operands(shape, device, weights_dtype=torch.float32)
    x, ids, weights, w_in, w_out = (t.detach() for t in o.layer_args())
    row_slots, slot_rows, offs, _ = launch.moe_permutation(ids, E)
    rows = {"offs": offs, "row_slots": row_slots, "slot_rows": slot_rows}
    return generators.MoeOperands(
        input=x, w_in=w_in, w_out=w_out, topk_weights=weights, grad_out=o.grad,
        b_in=None, b_out=None, w_up=None, topk_indices=ids, **rows,
    )  # fmt: skip


def blank_operands(T, D, F, E, K, R, bias: bool = False, transposed: bool = False):
    """Operands on "meta" with R rows."""

    def empty(*sizes: int, dtype=torch.bfloat16):
        return torch.empty(sizes, dtype=dtype, device="meta")

    int32 = functools.partial(empty, dtype=torch.int32)
    w_in = empty(E, D, 2 * F).mT if transposed else empty(E, 2 * F, D)
    w_out = empty(E, F, D).mT if transposed else empty(E, D, F)
    return generators.MoeOperands(
        input=empty(T, D), w_in=w_in, w_out=w_out, offs=int32(E), grad_out=empty(T, D),
        topk_weights=empty(T, K, dtype=torch.float32), row_slots=int32(R),
        slot_rows=int32(T, K), b_in=empty(E, 2 * F) if bias else None,
        b_out=empty(E, D) if bias else None, w_up=None,
        topk_indices=empty(T, K, dtype=torch.int64),
    )  # fmt: skip


def run_layer(
    plan,
    ops,
    family: str = "layer",
    act: launch.Activation = ACT,
    between=lambda: None,
    backward: bool = True,
) -> None:
    """Forward, ``between()`` and maybe backward, of an FP8 family or in bfloat16."""
    if FAMILIES[family].recipe is not None:
        scaled_layer(plan, ops, recipe_of(FAMILIES[family]), between)
        return
    experts = launch.Experts(*ops.args(), act=act)
    _, preact = launch.moe_mlp_forward(plan, experts)
    between()
    if not backward:
        return
    launch.moe_mlp_backward(plan, experts, ops.grad_out, preact, GRADIENTS)


# --- compiled ahead


def _specialisation(launched: Launch) -> str:
    """What decides which code a launch needs."""

    def kind(value: object, constant: bool) -> object:
        if isinstance(value, torch.Tensor):
            return (str(value.dtype), value.data_ptr() % 16 == 0)
        if hasattr(value, "block_shape"):
            return (str(value.base.dtype), value.block_shape, len(value.shape))
        if isinstance(value, int) and not constant:
            return (value == 1, value % 16 == 0, value.bit_length() > 31)
        return value if constant or isinstance(value, str) else type(value).__name__

    params = {p.name: p.is_constexpr for p in launched.kernel.params}
    arguments = launched.arguments().items()
    return launched.name + repr(
        [(n, kind(v, params.get(n, True))) for n, v in arguments]
    )


def _walk_case(plan, name: str, case, act: Callable) -> None:
    family, kernel = FAMILIES[name], hook(act)
    T, E, K = case.num_tokens, case.num_experts, case.top_k
    sizes = (T, case.dim, case.hidden, E, K, case.rows, True)
    ops = blank_operands(*sizes, transposed=family.act is OSS)
    if name == "topk":
        for score in ("softmax", "sigmoid"):
            logits = torch.empty(T, E, device="meta")
            options = {"score": score, "kernel": kernel}
            ids, weights = topk.moe_topk(logits, K, **options)
            topk.moe_topk_backward(weights, logits, ids, **options)
    elif name == "permutation":
        launch.moe_permutation(ops.topk_indices, E, kernel=kernel)
    elif name != "quantize":
        plan = dataclasses.replace(plan, ragged=family.ragged)
        run_layer(hooked(plan, act), ops, name, family.act)


def _walk_shape(plan, shape: Shape, act: Callable) -> None:
    for alone in (shape, dataclasses.replace(shape, T=1)):
        ops = layer_operands(alone, torch.device("meta"))
        launch.moe_permutation(ops.topk_indices, shape.E, kernel=hook(act))
        experts = launch.Experts(*ops.args(), act=ACT)
        launch.moe_mlp_forward(hooked(plan, act), experts, compute_preact=False)
    run_layer(hooked(plan, act), layer_operands(shape, torch.device("meta")))


def walk(
    plan, device, families: Iterable[str], shapes: Iterable[Shape], act: Callable
) -> dict[str, str]:
    """Passes every launch of a run on ``device`` to ``act``, on tensors without memory.

    Returns:
        The launches that failed, and why.
    """
    calls: dict[str, Callable] = {}
    if loading.NO_SCALED:
        families = [n for n in families if n != "quantize" and not FAMILIES[n].recipe]
    else:
        quantizer = functools.partial(loading.native_quantizer, kernel=hook(act))
        loading.use_quantizer(quantizer)
    for name in families:
        for case in cases_of(name, device):
            call = functools.partial(_walk_case, plan, name, case, act)
            calls[f"{name}, {case.name}"] = call
    for shape in shapes:
        calls[shape.name] = functools.partial(_walk_shape, plan, shape, act)
    for row in predictions() if device.type != "cpu" else ():
        if row["family"] in families:
            ops = layer_operands(row["shape"], torch.device("meta"))
            call = functools.partial(run_layer, hooked(plan, act), ops, row["family"])
            calls[f"{row['shape'].name}, {row['family']}"] = call
    failed: dict[str, str] = {}
    for name, call in calls.items():
        attempt(failed, name, call)
    return {name: error for name, error in failed.items() if error != "ok"}


def compile_share(
    plan, device, families, shapes, worker: int, workers: int, save: Callable
) -> dict[str, object]:
    """Compiles the share of one of ``workers``; a kernel that fails is a row that says so."""
    seen: set[str] = set()
    rows: list[dict] = []

    def compile_one(launched: Launch) -> None:
        key = _specialisation(launched)
        if key in seen:
            return
        seen.add(key)
        if zlib.crc32(key.encode()) % workers != worker:
            return
        row: dict = {"kernel": launched.name, "tile": tile_of(launched), "compiled": "no"}  # fmt: skip
        rows.append(row)
        save({"kernels": rows, "running": launched.name})
        begin = time.monotonic()
        run = functools.partial(launched.kernel.run, *launched.args, grid=launched.grid)
        done = attempt(row, "compiled", lambda: run(warmup=True, **launched.kwargs))
        if done is not None:
            if (
                device.type == "cuda"
            ):  # its launcher, by the C compiler, and its registers
                attempt(row, "compiled", lambda: done.run)
                row["registers"] = getattr(done, "n_regs", None)
                row["spills"] = getattr(done, "n_spills", None)
            row["shared"] = done.metadata.shared
        row["seconds"] = time.monotonic() - begin

    failed = walk(plan, device, families, shapes, compile_one)
    return {"kernels": rows, "failed": failed}


# --- timed


def time_kernels(
    plan, device, prediction: dict, rounds: int, backward: bool = True
) -> dict:
    """A row per shape: every kernel's microseconds, and measured / predicted."""
    shape, family, layer = (prediction[k] for k in ("shape", "family", "layer"))
    ops = layer_operands(shape, device)
    launches, ends = [], []
    recording = loading.recording(plan, launches)
    mark = lambda: ends.append(len(launches))
    run_layer(recording, ops, family, between=mark, backward=backward)
    seconds = interleaved_seconds(
        dict(enumerate(launches)), rounds=rounds, warmup=1, device=device
    )
    rows = []
    for i, launched in enumerate(launches):
        us = spread([1e6 * s for s in seconds[i]])
        part, tile = part_of(launched, shape), tile_of(launched)
        row = {"kernel": part, "tile": tile, "us": us.median, "spread_us": us[1:]}
        for name, predicted in prediction["us"].items():
            if name.rsplit(" warps")[0].rsplit(" ", 1)[0] == part:
                row |= {"predicted_us": predicted, "ratio": us.median / predicted}
                if name != f"{part} {tile}":
                    row["note"] = f"predicted for {name}"
        rows.append(row)
    sums = {"forward_us": rows[: ends[0]], "backward_us": rows[ends[0] :]}
    found: dict = {"shape": shape.name, "family": family, "kernels": rows}
    for name, part in sums.items():
        found[name] = sum(row["us"] for row in part)
        found[f"predicted_{name}"] = layer.get(name)
    return found


def worst(rows: Sequence[dict], count: int = 3) -> list[tuple[str, str, str]]:
    """(shape, family, kernel) of the largest measured / predicted; each kernel only once."""
    ratios: dict[tuple, tuple] = {}
    for row in rows:
        for kernel in row.get("kernels", ()):
            if "ratio" in kernel:
                key = (row["family"], kernel["kernel"])
                entry = (kernel["ratio"], row["shape"], *key)
                ratios[key] = max(ratios.get(key, entry), entry)
    return [entry[1:] for entry in sorted(ratios.values(), reverse=True)[:count]]


# --- profiled


def profile_one(
    plan, device, shape: Shape, family: str, part: str, backward: bool = True
) -> None:
    """One launch of one kernel between the start and the stop that ncu waits for."""
    ops = layer_operands(shape, device)
    launches: list[Launch] = []
    recording = loading.recording(plan, launches)
    run_layer(recording, ops, family, backward=backward)
    launched = next(x for x in launches if part_of(x, shape) == part)
    torch.cuda.synchronize()
    torch.cuda.profiler.start()
    launched()
    torch.cuda.synchronize()
    torch.cuda.profiler.stop()


def ncu_command(path: str) -> list[str]:
    command = [path, "--clock-control", "none", "--profile-from-start", "off", "--csv"]
    for section in NCU_SECTIONS:
        command += ["--section", section]
    return command


def ncu_metrics(log: str) -> dict[str, str]:
    """Metric -> value with its unit, from ncu's CSV between other output."""
    lines = [line for line in log.splitlines() if line.startswith('"')]
    rows = (row for row in csv.DictReader(lines) if row.get("Metric Name"))
    return {
        row["Metric Name"]: f"{row['Metric Value']} {row['Metric Unit']}"
        for row in rows
    }
