"""RESULTS.md: everything measured, on one page, made from the results files.

A section per JSON below benchmarks/moe/results/: what of it is special (notes.toml there),
where and when it was measured, the command, and its tables. Those are the ones that the PRs
of series.toml show; of a file that no PR shows, those of notes.toml (see benchtable).
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomllib

from . import benchtable
from .errors import StageError
from .series import Stack


PAGE = "RESULTS.md"
FOLDER = "benchmarks/moe/results"
NOTES = f"{FOLDER}/notes.toml"
COMMAND = "python3 tools/stage.py results"
_FACTS = ("machine", "threads", "torch", "triton", "date", "git")
_HEAD = f"""# Results

Written by `{COMMAND}` from the files below
`{FOLDER}/`; `lint` compares. A number with a bracket is a median with
the interval of that confidence, or the range from p10 to p90; an interval below 95 % is of
fewer than six rounds. Rows that lose come first and say so.
"""


def render(stack: Stack) -> str:
    """The page.

    Raises:
        StageError: a file without notes, notes without a file, a file without a command
            or without a table.
    """
    notes = _notes(stack.root)
    files = sorted(path.name for path in (stack.root / FOLDER).glob("*.json"))
    for name in sorted(set(files) ^ set(notes)):
        what = "is missing" if name in notes else "has no entry"
        raise StageError(f"{NOTES}: {FOLDER}/{name} {what}")
    sections = [_section(stack, name, notes[name]) for name in files]
    return "\n".join([_HEAD, *sections])


def _notes(root: Path) -> dict[str, Any]:
    try:
        return tomllib.loads((root / NOTES).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except tomllib.TOMLDecodeError as error:
        raise StageError(f"{NOTES}: {error}") from None


def _section(stack: Stack, name: str, notes: Mapping[str, Any]) -> str:
    path = f"{FOLDER}/{name}"
    data = json.loads((stack.root / path).read_text(encoding="utf-8"))
    data |= data.get("provenance", {})
    if "command" not in data:
        raise StageError(f"{path}: names no command")
    facts = [f"{key} {data[key]}" for key in _FACTS if data.get(key)]
    parts = [f"## {name}", notes["what"].strip()]
    parts += [f"{', '.join(facts)}."] if facts else []
    parts.append(f"```\n{data['command']}\n```")
    entries = [e for pr in stack.prs for e in pr.results if e["file"] == path]
    entries += [{"file": path, **entry} for entry in notes.get("tables", ())]
    if not entries:
        raise StageError(f"{NOTES}: {name}: no PR shows it, so it needs `tables`")
    parts += [benchtable.render_rows(stack.root, entry) for entry in entries]
    return "\n\n".join(parts) + "\n"
