"""The named statements of ``queries.sql`` and the numbered migrations."""

from __future__ import annotations

import contextlib
import functools
import re
import sqlite3
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Final

from gpu_pool.store.errors import SET_ASIDE, StoreUnusable

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


#: The columns of all tables, as "table.column TYPE"; those that are computed too.
_COLUMNS = """
SELECT "table".name || '.' || "column".name || ' ' || "column".type
FROM sqlite_master AS "table", pragma_table_xinfo("table".name) AS "column"
WHERE "table".type = 'table'
"""


def version_of(connection: sqlite3.Connection) -> int:
    """Return the schema version of a store: the number of the last migration that it has seen."""
    return int(connection.execute("PRAGMA user_version").fetchone()[0])


def check_version(connection: sqlite3.Connection, path: Path) -> int:
    """Return the schema version. Raises ``StoreUnusable`` if this jupyter-gpu-pool does not know it."""
    version, newest = version_of(connection), len(migrations())
    if version > newest:
        raise StoreUnusable(
            f"The pool's store, {path}, was written by a newer jupyter-gpu-pool "
            f"(schema {version}; this one knows schemas 1 to {newest}).",
            "Upgrade jupyter-gpu-pool here too; where it was just upgraded, restart what uses the pool. "
            "Nothing was changed.",
        )
    return version


def is_newest(connection: sqlite3.Connection, path: Path) -> bool:
    """Whether a store is as this version writes it. Raises ``StoreUnusable`` if it can be of no use."""
    # One transaction, so that version and tables belong together while another process upgrades.
    connection.execute("BEGIN")
    try:
        return _check(connection, path) == len(migrations())
    finally:
        with contextlib.suppress(sqlite3.Error):
            connection.execute("COMMIT")


def upgrade(connection: sqlite3.Connection, path: Path) -> None:
    """Run what a store lacks of the migrations in one transaction: after any end it is old or new.

    Whoever comes second finds it done. Raises ``sqlite3.Error``, ``StoreUnusable``.
    """
    connection.execute("BEGIN EXCLUSIVE")
    try:
        _bring_up(connection, path)
        connection.execute("COMMIT")
    except BaseException:
        # For want of space, say, SQLite has rolled back by itself.
        with contextlib.suppress(sqlite3.Error):
            connection.execute("ROLLBACK")
        raise


def _bring_up(connection: sqlite3.Connection, path: Path) -> None:
    done = _check(connection, path)
    _run(connection, migrations()[done:])
    connection.execute(f"PRAGMA user_version = {len(migrations())}")


def _check(connection: sqlite3.Connection, path: Path) -> int:
    """Return the schema version, and refuse tables that are not those of that version."""
    version = check_version(connection, path)
    found, expected = _columns(connection), _columns_after(migrations()[:version])
    # A table of somebody else's does no harm.
    ours = {column.partition(".")[0] for column in expected}
    differing = sorted(column for column in found ^ expected if column.partition(".")[0] in ours)
    if differing:
        column = differing[0]
        raise StoreUnusable(
            f"The pool's store, {path}, is not one of a released jupyter-gpu-pool: it says schema "
            f"{version}, but {'has' if column in found else 'lacks'} the column {column}.",
            f"Use it with the version that wrote it, or discard it. {SET_ASIDE}",
        )
    return version


def _columns(connection: sqlite3.Connection) -> frozenset[str]:
    return frozenset(row[0] for row in connection.execute(_COLUMNS))


@functools.cache
def _columns_after(scripts: tuple[str, ...]) -> frozenset[str]:
    with contextlib.closing(sqlite3.connect(":memory:", isolation_level=None)) as blank:
        _run(blank, scripts)
        return _columns(blank)


def _run(connection: sqlite3.Connection, scripts: tuple[str, ...]) -> None:
    for script in scripts:
        for statement in statements(script):
            connection.execute(statement)
