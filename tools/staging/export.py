"""The way back: edits of build/checkout into patches and new files; verify.

    export   commits of the checkout -> torch_patches/*.patch and new files
    refresh  uncommitted edits -> folded into one PR, then as export
    verify   patches -> commits -> patches must be the identity

Everything is computed before the first file of the repository is written.
"""

import os
import shutil
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

import tomlkit

from . import codegen, patchfile, series as series_module
from .apply import Target
from .baseenv import BaseEnv
from .checkout import Checkout
from .config import Workspace, write_atomically, write_if_changed
from .console import Console
from .errors import StageError
from .gitrepo import GitError, GitRepo
from .series import PullRequest, SERIES_FILE, Stack, UPSTREAM_ROOTS, UpstreamFile
from .texts import encode


# Two lines of context: enough to place a hunk, little enough to survive drift.
_DIFF = (
    *("diff-tree", "-r", "-p", "-U2", "--binary", "--no-renames"),
    *("--no-ext-diff", "--no-color", "--src-prefix=a/", "--dst-prefix=b/"),
)


@dataclass
class Exported:
    """What the repository should hold for a stack of commits.

    Args:
        patches: repository path -> text of the patch file.
        files: repository path -> (contents, executable) of a new file.
        new_files: PR name -> its new files, sorted.
    """

    patches: dict[str, str] = field(default_factory=dict)
    files: dict[str, tuple[bytes, bool]] = field(default_factory=dict)
    new_files: dict[str, list[str]] = field(default_factory=dict)


def collect(
    checkout: Checkout, stack: Stack, commits: Iterable[tuple[str, str, str]]
) -> Exported:
    """Turns commits into patches and new files.

    Args:
        commits: (hash, PR name, message), oldest first, as Checkout.commits.

    Raises:
        StageError: PRs missing or out of order, or a PR deletes a file of PyTorch or
            of another PR.
    """
    commits = list(commits)
    expected = [pr.name for pr in stack.prs]
    found = [name for _, name, _ in commits]
    if found != expected:
        missing = [name for name in expected if name not in found]
        extra = [
            name for name in found if name not in expected or found.count(name) > 1
        ]
        places = zip(found, expected)
        odd = next((f"{a} in place of {b}" for a, b in places if a != b), "")
        raise StageError(
            f"build/checkout has other commits than {SERIES_FILE} has PRs; missing: "
            f"{', '.join(missing) or 'none'}; too many: {', '.join(extra) or 'none'}; first "
            f"difference: {odd or 'behind the last common one'}",
            hint="one commit per PR, in that order",
        )
    exported, owner = Exported(), {}
    for commit, name, message in commits:
        edited = []
        exported.new_files[name] = []
        for status, path in _changes(checkout.git, commit):
            is_new = not checkout.git.has(f"{checkout.base}:{path}")
            if is_new and owner.setdefault(path, name) == name:
                exported.new_files[name].append(path)
            else:
                if status == "D":
                    raise StageError(
                        f"{name}: deletes {path} of {owner.get(path, 'PyTorch')}"
                    )
                edited.append(path)
            if is_new:
                exported.files[path] = _contents(checkout.git, commit, path)
        diff = ""
        if edited:
            specs = [f":(literal){path}" for path in edited]
            diff = checkout.git.run(*_DIFF, f"{commit}^", commit, "--", *specs)
        pr = stack.get(name)
        # Files the wheel lacks are in no commit; their hunks stay as they are.
        patch = stack.patch(pr)
        if pr.upstream and patch:
            diff = patchfile.merge(diff, patch.only(pr.upstream_paths).diff)
        text = patchfile.render(message, diff, stack.author)
        again = patchfile.parse(text)
        if patchfile.render(again.message, again.diff, stack.author) != text or (
            again.message.split() != message.split()
        ):
            raise StageError(
                f"{name}: its message has a line '---' or 'diff --git', or two lines of title "
                "without a blank one behind, and git am would drop what follows",
                hint="git commit --amend, or git rebase -i, in build/checkout",
            )
        exported.patches[pr.patch_path] = text
    return exported


