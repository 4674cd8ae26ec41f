"""Runs lintrunner with the pinned tools on every file of the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path


# Committed or not: a new file is checked before it is added.
_FILES = "git ls-files --cached --others --exclude-standard"


def run(repo: Path, apply: bool) -> int:
    """Lints the repository.

    Args:
        apply: also write the fixes of formatters.

    Returns:
        Exit status of lintrunner.
    """
    tools = Path(sys.executable).parent
    command = [str(tools / "lintrunner"), f"--paths-cmd={_FILES}"]
    command += ["--apply-patches"] if apply else []
    path = f"{tools}{os.pathsep}{os.environ.get('PATH', '')}"
    env = {**os.environ, "PATH": path, "PYTHONDONTWRITEBYTECODE": "1"}
    return subprocess.run(command, cwd=repo, env=env).returncode
