"""Whether this service sees the processes of all users."""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path
from typing import Final

from gpu_pool_client import NotAllowed, procfs

#: Values of hidepid that hide nothing from anybody (proc(5)).
_HIDES_NOTHING: Final = (b"0", b"off")


def check_processes_are_seen() -> None:
    """Refuse to serve where others' processes are hidden: their leases would seem to be of the dead."""
    mounts = Path("/proc/self/mounts").read_bytes()
    if hides_processes(mounts, os.geteuid(), {os.getegid(), *os.getgroups()}):
        raise NotAllowed(
            "/proc is mounted with hidepid here, so this service would not see the processes of other users, "
            "and would take their leases for those of processes that have ended.",
            "Run it as root, or as a member of the group that /proc is mounted with (gid=).",
        )


def hides_processes(mounts: bytes, uid: int, groups: Collection[int]) -> bool:
    """Whether ``/proc``, by the text of ``/proc/mounts``, hides processes from a user of these groups."""
    hidden = False
    seeing = {b"%d" % group for group in groups}
    for mount in procfs.mounts(mounts):
        if (mount.point, mount.kind) == (b"/proc", b"proc"):  # the last one hides those before
            hides = mount.options.get(b"hidepid", b"0") not in _HIDES_NOTHING
            hidden = hides and mount.options.get(b"gid") not in seeing
    return hidden and uid != 0
