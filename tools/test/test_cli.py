"""The command line: help, wrong arguments, one failure = one message."""

import errno
import os
import sys
import time
from pathlib import Path

import filelock
import pytest
from click.testing import CliRunner

from staging import cli, console as console_module, pipeline
from staging.config import read_json
from staging.errors import ArgumentError, StageError


VERBS = sorted(cli.cli.commands)


def call(monkeypatch, *arguments):
    """Runs main() and returns the exit status."""
    monkeypatch.setattr(sys, "argv", ["stage.py", *arguments])
    with pytest.raises(SystemExit) as leave:
        cli.main()
    return leave.value.code


def test_a_long_step_says_so(monkeypatch, capsys):
    monkeypatch.setattr(console_module, "_LINE_EVERY", 0.01)
    console = console_module.Console()
    with console.step("one") as update:
        update("detail")
        time.sleep(0.2)
    with console.progress("two", 5) as advance:
        advance(3, "file")
        time.sleep(0.2)
    lines = capsys.readouterr().err.splitlines()
    assert "... one  0 s  detail" in lines and "... two  0 s  3/5 file" in lines


def test_verbs():
    assert VERBS == [
        "apply", "drift", "export", "lint", "pr", "python", "refresh", "results",
        "run", "setup", "test", "verify",
    ]  # fmt: skip


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help_with_an_example(verb):
    result = CliRunner().invoke(cli.cli, [verb, "--help"], prog_name="stage.py")
    assert result.exit_code == 0
    assert f"Example: python3 tools/stage.py {verb}" in result.output


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["nonsense"], "No such command 'nonsense'"),
        (["setup", "--nonsense"], "No such option"),
        (["setup", "--capability", "sse"], "'sse' is not one of 'all', 'host'"),
        (["refresh"], "give either a PR or --regenerate-shims"),
        (["test", "-k", "bf16"], "options of pytest follow a double dash"),
        (["apply"], "Missing argument 'CHECKOUT'"),
        (["apply", "a", "b"], "unexpected extra argument (b)"),
        (["apply", ".", "--continue", "--abort"], "give either --continue or --abort"),
        (["drift"], "name a version or a --checkout, e.g. drift 2.14.1"),
        (["drift", "--json"], "requires an argument"),
        (["pr"], "give either a PR or --series"),
        (["pr", "110", "120"], "unexpected extra argument (120)"),
        (["verify", "--only", "110"], "--only, --redo and --jobs go with --each"),
        (["verify", "--each", "--from", "1", "--only", "2"], "give either --from or"),
        (["verify", "110"], "unexpected extra argument (110)"),
        (["export", "110"], "unexpected extra argument (110)"),
        (["lint", "--fix"], "No such option"),
        (["refresh", "110", "120"], "unexpected extra argument (120)"),
        (["refresh", "--upstream", "."], "give either a PR or --regenerate-shims"),
        (["test", "--upstream"], "requires an argument"),
        (["test", "--json", "x.json"], "--json goes with --upstream"),
        (
            ["test", "--upstream", ".", "--series", "moe-core"],
            "give either --upstream or",
        ),
    ],
)
def test_wrong_arguments(monkeypatch, capsys, arguments, expected):
    assert call(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.strip().splitlines()) == 1


def test_unknown_test_path(monkeypatch, capsys):
    assert call(monkeypatch, "test", "test/absent.py") == 2
    assert "no test file or folder 'test/absent.py'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("failure", "expected"),
    [
        (StageError("broken", hint="mend it"), "error: broken\nfix: mend it\n"),
        (OSError(errno.ENOSPC, "full", "x"), "error: no space left on the disk of x"),
        (OSError(errno.ENOTDIR, "no folder", "x"), "error: no folder: x\n"),
        (
            OSError(errno.EROFS, "read-only", "x"),
            "error: cannot write x: read-only\nfix:",
        ),
    ],
)
def test_failure_is_one_message(monkeypatch, capsys, failure, expected):
    def fail(*args, **kwargs):
        raise failure

    monkeypatch.setattr(pipeline, "options", fail)
    assert call(monkeypatch, "setup") == 1
    error = capsys.readouterr().err
    assert error.startswith(expected)
    assert "Traceback" not in error


def test_output_goes_where_it_is_told(tmp_path):
    link, target = tmp_path / "link", tmp_path / "target"
    link.symlink_to(target)
    cli._write_output(link, "text")
    assert link.is_symlink() and target.read_text() == "text"
    cli._write_output(Path("/dev/null"), "text")
    assert Path("/dev/null").is_char_device()
    with pytest.raises(
        ArgumentError, match=f"must be a file, got the folder {tmp_path}"
    ):
        cli._write_output(tmp_path, "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "target"]


@pytest.mark.parametrize("data", (b"", b"{", b"\xff", b"[1]", b"3"))
def test_spoiled_state_is_no_state(tmp_path, data):
    (tmp_path / "state.json").write_bytes(data)
    assert read_json(tmp_path / "state.json") == {}


def test_arguments_of_pytest(monkeypatch):
    words = ["test", "test/test_a.py", "--", "-k", "bf16"]
    monkeypatch.setattr(sys, "argv", ["stage.py", *words])
    given = ("test/test_a.py", "-k", "bf16")
    assert cli._split_at_dashes(given) == (["test/test_a.py"], ["-k", "bf16"])


def test_second_call_waits_or_fails(project, console, capfd):
    project.workspace.build.mkdir()
    held = filelock.FileLock(project.workspace.build / ".lock")
    with held:
        with pytest.raises(StageError, match="another stage.py is working in"):
            with pipeline.locked(project.workspace, console, wait=False):
                pass
        pid = os.fork()
        if pid == 0:
            with pipeline.locked(project.workspace, console):
                os._exit(7)
        said, deadline = "", time.monotonic() + 60
        while "waiting for it" not in said and time.monotonic() < deadline:
            time.sleep(0.05)
            said += capfd.readouterr().err
        assert "waiting for it" in said
        assert os.waitpid(pid, os.WNOHANG) == (0, 0)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 7


def test_options_stay_in_force(project):
    workspace = project.workspace
    assert pipeline.options(workspace, None, None).capability == "host"
    project.setup(options=pipeline.options(workspace, "host", True))
    project.setup()
    kept = pipeline.options(workspace, None, None)
    assert (kept.capability, kept.ndebug) == ("host", True)
    assert pipeline.options(workspace, None, False).capability == "host"


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["pr", "999"], "no PR named '999'"),
        (["pr", "--series", "less"], "no series named 'less'"),
        (["drift", "2.14.1", "--series", "less"], "no series named 'less'"),
        (["test", "--series", "less"], "no series named 'less'"),
        (["apply", "/absent"], "no folder /absent"),
        (["verify", "--each", "--only", "999"], "no PR named '999'"),
        (["drift", "newest"], "'newest' is no version of torch"),
        (["test", "--upstream", "/absent"], "/absent has no test/test_ops.py"),
    ],
)
def test_wrong_values_say_what_to_do(monkeypatch, capsys, arguments, expected):
    assert call(monkeypatch, *arguments) == 2
    error = capsys.readouterr().err
    assert expected in error
    assert len(error.strip().splitlines()) == 1
