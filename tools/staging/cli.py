"""The command line of tools/stage.py: one function per verb, no logic here."""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from . import export as export_module, lint, pipeline, series as series_module, testing
from .baseenv import BaseEnv
from .checkout import Checkout
from .config import Workspace, workspace as make_workspace
from .console import Console
from .errors import from_os_error, StageError
from .pipeline import Staged
from .series import Series


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
    def series(self) -> Series:
        return series_module.load(ROOT)

    def setup(self, wait: bool = True, **arguments) -> Staged:
        """pipeline.setup under the lock of the build folder."""
        with pipeline.locked(self.workspace, self.console, wait=wait):
            return pipeline.setup(
                self.workspace, self.series, self.console, **arguments
            )

    @contextmanager
    def checkout(self) -> Iterator[tuple[BaseEnv, Checkout]]:
        """Base environment and checkout, under the lock of the build folder."""
        with pipeline.locked(self.workspace, self.console):
            env, checkout = pipeline.open_checkout(
                self.workspace, self.series, self.console
            )
            checkout.ensure_current(self.series, self.console)
            yield env, checkout


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
@click.pass_obj
def test(session: _Session, paths: tuple[str, ...]) -> None:
    """Runs tests in the staged environment: PATHS [-- PYTEST ARGUMENTS].

    Without paths: the tests of the whole stack, then those of the stager.
    Options of pytest follow a double dash.

    Example: python3 tools/stage.py test test/test_moe_mlp.py -- -k bf16 -x
    """
    names, arguments = _split_at_dashes(paths)
    selected = testing.select(session.workspace, session.series, names)
    needs_stage = any(not t.startswith(testing.STAGER_TESTS) for t in selected)
    staged = session.setup() if needs_stage or not names else None
    sys.exit(testing.run(session.workspace, staged, selected, arguments))


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
        changed = export_module.export(checkout, session.series)
        checkout.sync(session.series, session.console)
    _report(changed)


@cli.command()
@click.argument("pr", required=False)
@click.option(
    "--regenerate-shims",
    is_flag=True,
    help="Instead: write the C shim headers that torchgen wants into all patches.",
)
@click.pass_obj
def refresh(session: _Session, pr: str | None, regenerate_shims: bool) -> None:
    """Folds the uncommitted edits of build/checkout into one PR.

    Edits of files PyTorch already has go into the patch of PR, other files
    become new files of PR. PR is a name or a slot number.

    Example: python3 tools/stage.py refresh 130
    """
    if bool(pr) == regenerate_shims:
        raise click.UsageError("give either a PR or --regenerate-shims")
    with session.checkout() as (env, checkout):
        arguments = session.workspace, checkout, session.series
        if regenerate_shims:
            changed = export_module.regenerate_shims(
                session.workspace, env, checkout, session.series, session.console
            )
        else:
            changed = export_module.refresh(*arguments, pr, session.console)
        checkout.sync(session.series, session.console)
    _report(changed)


@cli.command()
@click.option(
    "--each",
    is_flag=True,
    help="Also stage every prefix of the stack and run the tests of its last PR.",
)
@click.pass_obj
def verify(session: _Session, each: bool) -> None:
    """Proves that patches and tree are consistent.

    Applying the stack and exporting it again gives the same bytes, and
    series.toml and the files agree in both directions.

    Example: python3 tools/stage.py verify --each
    """
    with session.checkout() as (_, checkout):
        problems = export_module.verify(checkout, session.series)
    if problems:
        raise StageError("\n".join(problems))
    print(f"verified: {len(session.series.prs)} PRs, apply -> export is the identity")
    if each:
        _verify_prefixes(session)


@cli.command("lint")
@click.option("-a", "--apply", is_flag=True, help="Also write the formatters' fixes.")
@click.pass_obj
def lint_command(session: _Session, apply: bool) -> None:
    """Runs all linters on every file of the repository.

    Example: python3 tools/stage.py lint -a
    """
    sys.exit(lint.run(session.workspace.repo, apply))


def _verify_prefixes(session: _Session) -> None:
    """Stages and tests each prefix in a build folder of its own."""
    for pr in session.series.prs:
        session.console.note(f"prefix up to {pr.name}")
        build = session.workspace.build / "prefix" / pr.name
        prefix = make_workspace(ROOT, build)
        series = session.series.upto(pr.name)
        with pipeline.locked(prefix, session.console):
            staged = pipeline.setup(prefix, series, session.console)
        if pr.tests and testing.run(prefix, staged, pr.tests, []):
            raise StageError(f"the stack up to {pr.name} does not pass its tests")
        shutil.rmtree(build)
    print(
        f"verified: all {len(session.series.prs)} prefixes stage and pass their tests"
    )


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
        verb = f"stage.py {error.ctx.info_name}" if error.ctx else "stage.py"
        print(f"error: {error.format_message()} (see {verb} --help)", file=sys.stderr)
        sys.exit(2)
    except click.exceptions.Exit as leave:
        sys.exit(leave.exit_code)
    except StageError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        print(f"error: {from_os_error(error)}", file=sys.stderr)
        sys.exit(1)
    except (KeyboardInterrupt, click.Abort):
        print("interrupted; the next call continues from here", file=sys.stderr)
        sys.exit(130)
