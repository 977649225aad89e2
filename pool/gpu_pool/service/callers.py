"""Who asks over the Unix socket, and which process they mean: known from the connection and from /proc.

Nothing that is said over a connection is believed. A caller names a process by a pid, a start time and
the pid namespace in which it sees it; the process must be there, and be the caller's.
"""

from __future__ import annotations

import errno
import functools
import os
import pwd
import socket
import struct
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from tornado.httputil import HTTPServerRequest

from gpu_pool.audit.callers import Caller, Peer
from gpu_pool.names import name_of
from gpu_pool_client import BadRequest, NotAllowed, Process
from gpu_pool_client import _procfs as procfs
from gpu_pool_client._processes import boot_id, owner_of, pid_namespace

#: struct ucred of unix(7): pid, uid, gid. All as they are in this process's namespaces.
_CREDENTIALS: Final = struct.Struct("3i")
#: SO_PEERPIDFD of Linux (asm-generic/socket.h): a pidfd of the peer.
_PEER_HANDLE: Final = 77


class Identify(Protocol):
    """Finds out who makes a request.

    ``fresh`` forbids to rely on what was found out before; only with ``is_for_services``
    may it be a service of the Hub's. Raises ``NotAllowed`` for nobody in particular.
    """

    async def __call__(
        self, request: HTTPServerRequest, *, fresh: bool, is_for_services: bool = False
    ) -> Caller:
        """Return who makes this request."""

    async def is_away(self) -> bool:
        """Whether whoever says who asks answers nobody at the moment."""


def peer_of(connection: socket.socket) -> Peer:
    """Return who has connected, by SO_PEERCRED."""
    data = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(data)
    process, contained, owner = Process.of(pid), is_contained(pid), owner_of(pid)
    # Asked after all else: whoever has the pid still has had it all the time.
    if owner != uid or not _still_has_its_pid(connection):
        return Peer(uid, None, contained=True)
    return Peer(uid, process, contained)


def _still_has_its_pid(connection: socket.socket) -> bool:
    """Whether the process that has connected is there, and its pid no later process's.

    True where the system cannot tell, before Linux 6.5.
    """
    try:
        handle = connection.getsockopt(socket.SOL_SOCKET, _PEER_HANDLE)
    except OSError as error:
        return error.errno == errno.ENOPROTOOPT
    try:
        # pidfd_open(2): after the process has been reaped this is -1.
        content = Path(f"/proc/self/fdinfo/{handle}").read_bytes()
        return procfs.words_of(content, b"Pid") != [b"-1"]
    finally:
        os.close(handle)


def is_contained(pid: int) -> bool:
    """Whether a process runs in a pid namespace below this one's; True where that cannot be told."""
    return len(namespaced_pids(pid)) != 1


def namespaced_pids(pid: int) -> list[int]:
    """Return a process's pids, from the namespace of ``/proc`` down to its own (proc(5): NSpid)."""
    return [int(each) for each in procfs.status(pid, b"NSpid")]


#: Lines of OWNER:FIRST:COUNT; the owner is a name or a uid.
FILE: Final = Path("/etc/subuid")
#: Seconds for which the name of a uid holds, which may become somebody else's.
_NAME_HOLDS: Final = 60.0
#: Names that are remembered before all are forgotten.
_MOST_NAMES: Final = 4096


