# Owner(s): ["oncall: distributed"]

"""Faults of expert parallelism: every surviving rank gets an error, and nothing is left.

The ranks are processes of this file, started with ``--rank``, that report what happened
as JSON on stdout. Starting a group of processes is slow, so one group goes through all
faults that it survives. The last fault kills a rank.
"""

import argparse
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed._moe.all_to_all import TokenSwitchAllToAll
from torch.distributed._moe.overlap_schedule import OverlapSchedule


sys.path.append(os.path.dirname(os.path.abspath(__file__)))

from moe_fault_ranks import free_port, init_ranks  # noqa: E402


if "--rank" in sys.argv:
    # A rank runs no tests, and the test imports take longer than torch itself.
    TestCase = object
else:
    from torch.testing._internal.common_utils import run_tests, TestCase


RANKS, VICTIM = 4, 2
E, K, D, HIDDEN, T = 8, 2, 16, 8, 12
# Seconds allowed for a collective, and for the whole life of a group of processes.
COLLECTIVE_TIMEOUT, DEADLINE = 5, 200


# -- what a rank does


def operands(ids=None):
    """Tokens of all ranks and all experts, the same on every rank."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(T, D, generator=g)
    if ids is None:
        ids = torch.rand(T, E, generator=g).topk(K, dim=1).indices
    weights = torch.rand(T, K, generator=g)
    w_in = torch.randn(E, 2 * HIDDEN, D, generator=g)
    w_out = torch.randn(E, D, HIDDEN, generator=g)
    return x, ids, weights, w_in, w_out


def layer(switch, x, ids, weights, w_in, w_out):
    routing = switch.create_routing(ids)
    rows, row_weights, row_ids = switch.dispatch(routing, x, weights)
    return switch.combine(routing, F.moe_mlp(rows, row_ids, row_weights, w_in, w_out))


def my_experts(w_in, w_out, rank):
    mine = slice(rank * E // RANKS, (rank + 1) * E // RANKS)
    return w_in[mine], w_out[mine]


def one_rank_has_all_tokens(rank):
    """Whether the bits equal those of one rank if the other ranks have no tokens."""
    x, ids, weights, w_in, w_out = operands()
    reference = x.clone().requires_grad_()
    want = F.moe_mlp(reference, ids, weights, w_in, w_out)
    want.sum().backward()
    tokens = slice(0, T) if rank == 1 else slice(0, 0)
    mine = x[tokens].clone().requires_grad_()
    switch = TokenSwitchAllToAll(dist.group.WORLD, E, combine="exact")
    local = my_experts(w_in, w_out, rank)
    got = layer(switch, mine, ids[tokens], weights[tokens], *local)
    got.sum().backward()
    return torch.equal(got, want[tokens]) and torch.equal(
        mine.grad, reference.grad[tokens]
    )


def one_rank_has_no_tokens(rank):
    """Whether the bits equal those of one rank if the others share all tokens."""
    x, ids, weights, w_in, w_out = operands()
    want = F.moe_mlp(x, ids, weights, w_in, w_out)
    bounds = (0, 4, 8, 8, 12)
    tokens = slice(bounds[rank], bounds[rank + 1])
    switch = TokenSwitchAllToAll(dist.group.WORLD, E, combine="exact")
    local = my_experts(w_in, w_out, rank)
    got = layer(switch, x[tokens], ids[tokens], weights[tokens], *local)
    return torch.equal(got, want[tokens])


def overflow(rank):
    # On every rank, all slots of the 12 tokens go to experts 0 and 1, which rank 0 has.
    ids = torch.arange(K).expand(T, K)
    x, ids, weights, w_in, w_out = operands(ids)
    switch = TokenSwitchAllToAll(dist.group.WORLD, E, capacity=3)
    layer(switch, x, ids, weights, *my_experts(w_in, w_out, rank))
    switch.check_overflow()


def mismatch(
    rank, *, num_experts=E, top_k=K, dim=D, dtype=torch.float32, capacity=None
):
    """A layer to which the victim passes different arguments."""
    odd = rank == VICTIM
    if callable(capacity):
        capacity = capacity(odd)
    x, ids, weights, w_in, w_out = operands()
    if odd:
        x = x.repeat(1, 2)[:, :dim].to(dtype)
        ids, weights = (t.repeat(1, 2)[:, :top_k] for t in (ids, weights))
    switch = TokenSwitchAllToAll(
        dist.group.WORLD,
        num_experts if odd else E,
        capacity=capacity,
    )
    local = my_experts(w_in, w_out, rank)
    layer(switch, x, ids, weights, *local)


def changes_later(rank, *, top_k=K, dtype=torch.float32, capacity=20):
    """A layer of static shapes: all ranks agree at first, and then the victim differs."""
    odd = rank == VICTIM
    x, ids, weights, w_in, w_out = operands()
    switch = TokenSwitchAllToAll(dist.group.WORLD, E, capacity=20)
    local = my_experts(w_in, w_out, rank)
    layer(switch, x, ids, weights, *local)
    if odd:
        switch.capacity = capacity
        x = x.to(dtype)
        ids, weights = (t.repeat(1, 2)[:, :top_k] for t in (ids, weights))
    layer(switch, x, ids, weights, *local)


def capacity_in_another_layer(rank):
    """The victim is in a layer without a capacity, and the others are in one with it."""
    x, ids, weights, w_in, w_out = operands()
    local = my_experts(w_in, w_out, rank)
    switches = [
        TokenSwitchAllToAll(dist.group.WORLD, E, capacity=c) for c in (20, None)
    ]
    for switch in switches:
        layer(switch, x, ids, weights, *local)
    layer(switches[rank == VICTIM], x, ids, weights, *local)


def first_use(rank):
    """The victim uses a layer for the first time, and the others one that was used."""
    x, ids, weights, w_in, w_out = operands()
    local = my_experts(w_in, w_out, rank)
    used, new = (TokenSwitchAllToAll(dist.group.WORLD, E) for _ in range(2))
    layer(used, x, ids, weights, *local)
    layer(new if rank == VICTIM else used, x, ids, weights, *local)


def die_in_forward(rank):
    """The victim dies between dispatch and combine."""
    x, ids, weights, w_in, w_out = operands()
    switch = TokenSwitchAllToAll(dist.group.WORLD, E)
    routing = switch.create_routing(ids)
    rows, row_weights, row_ids = switch.dispatch(routing, x, weights)
    if rank == VICTIM:
        os.kill(os.getpid(), signal.SIGKILL)
    local = my_experts(w_in, w_out, rank)
    switch.combine(routing, F.moe_mlp(rows, row_ids, row_weights, *local))


def die_in_overlapped_backward(rank):
    """The victim dies while gradients of two chunks are in flight."""
    x, ids, weights, w_in, w_out = operands()
    x.requires_grad_()
    switch = TokenSwitchAllToAll(dist.group.WORLD, E)
    local = my_experts(w_in, w_out, rank)

    def experts(rows, row_ids, row_weights, num_rows):
        out = F.moe_mlp(rows, row_ids, row_weights, *local)
        if rank == VICTIM:
            out.register_hook(lambda grad: os.kill(os.getpid(), signal.SIGKILL))
        return out

    y, _ = OverlapSchedule(2)(switch, x, ids, weights, experts)
    y.sum().backward()


SURVIVED = {
    "all_tokens": one_rank_has_all_tokens,
    "no_tokens": one_rank_has_no_tokens,
    "overflow": overflow,
    "num_experts": lambda rank: mismatch(rank, num_experts=2 * E),
    "K": lambda rank: mismatch(rank, top_k=K + 1),
    "D": lambda rank: mismatch(rank, dim=D + 4),
    "tokens_dtype": lambda rank: mismatch(rank, dtype=torch.bfloat16),
    "capacity": lambda rank: mismatch(rank, capacity=lambda odd: 20 if odd else 40),
    "K_static": lambda rank: mismatch(rank, capacity=20, top_k=K + 1),
    "K_later": lambda rank: changes_later(rank, top_k=K + 1),
    "tokens_dtype_later": lambda rank: changes_later(rank, dtype=torch.bfloat16),
    "capacity_later": lambda rank: changes_later(rank, capacity=30),
    "capacity_elsewhere": capacity_in_another_layer,
}
DEATHS = {"forward": die_in_forward, "overlapped_backward": die_in_overlapped_backward}
# Faults after which nothing can be sent, but which all ranks survive.
LAST = {**DEATHS, "first_use": first_use}


def run_rank(rank, port, death, survived):
    init_ranks(rank, RANKS, port, COLLECTIVE_TIMEOUT)
    steps = {name: SURVIVED[name] for name in survived} | {death: LAST[death]}
    for name, step in steps.items():
        report = {"fault": name, "result": None, "error": None}
        start = time.monotonic()
        try:
            report["result"] = step(rank)
        except Exception as e:
            notes = getattr(e, "__notes__", [])
            report["error"] = "; ".join([f"{type(e).__name__}: {e}", *notes])
        report["seconds"] = time.monotonic() - start
        print(json.dumps(report), flush=True)
    dist.destroy_process_group()
    print(json.dumps({"fault": "end", "result": "destroyed"}), flush=True)
    # Exits normally: a thread that still waits for a dead rank would block the exit.


# -- the test


class TestFaults(TestCase):
    def run_group(self, death, survived=()):
        """Returns the reports of every rank by fault. Checks that nothing is left."""
        port = free_port()
        command = [sys.executable, os.path.abspath(__file__), "--port", str(port)]
        command += ["--death", death, "--survived", ",".join(survived)]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        ranks = []
        try:
            for rank in range(RANKS):
                ranks.append(
                    subprocess.Popen(
                        [*command, "--rank", str(rank)],
                        stdout=subprocess.PIPE,
                        stderr=subprocess.PIPE,
                        text=True,
                        env=env,
                        start_new_session=True,
                    )
                )
            deadline = time.monotonic() + DEADLINE
            outputs = [
                process.communicate(timeout=max(0.1, deadline - time.monotonic()))
                for process in ranks
            ]
        finally:
            # A process that still runs is hanging, so it is killed.
            for process in ranks:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
        for rank, process in enumerate(ranks):
            want = -signal.SIGKILL if rank == VICTIM and death in DEATHS else 0
            self.assertEqual(process.returncode, want, outputs[rank][1])
            # No process of its session is alive.
            with self.assertRaises(ProcessLookupError):
                os.killpg(process.pid, 0)
        with socket.socket() as s:
            self.assertNotEqual(s.connect_ex(("127.0.0.1", port)), 0)
        reports = [
            # Gloo also writes to stdout.
            {r["fault"]: r for r in map(json.loads, re.findall("(?m)^{.*}$", out))}
            for out, _ in outputs
        ]
        for rank, report in enumerate(reports):
            if rank != VICTIM:
                self.assertEqual(report["end"]["result"], "destroyed")
        return reports

    def assert_survivors_noticed(self, reports, death):
        self.assertNotIn(death, reports[VICTIM])
        for rank, report in enumerate(reports):
            if rank == VICTIM:
                continue
            # A closed connection, or the timeout of a collective with a rank that
            # gave up.
            self.assertRegex(report[death]["error"], "RuntimeError|DistBackendError")
            self.assertRegex(
                report[death]["error"], "(?i)connection|timed? ?out|closed|reset"
            )
            self.assertLess(report[death]["seconds"], 3 * COLLECTIVE_TIMEOUT)

    def test_every_fault_ends_in_a_clear_error_on_every_rank(self):
        reports = self.run_group("forward", SURVIVED)
        values = {
            "num_experts": f"{E}, {E}, {2 * E}, {E}",
            "K": f"{K}, {K}, {K + 1}, {K}",
            "K_static": f"{K}, {K}, {K + 1}, {K}",
            "D": f"{D}, {D}, {D + 4}, {D}",
            "tokens_dtype": "torch.float32, torch.float32, torch.bfloat16, torch.float32",
            "capacity": "40, 40, 20, 40",
        }
        for rank, report in enumerate(reports):
            for fault in ("all_tokens", "no_tokens"):
                self.assertIsNone(report[fault]["error"])
                self.assertIs(report[fault]["result"], True, f"rank {rank}, {fault}")
            self.assertRegex(
                report["overflow"]["error"],
                "needed 12 rows but capacity is 3.*grow_and_rerun",
            )
            for fault, shown in values.items():
                name = fault.removesuffix("_static")
                self.assertIn(
                    f"TokenSwitchAllToAll: {name} must be the same on all ranks, ranks "
                    f"[0, 1, 2, 3] have [{shown}]",
                    report[fault]["error"],
                )
                self.assertLess(report[fault]["seconds"], COLLECTIVE_TIMEOUT)
            for change in (
                f"K from {K} to {K + 1}",
                "tokens_dtype from torch.float32 to torch.bfloat16",
                "capacity from 20 to 30",
            ):
                fault = f"{change.split()[0]}_later"
                error = report[fault]["error"]
                self.assertIn("must be the same on all ranks", error)
                # The rank itself says what changed. All others say that another rank did.
                said = f"this one changed {change}, and others did not"
                self.assertIn(
                    said if rank == VICTIM else "one of them has changed", error
                )
                self.assertLess(report[fault]["seconds"], COLLECTIVE_TIMEOUT)
            self.assertRegex(
                report["capacity_elsewhere"]["error"],
                "the layer must be the same on all ranks, or have a capacity on all; this "
                f"one has {'none, and others have one' if rank == VICTIM else '20, and others have none'}",
            )
        self.assert_survivors_noticed(reports, "forward")

    def test_one_rank_compares(self):
        # Messages of other sizes would end a process.
        for rank, report in enumerate(self.run_group("first_use")):
            where = "comparison" if rank == VICTIM else "exchange of sizes"
            self.assertRegex(
                report["first_use"]["error"],
                f"(?i)(connection|timed out|closed|reset)(.|\n)*{where} failed at level 'flat'",
            )
            self.assertLess(report["first_use"]["seconds"], 3 * COLLECTIVE_TIMEOUT)

    def test_rank_killed_in_overlapped_backward(self):
        reports = self.run_group("overlapped_backward")
        self.assert_survivors_noticed(reports, "overlapped_backward")


if __name__ == "__main__":
    if "--rank" in sys.argv:
        parser = argparse.ArgumentParser()
        parser.add_argument("--rank", type=int)
        parser.add_argument("--port", type=int)
        parser.add_argument("--death")
        parser.add_argument("--survived")
        args = parser.parse_args()
        names = [name for name in args.survived.split(",") if name]
        run_rank(args.rank, args.port, args.death, names)
    else:
        run_tests()
