"""Every experts class of the installed transformers, and whole models, with F.moe_mlp.

    python3 tools/stage.py python benchmarks/moe/clients/matrix.py \\
        [--models [FILE ...]] [--only REGEX] [--out FILE.json]

Experts: each class that uses transformers' interface or has an adapter here, by itself, tiny, in
float32, in bfloat16 and under autocast: output and gradients of everything against its own eager code
in float64, by invariant 1.
``--models``: the causal language models around them from tiny configs: the same in float32, and under
autocast with the routing of float64, for the logits and every parameter, generate() token by token,
and a torch.compile with fullgraph. What cannot be built
from a config alone, here without files, is a row that says so and counts as not run.

``--models FILE``: instead of those and the classes, the models of a TOML or JSON file, with random
weights in the sizes that it gives. It is the config.json of a checkpoint, or a list ``models`` of
such: ``config`` names a config.json beside the file, and what else is given replaces its values::

    [[models]]
    config = "Mixtral-8x7B/config.json"
    num_hidden_layers = 1
    hidden_size = 256
"""

import functools
import importlib
import json
import math
import pathlib
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable

import torch
from torch.testing._internal.moe_reference import error_and_bound


sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

try:
    import transformers_experts
except ImportError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"matrix.py: {error}")
from families import build_model, fill
from moe_mlp_experts import NAME, plan_of
from report import parse
from routing import record_routing, replay_routing
from transformers_experts import ADAPTERS, experts_of, fused_experts

from measure import save


class TinyConfig:
    """A config for an experts class alone: every attribute it may ask for, by its name."""

    _experts_implementation = "eager"
    hidden_size = dim = 16
    hidden_act = hidden_activation = "silu"
    mlp_hidden_act = "relu2"
    swiglu_alpha, swiglu_limit = 1.5, 0.75
    swiglu_limits = swiglu_limits_shared = None
    moe_hidden_size = 16
    moe_latent_size = zero_expert_num = None
    rms_norm_eps = layer_norm_epsilon = norm_eps = 1e-6
    ffn_act_fn = {"name": "silu"}
    num_experts_per_tok = moe_top_k = 2

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        if "expert" in name and "size" not in name and "dim" not in name:
            return 4
        if re.search("intermediate|ffn|expert_dim|expert_size", name):
            return 12
        if re.search("bias|use_|is_|enable", name):
            return False
        if re.search("softcap|eps", name):
            return 1.0
        if re.search("act", name):
            return "silu"
        raise AttributeError(name)


def error_over_allowed(
    actual: dict, unfused: list[dict], exact: dict, dtype: torch.dtype | None = None
) -> float:
    """The largest error over the one that invariant 1 allows, by ``dtype`` or that of the values.

    The worst of the unfused forms counts. Of a few numbers, as a scale or a number per head, the error
    may be small by chance: tensors of fewer than 16 count together, relative to their largest.
    """
    if any(actual.keys() != values.keys() for values in (*unfused, exact)):
        raise AssertionError(f"{sorted(actual)} is not {sorted(exact)}")
    errors = [0.0]
    few_error = few_bound = 0.0
    for name, reference in exact.items():
        ours = actual[name]
        own = (x[name] for x in unfused)
        low = dtype or ours.dtype
        bounds = [error_and_bound(ours, reference, x, low) for x in own]
        error, bound = max(bounds)  # the error is the same
        if math.isnan(error) or math.isnan(bound):
            return math.inf
        largest = reference.abs().max().item() if reference.numel() else 0.0
        if reference.numel() < 16 and largest:
            few_error = max(few_error, error / largest)
            few_bound = max(few_bound, bound / largest)
        else:
            errors.append(error / bound if bound else float(error > 0))
    errors.append(few_error / few_bound if few_bound else float(few_error > 0))
    return max(errors)


def experts_classes() -> list[type[torch.nn.Module]]:
    """Classes of the installed transformers that use the interface or have an adapter."""
    import transformers

    folder = pathlib.Path(transformers.__file__).parent / "models"
    found = []
    for path in sorted(folder.glob("*/modeling_*.py")):
        text = path.read_text()
        adapted = "|".join(ADAPTERS)
        classes = rf"^@use_experts_implementation.*\nclass (\w+)|^class ({adapted})\("
        names = re.findall(classes, text, re.MULTILINE)
        if names:
            name = f"transformers.models.{path.parent.name}.{path.stem}"
            module = importlib.import_module(name)
            found += [getattr(module, a or b) for a, b in names]
    return found


