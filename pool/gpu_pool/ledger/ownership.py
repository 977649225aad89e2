"""Who may open a ledger: one owner alone, or any number of processes that share it."""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Final

from gpu_pool.ledger.errors import LedgerUnusable, explain

#: Seconds that an owner waits for those who have the ledger open just now, such as a command.
_PATIENCE: Final = 3.0
_TRY_EVERY: Final = 0.05


class Ownership:
    """A lock beside the ledger at ``path``, kept until :meth:`close` or the process's end.

    Raises ``LedgerUnusable``: for an owner while anybody else has the ledger
    open, for all others while it has an owner.
    """

    def __init__(self, path: Path, *, owner: bool) -> None:
        name = path.with_name(path.name + ".owner")
        try:
            self._file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise explain(error, path) from error
        try:
            self._lock(path, fcntl.LOCK_EX if owner else fcntl.LOCK_SH)
            if owner:
                os.truncate(self._file, 0)
                os.pwrite(self._file, str(os.getpid()).encode(), 0)
        except BaseException:
            os.close(self._file)
            raise

    def close(self) -> None:
        """Let others have it."""
        os.close(self._file)

    def _lock(self, path: Path, how: int) -> None:
        give_up_at = time.monotonic() + (_PATIENCE if how == fcntl.LOCK_EX else 0)
        while True:
            try:
                return fcntl.flock(self._file, how | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() >= give_up_at:
                    raise self._refusal(path, how) from None
            time.sleep(_TRY_EVERY)

    def _refusal(self, path: Path, how: int) -> LedgerUnusable:
        owner = os.pread(self._file, 20, 0).decode("ascii", "replace")
        if how == fcntl.LOCK_SH:
            return LedgerUnusable(
                f"The pool's ledger, {path}, belongs to gpu-pool serve (process {owner}).",
                "Ask that service: set GPU_POOL_URL=unix: or write --pool unix:",
            )
        return LedgerUnusable(
            f"The pool's ledger, {path}, is open in another process: another gpu-pool serve, "
            "or Jupyter servers and commands that use it directly.",
            "End them, or let them use the service: GPU_POOL_URL=unix:",
        )
