"""pytest in forks of a process that has imported PyTorch's test framework, or scripts.

Every test file still has a process of its own, without the imports, which are most of what a
small one takes. What has to be in the environment before them must be in the server's.
"""

import atexit
import contextlib
import gc
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path


# All that a TestCase imports in setUp, and Triton, which asks for TRITON_INTERPRET.
_IMPORTS = ("pytest", "torch.testing._internal.common_device_type")


class ForkServer:
    """Runs one pytest or script at a time.

    Args:
        imports: modules that the forks find imported.
    """

    def __init__(
        self,
        python: Path | str,
        env: Mapping[str, str],
        imports: Sequence[str] = _IMPORTS,
    ) -> None:
        ours, theirs = socket.socketpair()
        command = [str(python), __file__, str(theirs.fileno()), *imports]
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
        return self._ask({"args": args}, folder, output)

    def run_script(self, script: Path, output: Path | None, seconds: int = 300) -> int:
        """Exit status of ``python script`` in its folder, that of SIGALRM after ``seconds``."""
        return self._ask(
            {"script": str(script), "seconds": seconds}, script.parent, output
        )

    def _ask(self, job: dict, folder: Path, output: Path | None) -> int:
        job |= {"folder": str(folder), "output": output and str(output)}
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


def _run_here(
    folder: str,
    output: str | None,
    args: Sequence[str] = (),
    script: str | None = None,
    seconds: int = 0,
) -> None:
    if output is not None:
        file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)
        os.dup2(file, 1)
        os.dup2(file, 2)
    os.chdir(folder)
    if script is not None:
        signal.alarm(seconds)
        sys.argv = [script]
        if not sys.flags.safe_path:
            sys.path[0] = folder
        runpy.run_path(script, run_name="__main__")
        sys.exit()
    import pytest

    # The plugins of pytest were imported before it could rewrite their assertions.
    warning = "ignore:Module already imported:pytest.PytestAssertRewriteWarning"
    sys.exit(pytest.main([*args, "-W", warning]))


def _serve(channel: socket.socket, imports: Sequence[str]) -> None:
    for module in imports:
        importlib.import_module(module)
    # A collection of a fork would copy the pages of what it shares with the server.
    gc.freeze()

    stream = channel.makefile("rw")
    for line in stream:
        child = os.fork()
        if not child:
            # Or what Triton's bindings own would count as leaked.
            atexit.register(gc.unfreeze)
            stream.close()
            channel.close()
            _run_here(**json.loads(line))
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(status, file=stream, flush=True)
    gc.unfreeze()


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])), sys.argv[2:])
