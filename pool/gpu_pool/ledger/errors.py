"""What can be wrong with a ledger, in words."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from gpu_pool_client import PoolUnreachable


class LedgerUnusable(PoolUnreachable):
    """The ledger cannot be used as it is. It is left as it was found."""

    code = "ledger-unusable"


_SET_ASIDE = (
    "Nothing was changed. Stop all kernels, move the file aside, and start again; "
    '"gpu-pool doctor" shows more.'
)

#: SQLite's own words (they are part of its C interface: sqlite3_errstr) and what to say instead.
_MEANINGS = (
    ("malformed", "is damaged", _SET_ASIDE),
    ("not a database", "is not a ledger: another kind of file, or damaged", _SET_ASIDE),
    (
        "full",
        "cannot grow: the disk is full",
        "Free some space on that disk and try again; nothing was lost.",
    ),
    (
        "readonly",
        "cannot be written",
        "Make the file and its folder writable for you, or name another ledger.",
    ),
    ("unable to open", "cannot be opened", "Make the file and its folder readable and writable for you."),
    (
        "disk I/O error",
        "cannot be read or written: the disk reports an error",
        "Check the disk, and its free space.",
    ),
    ("locked", "stays locked by another program", "Find out what has the file open, and close it."),
)


def explain(error: sqlite3.Error, path: Path) -> LedgerUnusable:
    """Turn an error of SQLite into words for the person who has to mend it."""
    text = str(error)
    for words, meaning, remedy in _MEANINGS:
        if words in text:
            return LedgerUnusable(f"The pool's ledger, {path}, {meaning}.", remedy)
    return LedgerUnusable(f"The pool's ledger, {path}, cannot be used: {text}.", _SET_ASIDE)
