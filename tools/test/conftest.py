"""A small synthetic upstream: a fake wheel of a few files and a stack of two PRs.

The stager's real input is a 5 GB environment. Its rules do not depend on that
size, so most tests use this one: seconds instead of minutes, and every failure
can be provoked.
"""

from __future__ import annotations

import base64
import hashlib
import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from staging import pipeline, series as series_module
from staging.baseenv import BaseEnv, locate
from staging.checkout import Checkout
from staging.config import Workspace
from staging.console import Console
from staging.pipeline import Staged
from staging.series import Series


GIT_VERSION = "0" * 40
WHEEL_FILES = {
    "torch/__init__.py": "from torch import overrides\n",
    "torch/version.py": f"git_version = '{GIT_VERSION}'\n",
    "torch/overrides.py": "".join(f"line_{i} = {i}\n" for i in range(1, 41)),
    "torch/nn/__init__.py": "",
    "torch/nn/functional.py": "def relu(x):\n    return max(x, 0)\n",
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

[[pr]]
name = "100-first"
title = "Add moe.py"
files = ["torch/nn/moe.py"]

[[pr]]
name = "110-second"
title = "Add its test"
files = ["test/test_moe.py"]
tests = ["test/test_moe.py"]
"""
FIRST_PATCH = """\
Subject: [PATCH] Add moe.py

It is needed.
---

diff --git a/torch/overrides.py b/torch/overrides.py
--- a/torch/overrides.py
+++ b/torch/overrides.py
@@ -10,4 +10,5 @@
 line_10 = 10
 line_11 = 11
+first = True
 line_12 = 12
 line_13 = 13
"""
SECOND_PATCH = """\
Subject: [PATCH] Add its test

So that it keeps working.
---

diff --git a/torch/overrides.py b/torch/overrides.py
--- a/torch/overrides.py
+++ b/torch/overrides.py
@@ -30,4 +30,5 @@
 line_29 = 29
 line_30 = 30
+second = True
 line_31 = 31
 line_32 = 32
"""
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
    def series(self) -> Series:
        return series_module.load(self.root)

    @property
    def env(self) -> BaseEnv:
        return locate(self.workspace, self.series)

    @property
    def site(self) -> Path:
        """site-packages of the staged environment."""
        return self.workspace.venv / self.env.site.relative_to(self.env.venv)

    def setup(self, **arguments) -> Staged:
        return pipeline.setup(self.workspace, self.series, Console(True), **arguments)

    def checkout(self) -> Checkout:
        console = Console(quiet=True)
        return pipeline.open_checkout(self.workspace, self.series, console)[1]

    def write(self, name: str, text: str) -> Path:
        path = self.root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        return path

    def edit_checkout(self, name: str, text: str) -> None:
        path = self.workspace.checkout / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    """The stack of two PRs on the fake wheel, not set up yet."""
    made = Project(tmp_path / "repo", tmp_path / "cache")
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
        path.write_text(text)
        digest = hashlib.sha256(text.encode()).digest()
        encoded = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        rows.append(f"{name},sha256={encoded},{len(text)}\n")
    record = env.site / "torch-2.15.0.dist-info" / "RECORD"
    record.parent.mkdir()
    record.write_text("".join(rows) + "torch-2.15.0.dist-info/RECORD,,\n")
    env.python.parent.mkdir(parents=True)
    os.symlink(sys.executable, env.python)
    env.stamp.write_text("fake")


@pytest.fixture
def console() -> Console:
    return Console(quiet=True)
