# Owner(s): ["oncall: distributed"]
"""train_anywhere.py: losses of one rank on two and four, and a killed run that goes on with fewer ranks."""

import itertools
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import unittest

from torch.distributed._tools.moe_profile import (
    Constants,
    CpuConstants,
    Device,
    Profile,
)
from torch.testing._internal.common_utils import run_tests, TestCase


HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from packages import require_transformers


SCRIPT = HERE.parent / "train_anywhere.py"
PROFILE = Profile(
    "test CPU", Device("cpu", 1, 5e10, 5e10, 1e10, 1e9, 1e9, 16e9, domain=1 << 20),
    Constants(fast_us=100.0), cpu=CpuConstants(),
)  # fmt: skip
TIMEOUT = 600


class TestTrainAnywhere(TestCase):
    def setUp(self):
        super().setUp()
        try:
            require_transformers()
        except ImportError as error:
            raise unittest.SkipTest(str(error)) from None
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)
        self.profile = self.folder / "profile.json"
        self.profile.write_text(json.dumps(PROFILE.to_json()))

    def start(self, ranks, name, *options):
        command = [
            "-m",
            "torch.distributed.run",
            "--standalone",
            f"--nproc-per-node={ranks}",
        ]
        command += [
            str(SCRIPT),
            f"--folder={self.folder / name}",
            f"--profile={self.profile}",
        ]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        return subprocess.Popen([sys.executable, *command, *options], env=env)

    def run_to_end(self, *args):
        self.assertEqual(self.start(*args).wait(TIMEOUT), 0)

    def rows(self, name):
        log = self.folder / name / "log.jsonl"
        return (
            [json.loads(x) for x in log.read_text().splitlines()]
            if log.exists()
            else []
        )

    def check_same(self, got, want):
        self.assertEqual([r["step"] for r in got], [r["step"] for r in want])
        for a, b in zip(got, want):
            self.assertEqual(a["loss"], b["loss"], rtol=2e-5, atol=0)
            self.assertEqual(a["norm"], b["norm"], rtol=2e-3, atol=0)

    def test_losses_of_one_rank(self):
        for model, others in (
            ("qwen3_moe", ((4, "--ep=4", "--tp=2"), (2,))),
            ("gpt_oss", ((2, "--ep=2"),)),
        ):
            options = (f"--model={model}", "--steps=4", "--save-every=4")
            self.run_to_end(1, f"{model}1", *options)
            for ranks, *layout in others:
                self.run_to_end(ranks, f"{model}{ranks}", *options, *layout)
                self.check_same(self.rows(f"{model}{ranks}"), self.rows(f"{model}1"))

    def test_a_killed_run_goes_on_with_fewer_ranks(self):
        options = ("--steps=8", "--save-every=2")
        self.run_to_end(1, "whole", *options)
        torchrun = self.start(4, "killed", *options, "--ep=4", "--pause=1.0")
        end = time.monotonic() + TIMEOUT
        while len(self.rows("killed")) < 4 and time.monotonic() < end:
            time.sleep(0.1)
        children = pathlib.Path(f"/proc/{torchrun.pid}/task/{torchrun.pid}/children")
        os.kill(int(children.read_text().split()[-1]), signal.SIGKILL)
        self.assertNotEqual(torchrun.wait(TIMEOUT), 0)
        done = self.rows("killed")
        self.assertLess(len(done), 8)
        self.run_to_end(2, "killed", *options, "--ep=2")
        rows = self.rows("killed")
        went_on = rows[len(done)]["step"]
        self.assertEqual((went_on % 2, rows[-1]["ranks"]), (0, 2))
        self.assertGreaterEqual(went_on, 2)
        last = {row["step"]: row for row in itertools.chain(done, rows[len(done) :])}
        self.check_same([last[i] for i in range(8)], self.rows("whole"))


if __name__ == "__main__":
    run_tests()
