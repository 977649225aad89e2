"""The store's file: opened, migrated, and written in one transaction per decision."""

from __future__ import annotations

import contextlib
import math
import os
import sqlite3
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, NamedTuple, NoReturn, TypeAlias

from gpu_pool.audit import Actor, AuditLog, asks
from gpu_pool.store import files, schema
from gpu_pool.store.errors import NoSpace, StoreUnusable, as_unusable, check_room
from gpu_pool.store.locks import FairLock, LivenessLocks
from gpu_pool.store.schema import queries
from gpu_pool_client import Slice

#: A row as it was read, or as it is about to be written.
Row: TypeAlias = sqlite3.Row | dict[str, Any]

#: PRAGMA application_id of a store, "GPUP" in ASCII: tells it from other SQLite files.
APPLICATION_ID: Final = 0x47505550
#: Pages (of 4 KiB) of write-ahead log after which it is moved into the database. The same few
#: pages change in every decision, so moving them seldom saves most of that work.
_CHECKPOINT_PAGES: Final = 4000
#: Programs other than this one may hold SQLite's lock for this long.
_BUSY_SECONDS: Final = 20.0


class _Decided(NamedTuple):
    event: str
    #: Unix seconds.
    at: float
    #: In whose name it was done, and whether they asked for it, or it followed.
    actor: Actor | None
    asked: bool
    fields: Mapping[str, object]


class AuditBuffer:
    """What the running transaction decides, in its order, told to the audit log once it is in the store."""

    def __init__(self) -> None:
        #: None where nothing is written down.
        self.log: AuditLog | None = None
        #: Those that were not told yet.
        self.untold: list[_Decided] = []

    def decided(
        self,
        event: str,
        row: Row,
        parts: Sequence[Slice] = (),
        more: Mapping[str, object] = MappingProxyType({}),
        *,
        asked: bool = True,
    ) -> None:
        """Take note of a decision about the lease of this row; ``asked`` if somebody asked for it."""
        if self.log is None:
            return
        slices = [
            {"device": part.device.uuid, "milli": part.milli, "memory_mib": part.memory_mib} for part in parts
        ]
        fields = {
            "lease": row["id"],
            "user": row["user"],
            "course": row["course"] or None,
            "request": row["request"],
            "slices": slices or None,
            **more,
        }
        self.noted(event, fields, asked=asked)

    def noted(self, event: str, fields: Mapping[str, object], *, asked: bool = True) -> None:
        """Take note of a decision about something else."""
        if self.log is not None:
            self.untold.append(_Decided(event, time.time(), asks(), asked, fields))

    def courses_changed(
        self, before: Mapping[str, object], now: Mapping[str, object], *, asked: bool
    ) -> None:
        """Write down which course files are new, have changed or have gone."""
        if self.log is not None:
            for name in sorted(before.keys() | now.keys()):
                if before.get(name) != now.get(name):
                    what = "added" if name not in before else "changed" if name in now else "removed"
                    self.log.write("course", {"course": name, "change": what}, asks(), asked=asked)

    def tell(self) -> None:
        """Write down what was decided: it is in the store now."""
        for each in self.untold:
            assert self.log is not None
            self.log.write(each.event, each.fields, each.actor, asked=each.asked, at=each.at)
        self.untold.clear()


