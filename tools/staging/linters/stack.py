"""series.toml and the tree agree; patches are well formed; pins are exact.

The paths lintrunner passes are ignored: these rules are about the whole.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path


sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from message import report
from staging import series as series_module
from staging.errors import StageError


CODE = "STACK"
_MAX_SUBJECT = 72
_PIN = re.compile(r"^[A-Za-z0-9_.\-]+==[A-Za-z0-9_.]+$")
_PIN_FILES = ("requirements.txt", "tools/requirements.txt")


def check_series(root: Path) -> None:
    """Bijection between series.toml and the files, and the form of patches."""
    try:
        series = series_module.load(root)
        problems = series_module.problems(series)
    except StageError as error:
        problems = [error.message]
        series = None
    for problem in problems:
        report(series_module.SERIES_FILE, "series", problem, code=CODE)
    for pr in series.prs if series else ():
        patch = series.patch(pr) if series else None
        if patch is None or not patch.message:
            continue
        subject, _, body = patch.message.partition("\n\n")
        if len(subject.strip()) > _MAX_SUBJECT:
            rule = (
                f"subject has {len(subject.strip())} characters, allowed {_MAX_SUBJECT}"
            )
            report(pr.patch_path, "subject", rule, code=CODE)
        if not body.strip():
            rule = "no description; the message says why the PR exists"
            report(pr.patch_path, "description", rule, code=CODE)
        if not patch.message.isascii():
            report(pr.patch_path, "ascii", "the message is not ASCII", code=CODE)


def check_pins(root: Path) -> None:
    """Every requirement names one exact version, sorted, once."""
    for name in _PIN_FILES:
        lines = (root / name).read_text().splitlines()
        pins = [line for line in lines if line and not line.startswith("#")]
        for line in pins:
            if not _PIN.match(line):
                rule = f"{line!r}: write name==version"
                report(name, "pin", rule, line=lines.index(line) + 1, code=CODE)
        keys = [re.sub(r"[-_.]+", "-", line.split("==")[0]).lower() for line in pins]
        if keys != sorted(set(keys)):
            report(name, "pin order", "pins must be sorted and unique", code=CODE)


if __name__ == "__main__":
    check_series(Path.cwd())
    check_pins(Path.cwd())
