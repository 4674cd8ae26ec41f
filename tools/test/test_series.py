"""series.toml: what is accepted, and the bijection with the files."""

import pytest

from staging import prbody, series as series_module
from staging.errors import StageError


def test_consistent_stack_has_no_problem(project):
    assert series_module.problems(project.stack) == []
    assert project.stack.tests == ("test/test_moe.py",)


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
    (problem,) = series_module.problems(project.stack)
    assert problem.startswith(expected)


def test_non_landing_folder_is_exempt(project):
    project.write("benchmarks/results/a.json", "{}\n")
    assert series_module.problems(project.stack) == []
    project.write("benchmarks/other.py", "\n")
    assert len(series_module.problems(project.stack)) == 1


def test_binary_data_does_not_land(project):
    (project.root / "torch/nn/moe.py").write_bytes(b"PK\3\4\0\0")
    (problem,) = series_module.problems(project.stack)
    assert problem.startswith("torch/nn/moe.py: binary data does not land")
    (project.root / "benchmarks/results").mkdir(parents=True, exist_ok=True)
    (project.root / "benchmarks/results/a.npz").write_bytes(b"PK\3\4\0\0")
    assert len(series_module.problems(project.stack)) == 1


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("torch/nn/moe.py", "100-first: torch/nn/moe.py is listed"),
        ("torch_patches/110-second.patch", "torch_patches/110-second.patch: missing"),
    ],
)
def test_named_file_that_is_missing(project, name, expected):
    (project.root / name).unlink()
    (problem,) = series_module.problems(project.stack)
    assert problem.startswith(expected)


def test_file_of_two_prs(project):
    path = project.root / "torch_patches/series.toml"
    path.write_text(
        path.read_text().replace(
            '["test/test_moe.py"]', '["test/test_moe.py", "torch/nn/moe.py"]', 1
        )
    )
    (problem,) = series_module.problems(project.stack)
    assert problem == "torch/nn/moe.py: listed by 100-first and by 110-second"


def test_import_of_a_pr_that_is_not_below(project):
    assert project.stack.owner("torch/nn/moe.py").name == "100-first"
    project.write(
        "torch/nn/moe.py", "import torch.nn.later\nfrom torch.nn import later\n"
    )
    assert series_module.problems(project.stack) == []
    path = project.root / "torch_patches/series.toml"
    files = '["test/test_moe.py"]'
    path.write_text(
        path.read_text().replace(files, '["test/test_moe.py", "torch/nn/later.py"]', 1)
    )
    project.write("torch/nn/later.py", "import torch.nn.moe\n")
    (problem,) = series_module.problems(project.stack)
    assert problem.startswith(
        "torch/nn/moe.py: imports torch/nn/later.py of 110-second, which 100-first does not"
    )


LISTS = """\
diff --git a/lists.bzl b/lists.bzl
--- a/lists.bzl
+++ b/lists.bzl
@@ -7,{} +7,{} @@
"""


@pytest.mark.parametrize(
    ("series", "lines", "expected"),
    [
        ("core", " a\n b\n+c\n d\n e\n", []),
        ("core", " a\n b\n+c\n e\n", ["lists.bzl is as it was before 100-first there"]),
        ("apart", " a\n b\n+c\n e\n", []),
        (
            "apart",
            " a\n b\n+c\n d\n e\n",
            ["lists.bzl is as 100-first leaves it, which is not below"],
        ),
    ],
)
def test_hunks_of_two_prs_for_a_file_the_wheel_lacks(project, series, lines, expected):
    project.add_third(f'series = "{series}"')
    project.edit_lacking("100-first", LISTS.format(3, 4) + " a\n b\n+d\n e\n")
    count = lines.count("\n")
    project.edit_lacking("120-third", LISTS.format(count - 1, count) + lines)
    found = series_module.problems(project.stack)
    assert found == [f"torch_patches/120-third.patch: {text}" for text in expected]


def test_patch_that_adds_a_file(project):
    path = project.root / "torch_patches/110-second.patch"
    new = "diff --git a/torch/x.py b/torch/x.py\nnew file mode 100644\n"
    path.write_text(path.read_text() + new + "--- /dev/null\n+++ b/torch/x.py\n")
    (problem,) = series_module.problems(project.stack)
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
    assert series_module.problems(project.stack) == expected


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
    assert project.stack.get("110").name == "110-second"
    assert [pr.name for pr in project.stack.upto("100").prs] == ["100-first"]
    with pytest.raises(StageError, match="no PR named '120'.*there are: 100, 110"):
        project.stack.get("120")


