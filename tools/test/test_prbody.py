"""pr: every section comes from a source, and losing rows are never dropped."""

import json

import pytest

from staging import lint, prbody
from staging.errors import StageError


def write_series(project, fields):
    path = project.root / "torch_patches/series.toml"
    path.write_text(path.read_text() + fields)


def body(project, name="110"):
    return prbody.render(project.stack, project.stack.get(name))


def test_sections_of_a_plain_pr(project):
    text = body(project)
    assert text.startswith("# Add its test\n\nSeries core (oldest at bottom): ")
    assert "* __->__ 110-second: Add its test\n* 100-first: Add moe.py\n" in text
    assert "So that it keeps working." in text
    assert "```\npython test/test_moe.py\n```" in text
    assert "wheel with this change and those below it applied." in text
    assert "stage.py" not in text
    assert "it only adds, no released line changes" in text
    assert "| `test/test_moe.py` | 2 | new, test |" in text
    assert "1 changed lines outside tests" in text


def test_pr_that_stands_alone_has_no_list_of_the_stack(project):
    path = project.root / "torch_patches/series.toml"
    text = path.read_text()
    path.write_text(text.replace("needs = []", "needs = []\nindependent = true"))
    text = body(project)
    assert "Series core" not in text
    assert "wheel with this change applied." in text


def test_fields_of_the_series(project):
    write_series(
        project,
        'labels = ["module: nn", "topic: not user facing"]\nowners = ["someone", "@other"]\nfixes = ["#12"]\n'
        'bc = "Raises where it returned nonsense."\n'
        'support = [["", "CPU"], ["bfloat16", "tested"]]\n'
        'test_plan = ["python test/test_ops.py -k moe"]\n',
    )
    text = body(project)
    assert (
        "Fixes #12\nLabels: `module: nn`, `topic: not user facing`\ncc @someone @other\n"
        in text
    )
    assert "## Backward compatibility\n\nRaises where it returned nonsense." in text
    assert "|  | CPU |\n| --- | --- |\n| bfloat16 | tested |" in text
    assert "```\npython test/test_ops.py -k moe\n```" in text


def test_test_plan_of_the_description_is_not_said_twice(project):
    path = project.root / "torch_patches/110-second.patch"
    plan = (
        "Test plan:\n    python test/test_moe.py\n    python test/test_ops.py -k moe\n\n"
        "The rest.\n\nTests: test/test_moe.py, slowly.\n"
    )
    path.write_text(path.read_text().replace("working.\n", f"working.\n\n{plan}"))
    text = body(project)
    assert "Test plan:" not in text and "Tests:" not in text
    assert (
        "working.\n\nThe rest.\n\n## Test plan\n\ntest/test_moe.py, slowly.\n" in text
    )
    assert "```\npython test/test_moe.py\npython test/test_ops.py -k moe\n```" in text


def test_changed_line_needs_a_statement(project):
    path = project.root / "torch_patches/110-second.patch"
    hunk = path.read_text().replace("+30,5 @@", "+30,4 @@")
    path.write_text(hunk.replace(" line_31 = 31", "-line_31 = 31"))
    assert (
        "**Not stated yet.** It changes released lines of `torch/overrides.py`"
        in body(project)
    )


def test_changed_line_of_an_earlier_pr_was_never_released(project):
    path = project.root / "torch_patches/110-second.patch"
    path.write_text(path.read_text().replace(" line_31 = 31", "-first = True"))
    assert "it only adds, no released line changes" in body(project)


def test_kernels_are_counted_apart(project):
    name = "aten/src/ATen/native/cpu/MoEKernel.cpp"
    project.write(name, "\n" * 300)
    path = project.root / "torch_patches/series.toml"
    path.write_text(path.read_text().replace('["torch/nn/moe.py"]', f'["{name}"]'))
    assert (
        "1 changed lines outside tests, generated files and kernels; 300 lines of kernels."
        in body(project, "100")
    )


