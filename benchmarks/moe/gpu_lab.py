"""Checks and times the MoE Triton kernels on whatever GPU is there.

One script for a bare machine: torch >= 2.11 and Triton >= 3.6, no network, no
installed package of this repository. The kernels and the float64 reference are
loaded by path from the tree that the script lies in.

    python benchmarks/moe/gpu_lab.py                      # on a GPU, under 8 minutes
    python benchmarks/moe/gpu_lab.py --tune               # rank every configuration
    python benchmarks/moe/gpu_lab.py --rehearse           # on a CPU, in the interpreter

What it does, in this order:
    1. copy bandwidth and dense bfloat16 rate of this card: the two ceilings
    2. every kernel against float64 on the small cases of the tests, then bitwise
       reproducibility and CUDA-graph capture
    3. time, interleaved with peers written on torch._grouped_mm

The bound of a row is the sum over kernels of the larger of flops / dense rate and
bytes / copy bandwidth, each input read once and each output written once. A
rehearsal runs the same code on tiny shapes; its times mean nothing.

Letters: T tokens, D model dim, F expert hidden dim, E experts, K experts per token.
"""

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import pathlib
import shlex
import statistics
import sys
import time
from collections.abc import Callable


if "--rehearse" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported

import triton

import torch
import torch.nn.functional as F
from torch import Tensor


ROOT = pathlib.Path(__file__).resolve().parents[2]


def load_by_path(name: str, path: pathlib.Path):
    """Imports a package or a module of this repository under its upstream name."""
    package = path.is_dir()
    file = path / "__init__.py" if package else path
    spec = importlib.util.spec_from_file_location(
        name, file, submodule_search_locations=[str(path)] if package else None
    )
    assert spec is not None and spec.loader is not None, path
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


load_by_path("moe_triton_kernels", ROOT / "torch/_native/ops/moe/triton_kernels")
from moe_triton_kernels import configs, launch  # noqa: E402


TESTING = ROOT / "torch/testing/_internal"
reference = load_by_path(
    "torch.testing._internal.moe_reference", TESTING / "moe_reference.py"
)
generators = load_by_path(
    "torch.testing._internal.moe_generators", TESTING / "moe_generators.py"
)

ACT = launch.Activation()
ALL = (True,) * 6


@dataclasses.dataclass(frozen=True)
class Shape:
    """One layer; the letters of the module docstring."""

    name: str
    T: int
    D: int
    F: int
    E: int
    K: int

    def forward_flops(self) -> int:
        return 6 * self.T * self.K * self.D * self.F

    def kernel_costs(self) -> dict[str, list[tuple[int, int]]]:
        """(flops, bytes) of every kernel, forward and backward; bfloat16, SwiGLU."""
        T, D, n, E, R = self.T, self.D, self.F, self.E, self.T * self.K
        mm = 2 * R * n * D
        weights = 2 * E * n * D
        forward = [
            (2 * mm, 2 * R * D + 2 * weights + 4 * R * n + 2 * R * n),  # up
            (mm, 2 * R * n + weights + 2 * R * D),  # down
            (0, 2 * R * D + 4 * R + 2 * T * D),  # combine
        ]
        backward = [
            (mm, 2 * R * D + weights + 8 * R * n + 2 * R * n + 4 * R),  # dH, A', dS
            (mm, 2 * R * D + 2 * R * n + weights),  # dw_out
            (2 * mm, 4 * R * n + 2 * weights + 2 * R * D),  # dX per row
            (2 * mm, 2 * R * D + 4 * R * n + 2 * weights),  # dw_in
            (0, 2 * R * D + 2 * T * D),  # dX
        ]
        return {"forward": forward, "backward": backward}


# SonicMoE (arXiv 2512.14080), table 9b.
TABLE_9B = tuple(
    Shape(f"{model}-n{n}", T, D, n, E, K)
    for model, T, D, sizes in (
        ("1.4B", 40960, 768, ((256, 128, 8), (512, 64, 4), (1024, 32, 2))),
        ("7B", 24576, 1536, ((256, 128, 8), (512, 64, 4), (1024, 32, 2))),
        ("30B", 32768, 4096, ((256, 256, 16), (512, 128, 8), (1024, 64, 4))),
        ("120B", 32768, 4096, ((512, 256, 16), (1024, 128, 8), (2048, 64, 4))),
    )
    for n, E, K in sizes
)
OPEN_MODELS = (
    Shape("OLMoE-1B-7B", 32768, 2048, 1024, 64, 8),
    Shape("Qwen3-30B-A3B", 32768, 2048, 768, 128, 8),
    Shape("Qwen3-Next-80B", 16384, 2048, 512, 512, 10),
)
DECODE = tuple(
    Shape(f"OLMoE-decode-T{T}", T, 2048, 1024, 64, 8) for T in (1, 16, 64, 256)
)
# Compiling the peer takes longer than all its runs: one shape of each kind has to do.
COMPILED_PEER = ("7B-n256", "30B-n512", "OLMoE-1B-7B")
REHEARSAL = (Shape("tiny", 24, 64, 32, 4, 2), Shape("tiny-decode", 1, 64, 32, 4, 2))


