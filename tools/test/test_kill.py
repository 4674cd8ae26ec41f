"""kill -9 at any moment of setup: the next call repairs, nothing is half done."""

import random
import shutil
import time
from pathlib import Path

import pytest
from conftest import FIRST_FILE, kill_program, WITH_SLOW


TOOLS = Path(__file__).parents[1]
PROGRAM = """
import sys
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from staging import pipeline, series
from staging.config import Workspace
from staging.console import Console
root, cache = Path(sys.argv[2]), Path(sys.argv[3])
workspace, console = Workspace(root, root / "build", cache), Console(quiet=True)
with pipeline.locked(workspace, console):
    print("started", flush=True)
    pipeline.setup(workspace, series.load(root), console)
print("done", flush=True)
"""


def setup_and_kill(project, delay):
    """Whether setup was killed before it was done."""
    arguments = [str(TOOLS), str(project.root), str(project.cache)]
    return kill_program(PROGRAM, arguments, delay)


def seconds_of_setup(project):
    """How long a first setup takes here; leaves no build folder behind."""
    for _ in range(2):  # the second with the caches that the killed ones find
        start = time.monotonic()
        project.setup()
        duration = time.monotonic() - start
        shutil.rmtree(project.workspace.build)
    return duration


def check(project, text):
    """Sets up for real and compares every staged file and the base."""
    staged = project.setup()
    site = project.site
    assert (site / "torch/nn/moe.py").read_text() == text
    assert "second = True" in (site / "torch/overrides.py").read_text()
    assert project.checkout().git.resolve("HEAD") == staged.tip
    assert project.checkout().edits() == []
    names = [path.name for path in project.workspace.build.iterdir()]
    assert not [name for name in names if name.endswith((".tmp", ".old"))]


@pytest.mark.parametrize("seed", range(4 if WITH_SLOW else 1))
def test_first_setup(project, seed):
    rng = random.Random(seed)
    duration = seconds_of_setup(project)
    killed = 0
    while killed < 3:
        if setup_and_kill(project, rng.uniform(0.0, 0.7 * duration)):
            killed += 1
            continue
        # A call that was done before it was killed leaves nothing to do to the
        # next ones; the machine is faster now than when it was timed.
        shutil.rmtree(project.workspace.build)
        duration /= 2
    check(project, FIRST_FILE)


@pytest.mark.parametrize("seed", range(4 if WITH_SLOW else 1))
def test_update(project, seed):
    rng = random.Random(seed)
    project.setup()
    for step in range(3):
        project.write("torch/nn/moe.py", f"# version {step}\n")
        setup_and_kill(project, rng.uniform(0.0, 0.12))
    check(project, "# version 2\n")
