"""Whether a device is closed to processes that do not come by the pool's way: tried, not assumed.

Only after such a probe may a limit be called hard. It runs a process of one user,
once for each device, which does what a terminal of that user could do. What it
finds counts for users who may do no more than that one: never for root.
"""

from __future__ import annotations

import functools
import os
import pwd
import subprocess
import sys
from collections.abc import Mapping
from enum import Enum
from typing import Any, Final

from gpu_pool_client import Lease
from gpu_pool_client._processes import owner_of

#: Tries to open device 0 of those it sees, and then to allocate argv[1] MiB of it. Its exit
#: status says how far it came: everything that is not one of these is a failure of the probe.
_TRY: Final = """
import ctypes, sys
try:
    cuda = ctypes.CDLL("libcuda.so.1")
    create, allocate = cuda.cuCtxCreate_v2, cuda.cuMemAlloc_v2
except (OSError, AttributeError):
    sys.exit(20)
device, context, pointer = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_ulonglong()
if cuda.cuInit(0) or cuda.cuDeviceGet(ctypes.byref(device), 0):
    sys.exit(20)
mib = int(sys.argv[1])
code = create(ctypes.byref(context), 0, device)
if code:
    sys.exit(10 if code in (46, 800, 805, 806, 807, 808) or mib and code == 2 else 20)
code = allocate(ctypes.byref(pointer), ctypes.c_size_t(mib << 20)) if mib else 0
sys.exit({0: 11, 2: 10}.get(code, 20))
"""
_REFUSED: Final = 10
_OPENED: Final = 11
#: The variable by which a process may lower its own memory limits, and values that confuse MPS: one
#: names a device which the process does not see, one cannot be read. With drivers R615 (reported) and
#: 580.159.04 (seen) such a client is free of all memory limits.
MEMORY: Final = "CUDA_MPS_PINNED_DEVICE_MEM_LIMIT"
CONFUSING: Final = ("0=1024M,1=1M", "none")
#: Starting CUDA takes seconds where the driver has to be initialised first.
_TIMEOUT: Final = 60.0


class ProbeOutcome(str, Enum):
    """What came of a try to use a device."""

    REFUSED = "refused"
    """The driver kept the process off."""
    OPENED = "opened"
    """It could use the device, or more of it than it was given."""
    UNKNOWN = "unknown"
    """The try says nothing: there is no CUDA here, the device was not seen, or the try failed."""


def attempt(uuid: str, uid: int, variables: Mapping[str, str] | None = None, mib: int = 0) -> ProbeOutcome:
    """Try to open a device as a user, with these variables and none of a lease's others.

    With ``mib`` the try also allocates that much of its memory. Without any
    variables it is what a terminal of the user can do.
    """
    environ = {
        "CUDA_VISIBLE_DEVICES": uuid,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        **_search(),
        **(variables or {}),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-IS", "-c", _TRY, str(mib)],
            env=environ,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_TIMEOUT,
            check=False,
            **_become(uid),
        )
    except (OSError, subprocess.SubprocessError):
        return ProbeOutcome.UNKNOWN
    return {_REFUSED: ProbeOutcome.REFUSED, _OPENED: ProbeOutcome.OPENED}.get(
        done.returncode, ProbeOutcome.UNKNOWN
    )


def attempts(uuid: str, uid: int, client: Mapping[str, str], mib: int) -> ProbeOutcome:
    """Try all ways to evade the pool: as a terminal, and as a client that confuses MPS to get ``mib``.

    ``client`` are the variables that make a process a client of MPS. What the first try that is not
    refused found is the answer.

    Where the pool runs as that user itself no try is needed: its user may tell
    its daemon anything.
    """
    if uid == os.geteuid():
        return ProbeOutcome.OPENED
    outcome = attempt(uuid, uid)
    for value in CONFUSING:
        if outcome is ProbeOutcome.REFUSED:
            outcome = attempt(uuid, uid, {**client, MEMORY: value}, mib)
    return outcome


def is_roots(lease: Lease) -> bool:
    """Whether a lease is held by root, or its attached process runs as root: no limit is hard for it.

    Root may open an exclusive device to everybody, or tell a daemon anything, so a
    try by another user says nothing about it. Of a process that cannot be seen from
    here, as in a container, the user is not known.
    """
    process = lease.process
    runs_as_root = process is not None and process.is_alive() is True and owner_of(process.pid) == 0
    return runs_as_root or lease.holder.user == _root()


@functools.lru_cache(maxsize=1)
def _root() -> str:
    """Return root's name. Whoever asks for other users' ids may have to wait for a network."""
    try:
        return pwd.getpwuid(0).pw_name
    except KeyError:
        return "root"


def _search() -> dict[str, str]:
    """Return where libraries are looked for: without it a try may find no CUDA, which hides nothing."""
    path = os.environ.get("LD_LIBRARY_PATH")
    return {} if path is None else {"LD_LIBRARY_PATH": path}


def _become(uid: int) -> dict[str, Any]:
    """Return what makes a subprocess run as that user, with the user's own groups."""
    if uid == os.geteuid():
        return {}
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return {"user": uid, "group": uid, "extra_groups": []}
    groups = os.getgrouplist(entry.pw_name, entry.pw_gid)
    return {"user": uid, "group": entry.pw_gid, "extra_groups": groups}
