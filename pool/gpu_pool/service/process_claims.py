"""Which process a caller means that wants to tie a lease to it.

A caller says a pid, a start time, and the pid namespace in which it sees the
process. None of it is believed: the process must be there, and be the caller's.
What is said over TCP cannot be found out, and is passed over.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator
from typing import Final

from gpu_pool.service.callers import Caller, Peer, namespaced_pids
from gpu_pool_client import BadRequest, NotAllowed, Process, procfs
from gpu_pool_client.processes import boot_id, owner_of, pid_namespace

_REMEDY: Final = "Name a running process of yours, and start it before you attach it."


@functools.lru_cache(maxsize=4096)
def verify_process(caller: Caller, claim: Process) -> Process:
    """Return the process that a caller claims, as this service sees it. Reads ``/proc``.

    Raises ``BadRequest`` if there is no such process, and ``NotAllowed`` if it
    is not the caller's. What was found is remembered, since a process may be
    named once more after its end, which the pool then sees by itself.
    """
    if caller.peer is None:  # nothing is known of it, so nothing is done to it
        return caller.process
    if claim.boot != boot_id():
        raise BadRequest(f"Process {claim.pid} is not of this machine, or of its last start.", _REMEDY)
    if claim == caller.process:
        found = claim
    elif claim.namespace == pid_namespace():
        found = _of_this_namespace(caller.peer, claim)
    else:
        found = _of_another(caller, caller.peer, claim)
    if not (caller.is_admin or owner_of(found.pid) == caller.peer.uid):
        raise NotAllowed(f"Process {claim.pid} is not yours.", _REMEDY)
    return found


def _of_this_namespace(peer: Peer, claim: Process) -> Process:
    if peer.contained:
        raise NotAllowed(f"Process {claim.pid} is outside of your container.", _REMEDY)
    if not claim.is_alive():
        raise BadRequest(f"There is no process {claim.pid} that started when you say; it has ended.", _REMEDY)
    return claim


def _of_another(caller: Caller, peer: Peer, claim: Process) -> Process:
    """Find out which process of this namespace is meant, among the caller's own and their companions."""
    for pid in (caller.process.pid, *_pids_of(peer.uid)):
        if (found := _match(pid, claim)) is not None:
            return found
    raise BadRequest(
        f"There is no process {claim.pid} of yours in the container that you name, or it cannot be seen.",
        _REMEDY,
    )


def _pids_of(uid: int) -> Iterator[int]:
    return (pid for pid in procfs.pids() if owner_of(pid) == uid)


def _match(pid: int, claim: Process) -> Process | None:
    """Return the process with that pid here, if it is the one claimed there."""
    pids = namespaced_pids(pid)
    if len(pids) < 2 or pids[-1] != claim.pid or _namespace(pid) != claim.namespace:
        return None
    found = Process.of(pid)
    return found if found is not None and found.start == claim.start else None


def _namespace(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/ns/pid")
    except OSError:  # it has ended, or is another user's, and we are not root
        return None
