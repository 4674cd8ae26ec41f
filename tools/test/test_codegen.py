"""The real torchgen of the pinned wheel, on patched copies of its yaml files.

Needs the base environment; `stage.py test` has made it before this runs.
"""

import shutil

import pytest

from staging import baseenv, codegen, series as series_module, wheelsource
from staging.cli import ROOT
from staging.config import Workspace, workspace as make_workspace
from staging.console import Console
from staging.errors import StageError


NATIVE = "aten/src/ATen/native/native_functions.yaml"
DERIVATIVES = "tools/autograd/derivatives.yaml"
OP = """
- func: _staging_test(Tensor input, int k) -> (Tensor values, Tensor extra)
  variants: function
  dispatch:
    CPU: staging_test_cpu
    CompositeExplicitAutograd: staging_test
"""
FORMULA = """
- name: _staging_test(Tensor input, int k) -> (Tensor values, Tensor extra)
  output_differentiability: [True, False]
  input: grad.mul(extra)
"""
_INPUT_FOLDERS = ("aten/src/ATen/native", "aten/src/ATen/templates", "tools/autograd")


@pytest.fixture(scope="module")
def base():
    stack = series_module.load(ROOT)
    env = baseenv.locate(make_workspace(ROOT), stack)
    if not env.stamp.exists():
        pytest.skip("the base environment is not installed (stage.py setup)")
    wheelsource.ensure(env, Console(quiet=True))
    return env


@pytest.fixture
def tree(base, tmp_path):
    """The part of the recovered sources that torchgen reads."""
    source = wheelsource.ensure(base, Console(quiet=True)).path
    for folder in (*_INPUT_FOLDERS, "torchgen", codegen.SHIM_FOLDER):
        shutil.copytree(source / folder, tmp_path / "tree" / folder)
    return tmp_path / "tree"


@pytest.fixture
def generate(base, tree, tmp_path):
    """Runs the driver on the tree; returns (result, output folder)."""
    workspace = Workspace(ROOT, tmp_path / "build", tmp_path / "cache")

    def run():
        out = tmp_path / "gen"
        return codegen.run_driver(workspace, base, tree, out), out

    return run


def append(tree, name, text):
    path = tree / name
    path.write_text(path.read_text() + text)


def replace(tree, name, old, new):
    path = tree / name
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))


def test_unpatched_yaml_has_no_difference(generate, tree):
    result, out = generate()
    assert result == {"added": [], "changed": []}
    assert codegen.stale_shims(out, tree) == []


def test_new_op_with_named_returns(generate, tree):
    append(tree, NATIVE, OP)
    append(tree, DERIVATIVES, FORMULA)
    result, out = generate()
    assert result == {"added": ["_staging_test"], "changed": []}
    aten, autograd = out / "aten/src/ATen", out / "torch/csrc/autograd/generated"
    schema = (aten / "RegisterSchema.cpp").read_text()
    assert schema.count("m.def(") == 1
    assert "TORCH_LIBRARY_FRAGMENT(aten, m)" in schema
    assert "staging_test_cpu" in (aten / "RegisterCPUEverything.cpp").read_text()
    assert (
        "struct TORCH_API StagingTestBackward0"
        in (autograd / "Functions.h").read_text()
    )
    types = (autograd / "python_return_types.cpp").read_text()
    assert '{"values", ""}, {"extra", ""}' in types
    assert 'addReturnType(return_types_module, "_staging_test"' in types
    arguments = (out / "python/annotated_fn_args.py").read_text()
    assert "torch._C._VariableFunctions._staging_test" in arguments
    assert {p.name for p in (aten / "ops").glob("*_ops.h")} == {"_staging_test_ops.h"}


def test_changed_dispatch_registers_only_that_kernel(generate, tree):
    text = (tree / NATIVE).read_text()
    start = text.index("- func: _grouped_mm(")
    entry = text[start : text.index("\n\n", start)]
    assert "    CUDA: _grouped_mm_cuda" in entry and "    CPU:" not in entry
    changed = entry.replace("  dispatch:\n", "  dispatch:\n    CPU: _grouped_mm_ours\n")
    replace(tree, NATIVE, entry, changed)
    result, out = generate()
    assert result == {"added": [], "changed": ["_grouped_mm"]}
    files = sorted((out / "changed/aten/src/ATen").glob("*.cpp"))
    assert [path.name for path in files] == ["RegisterCPUEverything.cpp"]
    text = files[0].read_text()
    assert text.count("m.impl(") == 1
    assert "_grouped_mm_ours" in text


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        (NATIVE, OP.replace("Tensor input", "Tensr input"), "Tensr"),
        (NATIVE, OP.replace("dispatch:", "dispach:"), "dispach"),
        (DERIVATIVES, FORMULA, "_staging_test"),
        (
            NATIVE,
            OP.replace("variants: function", "variants: method"),
            "Method variant must",
        ),
    ],
)
def test_rejected_schema(generate, tree, name, text, expected):
    """A type, a field, a formula without op, and what the overlay cannot bind."""
    append(tree, name, text)
    with pytest.raises(StageError) as failure:
        generate()
    assert failure.value.message.startswith("torchgen rejects the ops: ")
    assert expected in failure.value.message
    assert "Traceback" not in failure.value.message
    assert len(failure.value.message.splitlines()) <= 8
    assert failure.value.log.exists()


@pytest.mark.parametrize(
    ("new", "expected"),
    [
        ("_grouped_mm(int k, ", "_grouped_mm: the schema of an existing op cannot"),
        ("_renamed_mm(", "_grouped_mm: an op of the wheel cannot be removed"),
    ],
)
def test_existing_op_that_the_overlay_cannot_change(generate, tree, new, expected):
    replace(tree, NATIVE, "- func: _grouped_mm(", f"- func: {new}")
    with pytest.raises(StageError, match=expected):
        generate()


def test_stale_shim_header(generate, tree):
    append(tree, NATIVE, OP)
    replace(
        tree,
        "torchgen/aoti/fallback_ops.py",
        '    "aten._grouped_mm.default": {',
        '    "aten._staging_test.default": {"since": "TORCH_VERSION_2_16_0"},\n'
        '    "aten._grouped_mm.default": {',
    )
    _, out = generate()
    stale = codegen.stale_shims(out, tree)
    assert "c_shim_cpu.h" in stale
    codegen.copy_shims(out, tree)
    assert codegen.stale_shims(out, tree) == []
    header = (tree / codegen.SHIM_FOLDER / "c_shim_cpu.h").read_text()
    assert "aoti_torch_cpu__staging_test(" in header
    assert "aoti_torch_cpu__staging_test(" in (out / "aoti/c_shim_cpu.cpp").read_text()


def test_stale_shim_stops_setup_with_the_fix(generate, tree):
    class FakeCheckout:
        path = tree

    _, out = generate()
    header = tree / codegen.SHIM_FOLDER / "c_shim_cpu.h"
    header.write_text(header.read_text() + "// edited by hand\n")
    with pytest.raises(
        StageError, match="stale C shim header: .*c_shim_cpu.h"
    ) as failure:
        codegen._check_shims(out, FakeCheckout)
    assert "refresh --regenerate-shims" in failure.value.hint
