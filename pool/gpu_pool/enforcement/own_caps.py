"""Whether what runs on a slice limits itself, as far as the pool can see that.

Whoever launches a process on a slice knows which frameworks take a limit there,
and states it in the process's environment (``framework_caps.with_caps``). The
system shows with which one a process was started. It may have changed it since,
or have written it itself: a limit of this kind is cooperative, and called so.
"""

from __future__ import annotations

import functools
import re
import time
from dataclasses import replace
from pathlib import Path
from typing import Final

from gpu_pool_client import Lease, LeaseState, Limit, Process, Strength

#: In ``GPU_POOL_ENFORCED``, where ``Limit`` has written it.
_STATED: Final = re.compile(r"memory: [^;]*\((framework caps: [a-z,; ]{1,200})\)", re.ASCII)
#: Characters of an environment that are read.
_MOST: Final = 2**20
#: Seconds for which a process that could not be seen is not looked for again: the processes of
#: hundreds of kernels may be hidden from the pool's, and everybody asks for its state.
_HIDDEN_FOR: Final = 5.0


class _UnseenError(Exception):
    """The process cannot be seen, or was not launched on this lease, or not yet."""


def with_own_caps(lease: Lease) -> Lease:
    """State in a held lease that framework caps hold its memory, where its process was started with them.

    Nothing is said of a limit that is firmer, or of a process that cannot be seen: a
    kernel in a pod has none here.
    """
    is_limited = lease.enforcement.memory.strength is not Strength.NONE
    if lease.state is not LeaseState.HELD or lease.process is None or is_limited or lease.terms.in_pod:
        return lease
    words = _seen(lease.process, lease.id, int(time.monotonic() // _HIDDEN_FOR))
    memory = Limit(Strength.COOPERATIVE, words)
    return replace(lease, enforcement=replace(lease.enforcement, memory=memory)) if words else lease


@functools.lru_cache(maxsize=4096)
def _seen(process: Process, lease_id: str, when: int) -> str:
    """Return what :func:`_stated` does, empty if the process cannot be seen; looks once for each ``when``."""
    del when
    try:
        return _stated(process, lease_id)
    except (_UnseenError, OSError):
        return ""


@functools.lru_cache(maxsize=4096)
def _stated(process: Process, lease_id: str) -> str:
    """Return what a process of the lease was told of its framework caps; empty if there are none."""
    if process.is_alive() is not True:
        raise _UnseenError
    with Path(f"/proc/{process.pid}/environ").open("rb") as file:
        content = file.read(_MOST).decode(errors="replace")
    told = dict(each.partition("=")[::2] for each in content.split("\0"))
    # Asked again: whoever has the pid still has had it all the time.
    if told.get("GPU_POOL_LEASE") != lease_id or process.is_alive() is not True:
        raise _UnseenError
    found = _STATED.match(told.get("GPU_POOL_ENFORCED", ""))
    return found[1] if found else ""
