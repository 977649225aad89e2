"""What is known of tokens, and in which order the Hub is asked about those that are not.

Whoever can reach the service can send it tokens that they have made up, as many as they like, and for
each the Hub must be asked. So tokens that the Hub has known lately are asked about beside all others,
and never after them; of the others only a few are asked about at once, by address in rotation.
Tokens themselves are not kept: all is by their digests.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from gpu_pool_client import OverQuota, PoolUnreachable

T = TypeVar("T")

#: Seconds for which a token that the Hub does not know is refused without asking again.
_REFUSED_FOR: Final = 5.0
#: Seconds for which a token that the Hub has known is not taken for a made-up one.
_KNOWN_FOR: Final = 3_600.0
#: Tokens of either kind that are remembered; those that were used longest ago are forgotten first.
_MOST_KNOWN: Final = 4_096


def digest_of(token: str) -> bytes:
    """Return what stands for a token in memory."""
    return hashlib.sha256(token.encode()).digest()


@dataclass(frozen=True, slots=True)
class Client:
    """Whose questions are counted together, and whether nobody waits for the answer any more."""

    address: Hashable = ""
    is_gone: Callable[[], bool] = lambda: False


class TooManyUnknown(OverQuota):
    """So many requests of one address wait to be known that one more would be too many."""

    #: Seconds after which it is worth trying again.
    retry_after: Final = 1

    def __init__(self, address: Hashable, most: int) -> None:
        super().__init__(
            f"{most} requests from {address} with unknown tokens are waiting for the JupyterHub to identify "
            "them.",
            f"Try again in {self.retry_after} second. Tokens that were used lately are not affected.",
        )


class KnownTokens(Generic[T]):
    """Whose tokens are, as the Hub has said it lately, and which it did not know. Used in one event loop."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._known: OrderedDict[bytes, tuple[float, T]] = OrderedDict()
        self._refused: OrderedDict[bytes, float] = OrderedDict()

    def owner(self, digest: bytes) -> tuple[float, T] | None:
        """Return the owner of a token that was known lately, and how many seconds ago that was asked."""
        found = self._known.get(digest)
        if found is None:
            return None
        age = self._clock() - found[0]
        if age > _KNOWN_FOR:
            del self._known[digest]
            return None
        self._known.move_to_end(digest)
        return age, found[1]

    def is_refused(self, digest: bytes) -> bool:
        """Whether the Hub did not know the token a moment ago."""
        return self._refused.get(digest, 0.0) > self._clock()

    def learn(self, digest: bytes, owner: T) -> None:
        """Take note of whose token it is."""
        self._refused.pop(digest, None)
        self._known[digest] = self._clock(), owner
        self._known.move_to_end(digest)
        if len(self._known) > _MOST_KNOWN:
            self._known.popitem(last=False)

    def refuse(self, digest: bytes) -> None:
        """Take note that it is nobody's."""
        self._known.pop(digest, None)
        self._refused[digest] = self._clock() + _REFUSED_FOR
        self._refused.move_to_end(digest)
        if len(self._refused) > _MOST_KNOWN:
            self._refused.popitem(last=False)


class WaitingClients:
    """Who waits, by address: of each at most ``most``. Used in one event loop."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._of: dict[Hashable, dict[asyncio.Future[None], Client]] = {}

    def add(self, client: Client) -> asyncio.Future[None]:
        """Return what a client is to await, which whoever lets it go on settles; then :meth:`remove` it.

        Raises ``TooManyUnknown`` where too many of its address wait.
        """
        if len(self._of.get(client.address, ())) >= self._most:
            self._forget_the_gone(client.address)
        if len(self._of.get(client.address, ())) >= self._most:
            raise TooManyUnknown(client.address, self._most)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._of.setdefault(client.address, {})[turn] = client
        return turn

    def remove(self, turn: asyncio.Future[None], client: Client) -> None:
        """Forget one that waits no more."""
        waiting = self._of.get(client.address, {})
        waiting.pop(turn, None)
        if not waiting:
            self._of.pop(client.address, None)

    def _forget_the_gone(self, address: Hashable) -> None:
        for turn, client in list(self._of[address].items()):
            if not _is_awaited(turn, client):
                self.remove(turn, client)


class FairSemaphore:
    """Lets so many in at once. Who waits is let in by address in rotation, the first of each first.

    Who waits is counted among ``waiting``. Used in one event loop.
    """

    def __init__(self, at_once: int, waiting: WaitingClients) -> None:
        self._free = at_once
        self._waiting = waiting
        #: Addresses in the order in which they are next.
        self._turns: OrderedDict[Hashable, dict[asyncio.Future[None], Client]] = OrderedDict()

    async def acquire(self, client: Client) -> None:
        """Return when the client is let in, which lasts until :meth:`release`.

        Raises ``TooManyUnknown`` where too many of its address wait.
        """
        if self._free:
            self._free -= 1
            return
        turn = self._waiting.add(client)
        self._turns.setdefault(client.address, {})[turn] = client
        try:
            await turn
        except asyncio.CancelledError:
            # It was let in just then; one whose client has gone was only told so.
            if turn.done() and not turn.cancelled() and turn.exception() is None:
                self.release()
            raise
        finally:
            self._waiting.remove(turn, client)
            self._forget(turn, client)

    def release(self) -> None:
        """Let in the next one."""
        while self._turns:
            address, turns = next(iter(self._turns.items()))
            turn, client = next(iter(turns.items()))
            self._turns.move_to_end(address)
            self._forget(turn, client)
            if _is_awaited(turn, client):
                self._waiting.remove(turn, client)
                turn.set_result(None)
                return
        self._free += 1

    def _forget(self, turn: asyncio.Future[None], client: Client) -> None:
        turns = self._turns.get(client.address, {})
        turns.pop(turn, None)
        if not turns:
            self._turns.pop(client.address, None)


def _is_awaited(entry: asyncio.Future[None], client: Client) -> bool:
    """Whether somebody still waits to be let in. Whoever waits for a client that has gone is told so."""
    if not entry.done() and client.is_gone():
        entry.set_exception(PoolUnreachable("The client has gone."))
    return not entry.done()
