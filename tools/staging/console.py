"""Progress display on stderr. Every module that takes time gets a Console.

On a terminal a spinner says what is happening now; in a log every step is one
plain line, and one more every 10 seconds. Both end with how long it took. A step
that finds nothing to do is never started, so a no-op prints nothing.
"""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import rich.console
import rich.progress


_LINE_EVERY = 10  # seconds


class Console:
    """Prints steps, notes and warnings on stderr, so stdout stays the user's."""

    def __init__(self, quiet: bool = False) -> None:
        self._rich = rich.console.Console(stderr=True, highlight=False, soft_wrap=True)
        self._quiet = quiet
        self.steps: list[tuple[str, float]] = []

    @contextmanager
    def step(self, title: str) -> Iterator[Callable[[str], None]]:
        """Shows ``title`` while the body runs; yields ``update(detail)``."""
        start = time.monotonic()
        if self._rich.is_terminal and not self._quiet:
            with self._rich.status(title) as status:
                yield lambda detail: status.update(
                    f"{title}  [dim]{_escape(detail)}[/]"
                )
        else:
            self._print(f"... {title}")
            with self._lines(title, start) as update:
                yield update
        seconds = time.monotonic() - start
        self.steps.append((title, seconds))
        self._print(f" ok {title}  {seconds:.1f} s")

    @contextmanager
    def _lines(self, title: str, start: float) -> Iterator[Callable[[str], None]]:
        """A line whenever another ``_LINE_EVERY`` seconds are over; yields ``update(detail)``."""
        last, over = [""], threading.Event()

        def print_often() -> None:
            while not over.wait(_LINE_EVERY):
                seconds = time.monotonic() - start
                self._print(f"... {title}  {seconds:.0f} s  {last[0]}".rstrip())

        threading.Thread(target=print_often, daemon=True).start()
        try:
            yield lambda detail: last.__setitem__(0, detail)
        finally:
            over.set()

    @contextmanager
    def progress(self, title: str, total: int) -> Iterator[Callable[[int, str], None]]:
        """A progress bar; yields ``advance(done, detail)``."""
        if not self._rich.is_terminal or self._quiet:
            with self.step(title) as update:
                yield lambda done, detail: update(f"{done}/{total} {detail}")
            return
        start = time.monotonic()
        columns = (
            rich.progress.TextColumn("{task.description}"),
            rich.progress.BarColumn(),
            rich.progress.MofNCompleteColumn(),
            rich.progress.TimeElapsedColumn(),
            rich.progress.TextColumn("[dim]{task.fields[detail]}"),
        )
        with rich.progress.Progress(
            *columns, console=self._rich, transient=True
        ) as bars:
            task = bars.add_task(title, total=total, detail="")
            yield lambda done, detail: bars.update(
                task, completed=done, detail=_escape(detail)
            )
        seconds = time.monotonic() - start
        self.steps.append((title, seconds))
        self._print(f" ok {title}  {seconds:.1f} s")

    def note(self, text: str) -> None:
        """A line worth reading that is not an error."""
        self._print(f"    {text}")

    def warn(self, text: str) -> None:
        """A line printed even when quiet."""
        print(f"warning: {text}", file=sys.stderr, flush=True)

    def _print(self, text: str) -> None:
        if not self._quiet:
            self._rich.print(_escape(text))


def _escape(text: str) -> str:
    """Keeps rich from reading ``[...]`` in file names as markup."""
    return text.replace("[", "\\[")
