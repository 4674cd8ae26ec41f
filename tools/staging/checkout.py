"""build/checkout: the wheel's sources plus one commit per pull request.

Commits are made without touching the work tree (git plumbing on a private
index), and only then the work tree moves from the old tip to the new one, so
that files which did not change keep their times and ninja has nothing to do.

Edits a user made in the checkout are never lost: if they are not in the
repository too, sync stops and says which files. Used by pipeline and export.
"""

import hashlib
import os
import re
import shutil
import time
from pathlib import Path

from . import patchfile
from .config import digest, read_json, Workspace, write_atomically, write_json
from .console import Console
from .errors import StageError
from .gitrepo import GitError, GitRepo
from .series import PullRequest, Stack


TRAILER = "Staged-PR"
_APPLY_FAILED = re.compile(r"error: patch failed: (.+):(\d+)")


class Checkout:
    """The git work tree below build/, and what the stager did to it last."""

    def __init__(self, workspace: Workspace, source: GitRepo) -> None:
        self.path = workspace.checkout
        self.git = GitRepo(self.path)
        self.source = source
        self._build = workspace.build
        self._state_file = workspace.state / "checkout.json"
        self.base = source.resolve("HEAD")

    def sync(self, stack: Stack, console: Console, discard: bool = False) -> str:
        """Brings the checkout to the tip of the stack.

        Args:
            discard: drop edits that are not in the repository (a copy of them
                is kept as a patch below build/).

        Returns:
            Hash of the tip commit; it names the whole staged source tree.

        Raises:
            StageError: a patch does not apply, or unexported edits.
        """
        self._drop_stale_locks()
        state = self.prepare(console)
        fingerprint = _fingerprint(stack, self.base)
        tip = state.get("tip", self.base)
        if state.get("fingerprint") == fingerprint and self._is_clean(tip):
            return tip
        with console.step("apply the PR stack to the checkout"):
            target = self.commit_stack(stack, state.setdefault("commits", {}))
            self._protect_edits(tip, target, discard, console)
            self._switch(state, target)
            self._save({**state, "tip": target, "fingerprint": fingerprint})
        paths = {f for pr in stack.prs for f in pr.upstream_paths}
        # setup makes the hunks of stub templates in the stubs; see stubs.py.
        absent = sorted(f for f in paths if not f.endswith(".pyi.in"))
        if absent:
            console.note(f"not in the wheel, only `apply` edits: {', '.join(absent)}")
        return target

    def ensure_current(self, stack: Stack, console: Console) -> None:
        """Brings the checkout to the tip, carrying uncommitted edits along.

        Writing the checkout back then loses no edit of the repository.

        Raises:
            StageError: both changed the same files since the last setup.
        """
        state = self.prepare(console)
        fingerprint = _fingerprint(stack, self.base)
        if state.get("fingerprint") == fingerprint:
            return
        target = self.commit_stack(stack, state.setdefault("commits", {}))
        tip = state.get("tip", self.base)
        try:
            if self.git.resolve("HEAD") != tip:
                raise GitError(["checkout"], "commits on top of the stack")
            self.git.run("checkout", "-q", "-B", "staged", target)
        except GitError:
            raise StageError(
                "the repository and build/checkout both changed since the last setup",
                hint="undo one of them; setup --discard drops the checkout's edits "
                "and keeps a copy",
            ) from None
        self._save({**state, "tip": target, "fingerprint": fingerprint})

    def tip(self, stack: Stack, console: Console) -> str:
        """The commit of the whole stack; the work tree stays as it is."""
        state = self.prepare(console)
        tip = self.commit_stack(stack, state.setdefault("commits", {}))
        self._save(state)
        return tip

    def commit_stack(self, stack: Stack, known: dict[str, str]) -> str:
        """Makes one commit per PR on top of the base, without the work tree.

        Args:
            known: fingerprint -> commit of earlier runs; updated in place.
        """
        parent, chain = self.base, self.base
        fresh: dict[str, str] = {}
        for pr in stack.prs:
            chain = digest(chain, *_pr_parts(stack, pr))
            commit = known.get(chain)
            if commit is None or not self.git.has(commit):
                commit = self.commit_pr(stack, pr, parent)
            fresh[chain] = parent = commit
        known.clear()
        known.update(fresh)
        return parent

    def edits(self) -> list[str]:
        """Files of the work tree that differ from its commit, or are untracked."""
        status = (
            "status",
            "--porcelain",
            "-z",
            "--no-renames",
            "--untracked-files=all",
        )
        out = self.git.run(*status)
        return sorted({entry[3:] for entry in out.split("\0") if entry})

    def commits(self, tip: str = "HEAD") -> list[tuple[str, str, str]]:
        """(hash, PR name, message without trailer) from the base to ``tip``.

        Raises:
            StageError: a commit without the Staged-PR trailer.
        """
        found = []
        for commit in self.git.run(
            "rev-list", "--reverse", f"{self.base}..{tip}"
        ).split():
            message = self.git.run("log", "-1", "--format=%B", commit)
            match = re.search(rf"^{TRAILER}: (\S+)$", message, re.MULTILINE)
            if not match:
                title = message.splitlines()[0] if message else "(no message)"
                raise StageError(
                    f"build/checkout: commit {commit[:10]} ({title}) belongs to no PR",
                    hint=f"add a line '{TRAILER}: <PR name>' to its message, or fold "
                    "it into a PR with git commit --fixup and git rebase --autosquash",
                )
            text = message[: match.start()] + message[match.end() :]
            found.append((commit, match.group(1), text.strip("\n") + "\n"))
        return found

    # -- making commits --------------------------------------------------------

    def commit_pr(
        self,
        stack: Stack,
        pr: PullRequest,
        parent: str,
        without: str | None = None,
    ) -> str:
        """Commits one PR on top of ``parent``; the work tree stays as it is.

        Args:
            without: leave out the patch's edits of files below this folder.
        """
        index = self._private_index(parent)
        patch = stack.patch(pr)
        if patch is not None and patch.diff:
            staged = patch.without(pr.upstream_paths)
            if staged.diff:
                self._apply(pr, staged, index, without)
        self._add_files(stack, pr, parent, index)
        tree = self.git.run("write-tree", env=index).strip()
        message = f"{stack.message(pr).rstrip()}\n\n{TRAILER}: {pr.name}\n"
        return self.git.run("commit-tree", tree, "-p", parent, data=message).strip()

    def _private_index(self, commit: str) -> dict[str, str]:
        """Environment for git commands on an index of our own, at ``commit``."""
        path = self.path / ".git" / "stage-index"
        # Only a killed call leaves its lock: we hold the lock of the build folder.
        path.with_name("stage-index.lock").unlink(missing_ok=True)
        index = {"GIT_INDEX_FILE": str(path)}
        self.git.run("read-tree", commit, env=index)
        return index

    def _apply(
        self,
        pr: PullRequest,
        patch: patchfile.Patch,
        index: dict[str, str],
        without: str | None,
    ) -> None:
        if patch.created:
            raise StageError(
                f"{pr.patch_path} adds or deletes {patch.created[0]}",
                hint="put a new file at its upstream path in the repository and "
                f"list it under files of {pr.name} in series.toml",
            )
        try:
            limits = [f"--exclude={without}/*"] if without else []
            options = ("--cached", "--whitespace=nowarn", *limits)
            self.git.run("apply", *options, "-", data=patch.diff, env=index)
        except GitError as error:
            raise _apply_error(pr, patch, error.stderr) from None

    def _add_files(
        self, stack: Stack, pr: PullRequest, parent: str, index: dict[str, str]
    ) -> None:
        lines = []
        for name, data in stack.originals(pr).items():
            if self.git.has(f"{parent}:{name}"):
                raise StageError(
                    f"{pr.name}: {name} already exists in PyTorch or an earlier PR",
                    hint=f"edit it with {pr.patch_path}",
                )
            blob = self.git.run(
                "hash-object", "-w", "--no-filters", "--stdin", data=data
            )
            mode = "100755" if os.access(stack.root / name, os.X_OK) else "100644"
            lines.append(f"{mode} {blob.strip()}\t{name}\n")
        self.git.run("update-index", "--index-info", data="".join(lines), env=index)

    # -- moving the work tree --------------------------------------------------

    def prepare(self, console: Console) -> dict:
        """Clones if needed, repairs an interrupted switch, returns the state."""
        if self.git.exists() and not self.git.has("HEAD^{tree}"):
            aside = self.path.with_name(f"checkout.{time.strftime('%Y%m%d-%H%M%S')}")
            console.warn(f"build/checkout lost its base; it is kept as {aside}")
            os.rename(self.path, aside)
        if not self.git.exists():
            self._clone(console)
        state = read_json(self._state_file)
        if state.get("base") != self.base:
            if not self.git.has(self.base):
                self.git.run("fetch", "-q", str(self.source.path), "HEAD")
            tip = state.get("tip") or self.git.resolve("HEAD")
            state = {"base": self.base, "tip": tip}
        target = state.pop("switching", None)
        if target:
            self._repair(state, target, console)
        return state

    def _clone(self, console: Console) -> None:
        with console.step("clone the sources into build/checkout"):
            temporary = self.path.with_name("checkout.tmp")
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.parent.mkdir(parents=True, exist_ok=True)
            GitRepo(temporary.parent).run(
                "clone", "-q", "--shared", str(self.source.path), temporary.name
            )
            (temporary / ".git" / "info" / "exclude").write_text(
                "__pycache__/\n*.pyc\n.pytest_cache/\n"
            )
            self._state_file.unlink(missing_ok=True)
            os.rename(temporary, self.path)

    def _drop_stale_locks(self) -> None:
        """Removes what a killed git left: we hold the lock of the build folder."""
        folder = self.path / ".git"
        for lock in (*folder.glob("*.lock"), *folder.glob("refs/**/*.lock")):
            lock.unlink(missing_ok=True)

    def _repair(self, state: dict, target: str, console: Console) -> None:
        """Finishes a switch of the work tree that was killed half way."""
        console.note("the last call was interrupted; repairing build/checkout")
        self.git.run("reset", "--hard", "-q", target)
        self._save({**state, "tip": target, "fingerprint": None})
        state.update(tip=target, fingerprint=None)

    def _is_clean(self, tip: str) -> bool:
        return self.git.resolve("HEAD") == tip and not self.edits()

    def _protect_edits(
        self, tip: str, target: str, discard: bool, console: Console
    ) -> None:
        """Stops if the work tree holds something that the repository does not."""
        changed = set(self.edits())
        head = self.git.resolve("HEAD")
        if head != tip:
            changed.update(self.names_between(tip, head))
        lost = [name for name in sorted(changed) if not self._same_as(name, target)]
        if not lost:
            return
        if discard:
            console.warn(f"discarded edits are kept in {self._keep_copy(tip)}")
            return
        shown = "\n".join(f"  {name}" for name in lost[:10])
        more = f"\n  and {len(lost) - 10} more" if len(lost) > 10 else ""
        raise StageError(
            f"build/checkout has edits that are not in the repository:\n{shown}{more}",
            hint="keep them: tools/stage.py refresh <PR> (edits) or export (commits); "
            "drop them: tools/stage.py setup --discard",
        )

    def names_between(self, old: str, new: str) -> list[str]:
        """Paths that differ between two commits."""
        out = self.git.run("diff", "--name-only", "--no-renames", "-z", old, new)
        return [name for name in out.split("\0") if name]

    def _same_as(self, name: str, commit: str) -> bool:
        """Whether the work tree's file is what ``commit`` has (or lacks)."""
        path = self.path / name
        if not self.git.has(f"{commit}:{name}"):
            return not path.exists()
        if not path.is_file() or path.is_symlink():
            return False
        mode = self.git.run("ls-tree", commit, "--", f":(literal){name}").split()[0]
        if (mode == "100755") != os.access(path, os.X_OK):
            return False
        return self.git.run_bytes("show", f"{commit}:{name}") == path.read_bytes()

    def _keep_copy(self, tip: str) -> Path:
        index = self._private_index("HEAD")
        self.git.run("add", "-A", env=index)
        diff = self.git.run_bytes("diff", "--cached", "--binary", tip, env=index)
        kept = self._build / f"discarded-{time.strftime('%Y%m%d-%H%M%S')}.patch"
        write_atomically(kept, diff)
        return kept

    def _switch(self, state: dict, target: str) -> None:
        self._save({**state, "switching": target})
        # Untracked files the new tip brings are overwritten; others are kept
        # unless they were discarded above.
        self.git.run("checkout", "-q", "--force", "-B", "staged", target)
        self.git.run("clean", "-fdq")

    # -- state -----------------------------------------------------------------

    def _save(self, state: dict) -> None:
        write_json(self._state_file, state)


