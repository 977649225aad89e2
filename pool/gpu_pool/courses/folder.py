"""A folder of course files: read again when they change, and files put in the place of others.

Nothing runs by itself: whoever uses the courses calls :meth:`CourseFolder.current`,
which reads the files at most once a second. A file that has become bad, is
being written or has been taken away for a moment leaves its course as it was.

A changed text is written beside the old file and takes its name at once, so
whoever reads finds the one or the other, and an end between the two steps
leaves the old one. Two of these at the same time are for the caller to prevent.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import hashlib
import os
import stat
import threading
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from pathlib import Path
from typing import Final, TypeAlias
from weakref import WeakValueDictionary

from gpu_pool.clock import Clock
from gpu_pool.courses.access import check_offered, may_use
from gpu_pool.courses.model import CourseFile
from gpu_pool.courses.reading import SUFFIX, course_name, read_bytes, read_course
from gpu_pool.courses.text import BadCourseFile, FileProblem
from gpu_pool.policy.course_values import given
from gpu_pool.policy.sharing import Sharing
from gpu_pool_client import NotAllowed, SliceRequest
from gpu_pool_client._home import expanded

#: Files of one folder that are read, first by name.
MOST_FILES: Final = 2_000
#: Seconds between two readings of the folder.
_EVERY: Final = 1.0
#: Seconds for which a file must have been left alone: until then its writer may not be done, and
#: a change so soon after another one may leave its times as they are.
_SETTLED: Final = 1.0

#: What changes with a file: device, inode, size, and times in nanoseconds.
_Mark: TypeAlias = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Courses:
    """What the files of a folder say, at one time."""

    usable: Mapping[str, CourseFile] = field(default_factory=dict)
    #: Courses that cannot be used, and why, in words for those who are in them.
    refused: Mapping[str, str] = field(default_factory=dict)
    #: Everything that is wrong with the files, those included whose last good version is in force.
    problems: tuple[FileProblem, ...] = ()
    #: What is accepted in the files, and would not be in new ones.
    warnings: tuple[FileProblem, ...] = ()

    def course(self, name: str) -> CourseFile:
        """Return a course. Raises ``NotAllowed`` that says why it cannot be used, or that there is none."""
        if name in self.usable:
            return self.usable[name]
        raise NotAllowed(
            self.refused.get(name) or f"No course file describes the course {name[:64]!a}.",
            "" if name in self.refused else "Ask your instructor for its name.",
        )

    def check(
        self, name: str | None, request: SliceRequest, user: str, groups: Collection[str], at: datetime
    ) -> None:
        """Refuse, with ``NotAllowed``, a request that the file of its course forbids.

        A course without a file is the business of the administrator's settings.
        """
        course = self.usable.get(name or "")
        if course is not None:
            may_use(course, user, groups, at)
            check_offered(course, request)

    def sharing(self, settings: Sharing) -> Sharing:
        """Return how the pool is shared by these courses and the administrator's settings together."""
        courses = {name: file.course(name) for name, file in self.usable.items()}
        return replace(
            settings, courses={**settings.courses, **courses}, refused=self.refused, only_known=True
        )


@dataclass(slots=True)
class _File:
    """What is known of one file."""

    #: None where it must be read again: it had just been written.
    mark: _Mark | None = None
    digest: bytes = b""
    #: Its last good version.
    course: CourseFile | None = None
    problems: tuple[FileProblem, ...] = ()
    warnings: tuple[FileProblem, ...] = ()
    is_missing: bool = False

    @property
    def says(self) -> tuple[object, ...]:
        """What others are told of it."""
        return self.course, self.problems, self.warnings


