"""drift: every status, from wheels and checkouts, with the hunk in conflict."""

import zipfile
from types import SimpleNamespace

import pytest
from conftest import WHEEL_FILES

from staging import drift, wheelfile
from staging.errors import StageError


OVERRIDES = "torch/overrides.py"
LINES = WHEEL_FILES[OVERRIDES]


def wheel(project, monkeypatch, files, version="2.14.1"):
    """Makes pip "find" a wheel with these files; returns the source."""
    path = project.cache / "found" / f"torch {version}.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(name, text)
    monkeypatch.setattr(wheelfile, "_wheel_url", lambda version: path.as_uri())
    return drift.WheelSource(version, project.cache)


def measure(project, source):
    project.setup()
    return drift.measure(project.checkout(), project.stack, source)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (LINES, ["clean", "clean"]),
        ("# moved\n" * 50 + LINES, ["clean", "clean"]),
        (LINES.replace("line_13 = 13", "line_13 = 0"), ["fuzzy", "clean"]),
        (LINES.replace("line_12 = 12", "x\ny"), ["conflict", "clean"]),
        (
            LINES.replace("line_12 = 12", "first = True\nline_12 = 12"),
            ["already upstream", "clean"],
        ),
        (None, ["no such file", "no such file"]),
    ],
)
def test_status(project, monkeypatch, text, expected):
    files = {"torch/nn/functional.py": "\n"} | ({OVERRIDES: text} if text else {})
    found = measure(project, wheel(project, monkeypatch, files))
    assert [patch.status for patch in found.patches] == expected


def test_hunk_in_conflict_is_named(project, monkeypatch, capsys):
    text = LINES.replace("line_31 = 31", "other")
    found = measure(project, wheel(project, monkeypatch, {OVERRIDES: text}))
    assert found.patches[0].status == "clean"
    (file,) = found.patches[1].files
    assert file.hunks == ("hunk 1 of 1 (@@ -30,4 +30,5 @@)",)
    data = drift.result([found], project.stack, "stage.py drift 2.14.1")
    assert data["command"] == "stage.py drift 2.14.1"
    assert data["versions"][0]["patches"][1]["status"] == "conflict"
    assert drift.markdown(data).endswith("| 110 | conflict |\n")
    drift.show([found])
    assert f"2.14.1, 110-second: `{OVERRIDES}`: hunk 1 of 1 (line 30)" in (
        capsys.readouterr().out
    )


def test_one_conflict_does_not_spoil_the_next_pr(project, monkeypatch):
    """110 meets what 100 would have made, although 100 is in conflict."""
    project.setup()
    path = project.workspace.checkout / OVERRIDES
    path.write_text(path.read_text().replace("first = True", "first = True\nmore = 1"))
    project.refresh("110")
    text = LINES.replace("line_11 = 11", "x")
    found = measure(project, wheel(project, monkeypatch, {OVERRIDES: text}))
    assert [patch.status for patch in found.patches] == ["conflict", "clean"]


def test_wheel_is_asked_once(project, monkeypatch):
    source = wheel(project, monkeypatch, {OVERRIDES: LINES})
    measure(project, source)
    monkeypatch.setattr(wheelfile, "_wheel_url", pytest.fail)
    again = drift.WheelSource("2.14.1", project.cache)
    assert measure(project, again).patches[0].status == "clean"


def test_headers_are_compared_without_their_guard(project, monkeypatch):
    text = (
        "#if !defined(TORCH_STABLE_ONLY) && !defined(TORCH_TARGET_VERSION)\na\n#else\n"
    )
    member = "torch/include/ATen/core/Tensor.h"
    source = wheel(project, monkeypatch, {member: text})
    source.prepare({"aten/src/ATen/core/Tensor.h"})
    assert source.read("aten/src/ATen/core/Tensor.h") == b"a"


def test_checkout(upstream):
    upstream.write(OVERRIDES, LINES.replace("line_13 = 13", "line_13 = 0"))
    commit = upstream.commit("upstream moved on")
    upstream.write(OVERRIDES, "an edit that is not committed\n")
    source = drift.CheckoutSource(upstream.path)
    found = measure(upstream.project, source)
    assert found.commit == commit
    assert [patch.status for patch in found.patches] == ["fuzzy", "clean"]


def test_file_of_the_same_name(upstream):
    """What apply would stop on."""
    upstream.write("torch/nn/moe.py", "theirs = 1\n")
    upstream.commit("upstream has one, too")
    project = upstream.project
    found = measure(project, drift.CheckoutSource(upstream.path))
    assert [patch.status for patch in found.patches] == ["file exists", "clean"]
    data = drift.result([found], project.stack, "")
    assert "| 100 | file exists |" in drift.markdown(data)
    with pytest.raises(StageError, match="100-first.patch conflicts"):
        upstream.apply()


def test_wrong_sources(project, tmp_path):
    with pytest.raises(StageError, match="'main' is no version of torch"):
        drift.WheelSource("main", project.cache)
    with pytest.raises(StageError, match="is not a git checkout"):
        drift.CheckoutSource(tmp_path)


def test_version_that_does_not_exist(project, monkeypatch):
    failed = SimpleNamespace(returncode=1, stdout="", stderr="ERROR: No matching\n")
    pip = SimpleNamespace(run=lambda *command, **options: failed)
    monkeypatch.setattr(wheelfile, "subprocess", pip)
    with pytest.raises(StageError, match="pip finds no wheel of torch 9.9.9: ERROR"):
        drift.WheelSource("9.9.9", project.cache).prepare({OVERRIDES})
