"""The walk through CONTRIBUTING.md, from an edit to a pull request, as it stands there.

The commands are read out of the document and run in that order; only names are
replaced by those of the synthetic stack and upstream.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from staging import cli, lint, testing


DOCUMENT = Path(__file__).parents[2] / "CONTRIBUTING.md"
HEADING = "## One change, from edit to pull request"
NAMES = {
    "130-moe-functional": "100-first",
    "130": "100",
    "test/nn/test_moe_functional.py": "test/test_moe.py",
    "../pytorch": "{upstream}",
}
KERNEL = "torch/nn/moe.py"
RELEASED = "torch/overrides.py"


def commands():
    """The lines of the code block, without comments."""
    text = DOCUMENT.read_text()
    block = re.search(rf"{HEADING}\n.*?```\n(.*?)```", text, re.DOTALL)
    assert block, f"{DOCUMENT.name} has no code block below {HEADING!r}"
    return [line.partition("#")[0].split() for line in block[1].splitlines()]


def edit(project, path):
    """A line more: of a new file here, of a released one in the checkout."""
    name = RELEASED if path.startswith("build/checkout/") else KERNEL
    folder = project.workspace.checkout if name == RELEASED else project.root
    file = folder / name
    file.write_text(f"walked = True\n{file.read_text()}")


@pytest.fixture
def stage(project, monkeypatch):
    """Runs `stage.py` on the project; returns the exit status."""
    monkeypatch.setattr(cli, "ROOT", project.root)
    monkeypatch.setenv("MOE_STAGING_CACHE", str(project.cache))
    monkeypatch.setattr(lint, "run", lambda repo, apply: 0)
    monkeypatch.setattr(testing, "run", lambda *arguments: 0)

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["stage.py", *arguments])
        try:
            cli.main()
        except SystemExit as leave:
            return leave.code or 0
        return 0

    return run


def git(folder, *arguments):
    subprocess.run(
        ["git", "-c", "user.name=A", "-c", "user.email=a@example.com", *arguments],
        cwd=folder,
        check=True,
        capture_output=True,
    )


def test_documented_commands(project, upstream, stage, capsys):
    git(project.root, "init", "-q")
    (project.root / ".gitignore").write_text("build/\n")
    git(project.root, "add", "-A")
    git(project.root, "commit", "-q", "-m", "before")
    seen = []
    for words in commands():
        words = [NAMES.get(word, word) for word in words]
        words = [word.format(upstream=upstream.path) for word in words]
        if words[0] == "$EDITOR":
            edit(project, words[1])
        elif words[0] == "git":
            git(project.root, *words[1:], "-m", "walk")
        else:
            assert words[:2] == ["python3", "tools/stage.py"]
            assert stage(*words[2:]) == 0, capsys.readouterr().err
        seen.append(words[2] if words[0] == "python3" else words[0])
    order = "setup $EDITOR $EDITOR refresh verify test lint git apply pr"
    assert " ".join(seen) == order
    # What is in the real checkout is what is staged, both edits included.
    tree = project.checkout().git.resolve("HEAD^{tree}")
    assert upstream.tree() == tree
    for name in (KERNEL, RELEASED):
        assert upstream.read(name).startswith("walked = True\n")
    assert (
        "+walked = True" in (project.root / "torch_patches/100-first.patch").read_text()
    )
    assert "# Add moe.py\n" in capsys.readouterr().out
    # Nothing is left to export, and the bytes are the ones committed.
    assert stage("export") == 0
    assert "nothing changed" in capsys.readouterr().out
    status = subprocess.run(
        ["git", "status", "--porcelain"], cwd=project.root, capture_output=True
    )
    assert status.stdout == b""
