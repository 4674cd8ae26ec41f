"""export, refresh, verify: patches and commits are two forms of one thing."""

import os

import pytest
from conftest import FIRST_FILE

from staging import export, series
from staging.errors import StageError


OVERRIDES = "torch/overrides.py"


def snapshot(project):
    """Everything under version control in the repository."""
    roots = ("torch_patches", "torch", "test")
    return {
        path.relative_to(project.root).as_posix(): path.read_bytes()
        for root in roots
        for path in sorted((project.root / root).rglob("*"))
        if path.is_file()
    }


@pytest.fixture
def exported(project):
    """The project, set up and in the form export writes."""
    project.setup()
    export.export(project.checkout(), project.stack)
    project.setup()
    return project


def refresh(project, name, console):
    checkout = project.checkout()
    checkout.ensure_current(project.stack, console)
    changed = export.refresh(project.workspace, checkout, project.stack, name, console)
    checkout.sync(project.stack, console)
    return changed


def test_apply_then_export_is_the_identity(exported):
    before = snapshot(exported)
    assert export.verify(exported.checkout(), exported.stack) == []
    assert export.export(exported.checkout(), exported.stack) == []
    assert snapshot(exported) == before


def test_exported_patch_has_no_drifting_lines(exported):
    text = (exported.root / "torch_patches/100-first.patch").read_text()
    assert text.startswith("From " + "0" * 40 + " Mon Sep 17 00:00:00 2001\n")
    assert "From: A Contributor <contributor@example.com>\n" in text
    assert "\n\nIt is needed.\n---\n\ndiff --git" in text
    assert "index " not in text
    assert "Staged-PR" not in text


def test_verify_names_a_patch_that_is_not_canonical(exported):
    path = exported.root / "torch_patches/110-second.patch"
    path.write_text(path.read_text().replace("@@ -30,4 +30,5 @@", "@@ -29,4 +30,5 @@"))
    (problem,) = export.verify(exported.checkout(), exported.stack)
    assert problem.startswith("torch_patches/110-second.patch: not in the form")


def test_verify_reports_the_bijection_first(exported):
    exported.write("torch/nn/orphan.py", "\n")
    (problem,) = export.verify(exported.checkout(), exported.stack)
    assert "orphan.py" in problem


def test_refresh_goes_to_the_named_pr_only(exported, console):
    path = exported.workspace.checkout / OVERRIDES
    text = path.read_text().replace("first = True", "first = 'edited'")
    path.write_text(text)
    other = (exported.root / "torch_patches/110-second.patch").read_bytes()
    assert refresh(exported, "100", console) == ["torch_patches/100-first.patch"]
    patch = (exported.root / "torch_patches/100-first.patch").read_text()
    assert "+first = 'edited'" in patch
    assert (exported.root / "torch_patches/110-second.patch").read_bytes() == other
    exported.setup()
    assert (exported.site / OVERRIDES).read_text() == text


def test_refresh_moves_later_hunks(exported, console):
    path = exported.workspace.checkout / OVERRIDES
    path.write_text("added_on_top = 1\n" + path.read_text())
    changed = refresh(exported, "100", console)
    assert set(changed) == {
        "torch_patches/100-first.patch",
        "torch_patches/110-second.patch",
    }
    assert export.verify(exported.checkout(), exported.stack) == []


def test_refresh_takes_new_and_edited_new_files(exported, console):
    exported.edit_checkout("torch/nn/moe.py", "# edited\n")
    exported.edit_checkout("test/test_other.py", "def test_other(): pass\n")
    refresh(exported, "100-first", console)
    assert (exported.root / "torch/nn/moe.py").read_text() == "# edited\n"
    pr = exported.stack.get("100")
    assert pr.files == ("torch/nn/moe.py", "test/test_other.py")
    assert pr.tests == ("test/test_other.py",)
    assert "# edited\n" == (exported.workspace.checkout / "torch/nn/moe.py").read_text()
    exported.setup()


def test_refresh_takes_a_mode_alone(exported, console):
    (exported.workspace.checkout / "torch/nn/moe.py").chmod(0o755)
    assert refresh(exported, "100", console) == ["torch/nn/moe.py"]
    assert os.access(exported.root / "torch/nn/moe.py", os.X_OK)
    exported.setup()
    assert os.access(exported.workspace.checkout / "torch/nn/moe.py", os.X_OK)


