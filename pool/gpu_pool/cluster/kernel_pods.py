"""Starting and ending the pods of kernels. What is true of them, the API server knows.

A pod's name is made of its lease and a number, and what was asked for is
written on it: an request that is repeated, since its answer was lost, finds the
pod that it made. A lease that has no kernel is known by its pods being gone;
a pod that has no lease, by the store.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Set
from dataclasses import replace
from typing import Any, Final, NamedTuple

from gpu_pool.cluster import kueue, manifests
from gpu_pool.cluster.api import ApiWriter, path_of
from gpu_pool.cluster.device_claims import claims_of
from gpu_pool.cluster.dialects import Manifest
from gpu_pool.cluster.dialects.objects import listing, mapping
from gpu_pool.cluster.dialects.pod_troubles import trouble_of
from gpu_pool.cluster.manifests import LAUNCH, LEASE_LABEL, KernelPodRequest
from gpu_pool.cluster.pod_builder import PlacementRate, is_placed
from gpu_pool.cluster.pod_states import (
    BY_SOMEBODY,
    ENDED,
    PodFailureCause,
    PodSurroundings,
    PodTaken,
    cause_of,
    is_refused,
    is_starting,
    read_pod,
)
from gpu_pool.cluster.prepared_pod_controller import PreparedPods
from gpu_pool.cluster.prepared_pods import is_prepared
from gpu_pool.cluster.settings import ClusterTimes
from gpu_pool.cluster.view import ClusterView
from gpu_pool_client import Failure, GpuPoolError, KernelPod, NotAllowed, Place, PodPhase

#: Kernels that are being handed to the API server at the same time; the others wait here.
_AT_ONCE: Final = 16
#: Is told that the cluster took a lease's pod away.
OnTaken = Callable[[str, PodTaken], Awaitable[None]]
#: Is told how a lease's kernel has failed by itself.
OnFailed = Callable[[str, Failure], Awaitable[None]]


class KernelStart(NamedTuple):
    """One start of a kernel, which may take several pods."""

    namespace: str
    lease_id: str
    #: What its request is known by.
    launch: str


class KernelPods:
    """The pods of one pool's kernels. Used in one event loop."""

    def __init__(
        self,
        writer: ApiWriter,
        view: ClusterView,
        times: ClusterTimes,
        log: logging.Logger,
        on_taken: OnTaken,
        on_failed: OnFailed,
        prepared: PreparedPods | None = None,
    ) -> None:
        """Start and end pods; ``prepared`` has those that are there already, in which kernels may begin."""
        self._writer, self._view, self._log = writer, view, log
        self._on_taken, self._on_failed = on_taken, on_failed
        self._waiters: dict[str, set[asyncio.Future[None]]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        #: Pods whose end the pool has asked for, or is asking for, by uid.
        self._ended: set[str] = set()
        self._taken: set[str] = set()
        #: Leases that are being ended since the cluster took their pods.
        self._ending: dict[str, PodTaken] = {}
        #: What pods need beside them and was created, or refused, by path and name: it is asked for once.
        self._created: set[tuple[str, str]] = set()
        self._slots = asyncio.Semaphore(_AT_ONCE)
        #: Leases whose pods the pool has ended, so that nobody takes their absence for a loss.
        self._ended_leases: set[str] = set()
        #: Where those are that wait in the cluster's queue, by uid, as far as that is known.
        self.positions: Mapping[str, int] = {}
        self._placement_rate = PlacementRate(times)
        #: The last request of each lease, so that its pod can be made again.
        self._requests: dict[str, KernelPodRequest] = {}
        #: What troubles starting pods, and which of them take too long, by uid; and how long that is.
        self._events: Mapping[str, PodFailureCause] = {}
        self._late: Set[str] = frozenset()
        self._late_after = ""
        #: Reasons that were written down of each pod that does not start, by uid.
        self._noted: dict[str, set[str]] = {}
        self._started = False
        self.stopped = False
        self._prepared = prepared
        view.on_kernel, view.on_notebook_gone = self._changed, self._notebook_gone
        view.on_node, view.on_workload = self._node_changed, self._workload_changed
        view.on_claim = self._claim_changed

    # -- Starting ----------------------------------------------------------

    async def launch(self, request: KernelPodRequest) -> KernelPod:
        """Start a kernel, in place of the one that its lease has; the same request is carried out once."""
        lease_id = request.lease.id
        pods = self._living(lease_id)
        made = next((pod for pod in pods if self._is_of(request, pod)), None)
        for pod in pods:
            if pod is not made:
                self._delete(pod)
        if made is None and not pods and self._prepared is not None:
            made = await self._prepared.take(request)
        self._requests[lease_id] = request  # first: its machine may refuse the pod before its answer is here
        if made is not None and self._prepared is not None and is_prepared(made):
            self._ended_leases.discard(lease_id)
            return replace(self._read(made)[0], beginning=self._prepared.beginning(made, request))
        made = await self._make(request, made)
        self._ended_leases.discard(lease_id)
        return self._read(made)[0]

    async def _make(self, request: KernelPodRequest, made: Manifest | None = None) -> Manifest:
        """Create the pod of an request, unless it was ``made`` before, and its Secret; return the pod."""
        at_once = request.at_once if made is None else 0
        # One after the other, so that none of them has a pod, and waits long for its Secret.
        async with self._placement_rate.slot(request.node, at_once) as placing, self._slots:
            if made is None:
                made = await self._create(request)
                self._view.pods.put(made)
                placing(self._view.pods.get(request.notebook.namespace, made["metadata"]["name"]) or made)
            await self._writer.create(
                path_of(request.notebook.namespace, "secrets"), manifests.secret(made, request.command)
            )
        return made

    async def make_again(self, start: KernelStart) -> bool:
        """Make the pod of a start again if its machine has refused it; return whether it has."""
        request = self._requests.get(start.lease_id)
        refused = [pod for pod in self._living(start.lease_id) if is_refused(pod)]
        if request is None or request.launch != start.launch or not refused:
            return False
        try:
            await self._make(request)
        except GpuPoolError as error:
            self._log.warning(
                "The pod of lease %s cannot be made again yet: %s", ascii(start.lease_id), error
            )
            return True
        for pod in refused:  # not before, or there would be none for a moment, as if the kernel had ended
            self._delete(pod)
        if self._requests.get(start.lease_id) is not request:
            self.end(start.lease_id)  # it was ended, or started anew, meanwhile
        return True

    def _is_of(self, request: KernelPodRequest, pod: Manifest) -> bool:
        """Whether a pod is that of this very request, and has not ended."""
        same = mapping(pod["metadata"].get("annotations")).get(LAUNCH) == request.launch
        if is_prepared(pod) and (self._prepared is None or not self._prepared.knows(pod)):
            return False  # its kernel may not have begun, and nobody knows the key any more
        return same and self._read(pod)[0].phase is not PodPhase.ENDED

    async def _create(self, request: KernelPodRequest) -> Manifest:
        namespace = request.notebook.namespace
        for template in request.parts.claim_templates:
            path = f"/apis/resource.k8s.io/v1/namespaces/{namespace}/resourceclaimtemplates"
            await self._create_once(path, template)
        if request.supervisor is not None:
            await self._create_supervisor(path_of(namespace, "configmaps"), request.supervisor)
        names = [pod["metadata"]["name"] for pod in self._view.own.of(request.lease.id)]
        while True:
            name = manifests.next_name(request.lease.id, names)
            pod = manifests.pod(request, name, time.time())
            made: Manifest | None = await self._writer.create(path_of(namespace, "pods"), pod)
            if made is not None:
                return made
            # A pod of that name was made, and it is not known yet here: perhaps it is this very one.
            found: Manifest | None = await self._writer.read(f"{path_of(namespace, 'pods')}/{name}")
            if found is not None and self._is_of(request, found):
                return found
            names.append(name)

    async def _create_supervisor(self, path: str, supervisor: Manifest) -> None:
        """Create the ConfigMap that pods mount if it is there: without it kernels run, too."""
        try:
            await self._create_once(path, supervisor)
        except NotAllowed:
            self._created.add((path, str(supervisor["metadata"]["name"])))
            self._log.warning(
                "Kernels in pods are not restarted in place: the service may not create ConfigMaps. "
                "Give it the rights of examples/kubernetes/service/rbac.yaml"
            )

    async def _create_once(self, path: str, made: Manifest) -> None:
        known = path, str(made["metadata"]["name"])
        if known not in self._created:
            await self._writer.create(path, made)
            self._created.add(known)

    def annotate(self, lease_id: str, annotations: Mapping[str, str]) -> None:
        """Let the pods of a lease say what it has, where its size has changed and they stay."""
        for pod in self._living(lease_id):
            said = mapping(pod["metadata"].get("annotations"))
            if any(said.get(name) != value for name, value in annotations.items()):
                self._do(self._annotate(pod, annotations))

    async def _annotate(self, pod: Manifest, annotations: Mapping[str, str]) -> None:
        metadata = pod["metadata"]
        path = f"{path_of(metadata['namespace'], 'pods')}/{metadata['name']}"
        changes = {"metadata": {"uid": metadata["uid"], "annotations": dict(annotations)}}
        try:
            changed = await self._writer.change(path, changes)
        except GpuPoolError as error:
            self._log.warning("The pod %s says another size than it has: %s", metadata["name"], error)
            return
        if changed is not None:
            self._view.pods.put(changed)

    # -- Ending ------------------------------------------------------------

    def end(self, lease_id: str) -> None:
        """End all pods of a lease; it is tried until it is done."""
        self._ended_leases.add(lease_id)
        self._requests.pop(lease_id, None)
        for pod in self._view.own.of(lease_id):
            self._delete(pod)
        self._wake(lease_id)

    def known(self) -> frozenset[str]:
        """Return the leases, by id, of which anything is known here."""
        return frozenset(self._view.own.leases()) | self._requests.keys() | self._ended_leases

    def settle(self, known: Collection[str], live: Collection[str]) -> None:
        """End the pods of leases that were :meth:`known`, before those that are ``live`` were read."""
        over = set(known).difference(live)
        for lease_id in over:
            if any(pod["metadata"]["uid"] not in self._ended for pod in self._view.own.of(lease_id)):
                self._log.info("Ending the kernel of lease %s, which has ended", ascii(lease_id))
            self.end(lease_id)
        self._ended_leases -= over
        for lease_id in self._waiters.keys() - set(live):
            self._wake(lease_id)

    def _delete(self, pod: Manifest) -> None:
        uid = pod["metadata"]["uid"]
        if uid not in self._ended:
            self._ended.add(uid)
            self._do(self._delete_until_done(pod))

    async def _delete_until_done(self, pod: Manifest) -> None:
        is_done = False
        try:
            is_done = await self._writer.delete(pod)
        except Exception:  # noqa: BLE001 - whatever it was, the pod is there
            self._log.exception("%s could not be deleted", pod["metadata"]["name"])
        if not is_done:
            self._ended.discard(pod["metadata"]["uid"])  # the next look tries again

    # -- Looking -----------------------------------------------------------

    def has_any(self, lease_id: str) -> bool:
        """Whether a kernel of the lease may use its slice."""
        return any(self._read(pod)[0].phase is not PodPhase.ENDED for pod in self._view.own.of(lease_id))

    def place(self, lease_id: str) -> Place | None:
        """Return where a lease's kernel stands in the cluster's queue; None where it does not wait there."""
        pods = self._living(lease_id)
        return self._place(_newest(pods)) if pods else None

    def queues(self) -> set[tuple[str, str]]:
        """Return the queues, by namespace and name, in which kernels wait."""
        pods = (pod for lease_id in self._view.own.leases() for pod in self._living(lease_id))
        return {kueue.queue_in(pod) for pod in pods if kueue.is_queued(pod)}

    def set_positions(self, positions: Mapping[str, int]) -> None:
        """Take note of who is where in the cluster's queues, by uid, and tell those who moved."""
        before, self.positions = self.positions, positions
        for uid in before.keys() | positions.keys():
            if before.get(uid) != positions.get(uid):
                self._workload_changed(uid)

    def starts(self) -> dict[KernelStart, str]:
        """Return the starts that are under way, each with the uid of its newest pod."""
        found: dict[KernelStart, str] = {}
        for lease_id in self._view.own.leases():
            pods = self._living(lease_id)
            newest = _newest(pods) if pods else None
            if newest is None or mapping(newest.get("status")).get("phase") == "Running":
                continue  # as most are: nothing else need be known of them
            if is_starting(newest, self._around(newest)):
                metadata = newest["metadata"]
                launch = str(mapping(metadata.get("annotations")).get(LAUNCH, ""))
                found[KernelStart(str(metadata["namespace"]), lease_id, launch)] = str(metadata["uid"])
        return found

    def tell_starts(self, events: Mapping[str, PodFailureCause], late: Set[str], late_after: str) -> None:
        """Take note of what troubles starting pods, and which of them take too long, by uid."""
        before, was_late = self._events, self._late
        self._events, self._late, self._late_after = events, late, late_after
        for uid in (before.keys() | events.keys()) | late:
            lease_id = self._view.own.lease_of(uid)
            if lease_id is None or (before.get(uid) == events.get(uid) and uid not in late - was_late):
                continue
            for pod in self._view.own.of(lease_id):
                self._note_cause(pod)
                self._evaluate(pod, is_gone=False)
            self._wake(lease_id)

    def state(self, lease_id: str) -> KernelPod | None:
        """Return how the newest pod of a lease is; None where there is none, and none was ended."""
        pods = self._living(lease_id) or self._view.own.of(lease_id)
        if not pods:
            return ENDED if lease_id in self._ended_leases else None
        return self._read(_newest(pods))[0]

    def taken(self, lease_id: str) -> PodTaken | None:
        """Return why a lease is about to end whose pod the cluster took."""
        return self._ending.get(lease_id)

    async def news(self, lease_id: str, seconds: float) -> None:
        """Return as soon as something may have changed of a lease's pods, or after so many seconds."""
        if self.stopped or seconds <= 0:
            return
        news: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        alarm = news.get_loop().call_later(seconds, _resolve, news)
        waiters = self._waiters.setdefault(lease_id, set())
        waiters.add(news)
        try:
            await news
        finally:
            alarm.cancel()
            waiters.discard(news)
            if not waiters and self._waiters.get(lease_id) is waiters:
                del self._waiters[lease_id]

    def stop_waiting(self) -> None:
        """Let nobody wait any more."""
        self.stopped = True
        for lease_id in list(self._waiters):
            self._wake(lease_id)

    async def stop(self) -> None:
        """Do nothing more; what is not done is found by the next service."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def start(self) -> None:
        """Evaluate pods from now on: all that there is to know of them is known."""
        self._started = True
        for lease_id in self._view.own.leases():
            for pod in self._view.own.of(lease_id):
                taken = self._read(pod)[1]
                if taken is not None and taken.message == BY_SOMEBODY:
                    self._ended.add(pod["metadata"]["uid"])  # most likely by the service that was here before
                else:
                    self._note_failure(None, pod)  # it may have failed while no service was there
        self.evaluate_all()

    def evaluate_all(self) -> None:
        """Evaluate all pods anew, in case something was missed."""
        for lease_id in self._view.own.leases():
            for pod in self._view.own.of(lease_id):
                self._evaluate(pod, is_gone=False)

    def _living(self, lease_id: str) -> list[Manifest]:
        return [p for p in self._view.own.of(lease_id) if p["metadata"]["uid"] not in self._ended]

    def _read(self, pod: Manifest, *, is_gone: bool = False) -> tuple[KernelPod, PodTaken | None]:
        return read_pod(pod, self._around(pod, is_gone=is_gone))

    def _around(self, pod: Manifest, *, is_gone: bool = False) -> PodSurroundings:
        node = str(mapping(pod.get("spec")).get("nodeName") or "")
        owner = next((str(each.get("uid")) for each in listing(pod["metadata"].get("ownerReferences"))), "")
        uid, place = pod["metadata"]["uid"], self._place(pod)
        return PodSurroundings(
            node_ready=self._view.is_ready(node) if node else True,
            notebook_there=self._view.has_notebook(owner),
            ended_by_us=uid in self._ended,
            is_gone=is_gone,
            queue=place.told(time.time()) if place else "",
            event=self._events.get(uid),
            is_made_again=_lease_of(pod) in self._requests,
            waited=self._late_after if uid in self._late else "",
            device="" if node else self._view.why_no_device(pod),
        )

    def _place(self, pod: Manifest) -> Place | None:
        if not kueue.is_queued(pod):
            return None
        uid = pod["metadata"]["uid"]
        return kueue.place(self._view.workload(uid), self.positions.get(uid))

    def _changed(self, before: Manifest | None, now: Manifest | None) -> None:
        pod = now or before
        assert pod is not None
        self._evaluate(pod, is_gone=now is None)
        if now is None or is_placed(now):
            self._placement_rate.release(pod["metadata"]["uid"])
        self._note_failure(before, now)
        if now is not None:
            self._note_cause(now)
        if now is None:
            self._noted.pop(pod["metadata"]["uid"], None)
            self._ended.discard(pod["metadata"]["uid"])
            self._taken.discard(pod["metadata"]["uid"])
        self._wake(_lease_of(pod))

    def _note_failure(self, before: Manifest | None, now: Manifest | None) -> None:
        """Write down, once, that a kernel has failed by itself: its pod goes, and whoever looks for why."""
        if now is None or not self._started:
            return
        state = self._read(now)[0]
        if not state.exit_code or (before is not None and self._read(before)[0].exit_code is not None):
            return
        spec = mapping(now.get("spec"))
        image = next((str(each.get("image")) for each in listing(spec.get("containers"))), "")
        node = str(spec.get("nodeName") or "")
        failure = Failure(time.time(), state.message, now["metadata"]["name"], node, image)
        told = (failure.pod, failure.node, failure.image, failure.message)
        self._log.warning(
            "The kernel of lease %s failed: pod %s on %s, image %s. %s", _lease_of(now), *map(ascii, told)
        )
        self._do(self._keep_failure(_lease_of(now), failure))

    async def _keep_failure(self, lease_id: str, failure: Failure) -> None:
        try:
            await self._on_failed(lease_id, failure)
        except GpuPoolError as error:
            self._log.error("Could not record how the kernel of lease %s failed: %s", ascii(lease_id), error)
        except Exception:  # noqa: BLE001 - only what is shown of it is missing
            self._log.exception("Could not record how the kernel of lease %s failed", ascii(lease_id))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something after what is being done. The loop itself holds tasks weakly."""
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    def _note_cause(self, pod: Manifest) -> None:
        """Write down, once for each reason, why a kernel's pod does not start: for administrators."""
        cause = cause_of(pod, self._around(pod))
        if cause is None or not trouble_of(cause.reason, cause.message):
            return
        noted = self._noted.setdefault(pod["metadata"]["uid"], set())
        if cause.reason not in noted:
            noted.add(cause.reason)
            told = pod["metadata"]["name"], mapping(pod.get("spec")).get("nodeName"), str(cause)
            self._log.warning(
                "The kernel of lease %s does not start yet: pod %s on %s. %s",
                _lease_of(pod),
                *map(ascii, told),
            )

    def _evaluate(self, pod: Manifest, *, is_gone: bool) -> None:
        """End the lease of a pod that was taken away, once."""
        taken, uid = self._read(pod, is_gone=is_gone)[1], pod["metadata"]["uid"]
        if taken is None or uid in self._taken or not self._started:
            return
        self._taken.add(uid)
        self._ending[_lease_of(pod)] = taken
        self._do(self._end_lease(pod, taken))

    async def _end_lease(self, pod: Manifest, taken: PodTaken) -> None:
        lease_id = _lease_of(pod)
        is_done = False
        try:
            await self._on_taken(lease_id, taken)
            is_done = True
        except GpuPoolError as error:
            self._log.error("Lease %s could not be ended: %s", ascii(lease_id), error)
        except Exception:  # noqa: BLE001 - whatever it was, the lease lives
            self._log.exception("Lease %s could not be ended", ascii(lease_id))
        finally:
            self._ending.pop(lease_id, None)
        if is_done:
            self.end(lease_id)
        else:
            self._taken.discard(pod["metadata"]["uid"])  # the next look tries again

    def _notebook_gone(self, uid: str) -> None:
        """End the leases of a notebook server's kernels: the cluster deletes them by themselves."""
        for lease_id in self._view.own.leases():
            for pod in self._view.own.of(lease_id):
                if any(each.get("uid") == uid for each in listing(pod["metadata"].get("ownerReferences"))):
                    self._evaluate(pod, is_gone=True)

    def _node_changed(self, name: str) -> None:
        """Tell those who wait that their machine answers, or does not, or is gone."""
        gone = self._view.is_ready(name) is None
        for lease_id in self._view.own.leases():
            for pod in self._view.own.of(lease_id):
                if mapping(pod.get("spec")).get("nodeName") == name:
                    self._evaluate(pod, is_gone=gone)
                    self._wake(lease_id)

    def _claim_changed(self, name: str) -> None:
        """Tell those who wait for the device of a claim that something is new of it."""
        for lease_id in self._view.own.leases():
            if any(name in claims_of(pod) for pod in self._view.own.of(lease_id)):
                self._wake(lease_id)

    def _workload_changed(self, uid: str) -> None:
        """Tell those who wait in the cluster's queue that it says something new."""
        lease_id = self._view.own.lease_of(uid)
        if lease_id is not None:
            self._wake(lease_id)

    def _wake(self, lease_id: str) -> None:
        for news in self._waiters.get(lease_id, ()):
            _resolve(news)


def _resolve(news: asyncio.Future[None]) -> None:
    if not news.done():
        news.set_result(None)


def _newest(pods: Collection[Manifest]) -> Manifest:
    return max(pods, key=lambda pod: manifests.number_of(pod["metadata"]["name"]))


def _lease_of(pod: Manifest) -> str:
    return str(mapping(pod["metadata"].get("labels")).get(LEASE_LABEL, ""))
