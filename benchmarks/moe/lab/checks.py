"""Correctness checks: every kernel against float64, the same bits twice, graphs, memory.

Each of the FAMILIES, which are a few kernels, is checked in its own process. Other kernels are not
launched: their results are computed in float64, so that a kernel that hangs or fails is one row.
Nothing here raises; a failed check is a row that says so. Every allocation is
poisoned: elements that a kernel does not write are NaN.
"""

import contextlib
import dataclasses
import functools
import os
import traceback
import warnings
from collections.abc import Callable, Iterator

from shapes import make_operands, Shape

import torch
from torch import Tensor

from . import loading
from .layer import layer
from .loading import generators, graph_replay, launch, reference, topk


ACT = launch.Activation()
# As in gpt-oss: gate and up alternate, limits, and matrices stored (E, D, 2F) and (E, F, D).
OSS = launch.Activation("swiglu_oai", gate_interleaved=True, alpha=1.702, limit=1.0)
# Cases for the interpreter, which takes seconds for each.
REHEARSAL_CASES = ("aligned_tail", "ragged")
# More than a tile in every dimension, beside the small cases of the tests; and of FP8.
SIZED = generators.MoeCase("sized", 700, 512, 384, 8, 2, "zipf")
SCALED_CASES = (
    generators.MoeCase("scaled", 16, 144, 128, routing="sentinels"),
    dataclasses.replace(SIZED, name="scaled_sized", hidden=320),
)
GRADIENTS = (True,) * 7


@dataclasses.dataclass(frozen=True)
class Family:
    """Kernels that are checked together.

    Attributes:
        check: (plan, case, device, family) -> None; raises if a result is wrong.
        launched: the matmul kernels that run; None for all.
        backward: whether backward or forward is checked; None for both.
        ragged: as in the plan.
        act: the activation.
        recipe: the FP8 recipe, by names of ScalingType.
    """

    check: Callable
    launched: str | None = None
    backward: bool | None = None
    ragged: bool = True
    act: launch.Activation = ACT
    recipe: tuple[str, str] | None = None


def attempt(row: dict, name: str, check: Callable[[], object]) -> object:
    """Runs ``check``; writes "ok" or the error to ``row[name]`` and returns the result."""
    try:
        result = check()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()  # a kernel's error belongs to this check
        row[name] = "ok"
        return result
    except Exception as error:
        where = traceback.extract_tb(error.__traceback__)[-1]
        place = f"{os.path.basename(where.filename)}:{where.lineno}"
        row[name] = f"{type(error).__name__} at {place}: {error}"[:400]
    if torch.cuda.is_initialized() and "OutOfMemory" in row[name]:
        torch.cuda.empty_cache()
    return None


def device_is_lost(device: torch.device) -> bool:
    """Whether an earlier kernel broke the CUDA context for the rest of the process."""
    if device.type != "cuda":
        return False
    try:
        torch.zeros(1, device=device).add_(1).item()
        return False
    except RuntimeError:
        return True


@contextlib.contextmanager
def poisoned() -> Iterator[None]:
    """Fills fresh memory with NaN, or the largest integer, so that missing writes show."""
    before = torch.are_deterministic_algorithms_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        # Filling needs this mode; its other effects are not needed here.
        torch.use_deterministic_algorithms(True, warn_only=True)
        torch.utils.deterministic.fill_uninitialized_memory = True
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before)


def _check_permutation(plan, case, device: torch.device, family: Family) -> None:
    options = {"num_rows": case.num_rows, "row_alignment": case.row_alignment}
    ids = case.topk_indices(device)
    actual = launch.moe_permutation(ids, case.num_experts, **options)
    expected = reference.moe_permutation_reference(ids, case.num_experts, **options)
    for name, a, b in zip(expected._fields, actual, expected):
        assert torch.equal(a, b), f"{name} differs"


