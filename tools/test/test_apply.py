"""apply: onto a checkout in every state a contributor can bring."""

import os
import random
import shutil
import time
from pathlib import Path

import pytest
from conftest import (
    FIRST_FILE,
    identify,
    kill_program,
    make_upstream,
    Upstream,
    WHEEL_FILES,
    WITH_SLOW,
)

from staging.apply import Target
from staging.errors import StageError
from staging.gitrepo import GitError, GitRepo, UserRepo


OVERRIDES = "torch/overrides.py"
BOTH = ["applied", "applied"]
TOOLS = Path(__file__).parents[1]


def expected_tree(project):
    """What the checkout must hold: the stack on the pinned release."""
    checkout = project.checkout()
    return checkout.git.resolve(checkout.commit_stack(project.stack, {}) + "^{tree}")


def test_one_commit_per_pr_with_the_same_bytes(upstream):
    upstream.apply()
    assert upstream.said == BOTH
    assert upstream.tree() == expected_tree(upstream.project)
    assert upstream.titles()[1:] == ["Add moe.py", "Add its test"]
    log = upstream.git.run("log", "-1", "--format=%an|%cn|%B", "HEAD^")
    assert log.startswith("A Contributor|Someone Else|Add moe.py\n\nIt is needed.\n")
    assert "Staged-PR: 100-first" in log
    assert upstream.git.run("status", "--porcelain") == ""


def test_again_does_nothing(upstream):
    upstream.apply()
    head = upstream.git.resolve("HEAD")
    upstream.apply()
    assert upstream.said == ["already applied"] * 2
    assert upstream.git.resolve("HEAD") == head


def test_series_one_after_another_in_any_order(upstream):
    upstream.project.add_third()
    for series, said in (
        (("apart",), ["applied"]),
        (("apart",), ["already applied"]),
        (("more",), ["applied", "applied"]),
        ((), ["already applied"] * 3),
    ):
        upstream.apply(series=series)
        assert upstream.said == said
    assert upstream.titles()[1:] == ["Add more", "Add moe.py", "Add its test"]
    assert upstream.tree() == expected_tree(upstream.project)


def test_continue_keeps_to_the_series(upstream):
    upstream.project.add_third()
    upstream.edit(OVERRIDES, "line_20 = 20\n", "line_20 = 'twenty'\n")
    upstream.edit(OVERRIDES, "line_21 = 21\n", "line_21 = 0\n")
    upstream.commit("upstream moved on")
    with pytest.raises(StageError, match="120-third.patch conflicts"):
        upstream.apply(series=("apart",))
    upstream.git.run("checkout", "-q", "--theirs", OVERRIDES)
    upstream.git.run("add", OVERRIDES)
    upstream.apply("proceed")
    assert upstream.titles()[-1] == "Add more"


def test_changed_patch_is_named_but_not_applied_twice(upstream):
    upstream.apply()
    upstream.project.write("torch/nn/moe.py", FIRST_FILE + "# changed\n")
    upstream.apply()
    assert upstream.said == ["applied, patch changed", "already applied"]


def test_only_up_to_a_pr(upstream):
    upstream.apply(upto="100")
    assert upstream.said == ["applied"]
    upstream.apply()
    assert upstream.said == ["already applied", "applied"]
    assert upstream.tree() == expected_tree(upstream.project)


def test_moved_context(upstream):
    upstream.write(OVERRIDES, "# new\n" * 30 + WHEEL_FILES[OVERRIDES])
    upstream.commit("upstream moved on")
    upstream.apply()
    assert upstream.said == BOTH
    text = upstream.read(OVERRIDES)
    assert text.startswith("# new\n" * 30)
    assert "line_11 = 11\nfirst = True\nline_12" in text
    assert "line_30 = 30\nsecond = True\nline_31" in text


def test_changed_context_is_merged(upstream):
    upstream.edit(OVERRIDES, "line_13 = 13\n", "line_13 = 'thirteen'\n")
    upstream.commit("upstream moved on")
    upstream.apply()
    assert upstream.said == ["applied by merge", "applied"]
    assert "first = True\nline_12 = 12\nline_13 = 'thirteen'" in upstream.read(
        OVERRIDES
    )