class Database:
    """One connection to a store. Used by one thread at a time.

    WAL with ``synchronous=NORMAL``: a commit survives the death of every
    process. Losing the last moments before a power failure is harmless, since
    no lease survives a reboot.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with _explained(path):
            files.prepare_folder(path)
            if not path.exists():
                files.check_leftovers(path)
                _create(path)
            files.check_owner(path)
            files.check_hard_links(path)
            files.check_lock(path)
            found = path.stat()
            #: How it is told whether the path is still this file's; a text, since each decision asks.
            self._name, self._file = str(path), (found.st_dev, found.st_ino)
            if found.st_size == 0:
                raise sqlite3.DatabaseError("file is not a database")
            lock = path.with_name(path.name + ".lock")
            with contextlib.ExitStack() as opened:
                self._lock = opened.enter_context(contextlib.closing(FairLock(lock)))
                self.liveness = opened.enter_context(contextlib.closing(LivenessLocks(lock)))
                self._connection, self._is_frozen = self._connect_to_read()
                opened.callback(lambda: files.wipe(path, self._lock.file.fileno()))
                opened.callback(lambda: self._connection.close())
                if self._connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
                    raise sqlite3.DatabaseError("file is not a database")
                if not schema.is_newest(self._connection, path):
                    with self._lock:
                        schema.upgrade(self._connection, path)
                self._version = len(schema.migrations())
                self._note_beside()
                self._opened = opened.pop_all()
        self._sql = queries()
        #: What the running transaction decides.
        self.audit_buffer = AuditBuffer()
        #: Whether what is read is in the store for good.
        self._is_snapshot = False
        #: The block of decisions that is under way, and whether its transaction has begun: :meth:`together`.
        self._block: contextlib.ExitStack | None = None
        self._has_begun = False
        #: Why SQLite has undone the running transaction by itself: for want of space, say.
        self._undone: sqlite3.Error | None = None
        #: Why nothing may be decided at the moment, only read; None where everything may.
        self.refusal: StoreUnusable | None = None

    def close(self) -> None:
        """Close the connection and the lock; the decisions of a block are in the store before."""
        with self._opened:
            if self._block is not None:
                self._block.close()

    @property
    def version(self) -> int:
        """The schema version of the file."""
        return schema.version_of(self._connection)

    def transaction(self, give_up_at: float | None = None) -> AbstractContextManager[None]:
        """Run one decision: all of it is in the store afterwards, or nothing.

        ``give_up_at`` (``time.monotonic()``): past this moment nothing is begun,
        because nobody waits for the answer any more.
        """
        if self.refusal is not None:
            raise self.refusal
        if self._block is None:
            return self._begin(give_up_at)
        if not self._has_begun:
            self._block.enter_context(self._begin(give_up_at))
            self._has_begun = True
        return self._step(give_up_at)

    @contextlib.contextmanager
    def together(self) -> Iterator[None]:
        """Let the decisions of a block have one transaction, which saves most of what each costs.

        One that fails leaves the others as they are. Where the end of the block
        fails, none of them is in the store.
        """
        with contextlib.ExitStack() as block:
            self._block, self._has_begun = block, False
            try:
                yield
            finally:
                self._block = None

    @contextlib.contextmanager
    def _begin(self, give_up_at: float | None) -> Iterator[None]:
        self.audit_buffer.untold.clear()
        self._undone = None
        try:
            with self._lock:
                self._check_still_there()
                if give_up_at is not None and time.monotonic() > give_up_at:
                    self._refuse_late()
                if self._is_frozen:
                    self._thaw()
                self._connection.execute("BEGIN IMMEDIATE")
                try:
                    if self._connection.execute("PRAGMA user_version").fetchone()[0] != self._version:
                        schema.check_version(self._connection, self.path)
                    yield
                    if not self._connection.in_transaction:
                        self._refuse_undone()
                    self._connection.execute("COMMIT")
                except BaseException as error:
                    with contextlib.suppress(sqlite3.Error):
                        self._connection.execute("ROLLBACK")
                    if isinstance(error, sqlite3.OperationalError):
                        self._make_room()
                    raise
        except (sqlite3.Error, OSError) as error:
            raise as_unusable(error, self.path) from error
        # Not before it is kept, and not while others wait.
        if self.audit_buffer.untold:
            self.audit_buffer.tell()

    @contextlib.contextmanager
    def _step(self, give_up_at: float | None) -> Iterator[None]:
        """Run one decision of a block, and undo it alone if it fails."""
        with _explained(self.path):
            if give_up_at is not None and time.monotonic() > give_up_at:
                self._refuse_late()
            if not self._connection.in_transaction:
                self._refuse_undone()
            self._connection.execute("SAVEPOINT decision")
            before = len(self.audit_buffer.untold)
            try:
                yield
            except BaseException as error:
                del self.audit_buffer.untold[before:]
                if isinstance(error, sqlite3.Error) and not self._connection.in_transaction:
                    self._undone = error
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("ROLLBACK TO decision")
                    self._connection.execute("RELEASE decision")
                raise
            self._connection.execute("RELEASE decision")

    def _refuse_undone(self) -> NoReturn:
        raise self._undone or StoreUnusable(
            f"The pool's store, {self.path}, could not be written.", "Try again."
        )

    def _refuse_late(self) -> NoReturn:
        raise StoreUnusable(f"The pool's store, {self.path}, was busy for too long.", "Try again.")

    @contextlib.contextmanager
    def snapshot(self) -> Iterator[None]:
        """Read one consistent state, without waiting for writers; in a block, what was decided so far."""
        if self._connection.in_transaction:
            yield
            return
        with _explained(self.path):
            self._check_still_there()
            if self._is_frozen:
                self._thaw()
            self._connection.execute("BEGIN")
            self._is_snapshot = True
            try:
                if self._connection.execute("PRAGMA user_version").fetchone()[0] != self._version:
                    schema.check_version(self._connection, self.path)
                yield
            finally:
                self._is_snapshot = False
                with contextlib.suppress(sqlite3.Error):
                    self._connection.execute("COMMIT")

    def state(self) -> tuple[int, int] | None:
        """Return what is another value in a later snapshot if anything was written meanwhile, by whomever.

        None where what is read may yet be undone, or is not followed.
        """
        if not self._is_snapshot or self._is_frozen:
            return None
        by_others: int = self._connection.execute("PRAGMA data_version").fetchone()[0]
        return self._connection.total_changes, by_others

    def run(self, name: str, values: Mapping[str, object] | tuple[object, ...] = ()) -> sqlite3.Cursor:
        """Run the statement of that name."""
        return self._connection.execute(self._sql[name], values)

    def one(self, name: str, **values: object) -> Any:
        """Return the first row of a statement, or None."""
        return self._connection.execute(self._sql[name], values).fetchone()

    def holder(self) -> int | None:
        """Return the pid of the process that last entered a transaction."""
        return self._lock.holder()

    def size(self) -> int:
        """Return how many bytes the files take in which all this is."""
        return files.size(self.path)

    def check_room(self) -> None:
        """Raise ``NoSpace`` where the disk is full, whether or not the next decision would still fit."""
        with _explained(self.path):
            check_room(self.path)

    def _check_still_there(self) -> None:
        """Refuse to go on in a file that others no longer see."""
        try:
            found = os.stat(self._name)  # noqa: PTH116 - in the path of every decision
            is_there = (found.st_dev, found.st_ino) == self._file
            is_empty = is_there and found.st_size == 0
        except (FileNotFoundError, NotADirectoryError):
            is_there = is_empty = False
        if not is_there or is_empty:
            what = "emptied" if is_empty else "removed or replaced"
            raise StoreUnusable(
                f"The pool's store, {self.path}, was {what} while it was in use.",
                "Restart what uses the pool.",
            )
        files.check(self._beside, self.path)

    def keep(self, name: Path) -> None:
        """Decide nothing any more once another file has the name of this one."""
        found = files.file_id(name)
        if found is not None:
            self._beside[str(name)] = found

    def _note_beside(self) -> None:
        """Note which files beside the store belong to it, all of which are there once it was read."""
        self._beside = files.in_use(self.path)
        if not self._is_frozen:
            files.write_down(self._beside, self.path, self._lock.file.fileno())

    def _thaw(self) -> None:
        """Open the store anew where it could only be read, and only as it was at that moment."""
        self._connection.close()
        self._connection, self._is_frozen = self._connect_to_read()
        if not self._is_frozen:
            self._connection.execute("PRAGMA user_version").fetchone()
            self._note_beside()

    def _connect_to_read(self) -> tuple[sqlite3.Connection, bool]:
        """Return a connection by which the store can be read, and whether it shows this moment alone.

        The first to open a store makes files beside it. Where there is no room for them, what is in
        the store can be read nevertheless: nobody else has it open, or the files would be there.
        """
        try:
            check = partial(files.check_shared, self.path, self._file, self._lock.file.fileno())
            return _connect(self.path, check=check), False
        except sqlite3.OperationalError as error:
            if not isinstance(as_unusable(error, self.path), NoSpace) or _has_log(self.path):
                raise
            return _connect(self.path, "mode=ro&immutable=1"), True

    def _make_room(self) -> None:
        """Move the write-ahead log into the database, so that the next decision is written over it."""
        with contextlib.suppress(sqlite3.Error):
            self._connection.execute("PRAGMA wal_checkpoint(PASSIVE)")


@contextlib.contextmanager
def _explained(path: Path) -> Iterator[None]:
    """Let nothing of SQLite or the system through but in words."""
    try:
        yield
    except (sqlite3.Error, OSError) as error:
        raise as_unusable(error, path) from error


def _has_log(path: Path) -> bool:
    """Whether something is decided that is not in the store's own file yet."""
    try:
        return path.with_name(path.name + "-wal").stat().st_size > 0
    except FileNotFoundError:
        return False


