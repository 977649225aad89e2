"""Where a store may live, a private file on a local disk, and the files beside it that all users of it share.

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
import stat
import struct
import sys
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, TypeAlias

import psutil

from gpu_pool.store.errors import StoreUnusable, elsewhere
from gpu_pool_client._home import home_folder, why_homeless

#: File systems on which SQLite's locks or its shared memory cannot be relied on
#: (https://www.sqlite.org/wal.html: "WAL does not work over a network filesystem").
NETWORK: Final = frozenset(
    "9p afs autofs beegfs ceph cifs coda davfs fuse.ceph fuse.glusterfs fuse.rclone fuse.s3fs fuse.sshfs "
    "glusterfs gpfs lustre ncpfs nfs nfs4 ocfs2 orangefs panfs pvfs2 smb3 smbfs virtiofs vboxsf".split()
)
#: Seconds in which one that is made has lost its first name.
_MADE_WITHIN: Final = 1.0
#: What else is made where a store is: by SQLite, for its locks, and of suspended kernels.
_BESIDE: Final = ("-wal", "-shm", ".lock", ".owner", ".suspended")


def default_path() -> Path:
    """Return the store of this user: ``$XDG_STATE_HOME/gpu-pool/store.db``."""
    state = os.environ.get("XDG_STATE_HOME")
    if not state and (home := home_folder()) is not None:
        state = str(home / ".local/state")
    if not state:
        raise StoreUnusable(
            f"There is no folder for the pool's store: XDG_STATE_HOME is not set, {why_homeless()}.",
            elsewhere(),
        )
    folder = Path(state) / "gpu-pool"
    # What the store's file was called before the first release. With only its locks left it was lost,
    # which is to be said and not passed over by making a new one.
    return folder / ("ledger.db" if any(folder.glob("ledger.db*")) else "store.db")


def file_system(path: Path, mounts: Iterable[tuple[str, str]]) -> str:
    """Return the type of the file system that ``path`` is on. ``mounts`` are (mount point, type)."""
    best, found = -1, ""
    for point, kind in mounts:
        # The last mount on a point hides those before it.
        if path.is_relative_to(point) and len(point) >= best:
            best, found = len(point), kind
    return found


def first_local(folders: Iterable[Path], mounts: Iterable[tuple[str, str]] | None = None) -> Path | None:
    """Return the first of these folders that is there, and not on a network file system; None for none."""
    known = _mounts() if mounts is None else list(mounts)
    local = (each for each in folders if each.is_dir() and file_system(each.resolve(), known) not in NETWORK)
    return next(local, None)


def _mounts() -> list[tuple[str, str]]:
    return [(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]


def prepare_folder(path: Path) -> None:
    """Make the store's folder, private to this user.

    Refuses a folder in which others can write, since they could put files
    beside the store that SQLite takes for its own, and a network file system.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as error:
        raise StoreUnusable(
            f"The folder of the pool's store, {path.parent}, cannot be made: {error.strerror}.",
            elsewhere(),
        ) from error
    found = path.parent.stat()
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise StoreUnusable(
            f"The folder of the pool's store, {path.parent}, can be written to by other users.",
            f"Make it private (chmod go-w {path.parent}), or choose another. {elsewhere()}",
        )
    mounts = _mounts()
    if any(point == str(path) for point, _ in mounts):
        raise StoreUnusable(
            f"The pool's store, {path}, is mounted by itself, without the files beside it: slices would be "
            "granted twice.",
            f"Mount its folder, {path.parent}, in place of the file.",
        )
    kind = file_system(path.parent.resolve(), mounts)
    if kind in NETWORK:
        raise StoreUnusable(
            f"The pool's store, {path}, is on a network file system ({kind}), "
            "where the locks it needs cannot be relied on.",
            elsewhere(),
        )


def check_hard_links(path: Path) -> None:
    """Refuse a store of two names: SQLite would keep a log beside each that does not know of the other."""
    end = time.monotonic() + _MADE_WITHIN
    while path.stat().st_nlink > 1:
        if time.monotonic() > end:
            raise StoreUnusable(
                f"The pool's store, {path}, has another name, too (a hard link). If it was used by both, "
                "slices would be granted twice.",
                f"Remove the other one; this finds it: find / -xdev -samefile {shlex.quote(str(path))}",
            )
        time.sleep(0.01)


def check_leftovers(path: Path) -> None:
    """Refuse to make a new store where there was one: what it knew would be forgotten in silence.

    SQLite would read what is left of it as the new one's, and the slices that are
    held would be granted to others.
    """
    left = [part for part in (path.with_name(path.name + end) for end in _BESIDE) if os.path.lexists(part)]
    # Asked second: whoever is making the store at this moment makes the file first.
    if left and not path.exists():
        raise StoreUnusable(
            f"The pool's store, {path}, is missing, and what was beside it is still there: "
            f"{', '.join(part.name for part in left)}. A new one would not know of the slices that are "
            "held now, and would grant them to others too.",
            "Put the store back, if it was moved. Or stop gpu-pool serve, Jupyter and all kernels with a "
            f"slice, and then start again: rm -r {' '.join(shlex.quote(str(part)) for part in left)}",
        )


def size(path: Path) -> int:
    """Return how many bytes a store takes, with its write-ahead log."""
    found = 0
    for end in ("", "-wal"):
        with contextlib.suppress(OSError):
            found += path.with_name(path.name + end).stat().st_size
    return found


def last_write(path: Path) -> tuple[int, int]:
    """Return what is another value once anything has been decided in the store, by whichever process.

    It is the time and the size of SQLite's log, to which every decision goes. Two decisions within some
    milliseconds may have the same: so it says when to look, and not that there is nothing to see.
    """
    try:
        found = os.stat(f"{path}{_LOG}")  # noqa: PTH116 - asked often
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size


def check_owner(path: Path) -> None:
    """Refuse a store that belongs to another Unix user."""
    owner = path.stat().st_uid
    if owner != os.geteuid():
        raise StoreUnusable(
            f"The pool's store, {path}, belongs to the user with id {owner}; you are {os.geteuid()}. "
            "An embedded pool is for one user.",
            elsewhere(),
        )


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
