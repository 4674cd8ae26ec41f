"""Pyrefly on the stack's own files below torch/, on each platform that PyTorch runs on.

They mean something only inside a whole torch, so build/types gets one: the sources at
the tip of the stack, the stubs that the wheel brings, and the stubs of the stack's
templates. Nothing is compiled, and build/checkout stays as it is. Used by lint.
"""

import json
import re
import subprocess
import sys
from pathlib import Path

from .baseenv import BaseEnv
from .checkout import Checkout
from .config import Workspace, write_if_changed
from .errors import StageError
from .series import Stack
from .stubs import patched_stubs


_CONFIG = Path(__file__).with_name("linters") / "pyrefly_torch.toml"
_YAML = "aten/src/ATen/native/native_functions.yaml"
_NOT_CHECKED = "torch/testing/_internal/"  # as upstream
# Names such as os.fork are on some of them only; the first has the whole check.
_PLATFORMS = ("linux", "win32", "darwin")


def check(
    workspace: Workspace, env: BaseEnv, checkout: Checkout, stack: Stack, tip: str
) -> list[str]:
    """One line per error Pyrefly has about our files below torch/.

    Args:
        tip: commit of build/checkout's repository with the whole stack.

    Raises:
        StageError: Pyrefly itself fails.
    """
    files = [
        path
        for pr in stack.prs
        for path in pr.files
        if path.startswith("torch/")
        and path.endswith(".py")
        and not path.startswith(_NOT_CHECKED)
    ]
    if not files:
        return []
    tree = make_tree(workspace, env, checkout, stack, tip)
    command = [str(Path(sys.executable).with_name("pyrefly")), "check"]
    command += ["--config", str(_CONFIG), "--output-format=json", "--summary=none"]
    command += ["--python-interpreter-path", str(env.python)]
    command += ["--search-path", str(tree)]
    lines: dict[str, list[str]] = {}
    for platform in _PLATFORMS:
        arguments = [*command, "--python-platform", platform, *files]
        done = subprocess.run(arguments, cwd=tree, capture_output=True, text=True)
        try:
            findings = json.loads(done.stdout)["errors"]
        except (json.JSONDecodeError, KeyError):
            raise StageError(f"pyrefly failed: {done.stderr.strip()[:500]}") from None
        for found in findings:
            line = (
                f"{_relative(found['path'], tree)}:{found['line']}: {found['name']}: "
                f"{found['description']}"
            )
            lines.setdefault(line, []).append(platform)
    return [
        line if _PLATFORMS[0] in found else f"{line} (on {', '.join(found)})"
        for line, found in lines.items()
    ]


def make_tree(
    workspace: Workspace, env: BaseEnv, checkout: Checkout, stack: Stack, tip: str
) -> Path:
    """build/types: what a build of the stack has in Python, without the build."""
    tree = workspace.build / "types"
    tree.mkdir(parents=True, exist_ok=True)
    # Its own index, inside, so that only what changed is written, and all of it
    # when somebody deleted the folder.
    git = {
        "GIT_DIR": str(checkout.path / ".git"),
        "GIT_INDEX_FILE": str(tree / ".index"),
        "GIT_WORK_TREE": str(tree),
    }
    (tree / ".index.lock").unlink(missing_ok=True)
    checkout.git.run("read-tree", "--reset", "-u", tip, env=git)
    files = {
        path.relative_to(env.site).as_posix(): path.read_bytes()
        for path in (env.site / "torch").rglob("*.pyi")
    }
    ops = "torch/_C/_VariableFunctions.pyi"
    if ops in files:
        files[ops] = _with_new_ops(files[ops], tree / _YAML)
    for name, data in (files | patched_stubs(env, stack)).items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        write_if_changed(tree / name, data)
    return tree


def _with_new_ops(stub: bytes, functions: Path) -> bytes:
    """The stub of torch's functions with those that the stack adds; torchgen would type them."""
    names = re.findall(r"^- func: (\w+)[.(]", functions.read_text(), re.MULTILINE)
    known = set(re.findall(r"^def (\w+)\(", stub.decode(), re.MULTILINE))
    new = [n for n in dict.fromkeys(names) if n.startswith("_moe") and n not in known]
    lines = [f"def {n}(*args: Any, **kwargs: Any) -> Any: ..." for n in new]
    return stub + "\n".join([*lines, f"__all__ += {new}", ""]).encode()


def _relative(path: str, tree: Path) -> str:
    found = Path(path)
    return (found.relative_to(tree) if found.is_absolute() else found).as_posix()
