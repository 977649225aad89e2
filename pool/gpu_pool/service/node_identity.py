"""Who reports what is used on a node: its agent, by a token that the cluster gave it and knows to be its.

The cluster says of such a token which node it belongs to, and nobody else does: nothing that an agent says of
itself is believed. Whoever can reach the service can send it tokens that they have made up, so only some
are asked about at once, by address in rotation, see :mod:`gpu_pool.service.tokens`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from typing import Final

from tornado.httputil import HTTPServerRequest

from gpu_pool.audit.callers import Caller
from gpu_pool.names import name_of
from gpu_pool.pool.backend import NodeAgents
from gpu_pool.service.connections import client_of
from gpu_pool.service.heartbeats import remote_process
from gpu_pool.service.hub import UnknownToken
from gpu_pool.service.tokens import FairSemaphore, KnownTokens, WaitingClients, digest_of
from gpu_pool_client import NotAllowed, PoolUnreachable

#: Seconds for which the cluster's answer about a token holds: so long an agent that has been deleted may be
#: believed.
_HOLDS: Final = 30.0
#: Questions to the cluster at a time.
_AT_ONCE: Final = 4
#: Requests of one address that may wait for theirs.
_MOST_WAITING: Final = 64
#: A token of the cluster's, which is longer than one of a JupyterHub.
_TOKEN: Final = re.compile(r"bearer[ ]+([!-~]{1,8192})", re.IGNORECASE)
#: What they are called in the log. No user is: a "/" in a name of the Hub's is written otherwise.
_NAMED: Final = "node/{}"
_REMEDY: Final = (
    "See the log of the node agent, and whether c.KubernetesSettings.node_agent names its account."
)


class NodeIdentity:
    """Knows node agents by their token; see ``Identify``."""

    def __init__(self, agents: NodeAgents, boot: str, clock: Callable[[], float] = time.monotonic) -> None:
        """``boot`` is that of leases, see ``Backend.boot``."""
        self._agents, self._boot = agents, boot
        self._tokens: KnownTokens[str] = KnownTokens(clock)
        self._asking = FairSemaphore(_AT_ONCE, WaitingClients(_MOST_WAITING))

    async def __call__(
        self,
        request: HTTPServerRequest,
        *,
        fresh: bool,  # noqa: ARG002 - a node's agent says the same again in a moment
        is_for_services: bool = False,  # noqa: ARG002 - nobody else may ask here
    ) -> Caller:
        """Return who makes this request, by its ``Authorization`` header alone."""
        given = _TOKEN.fullmatch(request.headers.get("Authorization", "").strip())
        if given is None:
            raise UnknownToken("The request has no token of a node agent.", _REMEDY)
        node = await self._node(given[1], request)
        name = name_of(_NAMED.format(node))
        return Caller(name, False, name, remote_process(name, "", "", self._boot), node=node)

    async def is_away(self) -> bool:
        """Return False: no lease depends on an agent."""
        return False

    async def _node(self, token: str, request: HTTPServerRequest) -> str:
        digest = digest_of(token)
        found = self._known(digest)
        if found:
            return found
        client = client_of(request)
        await self._asking.acquire(client)
        try:
            # Another request with that token may have been answered meanwhile.
            return self._known(digest) or await self._learn(token, digest)
        finally:
            self._asking.release()

    def _known(self, digest: bytes) -> str:
        """Return the node of a token that was known a moment ago. Raises for one that was not."""
        if self._tokens.is_refused(digest):
            raise _unknown()
        found = self._tokens.owner(digest)
        return found[1] if found is not None and found[0] < _HOLDS else ""

    async def _learn(self, token: str, digest: bytes) -> str:
        try:
            node = await self._agents.node_of(token)
        except PoolUnreachable:
            raise
        except NotAllowed as error:
            self._tokens.refuse(digest)
            raise UnknownToken(error.message, error.remedy or _REMEDY) from error
        self._tokens.learn(digest, node)
        return node


def _unknown() -> UnknownToken:
    return UnknownToken("The cluster did not know this token as a node agent's a moment ago.", _REMEDY)
