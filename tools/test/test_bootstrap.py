"""tools/stage.py, the part that only has the standard library."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest


STAGE = Path(__file__).parents[1] / "stage.py"
PINNED = '[base]\npython = "{}"\n'


@pytest.fixture
def clone(tmp_path):
    """A repository with nothing but the bootstrap and the pins it reads."""
    root = tmp_path / "clone"
    (root / "tools").mkdir(parents=True)
    (root / "torch_patches").mkdir()
    shutil.copy(STAGE, root / "tools/stage.py")
    (root / "tools/requirements.txt").write_text("no-such-package-of-ours==1.0\n")
    version = "{}.{}".format(*sys.version_info)
    (root / "torch_patches/series.toml").write_text(PINNED.format(version))
    return root


def stage(root, *arguments, cwd=None, **environment):
    """Runs stage.py as a user does."""
    env = {**os.environ, "MOE_STAGING_CACHE": str(root / "cache"), **environment}
    return subprocess.run(
        [sys.executable, root / "tools/stage.py", *(arguments or ["setup"])],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
    )


def test_wrong_python_version(clone):
    (clone / "torch_patches/series.toml").write_text(PINNED.format("3.99"))
    done = stage(clone)
    assert done.returncode == 1
    found = "{}.{}".format(*sys.version_info)
    assert done.stderr.startswith(f"error: this is Python {found} (")
    assert "pinned to Python 3.99\nfix: python3.99 tools/stage.py setup" in done.stderr
    assert not (clone / "cache").exists()


def test_no_git(clone):
    done = stage(clone, PATH="/nonexistent")
    assert done.returncode == 1
    assert done.stderr.startswith("error: git is not on PATH\nfix: ")


def test_no_venv(clone):
    """Debian's Python without the package of ensurepip."""
    (clone / "sitecustomize.py").write_text(
        "import sys; sys.modules['ensurepip'] = None\n"
    )
    done = stage(clone, PYTHONPATH=str(clone))
    assert done.returncode == 1
    assert "no module ensurepip\nfix: install it" in done.stderr
    assert "-venv)" in done.stderr


def test_no_network(clone):
    done = stage(
        clone,
        PIP_CONFIG_FILE="/dev/null",
        PIP_INDEX_URL="http://127.0.0.1:9/simple",
        PIP_EXTRA_INDEX_URL="",
        PIP_FIND_LINKS="",
        PIP_RETRIES="0",
    )
    assert done.returncode == 1
    assert "no-such-package-of-ours" in done.stderr
    assert "fix: check the network" in done.stderr
    assert not list((clone / "cache").glob("tools-*/complete"))


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--help"], "\n    setup     Makes or updates the staged environment"),
        (["apply", "-h"], "Applies the stack to a git CHECKOUT of PyTorch"),
    ],
)
def test_help_installs_nothing(clone, arguments, expected):
    (clone / "tools/staging").mkdir()
    shutil.copy(STAGE.parent / "staging/cli.py", clone / "tools/staging")
    done = stage(clone, *arguments)
    assert done.returncode == 0
    assert expected in done.stdout
    assert not (clone / "cache").exists()


def test_relative_cache_folder_is_the_callers(clone, tmp_path):
    (tmp_path / "here").mkdir()
    network = {"PIP_CONFIG_FILE": "/dev/null", "PIP_INDEX_URL": "http://127.0.0.1:9/"}
    stage(
        clone,
        cwd=tmp_path / "here",
        MOE_STAGING_CACHE="mine",
        **network,
        PIP_RETRIES="0",
    )
    assert list((tmp_path / "here/mine").glob("tools-*"))
    assert not (clone / "mine").exists()


def test_cache_folder_that_cannot_be_made(clone):
    (clone / "file").touch()
    done = stage(clone, MOE_STAGING_CACHE=str(clone / "file" / "cache"))
    assert done.returncode == 1
    assert done.stderr.startswith("error: Not a directory: ")
    assert "\nfix: make it writable, or set MOE_STAGING_CACHE" in done.stderr


def test_old_python_can_read_the_bootstrap():
    """Its version message must reach a Python that is too old for the rest."""
    compile(STAGE.read_text(), str(STAGE), "exec", dont_inherit=True)
    import ast

    ast.parse(STAGE.read_text(), feature_version=(3, 6))
