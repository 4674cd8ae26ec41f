"""Text rules: newline at the end, no trailing spaces, no tabs, ASCII, length.

The first three are PyTorch's NEWLINE, SPACES and TABS. The others keep this
tree readable anywhere: plain ASCII, no path of somebody's machine, no file
that nobody reads to the end.
"""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from message import paths, report


CODE = "TEXT"
MAX_FILE_LINES = 800
_LISTS = ("RESULTS.md", "series.toml")
MAX_FUNCTION_LINES = 90
# Spelled in parts, so that this file passes its own rule.
_MACHINE_PATH = re.compile(
    r"(?<![\w.$}<])/(?:ro" r"ot|ho" r"me/\w+|wo" r"rk|t" r"mp)/\w"
)
_REGISTRY = re.compile(
    r"files\.python" r"hosted\.org|py" r"pi\.org|download\.py" r"torch\.org"
)


def check(path: Path) -> None:
    """Reports every finding of one file; spaces and newline can be fixed."""
    original = path.read_bytes().decode("utf-8", "replace")
    for line, name, description in _findings(path, original):
        report(path, name, description, line=line, code=CODE)
    fixed = re.sub(r"[ \t]+$", "", original, flags=re.MULTILINE).rstrip("\n") + "\n"
    if original and fixed != original:
        report(
            path,
            "whitespace",
            "trailing spaces, or not exactly one newline at the end",
            code=CODE,
            original=original,
            replacement=fixed,
        )


def _findings(path: Path, text: str) -> Iterator[tuple[int | None, str, str]]:
    lines = text.splitlines()
    # JSON is for programs, RESULTS.md is made from it, series.toml grows with the stack.
    data = path.suffix == ".json" or path.name in _LISTS
    if len(lines) > MAX_FILE_LINES and not data:
        yield None, "file length", f"{len(lines)} lines, allowed are {MAX_FILE_LINES}"
    for number, line in enumerate(lines, 1):
        if "\t" in line and path.suffix != ".mk":
            yield number, "tab", "a tab; indent with spaces"
        if not line.isascii():
            odd = next(c for c in line if not c.isascii())
            yield number, "ascii", f"{odd!r} is not ASCII"
        if _MACHINE_PATH.search(line):
            yield number, "machine path", "an absolute path of one machine"
        if _REGISTRY.search(line):
            yield number, "registry", "a package registry by name; use pip's settings"
    if path.suffix == ".py":
        yield from _long_functions(text)


def _long_functions(text: str) -> Iterator[tuple[int | None, str, str]]:
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        yield error.lineno, "syntax", str(error)
        return
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            documented = isinstance(first, ast.Expr) and isinstance(
                first.value, ast.Constant
            )
            start = (first.end_lineno or 0) + 1 if documented else node.lineno
            length = (node.end_lineno or start) - start + 1
            if length > MAX_FUNCTION_LINES:
                rule = f"{node.name}: {length} lines, allowed are {MAX_FUNCTION_LINES}"
                yield node.lineno, "function length", rule


if __name__ == "__main__":
    for file in paths():
        check(file)
