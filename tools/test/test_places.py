"""CONTRIBUTING's lists of places: an activation or an op that misses one is named here."""

import re
from pathlib import Path

import pytest

from staging import patchfile, series as series_module


ROOT = Path(__file__).parents[2]
TABLE = "aten/src/ATen/native/MoEMLPUtils.h"
ACTIVATION = re.compile(r'\{"(\w+)", Activation::(\w+), (true|false)')


def texts():
    """Path -> our text: whole new files, and the lines that patches add to released ones."""
    stack, found = series_module.load(ROOT), {}
    for pr in stack.prs:
        for path in pr.files:
            if path.startswith(("aten/", "torch/")) and not path.endswith(".npz"):
                found[path] = (ROOT / path).read_text()
        patch = stack.patch(pr)
        for part in patchfile.split_by_file(patch.diff) if patch else ():
            path = patchfile.path_of(part)
            found[path] = found.get(path, "") + "\n".join(
                re.findall(r"(?m)^\+(.*)", part)
            )
    return found


TEXTS = texts()
ACTIVATIONS = ACTIVATION.findall(TEXTS[TABLE])
OPS = re.findall(
    r"(?m)^- func: (_moe\w+)\(", TEXTS["aten/src/ATen/native/native_functions.yaml"]
)


def places(heading):
    """The rows of the table below a heading of CONTRIBUTING.md: (path, second column)."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = text.split(f"## {heading}\n")[1].split("\n## ")[0]
    return re.findall(r"(?m)^\| `([^`]+)` \| (.*) \|$", section)


def names_activation(text, name, enumerator):
    return re.search(rf'"{name}"|\b{enumerator}\b', text) is not None


def missing(heading, wanted):
    """ "path: name" for every name that a place of the table lacks."""
    return [
        f"{path}: {name}"
        for path, which in places(heading)
        for name in wanted(which)
        if not re.search(
            rf"(?:\b|_cpu|_cuda)_?{name}\b(?!_backward)", TEXTS.get(path, "")
        )
    ]


def ops_of(which):
    if which == "low precision":
        return [op for op in OPS if "scaled" in op or "quantize" in op]
    if not which.startswith("all"):
        return re.findall(r"`(\w+)`", which)
    low_precision = [op for op in OPS if "scaled" in op or "quantize" in op]
    without = low_precision if "but low precision" in which else []
    if "but backwards" in which:
        without = [op for op in OPS if "backward" in op]
    return [op for op in OPS if op not in without]


def gaps(path):
    """ "path: name" for each activation that it lacks, if it names others of its kind."""
    for kind in ("true", "false"):
        pairs = [(name, enum) for name, enum, of_kind in ACTIVATIONS if of_kind == kind]
        absent = [n for n, enum in pairs if not names_activation(TEXTS[path], n, enum)]
        if len(absent) < len(pairs):
            yield from (f"{path}: {name}" for name in absent)


def test_every_activation_is_in_every_place(monkeypatch):
    assert len(ACTIVATIONS) >= 9
    rows = places("Add an activation")
    paths = [path for path, what in rows if not what.startswith("those")]
    assert set(paths) <= set(TEXTS), "a place that is no more"
    assert [gap for path in paths for gap in gaps(path)] == []
    path = "torch/testing/_internal/moe_reference.py"
    monkeypatch.setitem(TEXTS, path, TEXTS[path].replace("relu2", "relu3"))
    assert list(gaps(path)) == [f"{path}: relu2"]


@pytest.mark.parametrize("gated", ["true", "false"])
def test_every_place_of_the_activations_is_listed(gated):
    names = [(name, enum) for name, enum, kind in ACTIVATIONS if kind == gated]
    listed = {path for path, _ in places("Add an activation")}
    complete = {
        path
        for path, text in TEXTS.items()
        if all(names_activation(text, *pair) for pair in names)
    }
    assert complete - listed == set()


def test_every_op_is_in_every_place():
    assert {"_moe_mlp", "_moe_mlp_backward", "_moe_permutation"} <= set(OPS)
    assert missing("Add an op", ops_of) == []


def test_what_is_missing_is_named(monkeypatch):
    path = "torch/utils/flop_counter.py"
    monkeypatch.setitem(TEXTS, path, TEXTS[path].replace("aten._moe_mlp:", ""))
    assert missing("Add an op", lambda which: []) == []
    others = "_moe_mlp_backward _moe_mlp_scaled _moe_mlp_scaled_backward"
    monkeypatch.setitem(TEXTS, path, others)
    assert missing("Add an op", ops_of) == [f"{path}: _moe_mlp"]
