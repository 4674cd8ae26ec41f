"""The benchmark tables of a pull request: measured rows of a results file, losing first.

An entry of `results` in series.toml says which rows and columns of a JSON file a PR
shows, and which of them lose:

    file     the JSON
    rows     key of its list of rows, a path as in columns. Default: "rows"
    where    {key = value or list of values}; other rows are left out
    columns  "path" or "path = heading". A path goes into objects by dots.
    loses    conditions "path < path or number" (also >, <=, >=), any of them
    other    {key = value}: the row to compare with, as "other.path" in loses, is the
             one with these values and the same ones under the keys of `match`
    match    keys, see other
    group    keys: one row per combination, with the largest of each other column
             ("rows" is how many there were)
    what     a sentence above the table
    limit    rows to show besides losing ones. Default: 16

A losing row is always shown, others up to `limit`. A number with a spread counts as its
median: an object with `median` and `interval` or `p10` and `p90`, or [median, p10, p90].
"""

import json
import operator
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .errors import StageError


KEYS = {
    *("file", "rows", "where", "columns", "loses", "other", "match", "group"),
    *("what", "limit"),
}
_MAX_ROWS = 16
_OPERATORS: dict[str, Callable[[float, float], bool]] = {
    "<": operator.lt,
    ">": operator.gt,
    "<=": operator.le,
    ">=": operator.ge,
}
_CONDITION = re.compile(r"^(?P<left>\S.*?) (?P<sign>[<>]=?) (?P<right>\S.*)$")
_FACTS = ("torch", "machine", "threads")
_MISSING = object()


def render(root: Path, entry: Mapping[str, Any]) -> str:
    """Markdown of one entry: provenance, command, table.

    Raises:
        StageError: no such file, not JSON, or an entry that does not fit it.
    """
    name = entry["file"]
    data = _load(root, name)
    source = data | data.get("provenance", {})
    facts = [
        f"`{name}` of the staging repository",
        *(f"{k}: {source[k]}" for k in _FACTS if k in source),
    ]
    command = source.get("command", "no command recorded")
    parts = [entry["what"].strip()] if "what" in entry else []
    parts += [f"{', '.join(facts)}", f"```\n{command}\n```"]
    return "\n\n".join([*parts, _table(data, entry)])


def render_rows(root: Path, entry: Mapping[str, Any]) -> str:
    """The same without where the rows are from."""
    parts = [entry["what"].strip()] if "what" in entry else []
    return "\n\n".join([*parts, _table(_load(root, entry["file"]), entry)])


def _load(root: Path, name: str) -> dict:
    try:
        return json.loads((root / name).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise StageError(f"results file {name} does not exist") from None
    except json.JSONDecodeError as error:
        raise StageError(f"{name}: {error}") from None


def _rows(data: dict, entry: Mapping[str, Any]) -> list[dict]:
    key = entry.get("rows", "rows")
    found = _get(data, key)
    if not isinstance(found, list) or not all(isinstance(row, dict) for row in found):
        lists = ", ".join(k for k, v in data.items() if isinstance(v, list)) or "none"
        raise StageError(
            f"{entry['file']}: no list of rows under {key!r}; lists: {lists}"
        )
    return [row for row in found if _matches(row, entry.get("where", {}))]


def _matches(row: dict, where: Mapping[str, Any]) -> bool:
    for key, wanted in where.items():
        allowed = wanted if isinstance(wanted, list) else [wanted]
        if _get(row, key) not in allowed:
            return False
    return True


def _losing(rows: list[dict], entry: Mapping[str, Any]) -> list[dict]:
    conditions = entry.get("loses", [])
    conditions = [conditions] if isinstance(conditions, str) else conditions
    found = []
    for row in rows:
        other = None
        if "other" in entry:
            same = {key: _get(row, key) for key in entry.get("match", [])}
            wanted = {**same, **entry["other"]}
            other = next((r for r in rows if _matches(r, wanted)), None)
        if any(_holds(text, row, other, entry["file"]) for text in conditions):
            found.append(row)
    return found


def _holds(text: str, row: dict, other: dict | None, name: str) -> bool:
    match = _CONDITION.match(text)
    if not match:
        raise StageError(
            f"{name}: loses = {text!r}; write for example 'speedup < 1' or "
            "'seconds > other.seconds'"
        )
    left = _operand(match["left"], row, other, name)
    right = _operand(match["right"], row, other, name)
    if left is None or right is None:
        return False
    return _OPERATORS[match["sign"]](left, right)


def _operand(text: str, row: dict, other: dict | None, name: str) -> float | None:
    """The value of an operand of a condition; None if the row that it names is missing."""
    try:
        return float(text)
    except ValueError:
        pass
    source: dict | None = row
    if text.startswith("other."):
        source, text = other, text.removeprefix("other.")
    if source is None:
        return None
    number = _number(_get(source, text))
    if number is None:
        raise StageError(f"{name}: a row has no number {text!r} to tell if it loses")
    return number


def _get(row: dict, path: str) -> Any:
    value: Any = row
    for key in path.split("."):
        if not isinstance(value, dict) or key not in value:
            return _MISSING
        value = value[key]
    return value


def _number(value: Any) -> float | None:
    if isinstance(value, dict):
        return _number(value.get("median"))
    if _is_spread(value):
        return float(value[0])
    if isinstance(value, list):
        return float(len(value))
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value)


