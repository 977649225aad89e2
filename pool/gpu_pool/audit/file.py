"""A file to which several processes append whole lines, and which others take away to rotate it."""

from __future__ import annotations

import errno
import logging
import os
import threading
from contextlib import suppress
from pathlib import Path
from typing import Final

_log = logging.getLogger("gpu_pool.audit")

#: A pipe that nobody reads, or a terminal, must not stop a pool.
_APPEND: Final = os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY
_MODE: Final = 0o640


class LineFile:
    """Appends lines to the file at ``path``; may be used by any thread.

    A file that was renamed or removed is opened anew before the next line. The
    system appends what is written at once as one piece, whoever else writes.
    What cannot be written is counted, told in the log once, and given up.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.written = 0
        self.lost = 0
        #: Lines lost since the last one that was written.
        self.missing = 0
        self._lock = threading.Lock()
        self._file: int | None = None

    def append(self, line: bytes) -> bool:
        """Write a line, its end included; return whether it is there."""
        with self._lock:
            try:
                self._write(self._current(), line)
            except OSError as error:
                self._lose(error)
                return False
            self.written += 1
            if self.missing:
                _log.warning("%s can be written again: %d lines are missing", self.path, self.missing)
                self.missing = 0
            return True

    def reopen(self) -> None:
        """Open the file anew, and make it if need be. Raises ``OSError``."""
        with self._lock:
            self._close()
            self._current()

    def _current(self) -> int:
        """Return the file that has the path now."""
        if self._file is not None and not self._is_current(self._file):
            self._close()
        if self._file is None:
            self._file = _open(self.path)
        return self._file

    def _is_current(self, file: int) -> bool:
        try:
            found = self.path.stat()
        except FileNotFoundError:
            return False
        own = os.fstat(file)
        return (found.st_dev, found.st_ino) == (own.st_dev, own.st_ino)

    def _write(self, file: int, line: bytes) -> None:
        count = os.write(file, line)
        if count < len(line):  # the disk is full, or a limit is reached
            self._blank(os.lseek(file, 0, os.SEEK_CUR) - count, count)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def _blank(self, place: int, count: int) -> None:
        """Make an empty line of what was written of one: what is there needs no more room."""
        with suppress(OSError):
            other = os.open(self.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                os.pwrite(other, b" " * (count - 1) + b"\n", place)
            finally:
                os.close(other)

    def _lose(self, error: OSError) -> None:
        if not self.missing:
            _log.error("%s cannot be written: %s. Decisions go on without it.", self.path, error.strerror)
        self.lost += 1
        self.missing += 1

    def _close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None


def _open(path: Path) -> int:
    """Open the file; one that is made has the mode 0640, whatever the umask."""
    while True:
        with suppress(FileNotFoundError):
            return os.open(path, _APPEND)
        with suppress(FileExistsError):
            made = os.open(path, _APPEND | os.O_CREAT | os.O_EXCL, _MODE)
            os.fchmod(made, _MODE)
            return made
