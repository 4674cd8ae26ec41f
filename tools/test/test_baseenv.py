"""The base environment: pinned, untouched, and clear about what went wrong."""

import shutil
import subprocess

import pytest

from staging import baseenv
from staging.config import base_key, write_if_changed
from staging.errors import from_os_error, StageError


def test_edited_wheel_file_is_named(project, console):
    baseenv.ensure(project.workspace, project.stack, console)
    path = project.env.site / "torch/overrides.py"
    path.write_text(path.read_text() + "edited = True\n")
    with pytest.raises(StageError) as failure:
        project.setup()
    assert f"{path} differs from the released wheel" in str(failure.value)
    assert "--fresh" in failure.value.hint


def test_missing_wheel_file_is_named(project, console):
    (project.env.site / "torch/nn/functional.py").unlink()
    with pytest.raises(StageError, match="functional.py is missing"):
        baseenv.ensure(project.workspace, project.stack, console)


def test_write_through_the_staged_environment_is_noticed(project):
    project.setup()
    linked = project.site / "torch/nn/functional.py"
    with linked.open("a") as file:
        file.write("# through the link\n")
    with pytest.raises(StageError, match="functional.py differs"):
        project.setup()


def test_untouched_files_are_hashed_once(project, console, monkeypatch):
    baseenv.ensure(project.workspace, project.stack, console)
    hashed = []
    real = baseenv._compare
    monkeypatch.setattr(
        baseenv, "_compare", lambda env, rows: (hashed.extend(rows), real(env, rows))
    )
    baseenv.ensure(project.workspace, project.stack, console)
    assert hashed == []
    (project.env.site / "torch/nn/functional.py").touch()
    baseenv.ensure(project.workspace, project.stack, console)
    assert [name for name, _ in hashed] == ["torch/nn/functional.py"]


def test_no_space_for_the_base(project, console, monkeypatch):
    shutil.rmtree(project.env.folder)
    usage = shutil._ntuple_diskusage(10 * 2**30, 9 * 2**30, 2**30)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    with pytest.raises(StageError) as failure:
        baseenv.ensure(project.workspace, project.stack, console)
    assert "needs 7 GB" in str(failure.value)
    assert "1.0 GB free" in str(failure.value)
    assert not project.env.folder.exists()


def test_network_trouble(project, console, monkeypatch):
    """A real pip against a port nobody listens on."""
    shutil.rmtree(project.env.folder)
    project.write("requirements.txt", "no-such-package-of-ours==1.0\n")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    for name in ("PIP_EXTRA_INDEX_URL", "PIP_FIND_LINKS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("PIP_RETRIES", "0")
    with pytest.raises(StageError) as failure:
        baseenv.ensure(project.workspace, project.stack, console)
    assert failure.value.message.startswith("pip: ERROR")
    assert "check the network" in failure.value.hint
    assert failure.value.log.exists()
    assert not project.env.stamp.exists(), "a failed base counts as complete"


def test_killed_installation_is_started_again(project, console, monkeypatch):
    project.env.stamp.unlink()
    leftover = project.env.venv / "leftover"
    leftover.touch()
    made = []

    def fake_create(env, stack, console):
        made.append(env)
        shutil.rmtree(env.folder)
        raise StageError("stop here")

    monkeypatch.setattr(baseenv, "_create", fake_create)
    with pytest.raises(StageError, match="stop here"):
        baseenv.ensure(project.workspace, project.stack, console)
    assert made


def test_pip_out_of_space():
    lines = [
        "Installing",
        "ERROR: Could not install: [Errno 28] No space left on device",
    ]
    error = baseenv._pip_error(lines, baseenv.Path("base/pip.log"))
    assert error.message == "no space left on the disk of base"


def test_other_build_of_the_same_version(project):
    path = project.env.site / "torch/version.py"
    path.write_text("git_version = 'other'\n")
    with pytest.raises(StageError, match="was built from other"):
        baseenv._check_build(project.env, project.stack)


def test_pins_name_the_environment(project):
    before = base_key(project.stack)
    project.write("requirements.txt", "numpy==2.4.7\n")
    assert base_key(project.stack) != before


def test_full_disk_is_reported_with_the_path(tmp_path):
    """/dev/full answers every write as a full disk does."""
    target = tmp_path / "folder" / "file"
    target.parent.mkdir()
    (target.parent / ".file.new").symlink_to("/dev/full")
    with pytest.raises(OSError) as failure:
        write_if_changed(target, b"x" * 100_000)
    assert "no space left on the disk" in from_os_error(failure.value).message


def test_venv_python_is_not_the_tools_python(project):
    """The fixture is honest: its base interpreter runs."""
    done = subprocess.run([project.env.python, "-c", "print(1)"], capture_output=True)
    assert done.stdout == b"1\n"
