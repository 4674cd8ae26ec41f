# Owner(s): ["oncall: distributed"]

"""What expert parallelism does with messages, at random, for a tool that watches memory.

    LD_PRELOAD=libc_malloc_debug.so.0 GLIBC_TUNABLES=glibc.malloc.check=3 \\
        python test/distributed/test_moe_message_memory.py --seeds 0 300 [--log FILE]

Four ranks draw the same operations from a seed: messages of unequal sizes whose tensors are views,
or have no other owner while gloo's threads read and write them; works that are waited for late, in
another order, or never; layers that train, with communication on a thread of its own, and are
forgotten; groups that are destroyed with work in flight; ranks that come after a timeout, when the
buffers of the others are gone. Ranks check what arrives and the row behind it, and end Python normally.
"""

import contextlib
import datetime
import os
import random
import sys
import time
from collections import Counter
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ExpertParallel,
    ExpertPlacement,
    parallelize_module,
)


sys.path.append(os.path.dirname(os.path.abspath(__file__)))

from moe_fault_ranks import (  # noqa: E402
    check_seeds,
    forked,
    free_port,
    init_ranks,
    run_seeds,
    wait_for_ranks,
)


if "--seeds" in sys.argv:
    # These processes are ranks, not tests. Imports for tests take longer than torch.
    TestCase = object
else:
    from torch.testing._internal.common_utils import run_tests, TestCase


RANKS, D, HIDDEN, E, K, TOKENS = 4, 16, 8, 8, 2, 60
OPERATIONS = int(os.environ.get("MOE_MEMORY_OPERATIONS", "100"))
# Seconds: of a collective, of one that a rank comes too late for, and of a seed under a slow tool.
TIMEOUT, SHORT_TIMEOUT, DEADLINE = 300, 0.3, 3600
STYLES = (
    {},
    {"combine": "exact"},
    {"num_chunks": 2},
    {"num_chunks": 3, "capacity": TOKENS},
    {"token_switch": "hierarchical", "ranks_per_node": 2, "num_chunks": 2},
    {"token_switch": "all_gather", "max_tokens": TOKENS},
    {"online": True, "combine": "exact"},
    {"every": 2, "num_chunks": 2},
)
FINISHED = "all operations are done:"  # in the log of a rank
# What a tool, glibc or the C++ runtime says of memory and threads.
COMPLAINTS = (
    "Sanitizer",
    "Scudo ERROR",
    "Invalid read",
    "Invalid write",
    "Invalid free",
    "malloc",
    "free()",
    "corrupt",
    "terminate called",
)


def parallel_model(style):
    """Two layers, and their optimizer."""
    style, mesh = dict(style), init_device_mesh("cpu", (RANKS,))
    options = {n: style.pop(n) for n in ("online", "every") if n in style}
    if options:
        options |= {"slots_per_rank": E // RANKS + 1, "copy_cost": 1.0}
        style["placement"] = ExpertPlacement(**options)
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.MoE(D, HIDDEN, E, K) for _ in range(2)))
    parallelize_module(model, mesh, {n: ExpertParallel(**style) for n in ("0", "1")})
    return model, torch.optim.SGD(model.parameters(), lr=1e-3)


