"""setup: base -> sources -> checkout -> codegen -> build -> staged environment.

Every step looks first whether it has anything to do, so that repeating setup
is cheap and a killed setup is repaired by the next one.
"""

import json
import platform
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import filelock

from . import baseenv, buildgraph, codegen, compile, wheelsource
from .baseenv import BaseEnv
from .buildgraph import Binaries, BuildOptions
from .checkout import Checkout
from .codegen import Generated
from .config import Workspace, write_if_changed, write_link
from .console import Console
from .errors import StageError
from .farm import Farm
from .series import Stack
from .stubs import patched_stubs


@dataclass(frozen=True)
class Staged:
    """A finished setup.

    Args:
        python: interpreter of the staged environment.
        build_hash: names its contents; part of the Inductor cache path.
        tip: commit of build/checkout that is staged.
    """

    python: Path
    build_hash: str
    tip: str


@contextmanager
def locked(workspace: Workspace, console: Console, wait: bool = True) -> Iterator[None]:
    """Only one process at a time works on a build folder.

    Raises:
        StageError: another one does and ``wait`` is False.
    """
    _make_build_folder(workspace)
    lock = filelock.FileLock(workspace.build / ".lock")
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        if not wait:
            raise StageError(
                f"another stage.py is working in {workspace.build}",
                hint="wait for it, or leave out --no-wait",
            ) from None
        console.warn(
            f"another stage.py is working in {workspace.build}; waiting for it"
        )
        lock.acquire()
    try:
        yield
    finally:
        lock.release()


def _make_build_folder(workspace: Workspace) -> None:
    workspace.build.mkdir(parents=True, exist_ok=True)
    if workspace.link:
        write_link(workspace.link, workspace.build)


def open_checkout(
    workspace: Workspace, stack: Stack, console: Console, fresh: bool = False
) -> tuple[BaseEnv, Checkout]:
    """The base environment and the checkout, without bringing it to the tip."""
    _check_platform()
    env = baseenv.ensure(workspace, stack, console, fresh=fresh)
    return env, Checkout(workspace, wheelsource.ensure(env, console))


def setup(
    workspace: Workspace,
    stack: Stack,
    console: Console,
    options: BuildOptions | None = None,
    fresh: bool = False,
    discard: bool = False,
) -> Staged:
    """Makes build/venv hold the whole stack. Call it with the lock held.

    Args:
        options: build options; None means those of the last setup.
        fresh: install the base environment anew.
        discard: drop edits of build/checkout that are not in the repository.

    Raises:
        StageError: anything that keeps the stack from being staged.
    """
    chosen = options or _last_options(workspace)
    write_if_changed(workspace.state / "options.json", json.dumps(asdict(chosen)))
    if not baseenv.locate(workspace, stack).stamp.exists():
        compile.check_compiler()  # before the download, not after it
    env, checkout = open_checkout(workspace, stack, console, fresh)
    tip = checkout.sync(stack, console, discard)
    generated = codegen.update(workspace, env, checkout, tip, console)
    binaries = buildgraph.write(workspace, env, checkout, generated, tip, chosen)
    if binaries:
        compile.build(workspace, binaries, console)
    farm = Farm(workspace, env)
    files = staged_files(env, checkout, generated, binaries, tip)
    files.update(patched_stubs(env, stack))
    farm.update(files, console)
    return Staged(farm.python, farm.build_hash, tip)


def staged_files(
    env: BaseEnv,
    checkout: Checkout,
    generated: Generated,
    binaries: Binaries | None,
    tip: str,
) -> dict[str, bytes]:
    """Everything a build of the stack installs differently from the wheel."""
    files = {}
    for name in checkout.names_between(checkout.base, tip):
        target = wheelsource.installed_path(name)
        source = checkout.path / name
        if target and source.exists():
            files[target] = _installed_bytes(env, target, source)
    files.update(_generated_files(env, generated))
    if binaries:
        files["torch/lib/libtorch.so"] = binaries.library.read_bytes()
        if binaries.extension:
            extension = f"torch/{binaries.extension.name}"
            files[extension] = binaries.extension.read_bytes()
    return files


def _installed_bytes(env: BaseEnv, target: str, source: Path) -> bytes:
    """Headers get the guard that setup.py puts around them."""
    data = source.read_bytes()
    if not target.startswith("torch/include/"):
        return data
    original = env.site / target
    if original.exists() and not original.read_text().startswith("#if !defined(TORCH_"):
        return data
    return wheelsource.guard(data.decode()).encode()


def _generated_files(env: BaseEnv, generated: Generated) -> Iterator[tuple[str, bytes]]:
    if generated.empty:
        return
    ops = generated.folder / "aten/src/ATen/ops"
    for path in sorted(ops.glob("*.h")):
        text = wheelsource.guard(path.read_text())
        yield f"torch/include/ATen/ops/{path.name}", text.encode()
    for umbrella, includes in buildgraph.umbrella_includes(ops).items():
        if includes:
            name = f"torch/include/ATen/{umbrella}"
            yield name, _with_includes((env.site / name).read_text(), includes).encode()
    arguments = generated.folder / "python" / "annotated_fn_args.py"
    name = "torch/testing/_internal/generated/annotated_fn_args.py"
    yield name, arguments.read_bytes()


def _with_includes(text: str, includes: str) -> str:
    """Adds lines after the last per-operator include of an umbrella header."""
    last = list(re.finditer(r"^#include <ATen/ops/[^>]+>\n", text, re.MULTILINE))[-1]
    return text[: last.end()] + includes + text[last.end() :]


def _check_platform() -> None:
    if (platform.system(), platform.machine()) != ("Linux", "x86_64"):
        raise StageError(
            f"staging works on Linux x86_64 only, this is {platform.system()} "
            f"{platform.machine()}"
        )


def options(
    workspace: Workspace, capability: str | None, ndebug: bool | None
) -> BuildOptions:
    """The last setup's options with these changes (None: no change)."""
    last = _last_options(workspace)
    return BuildOptions(
        capability=last.capability if capability is None else capability,
        ndebug=last.ndebug if ndebug is None else ndebug,
    )


def _last_options(workspace: Workspace) -> BuildOptions:
    """Options given once stay in force, so that `test` does not rebuild."""
    try:
        text = (workspace.state / "options.json").read_text()
        return BuildOptions(**json.loads(text))
    except (FileNotFoundError, json.JSONDecodeError, TypeError):
        return BuildOptions()
