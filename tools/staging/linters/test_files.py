"""PyTorch's TESTOWNERS and TEST_HAS_MAIN for files below test/."""

import ast
import json
import re
from pathlib import Path

from message import paths, report


CODE = "TESTFILES"
_OWNERS = re.compile(r"^# Owner\(s\): (\[.*\])$")
_LABEL = re.compile(r"^(?:module|oncall): \S")


def check(path: Path) -> None:
    """Reports a missing owner line, a bad label, or a missing main guard."""
    text = path.read_text(encoding="utf-8")
    match = _OWNERS.match(text.split("\n", 1)[0])
    if not match:
        rule = 'the first line must be: # Owner(s): ["module: <label>"]'
        # lintrunner cannot show line 1 of an empty file.
        report(path, "owner", rule, line=1 if text else None, code=CODE)
    else:
        for label in json.loads(match.group(1)):
            if not _LABEL.match(label):
                rule = f"owner {label!r}: labels start with 'module: ' or 'oncall: '"
                report(path, "owner", rule, line=1, code=CODE)
    if not _has_main(ast.parse(text)):
        rule = 'must end with: if __name__ == "__main__": run_tests()'
        report(path, "main", rule, code=CODE)


def _has_main(tree: ast.Module) -> bool:
    for node in tree.body:
        if (
            isinstance(node, ast.If)
            and ast.unparse(node.test) == "__name__ == '__main__'"
        ):
            return any("run_tests()" in ast.unparse(part) for part in node.body)
    return False


if __name__ == "__main__":
    for file in paths():
        check(file)
