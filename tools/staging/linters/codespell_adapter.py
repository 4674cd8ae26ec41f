"""codespell with the few words this field spells its own way."""

import re
import subprocess
from pathlib import Path

from message import paths, report


_LINE = re.compile(r"^(?P<path>.+?):(?P<line>\d+): (?P<what>.+)$")
_WORDS = Path(__file__).with_name("words.txt")


def check(files: list[Path]) -> None:
    """Reports every word codespell knows better."""
    if not files:
        return
    command = ["codespell", f"--ignore-words={_WORDS}", *map(str, files)]
    done = subprocess.run(command, capture_output=True, text=True)
    for line in done.stdout.splitlines():
        match = _LINE.match(line)
        if match:
            number = int(match["line"])
            report(match["path"], "spelling", match["what"], line=number, code="SPELL")


if __name__ == "__main__":
    check(paths())