class CourseFolder:
    """Course files in a folder. ``taken`` are the names of courses that the administrator has set.

    May be used by several threads, to which it says the same.
    """

    def __init__(self, folder: Path, taken: Collection[str] = (), clock: Clock | None = None) -> None:
        self._folder = folder
        self._taken = frozenset(taken)
        self._clock = clock or Clock()
        self._read_at: float | None = None
        self._files: dict[str, _File] = {}
        self._of_folder: tuple[FileProblem, ...] = ()
        self._courses = Courses()
        self._reading = threading.Lock()

    @property
    def path(self) -> Path:
        """Where the files are."""
        return self._folder

    def current(self) -> Courses:
        """Return the courses as they are now: the very same value while nothing has changed."""
        with self._reading:
            self._read_if_due()
            return self._courses

    async def current_in_thread(self) -> Courses:
        """Return them as :meth:`current` does, read in a thread: for whoever runs an event loop."""
        return self._courses if self._is_fresh() else await asyncio.to_thread(self.current)

    def latest(self) -> Courses:
        """Return what was read last, without reading again: none before the first time."""
        return self._courses

    def reread(self, file: str) -> None:
        """Read a file that was replaced whole, at once: its writer is done."""
        with self._reading:
            self._read_if_due()
            if self._read_changed(file, is_first=True):
                self._courses = self._compose()

    def _read_if_due(self) -> None:
        if not self._is_fresh():
            now = self._clock.uptime()
            if self._read_all(is_first=self._read_at is None):
                self._courses = self._compose()
            self._read_at = now

    def _is_fresh(self) -> bool:
        """Whether the folder was read less than a second ago."""
        read_at = self._read_at
        return read_at is not None and 0 <= self._clock.uptime() - read_at < _EVERY

    def _read_all(self, is_first: bool) -> bool:
        """Read what has changed in all files; return whether anything is new."""
        before, self._of_folder = self._of_folder, ()
        found = self._list()
        is_new = is_first or self._of_folder != before
        if found is None:
            return is_new
        for file in found:
            is_new |= self._read_changed(file, is_first)
        return self._forget(set(found)) or is_new

    def _list(self) -> list[str] | None:
        """Return the names of the files, or None where the folder cannot be read."""
        try:
            names = [path.name for path in self._folder.iterdir()]
        except OSError as error:
            self._tell(f"the folder cannot be read: {error.strerror}.", "Its courses stay as they were.")
            return None
        found = sorted(name for name in names if is_course_file(name))
        if len(found) > MOST_FILES:
            self._tell(f"there are {len(found)} files.", f"The first {MOST_FILES} by name are read.")
        return found[:MOST_FILES]

    def _tell(self, message: str, remedy: str) -> None:
        self._of_folder = (FileProblem(self._folder.name, None, "", message, remedy),)

    def _read_changed(self, file: str, is_first: bool) -> bool:
        """Read a file again if it has changed; return whether what it says has."""
        known = self._files.get(file, _File())
        known.is_missing = False
        mark = _mark(self._folder / file)
        if mark is not None and mark == known.mark:
            return False
        is_settled = mark is None or not 0 <= self._clock.wall() - mark[-1] / 1e9 < _SETTLED
        if not (is_settled or is_first):
            return False
        fresh = self._read(file, known)
        # What was written while it was read is read once its writer is done.
        if not is_first and _mark(self._folder / file) != mark:
            return False
        is_new = fresh.says != known.says
        self._files[file] = replace(fresh, mark=mark if is_settled else None)
        return is_new

    def _read(self, file: str, known: _File) -> _File:
        """Return what is known of a file once it has been read; a course stays as it was if it is bad."""
        digest = b""
        try:
            course_name(file)
            data = read_bytes(self._folder, file)
            digest = hashlib.sha256(data).digest()
            if digest == known.digest:
                return known
            found = read_course(file, data)
            return _File(digest=digest, course=found.course, warnings=found.warnings)
        except BadCourseFile as error:
            return _File(digest=digest, course=known.course, problems=error.problems)

    def _forget(self, found: set[str]) -> bool:
        """Forget files that were missing twice: some editors take a file away before they write it anew."""
        missing = self._files.keys() - found
        gone = [file for file in missing if self._files[file].is_missing]
        for file in missing:
            self._files[file].is_missing = True
        for file in gone:
            del self._files[file]
        return bool(gone)

    def _compose(self) -> Courses:
        usable: dict[str, CourseFile] = {}
        refused: dict[str, str] = {}
        problems, warnings = list(self._of_folder), list[FileProblem]()
        for file, known in sorted(self._files.items()):
            name = file.removesuffix(SUFFIX)
            problems += known.problems
            warnings += known.warnings
            if name in self._taken:
                refused[name] = f"Course {name} cannot be used: it is described twice. Ask the administrator."
                problems.append(described_twice(file, name))
            elif known.course is not None:
                usable[name] = known.course
            else:
                lines = [problem.line for problem in known.problems if problem.line is not None]
                where = f"has an error on line {lines[0]}" if lines else "cannot be read"
                refused[name] = f"Course {name[:64]} cannot be used: its file {where}; ask its instructor."
        return Courses(usable, refused, tuple(problems), tuple(warnings))


class SharedFolders:
    """Course folders of which each is read by one object, whoever decides, shows or watches by it.

    So all of them go by the same text at any time. Used by any thread.
    """

    def __init__(self) -> None:
        #: By where they are, and the names that are taken.
        self._folders: WeakValueDictionary[tuple[Path, frozenset[str]], CourseFolder] = WeakValueDictionary()
        self._opening = threading.Lock()

    def folder(self, path: Path, taken: Collection[str] = ()) -> CourseFolder:
        """Return the one that reads this folder, as long as somebody has it."""
        key = expanded(path).absolute(), frozenset(taken)
        with self._opening:
            found = self._folders.get(key)
            if found is None:
                found = self._folders[key] = CourseFolder(key[0], taken)
            return found


#: Those of this process, whose parts each ask for the folder by its path.
SHARED_FOLDERS: Final = SharedFolders()


def is_course_file(name: str) -> bool:
    """Whether a file is meant to be a course file, by its name. What editors leave behind is not."""
    return name.endswith((SUFFIX, ".yml")) and not name.startswith((".", "#"))


def _mark(path: Path) -> _Mark | None:
    try:
        facts = path.stat()
    except OSError:
        return None
    return facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns


def described_twice(file: str, name: str) -> FileProblem:
    """Return the problem of a course that the administrator has set, too."""
    message = f"the course {given(name)} is also in c.PoolSettings.courses."
    return FileProblem(file, None, "", message, "Keep it in one place: remove it there, or remove the file.")


_NEW: Final = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_AT_ITS_SOURCE: Final = "Change it where it comes from."


def why_fixed(folder: Path, file: str) -> str:
    """Say why a file cannot be changed here, or return an empty text if it can."""
    try:
        kind = (folder / file).lstat().st_mode
    except OSError as error:
        return f"{file} can no longer be found: {error.strerror}."
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
        why = "the file itself is a mount" if is_mounted else (error.strerror or str(error))
        remedy = _AT_ITS_SOURCE if is_mounted else "Nothing was changed. Ask the administrator."
        raise NotAllowed(f"{file} cannot be written: {why}.", remedy) from error
