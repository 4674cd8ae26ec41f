"""The command line of tools/stage.py: one function per verb, no logic here."""

import json
import os
import shlex
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from . import (
    apply as apply_module,
    baseenv,
    drift as drift_module,
    evidence,
    export as export_module,
    lint,
    pipeline,
    prbody,
    prefixes,
    series as series_module,
    testing,
    typecheck,
)
from .baseenv import BaseEnv
from .checkout import Checkout
from .config import Workspace, workspace as make_workspace, write_atomically
from .console import Console
from .errors import ArgumentError, from_os_error, StageError
from .pipeline import Staged
from .series import Stack


ROOT = Path(__file__).resolve().parents[2]
DEMO = "benchmarks/moe/train_demo.py"
_CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 100}
_PASS_ON = {"ignore_unknown_options": True, "allow_interspersed_args": False}


class _Session:
    """What every verb needs, made once."""

    def __init__(self) -> None:
        self.console = Console()
        self.workspace: Workspace = make_workspace(ROOT)

    @property
    def stack(self) -> Stack:
        return series_module.load(ROOT)

    def setup(self, wait: bool = True, **arguments) -> Staged:
        """pipeline.setup under the lock of the build folder."""
        with pipeline.locked(self.workspace, self.console, wait=wait):
            return pipeline.setup(self.workspace, self.stack, self.console, **arguments)

    @contextmanager
    def checkout(self) -> Iterator[tuple[BaseEnv, Checkout]]:
        """Base environment and checkout, under the lock of the build folder."""
        with pipeline.locked(self.workspace, self.console):
            env, checkout = pipeline.open_checkout(
                self.workspace, self.stack, self.console
            )
            checkout.ensure_current(self.stack, self.console)
            yield env, checkout

    def selected(self, names: tuple[str, ...]) -> Stack:
        """The named series with what they need; the whole stack if none is named."""
        if not names:
            return self.stack
        for pr in self.stack.left_out(names):
            needs = " ".join(f"--series {name}" for name in pr.needs)
            self.console.note(f"left out: {pr.name}; it needs {needs}")
        return self.stack.select(names)


_series_option = click.option(
    "--series",
    "names",
    multiple=True,
    metavar="NAME",
    help="Only this series of series.toml and what it needs (repeatable).",
)


def _write_output(path: Path, text: str) -> None:
    """Writes where the user says, through links and into pipes."""
    if path.is_dir():
        raise ArgumentError(f"the output must be a file, got the folder {path}")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def _json_option(text: str) -> Callable:
    path = click.Path(dir_okay=False, path_type=Path)
    return click.option("--json", "json_file", type=path, metavar="FILE", help=text)


@click.group(context_settings=_CONTEXT)
@click.pass_context
def cli(context: click.Context) -> None:
    """Stages the MoE pull requests onto the released PyTorch wheel.

    Everything derived lies in build/ (safe to delete) and in a per-user cache
    ($MOE_STAGING_CACHE, default ~/.cache/pytorch-moe-staging).
    """
    context.obj = _Session()


@cli.command()
@click.option("--fresh", is_flag=True, help="Install the base environment anew.")
@click.option(
    "--discard",
    is_flag=True,
    help="Drop edits of build/checkout that are not in the repository (a copy is kept).",
)
@click.option(
    "--capability",
    type=click.Choice(["all", "host"]),
    help="CPU capabilities native/cpu/ is compiled for: all of them, or only this "
    "machine's (quicker). Stays in force until changed. First default: host.",
)
@click.option(
    "--ndebug/--no-ndebug",
    default=None,
    help="Compile without debug assertions, as the wheel is. Stays in force.",
)
@click.option("--no-wait", is_flag=True, help="Fail if another stage.py is at work.")
@click.pass_obj
def setup(
    session: _Session,
    fresh: bool,
    discard: bool,
    capability: str | None,
    ndebug: bool | None,
    no_wait: bool,
) -> None:
    """Makes or updates the staged environment in build/venv.

    Example: python3 tools/stage.py setup --capability all
    """
    start = time.monotonic()
    options = pipeline.options(session.workspace, capability, ndebug)
    staged = session.setup(
        wait=not no_wait, options=options, fresh=fresh, discard=discard
    )
    did = "staged" if session.console.steps else "up to date"
    session.console.note(f"{did}: {staged.python}  {time.monotonic() - start:.1f} s")


