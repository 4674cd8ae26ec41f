"""series.toml: what is accepted, and the bijection with the files."""

import pytest

from staging import series as series_module
from staging.errors import StageError


def test_consistent_stack_has_no_problem(project):
    assert series_module.problems(project.series) == []
    assert project.series.tests == ("test/test_moe.py",)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch/nn/orphan.py", "torch/nn/orphan.py: belongs to no PR"),
        ("docs/source/orphan.md", "docs/source/orphan.md: belongs to no PR"),
        ("torch_patches/999-x.patch", "torch_patches/999-x.patch: no PR"),
    ],
)
def test_file_that_no_pr_names(project, name, expected):
    project.write(name, "x\n")
    (problem,) = series_module.problems(project.series)
    assert problem.startswith(expected)


def test_non_landing_folder_is_exempt(project):
    project.write("benchmarks/results/a.json", "{}\n")
    assert series_module.problems(project.series) == []
    project.write("benchmarks/other.py", "\n")
    assert len(series_module.problems(project.series)) == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch/nn/moe.py", "torch/nn/moe.py: listed by 100-first"),
        ("torch_patches/110-second.patch", "torch_patches/110-second.patch: missing"),
    ],
)
def test_named_file_that_is_missing(project, name, expected):
    (project.root / name).unlink()
    (problem,) = series_module.problems(project.series)
    assert problem.startswith(expected)


def test_file_of_two_prs(project):
    path = project.root / "torch_patches/series.toml"
    path.write_text(
        path.read_text().replace(
            '["test/test_moe.py"]', '["test/test_moe.py", "torch/nn/moe.py"]', 1
        )
    )
    (problem,) = series_module.problems(project.series)
    assert problem == "torch/nn/moe.py: listed by 100-first and by 110-second"


def test_patch_that_adds_a_file(project):
    path = project.root / "torch_patches/110-second.patch"
    new = "diff --git a/torch/x.py b/torch/x.py\nnew file mode 100644\n"
    path.write_text(path.read_text() + new + "--- /dev/null\n+++ b/torch/x.py\n")
    (problem,) = series_module.problems(project.series)
    assert "adds or deletes torch/x.py" in problem


@pytest.mark.parametrize(
    ("since", "expected"),
    [
        ("TORCH_VERSION_2_16_0", []),
        (
            "TORCH_VERSION_2_15_0",
            [
                "torch_patches/110-second.patch: C shims since TORCH_VERSION_2_15_0; "
                "target_release is TORCH_VERSION_2_16_0"
            ],
        ),
    ],
)
def test_release_of_c_shims(project, since, expected):
    path = project.root / "torch_patches/110-second.patch"
    path.write_text(path.read_text().replace("second = True", f"second = '{since}'"))
    assert series_module.problems(project.series) == expected


def test_target_release_is_not_out_yet(project):
    path = project.root / "torch_patches/series.toml"
    path.write_text(path.read_text().replace('release = "2.16"', 'release = "2.15"'))
    (problem,) = series_module.problems(series_module.load(project.root))
    assert problem.endswith("target_release must be above the base 2.15.0, got '2.15'")


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ("title =", "titel =", "unknown field titel"),
        ('git = "', 'commit = "', "[base]"),
        ('name = "110-second"', 'name = "100-first"', "occurs twice"),
        ("[base]", "[base", "series.toml"),
    ],
)
def test_malformed_file(project, old, new, expected):
    path = project.root / "torch_patches/series.toml"
    path.write_text(path.read_text().replace(old, new, 1))
    with pytest.raises(StageError, match=expected.replace("[", r"\[")):
        series_module.load(project.root)


def test_pr_by_name_or_slot(project):
    assert project.series.get("110").name == "110-second"
    assert [pr.name for pr in project.series.upto("100").prs] == ["100-first"]
    with pytest.raises(StageError, match="no PR named '120'.*there are: 100, 110"):
        project.series.get("120")


def test_tool_caches_are_not_sources(project):
    project.write("test/.pytest_cache/v/lastfailed", "{}\n")
    project.write("torch/nn/__pycache__/moe.cpython-311.pyc", "")
    assert series_module.problems(project.series) == []


def test_a_test_may_prove_a_later_pr_too(project):
    project.write("test/test_more.py", "\n")
    path = project.root / "torch_patches/series.toml"
    path.write_text(
        path.read_text()
        + '\n[[pr]]\nname = "120-third"\nseries = "more"\ntitle = "t"\nfiles = ["test/test_more.py"]\n'
        'tests = ["test/test_more.py", "test/test_moe.py"]\n'
    )
    patch = (project.root / "torch_patches/110-second.patch").read_text()
    head = patch[: patch.index("diff --git")]
    (project.root / "torch_patches/120-third.patch").write_text(head)
    assert series_module.problems(project.series) == []
    assert project.series.tests == ("test/test_moe.py", "test/test_more.py")
    text = path.read_text().replace(
        'tests = ["test/test_moe.py"]', 'tests = ["test/test_more.py"]'
    )
    path.write_text(text)
    (problem,) = series_module.problems(project.series)
    assert problem.startswith("test/test_more.py: a test of 110-second that is not")


@pytest.mark.parametrize(
    ("labels", "good"),
    [
        (["module: nn", "topic: not user facing"], True),
        (["release notes: nn", "topic: bug fixes"], True),
        (["module: nn", "topic: bug fixes"], False),
        (["release notes: nn", "topic: not user facing"], False),
    ],
)
def test_labels_of_release_notes(project, labels, good):
    path = project.root / "torch_patches/series.toml"
    text = ", ".join(f'"{label}"' for label in labels)
    path.write_text(f"{path.read_text()}labels = [{text}]\n")
    assert (series_module.problems(project.series) == []) is good