def write(exported: Exported, stack: Stack) -> list[str]:
    """Writes the repository; removes new files that left the stack.

    Returns:
        Paths that changed.
    """
    changed = []
    for path, text in exported.patches.items():
        if write_if_changed(stack.root / path, text):
            changed.append(path)
    for path, (data, executable) in exported.files.items():
        wrote, target = write_if_changed(stack.root / path, data), stack.root / path
        if wrote or os.access(target, os.X_OK) != executable:
            target.chmod(0o755 if executable else 0o644)
            changed.append(path)
    for path in sorted({f for pr in stack.prs for f in pr.files} - set(exported.files)):
        (stack.root / path).unlink(missing_ok=True)
        changed.append(f"{path} (removed)")
    if _update_series(exported, stack):
        changed.append(SERIES_FILE)
    return changed


def export(checkout: Checkout, stack: Stack) -> list[str]:
    """Rewrites patches and new files from the commits of the checkout.

    Returns:
        Paths that changed.

    Raises:
        StageError: uncommitted edits (they belong to no PR yet).
    """
    edits = checkout.edits()
    if edits:
        raise StageError(
            f"build/checkout has uncommitted edits: {', '.join(edits[:5])}",
            hint="fold them into a PR: tools/stage.py refresh <PR>",
        )
    return write(collect(checkout, stack, checkout.commits()), stack)


def refresh(
    workspace: Workspace,
    checkout: Checkout,
    stack: Stack,
    name: str,
    console: Console,
) -> list[str]:
    """Folds the uncommitted edits of the checkout into one PR.

    Edits of files PyTorch has go to the patch, other files become (or stay)
    new files of the PR. Later PRs are rebased.

    Returns:
        Paths of the repository that changed.

    Raises:
        StageError: nothing to fold, a file of another PR, or a later PR that
            does not fit on top any more.
    """
    pr = stack.get(name)
    edits = checkout.edits()
    if not edits:
        raise StageError(
            "build/checkout has no uncommitted edits",
            hint="edit files there, then refresh; or export committed changes",
        )
    for path in edits:
        _check_owner(stack, pr.name, path)
    target = next(c for c, owner, _ in checkout.commits() if owner == pr.name)
    with console.step(f"fold {len(edits)} edited files into {pr.name}"):
        scratch = scratch_checkout(workspace, checkout)
        scratch.git.run("checkout", "-q", "--detach", checkout.git.resolve("HEAD"))
        for path in edits:
            _copy(checkout.path / path, scratch.path / path)
        scratch.git.run("add", "-A", "-f", "--", *edits)
        scratch.git.run("commit", "-q", f"--fixup={target}")
        try:
            scratch.git.run(
                *("rebase", "-q", "-i", "--autosquash", checkout.base),
                env={"GIT_SEQUENCE_EDITOR": "true"},
            )
        except GitError:
            raise _rebase_conflict(scratch, stack, pr.name) from None
        changed = write(collect(scratch, stack, scratch.commits()), stack)
        shutil.rmtree(scratch.path.parent)
    return changed


