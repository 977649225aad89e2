"""The verb ``dump``: a kernel is written where there is room for it, and ended once its image is whole."""

from __future__ import annotations

import os
import resource
import select
import signal
import time
from contextlib import suppress
from typing import Any

from .criu import BOTH, CRIU, GHOST_BYTES, log_says, open_criu, way_of
from .folders import (
    BUSY,
    HEADER,
    LOOK_EVERY,
    NEEDS,
    NOTE,
    STATE,
    erase,
    is_callers,
    is_held,
    kernel_folders,
    locked,
    path_of,
    read_said,
    size_of,
    sync,
    write_said,
)
from .images import finished
from .keeping import described, keep_note
from .processes import Living, connected, let_go_on, living, living_kernel, needs_of, pids_in, verify
from .running import LONGEST, NEWNS, NEWPID, OF_CRIU, PDEATHSIG, ROOT, become, execute, libc, prctl
from .values import MIB, Call, Refusal, SudoUser

#: What an image may take beyond a tenth more than its kernel's memory.
_MARGIN = 64 << 20
#: Seconds that CRIU has to give up by itself.
_GIVES_UP_WITHIN = 10.0


def dump(call: Call, kernel: str) -> dict[str, object]:
    """Write a kernel to disk, and end it. Raises ``Refusal``: it goes on, but where it had ended."""
    path = path_of(call, kernel)
    with locked(path):
        if "note" in call.request:
            keep_note(call, path)
        state = read_said(path, STATE)
        run, header = state["run"], read_said(f"{path}/image", HEADER)
        with living_kernel(run) as kept:
            if header.get("run") != run:  # or all is done but that it has not ended
                header = _dumped(call, path, state, kept)
            kept.end()
    return described(path, header)


def _dumped(call: Call, path: str, state: dict[str, Any], kept: Living) -> dict[str, Any]:
    """Write a kernel, and leave it stopped; return what its image says. Raises ``Refusal``: it goes on."""
    new, work = f"{path}/image.new", f"{path}/work"
    old = f"{path}/image.old"
    if any(map(os.path.isdir, (new, old))):  # a killed call may have left it stopped, and in the image, too
        let_go_on(kept.namespace)
    verify(kept.namespace, call.caller)
    _refuse_connected(kept)
    for folder in (new, work, old):
        erase(folder)
    try:
        most = reserved(call, path, needs_of(pids_in(kept.namespace)))
        for folder in (new, work):
            os.mkdir(folder, 0o700)
            os.chown(folder, call.caller.uid, call.caller.gid)
        _written(call, kept, new, work, most)
        header = finished(call, new, state, kept)
        with suppress(FileNotFoundError):
            os.rename(f"{path}/image", old)
        os.rename(new, f"{path}/image")
        sync(path)
        with suppress(OSError):  # the next call does
            erase(old)
        os.utime(path)
    except BaseException:
        if os.path.isdir(new):
            let_go_on(kept.namespace)
            erase(new)
        raise
    finally:
        erase(work)
        with suppress(FileNotFoundError):
            os.unlink(f"{path}/{NEEDS}")
    return header


def _refuse_connected(kept: Living) -> None:
    """Raise ``Refusal`` where a kernel has connections, in other words than CRIU would."""
    with suppress(OSError):  # one of its processes has just ended
        if found := connected(living(pids_in(kept.namespace))):
            named = ", ".join(f"{address} port {port}" for address, port in found[:3])
            more = f" and {len(found) - 3} more" if len(found) > 3 else ""
            raise Refusal(f"it has an open connection to {named}{more}: it can sleep once that is closed.")


