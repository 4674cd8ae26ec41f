"""F.moe_mlp beside the CPU kernels of serving engines, each in its own process.

    python benchmarks/moe/engines.py --install [--engines vllm ...]
    python benchmarks/moe/engines.py --out FILE.json [--engines vllm ...] [--formats bfloat16 ...]
        [--rows PATTERN ...] [--threads 1 2] [--pages huge small] [--rounds 15]

``--install`` makes an environment for each of the engines in build/engines from the requirements in engine/.
An engine without one is left out with a message. Tensors are drawn once and written to a file
that all processes map. Every output is compared with float64. bfloat16 outputs may have the noise of
the unfused layer in that dtype. Outputs of low-bit weights may differ by a share of the norm, as an
engine may round rows or weights once more. The JSON has the errors of what an engine cannot do.

In every round all engines at all numbers of threads take turns with a bfloat16 product alone
(the peak) and a sum over memory (the stream). Each round has another routing, so that weights come
from memory. All engines have weights in the same kind of pages: ``huge``, or ``small`` 4 KiB pages
in scattered places, as on a machine that has run for long. Without this choice, the bytes per second
that one thread reads differ by half between two processes. ``forward+backward`` has no peer, as no
engine here trains on a CPU. Rows of an earlier run in ``--out`` stay unless they are measured again.
"""

import fnmatch
import json
import os
import pathlib
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any, NamedTuple

from engine.worker import PEAK_SIZE, STREAM_BYTES
from report import parse, progress, show
from shapes import ENGINE_SHAPES, make_operands, PASSES, Shape

import torch
from torch import Tensor
from torch.testing._internal.moe_low_bit import low_bit_format
from torch.testing._internal.moe_reference import moe_mlp_reference

import measure


ROOT = pathlib.Path(__file__).resolve().parents[2]
HERE = pathlib.Path(__file__).resolve().parent / "engine"
PEERS = sorted(p.stem.removeprefix("requirements-") for p in HERE.glob("*.txt"))
OURS, BF16 = "ours", "bfloat16"
PAGES = ("huge", "small")
FORMATS = (BF16, "int8_rowwise", "fp8_128x128", "mxfp4", "int4_1x32")
LOW_BIT_TOKENS = (1, 16, 256)  # of the rows that are measured in other formats as well
ROUTINGS = 8
# Seconds until the threads of the previous engine stop spinning.
PAUSE = 0.08
QUICK = (Shape("tiny", 3, 256, 128, 4, 2), Shape("tiny-prefill", 300, 256, 128, 4, 2))
# Norm of the error over that of the result.
ALLOWED = {
    BF16: 0.01,
    "int8_rowwise": 0.05,
    "fp8_128x128": 0.08,
    "mxfp4": 0.2,
    "int4_1x32": 0.2,
}


class Settings(NamedTuple):
    """How a run measures."""

    rounds: int
    seconds: float  # of all calls of a row


class EngineError(RuntimeError):
    """An engine answered that it failed, or died."""


class Engine:
    """The process of an engine; see engine/worker.py for the commands."""

    def __init__(
        self,
        name: str,
        threads: int,
        pages: str,
        script: pathlib.Path = HERE / "worker.py",
    ) -> None:
        python = str(python_of(name)) if name in PEERS else sys.executable
        command = [python, str(script), name, str(threads), pages]
        self.name, self.threads = name, threads
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        environment = {"OMP_NUM_THREADS": str(threads), "PATH": "/usr/bin:/bin"}
        environment["THP_MEM_ALLOC_ENABLE"] = str(int(pages == "huge"))
        environment |= {k: v for k, v in os.environ.items() if k == "MOE_CLIENTS"}
        self.log = tempfile.TemporaryFile()  # noqa: SIM115, close() does
        self.process = subprocess.Popen(
            command, stderr=self.log, env=environment, **pipes
        )

    def __call__(self, command: str, *args: object) -> Any:
        try:
            self.process.stdin.write(json.dumps([command, *args]) + "\n")
            self.process.stdin.flush()
            line = self.process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            self.log.seek(0)
            last = self.log.read().decode(errors="replace").strip().splitlines()[-1:]
            status = self.process.wait()
            raise EngineError(f"ended with status {status}: {' '.join(last)[:200]}")
        answer = json.loads(line)
        if "error" in answer:
            raise EngineError(answer["error"])
        return answer["value"]

    def close(self) -> None:
        self.process.communicate()
        self.log.close()


