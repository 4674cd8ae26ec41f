"""ruff check and ruff format, as lintrunner wants their findings.

python ruff_adapter.py check|format @paths
"""

import json
import subprocess
import sys
from pathlib import Path

from message import paths, report


_CONFIG = str(Path(__file__).with_name("ruff.toml"))


def check(files: list[Path]) -> None:
    """Reports every finding of ruff check."""
    command = ["ruff", "check", "--config", _CONFIG, "--output-format=json"]
    done = subprocess.run(
        [*command, "--no-cache", "--exit-zero", *map(str, files)],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        report(".", "ruff failed", done.stderr.strip()[:500], code="RUFF")
        return
    for finding in json.loads(done.stdout):
        path = Path(finding["filename"])
        path = path.relative_to(Path.cwd()) if path.is_absolute() else path
        line = finding["location"]["row"]
        rule = finding["code"] or "syntax"
        report(path, rule, finding["message"], line=line, code="RUFF")


def format_files(files: list[Path]) -> None:
    """Reports every file that ruff format would write differently."""
    for path in files:
        original = path.read_text(encoding="utf-8")
        command = ["ruff", "format", "--config", _CONFIG, "--no-cache"]
        done = subprocess.run(
            [*command, f"--stdin-filename={path}", "-"],
            input=original,
            capture_output=True,
            text=True,
        )
        if done.returncode:
            report(path, "ruff failed", done.stderr.strip()[:500], code="FORMAT")
        elif done.stdout != original:
            report(
                path,
                "format",
                "not formatted (tools/stage.py lint -a)",
                code="FORMAT",
                original=original,
                replacement=done.stdout,
            )


if __name__ == "__main__":
    (check if sys.argv[1] == "check" else format_files)(paths(sys.argv[2:]))
