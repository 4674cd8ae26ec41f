"""pytest in forks of a process that has imported PyTorch's test framework.

Every test file still has a process of its own, without the imports, which are most of what a
small one takes. What has to be in the environment before them must be in the server's.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path


class ForkServer:
    """Runs one pytest at a time."""

    def __init__(self, python: Path, env: Mapping[str, str]) -> None:
        ours, theirs = socket.socketpair()
        command = [str(python), __file__, str(theirs.fileno())]
        with theirs:
            self._process = subprocess.Popen(
                command, env=env, pass_fds=[theirs.fileno()]
            )
        self._channel = ours.makefile("rw")

    def run(self, args: list[str], folder: Path, output: Path | None) -> int:
        """Exit status of ``pytest args`` in ``folder``, negative for a signal.

        Args:
            output: where stdout and stderr go; None means where ours go.
        """
        job = {"args": args, "folder": str(folder), "output": output and str(output)}
        try:
            print(json.dumps(job), file=self._channel, flush=True)
            answer = self._channel.readline()
        except OSError:
            answer = ""
        # Without an answer the server is gone.
        return int(answer) if answer else self._process.wait() or 1

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        # It ends with the stream.
        with contextlib.suppress(OSError):
            self._channel.close()
        self._process.wait()


def _run_here(args: list[str], folder: str, output: str | None) -> None:
    import pytest

    if output is not None:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, 1)
        os.dup2(file, 2)
    os.chdir(folder)
    # The plugins of pytest were imported before it could rewrite their assertions.
    warning = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    sys.exit(pytest.main([*args, "-W", warning]))


def _serve(channel: socket.socket) -> None:
    # All that a TestCase imports in setUp, and Triton for compiled kernels, not its interpreter.
    for module in ("pytest", "torch.testing._internal.common_device_type"):
        importlib.import_module(module)

    stream = channel.makefile("rw")
    for line in stream:
        child = os.fork()
        if not child:
            stream.close()
            channel.close()
            _run_here(**json.loads(line))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, file=stream, flush=True)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
