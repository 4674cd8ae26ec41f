"""build/venv: only links, never writes through one, repairs what was killed."""

import json
import os
import shutil
import subprocess

import pytest
from conftest import FIRST_FILE, WHEEL_FILES

from staging import config, pipeline, series
from staging.errors import StageError
from staging.farm import Farm, MANIFEST


def base_files(project):
    """Contents and times of everything in the base's site-packages."""
    site = project.env.site
    paths = [p for p in sorted(site.rglob("*")) if p.is_file()]
    return {
        p.relative_to(site).as_posix(): (p.read_bytes(), p.stat().st_mtime_ns)
        for p in paths
    }


def test_unpatched_files_are_links_and_patched_ones_are_not(project):
    before = base_files(project)
    project.setup()
    untouched = "torch/nn/functional.py"
    assert os.path.samefile(project.site / untouched, project.env.site / untouched)
    patched = "torch/overrides.py"
    assert not os.path.samefile(project.site / patched, project.env.site / patched)
    assert "second = True" in (project.site / patched).read_text()
    assert (project.site / "torch/nn/moe.py").read_text() == FIRST_FILE
    assert base_files(project) == before


def test_one_edit_rewrites_one_file(project):
    project.setup()
    kept = project.site / "torch/overrides.py"
    inode, marker = kept.stat().st_ino, project.workspace.venv / "marker"
    marker.touch()
    project.write("torch/nn/moe.py", "# two\n")
    project.setup()
    assert (project.site / "torch/nn/moe.py").read_text() == "# two\n"
    assert kept.stat().st_ino == inode
    assert marker.exists(), "the farm was rebuilt for a Python edit"


def test_stale_bytecode_goes(project):
    project.setup()
    cached = project.site / "torch/nn/__pycache__/moe.cpython-311.pyc"
    cached.parent.mkdir()
    cached.touch()
    project.write("torch/nn/moe.py", "# two\n")
    project.setup()
    assert not cached.exists()


def test_file_that_leaves_the_stack_is_restored(project):
    project.setup()
    for name in ("100-first", "110-second"):
        (project.root / f"torch_patches/{name}.patch").unlink()
    path = project.root / "torch_patches/series.toml"
    path.write_text(path.read_text().replace('["torch/nn/moe.py"]', "[]"))
    project.setup()
    name = "torch/overrides.py"
    assert os.path.samefile(project.site / name, project.env.site / name)
    assert not (project.site / "torch/nn/moe.py").exists()


def test_folder_that_leaves_the_stack_is_gone(project):
    """Python would import what is left of it as a namespace package."""
    names = "torch/nn/experts/moe.py", "torch/nn/experts/deeper/moe.py"
    project.setup()
    farm = Farm(project.workspace, project.env)
    files = dict.fromkeys(("torch/nn/moe.py", *names), b"")
    farm.update(files, project.console)
    for name in names:
        cache = project.site / name.replace("moe.py", "__pycache__")
        cache.mkdir()
        (cache / "moe.cpython-311.pyc").touch()
    farm.update({"torch/nn/moe.py": b""}, project.console)
    assert not (project.site / "torch/nn/experts").exists()
    assert (project.site / "torch/nn").exists()


def test_killed_update_is_done_again(project):
    project.setup()
    manifest = project.workspace.venv / MANIFEST
    data = json.loads(manifest.read_text())
    data["files"]["torch/nn/moe.py"] = ""
    manifest.write_text(json.dumps(data))
    (project.site / "torch/nn/moe.py").write_text("half")
    project.setup()
    assert (project.site / "torch/nn/moe.py").read_text() == FIRST_FILE


def test_killed_rebuild_is_done_again(project):
    project.setup()
    venv = project.workspace.venv
    os.rename(venv, venv.with_name("venv.tmp"))
    (venv.with_name("venv.tmp") / MANIFEST).unlink()
    project.setup()
    assert (project.site / "torch/nn/moe.py").read_text() == FIRST_FILE
    assert not venv.with_name("venv.tmp").exists()


def test_new_base_makes_a_new_farm(project):
    project.setup()
    marker = project.workspace.venv / "marker"
    marker.touch()
    project.env.stamp.write_text("another")
    project.setup()
    assert not marker.exists()


def refuse(*args, **kwargs):
    raise OSError("not here")


@pytest.mark.parametrize("mode", ["symlink", "copy"])
def test_fallback_without_hardlinks(project, monkeypatch, capfd, mode):
    monkeypatch.setattr(os, "link", refuse)
    if mode == "copy":
        real = os.symlink
        # venv itself needs symlinks; only those into the base are refused.
        refused = str(project.env.site)
        monkeypatch.setattr(
            os,
            "symlink",
            lambda a, b: refuse() if str(a).startswith(refused) else real(a, b),
        )
        monkeypatch.setattr(
            shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 0, 2**40)
        )
    project.setup()
    assert f"uses {mode} instead" in capfd.readouterr().err
    untouched = project.site / "torch/nn/functional.py"
    assert untouched.is_symlink() == (mode == "symlink")
    assert untouched.read_text() == WHEEL_FILES["torch/nn/functional.py"]
    before = base_files(project)
    project.write("torch/nn/moe.py", "# two\n")
    project.setup()
    assert base_files(project) == before


def test_no_link_and_no_space(project, monkeypatch):
    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr(os, "symlink", refuse)
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(1, 1, 0)
    )
    with pytest.raises(StageError, match="a copy needs 6 GB where 0.0 GB are free"):
        project.setup()
    assert not project.workspace.venv.exists()


def test_build_hash_names_the_contents(project):
    first = project.setup().build_hash
    assert project.setup().build_hash == first
    project.write("torch/nn/moe.py", "# two\n")
    assert project.setup().build_hash != first
    assert Farm(project.workspace, project.env).build_hash != first


def test_a_repository_whose_path_has_a_blank(project, tmp_path, monkeypatch):
    """Inductor does not quote include folders: torch has to lie elsewhere."""
    cache, root = tmp_path / "cache", tmp_path / "with a blank"
    cache.symlink_to(project.cache)
    monkeypatch.setenv("MOE_STAGING_CACHE", str(cache))
    shutil.copytree(project.root, root, ignore=shutil.ignore_patterns("build"))
    moved = config.workspace(root)
    with pipeline.locked(moved, project.console):
        staged = pipeline.setup(moved, series.load(root), project.console)
    assert " " not in str(staged.python)
    assert (root / "build").resolve() == moved.build.resolve()
    command = [
        str(root / "build/venv/bin/python"),
        "-c",
        "import sys; print(sys.prefix)",
    ]
    prefix = subprocess.run(command, capture_output=True, text=True, check=True)
    assert prefix.stdout.strip() == str(moved.venv)
    assert config.workspace(root).build == moved.build, "the link is taken for a folder"


def test_a_build_folder_stays_where_it_is(tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_STAGING_CACHE", str(tmp_path / "cache"))
    plain, blank = tmp_path / "plain", tmp_path / "with a blank"
    (blank / "build").mkdir(parents=True)
    for root in (plain, blank):
        found = config.workspace(root)
        assert (found.build, found.link) == (root / "build", None)
    monkeypatch.setenv("MOE_STAGING_CACHE", str(blank / "cache"))
    assert config.workspace(tmp_path / "a b").link is None