def test_refresh_takes_a_staged_rename(exported, console):
    exported.checkout().git.run("mv", "torch/nn/moe.py", "torch/nn/other.py")
    refresh(exported, "100", console)
    assert exported.stack.get("100").files == ("torch/nn/other.py",)
    assert not (exported.root / "torch/nn/moe.py").exists()


def test_links_do_not_land(exported, console):
    before = snapshot(exported)
    (exported.workspace.checkout / "torch/nn/link.py").symlink_to("functional.py")
    with pytest.raises(StageError, match="link.py: a symlink"):
        refresh(exported, "110", console)
    git = exported.checkout().git
    git.run("add", "-A")
    git.run("commit", "-q", "--amend", "--no-edit")
    with pytest.raises(StageError, match="torch/nn/link.py: a symlink"):
        export.export(exported.checkout(), exported.stack)
    assert snapshot(exported) == before


@pytest.mark.parametrize(
    "message",
    ["title\n\nbefore\n\n---\n\nafter", "one\ntwo", "title\n\ndiff --git a/x b/x"],
)
def test_message_that_git_am_would_cut(exported, message):
    before = snapshot(exported)
    git = exported.checkout().git
    git.run("commit", "-q", "--amend", "-m", f"{message}\n\nStaged-PR: 110-second")
    with pytest.raises(StageError, match="110-second: its message has a line '---'"):
        export.export(exported.checkout(), exported.stack)
    assert snapshot(exported) == before


def test_squashed_commits(exported):
    git = exported.checkout().git
    git.run("reset", "-q", "--soft", "HEAD~2")
    git.run("commit", "-q", "-m", "both\n\nStaged-PR: 100-first")
    with pytest.raises(StageError, match="missing: 110-second; too many: none"):
        export.export(exported.checkout(), exported.stack)


def test_refresh_refuses_a_file_of_another_pr(exported, console):
    before = snapshot(exported)
    exported.edit_checkout("torch/nn/moe.py", "# edited\n")
    with pytest.raises(StageError, match="torch/nn/moe.py is a new file of 100-first"):
        refresh(exported, "110", console)
    assert snapshot(exported) == before


def test_refresh_that_does_not_fit_names_the_later_pr(exported, console):
    before = snapshot(exported)
    path = exported.workspace.checkout / OVERRIDES
    path.write_text(path.read_text().replace("second = True", "second = 2"))
    with pytest.raises(
        StageError, match="110-second changes the same lines"
    ) as failure:
        refresh(exported, "100", console)
    assert OVERRIDES in str(failure.value)
    assert snapshot(exported) == before
    assert "second = 2" in path.read_text(), "the edit was lost"


def test_refresh_without_edits(exported, console):
    with pytest.raises(StageError, match="no uncommitted edits"):
        refresh(exported, "100", console)


def test_refresh_carries_edits_over_a_repository_change(exported, console):
    path = exported.workspace.checkout / OVERRIDES
    path.write_text(path.read_text().replace("first = True", "first = 3"))
    exported.write("torch/nn/moe.py", "# repository\n")
    refresh(exported, "100", console)
    assert (exported.root / "torch/nn/moe.py").read_text() == "# repository\n"
    assert "+first = 3" in (exported.root / "torch_patches/100-first.patch").read_text()


def test_both_sides_changed_the_same_file(exported, console):
    exported.edit_checkout("torch/nn/moe.py", "# checkout\n")
    exported.write("torch/nn/moe.py", "# repository\n")
    with pytest.raises(StageError, match="both changed since the last setup"):
        refresh(exported, "100", console)
    assert (exported.root / "torch/nn/moe.py").read_text() == "# repository\n"
    checkout = exported.workspace.checkout / "torch/nn/moe.py"
    assert checkout.read_text() == "# checkout\n"


def test_export_refuses_uncommitted_edits(exported):
    exported.edit_checkout("torch/nn/moe.py", "# edited\n")
    with pytest.raises(StageError, match="uncommitted edits: torch/nn/moe.py"):
        export.export(exported.checkout(), exported.stack)


def test_export_of_an_amended_commit(exported, console):
    git = exported.checkout().git
    exported.edit_checkout("torch/nn/moe.py", FIRST_FILE + "# amended\n")
    first = git.run("rev-list", "--reverse", "HEAD").split()[1]
    git.run("commit", "-qa", f"--fixup={first}")
    base = exported.checkout().base
    git.run(
        "rebase", "-q", "-i", "--autosquash", base, env={"GIT_SEQUENCE_EDITOR": "true"}
    )
    assert export.export(exported.checkout(), exported.stack) == ["torch/nn/moe.py"]
    assert (exported.root / "torch/nn/moe.py").read_text().endswith("# amended\n")


