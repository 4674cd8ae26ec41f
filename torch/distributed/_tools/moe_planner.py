# mypy: allow-untyped-defs
"""The command line of :mod:`.moe_plan`: how to run this model on these GPUs, and why.

python -m torch.distributed._tools.moe_planner qwen3-30b-a3b --device H100 --gpus 8
"""

from __future__ import annotations

import json
import runpy
import sys
from typing import Any, TYPE_CHECKING

import torch
from torch.distributed._tools.moe_arguments import ArgumentParser, check, read_json
from torch.distributed._tools.moe_config import MODELS, MoEConfig
from torch.distributed._tools.moe_inference_model import cpu_table, inference_table
from torch.distributed._tools.moe_plan import Plan, plan
from torch.distributed._tools.moe_profile import DEVICES, HELD_OUT_ERROR, profile
from torch.distributed._tools.moe_simulator import expected_imbalance
from torch.distributed._tools.moe_step_memory import explain_memory


if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch.distributed._tools.moe_profile import Profile


MOST_TOKENS = 15360 * 4096  # of a step: the largest published one, DeepSeek-V3's
# Median error on training rows that others collected after the model was made.
OUTSIDE_ERROR = 0.206


def _lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """A table of dicts with the same keys."""
    cells = [[str(k) for k in rows[0]]]
    for r in rows:
        cells.append([f"{v:,.4g}" if type(v) is float else str(v) for v in r.values()])
    widths = [max(len(c[i]) for c in cells) for i in range(len(cells[0]))]
    for line in cells:
        yield "  ".join(c.rjust(w) for c, w in zip(line, widths))


def _uncertainty(level: str) -> str:
    """The model's error on published rows that calibrated nothing."""
    median, rows = HELD_OUT_ERROR[level]
    what = {"train": "training", "infer": "inference"}[level]
    outside = (
        f", and {OUTSIDE_ERROR:.0%} in a check by others" if level == "train" else ""
    )
    few = ", too few to rely on" if rows < 10 else ""
    return (
        f"uncertainty: median error {median:.0%} on {rows} published {what} rows that calibrated "
        f"nothing{few}{outside}"
    )


def print_plan(found: Plan, note: str = "") -> None:
    """Prints a plan; ``note`` says where its batch is from."""
    x = found.layout
    step_tokens = found.global_batch * found.seq
    print(f"{x.gpus} x {found.device}, training, constants {found.provenance}")
    print(
        f"{found.global_batch:,} sequences of {found.seq:,} tokens a step{note}, "
        f"{step_tokens / 1e6:,.4g} M tokens"
    )
    if step_tokens > MOST_TOKENS:
        print(
            f"warning: published recipes have at most {MOST_TOKENS / 1e6:.0f} M tokens a "
            "step; --batch sets fewer sequences"
        )
    print(found.explain())
    print("\nbest layouts")
    fields = ("ep", "tp", "pp", "virtual", "micro_batch", "recompute", "dtype")
    rows = [
        {"tokens/s/GPU": float(rate), **{f: getattr(y, f) for f in fields}}
        for rate, y in found.best
    ]
    print("\n".join(_lines(rows)))
    print(
        f"\n{_uncertainty('train')}; the order of layouts is more certain than their speed"
    )
    print(f"torchtitan ParallelDims: {found.parallel_dims()}")


def _parser() -> ArgumentParser:
    parser = ArgumentParser(
        prog="python -m torch.distributed._tools.moe_planner",
        description="How to run a mixture-of-experts model on these GPUs, and why.",
        epilog="first plan: python -m torch.distributed._tools.moe_planner qwen3-30b-a3b "
        "--device H100 --gpus 8",
    )
    parser.add_argument("model", help=f"config.json of a model, or {', '.join(MODELS)}")
    parser.add_argument(
        "--explain-memory",
        action="store_true",
        default=None,
        help="whose the bytes of a step on one CPU rank are; model is FILE.py:FUNCTION, "
        "which returns it, or a config.json that transformers takes",
    )
    parser.add_argument(
        "--device",
        default="H100",
        help=f"{', '.join(DEVICES)}, a .json profile, or cpu to measure this one",
    )
    parser.add_argument(
        "--phase",
        choices=("train", "prefill", "decode"),
        help="train (the default), or inference; of a CPU both",
    )
    parser.add_number("--gpus", help="8")
    parser.add_number("--batch", help="sequences of a step (16 a GPU)")
    parser.add_number("--seq", help="tokens of a sequence (4096)")
    parser.add_argument("--dtype", nargs="+", help="of products: bf16 fp8 mxfp8 nvfp4")
    parser.add_argument(
        "--load",
        help="JSON list: load of every expert now, as a row of ExpertPlacement.loads",
    )
    parser.add_number("--tokens", help="of a GPU, in inference (128); of a CPU's step")
    for name in FIXED[:-1]:
        flag = f"--{name.replace('_', '-')}"
        parser.add_number(flag, help="fixed instead of chosen")
    parser.add_argument("--recompute", choices=("none", "selective", "full"))
    parser.add_argument("--json", help="write the result here; - for the terminal")
    return parser


FIXED = ("ep", "tp", "pp", "cp", "micro_batch", "domain", "graphs", "node_limit",
         "recompute")  # fmt: skip
# Options of each kind of question beside the model and the device.
TAKES = {
    "training": {"gpus", "batch", "seq", "dtype", "load", *FIXED},
    "inference": {"gpus", "seq", "dtype", "load", "tokens", "ep", "domain"},
    "a CPU": {"tokens"},
    "--explain-memory": {"batch", "seq", "recompute", "explain_memory"},
}


