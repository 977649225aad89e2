"""The socket's file: in a folder that only its owner can write, served by one service."""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Final

from gpu_pool.service.callers import peer_of
from gpu_pool_client import BadRequest, NotAllowed, PoolUnreachable
from gpu_pool_client.remote.addresses import check_length

#: Connections that may wait to be accepted: a class that arrives at once. The system may allow fewer.
BACKLOG: Final = 4096
_OTHER_FOLDER: Final = "Choose a socket in a folder that only you can write: --socket PATH."


class ServiceSocket:
    """A socket that is listened on, from construction to :meth:`close`."""

    def __init__(self, path: Path, mode: int) -> None:
        self.path = check_length(path.absolute())
        _prepare_folder(self.path.parent)
        with _locked(self.path):
            _clear(self.path)
            self.listener = _listen(self.path, mode)
            self._identity = _identity(self.path)

    def close(self) -> None:
        """Stop listening, and remove the file unless it is another's by now."""
        self.listener.close()
        with suppress(FileNotFoundError):
            if _identity(self.path) == self._identity:
                self.path.unlink()


def _prepare_folder(folder: Path) -> None:
    """Make the folder, and refuse one into which others could put a socket of theirs."""
    try:
        folder.mkdir(parents=True)
        # Others come through it to the socket, whose own mode says who may.
        folder.chmod(0o755)
    except FileExistsError:
        pass
    except OSError as error:
        raise NotAllowed(f"The folder {folder} cannot be made: {error.strerror}.", _OTHER_FOLDER) from error
    found = folder.resolve().stat()
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotAllowed(f"The folder {folder} can be written by others than you.", _OTHER_FOLDER)
    for above in folder.resolve().parents:
        found = above.stat()
        others = found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not found.st_mode & stat.S_ISVTX
        if found.st_uid not in (0, os.geteuid()) or others:
            raise NotAllowed(f"Others than you can replace {folder}: {above} is theirs.", _OTHER_FOLDER)


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Let no two services look for a socket and make one at once."""
    # A file of its own, which others cannot open: they could lock the folder, too.
    lock = path.with_name(f"{path.name}.lock")
    try:
        descriptor = os.open(lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError as error:
        raise NotAllowed(f"{lock} cannot be made: {error.strerror}.", _OTHER_FOLDER) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _clear(path: Path) -> None:
    """Remove the socket of a service that is gone; refuse one that is served, and any other file."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise BadRequest(f"{path} is there and is not a socket.", "Choose another name: --socket PATH.")
    with closing(socket.socket(socket.AF_UNIX)) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink()
            return
        except BlockingIOError:  # so many want to be served that there is no more room
            raise PoolUnreachable(f"{path} is already served, by a process that is very busy.") from None
        # For the one that connects these are the credentials of the one that listens.
        process = peer_of(probe).process
        raise PoolUnreachable(
            f"{path} is already served by process {process.pid if process else '(not to be seen)'}.",
            "End that one first, or choose another socket: --socket PATH.",
        )


def _listen(path: Path, mode: int) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX)
    try:
        listener.setblocking(False)
        listener.bind(str(path))
        # Nobody can connect before listen, so nobody comes in between.
        path.chmod(mode)
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        why = os.strerror(error.errno or errno.EIO)
        raise NotAllowed(f"The socket {path} cannot be made: {why}.", _OTHER_FOLDER) from error
    return listener


def _identity(path: Path) -> tuple[int, int]:
    found = path.lstat()
    return found.st_dev, found.st_ino
