"""What a cluster shows, by watches: its GPUs, what others have of them, the pods of leases."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any, Final

from gpu_pool.cluster import kueue
from gpu_pool.cluster.api import Api
from gpu_pool.cluster.device_claims import HOLDER_LABEL, claims_of, device_of, why_not_yet
from gpu_pool.cluster.dialects import (
    Cluster,
    Dialect,
    DialectChoice,
    Gpu,
    Manifest,
    Pod,
    Translation,
    choose,
    counted_as,
    label_value,
    usage,
)
from gpu_pool.cluster.dialects.amounts import HOSTNAME
from gpu_pool.cluster.dialects.choosing import Memory, away, choose_with_memory, completed, next_end, node_of
from gpu_pool.cluster.dialects.objects import POOL_LABEL, Node, mapping
from gpu_pool.cluster.dialects.shared import Shared, is_claim_of
from gpu_pool.cluster.informer import Informer, Key
from gpu_pool.cluster.kept_objects import LeasePods, is_ending, is_same, lean, lean_node, lean_pod
from gpu_pool.cluster.manifests import LEASE_LABEL
from gpu_pool.cluster.nodes import ClosedNodesLog, NodeClosure, NodeGroup, closures, notes, tolerations_of
from gpu_pool.cluster.notebooks import Notebook, Notebooks, in_any
from gpu_pool.cluster.prepared_pods import PREPARED_LABEL
from gpu_pool.cluster.scale_up import PLACEHOLDER_LABEL
from gpu_pool.cluster.settings import KubernetesSettings
from gpu_pool.cluster.snapshot import NODES, PODS, SOURCES
from gpu_pool.store.device_table import ForeignUse
from gpu_pool_client import Device, Enforcement, GpuPoolError, NeverFits, PoolUnreachable, SliceRequest

#: Closed nodes of which somebody who waits is told why.
_MOST_TOLD: Final = 3
#: What limits a slice of which nothing is known.
_UNLIMITED: Final = Enforcement()

#: Is told what a kernel's pod was and what it is.
KernelChanged = Callable[["Manifest | None", "Manifest | None"], None]


class ClusterView:
    """A cluster, as its watches tell it. Used in one event loop, readers of :attr:`choice` apart."""

    def __init__(self, api: Api, settings: KubernetesSettings, log: logging.Logger) -> None:
        self._settings, self._log = settings, log
        settings.check_dialect()
        #: The groups of nodes that can grow.
        self.groups = settings.groups
        self.namespace = settings.namespace or api.namespace
        self._options = replace(settings.dialect_options, namespace=self.namespace)
        self._is_ours = in_any((self.namespace, *settings.more_namespaces))
        self._label = label_value(settings.pool)
        self.nodes = Informer(api, NODES, log, self._node_changed, keep=lean_node, required=True)
        self.pods = Informer(api, PODS, log, self._pod_changed, keep=lean_pod, required=True)
        self._more = {
            name: Informer(api, paths, log, self._cluster_changed, keep=lean, names_only=only)
            for name, (paths, only) in SOURCES.items()
        }
        self._claims = self._more["resource_claims"] = Informer(
            api, SOURCES["resource_claims"][0], log, self._claim_changed, keep=lean
        )
        if settings.kueue:
            self._more["workloads"] = Informer(
                api, kueue.WORKLOADS, log, self._workload_changed, keep=kueue.lean_workload
            )
        self._workloads: dict[str, Manifest] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._notebooks = Notebooks(settings.home)
        #: The pods of leases.
        self.own = LeasePods()
        self._foreign: dict[Key, Pod] = {}
        #: The pods for which an autoscaler is to start nodes.
        self.placeholders: dict[Key, Manifest] = {}
        #: The pods that keep claims of devices for the pool.
        self.holders: dict[Key, Manifest] = {}
        #: The prepared pods that no lease has taken.
        self.prepared: dict[Key, Manifest] = {}
        self._choice: DialectChoice | None = None
        self._memory: Memory = {}
        self._nodes: dict[str, Node] = {}
        #: Nodes of which it was asked whether they answer, as they were then, and whether they did, by name.
        self._ready: dict[str, tuple[Manifest, bool]] = {}
        self._tolerations = tolerations_of(settings.tolerations)
        self._closed: dict[str, NodeClosure] = {}
        self._closed_log = ClosedNodesLog(log)
        #: The nodes that could be started, of groups without one.
        self._stand_ins: frozenset[str] = frozenset()
        self._devices: tuple[Device, ...] | None = None
        self._translations: dict[tuple[SliceRequest, str], Translation] = {}
        self._counted: dict[SliceRequest, SliceRequest] = {}
        #: Set when GPUs, or what is held of them, may have changed.
        self.changed = asyncio.Event()
        #: Those who are told of the pods of kernels, and of notebook servers that have gone.
        self.on_kernel: KernelChanged = lambda *_: None
        self.on_notebook_gone: Callable[[str], None] = lambda _: None
        self.on_node: Callable[[str], None] = lambda _: None
        #: Is told the name of a claim of the pool's that has changed.
        self.on_claim: Callable[[str], None] = lambda _: None
        #: Is told of which pod (by uid) Kueue says something new.
        self.on_workload: Callable[[str], None] = lambda _: None

    @property
    def namespaces(self) -> str:
        """Where notebook servers are looked for, in words."""
        return " or ".join((self.namespace, *self._settings.more_namespaces))

    async def start(self) -> None:
        """Begin to watch; return once all is known. Raises ``PoolUnreachable`` in words."""
        every = (self.nodes, self.pods, *self._more.values())
        self._tasks = [asyncio.create_task(each.run()) for each in every]
        needed = (self.nodes, self.pods)
        waiting = asyncio.gather(*(each.synced.wait() for each in needed))
        try:
            await asyncio.wait_for(waiting, self._settings.times.listed_within)
        except asyncio.TimeoutError:
            problem = next((each.problem for each in needed if each.problem), "it does not answer")
            raise PoolUnreachable(
                f"The cluster's API server cannot be read: {problem}.",
                "Give the service the rights of examples/kubernetes/service/rbac.yaml, and check that it "
                "can reach the API server.",
            ) from None
        # What the service may not read is as if it was not there.
        with suppress(asyncio.TimeoutError):
            settled = (each.settled.wait() for each in self._more.values())
            await asyncio.wait_for(asyncio.gather(*settled), self._settings.times.settled_within)

    async def stop(self) -> None:
        """Watch no more."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- GPUs --------------------------------------------------------------

    @property
    def choice(self) -> DialectChoice:
        """The dialect of the cluster as it is now, and why it is that one."""
        if self._choice is None:
            shown, settings = self._read(()), self._settings
            choice, cluster, self._memory = choose_with_memory(
                self._memory, shown, self._options, settings.dialect, time.monotonic(), settings.gpus_away_for
            )
            absent = [group for group in self.groups if not _shows(choice, group)]
            if absent:
                cluster = completed(self._read(absent), self._memory)
                choice = choose(cluster, self._options, settings.dialect)
            self._nodes = {node.name: node for node in cluster.nodes}
            self._stand_ins = frozenset(group.stand_in_name for group in absent)
            self._translations, self._counted, self._devices = {}, {}, None
            self._choice = choice
            found = {} if choice.dialect is None else closures(choice.dialect, self._tolerations)
            self._closed = {name: each for name, each in found.items() if name not in self._stand_ins}
            self._closed_log.tell(self._closed, {} if choice.dialect is None else notes(choice.dialect))
        return self._choice

    def why_closed(self, nodes: Iterable[str]) -> str:
        """Say of those of these nodes that take no kernels why they do not, in sentences for who waits."""
        found = [
            f"The machine {name} {self._closed[name].why}."
            for name in sorted(set(nodes))
            if name in self._closed
        ]
        return " ".join(found[:_MOST_TOLD])

    def _read(self, absent: Sequence[NodeGroup]) -> Cluster:
        """Return the cluster as it is shown, and as if each of these groups had one node."""
        more: dict[str, Any] = {name: list(self._more[name]) for name in SOURCES}
        more["resource_slices"] += [each for group in absent for each in group.slices]
        return Cluster.read([*self.nodes, *(group.stand_in for group in absent)], **more)

    @property
    def away(self) -> frozenset[str]:
        """The nodes that showed GPUs lately and show none at the moment; those of them count as there."""
        return away(self._memory)

    def until_forgotten(self) -> float | None:
        """Return in how many seconds such a node counts as one without GPUs; None where there is none."""
        end = next_end(self._memory, self._settings.gpus_away_for)
        return None if end is None else max(0.0, end - time.monotonic())

    def forget_what_is_shown(self) -> None:
        """Look at the nodes anew at the next occasion, though they have not changed."""
        self._cluster_changed(None, None)

    def devices(self) -> tuple[Device, ...]:
        """Return all GPUs whose size is known, by node and number; where Kueue counts them, their kinds."""
        gpus = self._gpus()  # which looks at the cluster anew, if need be
        if self._devices is None:
            self._devices = self._shown(gpus)
        return self._devices

    def devices_on(self, node: str) -> tuple[Device, ...]:
        """Return the devices that are those of one node."""
        if not self._settings.kueue:
            return tuple(each for each in self.devices() if each.node == node)
        return self._shown(gpu for gpu in self._gpus() if gpu.node == node)

    def _shown(self, gpus: Iterable[Gpu]) -> tuple[Device, ...]:
        found = (replace(gpu.device, node=gpu.node) for gpu in gpus)
        return kueue.kinds(found) if self._settings.kueue else tuple(found)

    def others(self, live: Collection[str], parked: Collection[str] = ()) -> dict[str, ForeignUse]:
        """Return what those have of each GPU, by uuid, who hold none of the ``live`` leases.

        Pods of those of them that are ``parked`` stay on their GPUs, which have room for so many.
        """
        if self._settings.kueue:
            return {}
        gpus = self._gpus()
        closed = {gpu.device.uuid: gpu.drained or not self._takes_pods(gpu.node) for gpu in gpus}
        dialect = self.choice.dialect
        used = {} if dialect is None else self._used(dialect, live)
        for uuid in self.devices_of(parked):
            milli, memory_mib, contexts = used.get(uuid, (0, 0, 0))
            used[uuid] = milli, memory_mib, contexts + 1
        return {
            uuid: ForeignUse(*used.get(uuid, (0, 0, 0)), closed=shut)
            for uuid, shut in closed.items()
            if shut or uuid in used
        }

    def translate(self, request: SliceRequest, node: str = "") -> Translation:
        """Return a request in the cluster's dialect, as if there was that node alone if one is named.

        Raises what the dialect refuses it with, and ``NeverFits`` where there are no GPUs.
        """
        dialect = self.choice.dialect
        if dialect is None:
            raise NeverFits(
                f"You asked for {request.named}; {self.choice}",
                "Ask the administrator to run gpu-pool doctor --cluster.",
            )
        known = self._translations.get((request, node))
        if known is None:
            known = _on_node(dialect, node).translate(request) if node else dialect.translate(request)
            self._translations[request, node] = known
        return known

    def counted_as(self, request: SliceRequest) -> SliceRequest:
        """Return what a request is counted as by the dialect; raises as :meth:`translate`."""
        self.translate(request)  # which looks at the cluster anew, if need be
        dialect = self.choice.dialect
        known = self._counted.get(request)
        if known is None and dialect is not None:
            known = self._counted[request] = counted_as(request, dialect)
        return known or request

    def enforcement(self, request: SliceRequest) -> Enforcement:
        """Return what limits a slice; nothing does where the cluster has no such slices any more."""
        try:
            return self.translate(request).statement.enforcement
        except GpuPoolError:
            return _UNLIMITED

    # -- Claims of whole devices ----------------------------------------------

    @property
    def shared(self) -> Shared | None:
        """The dialect by which the pool divides whole devices itself, where it is the cluster's."""
        dialect = self.choice.dialect
        return dialect if isinstance(dialect, Shared) else None

    def claims(self) -> list[Manifest]:
        """Return the pool's claims of devices."""
        return [each for each in self._claims if self._is_our_claim(each)]

    def claim(self, name: str) -> Manifest | None:
        """Return one of the pool's claims of devices."""
        found = self._claims.get(self.namespace, name)
        return found if found is not None and self._is_our_claim(found) else None

    def put_claim(self, found: Manifest) -> None:
        """Take over what a write of the pool's own was answered."""
        self._claims.put(found)

    def why_no_device(self, pod: Manifest) -> str:
        """Say why a pod's device is not there for it yet; empty where it is, or it has no claim of ours."""
        shared = self.shared
        if shared is None:
            return ""
        found = ((name, self.claim(name)) for name in claims_of(pod))
        words = (
            why_not_yet(name, claim, is_taken=claim is not None and shared.taken(device_of(claim)[0]))
            for name, claim in found
        )
        return next(filter(None, words), "")

    def takes_pods(self, node: str) -> bool:
        """Whether a node takes kernels now."""
        return self.choice.dialect is not None and self._takes_pods(node)

    def node(self, name: str) -> Node:
        """Return a node; one that shows nothing where there is none."""
        return self._nodes.get(name) or Node(name)

    def _is_our_claim(self, claim: Manifest) -> bool:
        return is_claim_of(claim, self._settings.pool, self.namespace)

    def _claim_changed(self, before: Manifest | None, now: Manifest | None) -> None:
        self._cluster_changed(before, now)
        claim = now or before or {}
        if self._is_our_claim(claim):
            self.on_claim(str(claim["metadata"]["name"]))

    # -- Nodes -----------------------------------------------------------------

    def has_node(self, node: str) -> bool:
        """Whether there is a node of that name."""
        return self.nodes.get("", node) is not None

    def is_ready(self, node: str) -> bool | None:
        """Whether a node answers; None where there is none of that name."""
        found = self.nodes.get("", node)
        if found is None:
            self._ready.pop(node, None)
            return None
        known = self._ready.get(node)
        if known is None or known[0] is not found:
            known = self._ready[node] = found, Node.read(found).is_ready
        return known[1]

    def _gpus(self) -> tuple[Gpu, ...]:
        """Return all GPUs whose size is known, as the cluster is now."""
        dialect = self.choice.dialect
        found = () if dialect is None else dialect.gpus()
        return tuple(
            _renamed(gpu) if gpu.node in self._stand_ins else gpu for gpu in found if gpu.device.memory_mib
        )

    # -- Groups of nodes -----------------------------------------------------

    def lasting(self) -> list[Device]:
        """Return the devices of nodes that show them, and of those that could be started anew."""
        gone = {name for name in self.away if not any(self._is_of(group, name) for group in self.groups)}
        return [each for each in self.devices() if each.node not in gone]

    def shape(self, group: NodeGroup) -> tuple[Device, ...]:
        """Return the devices of one node of a group, as those are that there are or could be."""
        like = self.node_like(group)
        return tuple(replace(gpu.device, node=gpu.node) for gpu in self._gpus() if gpu.node == like)

    def node_like(self, group: NodeGroup) -> str:
        """Return the name of the node with most GPUs that a group has or could have; empty for none."""
        counts = Counter(gpu.node for gpu in self._gpus() if self._is_of(group, gpu.node))
        return min(counts, key=lambda name: (-counts[name], name), default="")

    def working(self, group: NodeGroup) -> frozenset[str]:
        """Return the names of the nodes of a group that show GPUs."""
        nodes = {gpu.node for gpu in self._gpus()} - self._stand_ins
        return frozenset(node for node in nodes if self._is_of(group, node))

    def hostnames(self, group: NodeGroup) -> set[str]:
        """Return by which host names the scheduler knows the nodes that a group has."""
        return {Node.read(each).label(HOSTNAME) for each in self.nodes if group.has(Node.read(each))} - {""}

    def _is_of(self, group: NodeGroup, name: str) -> bool:
        node = self._nodes.get(name)
        return name == group.stand_in_name or (
            node is not None and name not in self._stand_ins and group.has(node)
        )

    def _takes_pods(self, name: str) -> bool:
        is_there = name in self._nodes and name not in self._stand_ins and name not in self.away
        return is_there and name not in self._closed

    def _used(self, dialect: Dialect, live: Collection[str]) -> dict[str, tuple[int, int, int]]:
        pods = [*self._foreign.values(), *self.own.ending(live)]
        return {
            status.device.uuid: (status.held_milli, status.held_memory_mib, status.held_contexts)
            for node in usage(dialect, pods)
            for status in node.gpus
            if status.leases
        }

    def devices_of(self, leases: Collection[str]) -> Iterator[str]:
        """Yield the uuid of each GPU that a pod of these leases says to be on."""
        dialect = self.choice.dialect
        for pod in (Pod.read(each) for lease_id in leases for each in self.own.of(lease_id)):
            if dialect is not None and pod is not None:
                yield from (hold.uuid for hold in dialect.holds(pod) if hold.uuid)

    # -- Kueue -------------------------------------------------------------

    def workload(self, uid: str) -> Manifest | None:
        """Return Kueue's Workload of a pod."""
        return self._workloads.get(uid)

    def _workload_changed(self, before: Manifest | None, now: Manifest | None) -> None:
        for uid in kueue.owners(now or before or {}):
            if now is None:
                self._workloads.pop(uid, None)
            else:
                self._workloads[uid] = now
            self.on_workload(uid)

    # -- Pods --------------------------------------------------------------

    def strays(self) -> Counter[str]:
        """Return how many kernels of this pool are where it does not look after them, by namespace."""
        all_of_them = (pod["metadata"] for pod in self.pods)
        ours = (each for each in all_of_them if mapping(each.get("labels")).get(POOL_LABEL) == self._label)
        return Counter(str(each["namespace"]) for each in ours if not self._is_ours(str(each["namespace"])))

    def notebook(self, user: str, server: str) -> Notebook | None:
        """Return somebody's notebook server."""
        return self._notebooks.of(user, server)

    def notebooks(self) -> list[Notebook]:
        """Return all notebook servers that are not about to end."""
        return self._notebooks.living()

    def has_notebook(self, uid: str) -> bool:
        """Whether a notebook server is there still."""
        return self._notebooks.has(uid)

    def _node_changed(self, before: Manifest | None, now: Manifest | None) -> None:
        if before is not None and now is not None and is_same(before, now):
            return
        self._cluster_changed(before, now)
        self.on_node(str(mapping((now or before or {}).get("metadata")).get("name")))

    def _cluster_changed(self, _before: Manifest | None, _now: Manifest | None) -> None:
        self._choice = None
        self.changed.set()

    def _pod_changed(self, before: Manifest | None, now: Manifest | None) -> None:
        pod = now or before or {}
        key = str(pod["metadata"].get("namespace")), str(pod["metadata"].get("name"))
        labels = mapping(pod["metadata"].get("labels"))
        if labels.get(PLACEHOLDER_LABEL) == self._label:
            self.placeholders.pop(key, None)
            if now is not None and not is_ending(now):
                self.placeholders[key] = now
            return
        if labels.get(HOLDER_LABEL) == self._label and key[0] == self.namespace:
            self.holders.pop(key, None)
            if now is not None:
                self.holders[key] = now
            self.changed.set()
            return
        if labels.get(POOL_LABEL) == self._label and self._is_ours(key[0]):
            was_prepared = self.prepared.pop(key, None) is not None
            if PREPARED_LABEL in labels and LEASE_LABEL not in labels:
                if now is not None:
                    self.prepared[key] = now
                self.changed.set()
                return
            before = None if was_prepared else before
            self.own.change(str(labels.get(LEASE_LABEL, "")), key, now)
            if now is None or is_ending(now):
                self.changed.set()
            self.on_kernel(before, now)
            return
        known, found = self._foreign.pop(key, None), None if now is None else Pod.read(now)
        if found is not None and found.node:
            self._foreign[key] = found
        if known != self._foreign.get(key):
            self.changed.set()
        ended = self._notebooks.take_over(key, now if self._is_ours(key[0]) else None)
        if ended:
            self.on_notebook_gone(ended)


def _renamed(gpu: Gpu) -> Gpu:
    """Return a GPU that could be started: it is not the one that the example was written down of."""
    return replace(gpu, device=replace(gpu.device, uuid=f"{gpu.node}/{gpu.device.uuid}"))


def _shows(choice: DialectChoice, group: NodeGroup) -> bool:
    """Whether a node of the group shows a GPU already."""
    dialect = choice.dialect
    return dialect is not None and any(group.has(dialect.cluster.node(gpu.node)) for gpu in dialect.gpus())


def _on_node(dialect: Dialect, node: str) -> Dialect:
    """Return the dialect of the same cluster, if it had this node alone."""
    slices = tuple(each for each in dialect.cluster.resource_slices if node_of(each) == node)
    alone = replace(dialect.cluster, nodes=(dialect.cluster.node(node),), resource_slices=slices)
    return type(dialect)(alone, dialect.options)
