"""What is kept of kernels: what is noted of them, their list, and what is removed."""

from __future__ import annotations

import json
import os
import time
from contextlib import suppress
from typing import Any

from .folders import (
    HEADER,
    NOTE,
    STATE,
    erase,
    folder_of,
    is_callers,
    is_held,
    kernel_folders,
    locked,
    path_of,
    read_said,
    remove_kernel,
    sync,
    write_said,
)
from .processes import boot_id, let_go_on, living_kernel, start_of, status_of
from .values import Call, Refusal, SudoUser

#: Bytes of a note.
_LONGEST_NOTE = 64 << 10
#: How deep a note may be.
_DEEPEST = 20
#: Seconds in which a call that is given up ends.
ENDS_WITHIN = 30.0
#: Seconds in which a launch has begun.
BEGINS_WITHIN = 60.0


def note(call: Call, kernel: str) -> dict[str, object]:
    """Keep what is noted of a kernel; return how it stands."""
    path = path_of(call, kernel)
    keep_note(call, path)
    os.utime(path)
    _settle(path)
    asleep = _is_whole(path) and not is_held(path)
    return {**described(path, read_said(f"{path}/image", HEADER)), "asleep": asleep}


def _settle(path: str, within: float | None = None) -> None:
    """Finish what a killed call has left stopped: it goes on, or ends where its image is whole.

    Once the image has its name nothing goes on, or there would be two: it may be ending already. For that it
    is waited for so many seconds.
    """
    if _is_left(path) or _is_named_late(path):
        with suppress(Refusal), locked(path):
            if _is_named_late(path):
                erase(f"{path}/image")
                os.rename(f"{path}/image.new", f"{path}/image")
                sync(path)
            if _is_left(path):
                with living_kernel(read_said(path, STATE)["run"]) as kept:
                    if _is_whole(path):
                        kept.end(within)
                    else:
                        let_go_on(kept.namespace)
                        erase(f"{path}/image.new")
            if not is_held(path):
                erase(f"{path}/image.old")


def _is_whole(path: str, name: str = "image") -> bool:
    """Whether there is an image of a kernel as it ran last."""
    run = read_said(path, STATE).get("run")
    return run is not None and read_said(f"{path}/{name}", HEADER).get("run") == run


def _is_left(path: str) -> bool:
    """Whether a kernel lives that a call has stopped, or is about to."""
    is_begun = any(os.path.isdir(f"{path}/{name}") for name in ("image.new", "image.old"))
    return is_held(path) and "run" in read_said(path, STATE) and (is_begun or _is_whole(path))


def _is_named_late(path: str) -> bool:
    """Whether a kernel has ended whose whole image has not got its name yet, as where power was lost."""
    return not is_held(path) and not _is_whole(path) and _is_whole(path, "image.new")


def keep_note(call: Call, path: str) -> None:
    """Keep what the caller says of a kernel, and which process of theirs has it."""
    note, server = call.request.get("note"), call.request.get("server", 0)
    is_note = isinstance(note, dict) and not _is_deep(note) and len(json.dumps(note)) <= _LONGEST_NOTE
    if not is_note or type(server) is not int:
        raise Refusal(
            f"note must be an object of at most {_LONGEST_NOTE} bytes as JSON and {_DEEPEST} levels, "
            "and server a pid"
        )
    if server and call.caller.uid and not _is_of(server, call.caller):
        raise Refusal("server must be the pid of a process of yours")
    write_said(path, NOTE, {"note": note, "server": [server, start_of(server), boot_id()]})


def _is_deep(note: object) -> bool:
    level = [note]
    for _ in range(_DEEPEST):
        inner = [each for each in level if isinstance(each, (dict, list))]
        level = [deeper for each in inner for deeper in (each.values() if isinstance(each, dict) else each)]
    return bool(level)


def _is_of(pid: int, caller: SudoUser) -> bool:
    with suppress(OSError):
        return status_of(pid)["Uid"][0] == str(caller.uid)
    return False


def _server_of(path: str) -> int:
    """Return the pid of the process that has a kernel, by when it was started, too; 0 where none lives."""
    server, started, boot = read_said(path, NOTE).get("server", (0, 0, ""))
    if started and (start_of(server), boot_id()) == (started, boot):
        with suppress(OSError):
            if status_of(server)["State"][0] != "Z":  # which has ended, and nobody has asked how
                return int(server)
    return 0


def remove_image(call: Call, kernel: str) -> dict[str, object]:
    """Remove what is on disk of a kernel."""
    path = path_of(call, kernel, by_root=True)
    with locked(path, ENDS_WITHIN):  # a dump that is given up ends soon
        if not is_held(path):
            remove_kernel(path)
            return {}
        is_left = _is_left(path)
        erase(f"{path}/image.old")
        with suppress(FileNotFoundError):
            os.rename(f"{path}/image", f"{path}/image.old")
        if is_left:  # it has all that the image had
            with suppress(Refusal), living_kernel(read_said(path, STATE)["run"]) as kept:
                let_go_on(kept.namespace)
        for name in ("image.new", "image.old"):
            erase(f"{path}/{name}")
    return {}


def list_kernels(call: Call, _: str) -> dict[str, object]:
    """Return the caller's kernels; to root, all."""
    found = []
    for path in kernel_folders(folder_of(call)):
        state = read_said(path, STATE)
        if state and (call.caller.uid == 0 or is_callers(call, state)):
            found.append(described(path, read_said(f"{path}/image", HEADER)))
    return {"folder": call.settings.folder, "kernels": found}


def described(path: str, header: dict[str, Any]) -> dict[str, object]:
    """Return what a caller may know of a kernel."""
    told: dict[str, object] = {"id": os.path.basename(path), "uid": read_said(path, STATE).get("uid")}
    told |= {"goes_on": is_held(path), "note": read_said(path, NOTE).get("note"), "image": None}
    told["server"] = _server_of(path)
    if header:
        size = sum(size for size, _ in header["files"].values())
        told["image"] = {"bytes": size, "since": header["since"], "listens": header["listens"]}
    return told


def sweep(call: Call) -> None:
    """Remove what nobody has asked for in days, and what is left of kernels that ended without an image.

    What a killed dump has left stopped goes on, or ends.
    """
    for path in kernel_folders(call.settings.folder):
        with suppress(Exception):  # nothing that is the matter with one is in the way of a launch
            _settle(path, 0)
            if _is_over(call, path):  # else it is in nobody's way
                with locked(path):
                    if _is_over(call, path):
                        remove_kernel(path)


def _is_over(call: Call, path: str) -> bool:
    age = time.time() - os.stat(path).st_mtime
    if age < BEGINS_WITHIN or is_held(path):
        return False
    is_old = age > call.settings.days * 86_400
    is_image = os.path.exists(f"{path}/image/{HEADER}") and os.path.exists(f"{path}/{STATE}")
    return not is_image or (is_old and not _server_of(path))