def test_results(project):
    rows = [{"shape": [4, 8], "speedup": 1.5}, {"shape": [4, 1], "speedup": 0.5}]
    data = {"command": "python bench.py", "torch": "2.15.0", "rows": rows}
    project.write("benchmarks/results/moe.json", json.dumps(data))
    entry = '{file = "benchmarks/results/moe.json", loses = "speedup < 1"}'
    write_series(project, f"results = [{entry}]\n")
    text = body(project)
    assert (
        "## Benchmarks\n\n`benchmarks/results/moe.json` of the staging repository, torch: 2.15.0\n\n```\npython"
        in text
    )
    assert "| 4 x 1 (**loses**) | 0.5 |\n| 4 x 8 | 1.5 |" in text


def test_results_entry_with_an_unknown_field(project):
    entry = '{file = "benchmarks/results/moe.json", loose = "speedup < 1"}'
    write_series(project, f"results = [{entry}]\n")
    with pytest.raises(StageError, match="110-second: an entry of results .* loose"):
        body(project)


def test_results_file_that_is_missing_or_broken(project):
    write_series(project, 'results = ["benchmarks/results/moe.json"]\n')
    with pytest.raises(StageError, match="moe.json does not exist"):
        body(project)
    project.write("benchmarks/results/moe.json", "{")
    with pytest.raises(StageError, match="benchmarks/results/moe.json: "):
        body(project)


def test_no_description(project):
    (project.root / "torch_patches/110-second.patch").unlink()
    with pytest.raises(StageError, match="no description yet"):
        body(project)


def test_large_pr_is_reported(project):
    assert lint.large_prs(project.stack) == []
    project.write("torch/nn/moe.py", "x = 1\n" * 600)
    project.write("test/test_moe.py", "x = 1\n" * 600)
    (line,) = lint.large_prs(project.stack)
    assert line.startswith("100-first: 601 changed lines outside tests")


def test_new_source_without_a_line_in_the_build_list(project):
    name = "aten/src/ATen/native/MoE.cpp"
    project.write(name, "\n")
    path = project.root / "torch_patches/series.toml"
    path.write_text(
        path.read_text().replace(
            '["torch/nn/moe.py"]', f'["{name}", "torch/nn/moe.py"]'
        )
    )
    (line,) = lint.unlisted_sources(project.stack)
    assert line.startswith(f"100-first: {name} has no line in build_variables.bzl")
    patch = project.root / "torch_patches/100-first.patch"
    hunk = f'@@ -1,2 +1,3 @@\n a\n+    "{name}",\n b\n'
    head = "diff --git a/build_variables.bzl b/build_variables.bzl\n"
    patch.write_text(patch.read_text() + head + hunk)
    assert lint.unlisted_sources(project.stack) == []


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("torch/nn/moe.py", ""),
        ("aten/src/ATen/native/MoEMLP.cpp", ""),
        ("aten/src/ATen/native/cpu/MoEMLPKernel.cpp", "kernel"),
        ("torch/_native/ops/moe/triton_kernels/forward.py", "kernel"),
        ("torch/csrc/inductor/aoti_torch/generated/c_shim_cpu.h", "generated"),
        ("test/expect/HasDecompTest.expect", "generated"),
        ("torch/testing/_internal/moe_reference.py", "test"),
        ("docs/source/nn.md", "docs"),
    ],
)
def test_kinds(path, kind):
    assert prbody.kind_of(path) == kind


def test_large_pr_with_a_reason(project):
    project.write("torch/nn/moe.py", "x = 1\n" * 600)
    path = project.root / "torch_patches/series.toml"
    text = path.read_text()
    at = text.index('name = "110-second"')
    head = text[:at].rstrip().removesuffix("[[pr]]")
    path.write_text(
        f'{head}large = "No part of it works alone."\n\n[[pr]]\n{text[at:]}'
    )
    (line,) = lint.large_prs(project.stack)
    assert line.endswith("; its `large` in series.toml says why")
    assert body(project, "100").count("No part of it works alone.") == 1


def test_lines_of_a_later_pr_are_not_counted(project):
    project.write("torch/nn/moe.py", "x = 1\ny = 2\nz = 3\n")
    patch = project.root / "torch_patches/110-second.patch"
    hunk = "@@ -1,2 +1,3 @@\n x = 1\n y = 2\n+z = 3\n"
    head = "diff --git a/torch/nn/moe.py b/torch/nn/moe.py\n"
    patch.write_text(patch.read_text() + head + hunk)
    assert "| `torch/nn/moe.py` | 2 | new |" in body(project, "100")
    assert "| `torch/nn/moe.py` | 1 |  |" in body(project)
