"""Every lint rule finds what it is for and passes the corrected text."""

import ast
import json
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest

from staging import evidence


LINTERS = Path(__file__).parents[1] / "staging/linters"
GOOD_TEST = """\
# Owner(s): ["module: nn"]
from torch.testing._internal.common_utils import run_tests


if __name__ == "__main__":
    run_tests()
"""


def lint(linter, folder, *words):
    """Runs one adapter; returns its findings."""
    done = subprocess.run(
        [sys.executable, LINTERS / linter, *words],
        cwd=folder,
        capture_output=True,
        text=True,
        env={"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin"},
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def names(linter, folder, text, file="a.py", *words):
    path = folder / file
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return [finding["name"] for finding in lint(linter, folder, *words, file)]


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("x = 1\n", []),
        ("x = 1", ["whitespace"]),
        ("x = 1  \n", ["whitespace"]),
        ("if x:\n\ty = 1\n", ["tab"]),
        ("x = '\u00e9'\n", ["ascii"]),
        ("x = '" + "/ho" + "me/someone/x'\n", ["machine path"]),
        ("# see py" + "pi.org\n", ["registry"]),
        ("x = 1\n" * 801, ["file length"]),
        ("def f():\n" + "    x = 1\n" * 91, ["function length"]),
        ("def f(:\n", ["syntax"]),
    ],
)
def test_text_rules(tmp_path, text, expected):
    assert names("text.py", tmp_path, text) == expected


def test_whitespace_fix(tmp_path):
    (tmp_path / "a.md").write_text("a  \nb\n\n\n")
    (finding,) = lint("text.py", tmp_path, "a.md")
    assert finding["replacement"] == "a\nb\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (GOOD_TEST, []),
        (GOOD_TEST.replace("# Owner", "# Author"), ["owner"]),
        (GOOD_TEST.replace("module: nn", "nn"), ["owner"]),
        (GOOD_TEST.replace("    run_tests()", "    pass"), ["main"]),
        (GOOD_TEST.replace('if __name__ == "__main__":', "if True:"), ["main"]),
    ],
)
def test_test_file_rules(tmp_path, text, expected):
    assert names("test_files.py", tmp_path, text, "test/test_a.py") == expected


def test_ruff_rules(tmp_path):
    text = "import os\nimport torch\nimport numpy\n\n\nx = torch.ones(1)\n"
    found = names("ruff_adapter.py", tmp_path, text, "a.py", "check")
    assert set(found) == {"I001", "F401"}
    found = names("ruff_adapter.py", tmp_path, "x = {'a':1}\n", "b.py", "format")
    assert found == ["format"]


def test_types(tmp_path):
    text = "def f(x: int) -> str:\n    return x\n"
    assert names("pyrefly_adapter.py", tmp_path, text) == ["bad-return"]
    assert names("pyrefly_adapter.py", tmp_path, text.replace("str", "int")) == []


def test_spelling(tmp_path):
    assert names("codespell_adapter.py", tmp_path, "# teh offs\n") == ["spelling"]


def test_stack_rules(project):
    pins = "click==8.5.1\nrich==15.0.0\n"
    project.write("tools/requirements.txt", pins)
    assert lint("stack.py", project.root) == []
    project.write("tools/requirements.txt", "rich==15.0.0\nclick>=8\n")
    project.write("torch/nn/orphan.py", "\n")
    path = project.root / "torch_patches/110-second.patch"
    path.write_text(path.read_text().replace("So that it keeps working.\n", ""))
    found = {finding["name"] for finding in lint("stack.py", project.root)}
    assert found == {"pin", "pin order", "series", "description"}


def test_changed_released_line_without_a_statement(project):
    for name in ("requirements.txt", "tools/requirements.txt"):
        project.write(name, "")
    path = project.root / "torch_patches/110-second.patch"
    hunk = path.read_text().replace("+30,5 @@", "+30,4 @@")
    path.write_text(hunk.replace(" line_31 = 31", "-line_31 = 31"))
    assert [f["name"] for f in lint("stack.py", project.root)] == ["110-second"]
    series = project.root / "torch_patches/series.toml"
    series.write_text(f'{series.read_text()}bc = "Nothing uses line_31."\n')
    assert lint("stack.py", project.root) == []


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("# A\n\nTakes 36.1 ms.\n", ["results reference"]),
        ("# A\n\nTakes 36.1 ms (`benchmarks/moe/results/a.json`).\n", []),
        ("# A\n\nSee `results/a.json`.\n\n# B\n\nIt is 1.3x.\n", ["results reference"]),
        ("# A\n\nSee benchmarks/moe/results/b.json.\n", ["results file"]),
        ("# A\n\n6 GB of disk, about two minutes, torch 2.15.0.\n", []),
    ],
)
def test_results_references(project, text, expected):
    for name in ("requirements.txt", "tools/requirements.txt"):
        project.write(name, "")
    project.write("benchmarks/moe/results/a.json", "{}\n")
    path = project.root / "torch_patches/series.toml"
    path.write_text(path.read_text().replace("benchmarks/results/", "benchmarks/"))
    project.write("README.md", text)
    assert [f["name"] for f in lint("stack.py", project.root)] == expected


