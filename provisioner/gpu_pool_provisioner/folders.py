"""Folders that are there for as long as somebody's process is: for sockets, pipes and connection files.

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
    if Path(path).is_dir():
        return held
    os.close(held)
    return None


def _remove(path: str, held: int, pid: int) -> None:
    if os.getpid() == pid:
        shutil.rmtree(path, ignore_errors=True)
    os.close(held)


@functools.cache
def _remove_abandoned_once(parent: str, name: str) -> None:
    remove_abandoned(parent, name)


def remove_abandoned(parent: str, name: str) -> None:
    """Remove this user's folders of that name in ``parent`` that no process of this machine holds."""
    with os.scandir(parent) as found:
        paths = [each.path for each in found if each.name.startswith(_prefix(name))]
    for path in paths:
        try:
            folder = os.open(path, _FOLDER)
        except OSError:  # a link, somebody else's, or gone
            continue
        with suppress(OSError):  # it is held, or there are no locks
            if os.fstat(folder).st_uid == os.getuid():
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path, ignore_errors=True)
        os.close(folder)
