"""Writes the table in docs/reference/operations.md from the table of operations.

It is kept in the repository, where people read it, too; a test compares it with what is written here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpu_pool_client._operations import Operation, Principal
from gpu_pool_client._pool import OPERATIONS
from gpu_pool_client._remote import bodies
from gpu_pool_client._remote.forms import form_of

PAGE: Final = Path(__file__).parent / "reference" / "operations.md"
BEGIN: Final = "<!-- Written by docs/operations.py. -->\n"
END: Final = "<!-- To here. -->\n"
_HEAD: Final = "| operation | HTTP, below `%s` | who may | counts as |\n|---|---|---|---|\n"


def table() -> str:
    """Return the table, as Markdown."""
    return _HEAD % bodies.API + "".join(f"| {' | '.join(_cells(row))} |\n" for row in OPERATIONS)


def _cells(row: Operation) -> Iterator[str]:
    yield f"`{row.name}`"
    yield _http(row)
    yield "; ".join(_principals(row))
    yield row.cost.value


def _http(row: Operation) -> str:
    if row.http is None:
        return ""
    form = form_of(row)
    said = [each.name for each in form.fields]
    if row.poll is not None:
        said = ["seconds", row.poll.says]
    with_query = "" if form.body is not None or not said else f"?{'&'.join(said)}"
    body = f", `{{{', '.join(said)}}}`" if form.body is not None else ""
    empty = f", or {row.poll.unchanged}" if row.poll is not None and row.poll.unchanged else ""
    return f"`{row.http.method} {row.http.path}{with_query}`{body}{empty}"


def _principals(row: Operation) -> Iterator[str]:
    for each in Principal:
        if each in row.may:
            sight = row.sees.get(each)
            yield each.value if sight is None else f"{each.value} ({sight.value})"


def page(text: str) -> str:
    """Return the page with the table as it is now."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
