"""The limits that a process keeps by itself, as the pool states them.

Where nothing but accounting holds a slice, what runs on it may limit itself.
Whoever launches a process on a slice knows which frameworks take a limit there,
and states it in the process's environment (``framework_caps.with_caps``). The
system shows with which one a process was started. It may have changed it since,
or have written it itself: a limit of this kind is cooperative, and called so.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable
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
HIDDEN_FOR: Final = 5.0
#: Processes that are remembered.
_MOST_KNOWN: Final = 4096


class _UnseenError(Exception):
    """The process cannot be seen, or was not launched on this lease, or not yet."""


def stated_by(process: Process, lease_id: str) -> str:
    """Return what a process of the lease was told of its framework caps; empty if there are none.

    Raises ``OSError``, or an error of its own, where the process cannot be seen, or is not the lease's.
    """
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


class OwnCaps:
    """What is known of the caps with which the processes of leases were started. Used by any thread.

    Parameters
    ----------
    stated
        Reads what a process states; see :func:`stated_by`.
    clock
        Seconds, which never jump.
    """

    def __init__(
        self,
        stated: Callable[[Process, str], str] = stated_by,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        #: What a process was started with does not change.
        self._stated = functools.lru_cache(maxsize=_MOST_KNOWN)(stated)
        self._clock = clock
        #: When a process of a lease was last not seen, counted in ``HIDDEN_FOR``.
        self._hidden: dict[tuple[Process, str], int] = {}

    def described(self, lease: Lease) -> Lease:
        """State in a held lease that framework caps hold its memory, where its process was started with them.

        Nothing is said of a limit that is firmer, or of a process that cannot be seen: a
        kernel in a pod has none here.
        """
        is_limited = lease.enforcement.memory.strength is not Strength.NONE
        if (
            lease.state is not LeaseState.HELD
            or lease.process is None
            or is_limited
            or lease.terms.in_pod
            or not (words := self._words(lease.process, lease.id))
        ):
            return lease
        memory = Limit(Strength.COOPERATIVE, words)
        return replace(lease, enforcement=replace(lease.enforcement, memory=memory))

    def _words(self, process: Process, lease_id: str) -> str:
        """Return what a process states; empty if it cannot be seen, or could not just now."""
        which, now = (process, lease_id), int(self._clock() // HIDDEN_FOR)
        if self._hidden.get(which) == now:
            return ""
        try:
            return self._stated(process, lease_id)
        except (_UnseenError, OSError):
            if len(self._hidden) >= _MOST_KNOWN:
                self._hidden.clear()
            self._hidden[which] = now
            return ""
