"""apply: the stack onto a real PyTorch checkout, one commit per pull request.

The commits are the user's: made by `git am --3way` with their identity. What a
call needs to go on after a conflict or a kill lies in the git folder of that
checkout, so the repository here stays as it is:

    <git dir>/moe-stage/state.json    the PR at work, and where the call started
    <git dir>/moe-stage/applied.json  commit -> hash of the PR it was made from
    <git dir>/moe-stage/rejected/     hunks a human has to place

A PR whose commit is in the history, or whose edits are all in the files, is
recognised and skipped, so repeating a call is harmless.
"""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import filelock

from . import patchfile, placement
from .checkout import Checkout, pr_digest, TRAILER
from .config import read_json, write_atomically, write_json
from .errors import ArgumentError, StageError
from .gitrepo import GitError, UserRepo
from .series import PullRequest, Stack
from .texts import encode


_FOLDER = "moe-stage"
# Any one of these identifies PyTorch, as any file may move some day.
_MARKERS = ("torch/nn/functional.py", "torch/overrides.py", "torchgen/gen.py")
# How far back commits of this stack are looked for.
_HISTORY = 2000
_INDEX = re.compile(r"^index ([0-9a-f]{40})\.\.([0-9a-f]{40})", re.MULTILINE)
_DIFF = (
    *("diff-tree", "-r", "-p", "--binary", "--full-index", "--no-renames"),
    *("--no-ext-diff", "--no-color", "--src-prefix=a/", "--dst-prefix=b/"),
)


@dataclass(frozen=True)
class Outcome:
    """What happened to one PR: its name, a few words, its commit if any."""

    name: str
    what: str
    commit: str = ""

    def __str__(self) -> str:
        return f"{self.name:32} {self.what:22} {self.commit[:12]}".rstrip()


