"""The files beside the store that everybody who uses it shares: the same ones for all, or nothing is decided.

SQLite finds its write-ahead log, and the index of that, by name. Where one of them is removed while the
store is in use, whoever comes next makes a new one, and two groups of processes would decide without
knowing of each other. So each process remembers which files it opened, and the first to open the store
writes down in its lock file which those are.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shlex
import struct
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Final, TypeAlias

from gpu_pool.store.errors import StoreUnusable

#: Which file it is: its device and number.
FileId: TypeAlias = tuple[int, int]

_LOG, _INDEX, _LOCK = "-wal", "-shm", ".lock"
#: Where the numbers of log and index stand in the lock file, behind the ticket and the pid of its lock.
_RECORD: Final = struct.Struct("<qq")
_PLACE: Final = 16
#: The bytes of a store on which SQLite keeps a shared lock for as long as it is open in write-ahead mode
#: (os.h of SQLite: SHARED_FIRST and SHARED_SIZE).
_IN_USE: Final = (0x40000002, 510)
_FLOCK: Final = struct.Struct("hhqqi4x")
_HAS_LOCKS: Final = sys.platform.startswith("linux") and hasattr(fcntl, "F_OFD_GETLK")
#: Seconds in which the last to close a store has removed both.
_SETTLES_WITHIN: Final = 1.0
_RESTART: Final = "Stop gpu-pool serve, Jupyter and all kernels with a slice, and then start again."


def file_id(path: Path | str) -> FileId | None:
    """Return which file has that name; None where none has."""
    try:
        found = os.stat(path)  # noqa: PTH116 - in the path of every decision
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found.st_dev, found.st_ino


def in_use(path: Path) -> dict[str, FileId]:
    """Return the files beside a store that was just read, by name."""
    names = (f"{path}{end}" for end in (_LOG, _INDEX, _LOCK))
    return {name: found for name in names if (found := file_id(name)) is not None}


def check(files: Mapping[str, FileId], path: Path) -> None:
    """Refuse to go on where another file has the name of one of these, or none."""
    for name, known in files.items():
        if file_id(name) != known:
            raise StoreUnusable(
                f"A file of the pool's store, {name}, was removed or replaced while {path.name} was in use. "
                "Nothing more is granted; what is held goes on.",
                _RESTART,
            )


def check_lock(path: Path) -> None:
    """Refuse a store that is in use, or was not closed, and whose locks are lost."""
    lock = path.with_name(path.name + _LOCK)
    if os.path.lexists(f"{path}{_LOG}") and not os.path.lexists(lock):
        # Asked second: whoever opens it at this moment makes the lock file first.
        raise StoreUnusable(
            f"The pool's store, {path}, is in use, or was not closed, and its file {lock.name} is missing. "
            "Without it nobody knows whose processes are alive, and their slices would be granted to others.",
            f"{_RESTART[:-1]}: touch {shlex.quote(str(lock))}",
        )


def check_shared(path: Path, store: FileId, lock_file: int) -> None:
    """Refuse, before it is read, a store that others use with other files beside it than it has here."""
    end = time.monotonic() + _SETTLES_WITHIN
    while _is_in_use(store) and not _are_theirs(path, lock_file):
        if time.monotonic() > end:
            raise StoreUnusable(
                f"The pool's store, {path}, is in use, and {path.name}{_LOG} or {path.name}{_INDEX} beside "
                "it were removed or replaced, or it is used by another name. If it was opened now, slices "
                "would be granted twice.",
                _RESTART,
            )
        time.sleep(0.02)


def write_down(files: Mapping[str, FileId], path: Path, lock_file: int) -> None:
    """Write into the lock file which files belong to the store for as long as it is in use."""
    if _HAS_LOCKS and f"{path}{_LOG}" in files:
        numbers = (files[f"{path}{end}"][1] if f"{path}{end}" in files else 0 for end in (_LOG, _INDEX))
        os.pwrite(lock_file, _RECORD.pack(*numbers), _PLACE)


def wipe(path: Path, lock_file: int) -> None:
    """Write down that nobody uses the store, where that is so: the last who does removes its log."""
    if _HAS_LOCKS and file_id(f"{path}{_LOG}") is None:
        os.pwrite(lock_file, _RECORD.pack(0, 0), _PLACE)


def _are_theirs(path: Path, lock_file: int) -> bool:
    now = file_id(f"{path}{_LOG}"), file_id(f"{path}{_INDEX}")
    content = os.pread(lock_file, _RECORD.size, _PLACE)
    known = _RECORD.unpack(content) if len(content) == _RECORD.size else (0, 0)
    if known == (0, 0):  # another program has it open, or a version that wrote nothing down
        return now[0] is not None
    return tuple(found[1] if found else 0 for found in now) == known


def _is_in_use(store: FileId) -> bool:
    """Whether a process has the store open; this one, too, but for the connection that has not read yet."""
    if not _HAS_LOCKS:
        return False
    # The file is SQLite's own: to close another one of the same store would drop its locks (fcntl(2)).
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208 - a name is all that is needed
        with contextlib.suppress(OSError):
            if file_id(f"/proc/self/fd/{name}") == store:
                asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, *_IN_USE, 0)
                answer = fcntl.fcntl(int(name), fcntl.F_OFD_GETLK, asked)
                return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
    return False
