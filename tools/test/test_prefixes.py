"""verify --each: which prefixes run, what is remembered, what a failure ends."""

import pytest

from staging import prefixes, testing
from staging.console import Console
from staging.errors import StageError


NAMES = ["100-first", "110-second"]


@pytest.fixture
def ran(monkeypatch):
    """Replaces the test runner; collects what it was asked to run."""
    calls, failing = [], []

    def run(workspace, staged, tests, arguments, jobs):
        site = next(workspace.venv.glob("lib/python*/site-packages"))
        text = (site / "torch/overrides.py").read_text()
        calls.append((list(tests), "second = True" in text))
        return int(any(test in failing for test in tests))

    monkeypatch.setattr(testing, "run", run)
    calls_and_failures = calls, failing
    return calls_and_failures


def run(project, names=NAMES, **arguments):
    console = Console(quiet=True)
    found = prefixes.run(project.workspace, project.stack, names, console, **arguments)
    return [result.status for result in found]


def test_each_prefix_is_staged_and_tested(project, ran):
    project.setup()
    tip = project.checkout().git.resolve("HEAD")
    assert run(project) == ["passed", "passed"]
    assert ran[0] == [(["test/test_moe.py"], True)], "100 has no test of its own"
    assert project.checkout().git.resolve("HEAD") == tip, "the user's build moved"


def test_what_passed_is_not_run_again(project, ran):
    run(project)
    assert run(project) == ["passed before", "passed before"]
    assert len(ran[0]) == 1
    project.write("test/test_moe.py", "def test_moe():\n    assert True\n")
    assert run(project) == ["passed before", "passed"]
    project.write("torch/nn/moe.py", "# the first PR changed\n")
    assert run(project) == ["passed", "passed"]
    assert run(project, redo=True) == ["passed", "passed"]


def test_a_failure_is_not_remembered(project, ran):
    ran[1].append("test/test_moe.py")
    assert run(project) == ["passed", "failed"]
    ran[1].clear()
    assert run(project) == ["passed before", "passed"]


def test_what_contains_a_broken_prefix_is_not_tried(project, ran):
    project.add_third()
    path = project.root / "torch_patches/100-first.patch"
    path.write_text(path.read_text().replace(" line_12 = 12", " line_12 = 0"))
    found = run(project, [*NAMES, "120-third"])
    assert found == ["does not stage", "not tried", "passed"]
    assert ran[0] == [(["test/test_more.py"], False)]


def test_a_smaller_prefix_after_a_larger_one(project, ran):
    run(project)
    assert run(project, ["100-first"], redo=True) == ["passed"]
    overrides = project.workspace.build / "prefix/checkout/torch/overrides.py"
    assert "first = True" in overrides.read_text()
    assert "second = True" not in overrides.read_text()


def test_series_is_staged_without_the_others(project, ran):
    project.add_third()
    stack = project.stack.select(["apart"])
    console = Console(quiet=True)
    prefixes.test(project.workspace, stack, stack.tests, [], console)
    assert ran[0] == [(["test/test_more.py"], False)], "no line of 110"
    assert prefixes.select(project.stack, series=["apart"]) == ["120-third"]
    assert prefixes.select(project.stack, "110", series=["core"]) == ["110-second"]


@pytest.mark.parametrize(
    ("first", "only", "expected"),
    [
        (None, (), NAMES),
        ("110", (), ["110-second"]),
        (None, ("100",), ["100-first"]),
        (None, ("110", "100-first"), NAMES),
    ],
)
def test_selection(project, first, only, expected):
    assert prefixes.select(project.stack, first, only) == expected


def test_selection_of_an_unknown_pr(project):
    with pytest.raises(StageError, match="no PR named '120'"):
        prefixes.select(project.stack, "120", ())