def _check_topk(plan, case, device: torch.device, family: Family) -> None:
    generator = torch.Generator().manual_seed(case.seed)
    logits = torch.randn(case.num_tokens, case.num_experts, generator=generator)
    logits = logits.to(device).requires_grad_()
    for score in ("softmax", "sigmoid"):
        k, exact = case.top_k, logits.double()
        ids, weights = topk.moe_topk(logits.detach(), k, score=score)
        truth_ids, truth = reference.moe_topk_reference(exact, k, score=score)
        assert torch.equal(ids, truth_ids), f"{score}: topk_indices differ"
        scores = logits.softmax(-1) if score == "softmax" else logits.sigmoid()
        unfused = scores.gather(-1, ids)
        unfused = unfused / (unfused.sum(-1, keepdim=True) + 1e-20)
        reference.check_close(weights, truth, unfused, torch.float32, "topk_weights")
        cotangent = torch.ones_like(weights).cumsum(-1)
        grad = topk.moe_topk_backward(cotangent, logits.detach(), ids, score=score)
        (a,) = torch.autograd.grad(truth, logits, cotangent.double())
        (b,) = torch.autograd.grad(unfused, logits, cotangent)
        reference.check_close(grad, a, b, torch.float32, "grad_logits")


def activation_of(act: launch.Activation) -> dict[str, object]:
    """The activation as arguments of the reference."""
    return dataclasses.asdict(act)


