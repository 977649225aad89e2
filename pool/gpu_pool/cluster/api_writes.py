"""Writes to the API server that are tried until there is an answer, as far as that makes sense."""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any, Final

from gpu_pool.cluster.api import Api, ApiAway, ApiRefused
from gpu_pool.cluster.dialects import Manifest
from gpu_pool.cluster.dialects.pod_troubles import violation
from gpu_pool_client import NotAllowed, PoolUnreachable

#: Seconds for which a creation is tried again while the API server does not answer.
_PATIENCE: Final = 20.0
_FIRST_PAUSE, _LONGEST_PAUSE = 0.2, 10.0
#: Pods that are being deleted at the same time; the others wait for their turn here.
_AT_ONCE: Final = 16
_NOT_FOUND, _CONFLICT = 404, 409


class ApiWriter:
    """Creates and deletes objects."""

    def __init__(self, api: Api, log: logging.Logger) -> None:
        self._api, self._log = api, log
        self._turns = asyncio.Semaphore(_AT_ONCE)

    async def create(self, path: str, body: Manifest) -> Any:
        """Create an object and return it; None if there is one of that name.

        Raises ``NotAllowed`` with the cluster's words where it refuses, and ``PoolUnreachable``.
        """
        return await self._retrying("POST", path, body)

    async def read(self, path: str) -> Any:
        """Return an object, None if it is not there. Raises as :meth:`create` does."""
        return await self._retrying("GET", path)

    async def delete(self, pod: Manifest) -> bool:
        """Delete a pod, however long it takes until there is an answer; return whether it is done."""
        metadata, pause = pod["metadata"], _FIRST_PAUSE
        path = f"{path_of(metadata['namespace'], 'pods')}/{metadata['name']}"
        body = {"preconditions": {"uid": metadata["uid"]}, "propagationPolicy": "Background"}
        while True:
            try:
                async with self._turns:
                    await self._api.ask("DELETE", path, body)
            except ApiRefused as refused:  # noqa: PERF203 - what is waited for takes seconds
                if refused.status in (_NOT_FOUND, _CONFLICT):  # the latter: another one has its name
                    return True
                self._log.error("The pod %s cannot be deleted: %s", metadata["name"], refused)
                return False
            except ApiAway:
                await asyncio.sleep(pause)
                pause = min(2 * pause, _LONGEST_PAUSE)
            else:
                return True

    async def _retrying(self, method: str, path: str, body: Manifest | None = None) -> Any:
        give_up_at, pause = time.monotonic() + _PATIENCE, _FIRST_PAUSE
        while True:
            try:
                return await self._api.ask(method, path, body)
            except ApiRefused as refused:
                if (method, refused.reason) in (("POST", "AlreadyExists"), ("GET", "NotFound")):
                    return None
                if refused.reason != "Conflict":  # as of a quota that another one wrote at the same time
                    self._log.error(
                        "The cluster refused %s %s: %s", method, path, _for_administrator(refused)
                    )
                    raise _refusal(refused) from refused
                why: Exception = refused
            except ApiAway as away:
                why = away
            if time.monotonic() > give_up_at:
                raise PoolUnreachable(
                    "The cluster does not answer at the moment, so the kernel could not be started.",
                    "Your slice is kept. Try again in a minute.",
                ) from why
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)


def path_of(namespace: str, kind: str) -> str:
    """Return where objects of the core group are."""
    return f"/api/v1/namespaces/{namespace}/{kind}"


def _refusal(refused: ApiRefused) -> NotAllowed:
    """Say in words what the cluster refused: a quota, a policy, or a right that the service lacks."""
    if violation(refused.message):
        return NotAllowed(
            "The security rules of the cluster do not allow this kernel.",
            "Tell the administrator: the log of the pool's service has what to set.",
        )
    return NotAllowed(
        f"The cluster refused to start the kernel: {' '.join(refused.message.split())[:400]}",
        "Tell the administrator: the log of the pool's service has the same.",
    )


def _for_administrator(refused: ApiRefused) -> str:
    """Return the cluster's own words, with what to do about them where that is known."""
    found = violation(refused.message)
    if found is None:
        return str(refused)
    return (
        f"Pod Security ({found.level}) has this against the kernel's pod: {found.rules}. As it is made here, "
        "the pod keeps all of its rules; something in the cluster has changed it, such as the webhook of a "
        "system that shares GPUs. Let that leave out what is named, or label the namespace "
        "pod-security.kubernetes.io/enforce with a level that allows it."
    )