class AccountNames:
    """What the system calls the users of uids, each remembered for a minute. Used by any thread.

    That there is no name is never remembered: the directory of users may have failed to answer, and who
    asks would be somebody else for as long.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        account: Callable[[int], str | None] | None = None,
        subordinates: Path = FILE,
    ) -> None:
        """``account`` finds the name of a uid; ``subordinates`` is a file as subuid(5) describes it."""
        self._clock, self._account, self._subordinates = clock, account or _account, subordinates
        #: The names of uids, by where they were found, and until when they hold.
        self._known: dict[tuple[int, str], tuple[str, float]] = {}

    def user(self, uid: int) -> str:
        """Return the name of a user; for a uid without one its :func:`subordinate_owner`, or ``uid-N``."""
        return self.account(uid) or self._remembered(uid, "subordinate", self._subordinate) or f"uid-{uid}"

    def account(self, uid: int) -> str | None:
        """Return the name of a user who has one."""
        return self._remembered(uid, "account", self._account)

    def _subordinate(self, uid: int) -> str | None:
        return subordinate_owner(uid, self._subordinates)

    def _remembered(self, uid: int, kind: str, find: Callable[[int], str | None]) -> str | None:
        """Return the name that was found lately, or find it."""
        name, until = self._known.get((uid, kind), ("", 0.0))
        if self._clock() < until:
            return name
        found = find(uid)
        if found is not None:
            if len(self._known) >= _MOST_NAMES:
                self._known.clear()
            self._known[uid, kind] = found, self._clock() + _NAME_HOLDS
        return found


def _account(uid: int) -> str | None:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return None


#: Those of this process: the directory of users is the same for all who ask.
ACCOUNTS: Final = AccountNames()


class PeerName(NamedTuple):
    """What a pool calls the user of a process at the other end of a socket. See ``Caller``."""

    user: str
    mark: str
    account: str | None = None


class PeerIdentity:
    """Knows callers by the credentials of their connection (see ``http_server.PeerServer``).

    ``named`` returns the user and the mark of the owner of a process, by default as ``accounts`` has it.
    """

    def __init__(
        self,
        own_uid: int,
        admins: Collection[str],
        named: Callable[[Peer], PeerName] | None = None,
        accounts: AccountNames = ACCOUNTS,
    ) -> None:
        self._own_uid = own_uid
        self._admins = frozenset(admins)
        self._accounts = accounts
        self._named = named or self._of_system

    async def __call__(
        self,
        request: HTTPServerRequest,
        *,
        fresh: bool,  # noqa: ARG002 - it always is
        is_for_services: bool = False,  # noqa: ARG002 - none has a process of its own here
    ) -> Caller:
        """Return who makes this request."""
        assert request.connection is not None
        return self.caller(request.connection.context.address)  # type: ignore[attr-defined]

    async def is_away(self) -> bool:
        """Return False: the system always says it."""
        return False

    def caller(self, peer: Peer) -> Caller:
        """Return what a peer is to the pool.

        Root in a container is neither an administrator nor root: it shares root's
        uid, and not what root holds.
        """
        if peer.process is None:
            raise NotAllowed(
                "The pool's service cannot see the process that is asking: it has ended, "
                "or the service runs in a container.",
                "Run the service outside the container, where it sees all processes.",
            )
        if peer.contained and peer.uid in (0, self._own_uid):
            return Caller(f"uid-{peer.uid}", False, f"c{peer.uid}", peer.process, peer)
        user, mark, account = self._named(peer)
        # What an administrator runs as another uid, in a container for instance, is none.
        is_named = self._accounts.account(peer.uid) is not None and user in self._admins
        is_admin = not peer.contained and (peer.uid in (0, self._own_uid) or is_named)
        return Caller(user, is_admin, mark, peer.process, peer, account=account)

    def _of_system(self, peer: Peer) -> PeerName:
        return PeerName(name_of(self._accounts.user(peer.uid)), str(peer.uid))


_MOST_BYTES: Final = 1024 * 1024
#: Uids of people. What belongs to a system's account (root's containers, Docker's ``dockremap``)
#: runs for many people, who must not be one user, and least of all root.
_PEOPLE: Final = range(1000, 65534)


def subordinate_owner(uid: int, file: Path = FILE) -> str | None:
    """Return the name of the person whose subordinate uid it is.

    None if it is nobody's, a system account's or claimed by several, or where the file cannot be read.
    """
    owners = {owner for owner, ids in _ranges(file) if uid in ids}
    return _person(owners.pop()) if len(owners) == 1 else None


def _ranges(file: Path) -> Iterator[tuple[str, range]]:
    """Yield each owner and range; lines that are none are passed over, as the system's tools do."""
    try:
        with file.open("rb") as opened:
            content = opened.read(_MOST_BYTES)
    except OSError:
        return
    for line in procfs.lines_of(content):
        owner, _, numbers = line.decode(errors="replace").partition(":")
        first, _, count = numbers.partition(":")
        if all(number.isascii() and number.isdecimal() and len(number) <= 10 for number in (first, count)):
            yield owner, range(int(first), int(first) + int(count))


def _person(owner: str) -> str | None:
    try:
        found = pwd.getpwuid(int(owner)) if owner.isdecimal() else pwd.getpwnam(owner)
    except (KeyError, ValueError, OverflowError):
        return None
    return found.pw_name if found.pw_uid in _PEOPLE else None


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
        raise BadRequest(f"Process {claim.pid} is not a process of this machine's current boot.", _REMEDY)
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
        raise NotAllowed(f"Process {claim.pid} is outside your container.", _REMEDY)
    if not claim.is_alive():
        raise BadRequest(f"There is no process {claim.pid} that started at that time; it has ended.", _REMEDY)
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
