# Owner(s): ["oncall: distributed"]

import importlib.util
import itertools
import json
import sys
import tempfile
import textwrap
import time
import unittest
from pathlib import Path
from unittest import mock

import two_hosts as two_hosts_module
from two_hosts import Cluster, two_hosts

import torch
import torch.distributed as dist
from torch.testing._internal.common_utils import run_tests, slowTest, TestCase


BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks" / "moe"
STEPS = 12
BATCH = 4
SEED = 0
WORKER = """
    import os, sys, time

    if sys.argv[1] == "fail" and os.environ["RANK"] == "1":
        raise RuntimeError("rank 1 has a problem")
    if sys.argv[1] == "fail":
        time.sleep(600)

    import datetime, json, torch, torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=30))
    x = torch.full((8,), dist.get_rank() + 1.0)
    dist.all_reduce(x)
    if dist.get_rank() == 0:
        open(sys.argv[2], "w").write(json.dumps(x[0].item()))
    dist.destroy_process_group()
"""


def missing() -> str | None:
    """Why the tests cannot run here, or None."""
    if not dist.is_available() or not dist.is_gloo_available():
        return "needs gloo"
    if not sys.platform.startswith("linux"):
        return "needs Linux: network namespaces, /proc, or all of 127.0.0.0/8"
    return None


@unittest.skipIf(missing(), missing() or "")
class TwoHostsTest(TestCase):
    def setUp(self):
        super().setUp()
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
        self.script = self.folder / "worker.py"
        self.script.write_text(textwrap.dedent(WORKER))

    def check_nothing_is_left(self, cluster: Cluster) -> None:
        self.assertEqual(cluster.processes(), [])
        for host in cluster.hosts:
            if host.namespace is not None:
                listed = two_hosts_module._ip("netns", "list")
                self.assertNotIn(host.namespace, listed)

    def test_without_namespaces(self):
        out = self.folder / "sum.json"
        with mock.patch.object(two_hosts_module.shutil, "which", return_value=None):
            with two_hosts() as cluster:
                self.assertRegex(cluster.describe(), "127.0.0.2: there is no ip")
                self.assertEqual([h.sent_bytes() for h in cluster.hosts], [None, None])
                cluster.torchrun(1, [str(self.script), "work", str(out)], timeout=180)
        self.assertEqual(json.loads(out.read_text()), 3.0)
        self.check_nothing_is_left(cluster)

    def test_a_failing_rank_ends_everything(self):
        start = time.monotonic()
        with two_hosts() as cluster:
            # Rank 0 sleeps for ten minutes.
            with self.assertRaisesRegex(RuntimeError, "rank 1 has a problem"):
                cluster.torchrun(1, [str(self.script), "fail"], timeout=60)
            self.assertEqual(cluster.processes(), [])
        self.check_nothing_is_left(cluster)
        self.assertLess(time.monotonic() - start, 60)

    def test_timeout_and_error_in_the_body(self):
        with self.assertRaisesRegex(RuntimeError, "not done after 1 seconds"):
            with two_hosts() as cluster:
                cluster.torchrun(1, [str(self.script), "fail"], timeout=1)
        self.check_nothing_is_left(cluster)


@unittest.skipIf(missing(), missing() or "")
@unittest.skipUnless(BENCHMARKS.is_dir(), f"needs the demo in {BENCHMARKS}")
@unittest.skipUnless(importlib.util.find_spec("rich"), "the demo needs rich")
class TrainingTest(TestCase):
    """The demo's model, trained on two hosts, has the losses of one process.

    The losses may differ by rounding: by at most twice the largest difference of two
    unfused runs that only visit the experts in another order.
    """

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        sys.path.insert(0, str(BENCHMARKS))
        cls.addClassCleanup(sys.path.remove, str(BENCHMARKS))

    def single_process_losses(self) -> dict[str, list[float]]:
        import peers

        from demo import text
        from demo.model import ModelConfig
        from demo.train import make_runs, train

        config = ModelConfig()
        generator = torch.Generator().manual_seed(SEED)
        orders = [torch.randperm(config.experts, generator=generator) for _ in range(2)]
        blocks = peers.training_blocks([None, *(order.tolist() for order in orders)])
        runs = make_runs(blocks, config, SEED)
        corpus = text.read_corpus()
        shape = (BATCH, config.sequence)
        train(runs, text.sample_batches(corpus.train, STEPS, *shape, SEED))
        return {run.name: run.losses for run in runs}

    @slowTest
    def test_losses(self):
        from demo.expert_parallel import Setup, train_rank
        from measure import on_hosts

        losses = self.single_process_losses()
        fused = losses.pop("fused")

        def difference(a, b):
            return max(abs(x - y) for x, y in zip(a, b, strict=True))

        noise = max(
            difference(a, b) for a, b in itertools.combinations(losses.values(), 2)
        )
        # The bound can fail: gradients that were off by a factor would change the losses far
        # more.
        self.assertLess(20 * noise, fused[0] - fused[-1])
        with two_hosts() as cluster:
            print(cluster.describe())
            for ranks_per_host in (1, 2):
                setup = Setup(STEPS, BATCH, SEED, 1, hosts=2, combine="exact")
                before = [host.sent_bytes() for host in cluster.hosts]
                seen = on_hosts(cluster, ranks_per_host, train_rank, setup)[0]
                wire = seen["wire_bytes"]["flat" if ranks_per_host == 1 else "node"]
                for host, start in zip(cluster.hosts, before, strict=True):
                    if start is not None:
                        # Half of the rows leave each host, over its interface.
                        crossed = host.sent_bytes() - start
                        self.assertGreater(crossed, STEPS * wire["payload"] * 0.4)
                self.assertEqual(seen["ranks"], 2 * ranks_per_host)
                levels = {"flat"} if ranks_per_host == 1 else {"node", "local"}
                self.assertEqual(set(seen["wire_bytes"]), levels)
                worst = difference(seen["losses"], fused)
                print(
                    f"{seen['ranks']} ranks: largest loss difference {worst:.1e}, "
                    f"{worst / noise:.2f} times that of unfused runs"
                )
                self.assertLessEqual(worst, 2 * noise)


if __name__ == "__main__":
    run_tests()
