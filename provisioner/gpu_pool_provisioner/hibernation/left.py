"""Images that outlive their server: whose they are, and that one kernel alone goes on from each.

Each lies in a folder that the server holds whose kernel it is, by a lock that the system lets go however that
server ends. Then whoever opens the same notebook with the same kernel holds it next, or nobody for a week.
"""

from __future__ import annotations

import json
import os
import shutil
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import date
from pathlib import Path
from typing import Final

from gpu_pool_client._log import get_logger
from gpu_pool_client._requests import memory_in_words
from gpu_pool_provisioner.folders import HeldFolder, folders_in, hold_left
from gpu_pool_provisioner.hibernation import images
from gpu_pool_provisioner.session import texts

#: How the names of their folders begin.
NAME: Final = "kept-"
#: Seconds after which one is removed that nobody has asked for.
KEPT_FOR: Final = 7 * 86_400.0
_FILE: Final = "kernel.json"
_VERSION: Final = 1
_MIB: Final = 1 << 20
#: Who else than its user may write in a folder whose images are trusted: nobody.
_OTHERS_WRITE: Final = 0o022


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


class LeftImage:
    """One image that this process holds, and that stays when it ends."""

    def __init__(self, path: str, held: int, record: KernelRecord) -> None:
        """Take the folder, what holds it, and what is said in it."""
        self.path = path
        self.held = held
        self.record = record
        self._release = weakref.finalize(self, os.close, held)
        self.note_use()

    def note_use(self) -> None:
        """Note that somebody has it now: from then on it counts how long nobody has asked for it."""
        with suppress(OSError):
            os.utime(self.path)

    @property
    def mib(self) -> int:
        """MiB on disk."""
        return -(-sum(each.stat().st_size for each in Path(self.path, images.IMAGE).iterdir()) // _MIB)

    def in_words(self, now: float) -> str:
        """Say since when it sleeps and what it has, as its user reads it. Times are Unix seconds."""
        at, today = time.localtime(self.record.at), time.localtime(now)
        days = date(*today[:3]) - date(*at[:3])
        day = {0: "today", 1: "yesterday"}.get(days.days) or time.strftime("%-d %B", at)
        count = self.record.count
        has = [] if count is None else [f"{count} variable" if count == 1 else f"{count} variables"]
        has.append(memory_in_words(self.mib))
        return texts.left(f"{day} {time.strftime('%H:%M', at)}", ", ".join(has))

    def belong_to(self, owner: Owner) -> None:
        """Let it be another owner's: its notebook was renamed. Blocks. Raises ``OSError``."""
        self.record = replace(self.record, owner=owner)
        _write(self.path, self.record)
        _remove_others(self.path, owner)

    def remove(self) -> None:
        """Remove it, and let go of it. May be repeated."""
        if self._release.alive:
            _erase(self.path)
            self._release()


def leave(folder: HeldFolder, record: KernelRecord) -> LeftImage:
    """Let the whole image in a folder outlive this process, in place of others of its owner.

    Blocks. Raises ``OSError``.
    """
    _write(folder.path, record)
    path, held = folder.leave(NAME)
    images.sync_folder(Path(path).parent)
    _remove_others(path, record.owner)
    return LeftImage(path, held, record)


def _write(path: str, record: KernelRecord) -> None:
    """Say in an image's folder what it is of, at once or not at all."""
    new = Path(path, f"{_FILE}.new")
    with new.open("w") as file:
        json.dump({"version": _VERSION, **asdict(record)}, file)
        file.flush()
        os.fsync(file.fileno())
    new.rename(Path(path, _FILE))
    images.sync_folder(Path(path))


def _remove_others(path: str, owner: Owner) -> None:
    """Remove what else of an owner's nobody holds."""
    for other, found in _found(str(Path(path).parent)):
        if found is not None and found.owner == owner and other != path:
            _remove(other)


def claim(parent: str, owner: Owner) -> LeftImage | None:
    """Return the owner's image, held by this process; None where there is none, or somebody holds it.

    Blocks.
    """
    theirs = [(path, said) for path, said in _found(parent) if said is not None and said.owner == owner]
    for path, record in sorted(theirs, key=lambda each: -each[1].at):
        held = hold_left(path)
        if held is not None:
            return LeftImage(path, held, record)
    return None


def remove_expired(parent: str, now: float) -> None:
    """Remove the images that nobody has asked for in a week, and what is left of others. Blocks."""
    for path, _ in _found(parent):
        with suppress(OSError):
            if now - Path(path).stat().st_mtime > KEPT_FOR:
                _remove(path)


def _remove(path: str) -> None:
    held = hold_left(path)
    if held is not None:
        get_logger().info("A kernel on disk that nobody has asked for is removed: %s", path)
        _erase(path)
        os.close(held)


def _erase(path: str) -> None:
    # First what makes it an image: where this ends in between, nobody takes the rest for one.
    Path(path, _FILE).unlink(missing_ok=True)
    shutil.rmtree(path, ignore_errors=True)


def _found(parent: str) -> list[tuple[str, KernelRecord | None]]:
    """Return the folders of images with what is said in them; None where nothing that can be read."""
    with suppress(OSError):
        seen = Path(parent).stat()
        if seen.st_uid == os.getuid() and not seen.st_mode & _OTHERS_WRITE:
            return [(path, _read(path)) for path in folders_in(parent, NAME)]
    return []


def _read(path: str) -> KernelRecord | None:
    try:
        said = json.loads(Path(path, _FILE).read_text())
        if said.pop("version") == _VERSION and Path(path, images.IMAGE).is_dir():
            return KernelRecord(owner=Owner(**said.pop("owner")), **said)
    except (OSError, ValueError, KeyError, TypeError):
        pass
    return None
