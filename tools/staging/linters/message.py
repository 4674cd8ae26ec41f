"""The line of JSON lintrunner reads for every finding. Used by all adapters."""

import json
import sys
from pathlib import Path


def report(
    path: str | Path,
    name: str,
    description: str,
    *,
    line: int | None = None,
    code: str,
    severity: str = "error",
    original: str | None = None,
    replacement: str | None = None,
) -> None:
    """Prints one finding.

    Args:
        path: the file, relative to the repository.
        name: short name of the rule.
        description: what is wrong and what is allowed.
        line: 1-based.
        code: code of the linter in .lintrunner.toml.
        original: contents of the file, when ``replacement`` is given.
        replacement: contents that fix it (applied by ``lint -a``).
    """
    finding = {
        "path": str(path),
        "line": line,
        "char": None,
        "code": code,
        "severity": severity,
        "name": name,
        "original": original,
        "replacement": replacement,
        "description": description,
    }
    print(json.dumps(finding), flush=True)


def paths(arguments: list[str] | None = None) -> list[Path]:
    """Files to look at: lintrunner passes "@file" with one path per line."""
    words = sys.argv[1:] if arguments is None else arguments
    found: list[Path] = []
    for word in words:
        if word.startswith("@"):
            lines = Path(word[1:]).read_text().splitlines()
            found += [Path(line) for line in lines if line]
        elif not word.startswith("--"):
            found.append(Path(word))
    root = Path.cwd()
    return [p.relative_to(root) if p.is_absolute() else p for p in found if p.is_file()]
