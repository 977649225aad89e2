"""What is recorded of suspended leases, in a folder, for every process that opens the pool.

There is one file per lease. It is written before its processes are touched, and removed when they run
again, so whatever happens in between can be mended: by whoever did it, or, if that one is gone, by the
next one who looks. Whoever works on a lease holds the lock on its file.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Final

from gpu_pool_client import Process
from gpu_pool_client._log import get_logger

_ALL: Final = ".all"
_LOOK_EVERY: Final = 0.1
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


@dataclass(frozen=True, slots=True)
class Record:
    """A lease whose processes are suspended, or are about to be."""

    processes: tuple[Process, ...]
    #: MiB that they held, by the UUID of a GPU.
    devices: Mapping[str, int]
    #: Who suspends them, and the Unix time at which it began.
    owner: Process
    since: float
    #: Whether they are suspended, all of them.
    complete: bool = False

    @property
    def host_mib(self) -> int:
        """The host memory that is counted for it."""
        return sum(self.devices.values())

    @property
    def device(self) -> str:
        """The UUID of the device by whose worker they are moved."""
        return min(self.devices)

    def living(self) -> list[int]:
        """Return the pids of those processes that still run, or may."""
        return [process.pid for process in self.processes if process.is_alive() is not False]


@dataclass(slots=True)
class SuspensionClaim:
    """One process's right to suspend and restore a lease, for as long as it is held."""

    path: Path
    #: The file's descriptor, which carries the lock.
    file: int
    record: Record | None = field(default=None)

    def write(self, record: Record) -> None:
        """Keep this record from now on. Survives the end of this process at any moment."""
        line = json.dumps(asdict(record)).encode() + b"\n"
        # In one call, and what follows the first line is not read.
        os.pwrite(self.file, line, 0)
        self.record = record

    def remove(self) -> None:
        """Keep none any more. The file goes when the claim ends."""
        os.ftruncate(self.file, 0)
        self.record = None


class Records:
    """The records in a folder, which must be on a local disk."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._logged: set[str] = set()

    @contextlib.contextmanager
    def claim(self, lease_id: str, wait: float = 0.0) -> Iterator[SuspensionClaim | None]:
        """Claim a lease; None if another one, or a program that it started, has it for so many seconds.

        None, too, where another version has recorded what this one cannot read: that is left as it is.
        """
        if not _NAME.fullmatch(lease_id):
            raise ValueError(f"{lease_id[:100]!a} is not the id of a lease.")
        path = self._folder / lease_id
        give_up_at = time.monotonic() + wait
        while (file := self._lock(path, fcntl.LOCK_NB)) is None and time.monotonic() < give_up_at:
            time.sleep(_LOOK_EVERY)
        if file is None:
            yield None
            return
        try:
            claim = SuspensionClaim(path, file, _read(path))
        except UnreadableRecord as error:
            os.close(file)
            self._log(error)
            yield None
            return
        try:
            yield claim
        finally:
            if claim.record is None:
                path.unlink(missing_ok=True)
            os.close(file)

    @contextlib.contextmanager
    def counted(self) -> Iterator[list[Record]]:
        """Give all records of processes that live; nobody else counts them meanwhile."""
        file = self._lock(self._folder / _ALL)
        assert file is not None, "waited for"
        try:
            records = (self._readable(name) for name in self.leases())
            yield [record for record in records if record is not None and record.living()]
        finally:
            os.close(file)

    def _readable(self, lease_id: str) -> Record | None:
        try:
            return _read(self._folder / lease_id)
        except UnreadableRecord as error:
            self._log(error)
            return None

    def _log(self, error: UnreadableRecord) -> None:
        """Log once what could not be read, which is looked at again and again."""
        if str(error) not in self._logged:
            self._logged.add(str(error))
            get_logger().error("%s", error)

    def leases(self) -> list[str]:
        """Return the ids of the leases that have a record."""
        if not self._folder.is_dir():
            return []
        return sorted(entry.name for entry in self._folder.iterdir() if _NAME.fullmatch(entry.name))

    def _lock(self, path: Path, how: int = 0) -> int | None:
        """Return a descriptor of the locked file; None if that would mean to wait, and ``how`` is LOCK_NB."""
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        while True:
            file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | how)
                if os.fstat(file).st_nlink:
                    return file
            except BlockingIOError:
                os.close(file)
                return None
            os.close(file)  # its last holder has removed it meanwhile


class UnreadableRecord(Exception):
    """It is whole, and not as this version writes it."""


def _read(path: Path) -> Record | None:
    """Return a file's record; None if there is none, or nothing was written yet.

    What is not whole is what a machine left that lost its power, and its processes with it. Raises
    ``UnreadableRecord``; what another version has written besides is left out.
    """
    try:
        read = json.loads(path.read_bytes().partition(b"\n")[0])
    except (FileNotFoundError, ValueError):
        return None
    try:
        processes = tuple(Process(**each) for each in read["processes"])
        known = {each.name: read[each.name] for each in fields(Record) if each.name in read}
        return Record(**{**known, "processes": processes, "owner": Process(**read["owner"])})
    except (TypeError, KeyError) as error:
        raise UnreadableRecord(
            "What is suspended of a lease cannot be read, since another version of this program has recorded "
            f"it: {path}. Use that version to resume it, or end its kernel and remove the file."
        ) from error
