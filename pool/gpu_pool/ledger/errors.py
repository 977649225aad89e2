"""What can be wrong with a ledger, in words."""

from __future__ import annotations

import errno
import os
import sqlite3
from pathlib import Path
from typing import Final

from gpu_pool_client import PoolUnreachable


class LedgerUnusable(PoolUnreachable):
    """The ledger cannot be used as it is. It is left as it was found."""

    code = "ledger-unusable"


#: What to do with a ledger that is of no use.
SET_ASIDE: Final = (
    "Nothing was changed. Stop Jupyter and all kernels, move the file aside together with those beside it "
    'whose names begin with its name, and start again; "gpu-pool doctor" shows more.'
)
_FULL = (
    "cannot grow: the disk is full",
    "Free some space on that disk and try again; nothing was lost.",
)


def elsewhere() -> str:
    """Say how to choose another place for the ledger."""
    return (
        "Name a file in a private folder on a local disk, for example "
        f"GPU_POOL_URL=embedded:/var/tmp/gpu-pool-{os.geteuid()}/ledger.db."
    )


#: SQLite's own words (they are part of its C interface: sqlite3_errstr) and what to say instead.
_MEANINGS = (
    ("malformed", "is damaged", SET_ASIDE),
    ("not a database", "is not a ledger: another kind of file, or damaged", SET_ASIDE),
    ("full", *_FULL),
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


def explain(error: sqlite3.Error | OSError, path: Path) -> LedgerUnusable:
    """Turn an error of SQLite or of the system into words for the person who has to mend it."""
    if isinstance(error, OSError):
        return _explain_system(error, path)
    text = str(error)
    if isinstance(error, sqlite3.IntegrityError):
        return LedgerUnusable(
            f"The pool's ledger, {path}, refused a decision that contradicts itself ({text}). "
            "Nothing was changed.",
            "This is a bug in jupyter-gpu-pool: please report it with these words.",
        )
    for words, meaning, remedy in _MEANINGS:
        if words in text:
            return LedgerUnusable(f"The pool's ledger, {path}, {meaning}.", remedy)
    return LedgerUnusable(f"The pool's ledger, {path}, cannot be used: {text}.", SET_ASIDE)


def _explain_system(error: OSError, path: Path) -> LedgerUnusable:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        meaning, remedy = _FULL
        return LedgerUnusable(f"The pool's ledger, {path}, {meaning}.", remedy)
    return LedgerUnusable(f"The pool's ledger, {path}, cannot be used: {error.strerror}.", elsewhere())
