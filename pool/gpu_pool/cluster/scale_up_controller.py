"""Asking for more nodes: placeholders for those who wait, and what the autoscaler says of them.

What is asked for is read from the cluster, so a service that starts anew goes on where the last one was.
How long starts took is in the store.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Coroutine, Sequence
from datetime import datetime
from typing import Any, Final

from gpu_pool.cluster.api import Api, ApiAway, ApiRefused, ApiWriter, path_of
from gpu_pool.cluster.dialects import Manifest, label_value
from gpu_pool.cluster.dialects.objects import listing, mapping
from gpu_pool.cluster.nodes import NodeGroup
from gpu_pool.cluster.scale_up import (
    GROUP_LABEL,
    AutoscalerAnswer,
    Demand,
    Growable,
    NodeStart,
    PlaceholderShape,
    answer,
    demand,
    empty,
    group_for,
    placeholder,
    told,
    usual,
)
from gpu_pool.cluster.settings import KubernetesSettings
from gpu_pool.cluster.view import ClusterView
from gpu_pool.policy.queue_state import Rules
from gpu_pool.store import leases, records
from gpu_pool.store.thread import StoreThread
from gpu_pool_client import GpuPoolError, SliceRequest

#: Seconds between two looks at who waits.
_EVERY: Final = 1.0
#: Seconds between two questions what the autoscaler says, of one request for each placeholder.
_EVENTS_EVERY: Final = 5.0
#: So many of those who wait are looked at: more nodes than for these are not started at once.
_FOREMOST: Final = 500
_NOTHING: Final = AutoscalerAnswer.NOTHING, ""


class ScaleUpController:
    """Keeps as many placeholders as nodes are needed. Used in one event loop."""

    #: Where the leases are; set before it runs.
    store: StoreThread

    def __init__(
        self,
        api: Api,
        writer: ApiWriter,
        view: ClusterView,
        settings: KubernetesSettings,
        rules: Rules,
        log: logging.Logger,
    ) -> None:
        self._api, self._writer, self._view, self._settings = api, writer, view, settings
        self._rules, self._log = rules, log
        self._groups = {group.name: group for group in view.groups}
        self._demand = Demand()
        #: What the autoscaler last said, by the uid of a placeholder.
        self._answers: dict[str, tuple[AutoscalerAnswer, str]] = {}
        self._asked_at = 0.0
        #: Placeholders that are being deleted, and those whose node has come, by uid.
        self._ended: set[str] = set()
        self._come: set[str] = set()
        #: By group: which nodes had GPUs at the last look, and how long a start takes.
        self._working: dict[str, frozenset[str]] = {}
        self._usual: dict[str, float] = {}
        self._warned: set[tuple[str, str]] = set()
        self._refused = False

    async def run(self) -> None:
        """Look for as long as the service runs."""
        while True:
            try:
                await self.ask_for_nodes()
            except Exception:  # noqa: BLE001 - one odd node must not keep the pool from asking for others
                self._log.exception("Finding out which nodes are needed failed")
            await asyncio.sleep(_EVERY)

    async def ask_for_nodes(self) -> None:
        """Ask for the nodes that are needed now, and for no others."""
        line = await self.store.run(leases.queue_head, _FOREMOST)
        self._demand = demand(line, self._growable(), self._rules)
        # What costs money and nobody needs goes first, and what one group is refused holds up no other one.
        for group in self._groups.values():
            await self._try(group, self._end_surplus(group, self._wanted(group)))
        for group in self._groups.values():
            await self._try(group, self._ask_for_missing(group, self._wanted(group)))
        await self._listen()

    def outlook(self, number: int | None) -> str:
        """Say to somebody who waits, by the lease's number, how their machine comes; empty if none does."""
        name = None if number is None else self._demand.groups.get(number)
        return "" if name is None else self._told(self._groups[name])

    def prospect(self, request: SliceRequest) -> str:
        """Say the same to somebody who does not wait yet."""
        found = group_for(request, self._growable(), self._rules)
        return "" if found is None else self._told(self._groups[found])

    # -- What there is ---------------------------------------------------------

    def _growable(self) -> list[Growable]:
        milli = self._rules.device_milli
        return [
            Growable(
                group.name, empty(self._view.shape(group), milli), group.most - len(self._view.working(group))
            )
            for group in self._groups.values()
        ]

    def _of(self, group: NodeGroup) -> list[Manifest]:
        """Return the placeholders of a group, the oldest first."""
        found = [
            pod
            for pod in self._view.placeholders.values()
            if mapping(pod["metadata"].get("labels")).get(GROUP_LABEL) == label_value(group.name)
            and pod["metadata"]["uid"] not in self._ended
        ]
        return sorted(found, key=lambda pod: str(pod["metadata"].get("creationTimestamp")))

    def _asks(self, pod: Manifest) -> bool:
        """Whether a node may still come of a placeholder."""
        phase = mapping(pod.get("status")).get("phase")
        return pod["metadata"]["uid"] not in self._come and phase not in ("Failed", "Succeeded")

    # -- Asking ----------------------------------------------------------------

    def _wanted(self, group: NodeGroup) -> list[SliceRequest]:
        """Return for whom nodes of a group are needed, a request for each node."""
        return [request for name, request in self._demand.nodes if name == group.name]

    async def _try(self, group: NodeGroup, work: Coroutine[Any, Any, None]) -> None:
        """Do something for one group; write down what goes wrong: the next look tries again."""
        try:
            await work
        except GpuPoolError as error:
            self._log.error("No node of %s can be requested: %s", ascii(group.name), error)
        except Exception:  # noqa: BLE001 - one group must not keep the pool from asking for others
            self._log.exception("The nodes of %s could not be looked after", ascii(group.name))

    async def _end_surplus(self, group: NodeGroup, wanted: Sequence[SliceRequest]) -> None:
        """End the placeholders of which no node comes any more, or is needed; note what has come of them."""
        await self._note_starts(group)
        pods = self._of(group)
        asking = [pod for pod in pods if self._asks(pod)]
        # The oldest stay: their nodes come first.
        for pod in [*(pod for pod in pods if pod not in asking), *asking[len(wanted) :]]:
            await self._end(pod)

    async def _ask_for_missing(self, group: NodeGroup, wanted: Sequence[SliceRequest]) -> None:
        """Make a placeholder for each node that is needed and for which there is none."""
        asking = [pod for pod in self._of(group) if self._asks(pod)]
        for request in wanted[len(asking) :]:
            await self._ask_for(group, request)

    async def _ask_for(self, group: NodeGroup, request: SliceRequest) -> None:
        dialect, like = self._view.choice.dialect, self._view.node_like(group)
        if dialect is None or not like:
            return
        settings, namespace = self._settings, self._view.namespace
        place = PlaceholderShape(
            pool=settings.pool,
            namespace=namespace,
            image=settings.placeholder_image,
            cpu=settings.cpu,
            memory_mib=settings.memory_mib,
            tolerations=tuple(settings.tolerations),
        )
        parts = self._view.translate(request, like).pod
        name = f"gpu-pool-node-{secrets.token_hex(4)}"
        for template in parts.claim_templates:
            path = f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaimtemplates"
            await self._writer.create(path, template)
        there = self._view.hostnames(group)
        pod = placeholder(group, name, place, parts, dialect.table.bans, there)
        made = await self._writer.create(path_of(namespace, "pods"), pod)
        if made is not None:
            self._view.pods.put(made)
            self._log.info("Requested a node of %s, with the pod %s", ascii(group.name), name)

    async def _end(self, pod: Manifest) -> None:
        uid = pod["metadata"]["uid"]
        self._ended.add(uid)
        is_done = False
        try:
            is_done = await self._writer.delete(pod)
        finally:
            if not is_done:
                self._ended.discard(uid)  # the next look tries again

    # -- What comes of it --------------------------------------------------------

    async def _note_starts(self, group: NodeGroup) -> None:
        """Write down how long it took until a node with GPUs came, by what was asked for first."""
        working = self._view.working(group)
        before = self._working.get(group.name, working)
        self._working[group.name] = working
        asking = [pod for pod in self._of(group) if self._asks(pod)]
        # Whose node it is, is known once it is there; until then, whose start was announced first.
        asking.sort(
            key=lambda pod: (_node_of(pod) not in working, self._said_of(pod) is not AutoscalerAnswer.STARTS)
        )
        for pod in asking[: len(working - before)]:
            self._come.add(pod["metadata"]["uid"])
            took = _age(pod)
            self._log.info("A node of %s came after %.0f s", ascii(group.name), took)
            await self.store.run(records.add_node_start, group.name, took)
        # Those too whose node came while no service looked.
        self._come |= {pod["metadata"]["uid"] for pod in asking if _node_of(pod) in working}
        known = await self.store.run(records.node_starts, group.name)
        self._usual[group.name] = usual(known, group.usual)

    async def _listen(self) -> None:
        """Ask what the autoscaler says, now and then."""
        pods = {pod["metadata"]["uid"]: pod for pod in self._view.placeholders.values()}
        self._ended &= pods.keys()
        self._come &= pods.keys()
        self._answers = {uid: said for uid, said in self._answers.items() if uid in pods}
        if time.monotonic() - self._asked_at < _EVENTS_EVERY:
            return
        self._asked_at = time.monotonic()
        for uid, pod in pods.items():
            if uid not in self._ended and not _node_of(pod):
                self._answers[uid] = answer(await self._events(pod))
        self._warn()

    async def _events(self, pod: Manifest) -> Sequence[Manifest]:
        metadata = pod["metadata"]
        query = {"fieldSelector": f"involvedObject.uid={metadata['uid']}"}
        try:
            found = await self._api.ask("GET", path_of(metadata["namespace"], "events"), query=query)
        except ApiAway:
            return ()
        except ApiRefused as refused:
            if not self._refused:
                self._log.warning("The autoscaler's events cannot be read: %s", refused)
            self._refused = True
            return ()
        return listing(found.get("items"))

    def _warn(self) -> None:
        """Tell the administrator, once for each of its sentences, what the autoscaler cannot do."""
        for pod in self._view.placeholders.values():
            uid = pod["metadata"]["uid"]
            said, message = self._answers.get(uid, _NOTHING)
            if said is AutoscalerAnswer.CANNOT and (uid, message) not in self._warned:
                self._warned = {each for each in self._warned if each[0] in self._answers} | {(uid, message)}
                group = mapping(pod["metadata"].get("labels")).get(GROUP_LABEL)
                self._log.warning("No node of %s can be started now: %s", ascii(group), ascii(message))

    def _said_of(self, pod: Manifest) -> AutoscalerAnswer:
        return self._answers.get(pod["metadata"]["uid"], _NOTHING)[0]

    def _told(self, group: NodeGroup) -> str:
        usually = self._usual.get(group.name, group.usual)
        return told(self._start(group), usually, group.late)

    def _start(self, group: NodeGroup) -> NodeStart | None:
        """Return the start of a group that goes best: the one whose node comes first."""
        starts = [
            NodeStart(_age(pod), *self._answers.get(pod["metadata"]["uid"], _NOTHING))
            for pod in self._of(group)
        ]
        return max(
            starts, key=lambda each: (each.answer is not AutoscalerAnswer.CANNOT, each.age), default=None
        )


def _node_of(pod: Manifest) -> str:
    return str(mapping(pod.get("spec")).get("nodeName") or "")


def _age(pod: Manifest) -> float:
    made = _seconds(pod["metadata"].get("creationTimestamp"))
    return 0.0 if made is None else max(0.0, time.time() - made)


def _seconds(text: object) -> float | None:
    """Return the Unix time that the API writes as ``2026-11-22T10:00:00Z``."""
    try:
        return datetime.strptime(str(text), "%Y-%m-%dT%H:%M:%S%z").timestamp()
    except ValueError:
        return None