def _written(call: Call, kept: Living, new: str, work: str, most: int) -> None:
    """Let CRIU write a kernel to a folder. Raises ``Refusal``."""
    argv = ["criu", "dump", *way_of(call.caller), *BOTH, "-t", str(ROOT), "-o", "log"]
    argv += ["-D", "/proc/self/fd/5", "-W", "/proc/self/fd/6"]
    argv += ["--leave-stopped", "--ghost-limit", str(GHOST_BYTES)]
    opens = {CRIU: open_criu(call)}
    for number, folder in ((5, new), (6, work)):
        opens[number] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    ours = os.open("/proc/self/ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    libc("setns", kept.pids, NEWPID)
    criu = os.fork()
    if criu == 0:
        try:
            libc("setns", kept.mounts, NEWNS)
            execute(CRIU, argv, call.caller, OF_CRIU, opens, start=_as_criu)
        finally:
            os._exit(127)
    libc("setns", ours, NEWPID)
    process, give_up_at, why = os.pidfd_open(criu), time.monotonic() + LONGEST, ""
    while not (ready := select.select([process, 0], [], [], LOOK_EVERY)[0]) or process not in ready:
        if ready and not os.read(0, 4096):
            why = "its server has ended."
        elif said := takes_too_much(call, most, new, work):
            why = said
        elif time.monotonic() > give_up_at:
            why = f"CRIU has not written it within {LONGEST:g} seconds."
        if why:
            _give_up(call.caller, criu, process)
            break
    status = os.waitstatus_to_exitcode(os.waitpid(criu, 0)[1])
    # It may have ended between two looks, and then also because the disk is full.
    if why := why or takes_too_much(call, most, new, work) or (log_says(work, status) if status else ""):
        raise Refusal(why)


def _as_criu() -> None:
    """End with who has called us, and hear of a write that fails by its error alone."""
    prctl(PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def _give_up(caller: SudoUser, criu: int, process: int) -> None:
    """End CRIU: by letting its writes fail (setrlimit(2)), so that it lets the kernel go on in good order.

    Killed just while its own code runs in the kernel, it would end that, too. So it is only where it does
    not give up by itself.
    """
    limits = os.fork()
    if limits == 0:  # as its user: root without CAP_SYS_RESOURCE may not limit what others run
        try:
            become(caller)
            resource.prlimit(criu, resource.RLIMIT_FSIZE, (0, 0))
        finally:
            os._exit(0)
    select.select([process], [], [], _GIVES_UP_WITHIN)
    for each in (limits, criu):  # who may have been stopped by their user
        os.kill(each, signal.SIGKILL)
    os.waitpid(limits, 0)


def reserved(call: Call, path: str, needs: int) -> int:
    """Note that an image is about to take room, and return how many bytes at most. Raises ``Refusal``.

    Nobody waits for anybody: each notes it and looks once more, so of two that are too much one is refused,
    or both. Who would be refused has noted nothing, and is in nobody's way.
    """
    most = needs + needs // 10 + _MARGIN
    _refuse_without_room(call, path, most)
    write_said(path, NEEDS, {"bytes": most})
    _refuse_without_room(call, path, most)
    return most


def _refuse_without_room(call: Call, path: str, most: int) -> None:
    """Raise ``Refusal`` where an image may take more than there is room.

    Where that is not the disk's: with how many bytes are ``missing`` of what the caller's kernels may take,
    and how many of what those of its ``course`` may.
    """
    folder, settings, course = call.settings.folder, call.settings, _course(path)
    free, of_all, mine, of_course = _free(folder), 0, 0, 0
    for each in kernel_folders(folder):
        takes = size_of(each)
        said = read_said(each, NEEDS).get("bytes", 0) if each != path and is_held(each, BUSY) else 0
        free -= max(0, said - takes)
        takes = max(said, takes)
        of_all += takes
        mine += takes if is_callers(call, read_said(each, STATE)) else 0
        of_course += takes if course and _course(each) == course else 0
    why = [f"the disk has {max(0, free) // MIB} MiB for it"] if most > free else []
    missing = []
    for bound, taken, whose in (
        (settings.all_mib, of_all, "kernels"),
        (settings.user_mib if call.caller.uid else 0, mine, "your kernels"),
        (settings.course_mib.get(course, 0), of_course, f"kernels of the course {course[:60]!a}"),
    ):
        left = max(0, bound * MIB - taken)
        missing.append(max(0, most - left) if bound else 0)
        if missing[-1]:
            why.append(f"of the {bound} MiB that {whose} may take on disk {left // MIB} MiB are left")
    if why:
        of_any, of_user, of_course = missing if most <= free else (0, 0, 0)
        raise Refusal(
            f"its image may take {most // MIB} MiB, and {'; '.join(why)}.",
            missing=max(of_any, of_user),
            of_course=of_course,
            course=course,
        )


def _course(path: str) -> str:
    """Return the course of a kernel, as its user has noted it; empty for none."""
    note = read_said(path, NOTE).get("note")
    course = note.get("course") if isinstance(note, dict) else None
    return course if isinstance(course, str) else ""


def takes_too_much(call: Call, most: int, *written: str) -> str:
    """Return why an image is not written any further, by its folders; empty where it may be."""
    if size_of(*written) > most:
        return f"its image takes more than the {most // MIB} MiB that it may."
    if _free(call.settings.folder) < 0:
        return "the disk has got full meanwhile: a twentieth of it stays free."
    return ""


def _free(folder: str) -> int:
    """Return the bytes that the disk has for images: a twentieth of it stays free."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize - disk.f_blocks * disk.f_frsize // 20