def python_of(name: str) -> pathlib.Path:
    return ROOT / "build/engines" / name / "bin/python"


def install(names: list[str]) -> None:
    """Makes the environments of engines."""
    for name in names:
        folder = python_of(name).parents[1]
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True)
        words = ["-m", "pip", "install", "-r", str(HERE / f"requirements-{name}.txt")]
        subprocess.run([str(python_of(name)), *words], check=True)


def draw_weights(shape: Shape, fmt: str) -> dict[str, Tensor]:
    """The weights of the file: w_in (E, 2F, D) and w_out (E, D, F), with scales for low-bit formats."""
    if fmt == BF16:
        layer = make_operands(shape)
        return {"w_in": layer.w_in.detach(), "w_out": layer.w_out.detach()}
    g = torch.Generator().manual_seed(0)
    sizes = {"w_in": (2 * shape.F, shape.D), "w_out": (shape.D, shape.F)}
    drawn: dict[str, Tensor] = {}
    for name, size in sizes.items():
        weight = low_bit_format(fmt).draw(1, *size, g)
        data = (
            weight.data.view(torch.uint8).repeat(shape.E, 1, 1).view(weight.data.dtype)
        )
        drawn[name] = data
        drawn[f"{name}_scale"] = weight.scale.repeat(shape.E, 1, 1)
        drawn[f"{name}_values"] = weight.values.expand(shape.E, -1, -1)
    return drawn


def draw_rows(shape: Shape) -> dict[str, Any]:
    layer = make_operands(shape, weights_dtype=torch.float32)
    routings = [
        (shape.topk_indices(i).int(), layer.weights.detach().roll(i, 0))
        for i in range(ROUTINGS)
    ]
    return {"x": layer.x.detach(), "grad": layer.grad, "routings": routings}


def reference(
    shape: Shape, weights: dict[str, Tensor], rows: dict, count: int = 16
) -> tuple:
    """Some tokens, and their output for the first routing in float64."""
    ids, scores = rows["routings"][0]
    tokens = torch.linspace(0, shape.T - 1, min(shape.T, count)).long().unique()
    x, y = rows["x"].double(), torch.zeros(shape.T, shape.D, dtype=torch.float64)
    for e in ids[tokens].unique().tolist():
        t, k = (ids[tokens] == e).nonzero().unbind(1)
        w = [
            weights.get(f"{n}_values", weights[n])[e : e + 1].double()
            for n in ("w_in", "w_out")
        ]
        offs = torch.tensor([len(t)], dtype=torch.int32)
        slots = torch.arange(len(t), dtype=torch.int32)
        score = scores[tokens[t], k, None].double()
        out, _ = moe_mlp_reference(x[tokens[t]], *w, offs, score, slots, slots[:, None])
        y.index_add_(0, tokens[t], out)
    return tokens, y[tokens]


