"""Folders that are there for as long as somebody's process is, as for sockets, pipes, connection files.

A process that is killed leaves its folders. So each holds a lock on its folder, which the system lets go
however the process ends, and whoever makes a folder first removes those beside it that nobody holds.
"""

from __future__ import annotations

import fcntl
import functools
import os
import shutil
import tempfile
import weakref
import zlib
from contextlib import suppress
from pathlib import Path
from typing import Final

from gpu_pool_client._forks import close_in_children

_FOLDER: Final = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class HeldFolder:
    """A folder that its user alone enters, until :meth:`close` or the end of this process."""

    def __init__(self, parent: str | os.PathLike[str], name: str) -> None:
        """Make it in ``parent``; its name begins with ``name``. Raises ``OSError``."""
        _remove_abandoned_once(os.fspath(parent), name)
        while True:
            #: Where it is.
            self.path = tempfile.mkdtemp(prefix=_prefix(name), dir=parent)
            held = _hold(self.path)
            if held is not None:
                break
        #: Remove it, with what is in it. May be repeated; a forked child's copy does nothing.
        self.close = weakref.finalize(self, _remove, self.path, held, os.getpid())
        close_in_children(self)

    @classmethod
    def again(cls, path: str, name: str) -> HeldFolder:
        """Make one again where another was, whose name began with ``name``.

        Raises ``OSError``: ``FileExistsError`` where somebody has that now.
        """
        held = None
        Path(path).parent.mkdir(0o700, parents=True, exist_ok=True)
        while held is None:
            remove_abandoned(str(Path(path).parent), name)
            Path(path).mkdir(0o700)
            held = _hold(path)
        folder = cls.__new__(cls)
        folder.path = path
        folder.close = weakref.finalize(folder, _remove, path, held, os.getpid())
        close_in_children(folder)
        return folder

    def leave(self, name: str) -> tuple[str, int]:
        """Let it stay, under a name that begins with ``name``; return where it is, and what holds it.

        Raises ``OSError``, and then it is as it was.
        """
        before = Path(self.path)
        left = before.with_name(f"{_prefix(name)}{before.name.rpartition('-')[2]}")
        before.rename(left)
        detached = self.close.detach()
        assert detached is not None
        return str(left), detached[2][1]


def _prefix(name: str) -> str:
    """Return how this machine's begin: those that share a network's folder may not see each other's locks."""
    return f"{name}{zlib.crc32(os.uname().nodename.encode()):08x}-"


def _hold(path: str) -> int | None:
    """Hold a folder that was just made; None where somebody has removed it meanwhile, as nobody held it."""
    try:
        held = os.open(path, _FOLDER)
    except FileNotFoundError:
        return None
    with suppress(OSError):  # without locks nobody can tell that it is abandoned: it is left alone
        fcntl.flock(held, fcntl.LOCK_EX)
    if _is_at(path, held):
        return held
    os.close(held)
    return None


def _is_at(path: str, held: int) -> bool:
    """Whether the folder at a path is the one that is held."""
    with suppress(OSError):
        return os.path.samestat(os.fstat(held), os.lstat(path))
    return False


def _remove(path: str, held: int, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)
    os.close(held)


@functools.cache
def _remove_abandoned_once(parent: str, name: str) -> None:
    remove_abandoned(parent, name)


def hold_left(path: str) -> int | None:
    """Hold a folder of this user's that was left; None where somebody else does, or it is gone."""
    try:
        folder = os.open(path, _FOLDER)
    except OSError:  # a link, somebody else's, or gone
        return None
    try:
        if os.fstat(folder).st_uid == os.getuid():
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(path, folder):  # nobody has removed it meanwhile, or made another one
                return folder
    except OSError:  # it is held, or there are no locks
        pass
    os.close(folder)
    return None


def remove_abandoned(parent: str, name: str) -> None:
    """Remove this user's folders of that name in ``parent`` that no process of this machine holds.

    Raises ``OSError``.
    """
    with os.scandir(parent) as found:
        paths = [each.path for each in found if each.name.startswith(_prefix(name))]
    for path in paths:
        folder = hold_left(path)
        if folder is not None:
            shutil.rmtree(path, ignore_errors=True)
            os.close(folder)
