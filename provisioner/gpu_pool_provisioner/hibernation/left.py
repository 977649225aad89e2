"""Images that outlive their server: whose they are, and that one server alone shows each.

The privileged program keeps them, with what is noted of each. Which of a user's servers has one is the
user's own affair: that server holds a file of its name, by a lock that the system lets go however the server
ends. Then whoever opens the same notebook with the same kernel holds it next, or nobody until the program
removes it.
"""

from __future__ import annotations

import fcntl
import functools
import os
import threading
import time
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Final

from jupyter_core.paths import jupyter_data_dir

from gpu_pool_client import Lease
from gpu_pool_client._forks import close_in_children
from gpu_pool_client._log import get_logger
from gpu_pool_client._requests import memory_in_words
from gpu_pool_provisioner.hibernation.calling import Program, ProgramRefused
from gpu_pool_provisioner.session import texts

_VERSION: Final = 1
#: How many libraries are named, and the longest name of one.
_LIBRARIES: Final = 3
_LONGEST_NAME: Final = 30
_MIB: Final = 1 << 20
#: Kernels that have ended and whose images could not be removed: held, so that nobody goes on with one,
#: by this process, since what has ended such a kernel ends with it.
_refused: Final[dict[str, tuple[Program, Hold]]] = {}
#: Held while that is tried again.
_removing: Final = threading.Lock()


@dataclass(frozen=True, slots=True)
class Owner:
    """Whose image it is. No other kernel goes on from it."""

    uid: int
    #: The user by the name of their JupyterHub, where several may have one account; empty without a Hub.
    hub_user: str
    #: The notebook, by its real path.
    notebook: str
    #: The kernel, by the name of its kernelspec.
    kernel: str

    @classmethod
    def of(cls, path: str, kernel: str, environment: Mapping[str, str]) -> Owner | None:
        """Return that of a notebook's kernel; None where the path is that of no file."""
        if not Path(path).is_absolute() or not Path(path).is_file():
            return None
        return cls(os.getuid(), environment.get("JUPYTERHUB_USER", ""), os.path.realpath(path), kernel)


@dataclass(frozen=True, slots=True)
class KernelRecord:
    """What the next server must know of the kernel in an image."""

    owner: Owner
    #: How the paths of the sockets begin on which it listens, and the key of its messages.
    sockets: str
    key: str
    #: What of its environment is of its slice, and its server's.
    variables: dict[str, str]
    #: How many variables its user has made; None where it has not said.
    count: int | None = None
    #: When it fell asleep, in Unix seconds.
    at: float = 0.0
    #: What its user has imported that is not Python's own: ``torch``.
    libraries: tuple[str, ...] = ()

    def saying(self, told: Mapping[str, Any]) -> KernelRecord:
        """Return it with what the kernel tells of itself, which may be anything."""
        count, libraries = told.get("count"), told.get("libraries")
        named = [each for each in libraries if _is_library(each)] if isinstance(libraries, list) else []
        return replace(
            self, count=count if isinstance(count, int) else None, libraries=tuple(named[:_LIBRARIES])
        )

    def has_in_words(self, mib: int) -> str:
        """Say what it has, as its user reads it."""
        has = [] if self.count is None else [f"{self.count} variable{'' if self.count == 1 else 's'}"]
        return ", ".join([*self.libraries, *has, memory_in_words(mib)])

    @classmethod
    def read(cls, note: Mapping[str, Any]) -> KernelRecord:
        """Return that of a note. Raises ``ValueError``, ``KeyError`` and ``TypeError`` where it has none."""
        if note["version"] != _VERSION:
            raise ValueError("another version has noted it")
        record = dict(note["record"])
        libraries = tuple(filter(_is_library, record.pop("libraries", ())))
        return cls(owner=Owner(**record.pop("owner")), libraries=libraries, **record)


def _is_library(name: object) -> bool:
    return isinstance(name, str) and name.isidentifier() and len(name) <= _LONGEST_NAME