@cli.command(context_settings=_PASS_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def python(session: _Session, arguments: tuple[str, ...]) -> None:
    """Runs the staged Python (sets up first if anything changed).

    Example: python3 tools/stage.py python -c "import torch; print(torch._moe_mlp)"
    """
    staged = session.setup()
    command = [str(staged.python), *arguments]
    env = testing.environment(session.workspace, staged)
    sys.stdout.flush()
    os.execve(command[0], command, env)


@cli.command(context_settings=_PASS_ON | {"allow_interspersed_args": True})
@click.argument("paths", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--upstream",
    type=click.Path(path_type=Path),
    metavar="CHECKOUT",
    help="Run PyTorch's own suites out of this checkout, narrowed down to our ops "
    "(PATHS narrow it down further). What fails there runs with the released wheel as "
    "well: failures of both are not ours.",
)
@_json_option(
    "With --upstream: also write a row per suite; rows of other suites in FILE stay."
)
@click.option(
    "--jobs",
    type=click.IntRange(1),
    default=1,
    metavar="N",
    help="Test files to run at the same time. Default: 1",
)
@click.option(
    "--series",
    "series",
    multiple=True,
    metavar="NAME",
    help="Stage this series and what it needs, nothing else, and run its tests "
    "(repeatable).",
)
@click.pass_obj
def test(
    session: _Session,
    paths: tuple[str, ...],
    upstream: Path | None,
    json_file: Path | None,
    jobs: int,
    series: tuple[str, ...],
) -> None:
    """Runs tests in the staged environment: PATHS [-- PYTEST ARGUMENTS].

    Without paths: the tests of the whole stack, then those of the stager.
    Options of pytest follow a double dash.

    Example: python3 tools/stage.py test test/test_moe_mlp.py -- -k bfloat16 -x
    """
    names, arguments = _split_at_dashes(paths)
    if upstream is not None and series:
        raise click.UsageError("give either --upstream or --series")
    if upstream is None and json_file:
        raise click.UsageError("--json goes with --upstream")
    if series:
        stack = session.selected(series)
        own = {t for pr in stack.prs if pr.series in series for t in pr.tests}
        chosen = [t for t in stack.tests if t in own]
        of_series = stack.only(pr.name for pr in stack.prs if pr.series in series)
        chosen += testing.added_tests(session.workspace, of_series)
        if names:
            chosen = testing.select(session.workspace, stack, names)
        status = prefixes.test(
            session.workspace, stack, chosen, arguments, session.console, jobs
        )
        sys.exit(status)
    if upstream is not None:
        suites = testing.upstream_suites(upstream, names)
        staged = session.setup()
        workspace, stack = session.workspace, session.stack
        released = baseenv.locate(workspace, stack).python
        status, rows = testing.run_upstream(
            workspace, staged, upstream, suites, arguments, released
        )
        if json_file:
            record = testing.upstream_record(
                workspace, stack, upstream, rows, json_file
            )
            _write_output(json_file, f"{json.dumps(record, indent=1)}\n")
        sys.exit(status)
    selected = testing.select(session.workspace, session.stack, names)
    needs_stage = any(not t.startswith(testing.STAGER_TESTS) for t in selected)
    staged = session.setup() if needs_stage or not names else None
    sys.exit(testing.run(session.workspace, staged, selected, arguments, jobs))


@cli.command(context_settings=_PASS_ON)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.pass_obj
def run(session: _Session, arguments: tuple[str, ...]) -> None:
    """Everything from nothing, then the demo: an MoE model trained on real text.

    Results (table, plot, JSON) go to build/demo/. ARGUMENTS go to the demo.

    Example: python3 tools/stage.py run --steps 200
    """
    staged = session.setup()
    out = session.workspace.build / "demo"
    out.mkdir(parents=True, exist_ok=True)
    demo = ROOT / DEMO
    if not demo.exists():
        raise StageError(f"the demo {DEMO} is missing")
    command = [str(staged.python), str(demo), "--out", str(out), *arguments]
    sys.stdout.flush()
    env = testing.environment(session.workspace, staged)
    os.execve(command[0], command, env)


@cli.command()
@click.pass_obj
def export(session: _Session) -> None:
    """Writes the commits of build/checkout back as patches and new files.

    Use it after rebasing or amending commits there. Each commit names its PR
    in a line "Staged-PR: <name>".

    Example: python3 tools/stage.py export
    """
    with session.checkout() as (_, checkout):
        changed = export_module.export(checkout, session.stack)
        checkout.sync(session.stack, session.console)
    _report(changed)


@cli.command()
@click.argument("pr", required=False)
@click.option(
    "--regenerate-shims",
    is_flag=True,
    help="Instead: write the C shim headers that torchgen wants into all patches.",
)
@click.option(
    "--upstream",
    type=click.Path(path_type=Path),
    metavar="CHECKOUT",
    help="Instead: take the uncommitted edits of files that the wheel lacks (docs, "
    "expect files, C++) out of this checkout of PyTorch.",
)
@click.pass_obj
def refresh(
    session: _Session, pr: str | None, regenerate_shims: bool, upstream: Path | None
) -> None:
    """Folds the uncommitted edits of build/checkout into one PR.

    Edits of files PyTorch already has go into the patch of PR, other files
    become new files of PR. PR is a name or a slot number.

    Example: python3 tools/stage.py refresh 130
    """
    if bool(pr) == regenerate_shims or (regenerate_shims and upstream):
        raise click.UsageError("give either a PR or --regenerate-shims")
    with session.checkout() as (env, checkout):
        arguments = session.workspace, checkout, session.stack
        if pr is None:
            changed = export_module.regenerate_shims(
                session.workspace, env, checkout, session.stack, session.console
            )
        elif upstream is not None:
            target = apply_module.Target(upstream)
            changed = export_module.refresh_upstream(
                checkout, session.stack, pr, target
            )
        else:
            changed = export_module.refresh(*arguments, pr, session.console)
        checkout.sync(session.stack, session.console)
    _report(changed)


@cli.command()
@click.option(
    "--each",
    is_flag=True,
    help="Also stage every prefix of the stack and run the tests of its last PR. "
    "What passed is remembered; a repeated call goes on.",
)
@click.option("--from", "first", metavar="PR", help="With --each: start at this PR.")
@click.option(
    "--only", multiple=True, metavar="PR", help="With --each: this prefix (repeatable)."
)
@_series_option
@click.option("--redo", is_flag=True, help="With --each: also what passed before.")
@click.option(
    "--jobs",
    type=click.IntRange(1),
    metavar="N",
    help="With --each: test files of a prefix to run at the same time. Default: 1",
)
@click.pass_obj
def verify(
    session: _Session,
    each: bool,
    first: str | None,
    only: tuple[str, ...],
    names: tuple[str, ...],
    redo: bool,
    jobs: int | None,
) -> None:
    """Proves that patches and tree are consistent.

    Applying the stack and exporting it again gives the same bytes, every series
    applies with no more than it needs, and series.toml and the files agree in both
    directions. With --series, --each stops at the PRs of that series alone.

    Example: python3 tools/stage.py verify --each --series fixes
    """
    if (first or only or redo or jobs) and not each:
        raise click.UsageError("--from, --only, --redo and --jobs go with --each")
    if first and only:
        raise click.UsageError("give either --from or --only")
    chosen = prefixes.select(session.stack, first, only, names)
    with session.checkout() as (_, checkout):
        problems = export_module.verify(checkout, session.stack)
    if problems:
        raise StageError("\n".join(problems))
    total = f"{len(session.stack.prs)} PRs in {len(session.stack.series)} series"
    print(f"verified: {total}, apply -> export is the identity")
    if each:
        _verify_prefixes(session, chosen, redo, jobs or 1)


@cli.command()
@click.argument("checkout", type=click.Path(path_type=Path))
@click.option(
    "--continue", "resume", is_flag=True, help="Go on after a conflict was resolved."
)
@click.option("--abort", is_flag=True, help="Undo what the stopped call did.")
@_series_option
@click.option("--upto", metavar="PR", help="Only the PRs up to this one.")
@click.option(
    "--any-base",
    is_flag=True,
    help="Also onto a PyTorch older than the pinned release.",
)
@click.pass_obj
def apply(
    session: _Session,
    checkout: Path,
    resume: bool,
    abort: bool,
    names: tuple[str, ...],
    upto: str | None,
    any_base: bool,
) -> None:
    """Applies the stack to a git CHECKOUT of PyTorch, one commit per PR.

    With `git am --3way` and your identity, onto the branch that is checked out.
    The tree must be clean. PRs that are there already are skipped, so that one series
    after another can be applied.

    Example: python3 tools/stage.py apply ../pytorch --series fixes
    """
    if resume and abort:
        raise click.UsageError("give either --continue or --abort")
    target = apply_module.Target(checkout)
    stack = session.stack
    wanted = session.selected(names).upto(upto) if upto else session.selected(names)
    asked = wanted if names or upto else None
    with target.locked(), session.checkout() as (_, source):
        applier = apply_module.Applier(target, source, stack, print, asked)
        if abort:
            print(f"back at {applier.abort()[:12]}")
            return
        before = target.head
        applier.proceed() if resume else applier.start(any_base)
    made = target.git.run("rev-list", "--count", f"{before}..HEAD").strip()
    for path, prs in applier.absent.items():
        session.console.warn(
            f"no {path} here; its edits by {', '.join(prs)} are left out"
        )
    print(f"{made} commits made in {target.path}; see git log {before[:12]}..")
    if target.detached:
        session.console.note("HEAD is detached; keep the commits: git switch -c NAME")


@cli.command()
@click.argument("versions", nargs=-1)
@click.option(
    "--checkout",
    "checkouts",
    multiple=True,
    type=click.Path(path_type=Path),
    help="Also against HEAD of this git checkout of PyTorch (repeatable).",
)
@_json_option("Also write the result, hunk by hunk, as JSON.")
@_series_option
@click.option("--markdown", is_flag=True, help="Print the table for CONTRIBUTING.md.")
@click.pass_obj
def drift(
    session: _Session,
    versions: tuple[str, ...],
    checkouts: tuple[Path, ...],
    json_file: Path | None,
    names: tuple[str, ...],
    markdown: bool,
) -> None:
    """Shows how every patch fits released VERSIONS of torch, hunk by hunk.

    Only the patched files of a version are fetched from its wheel. clean: at
    most moved. fuzzy: needs a three-way merge. conflict: needs a human.

    Example: python3 tools/stage.py drift 2.14.1 2.13.0 --checkout ../pytorch
    """
    if not versions and not checkouts:
        raise click.UsageError("name a version or a --checkout, e.g. drift 2.14.1")
    cache = session.workspace.cache
    sources = [drift_module.WheelSource(v, cache) for v in versions]
    sources += [drift_module.CheckoutSource(path) for path in checkouts]
    stack = session.selected(names)
    with session.checkout() as (_, checkout):
        found = [
            drift_module.measure_with_progress(checkout, stack, source, session.console)
            for source in sources
        ]
    words = [a for a in sys.argv[2:] if a != "--markdown"]
    command = f"python3 tools/stage.py drift {shlex.join(words)}"
    result = drift_module.result(found, stack, command)
    if json_file:
        _write_output(json_file, f"{json.dumps(result, indent=1)}\n")
    if markdown:
        print(drift_module.markdown(result), end="")
    else:
        drift_module.show(found)


@cli.command()
@click.argument("name", metavar="PR", required=False)
@click.option(
    "--series",
    "names",
    multiple=True,
    metavar="NAME",
    help="All PRs of this series of series.toml (repeatable).",
)
@click.option("--title", is_flag=True, help="Print the title only.")
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write it to a file instead; with --series, one file per PR into a folder.",
)
@click.pass_obj
def pr(
    session: _Session,
    name: str | None,
    names: tuple[str, ...],
    title: bool,
    out: Path | None,
) -> None:
    """Prints the body of a pull request, in markdown; the first line is its title.

    Made of the patch's description, its entry in series.toml and the results
    files that entry names. PR is a name or a slot number; --series prints those of
    the PRs of a series.

    Example: python3 tools/stage.py pr 130 | gh pr create --title "$(python3
    tools/stage.py pr 130 --title)" --body-file -
    """
    stack = session.stack
    if bool(name) == bool(names):
        raise click.UsageError("give either a PR or --series")
    stack.closure(names)  # an unknown name is an error
    chosen = [stack.get(name)] if name else [p for p in stack.prs if p.series in names]
    for one in chosen:
        text = f"{prbody.title(stack, one)}\n" if title else prbody.render(stack, one)
        if out is None:
            print(text, end="" if one is chosen[-1] else "\n")
        else:
            path = out / f"{one.name}.md" if names else out
            _write_output(path, text)


