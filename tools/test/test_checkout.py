"""build/checkout: reproducible commits, clear failures, no edit is ever lost."""

import json
import os

import pytest
from conftest import FIRST_FILE, FIRST_PATCH, WHEEL_FILES

from staging.errors import StageError
from staging.wheelsource import guard, installed_path, unguard


def test_one_commit_per_pr(project):
    staged = project.setup()
    git = project.checkout().git
    titles = git.run("log", "--reverse", "--format=%s").split("\n")
    assert titles[1:3] == ["Add moe.py", "Add its test"]
    assert git.resolve("HEAD") == staged.tip
    text = (project.workspace.checkout / "torch/overrides.py").read_text()
    assert "line_11 = 11\nfirst = True\nline_12" in text
    assert "line_30 = 30\nsecond = True\nline_31" in text
    assert (project.workspace.checkout / "torch/nn/moe.py").read_text() == FIRST_FILE


def test_commit_hashes_depend_on_contents_only(project, tmp_path):
    first = project.setup().tip
    os.rename(project.workspace.build, tmp_path / "elsewhere")
    os.rename(project.env.folder / "source-1", tmp_path / "old-source")
    assert project.setup().tip == first
    project.write("torch/nn/moe.py", FIRST_FILE + "# more\n")
    assert project.setup().tip != first


def test_unchanged_files_keep_their_time(project):
    project.setup()
    untouched = project.workspace.checkout / "torch/overrides.py"
    before = untouched.stat().st_mtime_ns
    project.write("torch/nn/moe.py", "# other\n")
    project.setup()
    assert (project.workspace.checkout / "torch/nn/moe.py").read_text() == "# other\n"
    assert untouched.stat().st_mtime_ns == before


def test_patch_that_does_not_apply(project):
    path = project.root / "torch_patches/110-second.patch"
    good = path.read_text()
    path.write_text(good.replace(" line_30 = 30", " line_30 = 31"))
    with pytest.raises(StageError) as failure:
        project.setup()
    message = str(failure.value)
    assert "torch_patches/110-second.patch does not apply" in message
    assert "torch/overrides.py, hunk 1 of 1 (@@ -30,4 +30,5 @@)" in message
    assert not project.workspace.venv.exists()
    path.write_text(good)
    project.setup()


def test_patch_of_a_file_the_wheel_lacks(project):
    text = FIRST_PATCH.replace("torch/overrides.py", "torch/absent.py")
    project.write("torch_patches/100-first.patch", text)
    with pytest.raises(StageError, match="100-first.patch does not apply.*absent.py"):
        project.setup()


def test_new_file_that_pytorch_has(project):
    path = project.root / "torch_patches/series.toml"
    path.write_text(path.read_text().replace("torch/nn/moe.py", "torch/dos.py"))
    project.write("torch/dos.py", "x = 1\n")
    with pytest.raises(StageError, match="torch/dos.py already exists"):
        project.setup()


def test_edits_stop_setup_and_survive(project):
    project.setup()
    project.edit_checkout("torch/nn/moe.py", "# mine\n")
    project.edit_checkout("torch/nn/new.py", "# new\n")
    with pytest.raises(StageError) as failure:
        project.setup()
    assert "torch/nn/moe.py" in str(failure.value)
    assert "torch/nn/new.py" in str(failure.value)
    assert "--discard" in failure.value.hint
    assert (project.workspace.checkout / "torch/nn/moe.py").read_text() == "# mine\n"


def test_commit_on_top_stops_setup(project):
    project.setup()
    checkout = project.checkout()
    project.edit_checkout("torch/overrides.py", "all = 'gone'\n")
    checkout.git.run("commit", "-qam", "mine")
    project.write("torch/nn/moe.py", "# repository\n")
    with pytest.raises(StageError, match="torch/overrides.py"):
        project.setup()


def test_discard_keeps_a_copy(project):
    tip = project.setup().tip
    project.edit_checkout("torch/nn/moe.py", "# mine\n")
    project.edit_checkout("torch/nn/new.py", "# new\n")
    assert project.setup(discard=True).tip == tip
    assert (project.workspace.checkout / "torch/nn/moe.py").read_text() == FIRST_FILE
    assert not (project.workspace.checkout / "torch/nn/new.py").exists()
    (kept,) = project.workspace.build.glob("discarded-*.patch")
    assert "+# mine" in kept.read_text()
    assert "+# new" in kept.read_text()


def test_same_edit_in_both_places_is_no_edit(project):
    project.setup()
    project.edit_checkout("torch/nn/moe.py", "# same\n")
    project.write("torch/nn/moe.py", "# same\n")
    project.setup()
    assert (project.site / "torch/nn/moe.py").read_text() == "# same\n"


def test_interrupted_switch_is_repaired(project):
    tip = project.setup().tip
    state_file = project.workspace.state / "checkout.json"
    state = json.loads(state_file.read_text())
    state_file.write_text(json.dumps({**state, "switching": tip}))
    half = project.workspace.checkout / "torch/overrides.py"
    half.write_text("half a fi")
    (project.workspace.checkout / ".git/index.lock").touch()
    assert project.setup().tip == tip
    assert "second = True" in half.read_text()


def test_lost_source_repository_is_made_again(project, tmp_path):
    tip = project.setup().tip
    os.rename(project.env.folder / "source-1", tmp_path / "gone")
    assert project.setup().tip == tip


@pytest.mark.parametrize(
    ("source", "installed"),
    [
        ("torch/nn/functional.py", "torch/nn/functional.py"),
        ("aten/src/ATen/native/MoE.h", "torch/include/ATen/native/MoE.h"),
        (
            "tools/autograd/derivatives.yaml",
            "torchgen/packaged/autograd/derivatives.yaml",
        ),
        ("aten/src/ATen/native/tags.yaml", "torchgen/packaged/ATen/native/tags.yaml"),
        ("torch/csrc/a/b.h", "torch/include/torch/csrc/a/b.h"),
        ("aten/src/ATen/native/MoE.cpp", None),
        ("test/test_moe.py", None),
        ("docs/source/nn.md", None),
    ],
)
def test_installed_path(source, installed):
    assert installed_path(source) == installed


def test_guard_and_unguard_are_inverses():
    for text in ("#pragma once\n", "#if A\n#else\n#endif\n", ""):
        assert unguard(guard(text)) == text
        assert unguard(text) == text


def test_sources_are_recovered_at_source_paths(project):
    project.setup()
    root = project.workspace.checkout
    assert (root / "aten/src/ATen/core/Tensor.h").exists()
    assert (root / "aten/src/ATen/native/README.md").exists()
    assert not (root / "torch/version.py").exists()
    assert not (root / "torch/include").exists()
    assert (root / "torch/nn/functional.py").read_text() == WHEEL_FILES[
        "torch/nn/functional.py"
    ]