@pytest.fixture
def stopped(upstream):
    """Stopped at 100-first, whose hunk conflicts; 110-second does not."""
    upstream.edit(OVERRIDES, "line_12 = 12\n", "line_12 = 'twelve'\n")
    upstream.edit(OVERRIDES, "line_11 = 11\n", "line_11 = 'eleven'\n")
    upstream.start = upstream.commit("upstream moved on")
    with pytest.raises(StageError) as failure:
        upstream.apply()
    message = str(failure.value)
    assert "torch_patches/100-first.patch conflicts" in message
    assert f"{OVERRIDES}: hunk 1 of 1 (@@ -10,4 +10,5 @@)" in message
    assert "apply CHECKOUT --continue" in failure.value.hint
    return upstream


def resolve(upstream):
    text = upstream.read(OVERRIDES)
    before, rest = text.split("<<<<<<<")
    after = rest.split(">>>>>>>")[1].split("\n", 1)[1]
    mine = "line_11 = 'eleven'\nfirst = True\nline_12 = 'twelve'\n"
    upstream.write(OVERRIDES, before + mine + after)


def check_resolved(upstream):
    assert upstream.titles()[-2:] == ["Add moe.py", "Add its test"]
    assert "'eleven'\nfirst = True\nline_12 = 'twelve'" in upstream.read(OVERRIDES)
    assert "second = True" in upstream.read(OVERRIDES)
    assert upstream.read("torch/nn/moe.py") == FIRST_FILE
    assert upstream.git.run("status", "--porcelain") == ""


def test_conflict_resolved_and_continued(stopped):
    with pytest.raises(StageError, match="stopped at 100-first"):
        stopped.apply()
    with pytest.raises(StageError, match=f"not resolved yet: {OVERRIDES}"):
        stopped.apply("proceed")
    resolve(stopped)
    stopped.git.run("add", OVERRIDES)
    stopped.apply("proceed")
    check_resolved(stopped)
    stopped.apply()
    assert stopped.said == ["already applied"] * 2


def test_continue_keeps_to_the_pr_that_was_asked_for(stopped):
    stopped.apply("abort")
    with pytest.raises(StageError, match="100-first.patch conflicts"):
        stopped.apply(upto="100")
    resolve(stopped)
    stopped.git.run("add", OVERRIDES)
    stopped.apply("proceed")
    assert stopped.titles()[-1] == "Add moe.py"
    stopped.apply()
    check_resolved(stopped)


def test_conflict_finished_with_git_itself(stopped):
    resolve(stopped)
    stopped.git.run("add", OVERRIDES)
    stopped.git.run("am", "--continue")
    stopped.apply()
    check_resolved(stopped)


def test_resolved_but_edited_again(stopped):
    resolve(stopped)
    stopped.git.run("add", OVERRIDES)
    stopped.edit(OVERRIDES, "first = True", "first = 1")
    with pytest.raises(StageError, match=f"edited but not added: {OVERRIDES}"):
        stopped.apply("proceed")


def test_conflict_aborted(stopped):
    stopped.apply("abort")
    assert stopped.git.resolve("HEAD") == stopped.start
    assert stopped.git.run("status", "--porcelain") == ""
    with pytest.raises(StageError, match="no apply is under way"):
        stopped.apply("proceed")


def test_abort_also_drops_what_had_been_applied(upstream):
    upstream.edit(OVERRIDES, "line_30 = 30\nline_31 = 31\n", "other = 1\n")
    start = upstream.commit("upstream moved on")
    with pytest.raises(StageError, match="110-second.patch conflicts"):
        upstream.apply()
    assert upstream.said == ["applied"]
    upstream.apply("abort")
    assert upstream.git.resolve("HEAD") == start


