"""Type stubs that a build makes from templates: X.pyi from X.pyi.in.

The wheel has the stub and lacks the template, so that build/checkout has no file for
the hunks of a template. A template is its stub plus a few places that torchgen fills
in, so the hunks fit the stub as well. Used by pipeline and typecheck.
"""

from . import patchfile, wheelsource
from .baseenv import BaseEnv
from .errors import StageError
from .placement import place
from .series import Stack


SUFFIX = ".pyi.in"


def patched_stubs(env: BaseEnv, stack: Stack) -> dict[str, bytes]:
    """Path below site-packages -> the stub as a build of the stack would have it.

    Raises:
        StageError: a hunk does not fit.
    """
    stubs: dict[str, bytes] = {}
    for pr in stack.prs:
        patch = stack.patch(pr)
        for part in patchfile.split_by_file(patch.diff) if patch else ():
            path = patchfile.path_of(part)
            stub = wheelsource.installed_path(path) if path.endswith(SUFFIX) else None
            if stub is None:
                continue
            current = stubs.get(stub)
            if current is None and (env.site / stub).exists():
                current = (env.site / stub).read_bytes()
            placed = place(part, current)
            if placed.status not in ("clean", "fuzzy"):
                where = ", ".join(placed.rejected) or f"the wheel has no {stub}"
                raise StageError(
                    f"{pr.patch_path} does not fit the stub made of {path}: {where}",
                    hint="correct it in a checkout of PyTorch, then refresh "
                    f"{pr.name} --upstream CHECKOUT",
                )
            stubs[stub] = placed.data
    return stubs