class MoeFunction(torch.autograd.Function):
    """The launchers as one differentiable function."""

    @staticmethod
    def forward(ctx, plan, x, w_in, w_out, offs, weights, row_slots, slot_rows):
        output, preact = launch.moe_mlp_forward(
            plan, x, w_in, w_out, offs, weights, row_slots, slot_rows, None, None, ACT
        )
        ctx.plan = plan
        ctx.save_for_backward(
            x, w_in, w_out, offs, weights, row_slots, slot_rows, preact
        )
        return output

    @staticmethod
    def backward(ctx, grad):
        *args, preact = ctx.saved_tensors
        dx, dw_in, dw_out, dweights, _, _ = launch.moe_mlp_backward(
            ctx.plan, grad, *args, None, None, preact, ALL, ACT
        )
        return None, dx, dw_in, dw_out, None, dweights, None, None


def ours(plan, x, ids, weights, w_in, w_out) -> Tensor:
    row_slots, slot_rows, offs, _ = launch.moe_permutation(ids, w_in.shape[0])
    return MoeFunction.apply(plan, x, w_in, w_out, offs, weights, row_slots, slot_rows)


def grouped_mm_block(x, ids, weights, w_in, w_out) -> Tensor:
    """What people write today: sort, gather, torch._grouped_mm, scatter_add."""
    top_k = ids.shape[1]
    order = ids.reshape(-1).argsort(stable=True)
    counts = torch.histc(ids.reshape(-1).float(), w_in.shape[0], 0, w_in.shape[0] - 1)
    offs = counts.cumsum(0).to(torch.int32)
    tokens = order // top_k
    gate, up = torch._grouped_mm(x[tokens], w_in.mT, offs=offs).chunk(2, dim=1)
    out = torch._grouped_mm(F.silu(gate) * up, w_out.mT, offs=offs)
    out = (out * weights.reshape(-1)[order, None]).to(x.dtype)
    return torch.zeros_like(x).index_add(0, tokens, out)


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def timed(function: Callable[[], object], device: torch.device) -> float:
    """Milliseconds of one call."""
    if device.type != "cuda":
        begin = time.perf_counter()
        function()
        return 1e3 * (time.perf_counter() - begin)
    start = torch.cuda.Event(enable_timing=True)
    end = torch.cuda.Event(enable_timing=True)
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def interleaved(
    functions: dict[str, Callable[[], object]], device: torch.device, rounds: int
) -> dict[str, float]:
    """Median milliseconds of each function; every round calls all of them once."""
    times: dict[str, list[float]] = {name: [] for name in functions}
    for i in range(rounds + 2):
        for name, function in functions.items():
            ms = timed(function, device)
            if i >= 2:
                times[name].append(ms)
    return {name: statistics.median(ms) for name, ms in times.items()}


def measure_ceilings(device: torch.device, rehearse: bool) -> tuple[float, float]:
    """Copy bandwidth in bytes/s (read plus written) and dense bfloat16 flops/s."""
    size, n = (1 << 20, 128) if rehearse else (1 << 31, 8192)
    source = torch.randint(0, 127, (size,), dtype=torch.int8, device=device)
    target = torch.empty_like(source)
    a, b = torch.randn(2, n, n, device=device, dtype=torch.bfloat16).unbind()
    ms = interleaved(
        {"copy": lambda: target.copy_(source), "mm": lambda: a @ b}, device, 20
    )
    return 2 * size / ms["copy"] * 1e3, 2 * n**3 / ms["mm"] * 1e3


def bound_ms(costs: list[tuple[int, int]], bandwidth: float, rate: float) -> float:
    return sum(1e3 * max(flops / rate, size / bandwidth) for flops, size in costs)


def make_operands(shape: Shape, device: torch.device) -> tuple[Tensor, ...]:
    """x, ids, weights, w_in, w_out with random values; uniform routing."""
    generator = torch.Generator(device).manual_seed(0)

    def normal(*size: int, std: float) -> Tensor:
        x = torch.empty(size, device=device, dtype=torch.bfloat16)
        return x.normal_(0, std, generator=generator).requires_grad_()

    scores = torch.rand(shape.T, shape.E, device=device, generator=generator)
    weights, ids = scores.softmax(-1).topk(shape.K)
    return (
        normal(shape.T, shape.D, std=1.0),
        ids,
        weights.requires_grad_(),
        normal(shape.E, 2 * shape.F, shape.D, std=shape.D**-0.5),
        normal(shape.E, shape.D, shape.F, std=shape.F**-0.5),
    )


