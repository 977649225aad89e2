"""The named statements of ``queries.sql`` and the numbered migrations."""

from __future__ import annotations

import functools
import re
import sqlite3
from collections.abc import Iterator, Mapping
from importlib.resources import files
from typing import Final

_NAME: Final = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


@functools.cache
def queries() -> Mapping[str, str]:
    """Return the statements of ``queries.sql`` by name."""
    text = files(__package__).joinpath("queries.sql").read_text(encoding="utf-8")
    parts = _NAME.split(text)[1:]
    return dict(zip(parts[::2], (part.strip() for part in parts[1::2]), strict=True))


@functools.cache
def migrations() -> tuple[str, ...]:
    """Return the migrations in order; the first one leads to schema version 1."""
    folder = files(__package__).joinpath("migrations")
    named = sorted((item.name, item) for item in folder.iterdir() if item.name.endswith(".sql"))
    return tuple(item.read_text(encoding="utf-8") for _, item in named)


def statements(script: str) -> Iterator[str]:
    """Split a script into its statements; triggers, with semicolons inside, stay whole."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""
