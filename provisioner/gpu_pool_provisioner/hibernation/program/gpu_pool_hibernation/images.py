"""What an image says of itself, and whether it can go on here."""

from __future__ import annotations

import hashlib
import json
import os
import select
import signal
import stat
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from .folders import HEADER, read_said, write_said
from .processes import Living, listens, living, pids_in, tasks
from .running import KERNEL, become, close_but
from .values import MIB, Call, Refusal, SudoUser

#: Seconds in which files of the user's must be seen.
_SEEN_WITHIN = 10.0


def finished(call: Call, new: str, state: dict[str, Any], kept: Living) -> dict[str, Any]:
    """Make the image of a stopped kernel whole: root's, on the disk, with what it says of itself."""
    # Without the first, which is ours, and has the server's log open.
    everyone = [each for each in pids_in(kept.namespace) if each != state["run"]["first"]]
    pids = living(everyone)
    mapped, opened, folders = _files_of(pids, call.caller)
    os.chown(new, 0, 0)
    os.chmod(new, 0o755)  # noqa: S103 - for the user's CRIU, which comes by no name: the folder above is root's alone
    files = {}
    for name in os.listdir(new):
        file = os.open(f"{new}/{name}", os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        os.fchown(file, 0, 0)
        os.fchmod(file, 0o444)
        os.fsync(file)
        files[name] = _digest(file)
        if kept.is_given_up:
            raise Refusal("it was ended meanwhile.")
    header = {
        "run": state["run"],
        "pipe": state["pipe"],
        "since": time.time(),
        "groups": sorted(call.caller.groups),
        "cpu": cpu(),
        "mapped": mapped,
        "opened": opened,
        "folders": folders,
        "listens": listens(pids),
        "top": max(tasks(everyone), default=KERNEL),
        "files": files,
    }
    write_said(new, HEADER, header)
    # What is stopped ends by nobody but who ends it, and a number may be another process's then.
    if kept.is_given_up or set(pids) - set(living(pids_in(kept.namespace))):
        raise Refusal("it was ended meanwhile.")
    return header


def checked(call: Call, image: str) -> dict[str, Any]:
    """Return what an image says, once it is seen that it is whole and can go on here. Raises ``Refusal``."""
    if not os.path.isdir(image):
        raise Refusal("its image was removed.", gone=True)
    header, files = read_said(image, HEADER), {}
    if not header:
        raise Refusal("what is on disk cannot be read, or another version of this program has written it.")
    for name in os.listdir(image):
        if name != HEADER:
            files[name] = _digest(os.open(f"{image}/{name}", os.O_RDONLY | os.O_NOFOLLOW))
    if files != header["files"]:
        raise Refusal("what is on disk is damaged: it is not what was written.")
    if header["cpu"] != cpu():
        raise Refusal("this machine has another processor than the one on which it fell asleep.")
    if lost := sorted(set(header["groups"]) - set(call.caller.groups)) if call.caller.uid else []:
        raise Refusal(
            f"your account is no longer in the group {lost[0]}, in which it was when the kernel fell asleep."
        )
    folders = header.get("folders", [])
    seen = _seen([*header["mapped"], *header["opened"], *folders], call.caller)
    if gone := [each for each in folders if not seen[each]]:
        raise Refusal(f"the folder {gone[0]}, in which it was, is gone.")
    changed = {path for path, was in header["mapped"].items() if seen[path][:2] != was}
    changed |= {path for path, size in header["opened"].items() if seen[path][:1] != [size]}
    if changed:
        first, *others = sorted(changed)
        named = (
            f"{len(others) + 1} files that it uses (such as {first}) have" if others else f"the file {first}"
        )
        raise Refusal(f"{named} changed, or went, while it slept.")
    return header


def _digest(file: int) -> list[object]:
    """Return the bytes of a file and their digest, and close it."""
    digest, size = hashlib.sha256(), 0
    with open(file, "rb", buffering=0) as read:
        while block := read.read(MIB):
            digest.update(block)
            size += len(block)
    return [size, digest.hexdigest()]


def _seen(paths: Sequence[str], caller: SudoUser) -> dict[str, list[int]]:
    """Return files' bytes, when they changed, and whether they are regular ones, as the user sees them.

    By a process of its own: a file system of the user's may never answer. Raises ``Refusal``.
    """
    told, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            close_but(says)
            become(caller)
            with open(says, "wb") as file:
                file.write(json.dumps({path: _identity(path) for path in paths}).encode())
        finally:
            os._exit(0)
    os.close(says)
    said, give_up_at = b"", time.monotonic() + _SEEN_WITHIN
    with open(told, "rb", buffering=0) as answers:
        while select.select([answers], [], [], max(0, give_up_at - time.monotonic()))[0]:
            if not (read := answers.read(MIB)):
                os.waitpid(pid, 0)
                with suppress(ValueError):
                    seen: dict[str, list[int]] = json.loads(said)
                    return seen
                raise Refusal("the files that it uses could not be looked at.")
            said += read
    os.kill(pid, signal.SIGKILL)  # and is not waited for: the system may wait for the file system
    raise Refusal(f"a file system with files that it uses has not answered within {_SEEN_WITHIN:g} seconds.")


def _identity(path: str) -> list[int]:
    with suppress(OSError):
        found = os.stat(path)
        return [found.st_size, found.st_mtime_ns, stat.S_ISREG(found.st_mode)]
    return []


def _files_of(
    pids: Sequence[int], caller: SudoUser
) -> tuple[dict[str, list[int]], dict[str, int], list[str]]:
    """Return the files that processes have mapped, regular ones that they have open, and their folders."""
    folders = {os.readlink(f"/proc/{pid}/cwd") for pid in pids}
    mapped: set[str] = set()
    opened: set[str] = set()
    for pid in pids:
        with open(f"/proc/{pid}/maps", "rb") as file:  # a name may hold any character but a newline
            mapped |= {os.fsdecode(line.split(b" ", 5)[-1].strip(b" ")) for line in file.read().split(b"\n")}
        opened |= {os.readlink(each.path) for each in os.scandir(f"/proc/{pid}/fd")}
    paths = [each for each in mapped | opened | folders if each.startswith("/")]
    seen = {path: found for path, found in _seen(paths, caller).items() if found}
    return (
        {path: found[:2] for path, found in seen.items() if path in mapped},
        {path: found[0] for path, found in seen.items() if path in opened and found[2]},
        sorted(path for path in seen if path in folders),
    )


def cpu() -> str:
    """Return a digest of what the processor can do."""
    with open("/proc/cpuinfo", "rb") as file:
        lines = file.read().split(b"\n")
    features = next((line for line in lines if line.startswith((b"flags", b"Features"))), b"")
    return hashlib.sha256(os.uname().machine.encode() + b" ".join(sorted(features.split()))).hexdigest()
