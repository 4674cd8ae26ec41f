"""Where everything lies: the repository, its build folder, the user's cache.

repository/build/             derived, never committed, safe to delete
    checkout/                 git: wheel sources + one commit per PR
    gen/ include/ obj/        torchgen output, overlay headers, objects
    venv/                     the staged environment
    state/ logs/              what was done last; full output of tools
<cache>/base-<hash>/          shared by all clones with the same pins
    venv/ source/             pip environment; sources recovered from it
<cache>/builds/<hash>/        a build folder whose repository has a blank in its path

Inductor does not quote the include folders of the torch that it runs in, so that a torch
below a path with a blank can't compile. For such a clone repository/build is a link.
"""

import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path

from .series import Stack
from .texts import encode


CACHE_VARIABLE = "MOE_STAGING_CACHE"
_CACHE_NAME = "pytorch-moe-staging"


@dataclass(frozen=True)
class Workspace:
    """One repository clone, one build folder in it, one cache."""

    repo: Path
    build: Path
    cache: Path

    @property
    def checkout(self) -> Path:
        return self.build / "checkout"

    @property
    def gen(self) -> Path:
        return self.build / "gen"

    @property
    def venv(self) -> Path:
        return self.build / "venv"

    @property
    def state(self) -> Path:
        return self.build / "state"

    @property
    def logs(self) -> Path:
        return self.build / "logs"

    @property
    def link(self) -> Path | None:
        """repository/build, if that has to be a link to ``build``."""
        link = self.repo / "build"
        return link if _has_blank(link) and not _has_blank(self.build) else None


def workspace(repo: Path) -> Workspace:
    """The workspace of a repository clone."""
    cache, build = cache_folder(), repo / "build"
    # A real folder comes from a stager that did not move it. Its venv works, but cannot compile.
    if _has_blank(build) and not _has_blank(cache) and not _is_real_folder(build):
        build = cache / "builds" / digest(str(repo))[:12]
    return Workspace(repo=repo, build=build, cache=cache)


def _has_blank(path: Path) -> bool:
    return any(c.isspace() for c in str(path))


def _is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


def cache_folder() -> Path:
    """$MOE_STAGING_CACHE, else the XDG cache folder. stage.py has the same rule."""
    explicit = os.environ.get(CACHE_VARIABLE)
    if explicit:
        return Path(explicit).absolute()
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / _CACHE_NAME


def base_key(stack: Stack) -> str:
    """Names the base environment: a hash of everything that is pinned in it."""
    pins = (stack.root / "requirements.txt").read_bytes()
    text = f"{stack.base.torch} {stack.base.git} {stack.base.python}\n"
    return hashlib.sha256(text.encode() + pins).hexdigest()[:12]


def digest(*parts: str | bytes) -> str:
    """One hash of several texts, unambiguous about where each ends."""
    total = hashlib.sha256()
    for part in parts:
        data = encode(part) if isinstance(part, str) else part
        total.update(f"{len(data)}:".encode())
        total.update(data)
    return total.hexdigest()


def write_if_changed(path: Path, text: str | bytes) -> bool:
    """Writes only different contents, so that file times mean something.

    Returns:
        Whether the file was written.
    """
    data = encode(text) if isinstance(text, str) else text
    try:
        if path.read_bytes() == data:
            return False
    except FileNotFoundError:
        pass
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, data)
    return True


def write_atomically(path: Path, data: bytes) -> None:
    """Write-then-rename: a killed process never leaves half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.new")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def read_json(path: Path) -> dict:
    """What a file remembers: nothing if it is absent or spoiled."""
    try:
        value = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):  # ValueError: no JSON, or no UTF-8
        return {}
    return value if isinstance(value, dict) else {}


def write_json(path: Path, value: object) -> None:
    write_atomically(path, json.dumps(value, indent=1).encode())


def write_link(path: Path, target: Path) -> None:
    """Makes ``path`` a link to ``target``, whatever it was a link to before."""
    if path.is_symlink() and Path(os.readlink(path)) == target:
        return
    temporary = path.with_name(f".{path.name}.new")
    temporary.unlink(missing_ok=True)
    temporary.symlink_to(target)
    os.replace(temporary, path)