def refresh_upstream(
    checkout: Checkout, stack: Stack, name: str, target: Target
) -> list[str]:
    """Takes edits of files that the wheel lacks out of a real checkout.

    The hunks go into the patch; series.toml gets the path, the upstream commit
    and a hash of the context, never the file.

    Args:
        target: a checkout of PyTorch with uncommitted edits of such files, made
            on top of upstream or of the stack up to this PR.

    Returns:
        Paths of the repository that changed.

    Raises:
        StageError: no such edits, or of files that build/checkout has.
    """
    pr = stack.get(name)
    paths = target.dirty()
    if not paths:
        raise StageError(
            f"{target.path} has no uncommitted edits", hint="edit files there first"
        )
    for path in paths:
        if checkout.git.has(f"{checkout.base}:{path}") or stack.owner(path):
            raise StageError(
                f"{path} is in build/checkout",
                hint=f"edit it there, then tools/stage.py refresh {pr.name}",
            )
    old = _before(target, stack, pr, paths)
    diff = target.git.run(
        *("diff", "-U2", "--no-renames", "--no-ext-diff", "--no-color"),
        *("--src-prefix=a/", "--dst-prefix=b/", old, "--"),
        *(f":(literal){path}" for path in paths),
    )
    parts = patchfile.split_by_file(patchfile.normalise(diff))
    patch = stack.patch(pr) or patchfile.Patch(stack.message(pr), "")
    merged = patchfile.merge(patch.without(paths).diff, *parts)
    text = patchfile.render(patch.message, merged, stack.author)
    facts = [file for file in pr.upstream if file.path not in paths]
    commit = target.upstream_commit()
    for part in parts:
        context = patchfile.context(part)
        facts.append(UpstreamFile(patchfile.path_of(part), commit, context))
    changed = (
        [pr.patch_path] if write_if_changed(stack.root / pr.patch_path, text) else []
    )
    return changed + _write_facts(stack, pr, sorted(facts, key=lambda f: f.path))


def _before(target: Target, stack: Stack, pr: PullRequest, paths: list[str]) -> str:
    """The commit of the checkout that this PR's hunks start from."""
    done = target.commits()
    names = [other.name for other in stack.prs]
    for later in names[names.index(pr.name) + 1 :]:
        if later in done and set(stack.get(later).upstream_paths) & set(paths):
            raise StageError(
                f"{later}, which edits the same files, is applied in {target.path}",
                hint=f"git switch -c part {done[later][:12]}^, and edit there",
            )
    return f"{done[pr.name]}^" if pr.name in done else "HEAD"


def _write_facts(stack: Stack, pr: PullRequest, facts: list[UpstreamFile]) -> list[str]:
    path = stack.root / SERIES_FILE
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    entry = next(e for e in document["pr"] if e["name"] == pr.name)
    rows = tomlkit.array()
    for fact in facts:
        row = tomlkit.inline_table()
        row.update(asdict(fact))
        rows.append(row)
    entry["upstream"] = rows.multiline(True)
    return [SERIES_FILE] if write_if_changed(path, tomlkit.dumps(document)) else []


def regenerate_shims(
    workspace: Workspace,
    env: BaseEnv,
    checkout: Checkout,
    stack: Stack,
    console: Console,
) -> list[str]:
    """Writes the C shim headers torchgen wants into every PR's patch.

    The headers are generated from the yaml and fallback_ops.py as they are
    after each PR, so every prefix of the stack is consistent.

    Returns:
        Paths of the repository that changed.
    """
    scratch = scratch_checkout(workspace, checkout)
    parent = checkout.base
    for pr in stack.prs:
        commit = scratch.commit_pr(stack, pr, parent, without=codegen.SHIM_FOLDER)
        if codegen.inputs_differ(scratch, parent, commit):
            with console.step(f"generate the C shim headers of {pr.name}"):
                scratch.git.run("checkout", "-q", "--force", "--detach", commit)
                out = scratch.path.parent / "gen"
                codegen.run_driver(workspace, env, scratch.path, out, only_shims=True)
                codegen.copy_shims(out, scratch.path)
                scratch.git.run("add", "--", codegen.SHIM_FOLDER)
                scratch.git.run("commit", "-q", "--amend", "--no-edit", "--allow-empty")
                commit = scratch.git.resolve("HEAD")
        parent = commit
    changed = write(collect(scratch, stack, scratch.commits(parent)), stack)
    shutil.rmtree(scratch.path.parent)
    return changed


def verify(checkout: Checkout, stack: Stack) -> list[str]:
    """Everything that keeps apply -> export from being the identity.

    Returns:
        One line per problem; empty when the repository is consistent.
    """
    found = series_module.problems(stack)
    if found:
        return found
    tip = checkout.commit_stack(stack, {})
    exported = collect(checkout, stack, checkout.commits(tip))
    known: dict[str, str] = {}
    for branch in stack.branches():
        fresh = dict(known)
        try:
            checkout.commit_stack(branch, fresh)
        except StageError as error:
            found.append(f"without the series it does not need: {error.message}")
        known.update(fresh)
    for path, text in exported.patches.items():
        if (stack.root / path).read_bytes() != encode(text):
            found.append(f"{path}: not in the form export writes (run export)")
    return found