class Hold:
    """What tells the user's other servers that this one has a kernel."""

    def __init__(self, kernel: str, held: int) -> None:
        """Take a kernel's ID, and the file that is locked."""
        self.kernel = kernel
        #: Let another server have it. May be repeated.
        self.close = weakref.finalize(self, os.close, held)
        close_in_children(self)

    def remove(self) -> None:
        """Let go of what nobody can have any more. May be repeated."""
        if self.close.alive:
            _holds(self.kernel).unlink(missing_ok=True)
            self.close()


def _holds(kernel: str) -> Path:
    return Path(jupyter_data_dir(), "gpu-pool", "held", kernel)


def hold(kernel: str) -> Hold | None:
    """Hold a kernel by its ID; None where another server of this user does. Raises ``OSError``."""
    path = _holds(kernel)
    path.parent.mkdir(0o700, parents=True, exist_ok=True)
    held = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(held), path.stat()):  # nobody has removed it meanwhile
            return Hold(kernel, held)
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(held)
        raise
    os.close(held)
    return None


def not_held(error: OSError) -> str:
    """Say why a kernel could not be held, in a sentence."""
    return (
        f"this user's servers could not note in {_holds('')} which of them has it "
        f"({error.strerror or error}): that must be a folder with locks to which they can write."
    )


class LeftImage:
    """One image that this server holds, and that stays when it ends."""

    def __init__(self, program: Program, held: Hold, said: Mapping[str, Any]) -> None:
        """Take what holds it, and what the program says of it."""
        self.held, self._program, self._note = held, program, said["note"]
        #: What the program says of the image.
        self.image: dict[str, Any] = said["image"]
        self.record = KernelRecord.read(said["note"])
        #: What its user reads of older ones that were removed for it.
        self.replaced: list[str] = []

    @property
    def mib(self) -> int:
        """MiB on disk."""
        return mib_of(self.image)

    def in_words(self, now: float) -> str:
        """Say since when it sleeps and what it has, as its user reads it. Times are Unix seconds."""
        return _in_words(self.record, self.mib, now)

    def note_use(self) -> None:
        """Note that this server has it now. Blocks."""
        self._note_server(os.getpid())

    def note_left(self) -> None:
        """Note that no server has it: from now on it counts how long nobody has. Blocks."""
        self._note_server(0)

    def _note_server(self, server: int) -> None:
        with suppress(ProgramRefused):
            self._program.call("note", self.held.kernel, note=self._note, server=server)

    def belong_to(self, owner: Owner) -> None:
        """Let it be another owner's: its notebook was renamed. Blocks. Raises ``OSError``."""
        self.record = replace(self.record, owner=owner)
        self._note = {**self._note, "record": asdict(self.record)}
        try:
            self._program.call("note", self.held.kernel, note=self._note, server=os.getpid())
        except ProgramRefused as error:
            raise OSError(error.errno, str(error)) from error
        remove_others(self._program, self.held.kernel, owner)


def _in_words(record: KernelRecord, mib: int, now: float) -> str:
    return texts.left(day_in_words(record.at, now), record.has_in_words(mib))


def day_in_words(at: float, now: float) -> str:
    """Say when something was, as a user reads it: ``yesterday 18:02``. Times are Unix seconds."""
    then, today = time.localtime(at), time.localtime(now)
    days = date(*today[:3]) - date(*then[:3])
    day = {0: "today", 1: "yesterday"}.get(days.days) or time.strftime("%-d %B", then)
    return f"{day} {time.strftime('%H:%M', then)}"