def check_small_cases(plan, device: torch.device) -> list[dict[str, object]]:
    """Permutation, forward and backward of the test cases against float64."""
    rows = []
    for case in generators.moe_cases():
        if case.routing == "recorded" and device.type == "cpu":
            continue  # minutes in the interpreter
        row: dict[str, object] = {"case": case.name}
        try:
            check_case(plan, case, device)
            row["ok"] = True
        except AssertionError as error:
            row.update(ok=False, error=str(error))
        rows.append(row)
    return rows


def check_case(plan, case, device: torch.device) -> None:
    """Raises AssertionError where a result is outside the tests' tolerance."""
    dtype = torch.bfloat16
    plan_args = {"num_rows": case.num_rows, "row_alignment": case.row_alignment}
    ids = case.topk_indices(device)
    actual = launch.moe_permutation(ids, case.num_experts, **plan_args)
    expected = reference.moe_permutation_reference(ids, case.num_experts, **plan_args)
    for name, a, b in zip(expected._fields, actual, expected):
        assert torch.equal(a, b), f"{name} differs"
    operands = case.operands(dtype, device, bias=True)
    args, grad_out = operands.args(), operands.grad_out
    output, preact = launch.moe_mlp_forward(plan, *args, ACT)
    truth = reference.moe_mlp_reference(*args)
    yardstick = reference.moe_mlp_unfused(*args)
    reference.check_close(output, truth[0], yardstick[0], dtype, "output")
    reference.check_close(preact, truth[1], yardstick[1], dtype, "preact")
    grads = launch.moe_mlp_backward(plan, grad_out, *args, preact, ALL, ACT)
    truth = reference.moe_mlp_backward_reference(grad_out, *args)
    yardstick = reference.moe_mlp_backward_unfused(grad_out, *args)
    for name, grad, a, b in zip(truth._fields, grads, truth, yardstick):
        reference.check_close(grad, a, b, dtype, name)


def check_reproducible(plan, shape: Shape, device: torch.device) -> bool:
    """Forward and backward twice, and once under a CUDA graph: the same bits."""
    operands = make_operands(shape, device)
    grad = torch.randn(shape.T, shape.D, device=device, dtype=torch.bfloat16)
    leaves = (operands[0], *operands[2:])

    def run() -> tuple[Tensor, ...]:
        output = ours(plan, *operands)
        return (output.detach(), *torch.autograd.grad(output, leaves, grad))

    first, second = run(), run()
    same = all(torch.equal(a, b) for a, b in zip(first, second))
    if device.type == "cuda":
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = run()
        graph.replay()
        synchronize(device)
        same &= all(torch.equal(a, b) for a, b in zip(first, captured))
    return same


def time_shape(
    plan, shape: Shape, device, ceilings, rounds: int, compiled: bool
) -> dict:
    """One row of the table: times of ours and the peers, and the bound."""
    operands = make_operands(shape, device)
    grad = torch.randn(shape.T, shape.D, device=device, dtype=torch.bfloat16)
    leaves = (operands[0], *operands[2:])
    layers: dict[str, Callable[..., Tensor]] = {
        "ours": lambda *args: ours(plan, *args),
        "grouped_mm": grouped_mm_block,
    }
    if compiled:
        layers["grouped_mm_compiled"] = torch.compile(grouped_mm_block, dynamic=False)

    functions: dict[str, Callable[[], object]] = {}
    for name, layer in layers.items():

        def forward(layer=layer):
            with torch.no_grad():
                return layer(*operands)

        def step(layer=layer):
            return torch.autograd.grad(layer(*operands), leaves, grad)

        functions[f"{name}/forward"] = forward
        functions[f"{name}/step"] = step
    row: dict = {"shape": dataclasses.asdict(shape), "ms": {}, "failed": {}}
    for name, function in list(functions.items()):
        try:  # a peer that cannot run leaves the row, and says why
            function()
        except Exception as error:
            row["failed"][name] = f"{type(error).__name__}: {error}"[:300]
            del functions[name]
    row["ms"] = interleaved(functions, device, rounds)
    costs = shape.kernel_costs()
    row["bound_ms"] = {
        "forward": bound_ms(costs["forward"], *ceilings),
        "step": bound_ms(costs["forward"] + costs["backward"], *ceilings),
    }
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        held = ours(plan, *operands)
        row["held_bytes"] = torch.cuda.memory_allocated() - before
        del held
    return row