@cli.command()
@click.pass_obj
def results(session: _Session) -> None:
    """Writes RESULTS.md, one page of everything measured, from the results files.

    Example: python3 tools/stage.py results
    """
    write_atomically(ROOT / evidence.PAGE, evidence.render(session.stack).encode())


@cli.command("lint")
@click.option("-a", "--apply", is_flag=True, help="Also write the formatters' fixes.")
@click.pass_obj
def lint_command(session: _Session, apply: bool) -> None:
    """Runs all linters on every file of the repository.

    On a fresh clone it makes the base environment first: the types of our files
    below torch/ are checked inside that torch.

    Example: python3 tools/stage.py lint -a
    """
    status = lint.run(session.workspace.repo, apply)
    if status == 0:
        status = _check_types(session)
    if status == 0:
        stack = session.stack
        for line in (*lint.large_prs(stack), *lint.unlisted_sources(stack)):
            session.console.note(f"note: {line}")
    sys.exit(status)


def _check_types(session: _Session) -> int:
    """Pyrefly on our files below torch/; 1 if it finds an error."""
    stack, console = session.stack, session.console
    with pipeline.locked(session.workspace, console):
        env, checkout = pipeline.open_checkout(session.workspace, stack, console)
        with console.step("check the types of our files below torch/"):
            tip = checkout.tip(stack, console)
            errors = typecheck.check(session.workspace, env, checkout, stack, tip)
    for line in errors:
        print(line)
    return 1 if errors else 0