def _pr_parts(stack: Stack, pr: PullRequest) -> list[str | bytes]:
    """Everything that decides the commit of a PR."""
    patch = stack.patch(pr)
    parts: list[str | bytes] = [
        pr.name,
        stack.message(pr),
        patch.diff if patch else "",
    ]
    for name, data in stack.originals(pr).items():
        parts += [name, data, str(os.access(stack.root / name, os.X_OK))]
    return parts


def pr_digest(stack: Stack, pr: PullRequest) -> str:
    """Names everything one PR consists of."""
    return digest(*_pr_parts(stack, pr))


def _fingerprint(stack: Stack, base: str) -> str:
    total = hashlib.sha256(base.encode())
    for pr in stack.prs:
        total.update(pr_digest(stack, pr).encode())
    return total.hexdigest()


def _apply_error(pr: PullRequest, patch: patchfile.Patch, stderr: str) -> StageError:
    """Names PR, file and hunk of a patch that does not apply."""
    failed = _APPLY_FAILED.search(stderr)
    if failed:
        path, line = failed.group(1), int(failed.group(2))
        where = f"{path}, {patchfile.hunk_at(patch.diff, path, line)}"
    else:
        errors = [s for s in stderr.splitlines() if s.startswith("error:")]
        where = (errors or [stderr.strip()])[0].removeprefix("error: ")
    return StageError(
        f"{pr.patch_path} does not apply: {where}",
        hint="correct the hunk in the patch; its context must match the pinned "
        "release plus the earlier PRs of the stack",
    )
