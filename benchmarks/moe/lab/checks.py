"""Is it right: every kernel against float64, the same bits twice, graphs, memory.

Nothing here raises. A check that fails is a row that says so, so that a first run on a
new card reports about all kernels and not about the first that fails.
"""

import functools
import os
import shutil
import subprocess
import sys
import traceback
from collections.abc import Callable

from shapes import make_operands, Shape

import torch
from torch import Tensor

from .layer import layer
from .loading import generators, graph_replay, launch, reference, topk


ACT = launch.Activation()
REHEARSAL_CASES = ("uniform", "clipped_aligned", "no_tokens", "one_of_one", "ragged")


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


def _check_permutation(case, device: torch.device) -> None:
    options = {"num_rows": case.num_rows, "row_alignment": case.row_alignment}
    ids = case.topk_indices(device)
    actual = launch.moe_permutation(ids, case.num_experts, **options)
    expected = reference.moe_permutation_reference(ids, case.num_experts, **options)
    for name, a, b in zip(expected._fields, actual, expected):
        assert torch.equal(a, b), f"{name} differs"


def _check_topk(case, device: torch.device) -> None:
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


def _check_forward(plan, operands) -> Tensor:
    args = operands.args()
    experts = launch.Experts(*args, act=ACT)
    output, preact = launch.moe_mlp_forward(plan, experts)
    truth = reference.moe_mlp_reference(*args)
    yardstick = reference.moe_mlp_unfused(*args)
    reference.check_close(preact, truth[1], yardstick[1], args[0].dtype, "preact")
    reference.check_close(output, truth[0], yardstick[0], args[0].dtype, "output")
    return preact


def _check_backward(plan, operands, preact: Tensor) -> None:
    args, grad_out = operands.args(), operands.grad_out
    all_of_them = (True,) * 7
    experts = launch.Experts(*args, act=ACT)
    grads = launch.moe_mlp_backward(plan, experts, grad_out, preact, all_of_them)
    truth = reference.moe_mlp_backward_reference(grad_out, *args)
    yardstick = reference.moe_mlp_backward_unfused(grad_out, *args)
    for name, grad, a, b in zip(truth._fields, grads, truth, yardstick):
        if a is not None:
            reference.check_close(grad, a, b, args[0].dtype, name)


def check_case(plan, case, device: torch.device) -> dict[str, object]:
    """Router, permutation, forward and backward of one case; each on its own."""
    row: dict[str, object] = {"case": case.name}
    attempt(row, "topk", lambda: _check_topk(case, device))
    attempt(row, "permutation", lambda: _check_permutation(case, device))
    operands = case.operands(torch.bfloat16, device, bias=True)
    preact = attempt(row, "forward", lambda: _check_forward(plan, operands))
    if preact is None:
        # The backward is still asked, on the pre-activation it should have had.
        exact = reference.moe_mlp_reference(*operands.args())[1]
        preact = exact.to(torch.bfloat16)
    attempt(row, "backward", lambda: _check_backward(plan, operands, preact))
    row["ok"] = all(v == "ok" for k, v in row.items() if k != "case")
    return row


def check_cases(plan, device: torch.device) -> list[dict[str, object]]:
    """All small cases of the tests; in the interpreter some of them."""
    rows = []
    for case in generators.moe_cases():
        if device.type == "cpu" and case.name not in REHEARSAL_CASES:
            continue  # the interpreter takes seconds for each
        rows.append(check_case(plan, case, device))
        if device_is_lost(device):
            rows[-1]["device_lost"] = True
            break
    return rows


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
    """Token 0 alone, which takes the tiles for decoding, has the bits it had in the batch."""
    x, ids, weights, w_in, w_out = operands.layer_args()
    alone = layer(x[:1], ids[:1], weights[:1], w_in, w_out)
    assert torch.equal(alone, first[0][:1]), "output of a token alone: other bits"


def check_repeatable(shape: Shape, device: torch.device) -> dict[str, object]:
    """Forward and backward twice, as a CUDA graph, and one token alone: the same bits."""
    row: dict[str, object] = {"shape": shape.name}
    operands = make_operands(shape, device, weights_dtype=torch.float32)
    first = attempt(row, "runs", lambda: _step(operands))
    if first is None:
        return row
    attempt(row, "twice", lambda: _same(first, _step(operands)))
    if device.type == "cuda":
        step = functools.partial(_step, operands)
        captured = attempt(row, "capture", lambda: graph_replay(step, device))
        if captured is not None:
            attempt(row, "replay", lambda: _same(first, captured()))
    attempt(row, "token_alone", lambda: _check_alone(operands, first))
    row["ok"] = all(v == "ok" for k, v in row.items() if k != "shape")
    return row


def run_sanitizer(script: str, timeout_s: float) -> dict[str, object]:
    """The tools of compute-sanitizer over the smallest cases of gpu_lab.py."""
    path = shutil.which("compute-sanitizer")
    if path is None:
        return {"available": False, "note": "compute-sanitizer is not on this machine"}
    result: dict[str, object] = {"available": True}
    # Without the caching allocator an access past a tensor is one past an allocation.
    env = dict(os.environ, PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    options = {"env": env, "capture_output": True, "text": True}
    for tool in ("memcheck", "racecheck"):
        command = [path, "--tool", tool, "--error-exitcode", "99", sys.executable]
        command += [script, "--stage", "smallest"]
        try:
            run = subprocess.run(command, **options, timeout=timeout_s)
            result[tool] = {"rc": run.returncode, "tail": run.stdout[-600:]}
        except subprocess.TimeoutExpired:
            result[tool] = {"rc": None, "tail": f"longer than {timeout_s:.0f} s"}
    return result
