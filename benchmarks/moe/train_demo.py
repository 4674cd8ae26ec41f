"""Train a small Mixture-of-Experts language model, unfused and with F.moe_mlp, and compare.

    python benchmarks/moe/train_demo.py --steps 200 --out build/demo

Four models start from the same weights and see the same real text (the documentation and sources
inside the installed torch) in the same order: three with the eager block people write today, each
visiting the experts in another order, and one with F.moe_topk and F.moe_mlp. The three show how
much the loss moves from rounding alone; the fourth must stay within twice that. Where torch has
expert parallelism, the fourth is trained once more on two ranks. Prints tables, writes demo.json
and demo.png, and exits with 1 when a check fails.
"""

import argparse
import dataclasses
import itertools
import logging
import pathlib
import sys
import time

import torch

import blocks
from blocks import MoEBlock
from demo import text
from demo.evidence import (
    BlockSample,
    capture,
    float64_errors,
    peak_activation_bytes,
    saved_by_experts,
    SavedBytes,
)
from demo.model import ModelConfig
from demo.plot import write_plot
from demo.report import BlockRow, Check, Display, Result, TrainingRow, write_json
from demo.train import make_runs, Run, train
from measure import interleaved_seconds, paired_ratio, provenance, saved_bytes, spread


try:
    from demo import expert_parallel
except ModuleNotFoundError as error:
    # A later pull request brings the module and what it needs of torch.
    if error.name is None or not error.name.startswith(("demo", "torch.distributed")):
        raise
    expert_parallel = None


BATCH = 4
EVALUATION_BATCHES = 8
NUM_UNFUSED = 3
LEARNED_AFTER = 200  # steps after which a model must know more than byte frequencies


def parse_arguments() -> argparse.Namespace:
    default_out = pathlib.Path(__file__).resolve().parents[2] / "build" / "demo"
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, help="training steps (default 200)")
    parser.add_argument(
        "--seed", type=int, default=0, help="weights and order of the text"
    )
    parser.add_argument(
        "--threads", type=int, help="CPU threads (default: torch's choice)"
    )
    parser.add_argument(
        "--out", type=pathlib.Path, default=default_out, help="folder to write"
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="20 steps and few repetitions: does it run at all",
    )
    arguments = parser.parse_args()
    if arguments.steps is None:
        arguments.steps = 20 if arguments.quick else 200
    if arguments.steps < 10:
        parser.error(f"--steps must be at least 10, got {arguments.steps}")
    return arguments


def training_blocks(config: ModelConfig, seed: int) -> dict[str, MoEBlock]:
    """The blocks to train with: the fused one, and the unfused in NUM_UNFUSED expert orders."""
    generator = torch.Generator().manual_seed(seed)
    runs = {"unfused": blocks.unfused()}
    for i in range(2, NUM_UNFUSED + 1):
        order = torch.randperm(config.experts, generator=generator).tolist()
        runs[f"unfused, order {i}"] = blocks.unfused(order)
    return runs | {"fused": blocks.fused()}


def differences(runs: list[Run]) -> dict[str, list[float]]:
    """Per step |loss difference| of every two unfused runs, and of fused and unfused."""
    losses = {run.name: run.losses for run in runs}
    pairs = list(itertools.combinations([n for n in losses if n != "fused"], 2))
    pairs.append(("fused", "unfused"))
    return {
        f"{a} - {b}": [abs(x - y) for x, y in zip(losses[a], losses[b], strict=True)]
        for a, b in pairs
    }


def noise(result: Result) -> float:
    """The largest loss difference of two unfused runs that visit the experts in other orders."""
    pairs = result.differences.items()
    return max(max(values) for pair, values in pairs if pair != "fused - unfused")


def training_row(run: Run, start: float, held_out: torch.Tensor) -> TrainingRow:
    window = held_out[0]
    row = TrainingRow(
        run=run.name,
        losses=run.losses,
        held_out_start=start,
        held_out_end=run.evaluate(held_out),
        tokens_per_second=spread([window[:, 1:].numel() / s for s in run.seconds]),
        saved_bytes=saved_bytes(lambda: run.model.loss(window), run.model.parameters()),
        peak_bytes=peak_activation_bytes(lambda: run.model.loss(window).backward()),
    )
    run.model.zero_grad()
    return row


def block_rows(sample: BlockSample, rounds: int, display: Display) -> list[BlockRow]:
    candidates = {
        "unfused, indexed": blocks.unfused_indexed(),
        "unfused": blocks.unfused(),
        "grouped_mm": blocks.grouped_mm(),
        "fused": blocks.fused(),
    }
    warmup = 3
    with display.progress("Timing blocks", warmup + rounds) as advance:
        seconds = interleaved_seconds(
            {
                name: lambda block=block: sample.forward_backward(block)
                for name, block in candidates.items()
            },
            rounds=rounds,
            warmup=warmup,
            on_round=lambda i: advance(),
        )
    rows = []
    for name, block in candidates.items():
        errors = float64_errors(sample, block)
        rows.append(
            BlockRow(
                block=name,
                seconds=spread(seconds[name]),
                slowdown=paired_ratio(seconds[name], seconds["fused"]),
                saved_bytes=saved_by_experts(sample, block).measured,
                peak_bytes=peak_activation_bytes(
                    lambda block=block: sample.accumulate_grads(block)
                ),
                relative_error=errors["output"].error / errors["output"].scale,
                of_allowed=max(e.error / e.bound for e in errors.values()),
            )
        )
    return rows