def _is_spread(value: Any) -> bool:
    """[median, p10, p90], as some results have it."""
    return (
        isinstance(value, list)
        and len(value) == 3
        and all(isinstance(v, float) for v in value)
        and value[1] <= value[0] <= value[2]
    )


def _grouped(
    rows: list[dict], losing: list[dict], entry: Mapping[str, Any]
) -> list[tuple[dict, bool]]:
    """(row, whether it loses), losing ones first."""
    lost = {id(row) for row in losing}
    if "group" not in entry:
        marked = [(row, id(row) in lost) for row in rows]
        return sorted(marked, key=lambda item: not item[1])
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        key = tuple(str(_get(row, k)) for k in entry["group"])
        groups.setdefault(key, []).append(row)
    found = []
    for members in groups.values():
        merged: dict[str, Any] = {k: _get(members[0], k) for k in entry["group"]}
        merged["rows"] = len(members)
        for path, _ in _columns(entry, members):
            if path not in merged:
                numbers = [_number(_get(row, path)) for row in members]
                merged[path] = max((n for n in numbers if n is not None), default=None)
        found.append((merged, any(id(row) in lost for row in members)))
    return sorted(found, key=lambda item: not item[1])


def _columns(entry: Mapping[str, Any], rows: list[dict]) -> list[tuple[str, str]]:
    """(path, heading)."""
    texts = entry.get("columns") or (list(rows[0]) if rows else [])
    pairs = []
    for text in texts:
        path, _, heading = text.partition(" = ")
        pairs.append((path, heading or path))
    return pairs


def _table(data: dict, entry: Mapping[str, Any]) -> str:
    found = _rows(data, entry)
    rows = _grouped(found, _losing(found, entry), entry)
    columns = _columns(entry, [row for row, _ in rows])
    num_losing = sum(loses for _, loses in rows)
    cut = rows[: max(entry.get("limit", _MAX_ROWS), num_losing)]
    lines = [[heading for _, heading in columns]]
    for path, _ in columns:
        if all(_lookup(row, path) is _MISSING for row, _ in rows):
            raise StageError(f"{entry['file']}: no row has a column {path!r}")
    for row, loses in cut:
        cells = [cell(_lookup(row, path)) for path, _ in columns]
        if loses:
            cells[0] = f"{cells[0]} (**loses**)"
        lines.append(cells)
    counted = f"{len(rows)} row{'' if len(rows) == 1 else 's'}"
    if "loses" in entry:
        counted += f", {num_losing} of them lost"
    if len(cut) < len(rows):
        counted += f"; {len(rows) - len(cut)} more are only in the file"
    return f"{table(lines)}\n\n{counted}."


def _lookup(row: dict, path: str) -> Any:
    return row[path] if path in row else _get(row, path)


def cell(value: Any) -> str:
    """A value as a table shows it; "" for what has no place in a cell."""
    if value is None or value is _MISSING:
        return ""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
    if isinstance(value, dict):
        if "median" not in value:
            return ""
        return f"{cell(value['median'])}{_bracket(value)}"
    if _is_spread(value):
        return f"{cell(value[0])} (p10 - p90: {cell(value[1])} - {cell(value[2])})"
    if isinstance(value, list):
        simple = all(isinstance(v, (int, str)) for v in value) and len(value) <= 8
        return " x ".join(map(str, value)) if simple else ""
    return str(value).replace("|", "\\|")


def _bracket(value: dict) -> str:
    """The bounds beside a median and their kind, as two kinds look alike in a table."""
    if "interval" in value:
        low, high = value["interval"]
        share = f"{100 * value['confidence']:.0f} % " if "confidence" in value else ""
        return f" ({share}interval: {cell(low)} - {cell(high)})"
    if "p10" in value:
        return f" (p10 - p90: {cell(value['p10'])} - {cell(value['p90'])})"
    return ""


def table(rows: list[list[str]]) -> str:
    """Markdown; the first row is the head."""
    head, *rest = rows
    lines = [head, ["---"] * len(head), *rest]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)