def _written(ops, preact: Tensor, act: launch.Activation) -> dict[tuple, object]:
    """Correct outputs of matmul kernels in float64, by kernel and argument.

    Weight gradients use the rows that another kernel wrote, which has no other check.
    """
    num_experts, rows = len(ops.offs), torch.arange(len(preact), device=preact.device)
    slots = ops.row_slots.long()
    live = (slots >= 0) & (rows < ops.offs[-1])
    slots = torch.where(live, slots, 0)
    tokens = slots // ops.slot_rows.shape[1]
    expert = torch.searchsorted(ops.offs, rows, right=True).clamp_max(num_experts - 1)
    expert = torch.where(live, expert, -1)

    def product(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
        out = x.new_zeros(len(x), w.shape[1], dtype=torch.float64)
        for e in range(num_experts):
            y = x[expert == e].double() @ w[e].double().mT
            out[expert == e] = y if bias is None else y + bias[e].double()
        return out

    def reduced(arguments: dict) -> Tensor:
        p, q = (
            arguments[x][tokens] if arguments[gather] else arguments[x][: len(rows)]
            for x, gather in (("p", "GATHER_P"), ("q", "GATHER_Q"))
        )
        masks = (expert == e for e in range(num_experts))
        return torch.stack([p[m].double().mT @ q[m].double() for m in masks])

    h = preact.detach().double().requires_grad_()
    with torch.enable_grad():
        a = reference.apply_activation(h, **activation_of(act))
    s = ops.topk_weights.double().flatten()[slots][:, None] * live[:, None]
    da = product(ops.grad_out[tokens], ops.w_out.mT)
    (dh,) = torch.autograd.grad(a, h, s * da)
    a = a.detach() * live[:, None]
    return {
        ("up_kernel", "preact"): preact,
        ("up_kernel", "hidden"): a,
        ("down", "out"): s * product(a, ops.w_out, ops.b_out),
        ("act_backward_kernel", "grad_preact"): dh,
        ("act_backward_kernel", "scaled_hidden"): s * a,
        ("act_backward_kernel", "scale_partials"): (da * a).sum(1),
        ("input_grad", "out"): product(dh, ops.w_in.mT),
        ("weight_grad_kernel", "out"): reduced,
    }


_ROLES = {"grouped_mm_kernel": ("down", "input_grad")}  # forward, backward
_MATMULS = (
    "up_kernel",
    "grouped_mm_kernel",
    "act_backward_kernel",
    "weight_grad_kernel",
)


def _only(plan, family: Family, written: dict[tuple, object], backward: bool):
    """``plan`` of a family: kernels that it does not launch write their correct outputs."""

    def act(launched: loading.Launch) -> object:
        name = launched.name
        if name not in _MATMULS or family.launched in (None, name):
            return launched()
        role = _ROLES.get(name, (name, name))[backward]
        arguments = launched.arguments()
        for (kernel, argument), values in written.items():
            target = arguments.get(argument)
            if kernel != role or target is None or target.numel() == 0:
                continue
            if callable(values):
                values = values(arguments)
            if argument == "scale_partials":
                target.zero_()[0].copy_(values)
            else:
                target[: len(values)].copy_(values)
        return None

    return loading.hooked(dataclasses.replace(plan, ragged=family.ragged), act)


def _check_mlp(plan, case, device: torch.device, family: Family) -> None:
    act = family.act
    ops = case.operands(torch.bfloat16, device, activation=act.activation, bias=True)
    if act.gate_interleaved:
        stored = {name: getattr(ops, name).mT.contiguous().mT for name in ("w_in", "w_out")}  # fmt: skip
        ops = dataclasses.replace(ops, **stored)
    args, kwargs = ops.args(), activation_of(act)
    truth = reference.moe_mlp_reference(*args, **kwargs)
    # The backward gets the correct pre-activation.
    preact = truth[1].to(torch.bfloat16)
    written = _written(ops, preact, act)
    if not family.backward:
        only = _only(plan, family, written, False)
        found = launch.moe_mlp_forward(only, launch.Experts(*args, act=act))
        yardstick = reference.moe_mlp_unfused(*args, **kwargs)
        for name, a, b, c in zip(("output", "preact"), found, truth, yardstick):
            reference.check_close(a, b, c, torch.bfloat16, name)
    if family.backward is not False:
        only = _only(plan, family, written, True)
        found = launch.moe_mlp_backward(
            only, launch.Experts(*args, act=act), ops.grad_out, preact, GRADIENTS
        )
        truth = reference.moe_mlp_backward_reference(ops.grad_out, *args, **kwargs)
        yardstick = reference.moe_mlp_backward_unfused(ops.grad_out, *args, **kwargs)
        for name, a, b, c in zip(truth._fields, found, truth, yardstick):
            if b is not None:
                reference.check_close(a, b, c, torch.bfloat16, name)


def _check_quantize(plan, case, device: torch.device, family: Family) -> None:
    """Compares bits of codes and scales, along every dimension, for experts' rows and as int8."""
    generator = torch.Generator().manual_seed(case.seed)
    x = torch.randn(3, case.dim, case.hidden, generator=generator)
    x = x * torch.exp2(torch.randint(-30, 30, x.shape, generator=generator))
    x[0, 0, :130], x[1, 1, 1], x[2, 2, 2] = 0, torch.inf, torch.nan
    offs = torch.tensor([0, case.dim // 3, case.dim - 3], dtype=torch.int32)
    options = [{"dim": -1}, {"dim": 1}, {"dim": -1, "dtype": torch.int8}]
    for recipe, rule in loading.quantize.SCALING_RULES.items():
        for kwargs in (*options, {"dim": 0, "offs": offs}):
            if rule.square and kwargs["dim"] != -1:
                continue
            values = x.bfloat16() if "offs" not in kwargs else x[0].bfloat16()
            expected = loading.quantized.moe_quantize_reference(values, recipe, **kwargs)  # fmt: skip
            if "offs" in kwargs:
                kwargs = {**kwargs, "offs": offs.to(device)}
            found = loading.native_quantizer(values.to(device), recipe, **kwargs)
            for name, a, b in zip(("data", "scale"), found, expected):
                if "offs" in kwargs and name == "scale":
                    continue  # places without a block are undefined
                a, b = (t.contiguous().view(torch.uint8) for t in (a.cpu(), b))
                assert torch.equal(a, b), f"recipe {recipe}, {kwargs}: {name} differs"


def _on(ops, device: torch.device):
    moved = ((f.name, getattr(ops, f.name)) for f in dataclasses.fields(ops))
    return dataclasses.replace(ops, **{n: t if t is None else t.to(device) for n, t in moved})  # fmt: skip


def recipe_of(family: Family):
    """The Recipe of a family; a launch widens it for an architecture without scaled products."""
    kinds = torch.nn.functional.ScalingType
    codes = (getattr(kinds, name).value for name in family.recipe)
    return loading.scaled_operands.Recipe(*codes)


def scaled_layer(plan, ops, recipe, between=lambda: None) -> tuple[Tensor, ...]:
    """Output and gradients of SwiGLU in FP8; calls ``between()`` between the two passes."""
    options = {"recipe": recipe, "act": ACT, "preact_dtype": torch.float8_e4m3fn}
    experts = loading.scaled_operands.ScaledExperts(*ops.args(), **options)
    output, *saved = loading.scaled_launch.moe_mlp_scaled_forward(plan, experts)
    between()
    return output, *loading.scaled_launch.moe_mlp_scaled_backward(
        plan, dataclasses.replace(experts, input=ops.grad_out), saved, GRADIENTS
    )


def _check_scaled(plan, case, device: torch.device, family: Family) -> None:
    # The reference quantises weights and rows, as the quantise kernel has its own row.
    loading.use_quantizer(loading.reference_quantizer)
    recipe = recipe_of(family)
    ops = case.operands(torch.bfloat16, bias=True)
    found = scaled_layer(plan, _on(ops, device), recipe)
    codes = (recipe.rows, recipe.weights)
    exact = loading.quantized.ScaledMlp(ops, *codes)
    yardstick = loading.quantized.ScaledMlp(ops, *codes, dtype=torch.bfloat16)
    truth = (exact.forward()[0], *exact.backward())
    unfused = (yardstick.forward()[0], *yardstick.backward())
    names = ("output", *reference.MoeMlpGrads._fields)
    for name, a, b, c in zip(names, found, truth, unfused):
        if b is not None:
            reference.check_close(a, b, c, torch.bfloat16, name)


_mlp = functools.partial(Family, _check_mlp)
_scaled = functools.partial(Family, _check_scaled)
FAMILIES: dict[str, Family] = {
    "topk": Family(_check_topk),
    "permutation": Family(_check_permutation),
    "up": _mlp("up_kernel", False),
    "down": _mlp("grouped_mm_kernel", False),
    "act_backward": _mlp("act_backward_kernel", True),
    "input_grad": _mlp("grouped_mm_kernel", True),
    "weight_grad": _mlp("weight_grad_kernel", True),
    "weight_grad_not_ragged": _mlp("weight_grad_kernel", True, ragged=False),
    "layer": _mlp(),
    "gpt_oss": _mlp(act=OSS),
    "quantize": Family(_check_quantize),
    "fp8_blockwise": _scaled(recipe=("BlockWise1x128", "BlockWise128x128")),
    "fp8_rowwise": _scaled(recipe=("RowWise", "RowWise")),
    "mxfp8": _scaled(recipe=("BlockWise1x32", "BlockWise1x32")),
}


def cases_of(name: str, device: torch.device) -> list:
    """The cases of a family; only a few in the interpreter."""
    if FAMILIES[name].recipe is not None or name == "quantize":
        cases = SCALED_CASES
    else:
        cases = (*generators.moe_cases(), SIZED)
    if device.type != "cpu":
        return list(cases)
    return [c for c in cases if c.name in (*REHEARSAL_CASES, SCALED_CASES[0].name)]


def check_family(
    name: str, plan, device: torch.device, save: Callable = lambda row: None
) -> dict[str, object]:
    """A row with the failed cases among those that ran; ``save`` gets it before each case."""
    family = FAMILIES[name]
    row: dict[str, object] = {"family": name, "ok": False, "cases": 0, "failed": {}}
    if loading.NO_SCALED and (family.recipe is not None or name == "quantize"):
        return row | {"ok": True, "absent": loading.NO_SCALED}
    with poisoned():
        for case in cases_of(name, device):
            save(row | {"running": case.name})
            ran: dict[str, str] = {}
            attempt(ran, case.name, lambda: family.check(plan, case, device, family))
            row["cases"] += 1
            if ran[case.name] != "ok":
                row["failed"] |= ran
            if device_is_lost(device):
                row["failed"][case.name] += "; the device was lost"
                break
    row["ok"] = not row["failed"]
    return row


def _step(operands) -> tuple[Tensor, ...]:
    output = layer(*operands.layer_args())
    grads = torch.autograd.grad(output, operands.leaves(), operands.grad)
    return (output.detach(), *grads)


def _same(first: tuple[Tensor, ...], second: tuple[Tensor, ...]) -> None:
    names = ("output", "grad_input", "grad_topk_weights", "grad_w_in", "grad_w_out")
    for name, a, b in zip(names, first, second):
        assert torch.equal(a, b), f"{name}: other bits"


@torch.no_grad()
def _check_alone(operands, first: tuple[Tensor, ...]) -> None:
    """Token 0 alone uses the tiles for decoding, and must have the same bits as in the batch."""
    x, ids, weights, w_in, w_out = operands.layer_args()
    alone = layer(x[:1], ids[:1], weights[:1], w_in, w_out)
    assert torch.equal(alone, first[0][:1]), "output of a token alone: other bits"


def check_repeatable(shape: Shape, device: torch.device) -> dict[str, object]:
    """Forward and backward twice, as a CUDA graph, and one token alone: the same bits."""
    row: dict[str, object] = {"shape": shape.name, "ok": False}
    operands = make_operands(shape, device, weights_dtype=torch.float32)
    first = attempt(row, "runs", lambda: _step(operands))
    if first is None:
        return row
    attempt(row, "twice", lambda: _same(first, _step(operands)))
    attempt(row, "token_alone", lambda: _check_alone(operands, first))
    if device.type == "cuda":
        step = functools.partial(_step, operands)
        captured = attempt(row, "capture", lambda: graph_replay(step, device))
        if captured is not None:
            attempt(row, "replay", lambda: _same(first, captured()))
    row["ok"] = all(v == "ok" for k, v in row.items() if k not in ("shape", "ok"))
    return row


def exercise(names, plan, device: torch.device) -> dict[str, str]:
    """Launches the kernels of families once each, for a tool that watches memory; checks nothing."""
    row: dict[str, str] = {}
    for name in names:
        family = FAMILIES[name]
        is_scaled = family.recipe is not None or name == "quantize"
        if loading.NO_SCALED and is_scaled:
            continue
        case = SCALED_CASES[0] if is_scaled else generators.get_case("clipped_aligned")
        attempt(row, name, lambda: _exercise(plan, case, device, name, family))
    return row


def _exercise(plan, case, device: torch.device, name: str, family: Family) -> None:
    if name in (
        "topk",
        "permutation",
        "quantize",
    ):  # small, and without a matmul reference
        return family.check(plan, case, device, family)
    ops = case.operands(
        torch.bfloat16, device, activation=family.act.activation, bias=True
    )
    if family.recipe is not None:
        loading.use_quantizer(loading.reference_quantizer)  # as in its check
        scaled_layer(plan, ops, recipe_of(family))
        return None
    plan = dataclasses.replace(plan, ragged=family.ragged)
    experts = launch.Experts(*ops.args(), act=family.act)
    _, preact = launch.moe_mlp_forward(plan, experts)
    launch.moe_mlp_backward(plan, experts, ops.grad_out, preact, GRADIENTS)
    return None
