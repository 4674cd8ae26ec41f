"""Runs torchgen for the new and changed ops, only when its inputs changed.

The work is done by torchgen_driver/ in the Python of the base environment.
This module decides whether it must run, turns its errors into messages, and
moves the result into build/gen without touching files that did not change.
"""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from .baseenv import BaseEnv
from .checkout import Checkout
from .config import digest, read_json, Workspace, write_if_changed, write_json
from .console import Console
from .errors import StageError
from .gitrepo import GitError


SHIM_FOLDER = "torch/csrc/inductor/aoti_torch/generated"
_SHIM_HEADERS = tuple(
    f"c_shim_{backend}.h" for backend in ("aten", "cpu", "cuda", "mps", "xpu")
)
_DRIVER = Path(__file__).with_name("torchgen_driver")
_INPUTS = (
    "aten/src/ATen/native/native_functions.yaml",
    "aten/src/ATen/native/tags.yaml",
    "aten/src/ATen/templates",
    "tools/autograd",
    "torchgen",
    SHIM_FOLDER,
)


@dataclass(frozen=True)
class Generated:
    """What torchgen wrote.

    Args:
        folder: build/gen, laid out as in torchgen_driver/emit.py.
        added: names of the new overloads.
        changed: names of existing overloads with a changed dispatch table.
    """

    folder: Path
    added: tuple[str, ...]
    changed: tuple[str, ...]

    @property
    def empty(self) -> bool:
        """Whether the stack changes no op at all."""
        return not self.added and not self.changed


def update(
    workspace: Workspace, env: BaseEnv, checkout: Checkout, tip: str, console: Console
) -> Generated:
    """Generates build/gen for the stack at ``tip`` unless it is current.

    Raises:
        StageError: torchgen rejects a schema or formula, or a checked-in C shim
            header is stale.
    """
    out = workspace.gen
    if not inputs_differ(checkout, checkout.base, tip):
        shutil.rmtree(out, ignore_errors=True)
        return Generated(out, (), ())
    key = digest(env.key, *_input_trees(checkout, tip), *_driver_sources())
    stamp = workspace.state / "codegen.json"
    done = read_json(stamp)
    if done.get("key") != key or not out.exists():
        with console.step("generate code with torchgen"):
            fresh = workspace.build / "gen.tmp"
            result = run_driver(workspace, env, checkout.path, fresh)
            _check_shims(fresh, checkout)
            stamp.unlink(missing_ok=True)
            _replace(fresh, out)
            done = {"key": key, **result}
            write_json(stamp, done)
    return Generated(out, tuple(done["added"]), tuple(done["changed"]))


def run_driver(
    workspace: Workspace,
    env: BaseEnv,
    source: Path,
    out: Path,
    only_shims: bool = False,
) -> dict:
    """Runs torchgen of the tree ``source`` into the new folder ``out``.

    Raises:
        StageError: with torchgen's own first lines.
    """
    shutil.rmtree(out, ignore_errors=True)
    wheel_yaml = env.site / "torchgen/packaged/ATen/native/native_functions.yaml"
    command = [str(env.python), "-B", str(_DRIVER / "main.py")]
    command += [str(source), str(wheel_yaml), str(out)]
    command += ["--only-shims"] if only_shims else []
    done = subprocess.run(
        command, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    log = workspace.logs / "codegen.log"
    write_if_changed(log, done.stdout + done.stderr)
    result_file = out / "result.json"
    result = json.loads(result_file.read_text()) if result_file.exists() else {}
    if done.returncode or "error" in result:
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        raise StageError(
            f"torchgen rejects the ops: {result.get('error', last)}", log=log
        )
    return result


def stale_shims(generated: Path, source: Path) -> list[str]:
    """Checked-in C shim headers that differ from what torchgen writes."""
    return [
        name
        for name in _SHIM_HEADERS
        if (generated / "shims" / name).read_bytes()
        != (source / SHIM_FOLDER / name).read_bytes()
    ]


def copy_shims(generated: Path, source: Path) -> None:
    """Puts the generated C shim headers where upstream checks them in."""
    for name in _SHIM_HEADERS:
        shutil.copyfile(generated / "shims" / name, source / SHIM_FOLDER / name)


def inputs_differ(checkout: Checkout, old: str, new: str) -> bool:
    """Whether anything torchgen reads changed between two commits."""
    return _input_trees(checkout, old) != _input_trees(checkout, new)


def _check_shims(fresh: Path, checkout: Checkout) -> None:
    stale = stale_shims(fresh, checkout.path)
    if stale:
        raise StageError(
            f"stale C shim header: {SHIM_FOLDER}/{stale[0]} is not what torchgen "
            "writes for the patched native_functions.yaml and fallback_ops.py",
            hint="tools/stage.py refresh --regenerate-shims   (writes them into the "
            "patches of the PRs that add the ops)",
        )


def _input_trees(checkout: Checkout, commit: str) -> list[str]:
    try:
        specs = [f"{commit}:{path}" for path in _INPUTS]
        return checkout.git.run("rev-parse", *specs).split()
    except GitError:
        return []  # not a PyTorch tree: nothing to generate


def _driver_sources() -> list[bytes]:
    return [path.read_bytes() for path in sorted(_DRIVER.glob("*.py"))]


def _replace(fresh: Path, out: Path) -> None:
    """Moves a generated tree over the old one, keeping unchanged files."""
    for path in sorted(fresh.rglob("*")):
        if path.is_file():
            write_if_changed(out / path.relative_to(fresh), path.read_bytes())
    for path in sorted(out.rglob("*")):
        if path.is_file() and not (fresh / path.relative_to(out)).exists():
            path.unlink()
    shutil.rmtree(fresh)
