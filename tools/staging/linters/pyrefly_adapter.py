"""Type check of the stager with Pyrefly, which upstream checks its tools with.

python pyrefly_adapter.py @paths

The torchgen driver is left out: it runs in the staged Python, on a torchgen that
this environment does not have.
"""

import json
import subprocess
import sys
from pathlib import Path

from message import paths, report


CODE = "PYREFLY"
_CONFIG = str(Path(__file__).with_name("pyrefly.toml"))
_DRIVER = Path("tools/staging/torchgen_driver")
_SEARCH = (Path(__file__).resolve().parents[2], Path(__file__).resolve().parent)


def check(files: list[Path]) -> None:
    """Reports every error Pyrefly has about ``files``."""
    if not files:
        return
    command = ["pyrefly", "check", "--config", _CONFIG, "--output-format=json"]
    command += ["--python-interpreter-path", sys.executable, "--summary=none"]
    for folder in _SEARCH:
        command += ["--search-path", str(folder)]
    done = subprocess.run([*command, *map(str, files)], capture_output=True, text=True)
    try:
        findings = json.loads(done.stdout)["errors"]
    except (json.JSONDecodeError, KeyError):
        report(".", "pyrefly failed", done.stderr.strip()[:500], code=CODE)
        return
    for finding in findings:
        path = Path(finding["path"])
        path = path.relative_to(Path.cwd()) if path.is_absolute() else path
        text = finding["description"]
        report(path, finding["name"], text, line=finding["line"], code=CODE)


if __name__ == "__main__":
    check([path for path in paths(sys.argv[1:]) if _DRIVER not in path.parents])
