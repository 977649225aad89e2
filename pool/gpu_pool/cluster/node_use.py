"""What the pods of kernels use of their GPUs, as the agents of their nodes say it.

An agent is known by a token that the cluster bound to its pod, and so to its node; the cluster is asked about
it (TokenReview). It is believed of that node's pods alone. What it says is kept in memory, and holds for some
seconds: after that, or after a restart of the service, what pods use is not known until it is said again.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

from gpu_pool.cluster.api import Api, ApiAway, ApiRefused
from gpu_pool.cluster.dialects import Manifest
from gpu_pool.cluster.dialects.objects import mapping
from gpu_pool.cluster.manifests import number_of
from gpu_pool.cluster.pod_watchdog import MemorySeen
from gpu_pool.cluster.settings import SHARED, KubernetesSettings
from gpu_pool.cluster.suspension import PodSuspension, check_moves, containers_of
from gpu_pool.cluster.view import ClusterView
from gpu_pool.store.usage import Measured, UseTally
from gpu_pool_client import (
    Activity,
    BadRequest,
    Lease,
    LeaseState,
    MemoryMove,
    MoveResult,
    NotAllowed,
    PodDeviceUse,
    PoolUnreachable,
)
from gpu_pool_client._requests import MAX_MIB

#: What a node agent's token is made for, so that nobody can use it to ask the cluster for anything.
AUDIENCE: Final = "gpu-pool"
_REVIEWS: Final = "/apis/authentication.k8s.io/v1/tokenreviews"
#: What the cluster says of a token that is bound to a pod. That of the node is there from Kubernetes 1.30 on
#: (ServiceAccountTokenPodNodeInfo).
_EXTRA: Final = "authentication.kubernetes.io/"
#: Seconds between two writes to the store, for all leases together.
_WRITE_EVERY: Final = 10.0
#: Devices, uses and processes that one report may name: more than any node has.
_MOST_DEVICES: Final = 256
_MOST_USES: Final = 1_024
_MOST_PROCESSES: Final = 4_194_304
#: The uid of a pod, and what a runtime calls a container.
_ID: Final = re.compile(r"[0-9A-Za-z_.-]{0,128}", re.ASCII)
#: How the driver names MIG instances.
_MIG: Final = "MIG-"
_DEVICE: Final = re.compile(r"[!-~]{1,128}", re.ASCII)
_AGENTS_LOG: Final = "See the log of the node agent."


class PodOfToken(NamedTuple):
    """The pod that a token is bound to, as the cluster says it."""

    namespace: str
    name: str
    uid: str
    #: Empty where the cluster does not say it.
    node: str


def read_review(answer: Manifest, account: str) -> PodOfToken:
    """Return the pod of a token that is of the service account ``NAMESPACE/NAME`` and for us. Pure.

    Raises ``NotAllowed``, also for a token of that account which is bound to no pod: that is no agent's.
    """
    status = mapping(answer.get("status"))
    user = mapping(status.get("user"))
    if status.get("authenticated") is not True or AUDIENCE not in (status.get("audiences") or ()):
        raise NotAllowed(
            "The cluster does not know this token, or it was not made for this pool.", _AGENTS_LOG
        )
    namespace, _, name = account.partition("/")
    if user.get("username") != f"system:serviceaccount:{namespace}:{name}":
        raise NotAllowed("This token is not that of the node agents' service account.", _AGENTS_LOG)
    extra = mapping(user.get("extra"))
    pod, uid, node = (_first(extra.get(_EXTRA + key)) for key in ("pod-name", "pod-uid", "node-name"))
    if not (pod and uid):
        raise NotAllowed("This token is bound to no pod, so it is no node agent's.", _AGENTS_LOG)
    return PodOfToken(namespace, pod, uid, node)


def _first(values: Any) -> str:
    return str(values[0]) if isinstance(values, list) and len(values) == 1 else ""


def check_report(devices: Sequence[str], uses: Sequence[PodDeviceUse]) -> None:
    """Raise ``BadRequest`` for what cannot be so. Pure."""
    if len(devices) > _MOST_DEVICES or len(uses) > _MOST_USES:
        raise BadRequest(
            f"The report has {len(devices)} devices and {len(uses)} uses.",
            f"Accepted: {_MOST_DEVICES} and {_MOST_USES} at most.",
        )
    for device in devices:
        if not _DEVICE.fullmatch(device):
            raise BadRequest(f"{device[:40]!a} is not the uuid of a device.", _AGENTS_LOG)
    told: set[tuple[str, str, str]] = set()
    for each in uses:
        problem = _problem(each, devices)
        name = each.pod, each.container, each.device
        if problem or name in told:
            raise BadRequest(f"What pod {each.pod[:40]!a} uses {problem or 'is told twice'}.", _AGENTS_LOG)
        told.add(name)


def _problem(use: PodDeviceUse, devices: Sequence[str]) -> str:
    """Say what is wrong with one use; empty for nothing."""
    if not (_ID.fullmatch(use.pod) and _ID.fullmatch(use.container) and (use.pod or use.container)):
        return "has no uid of a pod, and no container"
    if use.device not in devices:
        return f"is of {use.device[:40]!a}, which was not looked at"
    if use.memory_mib is not None and not 0 <= use.memory_mib <= MAX_MIB:
        return f"is {str(use.memory_mib)[:20]} MiB"
    if not 1 <= use.processes <= _MOST_PROCESSES:
        return f"is by {str(use.processes)[:20]} processes"
    busy = use.utilisation
    if busy is not None and not (math.isfinite(busy) and 0 <= busy <= 1):
        return f"is a utilisation of {busy}, which is from 0 to 1"
    return ""


@dataclass(frozen=True, slots=True)
class _Report:
    """What one agent said last."""

    at: float
    #: Whether all devices of the node were looked at.
    complete: bool
    #: By the pod's uid, or the container's id where that was not known.
    uses: Mapping[str, tuple[PodDeviceUse, ...]]


class NodeUseReports:
    """What is used on nodes; the part ``NodeAgents`` of the backend. Used in one event loop."""

    def __init__(
        self,
        api: Api,
        view: ClusterView,
        settings: KubernetesSettings,
        log: logging.Logger,
        clock: Callable[[], float] = time.monotonic,
        suspension: PodSuspension | None = None,
    ) -> None:
        self._api, self._view, self._log, self._clock = api, view, log, clock
        self._suspension = suspension
        self._account, self._holds = settings.node_agent, settings.times.use_holds
        #: Whether a kernel's device is the same one for as long as its pod lives, so that nothing but what it
        #: keeps there is in the way of lending its slice to others.
        self._stays_on_device = settings.dialect == SHARED
        self._reports: dict[str, _Report] = {}
        #: What was last logged of each node whose agent is not believed.
        self._complaints: dict[str, str] = {}
        self._tallies: dict[str, UseTally] = {}
        #: Leases of which is written that they are measured, also where they use nothing.
        self._begun: set[str] = set()
        self._began_at = self._written_at = clock()

    # -- Who says it -------------------------------------------------------------

    async def node_of(self, token: str) -> str:
        """See ``NodeAgents.node_of``."""
        if not self._account:
            raise NotAllowed(
                "This pool takes no reports of node agents.",
                "Name their service account in c.KubernetesSettings.node_agent.",
            )
        review = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [AUDIENCE]},
        }
        try:
            answer = await self._api.ask("POST", _REVIEWS, review)
        except ApiAway as away:
            raise PoolUnreachable(f"The cluster cannot be asked whose token that is: {away}.") from away
        except ApiRefused as refused:
            self._complain(
                "", f"The cluster does not let the service ask whose a node agent's token is: {refused}"
            )
            raise PoolUnreachable(
                "The pool's service may not ask the cluster whose token that is.",
                "Give it the right to create tokenreviews.",
            ) from refused
        found = read_review(answer, self._account)
        return found.node or self._node_of_pod(found)

    def _node_of_pod(self, found: PodOfToken) -> str:
        pod = self._view.pods.get(found.namespace, found.name)
        node = _node_of(pod) if pod is not None and pod["metadata"].get("uid") == found.uid else ""
        if not node:
            raise PoolUnreachable("The pod of this node agent is not known yet.", "Try again in a moment.")
        return node

    # -- What is said ------------------------------------------------------------

    async def report(
        self, node: str, devices: Sequence[str], uses: Sequence[PodDeviceUse], *, complete: bool
    ) -> None:
        """See ``NodeAgents.report``."""
        try:
            check_report(devices, uses)
            self._check_place(node, uses)
        except (BadRequest, NotAllowed) as error:
            self._reports.pop(node, None)
            self._complain(node, f"The agent of node {node!a} is not believed: {error.message}")
            raise
        self._complaints.pop(node, None)
        now, before = self._clock(), self._reports.get(node)
        by_pod: dict[str, tuple[PodDeviceUse, ...]] = {}
        for use in uses:
            key = use.pod or use.container
            by_pod[key] = (*by_pod.get(key, ()), use)
        report = self._reports[node] = _Report(now, complete, by_pod)
        if before is not None:
            self._count(node, report, min(now - before.at, self._holds))

    async def moves(
        self,
        node: str,
        unmovable: Mapping[str, str],
        results: Sequence[MoveResult],
        known: Collection[str],
        seconds: float,
    ) -> tuple[MemoryMove, ...]:
        """See ``NodeAgents.moves``."""
        if self._suspension is None:
            raise NotAllowed(
                f"This pool suspends no kernels: it does so with the dialect {SHARED!r} alone.",
                "Leave nodeAgent.suspend.enabled of the chart out.",
            )
        try:
            check_moves(unmovable, results, known)
        except BadRequest as error:
            self._complain(node, f"The agent of node {node!a} is not believed: {error.message}")
            raise
        return await self._suspension.moves(node, unmovable, results, known, seconds)

    def _check_place(self, node: str, uses: Sequence[PodDeviceUse]) -> None:
        """Refuse what is said of a kernel's pod on another node."""
        for pod in {use.pod for use in uses if use.pod}:
            found = self._view.own.pod(pod)
            if found is not None and _node_of(found) != node:
                raise NotAllowed(
                    f"The pod {pod} is not on node {node!a}, of which alone this agent is believed.",
                    _AGENTS_LOG,
                )

    def _complain(self, node: str, text: str) -> None:
        """Log what is wrong, once until it changes."""
        if self._complaints.get(node) != text:
            self._complaints[node] = text
            self._log.warning("%s", text)

    def ages(self) -> Mapping[str, float]:
        """See ``NodeAgents.ages``."""
        now = self._clock()
        return {node: now - report.at for node, report in self._reports.items()}

    # -- What is known -----------------------------------------------------------

    def activity(self, lease_id: str) -> Activity:
        """Return what a lease's kernel does with its GPU; nothing where no agent has said it lately."""
        uses, report = self._seen(lease_id), self._report_on(lease_id)
        if uses is None or report is None:
            return Activity()
        age = max(0.0, self._clock() - report.at)
        if not uses:
            # It may have opened the driver all the same, which does not show there.
            initialised = False if self._stays_on_device else None
            return Activity(initialised, working=False, memory_mib=0, age=age)
        busy = [use.utilisation for use in uses]
        working = True if any(busy) else None if None in busy else False
        # The driver has no figures of processes for MIG instances: then what is submitted decides.
        unmeasured = working is None and any(use.device.startswith(_MIG) for use in uses)
        return Activity(True, working, memory_mib=_total(uses), unmeasured=unmeasured, age=age)

    def memory_in_use(self) -> Mapping[str, Mapping[str, int]]:
        """See ``Backend.memory_in_use``."""
        seen = {lease_id: self._seen(lease_id) for lease_id in self._view.own.leases()}
        known = {lease_id: _by_device(uses) for lease_id, uses in seen.items() if uses is not None}
        found = {
            lease_id: {device: mib or 0 for device, mib in amounts.items()}
            for lease_id, amounts in known.items()
            if None not in amounts.values()
        }
        return {lease_id: self._by_our_names(lease_id, amounts) for lease_id, amounts in found.items()}

    def _by_our_names(self, lease_id: str, amounts: Mapping[str, int]) -> Mapping[str, int]:
        """Return amounts by the uuids that the pool knows, which is not a GPU's own where it has replicas."""
        pod, shared = self._pod(lease_id), self._view.shared
        uuid = "" if pod is None or shared is None else shared.replicated_on(_node_of(pod))
        return {uuid: sum(amounts.values())} if uuid else amounts

    def _seen(self, lease_id: str) -> tuple[PodDeviceUse, ...] | None:
        """Return what a lease's newest pod was last seen to use; None where that is not known."""
        pod = self._pod(lease_id)
        report = None if pod is None else self._reports.get(_node_of(pod))
        if pod is None or report is None or not self._is_fresh(report):
            return None
        uses = _of_pod(pod, report)
        return uses if uses or report.complete else None

    def _pod(self, lease_id: str) -> Manifest | None:
        """Return a lease's newest pod."""
        pods = self._view.own.of(lease_id)
        return max(pods, key=lambda each: number_of(each["metadata"]["name"]), default=None)

    def _report_on(self, lease_id: str) -> _Report | None:
        pod = self._pod(lease_id)
        return None if pod is None else self._reports.get(_node_of(pod))

    def _is_fresh(self, report: _Report | None, *, complete: bool = False) -> bool:
        """Whether a report still holds; ``complete`` if it must be of all devices of its node."""
        if report is None or (complete and not report.complete):
            return False
        return self._clock() - report.at <= self._holds

    def sees(self, node: str) -> bool:
        """Whether all that is used on a node is known now.

        Just after the service has begun it counts as known: agents have yet to say it, and nobody is to lose
        for that what they use.
        """
        report = self._reports.get(node)
        if report is None:
            return bool(self._account) and self._clock() - self._began_at <= self._holds
        return self._is_fresh(report, complete=True)

    # -- What the watchdog sees ----------------------------------------------------

    def memory_seen(self, lease_id: str) -> MemorySeen | None:
        """See ``MemoryReports.memory_seen``."""
        uses, report = self._seen(lease_id), self._report_on(lease_id)
        if uses is None or report is None:
            return None
        amounts = _by_device(uses)
        known = {device: mib for device, mib in amounts.items() if mib is not None}
        return MemorySeen(report.at, known) if len(known) == len(amounts) else None

    def news_of(self, since: float) -> Iterable[str]:
        """See ``MemoryReports.news_of``."""
        new = {node: report for node, report in self._reports.items() if report.at > since}
        return set[str]().union(*(self._leases_in(node, report) for node, report in new.items()))

    def is_watched(self, lease: Lease) -> bool:
        """See ``MemoryReports.is_watched``: by its pod, or before there is one by its nodes."""
        if self._view.own.of(lease.id):
            return self.memory_seen(lease.id) is not None
        nodes = {part.device.node for part in lease.slices}
        return bool(nodes) and all(self._is_fresh(self._reports.get(node), complete=True) for node in nodes)

    # -- What is written down ------------------------------------------------------

    def _count(self, node: str, report: _Report, seconds: float) -> None:
        """Count what leases use, as if for so many seconds."""
        for lease_id in self._leases_in(node, report):
            tally = self._tallies.setdefault(lease_id, UseTally())
            for memory_mib in _by_device(self._seen(lease_id) or ()).values():
                tally.add(memory_mib, seconds)

    def _leases_in(self, node: str, report: _Report) -> set[str]:
        """Return the leases of which a report says anything."""
        found = {self._view.own.lease_of(key) for key in report.uses}
        if any(not use.pod for uses in report.uses.values() for use in uses):
            here = {lease: self._view.own.of(lease) for lease in self._view.own.leases()}
            found |= {
                lease
                for lease, pods in here.items()
                if any(_node_of(pod) == node and _of_pod(pod, report) for pod in pods)
            }
        return {lease_id for lease_id in found if lease_id}

    def news(self, leases: Iterable[Lease]) -> Mapping[str, Measured]:
        """Return what was seen since the last time, by lease id, to be added to the store; mostly nothing."""
        now = self._clock()
        if now - self._written_at < _WRITE_EVERY:
            return {}
        self._written_at = now
        self._reports = {node: each for node, each in self._reports.items() if self._view.has_node(node)}
        held = {lease.id for lease in leases if lease.state is LeaseState.HELD}
        for lease_id in held - self._begun - self._tallies.keys():
            if self._seen(lease_id) is not None:
                self._tallies[lease_id] = UseTally()
        found, self._tallies = self._tallies, {}
        self._begun = (self._begun & held) | found.keys()
        return {lease_id: tally.measured() for lease_id, tally in found.items()}


def _node_of(pod: Manifest) -> str:
    return str(mapping(pod.get("spec")).get("nodeName") or "")


def _of_pod(pod: Manifest, report: _Report) -> tuple[PodDeviceUse, ...]:
    """Return what a report says of a pod, by its uid and by the ids of its containers."""
    keys = {str(pod["metadata"].get("uid")), *containers_of(pod)}
    return tuple(use for key in sorted(keys) for use in report.uses.get(key, ()))


def _by_device(uses: Iterable[PodDeviceUse]) -> dict[str, int | None]:
    """Return the MiB in use of each device; None where that of any container is not known."""
    found: dict[str, int | None] = {}
    for use in uses:
        before = found.get(use.device, 0)
        found[use.device] = None if before is None or use.memory_mib is None else before + use.memory_mib
    return found


def _total(uses: Iterable[PodDeviceUse]) -> int | None:
    amounts = _by_device(uses).values()
    return None if None in amounts else sum(each or 0 for each in amounts)