class Target:
    """The user's checkout, and the state of the last call in its git folder."""

    def __init__(self, path: Path) -> None:
        if not path.is_dir():
            raise ArgumentError(
                f"no folder {path}",
                hint="name a git checkout of PyTorch: git clone "
                "https://github.com/pytorch/pytorch",
            )
        try:
            top = UserRepo(path).run("rev-parse", "--show-toplevel").rstrip("\n")
        except GitError as error:
            # git's own message names the fix if the folder belongs to another user.
            said = " ".join(error.stderr.split()).removeprefix("fatal: ")
            raise ArgumentError(
                f"{path} is no git checkout that can be used: {said}",
                hint="name a git checkout of PyTorch, not an unpacked archive",
            ) from None
        self.git = UserRepo(Path(top))
        self.path = Path(top)
        self.folder = Path(self.git.run("rev-parse", "--absolute-git-dir").rstrip("\n"))
        self.own = self.folder / _FOLDER

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one stage.py at a time works on the checkout."""
        self.own.mkdir(exist_ok=True)
        lock = filelock.FileLock(self.own / "lock")
        try:
            lock.acquire(timeout=0)
        except filelock.Timeout:
            raise StageError(
                f"another stage.py is working on {self.path}", hint="wait for it"
            ) from None
        try:
            yield
        finally:
            lock.release()

    @property
    def state(self) -> dict:
        return read_json(self.own / "state.json")

    @state.setter
    def state(self, value: dict) -> None:
        write_json(self.own / "state.json", value)

    @property
    def applied(self) -> dict[str, str]:
        return read_json(self.own / "applied.json")

    def remember(self, commit: str, digest: str) -> None:
        """Notes which contents a commit was made from."""
        known = {**self.applied, commit: digest}
        write_json(self.own / "applied.json", known)

    @property
    def head(self) -> str:
        return self.git.resolve("HEAD")

    @property
    def detached(self) -> bool:
        """Whether HEAD names a commit instead of a branch."""
        return not (self.folder / "HEAD").read_text().startswith("ref:")

    @property
    def am_runs(self) -> bool:
        return (self.folder / "rebase-apply").exists()

    def unmerged(self) -> list[str]:
        """Files with conflict entries in the index."""
        return self._names("diff", "--name-only", "--diff-filter=U", "-z")

    def dirty(self) -> list[str]:
        """Tracked files that differ from HEAD, staged or not."""
        return self._names("diff", "--name-only", "--ignore-submodules", "-z", "HEAD")

    def staged(self) -> list[str]:
        """Tracked files whose index differs from HEAD."""
        return self._names("diff", "--cached", "--name-only", "-z")

    def unstaged(self) -> list[str]:
        """Tracked files that differ from the index."""
        return self._names("diff", "--name-only", "--ignore-submodules", "-z")

    def commits(self) -> dict[str, str]:
        """PR name -> newest commit of it in the history of HEAD."""
        found: dict[str, str] = {}
        for commit, names in self._history():
            for name in names:
                found.setdefault(name, commit)
        return found

    def upstream_commit(self) -> str:
        """The newest commit of HEAD that is not one of this stack."""
        return next(commit for commit, names in self._history() if not names)

    def _history(self) -> list[tuple[str, list[str]]]:
        """(commit, PR names in its trailers), newest first."""
        keys = f"%H %(trailers:key={TRAILER},valueonly,separator=%x20)"
        log = self.git.run("log", f"-n{_HISTORY}", f"--format={keys}")
        words = [line.split() for line in log.splitlines()]
        return [(commit, names) for commit, *names in words]

    def _names(self, *command: str) -> list[str]:
        return sorted({n for n in self.git.run(*command).split("\0") if n})


class Applier:
    """One call of apply.

    Args:
        target: where the commits go.
        source: build/checkout; its commits and blobs are the patches.
        stack: all of it.
        say: gets one Outcome per PR, as it happens.
        wanted: the part of the stack to apply; a call that goes on keeps to it.
    """

    def __init__(
        self,
        target: Target,
        source: Checkout,
        stack: Stack,
        say: Callable[[Outcome], None],
        wanted: Stack | None = None,
    ) -> None:
        self._target = target
        self._git = target.git
        self._source = source
        self._stack = stack
        self._say = say
        asked_for = target.state.get("wanted")
        self._wanted = wanted or (stack.only(asked_for) if asked_for else stack)
        self._absent: dict[str, list[str]] = {}

    @property
    def absent(self) -> dict[str, list[str]]:
        """Files that PRs edit and the checkout does not have -> those PRs."""
        return self._absent

    def start(self, any_base: bool = False) -> None:
        """Applies everything that is not there yet.

        Args:
            any_base: also onto a PyTorch older than the pinned release.

        Raises:
            StageError: not a clean PyTorch checkout, or a PR that does not fit
                (then ``proceed`` or ``abort`` is next).
        """
        state = self._target.state
        if state.get("phase") in ("conflict", "manual"):
            if state["phase"] == "manual" or self._target.am_runs:
                raise StageError(
                    f"the last apply stopped at {state['current']}",
                    hint="resolve it and call apply --continue, or apply --abort",
                )
            self._finish(state)
        elif state.get("phase") == "am":
            self._recover(state)
        self._check(any_base)
        self._run(self._target.head)

    def proceed(self) -> None:
        """Goes on after a conflict was resolved.

        Raises:
            StageError: nothing to continue, or still unresolved.
        """
        state = self._target.state
        if state.get("phase") == "am":
            self._recover(state)
        elif state.get("phase") in ("conflict", "manual"):
            self._finish(state)
        else:
            raise StageError("no apply is under way here", hint="call apply alone")
        self._run(state["start"], state["current"])

    def abort(self) -> str:
        """Takes the checkout back to where the stopped call started.

        Returns:
            The commit it is at.

        Raises:
            StageError: nothing to abort, or commits of the user in between.
        """
        state = self._target.state
        if not state:
            raise StageError("no apply is under way here")
        if state["phase"] == "am":
            self._recover(state)
        elif self._target.am_runs:
            self._git.run("am", "--abort")
        start = state["start"]
        ours = set(self._target.commits().values())
        since = self._git.run("rev-list", f"{start}..HEAD").split()
        foreign = [commit for commit in since if commit not in ours]
        if foreign:
            raise StageError(
                f"commit {foreign[-1][:12]} was made since apply started at "
                f"{start[:12]}",
                hint=f"keep what you want, then git reset --keep {start[:12]}",
            )
        self._git.run("reset", "-q", "--keep", start)
        self._forget()
        return start

    # -- before -----------------------------------------------------------------

    def _check(self, any_base: bool) -> None:
        target = self._target
        if target.path.resolve() == self._source.path.resolve():
            raise StageError(
                "that is the stager's own checkout; it has the stack already",
                hint="name a checkout of PyTorch",
            )
        if not any(self._git.has(f"HEAD:{marker}") for marker in _MARKERS):
            raise StageError(
                f"{target.path} is not PyTorch: its HEAD has no {_MARKERS[0]}",
                hint="name a git checkout of PyTorch",
            )
        for name in ("rebase-apply", "rebase-merge", "MERGE_HEAD", "CHERRY_PICK_HEAD"):
            if (target.folder / name).exists():
                raise StageError(
                    f"a git operation is under way in {target.path} ({name})",
                    hint="finish or abort it with git first",
                )
        dirty = target.dirty()
        if dirty:
            raise StageError(
                f"{target.path} has uncommitted changes: {', '.join(dirty[:5])}",
                hint="commit them, or git stash",
            )
        if not any_base:
            self._check_version()
        self._check_untracked()
        try:
            self._git.run("var", "GIT_COMMITTER_IDENT")
        except GitError:
            raise StageError(
                "git does not know who you are",
                hint='git config --global user.name "..." and user.email "..."',
            ) from None

    def _check_version(self) -> None:
        if not self._git.has("HEAD:version.txt"):
            return
        text = self._git.run("show", "HEAD:version.txt").strip()
        pinned = self._stack.base.torch
        if _release(text) < _release(pinned):
            raise StageError(
                f"{self._target.path} is PyTorch {text}; the stack is made for {pinned} "
                "and newer",
                hint=f"git switch --detach v{pinned}, or main; apply --any-base tries "
                "it anyway",
            )

    def _check_untracked(self) -> None:
        done = self._target.commits()
        for pr in self._wanted.prs:
            if pr.name in done:
                continue
            for path in pr.files:
                there = self._target.path / path
                if there.exists() and not self._git.has(f"HEAD:{path}"):
                    raise StageError(
                        f"untracked file in the way: {there}",
                        hint=f"{pr.name} brings it; move yours away",
                    )

    # -- the loop ---------------------------------------------------------------

    def _run(self, start: str, skip: str | None = None) -> None:
        commits = self._source.commits(self._source.commit_stack(self._wanted, {}))
        done = self._target.commits()
        for (commit, _, _), pr in zip(commits, self._wanted.prs, strict=True):
            if pr.name in done:
                self._say(self._there(pr, done[pr.name]))
            elif pr.name != skip:
                self._say(self._apply(pr, commit, start))
        self._forget()

    def _there(self, pr: PullRequest, commit: str) -> Outcome:
        made_from = self._target.applied.get(commit)
        if made_from in (None, pr_digest(self._stack, pr)):
            return Outcome(pr.name, "already applied", commit)
        return Outcome(pr.name, "applied, patch changed", commit)

    def _apply(self, pr: PullRequest, commit: str, start: str) -> Outcome:
        """One PR: from its commit in build/checkout to a commit here."""
        mail, left = self._mail(pr, commit)
        state = {
            "start": start,
            "current": pr.name,
            "head": self._target.head,
            "wanted": [pr.name for pr in self._wanted.prs],
        }
        before, how = state["head"], "applied"
        if mail:
            self._target.state = {**state, "phase": "am"}
            try:
                output = self._am(mail)
            except GitError as error:
                raise self._stopped(pr, state, error) from None
            if "Falling back" in output:
                how = "applied by merge"
        if left:
            self._target.state = {**state, "phase": "manual"}
            raise self._by_hand(pr, left)
        after = self._target.head
        if after == before:
            patch = self._stack.patch(pr)
            empty = not pr.files and not (patch and patch.diff)
            return Outcome(pr.name, "empty" if empty else "already upstream")
        self._target.remember(after, pr_digest(self._stack, pr))
        return Outcome(pr.name, how, after)

    def _am(self, mail: str) -> str:
        options = ("--3way", "--keep-cr", "--keep-non-patch", "--no-scissors")
        return self._git.run("am", *options, "--ignore-date", data=mail)

    def _mail(self, pr: PullRequest, commit: str) -> tuple[str, dict[str, str]]:
        """The mail for `git am`, and the diffs that only a human can place."""
        diff = self._source.git.run(*_DIFF, f"{commit}^", commit)
        for old, _ in _INDEX.findall(diff):
            # The three-way merge starts from these; a shallow clone lacks them.
            if old.strip("0"):
                self._write_blob(self._source.git.run_bytes("cat-file", "blob", old))
        left: dict[str, str] = {}
        patch = self._stack.patch(pr)
        facts = {file.path: file for file in pr.upstream}
        only = patch.only(facts).diff if patch else ""
        for part in patchfile.split_by_file(only):
            path = patchfile.path_of(part)
            if not self._git.has(f"HEAD:{path}"):
                self._absent.setdefault(path, []).append(pr.name)
                continue
            placed = self._place(part, path, facts[path].commit)
            if placed is None:
                left[path] = part
            else:
                diff = patchfile.merge(diff, placed)
        if not diff:
            return "", left
        message = self._stack.message(pr).rstrip()
        head = patchfile.render(
            f"{message}\n\n{TRAILER}: {pr.name}\n", "", self._stack.author
        )
        return head + diff, left

    def _place(self, part: str, path: str, commit: str) -> str | None:
        """The diff of a file the wheel lacks, with blobs that are in the target.

        Returns:
            "" if the edit is there already; None if it fits nowhere.
        """
        current = self._git.run_bytes("show", f"HEAD:{path}")
        found = placement.place(part, current)
        if found.status == "already":
            return ""
        old, new = current, found.data
        if found.status == "conflict":
            # If the history has the text that the hunk was made for, it can be merged.
            if not self._git.has(f"{commit}:{path}"):
                return None
            old = self._git.run_bytes("show", f"{commit}:{path}")
            there = placement.apply_part(part, old)
            if there is None:
                return None
            new = there
        first, second = self._write_blob(old), self._write_blob(new)
        diff = self._git.run(
            *("diff", "--full-index", "--binary", "--no-ext-diff", "--no-color"),
            *("--src-prefix=a/", "--dst-prefix=b/", first, second),
        )
        for prefix, blob in (("a", first), ("b", second)):
            diff = diff.replace(f"{prefix}/{blob}", f"{prefix}/{path}")
        return diff

    def _write_blob(self, data: bytes) -> str:
        command = ("hash-object", "-w", "--no-filters", "--stdin")
        return self._git.run(*command, data=data).strip()

    # -- stops ------------------------------------------------------------------

    def _stopped(self, pr: PullRequest, state: dict, error: GitError) -> StageError:
        """After a failed am: either a conflict to resolve, or undone."""
        files = self._target.unmerged()
        if not files:
            if self._target.am_runs:
                self._git.run("am", "--abort")
            self._forget()
            lines = (error.stderr + error.stdout).splitlines()
            first = next((s for s in lines if s.startswith(("error", "fatal"))), "")
            return StageError(f"{pr.patch_path}: git am: {first or error.stderr}")
        self._target.state = {**state, "phase": "conflict"}
        where = "\n".join(f"  {name}{self._conflict(pr, name)}" for name in files)
        return StageError(
            f"{pr.patch_path} conflicts in {self._target.path}:\n{where}",
            hint="edit the files between the conflict marks and git add them, then "
            "stage.py apply CHECKOUT --continue   (or --abort)",
        )

    def _conflict(self, pr: PullRequest, name: str) -> str:
        """What happened to a file upstream and what to do, or the hunks that do not fit."""
        stages = self._git.run("ls-files", "-u", "--", f":(literal){name}")
        base, ours = (f" {n}\t" in stages for n in (1, 2))
        if not ours:
            return f": deleted upstream; git rm {name}, or git add it to keep it"
        if not base:
            return ": upstream has a file of this name; merge both, or rename ours here"
        theirs = self._git.run_bytes("show", f"HEAD:{name}")
        if b"\r\n" in theirs and b"\r\n" not in self._git.run_bytes(
            "show", f":1:{name}"
        ):
            return (
                f": its lines end in CRLF upstream; git checkout --ours {name}, and make "
                "the edit there"
            )
        patch = self._stack.patch(pr)
        part = patch.only({name}).diff if patch else ""
        if not part or not self._git.has(f"HEAD:{name}"):
            return ""
        found = placement.rejected(part, self._git.run_bytes("show", f"HEAD:{name}"))
        return f": {', '.join(found)}" if found else ""

    def _by_hand(self, pr: PullRequest, left: dict[str, str]) -> StageError:
        folder = self._target.own / "rejected"
        folder.mkdir(exist_ok=True)
        kept = folder / f"{pr.name}.diff"
        kept.write_bytes(encode("".join(left.values())))
        return StageError(
            f"{pr.patch_path}: no place for its edits of {', '.join(left)}; they are "
            f"in {kept}",
            hint="make them by hand and git add the files (or leave them out), then "
            "stage.py apply CHECKOUT --continue   (or --abort)",
        )

    def _finish(self, state: dict) -> None:
        """Makes the commit of the PR that stopped the last call."""
        target, name = self._target, state["current"]
        pr = self._stack.get(name)
        unmerged = target.unmerged()
        if unmerged:
            raise StageError(
                f"{name}: not resolved yet: {', '.join(unmerged)}",
                hint="edit the files between the conflict marks and git add them",
            )
        changed = target.unstaged()
        if changed:
            raise StageError(
                f"{name}: edited but not added: {', '.join(changed)}",
                hint=f"git add {' '.join(changed)}",
            )
        staged, before = bool(target.staged()), state["head"]
        if state["phase"] == "manual" and staged:
            made = target.head != before
            message = f"{self._stack.message(pr).rstrip()}\n\n{TRAILER}: {name}\n"
            options = ("--amend", "--no-edit") if made else ("-F", "-")
            self._git.run("commit", "-q", *options, data=None if made else message)
        elif state["phase"] == "conflict" and target.am_runs:
            self._git.run("am", "--continue" if staged else "--skip")
        after = target.head
        if after == before:
            self._say(Outcome(name, "already upstream"))
        else:
            target.remember(after, pr_digest(self._stack, pr))
        # Only now: a kill before this line repeats a step that does nothing.
        target.state = {**state, "phase": "done"}

    def _recover(self, state: dict) -> None:
        """Cleans up after a kill in the middle of `git am`.

        The tree was clean when the call began. What differs now is kept as a
        patch, in case the user edited something since.
        """
        folder, git = self._target.folder, self._git
        for lock in (*folder.glob("*.lock"), *folder.glob("refs/heads/**/*.lock")):
            lock.unlink(missing_ok=True)
        shutil.rmtree(folder / "rebase-apply", ignore_errors=True)
        left = git.run_bytes("diff", "--binary", "HEAD")
        if left:
            write_atomically(self._target.own / "interrupted.patch", left)
        git.run("reset", "-q", "--hard", "HEAD")
        for path in self._stack.get(state["current"]).files:
            there = self._target.path / path
            if there.exists() and not git.has(f"HEAD:{path}"):
                there.unlink()

    def _forget(self) -> None:
        (self._target.own / "state.json").unlink(missing_ok=True)


def _release(version: str) -> tuple[int, ...]:
    """(2, 15) of "2.15.0a0"; (0,) of nonsense, which is older than all."""
    match = re.match(r"(\d+)\.(\d+)", version)
    return tuple(map(int, match.groups())) if match else (0,)