@pytest.mark.parametrize(
    ("path", "text", "expected"),
    [
        (
            OVERRIDES,
            None,
            f"{OVERRIDES}: deleted upstream; git rm {OVERRIDES}, or git add",
        ),
        (
            OVERRIDES,
            WHEEL_FILES[OVERRIDES].replace("\n", "\r\n"),
            f"{OVERRIDES}: its lines end in CRLF upstream; git checkout --ours {OVERRIDES}",
        ),
        (
            "torch/nn/moe.py",
            "theirs = 1\n",
            "upstream has a file of this name; merge both",
        ),
    ],
)
def test_what_happened_to_the_file_upstream(upstream, path, text, expected):
    if text is None:
        (upstream.path / path).unlink()
    else:
        upstream.write(path, text)
    upstream.commit("upstream moved on")
    with pytest.raises(StageError) as failure:
        upstream.apply(upto="100")
    assert expected in failure.value.message
    # As it says.
    if text is None:
        upstream.git.run("rm", "-q", path)
    elif "theirs" in text:
        upstream.write(path, f"{FIRST_FILE}{text}")
        upstream.git.run("add", path)
    else:
        upstream.git.run("checkout", "--ours", "--", path)
        upstream.edit(path, "line_12 = 12\r\n", "first = True\r\nline_12 = 12\r\n")
        upstream.git.run("add", path)
    upstream.apply("proceed")
    assert upstream.titles()[-1] == "Add moe.py"
    assert upstream.git.run("status", "--porcelain") == ""


def test_checkout_of_another_user(upstream, monkeypatch):
    """git's own words, which name the setting that lets it."""
    monkeypatch.setenv("GIT_TEST_ASSUME_DIFFERENT_OWNER", "1")
    monkeypatch.setattr(
        UserRepo, "_environment", lambda self: {**os.environ, "LC_ALL": "C"}
    )
    with pytest.raises(StageError, match="dubious ownership.*safe.directory"):
        Target(upstream.path)


def test_renamed_file(upstream):
    upstream.git.run("mv", OVERRIDES, "torch/_overrides.py")
    upstream.commit("rename")
    upstream.apply()
    assert upstream.said == ["applied by merge"] * 2
    assert not (upstream.path / OVERRIDES).exists()
    text = upstream.read("torch/_overrides.py")
    assert "first = True\nline_12" in text and "second = True\nline_31" in text


def test_crlf_file(upstream):
    project = upstream.project
    dos = project.workspace.checkout / "torch/dos.py"
    text = dos.read_bytes().replace(
        b"dos_7 = 7\r\n", b"dos_7 = 7\r\nunix = 0\ncr\r = 1\r\n"
    )
    dos.write_bytes(text)
    project.refresh("110")
    assert (
        b"+unix = 0\n" in (project.root / "torch_patches/110-second.patch").read_bytes()
    )
    upstream.write("torch/dos.py", "moved = 1\r\n" + WHEEL_FILES["torch/dos.py"])
    upstream.commit("upstream moved on")
    upstream.apply()
    assert upstream.said == BOTH
    found = (upstream.path / "torch/dos.py").read_bytes()
    assert found == b"moved = 1\r\n" + text


def test_already_upstream(upstream):
    upstream.edit(OVERRIDES, "line_12 = 12\n", "first = True\nline_12 = 12\n")
    upstream.write("torch/nn/moe.py", FIRST_FILE)
    landed = upstream.commit("Add moe.py (#12345)")
    upstream.apply()
    assert upstream.said == ["already upstream", "applied"]
    assert upstream.git.resolve("HEAD^") == landed


def test_empty_patch(upstream):
    project = upstream.project
    path = project.root / "torch_patches/series.toml"
    path.write_text(
        path.read_text()
        + '\n[[pr]]\nname = "120-empty"\nseries = "core"\ntitle = "Nothing"\n'
    )
    project.write(
        "torch_patches/120-empty.patch", "Subject: [PATCH] Nothing\n\nAt all.\n---\n"
    )
    project.setup()
    upstream.apply()
    assert upstream.said == [*BOTH, "empty"]
    assert upstream.titles()[-1] == "Add its test"


@pytest.mark.parametrize("stage", [False, True])
def test_dirty_tree(upstream, stage):
    head = upstream.git.resolve("HEAD")
    upstream.write("torch/nn/functional.py", "mine = 1\n")
    if stage:
        upstream.git.run("add", "-A")
    with pytest.raises(StageError, match="uncommitted changes: torch/nn/functional.py"):
        upstream.apply()
    assert upstream.git.resolve("HEAD") == head
    assert upstream.read("torch/nn/functional.py") == "mine = 1\n"


