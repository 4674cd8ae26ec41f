"""A small synthetic upstream: a fake wheel of a few files and a stack of two PRs.

The stager's real input is a 5 GB environment. Its rules do not depend on that
size, so most tests use this one: seconds instead of minutes, and every failure
can be provoked.
"""

import base64
import hashlib
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from staging import export, patchfile, pipeline, series as series_module
from staging.apply import Applier, Outcome, Target
from staging.baseenv import BaseEnv, locate
from staging.checkout import Checkout
from staging.config import Workspace
from staging.console import Console
from staging.gitrepo import GitRepo, UserRepo
from staging.pipeline import Staged
from staging.series import Stack


# As in PyTorch's tests: .ci/long runs what .ci/run leaves out.
WITH_SLOW = os.environ.get("PYTORCH_TEST_WITH_SLOW") == "1"
GIT_VERSION = "0" * 40
WHEEL_FILES = {
    "torch/__init__.py": "from torch import overrides\n",
    "torch/version.py": f"git_version = '{GIT_VERSION}'\n",
    "torch/overrides.py": "".join(f"line_{i} = {i}\n" for i in range(1, 41)),
    "torch/dos.py": "".join(f"dos_{i} = {i}\r\n" for i in range(1, 21)),
    "torch/nn/__init__.py": "",
    "torch/nn/functional.py": "def relu(x):\n    return max(x, 0)\n",
    "torch/nn/functional.pyi": "def relu(x: int) -> int: ...\n",
    "torch/include/ATen/core/Tensor.h": "#pragma once\n",
    "torchgen/packaged/ATen/native/README.md": "# native\n",
    "functorch/__init__.py": "",
}
SERIES = f"""\
[base]
torch = "2.15.0"
git = "{GIT_VERSION}"
python = "{sys.version_info.major}.{sys.version_info.minor}"
target_release = "2.16"

[project]
author = "A Contributor <contributor@example.com>"
non_landing = ["benchmarks/results/"]

[[series]]
name = "core"
needs = []
why = "What it is about."

[[series]]
name = "more"
needs = ["core"]
why = "What goes beyond."

[[series]]
name = "apart"
needs = []
why = "What stands alone."

[[pr]]
name = "100-first"
series = "core"
title = "Add moe.py"
files = ["torch/nn/moe.py"]

[[pr]]
name = "110-second"
series = "core"
title = "Add its test"
files = ["test/test_moe.py"]
tests = ["test/test_moe.py"]
"""


def patch_of_overrides(
    name: str, subject: str, why: str, first: int, context: list[str]
) -> str:
    """A patch that adds a line amid four lines, of which the first is line ``first``."""
    return f"""\
Subject: [PATCH] {subject}

{why}
---

diff --git a/torch/overrides.py b/torch/overrides.py
--- a/torch/overrides.py
+++ b/torch/overrides.py
@@ -{first},4 +{first},5 @@
 {context[0]}
 {context[1]}
+{name} = True
 {context[2]}
 {context[3]}
"""


LINES = WHEEL_FILES["torch/overrides.py"].splitlines()
FIRST_PATCH = patch_of_overrides(
    "first", "Add moe.py", "It is needed.", 10, LINES[9:13]
)
SECOND_PATCH = patch_of_overrides(
    "second", "Add its test", "So that it keeps working.", 30, LINES[28:32]
)
FIRST_FILE = "def moe(x):\n    return x\n"


@dataclass
class Project:
    """A repository with a stack, and the cache with its fake base."""

    root: Path
    cache: Path

    @property
    def workspace(self) -> Workspace:
        return Workspace(self.root, self.root / "build", self.cache)

    @property
    def stack(self) -> Stack:
        return series_module.load(self.root)

    @property
    def console(self) -> Console:
        return Console(quiet=True)

    @property
    def env(self) -> BaseEnv:
        return locate(self.workspace, self.stack)

    @property
    def site(self) -> Path:
        """site-packages of the staged environment."""
        return self.workspace.venv / self.env.site.relative_to(self.env.venv)

    def setup(self, **arguments) -> Staged:
        return pipeline.setup(self.workspace, self.stack, Console(True), **arguments)

    def checkout(self) -> Checkout:
        console = Console(quiet=True)
        return pipeline.open_checkout(self.workspace, self.stack, console)[1]

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def add_third(self, fields: str = 'series = "apart"', first: int = 19) -> None:
        """A third PR: a file of its own, and a line amid lines of overrides.py.

        Args:
            first: the first of those four lines, as they are in the whole stack.
        """
        overrides = WHEEL_FILES["torch/overrides.py"]
        for text in (FIRST_PATCH, SECOND_PATCH):
            line, after = re.search(r"\n\+(\w.*)\n (.*)", text).groups()
            overrides = overrides.replace(f"\n{after}\n", f"\n{line}\n{after}\n")
        context = overrides.splitlines()[first - 1 : first + 3]
        path = self.root / "torch_patches/series.toml"
        entry = f'[[pr]]\nname = "120-third"\n{fields}\ntitle = "Add more"\n'
        entry += 'files = ["test/test_more.py"]\ntests = ["test/test_more.py"]\n'
        path.write_text(f"{path.read_text()}\n{entry}")
        self.write("test/test_more.py", "def test_more():\n    pass\n")
        self.write(
            "torch_patches/120-third.patch",
            patch_of_overrides("third", "Add more", "Why not.", first, context),
        )

    def edit_lacking(self, name: str, hunk: str) -> None:
        """The hunk for a file the wheel lacks, as refresh --upstream would write it."""
        patch = self.root / f"torch_patches/{name}.patch"
        head, mark, diff = patch.read_text().partition("diff --git")
        patch.write_text(head + patchfile.merge(mark + diff, hunk))
        stack = self.root / "torch_patches/series.toml"
        path, commit = patchfile.path_of(hunk), "1" * 40
        context = patchfile.context(hunk)
        fact = f'upstream = [{{path = "{path}", commit = "{commit}", context = "{context}"}}]'
        title = next(pr.title for pr in self.stack.prs if pr.name == name)
        line = f'title = "{title}"\n'
        stack.write_text(stack.read_text().replace(line, f"{line}{fact}\n", 1))

    def edit_checkout(self, name: str, text: str) -> None:
        path = self.workspace.checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def refresh(self, name: str) -> list[str]:
        """Folds the edits of build/checkout into a PR."""
        console, checkout = Console(quiet=True), self.checkout()
        checkout.ensure_current(self.stack, console)
        changed = export.refresh(self.workspace, checkout, self.stack, name, console)
        checkout.sync(self.stack, console)
        return changed


