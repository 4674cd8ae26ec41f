"""test --upstream: PyTorch's own test files, with the staged torch."""

import shutil
import subprocess
import sys

import pytest

from staging import testing
from staging.errors import StageError
from staging.pipeline import Staged


TESTS = """\
import pytest
import torch


def test_meta_moe_mlp():
    assert torch.staged, "the checkout's torch was imported"


def test_meta_other():
    raise AssertionError("not ours")


@pytest.mark.skip(reason="needs a GPU")
def test_meta_moe_topk():
    pass
"""


@pytest.fixture
def checkout(tmp_path):
    """A PyTorch checkout whose own torch must not be imported."""
    path = tmp_path / "py torch"
    for name in ("test/test_ops.py", "test/test_meta.py"):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text(TESTS)
    (path / "torch").mkdir()
    (path / "torch/__init__.py").write_text("staged = False\n")
    return path


@pytest.fixture
def staged(project, tmp_path, monkeypatch):
    """A staged environment: this Python with a torch of its own."""
    site = tmp_path / "site"
    (site / "torch").mkdir(parents=True)
    (site / "torch/__init__.py").write_text("staged = True\n")
    monkeypatch.setenv("PYTHONPATH", str(site))
    return Staged(sys.executable, "hash", "tip")


def test_suites_are_those_the_checkout_has(checkout, capsys):
    found = testing.upstream_suites(checkout, [])
    said = capsys.readouterr().out
    assert said.startswith(f"not in {checkout}, so not run: test/test_decomp.py, ")
    assert all(path in said for path, _ in testing.UPSTREAM_SUITES[2:])
    assert [path for path, _ in found] == ["test/test_ops.py", "test/test_meta.py"]
    assert all(expression == "moe or grouped_mm" for _, expression in found)
    assert testing.upstream_suites(checkout, ["test/test_meta.py"]) == found[1:]


def test_they_run_with_the_staged_torch(project, staged, checkout, capfd):
    suites = testing.upstream_suites(checkout, [])
    assert testing.run_upstream(project.workspace, staged, checkout, suites, []) == 0
    said = capfd.readouterr().out
    assert "=== 2 passed, 2 skipped in" in said
    assert "SKIPPED [1]" in said and "needs a GPU" in said
    meta = [("test/test_meta.py", "")]
    assert testing.run_upstream(project.workspace, staged, checkout, meta, []) == 1
    assert "FAILED test/test_meta.py" in capfd.readouterr().out


def test_nothing_selected_is_a_failure(project, staged, checkout):
    suites = [("test/test_meta.py", "no_such_test")]
    assert testing.run_upstream(project.workspace, staged, checkout, suites, []) == 1


def test_wrong_checkout(checkout, tmp_path):
    with pytest.raises(StageError, match="has no test/test_ops.py"):
        testing.upstream_suites(tmp_path, [])
    with pytest.raises(StageError, match="no test file or folder 'test/absent.py'"):
        testing.upstream_suites(checkout, ["test/absent.py"])


def test_long_script_explains_itself():
    script = testing.Path(__file__).parents[2] / ".ci/long"
    done = subprocess.run([script, "--help"], capture_output=True, text=True)
    assert done.returncode == 0
    assert "Example: .ci/long" in done.stdout


def test_long_script_repeats_what_another_run_did_not_cover(tmp_path):
    """Other arguments or a new file: not "passed before"."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "tools").mkdir()
    (tmp_path / "docs/source").mkdir(parents=True)
    (tmp_path / "docs/source/page.md").touch()
    script = tmp_path / ".ci/long"
    shutil.copy2(testing.Path(__file__).parents[2] / ".ci/long", script)
    program = "import sys; print('called'); sys.exit('fail' in sys.argv)\n"
    (tmp_path / "tools/stage.py").write_text(program)
    (tmp_path / ".gitignore").write_text("build/\n")
    git = ["git", "-c", "user.name=A", "-c", "user.email=a@b.c", "-C", str(tmp_path)]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        subprocess.run([*git, *command], check=True)

    def run(*arguments):
        return subprocess.run([script, *arguments], capture_output=True, text=True)

    def passed_before(*arguments):
        return run(*arguments).stdout.count("passed before")

    assert passed_before("verify", "--", "--only", "130") == 0
    assert passed_before("verify", "slow") == 0
    assert passed_before("slow", "verify") == 2
    assert passed_before() == 2
    assert passed_before() == 8
    (tmp_path / "test_new.py").write_text("new\n")
    assert passed_before("drift") == 0
    assert run("drifts").stderr.startswith("no shard drifts; there are: verify slow")
    assert "verify: FAILED after" in run("verify", "--", "fail").stdout