def _connect(
    path: Path, how: str = "mode=rw", check: Callable[[], None] = lambda: None
) -> sqlite3.Connection:
    """Connect to a store, and set what is true of each connection; ``check`` comes before it is read."""
    # mode=rw: a file that is gone by now must not be made anew.
    connection = sqlite3.connect(
        f"{path.absolute().as_uri()}?{how}",
        uri=True,
        timeout=_BUSY_SECONDS,
        isolation_level=None,
        check_same_thread=False,
    )
    try:
        check()
        connection.row_factory = sqlite3.Row
        # SQLite's own is there only if it was built with it.
        connection.create_function("pow", 2, math.pow, deterministic=True)
        connection.create_function("held_seconds", 4, held_seconds, deterministic=True)
        connection.execute("PRAGMA synchronous = NORMAL")
        connection.execute("PRAGMA foreign_keys = ON")
        connection.execute(f"PRAGMA wal_autocheckpoint = {_CHECKPOINT_PAGES}")
    except BaseException:
        connection.close()
        raise
    return connection


def held_seconds(held_at: float | None, held_from: float | None, now: float, uptime: float) -> float:
    """Return for how long a lease has had what it holds; 0 where it holds nothing.

    That is told by this boot's clock, since that for people may be set meanwhile. What was granted in an
    earlier boot, or before the former was noted, is told by the latter.

    Parameters
    ----------
    held_at
        Since when, Unix seconds; None where it holds nothing.
    held_from
        The same by this boot's clock; None where that was not noted.
    now, uptime
        The time by either clock.
    """
    if held_at is None:
        return 0.0
    return uptime - held_from if held_from is not None and held_from <= uptime else max(0.0, now - held_at)


def _create(path: Path) -> None:
    """Make a complete store beside ``path`` and put it there at once, unless somebody was faster."""
    draft = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    os.close(os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600))
    try:
        with contextlib.closing(_connect(draft)) as connection:
            connection.execute("PRAGMA journal_mode = WAL")
            connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
            schema.upgrade(connection, path)
        with contextlib.suppress(FileExistsError):
            os.link(draft, path)
    finally:
        for leftover in path.parent.glob(f"{draft.name}*"):
            leftover.unlink()