def _check_given(given: set[str], kind: str) -> None:
    for name in sorted(given - {"model", "device", "phase", "json"} - TAKES[kind]):
        raise ValueError(f"--{name.replace('_', '-')} has no meaning for {kind}")


def _load(path: str | None, model: MoEConfig) -> list[float]:
    if path is None:
        return [1.0] * model.experts
    load = read_json(path, list)
    for value in load:
        check(path, load=value)
    if len(load) != model.experts or not sum(load):
        raise ValueError(
            f"{path}: load must have {model.experts} entries, one per expert, not all zero, "
            f"got {len(load)} with a sum of {sum(load)}"
        )
    return load


def _cpu(args: Any, model: MoEConfig, p: Profile) -> dict[str, Any]:
    tokens = {"tokens": (args.tokens,)} if args.tokens else {}
    rows = cpu_table(model, p, **tokens)
    wanted = {"train": "fwd+bwd", None: None}.get(args.phase, "fwd")
    rows = [row for row in rows if wanted in (None, row["pass"])]
    kind = {"train": "training", None: "inference (fwd) and training (fwd+bwd)"}
    title = f"{p.name}, {p.device.units} threads, {kind.get(args.phase, 'inference')}"
    return {"title": f"{title}, constants {p.provenance}", "rows": rows}


def _inference(args: Any, model: MoEConfig, p: Profile) -> dict[str, Any]:
    gpus, tokens = args.gpus or 8, args.tokens or 128
    if args.dtype and len(args.dtype) > 1:
        raise ValueError(f"--dtype: inference takes one, got {' '.join(args.dtype)}")
    load = _load(args.load, model)
    rows = inference_table(
        model, p, gpus, phase=args.phase, tokens=tokens, context=args.seq or 4096,
        imbalance=lambda ep: expected_imbalance(load, tokens * ep, model.k, ep),
        dtype=args.dtype[0] if args.dtype else None, ep=args.ep, domain=args.domain or 0,
    )  # fmt: skip
    what = "sequences" if args.phase == "decode" else "tokens"
    title = f"{gpus} x {p.name}, inference, {args.phase} with {tokens} {what} a GPU"
    return {"title": f"{title}, constants {p.provenance}", "rows": rows}


def _model(given: str) -> torch.nn.Module:
    """On the meta device, by a function in a file, or by transformers from its configuration."""
    path, _, function = given.rpartition(":")
    with torch.device("meta"):
        if path.endswith(".py"):
            found = runpy.run_path(path)
            if not callable(make := found.get(function)):
                raise ValueError(f"{path} has no function {function!r}")
            return make()
        if given.endswith(".json"):
            import transformers  # pyrefly: ignore [missing-import]

            config = transformers.AutoConfig.from_pretrained(given)
            return transformers.AutoModelForCausalLM.from_config(config)
    raise ValueError(
        "--explain-memory runs the model: it must be FILE.py:FUNCTION, which returns it, or a "
        f"config.json that transformers takes, got {given!r}"
    )


def _explain_memory(args: Any) -> None:
    batch, seq, recompute = args.batch or 1, args.seq or 4096, args.recompute or "none"
    if recompute == "selective":
        raise ValueError(
            "--explain-memory: recompute must be none or full, got selective"
        )
    found = explain_memory(
        _model(args.model), batch=batch, seq=seq, recompute=recompute
    )
    data = {
        "total": found.total,
        "where": found.where,
        **{name: [[*owner, n] for owner, n in getattr(found, name).items()]
           for name in ("peak", "kept")},
    }  # fmt: skip
    if args.json != "-":
        print(
            f"a training step with AdamW, {batch} x {seq:,} tokens, recompute {recompute}"
        )
        print(found.explain())
    _write(args.json, data)


def _run(args: Any) -> None:
    given = {name for name, value in vars(args).items() if value is not None}
    if args.explain_memory:
        _check_given(given, "--explain-memory")
        _explain_memory(args)
        return
    if args.model.endswith(".json"):
        model = MoEConfig.from_config(read_json(args.model), args.model)
    else:
        model = MoEConfig.by_name(args.model)
    if args.device == "cpu":
        from torch.distributed._tools.moe_calibration import calibrate

        print("measuring this CPU; moe_calibration keeps a profile", file=sys.stderr)
        p = calibrate(seconds=5)
    else:
        p = profile(args.device)
    kind = "training" if args.phase in (None, "train") else "inference"
    kind = "a CPU" if p.cpu is not None else kind
    _check_given(given, kind)
    if kind == "training":
        _train(args, model, p)
        return
    found = (_cpu if kind == "a CPU" else _inference)(args, model, p)
    if args.json != "-":
        print(found["title"])
        print("\n".join(_lines(found["rows"])))
        if kind == "inference":
            print(_uncertainty("infer"))
    _write(args.json, found)


def _train(args: Any, model: MoEConfig, p: Profile) -> None:
    gpus = args.gpus or 8
    fixed = {n: getattr(args, n) for n in FIXED if getattr(args, n) is not None}
    found = plan(
        model, p, gpus, global_batch=args.batch or 16 * gpus, seq=args.seq or 4096,
        dtypes=args.dtype, load=_load(args.load, model) if args.load else None, **fixed,
    )  # fmt: skip
    if args.json != "-":
        print_plan(found, "" if args.batch else " (16 a GPU, the default of --batch)")
    _write(args.json, found.to_json())


def _write(path: str | None, data: dict[str, Any]) -> None:
    if path == "-":
        print(json.dumps(data, indent=1))
    elif path:
        with open(path, "w") as file:
            json.dump(data, file, indent=1)


def main(argv: Sequence[str] | None = None) -> int:
    try:
        _run(_parser().parse_args(argv))
    except (ValueError, OSError, ImportError) as e:
        print(f"error: {e}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