def class_inputs(
    name: str, dtype: torch.dtype
) -> tuple[tuple, dict[str, torch.Tensor]]:
    """Arguments of an experts class of TinyConfig, and those that have gradients."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(10, 16, generator=g).bfloat16().to(dtype).requires_grad_()
    weights, ids = torch.rand(10, 4, generator=g).topk(2)
    weights = weights.bfloat16().to(dtype).requires_grad_()
    args = (x, ids, weights)
    if name in ("Llama4TextMoe", "JetMoeMoE"):
        args = (x[None],)  # they hold their router
    elif name == "DbrxExperts":
        args = (x[None], ids, weights)
    return args, {"x": x, "weights": weights}


def run_class(experts_class: type[torch.nn.Module]) -> dict[str, object]:
    """One experts class by itself."""
    row: dict[str, object] = {"class": experts_class.__name__}
    config = TinyConfig()
    module = experts_class(config)
    fill(module, 0)
    if experts_class.__name__ in ADAPTERS:
        transformers_experts._adapt(experts_class)
        reason = transformers_experts.adapter_reason(module)
    else:
        reason = plan_of(module).reason
    if reason is not None:
        return row | {"state": "falls back", "why": reason}

    low = torch.bfloat16

    def outcome(dtype: torch.dtype, fused: bool, autocast=False) -> dict:
        module.to(dtype).zero_grad()
        config._experts_implementation = NAME if fused else "eager"
        module._uses_moe_mlp = fused
        args, leaves = class_inputs(experts_class.__name__, dtype)
        with torch.autocast("cpu", low, enabled=autocast):
            y = module(*args)
        y = y[0] if isinstance(y, tuple) else y
        y.square().sum().backward()
        leaves |= dict(module.named_parameters())
        values = {"y": y.detach()} | {name: leaf.grad for name, leaf in leaves.items()}
        return {n: v for n, v in values.items() if v is not None}

    exact, shares = outcome(torch.float64, False), {}
    for name, dtype, autocast in (
        ("error_over_allowed", torch.float32, False),
        ("bfloat16", low, False),
        ("autocast", torch.float32, True),
    ):
        actual = outcome(dtype, True, autocast)
        try:
            eager = outcome(dtype, False, autocast)
        except RuntimeError:
            if not autocast:
                raise
            eager = outcome(low, False)  # DBRX has no autocast of its own
        shares[name] = error_over_allowed(
            actual, [eager], exact, low if autocast else None
        )
    state = "runs" if max(shares.values()) <= 1 else "wrong"
    return row | {"state": state} | shares


def model_classes() -> list[type]:
    """Causal language models whose modeling file has an experts class."""
    modules = {c.__module__: sys.modules[c.__module__] for c in experts_classes()}
    return [
        candidate
        for where, module in modules.items()
        for name, candidate in vars(module).items()
        if name.endswith("ForCausalLM") and candidate.__module__ == where
    ]


def outcome_of(model: torch.nn.Module, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits and the gradient of every parameter that has one, all flat.

    Invariant 1 also bounds the rows of an op's result by themselves. In a whole model a row of small
    numbers has the rounding of the layers around the experts.
    """
    logits = model(input_ids=tokens, use_cache=False).logits
    target = tokens.roll(-1, dims=1).flatten()
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), target).backward()
    found = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    found["logits"] = logits.detach()
    return {name: values.flatten() for name, values in found.items()}


def models_of(path: pathlib.Path) -> list[dict[str, object]]:
    """The configs of a file, see the head of this one."""
    if path.suffix == ".toml":
        import tomllib  # not before Python 3.11

        content = tomllib.loads(path.read_text())
    else:
        content = json.loads(path.read_text())
    if isinstance(content, dict):
        content = content.get("models", [content] if "architectures" in content else [])
    if not content:
        raise ValueError(f"{path}: no list of models, and no config.json of one")
    configs = []
    for given in content:
        given = dict(given)
        if name := given.pop("config", None):
            given = json.loads((path.parent / name).read_text()) | given
        if not given.get("architectures"):
            raise ValueError(f"{path}: a model without architectures: {given}")
        configs.append(given)
    return configs


def run_config(config: dict[str, object]) -> dict[str, object]:
    """One model of a file."""
    import transformers

    (name, *_) = config["architectures"]
    row = run_model(getattr(transformers, name), config=config)
    names = ("hidden_size", "num_hidden_layers")
    return row | {name: config[name] for name in names if name in config}


def _first_line(error: Exception, length: int = 160) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:length]