class Rank:
    """A rank and what it has in flight."""

    def __init__(self, rank, seed):
        self.rank = rank
        self.draw = random.Random(seed)  # the same on all ranks
        self.own = random.Random(f"{seed} {rank}")
        self.late = []  # works, what they receive, and how many rows of each rank
        self.models = {}

    def sizes(self):
        """Rows to and from each rank."""
        most = self.draw.choice((0, 1, 3, 40, 3000))
        table = [
            [self.draw.randint(0, most) for _ in range(RANKS)] for _ in range(RANKS)
        ]
        return table[self.rank], [row[self.rank] for row in table]

    def operands(self):
        """Views into messages, and their sizes. The row behind the received ones is zeros."""
        (send, recv), width = self.sizes(), self.draw.choice((4, 36, 264))
        x = torch.full((sum(send) + 1, width), self.rank + 1, dtype=torch.uint8)
        out = x.new_zeros(sum(recv) + 1, width)
        return out[:-1], x[:-1], recv, send

    def allocate(self):
        """Overwrites memory that was freed too early."""
        _ = [torch.full((self.own.randint(1, 5000),), 7.0) for _ in range(20)]

    def issue(self, group=None):
        out, x, recv, send = self.operands()
        work = dist.all_to_all_single(out, x, recv, send, group=group, async_op=True)
        return work, out, recv

    # -- operations

    def keep(self):
        work, out, recv = self.issue()
        # Only a view may be left of the message.
        self.late.append((work, out[:, 1:3] if self.own.random() < 0.5 else out, recv))

    def drop(self):
        for _ in range(self.draw.randint(1, 4)):
            self.issue()
        self.allocate()

    def wait(self):
        self.own.shuffle(self.late)
        for _ in range(self.own.randint(0, len(self.late))):
            work, out, recv = self.late.pop()
            work.wait()
            del work
            ranks = torch.arange(1, RANKS + 1, dtype=torch.uint8)
            sent = ranks.repeat_interleave(torch.tensor(recv))
            whole = out.as_strided((len(out) + 1, out.shape[1]), out.stride())
            if not torch.equal(whole[:-1], sent[:, None].expand_as(out)):
                raise AssertionError("other bytes were received than sent")
            if whole[-1].any():
                raise AssertionError("the row behind the message was written")

    def gather(self):
        x = torch.full((self.draw.randint(1, 50), 3), float(self.rank))
        out = x.new_empty(RANKS * len(x), 3)
        work = dist.all_gather_into_tensor(out, x, async_op=True)
        del x
        if self.own.random() < 0.5:
            work.wait()

    def train(self):
        at = self.draw.randrange(len(STYLES))
        if at not in self.models:
            self.models[at] = parallel_model(STYLES[at])
        model, optimizer = self.models[at]
        serves = "max_tokens" in STYLES[at] or self.draw.random() < 0.1
        x = torch.randn(self.own.randint(0, TOKENS // 2), D)
        x.requires_grad_(self.draw.random() < 0.5)
        with torch.no_grad() if serves else contextlib.nullcontext():
            y = model(x)
        del x
        if not serves:
            y.square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    def forget(self):
        if self.models:
            del self.models[self.draw.choice(sorted(self.models))]

    def destroy(self):
        timeout = datetime.timedelta(seconds=TIMEOUT)
        group = dist.new_group(list(range(RANKS)), timeout=timeout)
        for _ in range(self.draw.randint(1, 3)):
            self.issue(group)
        dist.barrier()
        dist.destroy_process_group(group)
        self.allocate()

    def miss(self):
        """A rank comes too late: the others may have given up."""
        timeout = datetime.timedelta(seconds=TIMEOUT)
        group = dist.new_group(list(range(RANKS)), timeout=timeout)
        dist.barrier(group)
        dist.set_timeout(datetime.timedelta(seconds=SHORT_TIMEOUT), group)
        if self.rank == self.draw.randrange(RANKS):
            time.sleep(SHORT_TIMEOUT * self.own.choice((0.8, 1, 1.2, 2)))
        out, x, recv, send = self.operands()
        with contextlib.suppress(RuntimeError):
            dist.all_to_all_single(out, x, recv, send, group=group)
        del out, x
        self.allocate()
        dist.barrier()
        dist.destroy_process_group(group)

    def run(self):
        weights = {
            self.keep: 10,
            self.drop: 4,
            self.wait: 6,
            self.gather: 4,
            self.train: 10,
            self.forget: 1,
            self.destroy: 1,
            self.miss: 0.5,
        }
        done = Counter()
        for _ in range(OPERATIONS):
            (operation,) = self.draw.choices(list(weights), weights.values())
            done[operation.__name__] += 1
            operation()
        while self.late:
            self.wait()
        if self.draw.random() < 0.5:
            self.issue()
            dist.barrier()
        return done


def run_rank(rank, port, seed):
    init_ranks(rank, RANKS, port, TIMEOUT)
    done = Rank(rank, seed).run()
    dist.destroy_process_group()
    print(FINISHED, dict(done), flush=True)


def run_seed(seed):
    """What happened, in the parent."""
    start, port = time.monotonic(), free_port()
    run = partial(run_rank, port=port, seed=seed)
    codes, texts = forked(RANKS, run, partial(wait_for_ranks, seconds=DEADLINE))
    problems = []
    for rank, (code, text) in enumerate(zip(codes, texts)):
        if code or FINISHED not in text or any(c in text for c in COMPLAINTS):
            problems.append(f"rank {rank} ended with {code}")
    row = {"seed": seed, "seconds": round(time.monotonic() - start, 2)}
    row["problems"] = problems
    if problems:
        row["output"] = texts
    return row


class TestMessageMemory(TestCase):
    def test_seeds(self):
        # glibc's own checks: freed memory is overwritten, and a second free ends the process.
        check_seeds(self, __file__, 2, MALLOC_PERTURB_="165")


if __name__ == "__main__":
    if "--seeds" in sys.argv:
        raise SystemExit(run_seeds(__doc__, run_seed))
    run_tests()