class Bench:
    """The processes, by name and number of threads, and the folder of the tensors they map."""

    def __init__(
        self, names: list[str], threads: list[int], pages: str, folder: pathlib.Path
    ) -> None:
        self.folder, self.threads, self.pages = folder, threads, pages
        self.engines = {
            (name, n): Engine(name, n, pages) for n in threads for name in names
        }
        self.versions = {key[0]: e("version") for key, e in self.engines.items()}
        self.forms: dict[tuple[str, int], list[str]] = {}
        self.left_out: dict[str, str] = {}

    def close(self) -> None:
        for engine in self.engines.values():
            engine.close()

    def load(self, weights: dict[str, Tensor], fmt: str, top_k: int) -> None:
        """Makes all engines load weights; one that cannot is left out of these rows."""
        self.weights, self.fmt, path = weights, fmt, self.folder / "weights.pt"
        stored = {n: t for n, t in weights.items() if not n.endswith("_values")}
        torch.save(stored, path)
        self.forms, self.left_out = {}, {}
        for key, engine in self.engines.items():
            if engine.process.poll() is not None:  # it died of the format before
                engine.close()
                engine = self.engines[key] = Engine(*key, self.pages)
            try:
                self.forms[key] = engine("load", str(path), fmt, top_k)
            except EngineError as error:
                self.left_out[key[0]] = str(error)

    def checked_calls(
        self, shape: Shape, rows: dict, trains: bool
    ) -> dict[tuple, float]:
        """(engine, threads, form, backward) with a correct result, and its error."""
        path, output = (str(self.folder / name) for name in ("rows.pt", "output.pt"))
        torch.save(rows, path)
        tokens, expected = reference(shape, self.weights, rows)
        found: dict[tuple, float] = {}
        for key, form in [
            (key, form) for key, forms in self.forms.items() for form in forms
        ]:
            try:
                self.engines[key]("check", path, form, output)
                difference = torch.load(output).double()[tokens] - expected
                error = (difference.norm() / expected.norm()).item()
                if not error < ALLOWED[self.fmt]:
                    raise EngineError(f"another layer: error {error:.2g} of the norm")
            except EngineError as error:
                self.left_out[f"{key[0]} {form}"] = str(error)
                continue
            found[(*key, form, False)] = error
            if trains and key[0] == OURS:
                found[(*key, form, True)] = error
        return found

    def rows_of(self, shape: Shape, settings: Settings) -> list[dict[str, Any]]:
        """Rows of the JSON of a shape, on the weights that are loaded."""
        trains = self.fmt == BF16 and shape.T >= 256
        rows = draw_rows(shape)
        errors = self.checked_calls(shape, rows, trains)
        calls = {
            key: lambda i, e=self.engines[key[:2]], call=key[2:]: e("run", *call, i)
            for key in errors
        }
        for n in self.threads:
            for command in ("peak", "stream"):
                calls[command, n] = lambda i, e=self.engines[OURS, n], c=command: e(c)
        start = time.perf_counter()
        for call in calls.values():
            call(0)
        took = time.perf_counter() - start
        rounds = measure.affordable_rounds(settings.rounds, took, settings.seconds)
        seconds: dict[tuple, list[float]] = {key: [] for key in calls}
        for i in range(rounds):
            order = list(calls)
            for key in order[i % len(order) :] + order[: i % len(order)]:
                time.sleep(PAUSE)
                seconds[key].append(calls[key](i))
        hits = statistics.mean(len(ids.unique()) for ids, _ in rows["routings"])
        return [
            self.row(shape, n, backward, seconds, errors, hits)
            for backward in ((False, True) if trains else (False,))
            for n in self.threads
        ]

    def row(
        self,
        shape: Shape,
        threads: int,
        backward: bool,
        seconds: dict,
        errors: dict,
        hits: float,
    ) -> dict[str, Any]:
        here = {
            k: v for k, v in seconds.items() if k[1] == threads and k[3:] == (backward,)
        }
        medians = {key: statistics.median(values) for key, values in here.items()}
        best = min((key for key in here if key[0] == OURS), key=medians.__getitem__)
        ours = here[best]
        peers = [key for key in here if key[0] != OURS]
        peak = 2 * PEAK_SIZE**3 / statistics.median(seconds["peak", threads])
        stream = STREAM_BYTES / statistics.median(seconds["stream", threads])
        bits = 16 if self.fmt == BF16 else low_bit_format(self.fmt).bits
        moved = hits * 3 * shape.D * shape.F * bits / 8
        row = {
            "id": f"{shape.name}/{self.fmt}/{PASSES[backward]}/{threads}/{self.pages}",
            "shape": shape.sizes(),
            "format": self.fmt,
            "pass": PASSES[backward],
            "threads": threads,
            "pages": self.pages,
            "rows_per_expert": round(shape.T * shape.K / hits, 1),
            "rounds": len(ours),
            "ours": best[2],
            "milliseconds": measure.spread(1e3 * s for s in ours)._asdict(),
            "of_peak": shape.flops(backward) / medians[best] / peak,
            "of_stream": moved / medians[best] / stream,
            "peak_gflops": peak / 1e9,
            "stream_gb_per_s": stream / 1e9,
            "forms": {
                f"{key[0]}: {key[2]}": {
                    "error": errors[key],
                    "milliseconds": measure.spread(1e3 * s for s in values)._asdict(),
                    "over_ours": measure.ratio_record(values, ours),
                }
                for key, values in here.items()
            },
            "left_out": self.left_out.copy(),
        }
        alone = seconds.get((OURS, 1, best[2], backward))
        if threads > 1 and alone:
            row["speedup"] = measure.ratio_record(alone, ours)
        if peers:
            peer = min(peers, key=medians.__getitem__)
            row["best_peer"] = f"{peer[0]}: {peer[2]}"
            row["ratio"] = measure.ratio_record(here[peer], ours)
        return row