def run_model(model_class: type, *, compiled=True, config: dict | None = None) -> dict:
    """One whole model, a tiny one unless there is a config."""
    row: dict[str, object] = {"model": model_class.__name__}
    tokens = torch.randint(3, 90, (2, 12), generator=torch.Generator().manual_seed(0))
    build = functools.partial(build_model, model_class, config=config)

    def outcome(dtype: torch.dtype, implementation: str) -> dict[str, torch.Tensor]:
        return outcome_of(build(dtype, implementation), tokens)

    try:
        # Both are unfused. The one with grouped_mm has the bits of eager here.
        unfused = [outcome(torch.float32, name) for name in ("eager", "batched_mm")]
        exact = outcome(torch.float64, "eager")
    except Exception as error:
        return row | {"state": "not built", "why": _first_line(error)}
    ours = build(torch.float32, "eager")
    ours.set_experts_implementation(NAME)
    row["layers"] = f"{len(fused_experts(ours))} of {len(experts_of(ours))}"
    if not fused_experts(ours):
        return row | {"state": "falls back"}
    share = error_over_allowed(outcome(torch.float32, NAME), unfused, exact)
    row["error_over_allowed"] = share
    row["autocast"] = _autocast(build, tokens)
    wrong = share > 1 or isinstance(row["autocast"], float) and row["autocast"] > 1
    row["state"] = "wrong" if wrong else "runs"
    row["generate"] = _generates_alike(build, tokens)
    if compiled:
        row["compile"] = _compiles(ours, tokens)
    return row


def _autocast(build: Callable, tokens: torch.Tensor) -> float | str:
    """Share of the allowed error under autocast, every token with the experts that float64 chooses.

    Of two logits that are near each other the rounding decides which is larger. One token with
    another expert changes gradients, those of a router most, by more than all other rounding.
    """
    exact = build(torch.float64, "eager")
    try:
        with record_routing(exact) as record:
            exact(input_ids=tokens, use_cache=False)
    except (NotImplementedError, ValueError) as error:
        return _first_line(error, 120)

    def outcome(model: torch.nn.Module, enabled: bool = True) -> dict:
        low = torch.autocast("cpu", torch.bfloat16, enabled=enabled)
        with replay_routing(model, record), low:
            return outcome_of(model, tokens)

    actual = outcome(build(torch.float32, NAME))
    try:
        names = ("eager", "batched_mm")
        unfused = [outcome(build(torch.float32, name)) for name in names]
    except RuntimeError as error:
        return f"theirs does not: {_first_line(error, 120)}"
    return error_over_allowed(
        actual, unfused, outcome(exact, enabled=False), torch.bfloat16
    )


def _generates_alike(build: Callable, tokens: torch.Tensor) -> str:
    try:
        options = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
        models = (build(torch.float32, name) for name in ("eager", NAME))
        texts = [model.generate(tokens, **options) for model in models]
    except Exception as error:
        return _first_line(error, 120)
    return "same" if torch.equal(*texts) else "differs"


def _compiles(model, tokens: torch.Tensor) -> str:
    def logits(call: Callable) -> torch.Tensor:
        torch._dynamo.reset()
        return call(input_ids=tokens, use_cache=False).logits

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        expected = logits(model)
        try:
            actual = logits(compiled)
        except Exception as error:
            model.set_experts_implementation("batched_mm")
            try:
                logits(compiled)
            except Exception:
                return "nor does it with batched_mm"
            return _first_line(error, 120)
    close = torch.allclose(actual, expected, rtol=1e-4, atol=1e-4)
    return "same" if close else "differs"


def main() -> int:
    args = parse(__doc__, models=list, only="")
    warnings.simplefilter("ignore")
    if args.models:
        configs = [c for file in args.models for c in models_of(pathlib.Path(file))]
        jobs = {"models": (configs, run_config)}
    else:
        jobs = {"experts": (experts_classes(), run_class)}
        if args.models is not None:
            jobs["models"] = (model_classes(), run_model)
    result: dict[str, list[dict]] = {}
    for kind, (given, run) in jobs.items():
        rows = result[kind] = []
        for each in given:
            name = each["architectures"][0] if isinstance(each, dict) else each.__name__
            if not re.search(args.only, name):
                continue
            try:
                row = run(each)
            except Exception as error:
                row = {"class": name, "state": "fails", "why": _first_line(error)}
            rows.append(row)
            print(*(f"{k}={v}" for k, v in row.items()), flush=True)
        print(f"{kind}: {dict(Counter(row['state'] for row in rows))}")
    save(args.out, **result)
    states = [row["state"] for rows in result.values() for row in rows]
    return int("wrong" in states or "fails" in states)


if __name__ == "__main__":
    sys.exit(main())
