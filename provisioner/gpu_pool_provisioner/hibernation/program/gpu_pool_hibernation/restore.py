"""The verb ``restore``: a kernel goes on from its image."""

from __future__ import annotations

import os

from .criu import BOTH, CRIU, log_says, open_criu, way_of
from .folders import erase, locked, path_of
from .images import checked
from .launch import begin, hold
from .running import OF_CRIU, execute
from .values import Call, Refusal


def restore(call: Call, kernel: str) -> dict[str, object]:
    """Let a kernel go on from its image, which stays. Raises ``Refusal``."""
    path = path_of(call, kernel)
    image, work = f"{path}/image", f"{path}/work"
    with locked(path):
        held = hold(path)
        header = checked(call, image)
        erase(work)
        os.mkdir(work, 0o700)
        os.chown(work, call.caller.uid, call.caller.gid)
        output, written = os.pipe()
        argv = ["criu", "restore", *way_of(call.caller), *BOTH, "-d", "-o", "log"]
        argv += ["-D", "/proc/self/fd/5", "-W", "/proc/self/fd/6"]
        argv += ["--inherit-fd", f"fd[7]:pipe:[{header['pipe']}]"]
        opens = {CRIU: open_criu(call), 7: written}
        for number, folder in ((5, image), (6, work)):
            opens[number] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)

        def starts(_: int) -> int:
            with open("/proc/sys/kernel/ns_last_pid", "wb") as file:  # where CRIU is in the way of none
                file.write(str(header["top"] + 64).encode())
            criu = os.fork()
            if criu == 0:
                execute(CRIU, argv, call.caller, OF_CRIU, opens)
            return criu

        try:
            goes_on = begin(call, path, starts, output, written, held, "0")
        except Refusal as error:
            raise Refusal(log_says(work, 1) if os.path.exists(f"{work}/log") else str(error)) from None
        finally:
            erase(work)
        os.utime(path)
    return goes_on
