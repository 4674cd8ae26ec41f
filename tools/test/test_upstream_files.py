"""Edits of files the wheel lacks: kept in patch and stack, made by apply only."""

import pytest

from staging import drift, export, prbody, series as series_module
from staging.apply import Target
from staging.errors import StageError


PAGE = "docs/source/nn.md"
TEXT = "# nn\n\n" + "".join(f"    nn.Layer{i}\n" for i in range(1, 21))


@pytest.fixture
def documented(upstream):
    """PR 110 also edits a doc page, taken out of a real checkout."""
    upstream.write(PAGE, TEXT)
    upstream.page_commit = upstream.commit("a page")
    upstream.edit(PAGE, "    nn.Layer7\n", "    nn.Layer7\n    nn.MoE\n")
    project = upstream.project
    changed = export.refresh_upstream(
        project.checkout(), project.stack, "110", Target(upstream.path)
    )
    assert changed == ["torch_patches/110-second.patch", series_module.SERIES_FILE]
    upstream.git.run("checkout", "-q", "--", PAGE)
    return upstream


def test_series_has_facts_and_patch_has_the_hunk(documented):
    project = documented.project
    (fact,) = project.stack.get("110").upstream
    assert (fact.path, fact.commit) == (PAGE, documented.page_commit)
    text = (project.root / "torch_patches/110-second.patch").read_text()
    assert "+    nn.MoE\n" in text
    assert text.index(f"a/{PAGE}") < text.index("a/torch/overrides.py")
    assert "nn.Layer1\n" not in text, "the file was copied"
    assert series_module.problems(project.stack) == []
    assert "Run on CPU" in prbody.render(project.stack, project.stack.get("110"))


def test_setup_leaves_it_out_and_says_so(documented, capfd):
    from staging import pipeline
    from staging.console import Console

    project = documented.project
    pipeline.setup(project.workspace, project.stack, Console())
    assert f"only `apply` edits: {PAGE}" in capfd.readouterr().err
    assert not (project.workspace.checkout / PAGE).exists()


def test_export_keeps_it(documented):
    project = documented.project
    project.setup()
    export.export(project.checkout(), project.stack)
    path = project.root / "torch_patches/110-second.patch"
    before = path.read_bytes()
    assert b"nn.MoE" in before
    assert export.verify(project.checkout(), project.stack) == []
    overrides = project.workspace.checkout / "torch/overrides.py"
    overrides.write_text(overrides.read_text() + "third = 3\n")
    project.refresh("110")
    assert b"+third = 3" in path.read_bytes()
    assert b"+    nn.MoE\n" in path.read_bytes()


def test_hunk_that_changed_since_upstream_was_read(documented):
    path = documented.project.root / "torch_patches/110-second.patch"
    path.write_text(path.read_text().replace("     nn.Layer8\n", "     nn.Layer9\n"))
    (problem,) = series_module.problems(documented.project.stack)
    assert "context of docs/source/nn.md is not that of upstream commit" in problem


def test_fact_without_a_hunk(documented):
    path = documented.project.root / "torch_patches/series.toml"
    path.write_text(path.read_text().replace("nn.md", "absent.md"))
    (problem,) = series_module.problems(documented.project.stack)
    assert "upstream names docs/source/absent.md; the patch has no such edit" in problem


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (TEXT, "applied"),
        ("# moved\n" * 9 + TEXT, "applied"),
        (TEXT.replace("Layer6", "Other"), "applied"),
        (TEXT.replace("    nn.Layer7\n", "    nn.Layer7\n    nn.MoE\n"), "applied"),
    ],
)
def test_apply(documented, text, said):
    documented.write(PAGE, text)
    if text != TEXT:
        documented.commit("upstream moved on")
    documented.apply()
    assert documented.said == ["applied", said]
    assert documented.read(PAGE).count("    nn.Layer7\n    nn.MoE\n") == 1
    assert "second = True" in documented.read("torch/overrides.py")
    documented.apply()
    assert documented.said == ["already applied"] * 2


def test_old_text_in_the_history_makes_a_merge_possible(documented):
    documented.write(PAGE, TEXT.replace("Layer8", "Eight").replace("Layer6", "Six"))
    documented.commit("upstream moved on")
    with pytest.raises(StageError, match=f"conflicts in .*\n  {PAGE}: hunk 1 of 1"):
        documented.apply()
    text = documented.read(PAGE)
    assert "<<<<<<<" in text and "nn.Eight" in text and "nn.MoE" in text
    documented.write(PAGE, TEXT.replace("Layer6\n", "Six\n    nn.MoE\n"))
    documented.git.run("add", PAGE)
    documented.apply("proceed")
    assert documented.titles()[-1] == "Add its test"


def test_hunk_without_a_place_is_left_to_a_human(documented):
    stack = documented.project.root / "torch_patches/series.toml"
    stack.write_text(stack.read_text().replace(documented.page_commit, "0" * 40))
    documented.write(PAGE, "another page\n")
    start = documented.commit("upstream moved on")
    with pytest.raises(
        StageError, match=f"no place for its edits of {PAGE}"
    ) as failure:
        documented.apply()
    assert "rejected/110-second.diff" in str(failure.value)
    kept = Target(documented.path).own / "rejected/110-second.diff"
    assert "+    nn.MoE" in kept.read_text()
    documented.write(PAGE, "another page\nnn.MoE\n")
    with pytest.raises(StageError, match="edited but not added"):
        documented.apply("proceed")
    documented.git.run("add", PAGE)
    documented.apply("proceed")
    assert documented.git.run("show", f"HEAD:{PAGE}") == "another page\nnn.MoE\n"
    assert len(documented.git.run("rev-list", f"{start}..HEAD").split()) == 2
    assert documented.git.run("status", "--porcelain") == ""


def test_checkout_without_that_file(documented):
    documented.git.run("rm", "-q", PAGE)
    documented.commit("no docs here")
    documented.apply()
    assert documented.said == ["applied", "applied"]


def test_drift_reads_it_from_a_checkout(documented):
    project = documented.project
    project.setup()
    source = drift.CheckoutSource(documented.path)
    found = drift.measure(project.checkout(), project.stack, source)
    assert [f.status for f in found.patches[1].files] == ["clean", "clean"]
    assert drift.WheelSource("2.14.1", project.cache).holds(PAGE) is False


def test_edit_of_a_file_that_the_wheel_has(upstream):
    upstream.write("torch/nn/functional.py", "x = 1\n")
    project = upstream.project
    target = Target(upstream.path)
    with pytest.raises(StageError, match="torch/nn/functional.py is in build/checkout"):
        export.refresh_upstream(project.checkout(), project.stack, "110", target)
    upstream.git.run("checkout", "-q", "--", ".")
    with pytest.raises(StageError, match="no uncommitted edits"):
        export.refresh_upstream(project.checkout(), project.stack, "110", target)


def test_edit_on_top_of_the_applied_stack(documented):
    """The hunk is measured from the commit below the PR, not from HEAD."""
    documented.apply()
    documented.edit(PAGE, "    nn.MoE\n", "    nn.MoE\n    nn.More\n")
    project = documented.project
    export.refresh_upstream(
        project.checkout(), project.stack, "110", Target(documented.path)
    )
    text = (project.root / "torch_patches/110-second.patch").read_text()
    assert "+    nn.MoE\n+    nn.More\n" in text
    (fact,) = project.stack.get("110").upstream
    assert fact.commit == documented.page_commit
