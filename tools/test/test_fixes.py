"""Each PR of the series `fixes` can be opened alone: small, and its programs show what it mends."""

import contextlib
import os
import re
import textwrap
from collections import Counter
from pathlib import Path

import pytest

from staging import baseenv, config, prbody, series
from staging.forkserver import ForkServer


ROOT = Path(__file__).parents[2]
WORKSPACE = config.workspace(ROOT)
STACK = series.load(ROOT)
FIXES = [pr for pr in STACK.prs if pr.series == "fixes"]
STAGED = WORKSPACE.venv / "bin" / "python"
# What a reader who has only PyTorch knows nothing of, or has no reason to care about.
OURS = re.compile(
    r"stag(e|ed|er|ing)\b|tools/|this (repository|stack)|\bslot\b|\bMoE\b|(?i:experts?\b)"
)
CHANGED_LINES = 150


def programs(pr):
    """The indented blocks of a description that are programs."""
    blocks = re.findall(r"(?:^(?:    .*)?\n)+", STACK.patch(pr).message, re.MULTILINE)
    return [textwrap.dedent(b) for b in blocks if "import" in b]


CASES = [
    pytest.param(text, id=f"{pr.name}-{i}")
    for pr in FIXES
    for i, text in enumerate(programs(pr))
]


@pytest.mark.parametrize("pr", FIXES, ids=lambda pr: pr.name)
def test_is_small_and_stands_alone(pr):
    sizes = Counter()
    for _, lines, kind in prbody.file_sizes(STACK, pr):
        sizes[kind] += lines
    assert sizes[""] <= CHANGED_LINES
    body = prbody.render(STACK, pr)
    assert not (found := OURS.search(body)), found
    for other in STACK.prs:
        assert other.name not in body
    assert programs(pr), "no program shows what is wrong"


@pytest.mark.parametrize("pr", FIXES, ids=lambda pr: pr.name)
def test_needs_no_test_file_of_another_pr(pr):
    others = {
        Path(path).stem for other in STACK.prs if other != pr for path in other.files
    }
    texts = [(ROOT / path).read_text() for path in pr.files if path.endswith(".py")]
    imported = re.findall(r"(?m)^(?:from|import) (test_\w+)", "\n".join(texts))
    assert others.isdisjoint(imported)


@pytest.fixture(scope="module")
def servers():
    """Of the released wheel and the staged one: most of a program's time is torch's import."""
    env = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
    pythons = (baseenv.locate(WORKSPACE, STACK).python, STAGED)
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(contextlib.closing(ForkServer(python, env, ["torch"])))
            for python in pythons
        ]


@pytest.mark.skipif(not STAGED.exists(), reason="no staged environment")
@pytest.mark.parametrize("text", CASES)
def test_program_fails_on_the_released_wheel_only(text, servers, tmp_path):
    script, output = tmp_path / "program.py", tmp_path / "output"
    script.write_text(text)
    released, staged = servers
    status, said = released.run_script(script, output), output.read_text()
    assert status == 1 and "Error" in said, said
    assert staged.run_script(script, output) == 0, output.read_text()
