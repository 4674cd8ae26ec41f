# Owner(s): ["oncall: distributed"]
"""A rank is killed while a model serves: the others go on."""

import datetime
import os
import queue
import signal
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed._moe.plan import Plan, Topology
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.parallel import (
    ExpertParallel,
    ExpertPlacement,
    parallelize_module,
)
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


D, H, E, K, TOKENS = 16, 12, 8, 2, 6
RANKS, SLOTS = 4, 4


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.moe = nn.ModuleList(nn.MoE(D, H, E, top_k=K) for _ in range(2))

    def forward(self, x):
        for moe in self.moe:
            x = x + moe(x)
        return x


def batch(step, rank):
    g = torch.Generator().manual_seed(10 * step + rank)
    return torch.randn(TOKENS + rank, D, generator=g, dtype=torch.float64)


def same(model, whole, steps, rank):
    for step in steps:
        x = batch(step, rank)
        torch.testing.assert_close(model(x), whole(x), atol=1e-12, rtol=1e-12)


@torch.no_grad()
def serve(rank, port, case, found):
    try:
        found.put((rank, _serve(rank, port, case)))
    except BaseException:
        found.put((rank, traceback.format_exc()))
        raise


def _serve(rank, port, case):
    torch.set_num_threads(1)
    minute = datetime.timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", port, RANKS, timeout=minute)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=minute
    )
    torch.manual_seed(0)
    whole = Model().double()
    torch.manual_seed(0)
    model = Model().double()
    placement = ExpertPlacement(
        slots_per_rank=SLOTS, every=None, copy_cost=0.0, keep=True
    )
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    options = {"all_gather": {"token_switch": "all_gather", "max_tokens": 16}}
    style = ExpertParallel(placement=placement, **options.get(case, {}))
    parallelize_module(model, mesh, {"moe.*": style})
    topology = Topology(1, RANKS, SLOTS)
    if case != "no_copies":
        # Of the experts 4 and 5 of rank 2 there are copies, in the second layer of one.
        slots = Plan.home(topology, E).slot_experts.clone()
        slots[0, 2:] = torch.tensor([4, 5])
        one = slots.clone()
        one[0, 3] = -1
        for layer, table in zip(placement.layers, (slots, one)):
            held = torch.zeros(E, RANKS, dtype=torch.int64)
            for r, row in enumerate(table.tolist()):
                held[[e for e in row if e >= 0], r] = 1
            layer.use(Plan(topology, table, held))
    same(model, whole, range(2), rank)
    loaded = []

    def weights(name, expert):
        loaded.append((name, expert))
        return whole.get_parameter(name)[expert]

    if rank == 2:
        model.moe[1].__dict__["run_routed"] = lambda *args, **kw: os.kill(
            os.getpid(), signal.SIGKILL
        )
    try:
        # What a rank sends may have left before its peer was gone: then the next one fails.
        for _ in range(3):
            model(batch(2, rank))
    except RuntimeError as error:
        failed = str(error)
    else:
        raise AssertionError("forwards without a rank went through")
    if case == "nothing_to_load_from":
        try:
            placement.recover(model, seconds=5.0)
        except RuntimeError as error:
            return str(error)
        raise AssertionError("weights came from nowhere")
    recovery = placement.recover(model, weights, seconds=5.0)
    # The batch that failed, and others.
    same(model, whole, range(2, 5), rank)
    try:
        with torch.enable_grad():
            model(batch(2, rank))
    except RuntimeError as error:
        trains = str(error)
    else:
        trains = ""
    again = None
    if case == "two":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        try:
            for _ in range(3):
                model(batch(5, rank))
        except RuntimeError:
            again = placement.recover(model, weights, seconds=5.0)
            same(model, whole, range(5, 7), rank)
            again = again._asdict()
    dist.barrier(placement_group(placement))
    return {
        "failed": failed,
        "trains": trains,
        "loaded": loaded,
        "again": again,
        **{k: v for k, v in recovery._asdict().items() if k != "loaded"},
        "of_layers": recovery.loaded,
    }


def placement_group(placement):
    return dist.distributed_c10d._resolve_process_group(placement.layers[0].group_name)


@instantiate_parametrized_tests
class TestLostRank(TestCase):
    def served(self, case):
        store = dist.TCPStore("127.0.0.1", 0, RANKS, True, wait_for_workers=False)
        context = mp.get_context("spawn")
        found = context.Queue()
        processes = [
            context.Process(target=serve, args=(rank, store.port, case, found))
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        left = [0, 3] if case == "two" else [0, 1, 3]
        results = {}
        try:
            while set(results) < set(left):
                rank, result = found.get(timeout=240)
                results[rank] = result
        except queue.Empty:
            self.fail(f"only {sorted(results)} came back: {results}")
        finally:
            # Before the others are ended, which have nothing more to say.
            gone = processes[2].exitcode
            for process in processes:
                process.kill()
                process.join(10)
        self.assertEqual(gone, -signal.SIGKILL)
        return results

    @parametrize("case", ["copies", "no_copies", "all_gather", "two"])
    def test_the_others_go_on(self, case):
        results = self.served(case)
        for result in results.values():
            self.assertNotIsInstance(result, str, result)
            self.assertEqual(result["lost"], [2])
            # Tokens of the forward that failed are to be run again, and were.
            self.assertEqual(result["tokens"], {0: 6, 1: 7, 3: 9})
            self.assertLess(result["seconds"], 30)
            self.assertIn("serves, under no_grad", result["trains"])
            copies = [[], []] if case == "no_copies" else [[4, 5], [4]]
            self.assertEqual(result["copies"], copies)
            rest = [sorted({4, 5} - set(c)) for c in copies]
            self.assertEqual(result["of_layers"], rest)
        # Each missing expert was loaded once.
        loads = sorted(sum((r["loaded"] for r in results.values()), []))
        if case != "two":
            want = [
                (f"moe.{layer}.{name}", e)
                for layer in range(2)
                for name in ("w_in", "w_out")
                for e in rest[layer]
            ]
            self.assertEqual(loads, sorted(want))
        else:
            for result in results.values():
                self.assertEqual(result["again"]["lost"], [1])

    def test_nothing_to_load_from(self):
        for result in self.served("nothing_to_load_from").values():
            self.assertIn("has experts [5] of 'moe.1'", result)


if __name__ == "__main__":
    run_tests()
