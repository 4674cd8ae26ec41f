"""Tests that run in forks: their statuses, their output, and that they share nothing."""

import signal
import sys

import pytest

from staging.forkserver import ForkServer


FILE = """
import os, signal
import pytest, torch

def test_one(capfd):
    assert not torch.seen and os.getcwd() == FOLDER
    torch.seen.append(os.getpid())
    if HOW == "fail":
        raise ValueError("wrong")
    if HOW == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.fixture
def server(tmp_path):
    package = tmp_path / "site" / "torch" / "testing" / "_internal"
    package.mkdir(parents=True)
    (tmp_path / "site" / "torch" / "__init__.py").write_text("seen = []\n")
    (package / "common_device_type.py").write_text("")
    server = ForkServer(sys.executable, {"PYTHONPATH": str(tmp_path / "site")})
    yield server
    server.close()
    assert not server.is_alive()


def test_statuses_and_output(server, tmp_path):
    output = tmp_path / "output"
    for how, status, text in (
        ("pass", 0, "1 passed"),
        ("fail", 1, "ValueError: wrong"),
        ("kill", -9, ""),
        ("pass", 0, "1 passed"),
    ):
        file = tmp_path / f"test_{how}.py"
        file.write_text(f"FOLDER, HOW = {str(tmp_path)!r}, {how!r}\n{FILE}")
        args = [str(file), "-q", "-p", "no:cacheprovider"]
        assert server.run(args, tmp_path, output) == status, output.read_text()
        assert text in output.read_text() and "warning" not in output.read_text()
        assert server.is_alive()


def test_scripts(server, tmp_path):
    script, output = tmp_path / "folder" / "script.py", tmp_path / "output"
    script.parent.mkdir()
    (script.parent / "neighbour.py").write_text("NAME = 'next door'\n")
    for end, status, text in (
        ("", 0, "next door []\n"),
        ("sys.exit(3)", 3, "next door []\n"),
        ("undefined", 1, "NameError"),
    ):
        script.write_text(
            "import neighbour, os, sys, torch\n"
            "assert __name__ == '__main__' and [os.path.abspath(__file__)] == sys.argv\n"
            "print(neighbour.NAME, torch.seen)\n"
            f"torch.seen.append(1)\n{end}\n"
        )
        assert server.run_script(script, output) == status, output.read_text()
        assert text in output.read_text()
    script.write_text("while True: pass\n")
    assert server.run_script(script, output, seconds=1) == -signal.SIGALRM


def test_a_server_that_cannot_import(tmp_path):
    server = ForkServer(sys.executable, {"PYTHONPATH": str(tmp_path)})
    assert server.run(["test_none.py"], tmp_path, tmp_path / "output") == 1
    assert not server.is_alive()
    server.close()
