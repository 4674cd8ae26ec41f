"""The one exception every verb reports as a short message. Imported by all."""

import errno
from pathlib import Path


class StageError(Exception):
    """A failure the user can act on.

    Args:
        message: what happened, naming file, PR and value.
        hint: the command or edit that fixes it.
        log: full output, when ``message`` only shows the first error.
    """

    def __init__(
        self, message: str, *, hint: str | None = None, log: Path | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint
        self.log = log

    def __str__(self) -> str:
        lines = [self.message]
        if self.hint:
            lines.append(f"fix: {self.hint}")
        if self.log:
            lines.append(f"full log: {self.log}")
        return "\n".join(lines)


class ArgumentError(StageError):
    """A value given on the command line that cannot be: one line, exit status 2."""

    def __str__(self) -> str:
        return f"{self.message}; {self.hint}" if self.hint else self.message


def no_space(where: Path | str) -> StageError:
    """The error for a full disk, however it was noticed."""
    return StageError(
        f"no space left on the disk of {where}",
        hint="free some space and repeat the command; it continues where it stopped",
    )


def from_os_error(error: OSError) -> StageError:
    """Turns an operating system error into a StageError that names the path."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return no_space(error.filename or "the build folder")
    if error.errno in (errno.EROFS, errno.EACCES, errno.EPERM):
        return StageError(
            f"cannot write {error.filename or ''}: {error.strerror}",
            hint="make it writable, or set MOE_STAGING_CACHE to a folder that is",
        )
    return StageError(f"{error.strerror or error}: {error.filename or ''}".rstrip(": "))
