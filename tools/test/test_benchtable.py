"""Benchmark tables: what is shown, what loses, and entries that do not fit the file."""

import json

import pytest

from staging import benchtable, evidence, series
from staging.benchtable import cell
from staging.errors import StageError


ROWS = [
    {"name": "a", "kind": "x", "ms": {"median": 2.0, "p10": 1.5, "p90": 3.0}, "n": 1},
    {"name": "b", "kind": "x", "ms": {"median": 1.0, "p10": 0.5, "p90": 1.5}, "n": 2},
    {"name": "a", "kind": "y", "ms": [4.0, 3.0, 5.0], "n": 3},
    {"name": "b", "kind": "y", "ms": [5.0, 4.0, 6.0], "n": 4},
]


def render(tmp_path, measured=ROWS, /, **entry):
    data = {"command": "python bench.py", "torch": "2.15.0", "rows": measured}
    (tmp_path / "a.json").write_text(json.dumps(data))
    return benchtable.render(tmp_path, {"file": "a.json", **entry})


def lines(text):
    return [line for line in text.splitlines() if line.startswith("| ")][2:]


def test_provenance_and_columns(tmp_path):
    text = render(tmp_path, columns=["name", "ms = time"], what="Faster is less.")
    assert text.startswith(
        "Faster is less.\n\n`a.json` of the staging repository, torch: 2.15.0\n\n```\npython"
    )
    assert "| name | time |" in text
    assert lines(text)[0] == "| a | 2 (p10 - p90: 1.5 - 3) |"
    assert lines(text)[2] == "| a | 4 (p10 - p90: 3 - 5) |"
    assert text.endswith("4 rows.")


def test_where_and_limit(tmp_path):
    text = render(tmp_path, where={"kind": "y"}, columns=["name"], limit=1)
    assert lines(text) == ["| a |"]
    assert text.endswith("2 rows; 1 more are only in the file.")
    text = render(tmp_path, where={"name": ["b"], "kind": "x"}, columns=["n"])
    assert text.endswith("| 2 |\n\n1 row.")


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        ("ms > 4", ["4"]),
        ("ms >= 4", ["3", "4"]),
        ("ms < n", ["2"]),
        (["ms < n", "n > 3"], ["2", "4"]),
        ("n < 0", []),
    ],
)
def test_losing_rows_come_first_and_are_all_there(tmp_path, conditions, expected):
    text = render(tmp_path, columns=["n"], loses=conditions, limit=0)
    assert lines(text) == [f"| {n} (**loses**) |" for n in expected]
    assert f"4 rows, {len(expected)} of them lost" in text


def test_condition_on_a_name_with_spaces(tmp_path):
    rows = [{"n": n, "forms": {"mm, compiled": {"ms": n}}} for n in (1, 2)]
    text = render(tmp_path, rows, columns=["n"], loses="forms.mm, compiled.ms < 2")
    assert lines(text) == ["| 1 (**loses**) |", "| 2 |"]


def test_row_to_compare_with(tmp_path):
    text = render(
        tmp_path,
        columns=["n"],
        other={"name": "b"},
        match=["kind"],
        loses="ms > other.ms",
        limit=0,
    )
    assert lines(text) == ["| 1 (**loses**) |"]
    # No row to compare with: none loses.
    text = render(tmp_path, other={"name": "c"}, loses="ms > other.ms", columns=["n"])
    assert "0 of them lost" in text


def test_groups_have_the_largest_value(tmp_path):
    rows = [*ROWS, {"name": "c", "kind": "z", "ms": 1.0, "n": [7, 8]}]
    text = render(
        tmp_path,
        rows,
        group=["kind"],
        columns=["kind", "rows", "ms", "n"],
        loses="ms > 4.5",
    )
    assert lines(text) == [
        "| y (**loses**) | 2 | 5 | 4 |",
        "| x | 2 | 2 | 2 |",
        "| z | 1 | 1 | 2 |",
    ]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"rows": "cases"}, "no list of rows under 'cases'; lists: rows"),
        ({"columns": ["seconds"]}, "no row has a column 'seconds'"),
        ({"loses": "ms is bad"}, "loses = 'ms is bad'; write for example"),
        ({"loses": "seconds > 1"}, "no number 'seconds' to tell if it loses"),
    ],
)
def test_entry_that_does_not_fit_the_file(tmp_path, entry, message):
    with pytest.raises(StageError, match=message):
        render(tmp_path, **entry)


def test_every_bracket_says_what_it_is():
    spread = {"median": 2.0, "p10": 1.5, "p90": 3.0}
    assert cell(spread) == "2 (p10 - p90: 1.5 - 3)"
    interval = spread | {"interval": [1.75, 2.25], "confidence": 0.958}
    assert cell(interval) == "2 (96 % interval: 1.75 - 2.25)"


def page(root, notes, **entry):
    folder = root / evidence.FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(
        f'["{name}"]\nwhat = "A note."\n{more}\n' for name, more in notes.items()
    )
    (folder / "notes.toml").write_text(text)
    for name in ("a.json", "b.json"):
        data = {"command": "python bench.py", "date": "2026-01-02", "rows": ROWS}
        (folder / name).write_text(json.dumps(data))
    pr = series.PullRequest(
        "100-a", "s", "title", results=({"file": f"{evidence.FOLDER}/a.json", **entry},)
    )
    stack = series.Stack(root, None, "", (), (), (pr,), (pr,))
    return evidence.render(stack)


def test_page_of_everything_measured(tmp_path):
    notes = {"a.json": "", "b.json": "tables = [{columns = ['n']}]"}
    text = page(tmp_path, notes, columns=["name", "ms"], loses="ms > 4")
    a, b = text.split("## a.json")[1].split("## b.json")
    assert "A note." in a and "date 2026-01-02." in a and "python bench.py" in a
    assert lines(a)[0] == "| b (**loses**) | 5 (p10 - p90: 4 - 6) |"
    assert lines(b) == ["| 1 |", "| 2 |", "| 3 |", "| 4 |"]


@pytest.mark.parametrize(
    ("notes", "message"),
    [
        ({"a.json": ""}, "b.json has no entry"),
        ({"a.json": "", "b.json": "", "c.json": ""}, "c.json is missing"),
        ({"a.json": "", "b.json": ""}, "b.json: no PR shows it, so it needs `tables`"),
    ],
)
def test_page_leaves_nothing_out(tmp_path, notes, message):
    with pytest.raises(StageError, match=message):
        page(tmp_path, notes)
