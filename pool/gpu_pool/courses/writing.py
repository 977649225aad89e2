"""Putting a changed course file in the place of the old one: whole, or not at all.

The new text is written beside the old file and takes its name at once, so
whoever reads finds the one or the other, and an end between the two steps
leaves the old one. Two of these at the same time are for the caller to prevent.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from gpu_pool_client import NotAllowed

_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_AT_ITS_SOURCE: Final = "Change it where it comes from."


def why_fixed(folder: Path, file: str) -> str:
    """Say why a file cannot be changed here, or return an empty text if it can."""
    try:
        kind = (folder / file).lstat().st_mode
    except OSError as error:
        return f"{file} cannot be found any more: {error.strerror}."
    if stat.S_ISLNK(kind):
        return f"{file} is a link, as where a ConfigMap is mounted. {_AT_ITS_SOURCE}"
    if not stat.S_ISREG(kind):
        return f"{file} is not an ordinary file."
    if not os.access(folder, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids):
        return f"The folder of course files is read-only for the pool's service. {_AT_ITS_SOURCE}"
    return ""


def write_beside(folder: Path, file: str, data: bytes) -> None:
    """Write what is to take the place of a file, with its mode and owner. Raises ``NotAllowed``."""
    beside = _beside(folder, file)
    with _explained(file):
        facts = (folder / file).lstat()
        beside.unlink(missing_ok=True)  # what an earlier end has left
        try:
            with open(os.open(beside, _NEW, 0o600), "wb") as written:
                _adopt(written.fileno(), facts)
                written.write(data)
                written.flush()
                os.fsync(written.fileno())
        except BaseException:
            take_back(folder, file)
            raise


def put_in_place(folder: Path, file: str) -> None:
    """Let what was written take the place of the file. Raises ``NotAllowed``."""
    with _explained(file):
        _beside(folder, file).replace(folder / file)
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def take_back(folder: Path, file: str) -> None:
    """Remove what was written, if it is still there."""
    with contextlib.suppress(OSError):
        _beside(folder, file).unlink()


def _beside(folder: Path, file: str) -> Path:
    """Return where it is written: the dot keeps it from being read as a course."""
    return folder / f".{file}.new"


def _adopt(handle: int, facts: os.stat_result) -> None:
    """Take over owner, or else at least the group, and mode."""
    for owner in (facts.st_uid, -1):
        with contextlib.suppress(PermissionError):
            os.fchown(handle, owner, facts.st_gid)
            break
    os.fchmod(handle, facts.st_mode & 0o777)


@contextlib.contextmanager
def _explained(file: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        # A file that is mounted by itself, as containers do, keeps its position.
        is_mounted = error.errno == errno.EBUSY
        why = "it is mounted by itself" if is_mounted else (error.strerror or str(error))
        remedy = _AT_ITS_SOURCE if is_mounted else "Nothing was changed. Ask the administrator."
        raise NotAllowed(f"{file} cannot be written: {why}.", remedy) from error
