"""Follows the pods that are on their way to run: what troubles them, for how long, and where they queue.

A pod says little of a volume that cannot be mounted or a GPU that cannot be
prepared: that is in events. They are asked for only while a pod takes longer
than most, once for all pods of a namespace. Positions in Kueue's queues are
asked for only while somebody waits there.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from gpu_pool.cluster import kueue
from gpu_pool.cluster.api import Api, ApiAway, ApiRefused
from gpu_pool.cluster.dialects import Manifest
from gpu_pool.cluster.dialects.objects import mapping
from gpu_pool.cluster.kernel_pods import KernelPods, KernelStart
from gpu_pool.cluster.pod_states import PodFailureCause
from gpu_pool_client._durations import format_duration
from gpu_pool_client._retries import Backoff

#: Seconds between two looks, and for which a pod may be on its way before its events are asked for.
_EVERY: Final = 3.0
_SOON: Final = 3.0
#: Seconds for which an event is believed: a kubelet that goes on trying says so every two minutes at most.
_BELIEVED: Final = 150.0
#: Seconds until a pod that its node refused is made again, the first time; they double with each further one,
_FIRST_PAUSE: Final = 1.0
#: up to so many.
_LONGEST_PAUSE: Final = 30.0
#: Warnings about pods, and no other events.
_SELECTOR: Final = "type=Warning,involvedObject.kind=Pod"
_FORBIDDEN: Final = 403


@dataclass(slots=True)
class _Wait:
    """One start that is under way."""

    since: float
    #: When its pod is made again if its machine has refused it, and how long it is waited for each time.
    again_at: float = 0.0
    backoff: Backoff = field(default_factory=lambda: Backoff(_FIRST_PAUSE, _LONGEST_PAUSE))


@dataclass(frozen=True, slots=True)
class _Told:
    """An event, when it was seen first in this form, and what form that was."""

    cause: PodFailureCause
    version: str
    at: float


class PodStarts:
    """The starts of one pool's kernels."""

    def __init__(self, api: Api, kernels: KernelPods, log: logging.Logger, within: float) -> None:
        """``within`` is how many seconds a pod has in which to run."""
        self._api, self._kernels, self._log, self._within = api, kernels, log, within
        self._waits: dict[KernelStart, _Wait] = {}
        #: By the uid of the pod.
        self._told: dict[str, _Told] = {}
        self._refused = False

    async def run(self) -> None:
        """Look for as long as the service runs."""
        while True:
            try:
                await self.evaluate()
            except Exception:  # noqa: BLE001 - one odd event must not keep the others from being read
                self._log.exception("The pods that are starting could not be looked at")
            await asyncio.sleep(_EVERY)

    async def evaluate(self) -> None:
        """Tell what troubles pods and which of them wait for too long; make again what was refused."""
        now, starts = time.monotonic(), self._kernels.starts()
        self._waits = {each: self._waits.get(each) or _Wait(now) for each in starts}
        slow = {each.namespace for each, wait in self._waits.items() if now >= wait.since + _SOON}
        for namespace in sorted(slow):
            await self._read_events(namespace)
        uids = set(starts.values())
        self._told = {uid: told for uid, told in self._told.items() if uid in uids}
        late = {starts[each] for each, wait in self._waits.items() if now >= wait.since + self._within}
        self._kernels.tell_starts(
            {uid: told.cause for uid, told in self._told.items() if now < told.at + _BELIEVED},
            late,
            format_duration(self._within),
        )
        for start, wait in self._waits.items():
            if starts[start] not in late and now >= wait.again_at and await self._kernels.make_again(start):
                wait.again_at = now + wait.backoff.pause()

    async def _read_events(self, namespace: str) -> None:
        path, query = f"/api/v1/namespaces/{namespace}/events", {"fieldSelector": _SELECTOR}
        try:
            found = await self._api.list(path, query)
        except ApiAway:
            return
        except ApiRefused as refused:  # no right to ask: what a pod waits for is told as far as it says it
            if not self._refused:
                self._log.warning(
                    "The reasons why pods do not start are known only in part: %s%s",
                    refused,
                    ". Give the service the rights of examples/kubernetes/service/rbac.yaml"
                    if refused.status == _FORBIDDEN
                    else "",
                )
            self._refused = True
            return
        self._refused = False
        newest: dict[str, Mapping[str, object]] = {}
        for event in found.get("items") or ():
            uid = str(mapping(event.get("involvedObject")).get("uid"))
            if uid not in newest or _number(event) > _number(newest[uid]):
                newest[uid] = event
        for uid, event in newest.items():
            self._note(uid, event)

    def _note(self, uid: str, event: Mapping[str, object]) -> None:
        version, known = str(_number(event)), self._told.get(uid)
        if known is None or known.version != version:
            cause = PodFailureCause(
                str(event.get("reason") or ""), " ".join(str(event.get("message") or "").split())
            )
            self._told[uid] = _Told(cause, version, time.monotonic())


def _number(event: Mapping[str, object]) -> int:
    version = str(mapping(event.get("metadata")).get("resourceVersion", ""))
    return int(version) if version.isdecimal() else 0


#: Seconds between two looks, of one request for each queue in which somebody waits.
_POSITIONS_EVERY: Final = 10.0


class KueuePositions:
    """Follows the positions of one pool's kernels in Kueue's queues."""

    def __init__(self, api: Api, kernels: KernelPods, log: logging.Logger) -> None:
        self._api, self._kernels, self._log = api, kernels, log
        self._refused = False
        #: The version in which positions were answered last.
        self._version = kueue.VERSIONS[0]

    async def run(self) -> None:
        """Look for as long as the service runs."""
        while True:
            try:
                await self.refresh()
            except Exception:  # noqa: BLE001 - the next look tries again
                self._log.exception("The positions in Kueue's queues could not be read")
            await asyncio.sleep(_POSITIONS_EVERY)

    async def refresh(self) -> None:
        """Tell everybody who waits where that is, as far as the cluster says it."""
        found: dict[str, int] = {}
        for namespace, queue in sorted(self._kernels.queues()):
            found.update(await self._read_queue(namespace, queue))
        self._kernels.set_positions(found)

    async def _read_queue(self, namespace: str, queue: str) -> dict[str, int]:
        try:
            answer = await self._ask(namespace, queue)
        except ApiAway:
            return {}
        except ApiRefused as refused:  # no such API, or no right to ask: the wait is told without a position
            if not self._refused:
                self._log.warning("Positions in Kueue's queues are not available: %s", refused)
            self._refused = True
            return {}
        self._refused = False
        # What is no object has no positions, and must not keep those of other queues from being told.
        return dict(kueue.positions(mapping(answer)))

    async def _ask(self, namespace: str, queue: str) -> Manifest:
        """Return what is answered in the version of last time, or in another if that is not served."""
        *first, last = sorted(kueue.VERSIONS, key=lambda each: each != self._version)
        for version in first:
            with suppress(ApiRefused, ApiAway):
                return await self._ask_as(version, namespace, queue)
        return await self._ask_as(last, namespace, queue)

    async def _ask_as(self, version: str, namespace: str, queue: str) -> Manifest:
        answer: Manifest = await self._api.ask("GET", kueue.pending_path(version, namespace, queue))
        self._version = version
        return answer