def mib_of(image: Mapping[str, Any]) -> int:
    """Return how many MiB an image has on disk."""
    return -(-int(image["bytes"]) // _MIB)


def remove_image(program: Program, kernel: str) -> bool:
    """Remove the image of a kernel that this server holds; return whether there is none any more. Blocks."""
    try:
        program.call("remove", kernel)
    except ProgramRefused as error:
        if not error.is_gone:
            get_logger().warning("What a kernel has on disk was not removed: %s", error)
        return error.is_gone
    return True


def remove_later(program: Program, held: Hold) -> None:
    """Have it tried again to remove the image of a kernel that has ended, by :func:`remove_refused`."""
    _refused[held.kernel] = program, held


def remove_refused() -> None:
    """Try again to remove what could not be removed, in a thread: no kernel waits for that."""
    if _refused and _removing.acquire(blocking=False):
        threading.Thread(target=_remove_refused, name="gpu-pool-images", daemon=True).start()


def _remove_refused() -> None:
    try:
        for kernel, (program, held) in list(_refused.items()):
            if remove_image(program, kernel):
                _refused.pop(kernel, None)
                held.remove()
    finally:
        _removing.release()


def note_of(lease: Lease, record: KernelRecord | None) -> dict[str, Any]:
    """Return what is noted of a kernel: what who lists them reads, and what the next server must know."""
    who = lease.holder
    holder = {"lease": lease.id, "user": who.user, "kernel": who.kernel or "", "course": who.course or ""}
    return {"version": _VERSION, **holder, "record": None if record is None else asdict(record)}


def remove_others(program: Program, kernel: str, owner: Owner) -> None:
    """Remove what else of an owner's no server has. Blocks."""
    for other, said in kernels_on_disk(program):
        record = record_of(said)
        if record is not None and record.owner == owner and other != kernel:
            _remove_unheld(program, other)


def claim(program: Program, owner: Owner) -> LeftImage | None:
    """Return the owner's image, held by this server; None where there is none, or another has it. Blocks.

    Of several it is the newest that no server has, and older ones are removed. Raises ``ProgramRefused``
    where the program does not say what there is.
    """
    found = [(kernel, said, record_of(said)) for kernel, said in _asleep(_listed(program))]
    theirs = [each for each in found if each[2] is not None and each[2].owner == owner]
    image = None
    for kernel, said, record in sorted(theirs, key=lambda each: -float(each[1]["image"]["since"])):
        if image is not None:
            if record is not None and _remove_unheld(program, kernel):
                which = _in_words(record, mib_of(said["image"]), time.time())
                image.replaced.append(texts.is_gone(which, texts.A_NEWER_IS_HERE))
            continue
        with suppress(OSError):
            held = hold(kernel)
            if held is not None:
                image = LeftImage(program, held, said)
                image.note_use()
    return image


@functools.cache
def remove_abandoned_once(program: Program) -> None:
    """Remove what killed servers of this user have on disk that nobody can go on with. Blocks."""
    for kernel, said in kernels_on_disk(program):
        if record_of(said) is None:
            _remove_unheld(program, kernel)


def _remove_unheld(program: Program, kernel: str) -> bool:
    """Remove what no server has; return whether nobody can have it any more."""
    with suppress(OSError):
        held = hold(kernel)
        if held is not None:
            get_logger().info("A kernel on disk that nobody can have is removed: %s", kernel)
            if remove_image(program, kernel):
                held.remove()
            else:
                remove_later(program, held)
            return True
    return False


def kernels_on_disk(program: Program) -> Sequence[tuple[str, dict[str, Any]]]:
    """Return this user's kernels that sleep, by ID, as far as is known; not what another living server has.

    Such a server may hold it in another data folder of Jupyter's, where this one does not look.
    """
    try:
        return _asleep(_listed(program))
    except ProgramRefused as error:
        log_not_known(error)
        return []


def log_not_known(error: ProgramRefused) -> None:
    """Log why it is not known what sleeps on disk."""
    get_logger().warning("What sleeps on disk is not known: %s", error)


def is_on_disk(program: Program, owner: Owner) -> bool:
    """Whether there is an image of an owner's, whoever has it. Blocks. Raises ``ProgramRefused``."""
    records = (record_of(said) for said in _listed(program) if said["image"])
    return any(record is not None and record.owner == owner for record in records)


def _listed(program: Program) -> list[dict[str, Any]]:
    return [each for each in program.call("list")["kernels"] if each["uid"] == os.getuid()]


def _asleep(said: Iterable[dict[str, Any]]) -> Sequence[tuple[str, dict[str, Any]]]:
    return [
        (each["id"], each)
        for each in said
        if each["image"] and not each["goes_on"] and each.get("server", 0) in (0, os.getpid())
    ]


def record_of(said: Mapping[str, Any]) -> KernelRecord | None:
    """Return what the next server must know of a kernel; None where it has none."""
    try:
        return KernelRecord.read(said["note"])
    except (ValueError, KeyError, TypeError):
        return None