def test_tool_caches_are_not_sources(project):
    project.write("test/.pytest_cache/v/lastfailed", "{}\n")
    project.write("torch/nn/__pycache__/moe.cpython-311.pyc", "")
    assert series_module.problems(project.stack) == []


def names(stack):
    return [pr.name.split("-")[0] for pr in stack.prs]


def test_a_test_may_prove_a_later_pr_too(project):
    project.add_third('series = "more"')
    path = project.root / "torch_patches/series.toml"
    path.write_text(
        path.read_text().replace('_more.py"]', '_more.py", "test/test_moe.py"]')
    )
    path.write_text(
        path.read_text().replace(
            'files = ["test/test_more.py", "test/test_moe.py"]',
            'files = ["test/test_more.py"]',
        )
    )
    assert series_module.problems(project.stack) == []
    assert project.stack.tests == ("test/test_moe.py", "test/test_more.py")
    path.write_text(path.read_text().replace('series = "more"', 'series = "apart"'))
    (problem,) = series_module.problems(project.stack)
    assert problem.startswith("test/test_moe.py: a test of 120-third that is not among")


def test_series_and_what_it_needs(project):
    project.add_third()
    stack = project.stack
    assert names(stack.select(["apart"])) == ["120"]
    assert names(stack.select(["core"])) == ["100", "110"]
    assert names(stack.select(["more"])) == ["100", "110"], "what it needs"
    assert names(stack.select(["more", "apart"])) == ["100", "110", "120"]
    assert names(stack.prefix("120")) == ["120"]
    assert [names(branch) for branch in stack.branches()] == [["100", "110"], ["120"]]
    with pytest.raises(StageError, match="no series named 'les'.*core, more, apart"):
        stack.select(["les"])


def test_pr_that_needs_further_series(project):
    project.add_third('series = "apart"\nneeds = ["more"]')
    stack = project.stack
    assert names(stack.select(["apart"])) == []
    assert [pr.name for pr in stack.left_out(["apart"])] == ["120-third"]
    assert names(stack.select(["apart", "more"])) == ["100", "110", "120"]
    assert names(stack.prefix("120")) == ["100", "110", "120"]


@pytest.mark.parametrize(
    ("old", "new", "expected"),
    [
        ('needs = ["core"]', 'needs = ["kern"]', "more: there is no series 'kern'"),
        ('series = "core"', 'series = "kern"', "100-first: there is no series 'kern'"),
        (
            'name = "core"\nneeds = []',
            'name = "core"\nneeds = ["apart"]',
            "100-first: needs apart, but 120-third is later",
        ),
        (
            'why = "What it',
            'because = "What it',
            "series core has the fields name, needs,",
        ),
    ],
)
def test_series_that_cannot_be(project, old, new, expected):
    project.add_third()
    path = project.root / "torch_patches/series.toml"
    path.write_text(path.read_text().replace(old, new, 1))
    try:
        problem = series_module.problems(project.stack)[0]
    except StageError as error:
        problem = error.message
    assert expected in problem


def test_series_whose_prs_do_not_build_on_each_other(project):
    project.add_third()
    path = project.root / "torch_patches/series.toml"
    text = path.read_text().replace(
        'name = "core"\nneeds = []', 'name = "core"\nneeds = ["apart"]'
    )
    path.write_text(text)
    assert "120-third is later" in series_module.problems(project.stack)[0]
    text = text.replace('name = "apart"', 'name = "apart"\nindependent = true')
    path.write_text(text)
    assert series_module.problems(project.stack) == []
    assert names(project.stack.prefix("110")) == ["100", "110"]


def test_test_that_stays_here_proves_a_pr(project):
    path = project.root / "torch_patches/series.toml"
    project.write("test/test_records.py", "def test_record():\n    pass\n")
    tests = '["test/test_moe.py", "test/test_records.py"]'
    text = path.read_text().replace('tests = ["test/test_moe.py"]', f"tests = {tests}")
    text = text.replace("non_landing = [", 'non_landing = ["test/test_records.py", ')
    path.write_text(text)
    assert series_module.problems(project.stack) == []
    assert "test/test_records.py" in project.stack.tests
    assert "test_records" not in prbody.render(project.stack, project.stack.get("110"))


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
    assert (series_module.problems(project.stack) == []) is good
