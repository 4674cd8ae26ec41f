# Owner(s): ["oncall: distributed"]
"""A rank is killed while a model serves, and the other ranks go on."""

import datetime
import os
import queue
import signal
import traceback

from moe_gloo import forked_ranks
from moe_placement import place_experts

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed._moe.plan import Plan, Topology
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_moe import slow_subtest
from torch.testing._internal.common_utils import (
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    TestCase,
)


D, H, E, K, TOKENS = 16, 12, 8, 2, 6
RANKS, SLOTS = 4, 4
# Ranks that are killed. The number of the remaining ranks must divide E.
KILLED = {"online": (1, 2)}
SLOW_CASES = [slow_subtest(case, name=case) for case in ("all_gather", "online")]
GONE = (
    r"[Cc]onnection closed by peer|Connection reset by peer|Broken pipe|[Tt]imed out|"
    "not sent, as what came before it failed"
)


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


def failure(model, whole, step, rank):
    """The error, with its notes, of a forward after a rank was lost."""
    try:
        # The lost rank may have sent its rows before it died. Then this output is right, and the
        # next forward fails.
        for _ in range(2):
            same(model, whole, [step], rank)
    except RuntimeError as error:
        return "\n".join([str(error), *getattr(error, "__notes__", ())])
    raise AssertionError("forwards without a rank went through")


def refused(placement, model, weights, loaded, seconds=5.0):
    """The error of a recovery that changes and loads nothing."""
    groups = [layer.group_name for layer in placement.layers]
    try:
        placement.recover(model, weights, seconds=seconds)
    except (RuntimeError, ValueError) as error:
        if loaded or groups != [layer.group_name for layer in placement.layers]:
            raise AssertionError("a layer was changed") from error
        return str(error)
    raise AssertionError("went on without weights, or on half a node")


def refused_old_weights(case, placement, model, weights, rank):
    """What is written to the parameters does not reach a recovered model's experts, nor by recovering again."""
    if case != "copies":
        return
    for name, parameter in model.named_parameters():
        if name.startswith("moe.0.w_"):
            parameter.mul_(0.5)
    for _ in range(2):
        try:
            model(batch(0, rank))
        except RuntimeError as error:
            if "experts were written after recover" not in str(error):
                raise
        else:
            raise AssertionError("it served the experts from before")
        placement.recover(model, weights, seconds=5.0)


def refused_training(model, rank):
    try:
        with torch.enable_grad():
            model(batch(2, rank))
    except RuntimeError as error:
        return str(error)
    return ""


def refused_unreadable(case, placement, model, loaded):
    """A rank cannot load an expert: all ranks get an error and may try again."""
    if case != "copies":
        return

    def unreadable(name, expert):
        raise OSError(f"no {name} of expert {expert}")

    text = refused(placement, model, unreadable, loaded)
    if "OSError: no moe.1.w_" not in text or "on ranks {" not in text:
        raise AssertionError(text)


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
    # With two levels, rank 1 has no connection to the rank that is killed, and waits for rank 3.
    timeout = datetime.timedelta(seconds=10) if case == "hierarchical" else minute
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=RANKS, timeout=timeout
    )
    torch.manual_seed(0)
    whole = Model().double()
    torch.manual_seed(0)
    model = Model().double()
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("ep",))
    styles = {
        "all_gather": {"token_switch": "all_gather", "max_tokens": 16},
        "hierarchical": {"token_switch": "hierarchical", "ranks_per_node": 2},
    }
    placement = place_experts(
        model,
        mesh,
        "moe.*",
        styles.get(case),
        slots_per_rank=SLOTS,
        every=None,
        copy_cost=0.0,
        keep=True,
        online=case == "online",
    )
    topology = Topology(1, RANKS, SLOTS)
    if case not in ("no_copies", "online"):
        # Experts 4 and 5 of rank 2 have copies; in the second layer only one of them does.
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

    state = placement.state_dict()
    if rank in KILLED.get(case, (2,)):
        model.moe[1].__dict__["run_routed"] = lambda *args, **kw: os.kill(
            os.getpid(), signal.SIGKILL
        )
    failed = failure(model, whole, 2, rank)
    if case == "hierarchical":
        # Rank 1 comes after its timeout.
        return refused(placement, model, weights, loaded, seconds=20.0)
    if case == "nothing_to_load_from":
        text = refused(placement, model, None, loaded)
        placement.recover(model, weights, seconds=5.0)
        same(model, whole, range(2, 4), rank)
        dist.barrier(placement_group(placement))
        return text
    refused_unreadable(case, placement, model, loaded)
    recovery = placement.recover(model, weights, seconds=5.0)
    same(model, whole, range(2, 5), rank)  # batch 2 had failed
    # Plans need weights at home, which no layer has any more.
    placement.load_state_dict(state)
    placement.loads = torch.arange(2.0 * E).view(2, E).double()
    placement._plan()
    same(model, whole, range(2, 4), rank)
    trains = refused_training(model, rank)
    refused_old_weights(case, placement, model, weights, rank)
    again = failed_again = None
    if case == "two":
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        failed_again = failure(model, whole, 5, rank)
        again = placement.recover(model, weights, seconds=5.0)._asdict()
        same(model, whole, range(5, 7), rank)
    dist.barrier(placement_group(placement))
    return {
        "failed": failed,
        "failed_again": failed_again,
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
        context = forked_ranks()
        found = context.Queue()
        processes = [
            context.Process(target=serve, args=(rank, store.port, case, found))
            for rank in range(RANKS)
        ]
        for process in processes:
            process.start()
        killed = KILLED.get(case, (2,)) + (1,) * (case == "two")
        left = [rank for rank in range(RANKS) if rank not in killed]
        results = {}
        try:
            while set(results) < set(left):
                rank, result = found.get(timeout=240)
                results[rank] = result
        except queue.Empty:
            self.fail(f"only {sorted(results)} came back: {results}")
        finally:
            # Checked before the other ranks are ended, which report nothing more.
            gone = processes[2].exitcode
            for process in processes:
                process.kill()
                process.join(10)
        self.assertEqual(gone, -signal.SIGKILL)
        return results

    @parametrize("case", ["copies", "no_copies", "two", *SLOW_CASES])
    def test_the_others_go_on(self, case):
        results = self.served(case)
        killed = KILLED.get(case, (2,))
        experts = [e for rank in killed for e in (2 * rank, 2 * rank + 1)]
        tokens = {r: TOKENS + r for r in range(RANKS) if r not in killed}
        for result in results.values():
            self.assertNotIsInstance(result, str, result)
            self.assertEqual(result["lost"], list(killed))
            self.assertRegex(result["failed"], GONE)
            # The tokens of the failed forward were run again.
            self.assertEqual(result["tokens"], tokens)
            self.assertLess(result["seconds"], 30)
            self.assertIn("serves, under no_grad", result["trains"])
            without = case in ("no_copies", "online")
            copies = [[], []] if without else [[4, 5], [4]]
            self.assertEqual(result["copies"], copies)
            rest = [sorted(set(experts) - set(c)) for c in copies]
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
                self.assertRegex(result["failed_again"], GONE)
                # After a recovery, an error still names the layer.
                self.assertRegex(result["failed_again"], r"layer 0 \(MoE\): ")

    def test_nothing_to_load_from(self):
        for result in self.served("nothing_to_load_from").values():
            self.assertIn("has experts [5] of 'moe.1'", result)

    def test_half_a_node(self):
        for result in self.served("hierarchical").values():
            self.assertIn("ranks_per_node must divide the 3 ranks", result)


if __name__ == "__main__":
    run_tests()