def training_checks(result: Result) -> list[Check]:
    checks = []
    worst = max(row.held_out_end for row in result.training)
    if len(result.training[0].losses) >= LEARNED_AFTER:
        rule, limit = "that of byte frequencies alone", result.text["byte_entropy"]
    else:
        start = min(row.held_out_start for row in result.training)
        rule, limit = f"9/10 of the start; below {LEARNED_AFTER} steps", 0.9 * start
    checks.append(
        Check(
            "every model learns",
            f"largest held-out loss at the end {worst:.3f}",
            f"< {limit:.3f}, {rule}",
            worst < limit,
        )
    )
    fused, unfused = max(result.differences["fused - unfused"]), noise(result)
    checks.append(
        Check(
            "fused trains like unfused",
            f"largest loss difference {fused:.2e} ({fused / unfused:.2f}x)",
            f"<= 2x {unfused:.2e}, the largest between unfused runs in other expert orders",
            fused <= 2 * unfused,
        )
    )
    return checks


def saved_check(how: str, saved: SavedBytes) -> Check:
    low, high = saved.operand_bytes, saved.operand_bytes + saved.allowance
    return Check(
        f"F.moe_mlp saves only x, H, weights, metadata ({how})",
        f"{saved.measured:,} bytes",
        f"{low:,} to {high:,}",
        saved.holds(),
    )


def block_checks(samples: list[BlockSample], rows: list[BlockRow]) -> list[Check]:
    block = blocks.fused()
    ratio = next(row.slowdown for row in rows if row.block == "unfused")
    checks = [
        saved_check("eager", saved_by_experts(samples[0], block)),
        saved_check("compiled", saved_by_experts(samples[0], block, torch.compile)),
        Check(
            "the fused block is faster than the unfused one",
            f"{ratio.median:.2f}x ({ratio.p10:.2f} - {ratio.p90:.2f})",
            "median of paired ratios > 1",
            ratio.median > 1,
        ),
    ]
    ratios = {
        f"{name} of layer {i}": e.error / e.bound
        for i, sample in enumerate(samples)
        for name, e in float64_errors(sample, block).items()
    }
    worst = max(ratios, key=ratios.__getitem__)
    checks.append(
        Check(
            "output and gradients agree with float64",
            f"worst: {worst}, {ratios[worst]:.0%} of allowed",
            "error <= 2x unfused + 4 eps max|reference|",
            ratios[worst] <= 1,
        )
    )
    return checks


def train_models(
    config: ModelConfig,
    corpus: text.Corpus,
    arguments: argparse.Namespace,
    display: Display,
) -> tuple[list[Run], list[TrainingRow]]:
    shape = (BATCH, config.sequence)
    batches = text.sample_batches(corpus.train, arguments.steps, *shape, arguments.seed)
    held_out = text.sample_batches(
        corpus.held_out, EVALUATION_BATCHES, *shape, arguments.seed
    )
    runs = make_runs(training_blocks(config, arguments.seed), config, arguments.seed)
    starts = [run.evaluate(held_out) for run in runs]
    with display.progress(f"Training {len(runs)} models", arguments.steps) as advance:
        train(
            runs,
            batches,
            lambda step: advance(
                f"loss {runs[0].losses[-1]:.3f} unfused, {runs[-1].losses[-1]:.3f} fused"
            ),
        )
    return runs, [
        training_row(run, start, held_out)
        for run, start in zip(runs, starts, strict=True)
    ]


def run_demo(arguments: argparse.Namespace, display: Display) -> Result:
    start = time.perf_counter()
    config = ModelConfig()
    corpus = text.read_corpus()
    runs, training = train_models(config, corpus, arguments, display)

    window = text.sample_batches(
        corpus.held_out, 1, BATCH, config.sequence, arguments.seed
    )[0]
    samples = capture(runs[-1].model, window)
    rows = block_rows(samples[0], 5 if arguments.quick else 30, display)
    ranks = None
    if expert_parallel is not None:
        ranks = expert_parallel.train(
            runs[-1].losses,
            seed=arguments.seed,
            batch=BATCH,
            tokens_per_step=BATCH * config.sequence,
            evaluation_batches=EVALUATION_BATCHES,
        )
    parameters = sum(p.numel() for p in runs[0].model.parameters())
    result = Result(
        provenance=provenance(),
        settings={
            "seed": arguments.seed,
            "steps": arguments.steps,
            "quick": arguments.quick,
            "batch": BATCH,
            "parameters": parameters,
            **dataclasses.asdict(config),
            "expert_dtype": str(config.expert_dtype),
        },
        text={
            "files": corpus.num_files,
            "train_bytes": corpus.train.numel(),
            "held_out_bytes": corpus.held_out.numel(),
            "sha256": corpus.sha256,
            "byte_entropy": text.byte_entropy(corpus.held_out),
        },
        training=training,
        differences=differences(runs),
        blocks=rows,
        expert_parallel=ranks,
        checks=[],
        seconds=0.0,
    )
    checks = training_checks(result) + block_checks(samples, rows)
    if expert_parallel is not None and result.expert_parallel is not None:
        checks += expert_parallel.checks(result.expert_parallel, noise(result))
    return dataclasses.replace(
        result, checks=checks, seconds=time.perf_counter() - start
    )


def main() -> int:
    arguments = parse_arguments()
    if arguments.threads is not None:
        torch.set_num_threads(arguments.threads)
    # A CUDA build of torch on a machine without a GPU warns on the first compilation.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)

    display = Display()
    result = run_demo(arguments, display)
    arguments.out.mkdir(parents=True, exist_ok=True)
    write_json(result, arguments.out / "demo.json")
    write_plot(result, arguments.out / "demo.png")
    display.show(result)
    print(f"{result.seconds:.0f} s; wrote {arguments.out}/demo.json and demo.png")
    return 0 if all(check.passed for check in result.checks) else 1


if __name__ == "__main__":
    sys.exit(main())