def print_row(row: dict) -> None:
    shape, ms = Shape(**row["shape"]), row["ms"]
    for kind, factor in (("forward", 1), ("step", 3)):
        own = ms.get(f"ours/{kind}")
        if own is None:
            print(f"{shape.name:22s} {kind:8s} FAILED {row['failed']}")
            continue
        tflops = factor * shape.forward_flops() / own / 1e9
        peers = " ".join(
            f"{name.split('/')[0]} x{t / own:.2f}"
            for name, t in ms.items()
            if name.endswith(kind) and not name.startswith("ours")
        )
        share = row["bound_ms"][kind] / own
        print(
            f"{shape.name:22s} {kind:8s} {own:9.3f} ms {tflops:7.1f} TFLOP/s "
            f"{share:5.0%} of bound  {peers}",
            flush=True,
        )


def tune(device, num_sms: int, table, shapes) -> list[dict]:
    """Step time of every configuration of every kernel, the others at their first."""
    rows = []
    for shape in shapes:
        operands = make_operands(shape, device)
        grad = torch.randn(shape.T, shape.D, device=device, dtype=torch.bfloat16)
        leaves = (operands[0], *operands[2:])
        for kernel, choices in table.items():
            functions = {}
            for config in choices:
                plan = launch.LaunchPlan({**table, kernel: (config,)}, num_sms)

                def step(plan=plan):
                    output = ours(plan, *operands)
                    return torch.autograd.grad(output, leaves, grad)

                functions[str(config)] = step
            ms = interleaved(functions, device, rounds=10)
            best = min(ms, key=ms.__getitem__)
            print(f"{shape.name:22s} {kernel:13s} {best}", flush=True)
            rows.append({"shape": shape.name, "kernel": kernel, "ms": ms})
    return rows


def rehearsal_plan():
    table = {
        kernel: (configs.TileConfig(32, 32, 32, 4, 2, epilogue_parts=2),)
        for kernel in configs.KERNELS
    }
    return launch.LaunchPlan(table, num_sms=2)


def exact_interpreter() -> contextlib.AbstractContextManager:
    """The interpreter with bfloat16 that rounds, as the tests use it."""
    module = load_by_path(
        "torch.testing._internal.triton_interpreter", TESTING / "triton_interpreter.py"
    )
    return module.exact_floats()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rehearse", action="store_true", help="tiny, on the CPU")
    parser.add_argument("--tune", action="store_true", help="rank configurations")
    parser.add_argument("--no-compile", action="store_true", help="skip torch.compile")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="shapes whose name contains this")
    parser.add_argument("--output", type=pathlib.Path)
    return parser.parse_args()


def check_and_time(plan, shapes, device, ceilings, options, report: dict) -> bool:
    """Fills ``report`` with checks and rows; returns whether the checks passed."""
    report["cases"] = check_small_cases(plan, device)
    bad = [row for row in report["cases"] if not row["ok"]]
    print(f"{len(report['cases']) - len(bad)} cases ok, failed: {bad}")
    report["reproducible"] = check_reproducible(plan, shapes[0], device)
    print(f"same bits twice and under a graph: {report['reproducible']}")
    report["rows"] = []
    for shape in shapes:
        compiled = shape.name in COMPILED_PEER and not options.no_compile
        row = time_shape(plan, shape, device, ceilings, options.rounds, compiled)
        print_row(row)
        report["rows"].append(row)
    return not bad and report["reproducible"]


def main() -> int:
    options = parse_options()
    if options.rehearse:
        device, plan, options.rounds = torch.device("cpu"), rehearsal_plan(), 1
        shapes, name = REHEARSAL, "interpreter"
        context = exact_interpreter()
    else:
        device = torch.device("cuda", torch.cuda.current_device())
        properties = torch.cuda.get_device_properties(device)
        capability = (properties.major, properties.minor)
        table = configs.table_for_capability(*capability)
        if table is None:
            print(f"no tile table for compute capability {capability}")
            return 2
        plan = launch.LaunchPlan(table, properties.multi_processor_count)
        shapes, name = TABLE_9B + OPEN_MODELS + DECODE, properties.name
        context = contextlib.nullcontext()
    shapes = tuple(s for s in shapes if options.only in s.name)

    with context:
        bandwidth, rate = measure_ceilings(device, options.rehearse)
        print(f"{name}: copy {bandwidth / 1e9:.0f} GB/s, mm {rate / 1e12:.1f} TFLOP/s")
        report: dict = {
            "command": shlex.join(
                ["python", "benchmarks/moe/gpu_lab.py", *sys.argv[1:]]
            ),
            "torch": torch.__version__,
            "triton": triton.__version__,
            "device": name,
            "copy_bytes_per_s": bandwidth,
            "mm_flops_per_s": rate,
        }
        ok = True
        if options.tune:
            report["tuning"] = tune(device, plan.num_sms, plan.table, shapes)
        else:
            ok = check_and_time(
                plan, shapes, device, (bandwidth, rate), options, report
            )
    if options.output is not None:
        options.output.write_text(json.dumps(report, indent=1) + "\n")
    return 0 if ok else 1


if __name__ == "__main__":
    sys.exit(main())