def test_untracked_files(upstream):
    upstream.write("build/notes.txt", "mine\n")
    upstream.write("test/test_moe.py", "mine\n")
    head = upstream.git.resolve("HEAD")
    with pytest.raises(StageError, match="untracked file in the way.*test_moe.py"):
        upstream.apply()
    assert upstream.git.resolve("HEAD") == head
    assert upstream.read("test/test_moe.py") == "mine\n"
    (upstream.path / "test/test_moe.py").unlink()
    upstream.apply()
    assert upstream.read("build/notes.txt") == "mine\n"


def test_detached_head(upstream):
    upstream.git.run("checkout", "-q", "--detach")
    upstream.apply()
    assert Target(upstream.path).detached
    assert upstream.tree() == expected_tree(upstream.project)


def test_linked_worktree_and_subfolder(upstream, tmp_path):
    upstream.git.run("worktree", "add", "-q", "-b", "moe", str(tmp_path / "work tree"))
    linked = Upstream(tmp_path / "work tree" / "torch", upstream.project)
    linked.apply()
    assert linked.tree() == expected_tree(upstream.project)
    assert len(upstream.titles()) == 1


def test_shallow_clone(upstream, tmp_path):
    upstream.edit(OVERRIDES, "line_13 = 13\n", "line_13 = 'thirteen'\n")
    upstream.commit("upstream moved on")
    path = tmp_path / "shallow"
    GitRepo(tmp_path).run(
        "clone", "-q", "--depth=1", f"file://{upstream.path}", path.name
    )
    identify(path)
    shallow = Upstream(path, upstream.project)
    old = upstream.git.resolve(f"HEAD^:{OVERRIDES}")
    assert not shallow.git.has(old), "the clone has the old text; nothing is tested"
    shallow.apply()
    assert shallow.said == ["applied by merge", "applied"]
    assert "first = True\nline_12 = 12\nline_13 = 'thirteen'" in shallow.read(OVERRIDES)


