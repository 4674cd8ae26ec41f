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


@pytest.mark.xfail
def test_meta_grouped_mlp():
    raise AssertionError("known")


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
    # As upstream's, for pytest 7: later ones refuse the hook.
    hook = "def pytest_pycollect_makemodule(module_path, path, parent): ...\n"
    (path / "test/conftest.py").write_text(hook)
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
    assert all(
        expression == "moe or grouped_mm or grouped_mlp" for _, expression in found
    )
    assert testing.upstream_suites(checkout, ["test/test_meta.py"]) == found[1:]


def run(project, staged, checkout, suites, released=None):
    arguments = (project.workspace, staged, checkout, suites, [], released)
    return testing.run_upstream(*arguments)


def test_they_run_with_the_staged_torch(project, staged, checkout, capfd):
    suites = testing.upstream_suites(checkout, [])
    status, rows = run(project, staged, checkout, suites)
    assert status == 0
    said = capfd.readouterr().out
    assert "=== 2 passed, 2 skipped, 2 xfailed in" in said
    assert "SKIPPED [1]" in said and "needs a GPU" in said
    assert [row["suite"] for row in rows] == ["test/test_ops.py", "test/test_meta.py"]
    for row in rows:
        assert [row[n] for n in ("tests", "passed", "skipped", "xfailed")] == [
            3,
            1,
            1,
            1,
        ]
    status, rows = run(project, staged, checkout, [("test/test_meta.py", "")])
    assert status == 1
    assert rows[0]["failures"] == ["test_meta::test_meta_other"]
    assert (
        "FAILED test/test_meta.py test_meta::test_meta_other" in capfd.readouterr().out
    )


def test_what_fails_without_the_stack_too_is_not_ours(project, staged, checkout, capfd):
    meta = [("test/test_meta.py", "")]
    status, rows = run(project, staged, checkout, meta, sys.executable)
    assert status == 0
    assert (rows[0]["failed"], rows[0]["failed_without_the_stack_too"]) == (0, 1)
    assert "1 failed without the stack too" in capfd.readouterr().out


def test_nothing_selected_is_a_failure_and_named(project, staged, checkout, capfd):
    status, _ = run(project, staged, checkout, [("test/test_meta.py", "no_such_test")])
    assert status == 1
    assert "no test of ours in: test/test_meta.py" in capfd.readouterr().out


def test_record_keeps_rows_of_other_suites(project, checkout, tmp_path, monkeypatch):
    monkeypatch.setattr(testing.gitrepo.UserRepo, "resolve", lambda self, name: "hash")
    (checkout / "version.txt").write_text("2.15.0\n")
    file = tmp_path / "upstream.json"
    file.write_text(
        '{"rows": [{"suite": "a", "tests": 1}, {"suite": "b", "tests": 1}]}'
    )
    rows = [{"suite": "b", "tests": 2}]
    stack = project.stack
    record = testing.upstream_record(project.workspace, stack, checkout, rows, file)
    assert [(row["suite"], row["tests"]) for row in record["rows"]] == [
        ("a", 1),
        ("b", 2),
    ]
    assert record["test_files"] == "2.15.0"


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
    assert passed_before() == 12
    (tmp_path / "test_new.py").write_text("new\n")
    assert passed_before("drift") == 0
    assert run("drifts").stderr.startswith("no shard drifts; there are: verify slow")
    assert "verify: FAILED after" in run("verify", "--", "fail").stdout


ADDED = """\
diff --git a/test/{name} b/test/{name}
--- a/test/{name}
+++ b/test/{name}
@@ -10,2 +10,5 @@
 class TestOld(TestCase):
+    def test_method(self):
+        self.assertEqual(1, 1)
+
     def test_old(self):
@@ -90,2 +93,6 @@

+class TestWhole(TestCase):
+    def test_added(self):
+        self.assertTrue(torch.staged)
+
 if True:
"""
ENTRY = """\
diff --git a/test/test_list.py b/test/test_list.py
--- a/test/test_list.py
+++ b/test/test_list.py
@@ -1,2 +1,3 @@
 OPS = [
+    "moe",
 ]
"""


def test_tests_that_a_patch_adds_to_a_file_of_pytorch(project):
    project.edit_lacking("100-first", ADDED.format(name="test_known.py"))
    project.edit_lacking("110-second", ENTRY)
    workspace, stack = project.workspace, project.stack
    (path,) = testing.added_tests(workspace, stack)
    text = (workspace.repo / path).read_text()
    compile(text, path, "exec")
    assert path.endswith("added-tests/test/test_known.py")
    assert "class Added_test_method(TestCase):\n    def test_method(self):" in text
    assert "class TestWhole(TestCase):\n    def test_added(self):" in text
    assert "test_old" not in text
    assert testing.select(workspace, stack, ["test/test_known.py"]) == [path]
    assert path in testing.select(workspace, stack, [])
    assert testing.added_tests(workspace, stack.only(["110-second"])) == []