def test_commit_without_pr(exported):
    git = exported.checkout().git
    git.run("commit", "-q", "--allow-empty", "-m", "stray")
    with pytest.raises(StageError, match=r"\(stray\) belongs to no PR"):
        export.export(exported.checkout(), exported.stack)


def test_commit_that_deletes_a_pytorch_file(exported):
    git = exported.checkout().git
    git.run("rm", "-q", "torch/nn/functional.py")
    git.run("commit", "-q", "--amend", "--no-edit")
    with pytest.raises(StageError, match="deletes torch/nn/functional.py"):
        export.export(exported.checkout(), exported.stack)


def test_series_that_leans_on_another_is_reported(project):
    """Its context is a line of 100, which it does not need."""
    project.add_third(first=10)
    project.setup()
    export.export(project.checkout(), project.stack)
    (problem,) = export.verify(project.checkout(), project.stack)
    assert problem.startswith("without the series it does not need: torch_patches/120-")
    series = project.root / "torch_patches/series.toml"
    series.write_text(series.read_text().replace('series = "apart"', 'series = "more"'))
    assert export.verify(project.checkout(), project.stack) == []


MOE_EDIT = """\
diff --git a/torch/nn/moe.py b/torch/nn/moe.py
--- a/torch/nn/moe.py
+++ b/torch/nn/moe.py
@@ -1,3 +1,4 @@
 def moe(x):
+    x = 2 * x
     return x
 # What
"""
MOE_TAIL = "# What\n# nobody\n# else\nchanged = True\n"


@pytest.fixture
def edited_by_second(exported):
    """110 changes a new file of 100, which the tree has as the whole stack leaves it."""
    path = exported.root / "torch_patches/110-second.patch"
    head, diff = path.read_text().split("diff --git", 1)
    path.write_text(f"{head}{MOE_EDIT}diff --git{diff}")
    text = "def moe(x):\n    x = 2 * x\n    return x\n"
    exported.write("torch/nn/moe.py", text + MOE_TAIL)
    exported.setup()
    return exported


def test_a_later_pr_edits_a_new_file(edited_by_second, console):
    project = edited_by_second
    assert series.problems(project.stack) == []
    assert export.verify(project.checkout(), project.stack) == []
    assert "2 * x" in (project.site / "torch/nn/moe.py").read_text()
    checkout = project.checkout()
    first = checkout.commit_stack(project.stack.upto("100"), {})
    assert checkout.git.run("show", f"{first}:torch/nn/moe.py") == FIRST_FILE + MOE_TAIL


@pytest.mark.parametrize("name, value", [("100", "= True"), ("110", "x = 2 * x")])
def test_refresh_of_a_new_file_of_two_prs(edited_by_second, console, name, value):
    project = edited_by_second
    path = project.workspace.checkout / "torch/nn/moe.py"
    text = path.read_text().replace(value, f"{value}  # edited")
    path.write_text(text)
    refresh(project, name, console)
    assert (project.root / "torch/nn/moe.py").read_text() == text
    patch = (project.root / "torch_patches/110-second.patch").read_text()
    assert ("+    x = 2 * x  # edited" in patch) == (name == "110")
    first = project.stack.originals(project.stack.get("100"))["torch/nn/moe.py"]
    assert (b"# edited" in first) == (name == "100")


def test_edit_of_a_new_file_that_is_not_in_it(edited_by_second):
    edited_by_second.write("torch/nn/moe.py", FIRST_FILE)
    message = "110-second.patch: its edits are not in torch/nn/moe.py"
    with pytest.raises(StageError, match=message) as failure:
        edited_by_second.setup()
    assert "tools/stage.py refresh 110-second" in failure.value.hint


def test_edit_of_a_new_file_of_a_series_that_is_not_below(edited_by_second):
    path = edited_by_second.root / "torch_patches/series.toml"
    text = path.read_text().replace(
        'name = "110-second"\nseries = "core"', 'name = "110-second"\nseries = "apart"'
    )
    path.write_text(text)
    problems = series.problems(edited_by_second.stack)
    assert any("which 110-second does not lie on" in problem for problem in problems)