def scratch_checkout(workspace: Workspace, checkout: Checkout) -> Checkout:
    """A throw-away clone below build/, so the user's work tree stays as it is."""
    build = workspace.build / "scratch"
    shutil.rmtree(build, ignore_errors=True)
    build.mkdir(parents=True)
    GitRepo(build).run("clone", "-q", "--shared", str(checkout.path), "checkout")
    scratch = Checkout(replace(workspace, build=build), checkout.source)
    return scratch


# -- helpers ---------------------------------------------------------------------


def _changes(git: GitRepo, commit: str) -> list[tuple[str, str]]:
    """(status letter, path) of a commit against its parent."""
    output = git.run(
        "diff-tree", "-r", "-z", "--no-renames", "--name-status", f"{commit}^", commit
    )
    words = output.split("\0")
    return list(zip(words[::2], words[1::2]))


def _contents(git: GitRepo, commit: str, path: str) -> tuple[bytes, bool]:
    mode = git.run("ls-tree", commit, "--", path).split()[0]
    if mode not in ("100644", "100755"):
        raise StageError(f"{path}: a symlink or a submodule, which does not land")
    return git.run_bytes("show", f"{commit}:{path}"), mode == "100755"


def _check_owner(stack: Stack, name: str, path: str) -> None:
    owner, patch = stack.owner(path), stack.patch(stack.get(name))
    edits = patch.paths if patch else ()
    if owner is not None and owner.name != name and path not in edits:
        raise StageError(
            f"{path} is a new file of {owner.name}, not of {name}",
            hint=f"tools/stage.py refresh {owner.name}, or undo that edit first; a hunk "
            f"of {name} in that file is begun by hand in its patch",
        )
    if path.split("/")[0] not in (*UPSTREAM_ROOTS, "c10", "caffe2", "tools"):
        raise StageError(f"{path}: no PyTorch source folder", hint="remove that file")


def _copy(source: Path, target: Path) -> None:
    if source.is_symlink():
        raise StageError(f"{source.name}: a symlink, which does not land")
    if not source.exists():
        target.unlink(missing_ok=True)
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(source, target)


def _rebase_conflict(scratch: Checkout, stack: Stack, name: str) -> StageError:
    """Says which later PR made the lines that the edits change."""
    files = scratch.git.run("diff", "--name-only", "--diff-filter=U").split()
    names = [pr.name for pr in stack.prs]
    later = [
        pr.name
        for pr in stack.prs[names.index(name) + 1 :]
        if (patch := stack.patch(pr)) and set(patch.paths) & set(files)
    ]
    other = " or ".join(later) or "the PR that made them"
    return StageError(
        f"the edits do not fit into {name}: {other} changes the same lines of "
        f"{', '.join(files) or 'a file'}",
        hint=f"refresh {other} instead; or commit it in build/checkout with git commit --fixup "
        f"<commit of {name}>, git rebase -i --autosquash, resolve, and tools/stage.py export",
    )


def _update_series(exported: Exported, stack: Stack) -> bool:
    """Keeps the lists of files in step, and the rest of the text as it is."""
    path = stack.root / SERIES_FILE
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    changed = False
    for entry in document["pr"]:
        new = exported.new_files[entry["name"]]
        old = list(entry.get("files", []))
        if sorted(old) == sorted(new):
            continue
        files = [f for f in old if f in new] + [f for f in new if f not in old]
        entry["files"] = _multiline(files)
        changed = True
    if changed:
        write_atomically(path, tomlkit.dumps(document).encode())
    return changed


def _multiline(items: list[str]) -> tomlkit.items.Array:
    array = tomlkit.array()
    array.extend(items)
    return array.multiline(len(items) > 1)
