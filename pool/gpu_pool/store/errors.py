"""What can be wrong with a store, in words."""

from __future__ import annotations

import errno
import os
import resource
import sqlite3
import sys
import tempfile
from pathlib import Path
from typing import Final

from gpu_pool_client import PoolUnreachable


class StoreUnusable(PoolUnreachable):
    """The store cannot be used as it is. It is left as it was found."""

    code = "store-unusable"


class OtherDevices(StoreUnusable):
    """The store is in use for other devices, simulated or real, than those that this process sees."""


class NoSpace(StoreUnusable):
    """There is no room on the store's disk for another decision. What is written can be read."""


#: What to do with a store that is of no use.
SET_ASIDE: Final = (
    "Nothing was changed. Stop Jupyter and all kernels, move the file aside together with those beside it "
    'whose names begin with its name, and start again; "gpu-pool doctor" shows more.'
)


def elsewhere() -> str:
    """Say how to choose another place for the store."""
    return (
        "Name a file in a private folder on a local disk, for example "
        f"GPU_POOL_URL=embedded:/var/tmp/gpu-pool-{os.geteuid()}/store.db."
    )


#: SQLite's own words (they are part of its C interface: sqlite3_errstr) and what to say instead.
_MEANINGS: Final = (
    ("malformed", "is damaged", SET_ASIDE),
    ("not a database", "is not a store: another kind of file, or damaged", SET_ASIDE),
    (
        "readonly",
        "cannot be written",
        "Make the file and its folder writable for you, or name another store.",
    ),
    ("unable to open", "cannot be opened", "Make the file and its folder readable and writable for you."),
    (
        "disk I/O error",
        "cannot be read or written: the disk reports an error",
        "Check the disk, and its free space.",
    ),
    ("locked", "stays locked by another program", "Find out what has the file open, and close it."),
)
#: Those of them behind which the system may have a reason that SQLite does not tell.
_VAGUE: Final = ("readonly", "unable to open", "disk I/O error")
#: What a store needs at the most until it is tidied up: its write-ahead log, and some growth.
_NEEDED_MIB: Final = 20
#: Bytes that are written to find out whether anything can be.
_TRIAL: Final = 8_192
#: Free bytes below which a disk counts as full.
_NEARLY_NOTHING: Final = 262_144
#: Files that a store needs open.
_FILES: Final = 10
_KEPT: Final = "Nothing that was decided is lost; leases that end now are recorded once there is space."


def as_unusable(error: sqlite3.Error | OSError, path: Path) -> StoreUnusable:
    """Turn an error of SQLite or of the system into words for the person who has to mend it."""
    if isinstance(error, OSError):
        return _explain_system(error, path)
    text = str(error)
    if isinstance(error, sqlite3.IntegrityError):
        return StoreUnusable(
            f"The pool's store, {path}, refused a decision that contradicts itself ({text}). "
            "Nothing was changed.",
            "This is a bug in jupyter-gpu-pool: please report it with this message.",
        )
    if "full" in text:
        return _no_space(path, errno.ENOSPC)
    reason = _trouble(path) if any(words in text for words in _VAGUE) else None
    if reason is not None:
        return _explain_system(reason, path)
    for words, meaning, remedy in _MEANINGS:
        if words in text:
            return StoreUnusable(f"The pool's store, {path}, {meaning}.", remedy)
    return StoreUnusable(f"The pool's store, {path}, cannot be used: {text}.", SET_ASIDE)


def check_room(path: Path) -> None:
    """Raise ``NoSpace`` where a store's disk has next to none left; may raise ``OSError``."""
    disk = os.statvfs(path.parent)
    if disk.f_bavail * disk.f_frsize < _NEARLY_NOTHING:
        raise _no_space(path, errno.ENOSPC)


def _trouble(path: Path) -> OSError | None:
    """Return what keeps this process from writing beside the store, found out by trying."""
    try:
        # The store itself is not opened: closing it again would drop this process's locks on it.
        with tempfile.TemporaryFile(dir=path.parent, buffering=0) as file:
            file.write(bytes(_TRIAL))
        if path.exists() and not os.access(path, os.R_OK | os.W_OK):
            return OSError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        check_room(path)
        files = len(list(Path("/proc/self/fd").iterdir())) if sys.platform.startswith("linux") else 0
    except NoSpace:
        return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    except OSError as error:
        return error
    # Those that the store had open by then are closed again.
    if files + _FILES > resource.getrlimit(resource.RLIMIT_NOFILE)[0]:
        return OSError(errno.EMFILE, os.strerror(errno.EMFILE))
    return None


def _explain_system(error: OSError, path: Path) -> StoreUnusable:
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return _no_space(path, error.errno)
    if error.errno == errno.EROFS:
        what = f"cannot be written: the file system at {_mount_point(path)} is read-only"
        return StoreUnusable(
            f"The pool's store, {path}, {what}.", f"Mount it writable, or choose another. {elsewhere()}"
        )
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return StoreUnusable(
            f"The pool's store, {path}, cannot be opened: {_too_many_files(error.errno)}.",
            "Close what is not needed, or allow more: ulimit -n, or LimitNOFILE= of a service of systemd.",
        )
    if error.errno in (errno.EACCES, errno.EPERM):
        # A file that is not there can be neither made nor seen: it is the folder that is closed.
        there = error.filename is not None and os.path.lexists(error.filename)
        where = error.filename if there else path.parent
        return StoreUnusable(
            f"The pool's store, {path}, cannot be used: {where} is closed to you (user {os.geteuid()}): "
            f"{error.strerror}.",
            f"Make the store and its folder readable and writable for you, or choose another. {elsewhere()}",
        )
    return StoreUnusable(f"The pool's store, {path}, cannot be used: {error.strerror}.", elsewhere())


def _no_space(path: Path, number: int) -> NoSpace:
    where = _mount_point(path)
    if number == errno.EDQUOT:
        what, remedy = "your disk quota there is used up", f"Remove {_NEEDED_MIB} MiB of yours (quota -s)"
    elif _has_no_inodes(path):
        what, remedy = "it has as many files as it can (no inodes)", "Remove some files there (df -i)"
    else:
        what, remedy = "it is full", f"Free {_NEEDED_MIB} MiB there (df -h)"
    return NoSpace(
        f"The pool's store, {path}, cannot be written to the disk at {where}: {what}.",
        f"{remedy}, and try again. {_KEPT}",
    )


def _has_no_inodes(path: Path) -> bool:
    try:
        disk = os.statvfs(path.parent)
    except OSError:
        return False
    return disk.f_files > 0 and disk.f_favail == 0


def _too_many_files(number: int) -> str:
    if number == errno.ENFILE:
        return "the machine has as many files open as it can"
    return f"this process has as many files open as it may ({resource.getrlimit(resource.RLIMIT_NOFILE)[0]})"


def _mount_point(path: Path) -> Path:
    """Return where the disk of a store is mounted, or the nearest folder of it that is there."""
    found = path.parent.absolute()
    while not os.path.ismount(found) and found != found.parent:
        found = found.parent
    return found
