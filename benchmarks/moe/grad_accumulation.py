"""Micro-batches of F.moe_mlp: expert weight gradients by autograd, and added to ``.grad`` by the kernel.

    python benchmarks/moe/grad_accumulation.py --out benchmarks/moe/results/grad_accumulation.json

Each call is forward and backward. "micro-batch": into a ``.grad`` that exists, as every micro-batch
after the first. "step": one batch per step of an optimizer, whose ``zero_grad`` is part of the call:
autograd gets None, which is cheapest for it, and the kernel a ``.grad`` that is zeroed in place. Autograd alone is
what the same call does while somebody holds the AccumulateGrad nodes; grouped_mm is the peer of the
CPU rows. The bound is the six matmuls of every expert and nothing else, by ``at::mm`` into memory that is
used again, in whichever of bfloat16 and float32 is faster: over autograd nothing can gain more than that.
All take turns in one process, on the same weights, and the bits of ``.grad`` are compared.

First touch of new memory is most of the difference, and depends on malloc: every row is measured
with glibc's malloc as it is, with huge pages (THP_MEM_ALLOC_ENABLE) and with one that gives no
memory back (GLIBC_TUNABLES). Times are processor time of the process, which other jobs of the machine move least.
"""

import itertools
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Callable

from peers import sorted_grouped_mm
from report import parse, show
from shapes import ACCUMULATION_SHAPES, make_operands, Operands, Shape

import torch
import torch.nn.functional as F
from torch.autograd.graph import get_gradient_edge

from measure import interleaved_seconds, ratio_record, save, spread, timed


_KEPT = "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=8589934592"
ALLOCATORS = {
    "glibc": {},
    "huge pages": {"THP_MEM_ALLOC_ENABLE": "1"},
    "memory is kept": {"GLIBC_TUNABLES": _KEPT},
}


class Call:
    """Forward and backward of one form, which leaves ``.grad`` of its weights."""

    def __init__(self, operands: Operands, form: str, kind: str) -> None:
        self.operands, self.form, self.kind = operands, form, kind
        weights = (operands.w_in, operands.w_out)
        self.weights = [w.detach().clone().requires_grad_() for w in weights]
        self.function = sorted_grouped_mm if form == "grouped_mm" else F.moe_mlp
        # Whoever holds these nodes might have hooked them: autograd does all by itself.
        self.held = [get_gradient_edge(w) for w in self.weights if form != "in_place"]
        if kind == "micro-batch" or form == "in_place":
            for w in self.weights:
                w.grad = torch.zeros_like(w)

    def __call__(self) -> None:
        for w in self.weights if self.kind == "step" else ():
            w.grad = w.grad.zero_() if self.form == "in_place" else None
        o = self.operands
        x, s = (t.detach().requires_grad_() for t in (o.x, o.weights))
        self.function(x, o.ids, s, *self.weights).backward(o.grad)


def products(operands: Operands, dtype, num_experts: int | None = None) -> Callable:
    """Forward's and backward's matmuls of the first experts, with the rows that each has."""
    counts = operands.ids.flatten().bincount(minlength=len(operands.w_in)).tolist()
    w_in, w_out = (w.detach().to(dtype) for w in (operands.w_in, operands.w_out))
    (width, dim), hidden = w_in.shape[1:], w_out.shape[2]
    x, dx, y, dy = torch.rand(4, max(counts), dim).to(dtype)
    a, da = torch.rand(2, max(counts), hidden).to(dtype)
    h, dh = torch.rand(2, max(counts), width).to(dtype)
    grads = [torch.empty_like(w[0]) for w in (w_in, w_out)]

    def call() -> None:
        for n, w1, w2 in zip(counts[:num_experts], w_in, w_out):
            torch.mm(x[:n], w1.T, out=h[:n])
            torch.mm(a[:n], w2.T, out=y[:n])
            torch.mm(dy[:n], w2, out=da[:n])
            torch.mm(dh[:n], w1, out=dx[:n])
            torch.mm(dh[:n].T, x[:n], out=grads[0])
            torch.mm(dy[:n].T, a[:n], out=grads[1])

    return call


def page_faults(call: Callable[[], object]) -> int:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    call()
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before


def measure(shape: Shape, kind: str, rounds: int) -> dict[str, object]:
    operands = make_operands(shape, weights_dtype=torch.float32)
    calls = {n: Call(operands, n, kind) for n in ("in_place", "autograd", "grouped_mm")}
    for _ in range(2):
        calls["in_place"]()
        calls["autograd"]()
        for a, b in zip(calls["in_place"].weights, calls["autograd"].weights):
            if not torch.equal(a.grad, b.grad):
                raise AssertionError(f"{shape.name}: .grad has other bits")
    clock = time.process_time
    of_some = lambda d: timed(products(operands, d, num_experts=2), clock=clock)
    dtype = min((torch.bfloat16, torch.float32), key=of_some)
    calls["products"] = products(operands, dtype)
    seconds = interleaved_seconds(calls, rounds=rounds, warmup=1, clock=clock)
    row: dict[str, object] = {"id": shape.name, "pass": kind, **shape.sizes()}
    row["milliseconds"] = {n: spread([1e3 * v for v in s]) for n, s in seconds.items()}
    row["bound"] = ratio_record(seconds["autograd"], seconds["products"])
    row["page_faults"] = {n: page_faults(call) for n, call in calls.items()}
    for name in ("autograd", "grouped_mm"):
        row[f"{name}_to_in_place"] = ratio_record(seconds[name], seconds["in_place"])
    return row


def measure_all(args) -> list[dict]:
    """The rows of every allocator, each in a process of its own."""
    rows = []
    for name in args.allocators:
        command = [sys.executable, __file__, "--rounds", str(args.rounds), "--child"]
        command += ["--passes", *args.passes]
        done = subprocess.check_output(command, env=os.environ | ALLOCATORS[name])
        rows += [{"allocator": name, **row} for row in json.loads(done)]
        print(f"{name}: {len(rows)} rows", file=sys.stderr, flush=True)
    return rows


def main() -> None:
    passes = dict.fromkeys(("micro-batch", "step"))
    options = {"allocators": ALLOCATORS, "passes": passes, "child": False}
    args = parse(__doc__, rounds=9, **options)
    torch.set_num_threads(1)
    if args.child:
        cases = itertools.product(ACCUMULATION_SHAPES, args.passes)
        rows = [measure(shape, kind, args.rounds) for shape, kind in cases]
        json.dump(rows, sys.stdout)
        return
    rows = measure_all(args)
    columns = ("allocator", "pass", "id", "milliseconds.in_place")
    columns += ("autograd_to_in_place", "bound", "grouped_mm_to_in_place")
    show("Forward and backward, bfloat16, one thread", rows, columns)
    save(args.out, rows=rows)


if __name__ == "__main__":
    main()
