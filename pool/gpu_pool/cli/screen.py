"""Output: tables, JSON and messages. Colours follow the terminal (and ``NO_COLOR``)."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final, TypeVar

import click

from gpu_pool_client._log import escaped

if TYPE_CHECKING:
    from rich.console import Console
    from rich.status import Status
    from rich.table import Table

    #: What can be printed.
    Shown = Table | str


#: Columns of output that no terminal cuts: programs and files get whole lines.
_WIDE = 1_000
#: Columns from which on tables are shown whole.
_ROOMY = 100


def console(*, stderr: bool = False) -> Console:
    """Return a console for standard output or error. Rich is loaded at first use."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    # Markup and emoji codes stay off: names of users and kernels are not ours.
    return Console(
        stderr=stderr,
        width=None if stream.isatty() else _WIDE,
        markup=False,
        emoji=False,
        highlight=False,
        soft_wrap=True,
    )


def is_narrow() -> bool:
    """Whether the terminal has no room for columns that a table can do without."""
    return console().width < _ROOMY


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Lay rows out under their headings."""
    from rich.table import Table
    from rich.text import Text

    laid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold")
    for column in columns:
        laid.add_column(Text(column), no_wrap=False, overflow="fold")
    for row in rows:
        laid.add_row(*(Text(cell) for cell in row))
    return laid


def show(*parts: Shown) -> None:
    """Print tables and texts on standard output."""
    out = console()
    for part in parts:
        out.print(part)


def show_json(value: Any, *, indent: int | None = 2) -> None:
    """Print a plain value on standard output."""
    click.echo(json.dumps(value, indent=indent))


def note(text: str) -> None:
    """Tell the person something on standard error, where it is in no program's way."""
    lines = map(escaped, text.split("\n"))
    click.echo("\n".join((f"gpu-pool: {next(lines)}", *lines)), err=True)


#: Seconds in which most commands are done, and nothing is said.
_SILENT: Final = 2.0
#: Seconds between two words in a terminal, where one line changes, and elsewhere, where each is a line.
_LIVE_EVERY: Final = 0.2
_PLAIN_EVERY: Final = 10.0

Line = TypeVar("Line", bound="StatusLine")


class StatusLine:
    """A line on standard error that changes while something goes on, where that is a terminal."""

    def __init__(self) -> None:
        self.is_live = sys.stderr.isatty()
        self._status: Status | None = None

    def __enter__(self: Line) -> Line:
        return self

    def __exit__(self, *failure: object) -> None:
        if self._status is not None:
            self._status.stop()

    def show(self, text: str) -> None:
        """Put a text into the line."""
        if self._status is None:
            self._status = console(stderr=True).status(text)
            self._status.start()
        else:
            self._status.update(text)


class Progress(StatusLine):
    """Says how far it has come once it takes long: in a terminal in one line, else in a line now and then."""

    def __init__(self) -> None:
        super().__init__()
        self._due = time.monotonic() + _SILENT

    def tell(self, what: str, part: float) -> None:
        """Say what is done now, and which part of it (0 to 1) has been done."""
        now = time.monotonic()
        if now < self._due:
            return
        text = f"{what}: {part:.0%}"
        self._due = now + (_LIVE_EVERY if self.is_live else _PLAIN_EVERY)
        if self.is_live:
            self.show(text)
        else:
            note(text)
