"""Screen: results go to stdout, progress to stderr, so that a pipe gets results only."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
)

# Wide enough for every table where there is no terminal to ask (a pipe, a CI log).
_WIDTH_WITHOUT_TERMINAL = 130


def results() -> Console:
    """Where tables are printed; no markup, so that a path in brackets stays as it is."""
    is_terminal = Console().is_terminal
    width = None if is_terminal else _WIDTH_WITHOUT_TERMINAL
    return Console(width=width, markup=False, highlight=False)


def say(*lines: str) -> None:
    """Print lines of text, unbroken: the terminal wraps them, a pipe gets them whole."""
    for line in lines:
        print(line)


@dataclass(frozen=True, slots=True)
class Bar:
    """One progress bar whose title and length may change."""

    progress: Progress
    task: TaskID

    def stage(self, title: str) -> None:
        """Name what begins; its length is not known yet."""
        self.progress.reset(self.task, total=None, description=title)

    def advance_to(self, done: int, total: int | None = None) -> None:
        """Show how far it is; without a total only the count moves."""
        self.progress.update(self.task, completed=done, total=total)


@contextmanager
def progress_bar(title: str) -> Iterator[Bar]:
    """A bar on stderr while the block runs; nothing is drawn where stderr is no terminal."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as progress:
        yield Bar(progress, progress.add_task(title, total=None))