def _verify_prefixes(
    session: _Session, names: list[str], redo: bool, jobs: int
) -> None:
    """Stages and tests prefixes and sums up."""
    results = prefixes.run(
        session.workspace, session.stack, names, session.console, redo, jobs
    )
    print("=== prefixes")
    for result in results:
        print(result)
    bad = [result.name for result in results if not result.good]
    if bad:
        raise StageError(f"prefixes that are not good: {', '.join(bad)}")
    print(f"verified: {len(results)} prefixes stage and pass their tests")


def _report(changed: list[str]) -> None:
    for path in changed:
        print(f"wrote {path}")
    if not changed:
        print("nothing changed")


def _split_at_dashes(words: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """click drops the first "--"; sys.argv still has it."""
    given = sys.argv[1:]
    if "--" not in given:
        options = [word for word in words if word.startswith("-")]
        if options:
            raise click.UsageError(
                f"{options[0]}: options of pytest follow a double dash, "
                f"for example: test -- {options[0]}"
            )
        return list(words), []
    count = len(given) - given.index("--") - 1
    return list(words[: len(words) - count]), list(words[len(words) - count :])


def main() -> None:
    """Runs one verb; every failure is one message and a non-zero exit."""
    try:
        cli.main(prog_name="stage.py", standalone_mode=False)
    except click.UsageError as error:
        verb = error.ctx.command_path if error.ctx else "stage.py"
        print(f"error: {error.format_message()} (see {verb} --help)", file=sys.stderr)
        sys.exit(2)
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except ArgumentError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except StageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        print(f"error: {from_os_error(error)}", file=sys.stderr)
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        print("interrupted; the next call continues from here", file=sys.stderr)
        sys.exit(130)
