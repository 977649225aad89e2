"""The folder of each kernel: whose it is, what is written there, and who holds it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from .callers import untrusted
from .values import VERSION, Call, Refusal

ID = re.compile("[0-9a-f]{32}", re.ASCII)
HEADER, STATE, NOTE, _LOCK, NEEDS = "header.json", "kernel.json", "note.json", "lock", "needs"
#: The bytes of the lock's file: who does something with a kernel holds one, a kernel that lives the other.
BUSY, LIVES = 0, 1
#: Seconds between two looks at a lock, or at how much CRIU has written.
LOOK_EVERY = 0.05


@contextmanager
def locked(path: str, within: float = 0) -> Iterator[None]:
    """Hold a kernel, which the system lets go however this ends, in so many seconds. Raises ``Refusal``."""
    give_up_at = time.monotonic() + within
    while (held := taken(path, BUSY)) is None:
        if time.monotonic() >= give_up_at:
            raise Refusal("something else is done with that kernel now")
        time.sleep(LOOK_EVERY)
    try:
        yield
    finally:
        os.close(held)


def taken(path: str, byte: int) -> int | None:
    """Lock a byte of a kernel's file for as long as what is returned is open; None where another has it."""
    held = os.open(f"{path}/{_LOCK}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.fcntl(held, fcntl.F_OFD_SETLK, _lock_of(byte))
    except BlockingIOError:
        os.close(held)
        return None
    return held


def _lock_of(byte: int) -> bytes:
    return struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0)


def is_held(path: str, byte: int = LIVES) -> bool:
    """Whether a kernel lives, or something is done with it. Who asks is in nobody's way."""
    with suppress(FileNotFoundError), open(f"{path}/{_LOCK}", "rb") as file:
        found = fcntl.fcntl(file, fcntl.F_OFD_GETLK, _lock_of(byte))
        return bool(struct.unpack("hhqqi4x", found)[0] != fcntl.F_UNLCK)
    return False


def folder_of(call: Call, make: bool = False) -> str:
    """Return the folder where kernels sleep, which need not be there. Raises ``Refusal``, ``OSError``."""
    folder = there = call.settings.folder
    if make:
        os.makedirs(folder, 0o700, exist_ok=True)
    while not os.path.exists(there):
        there = os.path.dirname(there)
    seen = os.stat(there)
    if call.caller.uid and (why := untrusted(there)):
        raise Refusal(why)
    if there == folder and (seen.st_uid != 0 or seen.st_mode & 0o022):
        raise Refusal(f"{folder} is not root's alone: chown root {folder}; chmod go-w {folder}")
    return folder


def path_of(call: Call, kernel: str, by_root: bool = False) -> str:
    """Return the folder of the caller's kernel, or with ``by_root`` of anybody's. Raises ``Refusal``."""
    path = os.path.join(folder_of(call), kernel)
    state = read_said(path, STATE)
    # Root lets nobody else's kernel go on: it would with root's rights.
    if not state or not (is_callers(call, state) or (by_root and call.caller.uid == 0)):
        raise Refusal("there is no such kernel of yours: its image was removed.", gone=True)
    return path


def is_callers(call: Call, state: dict[str, Any]) -> bool:
    """Whether a kernel is the caller's; a user who was removed may have had the same number."""
    return (state.get("uid"), state.get("user")) == (call.caller.uid, call.caller.name)


def read_said(folder: str, name: str) -> dict[str, Any]:
    """Return what a file of ours says; nothing where there is none that can be read."""
    with suppress(OSError, ValueError, RecursionError), open(os.path.join(folder, name), "rb") as file:
        said = json.load(file)
        if isinstance(said, dict) and said.get("version") == VERSION:
            return said
    return {}


def write_said(folder: str, name: str, said: dict[str, Any]) -> None:
    """Write a file, on the disk, at once or not at all."""
    path = os.path.join(folder, name)
    with open(f"{path}.new", "w") as file:
        json.dump({"version": VERSION, **said}, file)
        file.flush()
        os.fsync(file.fileno())
    os.rename(f"{path}.new", path)
    sync(folder)


def sync(folder: str) -> None:
    """Have a folder's names on the disk."""
    held = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    os.fsync(held)
    os.close(held)


def erase(path: str) -> None:
    """Remove a folder with what is in it, which may be deep."""
    folders = True
    while folders and os.path.lexists(path):
        folders = False
        for each in list(os.scandir(path)):
            if not each.is_dir(follow_symlinks=False):
                os.unlink(each.path)
                continue
            folders = True
            for deeper in list(os.scandir(each.path)):
                if deeper.is_dir(follow_symlinks=False):
                    os.rename(deeper.path, f"{path}/{os.urandom(16).hex()}")
                else:
                    os.unlink(deeper.path)
            os.rmdir(each.path)
    with suppress(FileNotFoundError):
        os.rmdir(path)


def remove_kernel(path: str) -> None:
    """Remove all of a kernel that has ended.

    First what makes its image one, and last whose it is: it counts as that user's until all is gone, also
    where this is killed.
    """
    for name in ("image", "image.new", "image.old"):
        with suppress(FileNotFoundError):
            os.unlink(f"{path}/{name}/{HEADER}")
    for name in ("image", "image.new", "image.old", "work"):
        erase(f"{path}/{name}")
    erase(path)


def size_of(*paths: str) -> int:
    """Return the bytes in folders; what goes meanwhile may count or not."""
    size, folders = 0, [*paths]
    while folders:
        with suppress(OSError):
            for each in os.scandir(folders.pop()):
                if each.is_dir(follow_symlinks=False):
                    folders.append(each.path)
                else:
                    with suppress(FileNotFoundError):
                        size += each.stat(follow_symlinks=False).st_blocks * 512
    return size


def kernel_folders(folder: str) -> list[str]:
    """Return the folders of all kernels in one."""
    with suppress(FileNotFoundError):
        return [each.path for each in os.scandir(folder) if ID.fullmatch(each.name)]
    return []