def main(argv: list[str] | None = None) -> int:
    options = {
        "install": False,
        "quick": False,
        "engines": list,
        "rows": list,
        "rounds": 15,
    }
    options |= {"formats": dict.fromkeys(FORMATS), "pages": dict.fromkeys(PAGES)}
    options |= {"threads": [1, 2], "seconds": 30.0}
    args = parse(__doc__, argv=argv, **options)
    if args.install:
        install(args.engines or PEERS)
        return 0
    there = [name for name in PEERS if python_of(name).exists()]
    names = [OURS, *(there if args.engines is None else args.engines)]
    shapes = QUICK if args.quick else ENGINE_SHAPES
    settings = Settings(3, 1.0) if args.quick else Settings(args.rounds, args.seconds)
    measured: dict[str, dict] = {}
    if args.out and args.out.is_file():
        measured = {row["id"]: row for row in json.loads(args.out.read_text())["rows"]}
    wanted = [
        (fmt, shape)
        for fmt in args.formats
        for shape in shapes
        if fmt == BF16 or args.quick or (shape.F == 768 and shape.T in LOW_BIT_TOKENS)
        if not args.rows
        or any(fnmatch.fnmatch(f"{shape.name}/{fmt}", p) for p in args.rows)
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        progress("Rows", len(wanted) * len(args.pages)) as advance,
    ):
        for pages in args.pages:
            bench = Bench(names, args.threads, pages, pathlib.Path(folder))
            loaded = None
            for fmt, shape in wanted:
                if loaded != (loaded := (fmt, *list(shape.sizes().values())[1:])):
                    bench.load(draw_weights(shape, fmt), fmt, shape.K)
                provenance = measure.provenance()
                own = {name: provenance[name] for name in ("date", "git", "command")}
                for row in bench.rows_of(shape, settings):
                    measured[row["id"]] = row | own
                rows = [*measured.values()]
                measure.save(args.out, versions=bench.versions, rows=rows)
                advance(f"{shape.name} {pages}")
            bench.close()
    columns = {
        "row": "id",
        "ms": "milliseconds",
        "best peer": "best_peer",
        "peer / ours": "ratio",
    }
    columns |= {
        "of peak": "of_peak",
        "of stream": "of_stream",
        "1 thread / these": "speedup",
    }
    compared = [row for row in measured.values() if "ratio" in row]
    compared.sort(key=lambda row: row["ratio"]["median"])
    show(
        "F.moe_mlp beside serving engines",
        compared + [r for r in measured.values() if "ratio" not in r],
        columns,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
