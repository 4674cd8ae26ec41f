# Owner(s): ["oncall: distributed"]

import importlib.util
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
import unittest
from pathlib import Path

import torch.distributed as dist
from torch.testing._internal.common_utils import run_tests, slowTest, TestCase


SCRIPT = Path(__file__).resolve().parents[2] / "benchmarks" / "moe" / "ep.py"


@unittest.skipUnless(
    dist.is_available() and dist.is_gloo_available() and sys.platform == "linux",
    "needs gloo and Linux",
)
@unittest.skipUnless(SCRIPT.exists(), f"needs {SCRIPT}")
@unittest.skipUnless(
    importlib.util.find_spec("rich"),
    "the benchmark needs rich",
)
class EpBenchmarkTest(TestCase):
    # Takes more than a minute. The tests of the switches also check these counts.
    @slowTest
    def test_quick_run(self):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(SCRIPT), "--quick", "--out", folder]
            done = subprocess.run(command, capture_output=True, text=True, timeout=300)
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            result = json.loads(Path(folder, "ep.json").read_text())
        self.assertIn("ep.py --quick", result["command"])
        cases = {
            (c["routing"], c["switch"], c["wire"], c["dim"]): c for c in result["cases"]
        }
        self.assertEqual(len(cases), 9)
        for key, case in cases.items():
            self.assertEqual(case["payload_of_minimum"], 1.0, str(key))
            levels = {"flat"} if key[1] == "flat" else {"node", "local"}
            self.assertEqual(set(case["levels"]), levels)
            self.assertEqual(set(case["predicted_seconds"]), levels)
            self.assertGreaterEqual(case["imbalance"], 1.0)
        real = ({case[0] for case in cases} - {"uniform", "zipf"}).pop()
        bfloat16 = cases[real, "flat", "bfloat16", 256]
        float8 = cases[real, "flat", "float8", 256]
        hierarchical = cases[real, "hierarchical", "bfloat16", 256]
        rows, rows8 = (c["levels"]["flat"]["rows"] for c in (bfloat16, float8))
        self.assertEqual(rows8 * 2, rows)
        scales = float8["levels"]["flat"]["scales"]
        self.assertEqual(scales * 128, rows8)
        self.assertEqual(float8["scales_share"], 1 / 128)
        # The purpose of the hierarchy is fewer bytes between hosts.
        self.assertLess(hierarchical["crossing_bytes"], bfloat16["crossing_bytes"])
        self.assertEqual(
            hierarchical["crossing_bytes"],
            sum(hierarchical["levels"]["node"][n] for n in ("rows", "returned")),
        )
        if bfloat16["interface_bytes"] is not None:
            # The kernel counts at least the bytes that the switch accounts for.
            for case in (bfloat16, hierarchical):
                self.assertGreater(case["interface_bytes"], case["crossing_bytes"])

    def test_drifting_routing(self):
        script = SCRIPT.with_name("ep_drift.py")
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, str(script), "--ranks", "2", "--leans", "2"]
            command += ["--steps", "8", "--out", folder]
            # The script must find its neighbours, as when a user runs it.
            env = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
            done = subprocess.run(
                command, capture_output=True, text=True, timeout=300, env=env
            )
            self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
            result = json.loads(Path(folder, "ep_drift.json").read_text())
            self.assertTrue(Path(folder, "ep_drift.png").exists())
        rows = {row["form"]: row for row in result["rows"]}
        online, at_home = rows["online, free"], rows["at home"]
        self.assertEqual(at_home["mean_expert_mb"], 0)
        self.assertGreater(online["mean_expert_mb"], 0)
        # Plans level every step and do not change the training.
        self.assertLess(max(online["imbalance"]), 1.05)
        self.assertGreater(at_home["mean_imbalance"], online["mean_imbalance"])
        self.assertLess(max(r["largest_loss_difference"] for r in rows.values()), 1e-3)

    def test_limited_link(self):
        """The overlap benchmarks can limit the rate of a TCP connection."""
        sys.path.insert(0, str(SCRIPT.parent))
        self.addCleanup(sys.path.remove, str(SCRIPT.parent))
        from ep_overlap import limit_links

        def seconds(nbytes):
            with socket.create_server(("127.0.0.1", 0)) as server:
                sender = socket.create_connection(server.getsockname())
                receiver, _ = server.accept()
            with sender, receiver:
                limit_links(2e7)
                thread = threading.Thread(target=sender.sendall, args=(bytes(nbytes),))
                start = time.perf_counter()
                thread.start()
                while nbytes:
                    nbytes -= len(receiver.recv(1 << 16))
                thread.join()
                return time.perf_counter() - start

        self.assertGreater(seconds(10_000_000), 0.4)


if __name__ == "__main__":
    run_tests()
