"""Git with a reproducible identity and none of the user's configuration.

Used by wheelsource, checkout and export: the same input gives the same commit
hash on every machine. UserRepo is for the one place where the commits are the
user's own: apply.
"""

import os
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from .errors import no_space, StageError
from .subprocesses import die_with_parent
from .texts import decode, encode


_DATE = "2000-01-01T00:00:00+0000"
_NAME = "stage.py"
_EMAIL = "stage@localhost"
_CONFIG = (
    "core.autocrlf=false",
    "core.fsmonitor=false",
    "core.quotePath=false",
    "gc.auto=0",
    "maintenance.auto=false",
    "commit.gpgsign=false",
    "safe.directory=*",
    "advice.detachedHead=false",
    "init.defaultBranch=base",
    "rerere.enabled=false",
)


class GitError(StageError):
    """A git command failed; ``stderr`` and ``stdout`` are what it said."""

    def __init__(self, command: Sequence[str], stderr: str, stdout: str = "") -> None:
        super().__init__(f"git {' '.join(command)}: {stderr.strip()}")
        self.stderr = stderr
        self.stdout = stdout


class GitRepo:
    """A work tree (or a place where one will be)."""

    _config: Sequence[str] = _CONFIG
    _preexec: Callable[[], None] | None = None

    def __init__(self, path: Path) -> None:
        self.path = path

    def run(
        self,
        *args: str,
        data: str | bytes | None = None,
        env: dict[str, str] | None = None,
    ) -> str:
        """Runs git in the work tree and returns stdout.

        Raises:
            GitError: non-zero exit.
        """
        return decode(self.run_bytes(*args, data=data, env=env))

    def run_bytes(
        self,
        *args: str,
        data: str | bytes | None = None,
        env: dict[str, str] | None = None,
    ) -> bytes:
        """Like run, without decoding: file contents."""
        config = [word for entry in self._config for word in ("-c", entry)]
        if isinstance(data, str):
            data = encode(data)
        done = subprocess.run(
            ["git", *config, *args],
            cwd=self.path,
            env={**self._environment(), **(env or {})},
            input=data,
            stdin=subprocess.DEVNULL if data is None else None,
            capture_output=True,
            preexec_fn=self._preexec,
        )
        if done.returncode:
            stderr = done.stderr.decode("utf-8", "replace")
            if "No space left on device" in stderr:
                raise no_space(self.path)
            output = done.stdout.decode("utf-8", "replace")
            raise GitError(args, stderr, output)
        return done.stdout

    def has(self, revision: str) -> bool:
        """Whether the object exists here."""
        try:
            self.run("cat-file", "-e", revision)
        except GitError:
            return False
        return True

    def resolve(self, revision: str) -> str:
        """The hash of a revision."""
        return self.run("rev-parse", "--verify", "--quiet", revision).strip()

    def exists(self) -> bool:
        """Whether there is a repository at all."""
        return (self.path / ".git").exists()

    def _environment(self) -> dict[str, str]:
        kept = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        return {**kept, **_QUIET, **_REPRODUCIBLE}


class UserRepo(GitRepo):
    """A repository of the user: their identity, configuration and hooks.

    Only what would change bytes is set: a patch arrives as it was written.
    """

    _config = (
        "core.quotePath=false",
        "core.commentChar=#",
        "apply.whitespace=nowarn",
        "apply.ignoreWhitespace=no",
        "advice.detachedHead=false",
        "gc.auto=0",
    )
    # A git that lives on after a kill would race with the repair of its work.
    _preexec = staticmethod(die_with_parent)

    def _environment(self) -> dict[str, str]:
        # Not GIT_DIR and its like, which would name another repository.
        kept = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}
        mine = {k: v for k, v in os.environ.items() if k.startswith(_IDENTITY)}
        return {**kept, **mine, **_QUIET}


_IDENTITY = ("GIT_AUTHOR_", "GIT_COMMITTER_", "GIT_CONFIG")
_QUIET = {"GIT_TERMINAL_PROMPT": "0", "GIT_EDITOR": "true", "LC_ALL": "C"}
_REPRODUCIBLE = {
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
    "GIT_AUTHOR_NAME": _NAME,
    "GIT_AUTHOR_EMAIL": _EMAIL,
    "GIT_AUTHOR_DATE": _DATE,
    "GIT_COMMITTER_NAME": _NAME,
    "GIT_COMMITTER_EMAIL": _EMAIL,
    "GIT_COMMITTER_DATE": _DATE,
}