def test_drift_table(project):
    project.write("tools/requirements.txt", "")
    files = [{"path": "torch/overrides.py", "status": "clean", "hunks": []}]
    patches = [
        {"name": name, "status": "clean", "files": files}
        for name in ("100-first", "110-second")
    ]
    version = {"version": "2.14.1", "patches": patches}
    data = {"command": "stage.py drift 2.14.1", "versions": [version]}
    project.write("torch_patches/drift.json", json.dumps(data))
    table = "| PRs | 2.14.1 |\n| --- | --- |\n| 100, 110 | clean |\n"
    project.write("CONTRIBUTING.md", f"# Drift\n\n{table}")
    assert lint("stack.py", project.root) == []
    project.write("CONTRIBUTING.md", table.replace("clean", "fuzzy"))
    assert [f["name"] for f in lint("stack.py", project.root)] == ["drift table"]
    del patches[1]
    project.write("torch_patches/drift.json", json.dumps(data))
    project.write("CONTRIBUTING.md", table.replace("100, 110", "100"))
    (finding,) = lint("stack.py", project.root)
    assert (
        finding["name"] == "drift" and "2.14.1: of other PRs" in finding["description"]
    )


def test_page_of_results(project):
    project.write("tools/requirements.txt", "")
    folder = project.root / "benchmarks/moe/results"
    project.write(
        "benchmarks/moe/results/a.json", '{"command": "x", "rows": [{"n": 1}]}'
    )
    project.write(
        "benchmarks/moe/results/notes.toml", '["a.json"]\nwhat = "A."\ntables = [{}]\n'
    )
    series = project.root / "torch_patches/series.toml"
    text = series.read_text()
    if "benchmarks/" not in text:
        text = text.replace("[project]\n", '[project]\nnon_landing = ["benchmarks/"]\n')
        series.write_text(text)

    def rules():
        return [f["name"] for f in lint("stack.py", project.root)]

    assert "results" in rules(), "there is no page"
    page = evidence.render(project.stack)
    project.write("RESULTS.md", page)
    assert "results" not in rules()
    project.write("RESULTS.md", page + "more\n")
    assert "results" in rules()
    (folder / "a.json").write_text('{"rows": [{"n": 1}]}')
    assert "results" in rules(), "a file without a command"


def test_citations_of_what_does_not_land(project):
    project.write("tools/requirements.txt", "")
    (landing,) = {
        name
        for pr in project.stack.prs
        for name in pr.files
        if name.startswith(("aten/", "torch/"))
    }
    text = (project.root / landing).read_text()
    assert "citation" not in [f["name"] for f in lint("stack.py", project.root)]
    for cited in ("results/a.json of the RFC", project.stack.non_landing[0]):
        project.write(landing, f"{text}# See {cited}.\n")
        found = [f for f in lint("stack.py", project.root) if f["name"] == "citation"]
        assert len(found) == 1 and "does not land" in found[0]["description"]


def test_imports_from_each_other():
    # Modules of tests, benchmarks and clients find each other through sys.path, so no type checker
    # resolves them, and CI does not run all of them.
    root, modules = Path(__file__).parents[2], defaultdict(set)
    files = [
        f for top in ("benchmarks", "test", "tools") for f in (root / top).rglob("*.py")
    ]
    trees = {file: ast.parse(file.read_text()) for file in files}
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
                modules[file.stem].add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                modules[file.stem].add(node.id)
            elif isinstance(node, (ast.Import, ast.ImportFrom)):
                modules[file.stem] |= {a.asname or a.name for a in node.names}
    missing = [
        f"{file.relative_to(root)}: {alias.name} of {node.module}"
        for file, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module in modules
        for alias in node.names
        if alias.name not in modules[node.module]
    ]
    assert not missing