def test_wrong_base(upstream, tmp_path):
    with pytest.raises(StageError, match="no folder"):
        Target(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(
        StageError, match="is no git checkout that can be used: not a git repository"
    ):
        Target(tmp_path / "empty")
    other = Upstream(tmp_path / "empty", upstream.project)
    other.git.run("init", "-q")
    identify(other.path)
    other.write("README.md", "another project\n")
    other.commit("start")
    with pytest.raises(StageError, match="is not PyTorch"):
        other.apply()
    own = Upstream(upstream.project.workspace.checkout, upstream.project)
    with pytest.raises(StageError, match="the stager's own checkout"):
        own.apply()


def test_older_pytorch_needs_a_word(upstream):
    upstream.write("version.txt", "2.13.0a0\n")
    upstream.commit("an old release")
    with pytest.raises(
        StageError, match="PyTorch 2.13.0a0; the stack is made for 2.15"
    ):
        upstream.apply()
    upstream.apply(any_base=True)
    assert upstream.said == BOTH


def test_git_operation_under_way(upstream):
    (upstream.path / ".git/MERGE_HEAD").write_text(upstream.git.resolve("HEAD"))
    with pytest.raises(StageError, match="a git operation is under way.*MERGE_HEAD"):
        upstream.apply()


def test_no_identity(upstream, monkeypatch):
    for key in ("user.name", "user.email"):
        upstream.git.run("config", "--unset", key)
    upstream.git.run("config", "user.useConfigOnly", "true")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    monkeypatch.setenv("GIT_CONFIG_SYSTEM", os.devnull)
    with pytest.raises(StageError, match="does not know who you are"):
        upstream.apply()


def test_hook_that_refuses_leaves_a_clean_tree(upstream):
    hook = upstream.path / ".git/hooks/pre-applypatch"
    hook.parent.mkdir(exist_ok=True)
    hook.write_text("#!/bin/sh\nexit 1\n")
    hook.chmod(0o755)
    head = upstream.git.resolve("HEAD")
    with pytest.raises(StageError, match="100-first.patch: git am"):
        upstream.apply()
    assert upstream.git.resolve("HEAD") == head
    assert upstream.git.run("status", "--porcelain") == ""
    hook.unlink()
    upstream.apply()
    assert upstream.said == BOTH


def test_commits_of_the_user_survive_an_abort(upstream):
    upstream.edit(OVERRIDES, "line_30 = 30\nline_31 = 31\n", "other = 1\n")
    upstream.commit("upstream moved on")
    with pytest.raises(StageError, match="110-second.patch conflicts"):
        upstream.apply()
    upstream.git.run("am", "--quit")
    upstream.git.run("reset", "-q", "--hard")
    upstream.write("mine.py", "x = 1\n")
    mine = upstream.commit("mine")
    with pytest.raises(StageError, match=f"commit {mine[:12]} was made since"):
        upstream.apply("abort")
    assert upstream.git.resolve("HEAD") == mine


# -- killed ----------------------------------------------------------------------

PROGRAM = """
import sys
from pathlib import Path
sys.path[:0] = sys.argv[1:3]
from conftest import Project, Upstream
project = Project(Path(sys.argv[3]), Path(sys.argv[4]))
upstream = Upstream(Path(sys.argv[5]), project)
print("started", flush=True)
upstream.apply()
print("done", flush=True)
"""


def apply_and_kill(upstream, delay):
    """Whether apply was killed before it was done."""
    project = upstream.project
    folders = (TOOLS, TOOLS / "test", project.root, project.cache, upstream.path)
    return kill_program(PROGRAM, list(map(str, folders)), delay)


def test_killed_at_any_moment(upstream, tmp_path):
    rng, killed = random.Random(0), 0
    start = time.monotonic()
    upstream.apply()
    duration = time.monotonic() - start
    expected = upstream.tree()
    clones = 7 if WITH_SLOW else 2
    for number in range(clones):
        path = tmp_path / f"clone {number}"
        make_upstream(upstream.project, path)
        clone = Upstream(path, upstream.project)
        for _ in range(2):
            in_time = apply_and_kill(clone, rng.uniform(0.0, duration))
            killed += in_time
            duration *= 1.0 if in_time else 0.7  # a busy machine measured it too long
        clone.apply()
        assert clone.tree() == expected
        assert clone.titles()[1:] == ["Add moe.py", "Add its test"]
        assert clone.git.run("status", "--porcelain") == ""
        shutil.rmtree(path)
    assert killed > clones // 2, "hardly any call was killed in time"


@pytest.mark.parametrize("moment", ["files", "am"])
def test_killed_inside_am(upstream, moment):
    """The states a kill can leave, made by hand: none depends on luck."""
    head = upstream.git.resolve("HEAD")
    target = Target(upstream.path)
    target.own.mkdir(exist_ok=True)
    state = {"start": head, "current": "100-first", "head": head, "phase": "am"}
    target.state = state
    upstream.write(OVERRIDES, "half a fi")
    upstream.write("torch/nn/moe.py", "def m")
    (upstream.path / ".git/index.lock").touch()
    if moment == "am":
        (upstream.path / ".git/rebase-apply").mkdir()
        (upstream.path / ".git/rebase-apply/applying").touch()
    upstream.apply()
    assert upstream.said == BOTH
    assert upstream.tree() == expected_tree(upstream.project)
    kept = (target.own / "interrupted.patch").read_text()
    assert "+half a fi" in kept


def test_abort_after_a_kill(upstream):
    head = upstream.git.resolve("HEAD")
    target = Target(upstream.path)
    target.own.mkdir(exist_ok=True)
    target.state = {"start": head, "current": "100-first", "head": head, "phase": "am"}
    upstream.write(OVERRIDES, "half a fi")
    upstream.apply("abort")
    assert upstream.git.run("status", "--porcelain") == ""
    with pytest.raises(GitError):
        upstream.git.run("am", "--continue")


def test_second_call_at_the_same_time(upstream):
    with Target(upstream.path).locked():
        with pytest.raises(StageError, match="another stage.py is working on"):
            upstream.apply()