class Upstream:
    """A clone of the synthetic upstream, as a contributor has one."""

    def __init__(self, path: Path, project: Project) -> None:
        self.path = path
        self.project = project
        self.git = UserRepo(path)
        self.said: list[str] = []

    def apply(
        self,
        verb: str = "start",
        upto: str | None = None,
        series: tuple[str, ...] = (),
        **arguments,
    ) -> None:
        """One call of `apply`, `apply --continue` or `apply --abort`."""
        stack, target, self.said = self.project.stack, Target(self.path), []
        wanted = stack.upto(upto) if upto else stack.select(series) if series else None
        with target.locked():
            source = self.project.checkout()

            def say(outcome: Outcome) -> None:
                self.said.append(outcome.what)

            applier = Applier(target, source, stack, say, wanted)
            getattr(applier, verb)(**arguments)

    def write(self, name: str, text: str) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
        return path

    def read(self, name: str) -> str:
        return (self.path / name).read_bytes().decode()

    def edit(self, name: str, old: str, new: str) -> None:
        """Replaces text of a file, which must be there."""
        text = self.read(name)
        assert old in text
        self.write(name, text.replace(old, new))

    def commit(self, message: str) -> str:
        self.git.run("add", "-A")
        self.git.run("commit", "-q", "-m", message)
        return self.git.resolve("HEAD")

    def tree(self, revision: str = "HEAD") -> str:
        """Names the contents of a commit, byte for byte."""
        return self.git.resolve(f"{revision}^{{tree}}")

    def titles(self) -> list[str]:
        return self.git.run("log", "--reverse", "--format=%s").splitlines()


@pytest.fixture
def upstream(project: Project, tmp_path: Path) -> Upstream:
    """The project, set up, and a clone of what it was recovered from."""
    project.setup()
    path = tmp_path / "a checkout"
    make_upstream(project, path)
    return Upstream(path, project)


def make_upstream(project: Project, path: Path, *options: str) -> None:
    source = project.env.folder / "source-1"
    GitRepo(path.parent).run("clone", "-q", *options, f"file://{source}", path.name)
    identify(path)


def identify(path: Path) -> None:
    """A contributor's name, so that no test needs the machine's."""
    git = UserRepo(path)
    git.run("config", "user.name", "Someone Else")
    git.run("config", "user.email", "someone@example.com")


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """The stack of two PRs on the fake wheel, not set up yet."""
    return make_project(tmp_path)


def make_project(folder: Path) -> Project:
    """The project of the fixture, for tests that share one."""
    made = Project(folder / "a repo", folder / "a cache")
    made.write("torch_patches/series.toml", SERIES)
    made.write("torch_patches/100-first.patch", FIRST_PATCH)
    made.write("torch_patches/110-second.patch", SECOND_PATCH)
    made.write("requirements.txt", "numpy==2.4.6\n")
    made.write("torch/nn/moe.py", FIRST_FILE)
    made.write("test/test_moe.py", "def test_moe():\n    pass\n")
    write_wheel(made.env)
    return made


def write_wheel(env: BaseEnv) -> None:
    """A complete base environment that holds WHEEL_FILES as torch."""
    rows = []
    for name, text in WHEEL_FILES.items():
        path = env.site / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
        digest = hashlib.sha256(text.encode()).digest()
        encoded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        rows.append(f"{name},sha256={encoded},{len(text)}\n")
    record = env.site / "torch-2.15.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("".join(rows) + "torch-2.15.0.dist-info/RECORD,,\n")
    env.python.parent.mkdir(parents=True)
    os.symlink(sys.executable, env.python)
    env.stamp.write_text("fake")


def kill_program(program: str, arguments: list[str], delay: float) -> bool:
    """Runs Python code that prints "started" and "done", and kills it ``delay`` seconds
    after the first.

    Returns:
        Whether it was killed before it was done.
    """
    process = subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert process.stdout.readline() == "started\n"
    time.sleep(delay)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    done = "done" in process.stdout.read()
    assert process.wait() == -signal.SIGKILL or done, "the program failed"
    return not done


@pytest.fixture
def console() -> Console:
    return Console(quiet=True)
