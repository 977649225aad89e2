"""Where a store may live: a private file on a local disk."""

from __future__ import annotations

import contextlib
import os
import shlex
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

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
    mounts = [(part.mountpoint, part.fstype) for part in psutil.disk_partitions(all=True)]
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


def check_owner(path: Path) -> None:
    """Refuse a store that belongs to another Unix user."""
    owner = path.stat().st_uid
    if owner != os.geteuid():
        raise StoreUnusable(
            f"The pool's store, {path}, belongs to the user with id {owner}; you are {os.geteuid()}. "
            "An embedded pool is for one user.",
            elsewhere(),
        )
