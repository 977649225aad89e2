"""Making prepared pods, ending them, and having kernels begin in them. See ``prepared_pods``.

The key of a pod's supervisor is made here and kept in memory, and in the pod's Secret, which the service
cannot read: no kernel can begin in what an earlier service has prepared, and so that ends.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timezone
from typing import Final

from gpu_pool.cluster import manifests
from gpu_pool.cluster.api import ApiWriter, path_of
from gpu_pool.cluster.dialects import Manifest, Pod, label_value
from gpu_pool.cluster.dialects.objects import listing
from gpu_pool.cluster.kept_objects import is_ending
from gpu_pool.cluster.manifests import KernelPodRequest
from gpu_pool.cluster.notebooks import Notebook
from gpu_pool.cluster.pod_builder import PodBuilder, VolumeClaims
from gpu_pool.cluster.prepared_pods import (
    PreparedFacts,
    PreparedPod,
    PreparedPodRequest,
    Server,
    ends,
    makes,
    statuses,
    taken_by,
    waits_for_room,
)
from gpu_pool.cluster.settings import KubernetesSettings
from gpu_pool.cluster.view import ClusterView
from gpu_pool.courses import CourseFile, Courses
from gpu_pool.policy import placement
from gpu_pool.policy.queue_state import Rules
from gpu_pool_client import (
    Beginning,
    Device,
    DeviceStatus,
    GpuPoolError,
    Holder,
    Lease,
    NotAllowed,
    PreparedStatus,
    Slice,
)

#: Bytes of what a supervisor is told at most: a longer line it does not read.
_MOST_TOLD: Final = 180_000
#: Random bytes in a pod's name.
_NAME_BYTES: Final = 8
#: Bytes of its supervisor's key.
_KEY_BYTES: Final = 32


class PreparedPods:
    """The prepared pods of one pool. Used in one event loop."""

    def __init__(
        self,
        writer: ApiWriter,
        view: ClusterView,
        settings: KubernetesSettings,
        courses: Callable[[], Courses],
        pod_builder: PodBuilder,
        volume_claims: VolumeClaims,
        rules: Rules,
        log: logging.Logger,
    ) -> None:
        self._writer, self._view, self._settings, self._log = writer, view, settings, log
        self._courses, self._pod_builder, self._volume_claims = courses, pod_builder, volume_claims
        self._rules = rules
        #: The keys of the supervisors, by the uid of their pods, those included that were taken.
        self._keys: dict[str, str] = {}
        #: Servers for which none is made before their next kernel, by uid, and why, in a sentence.
        self._in_vain: dict[str, str] = {}
        #: The pods that are being taken, by uid.
        self._taking: set[str] = set()
        self._working: asyncio.Task[None] | None = None
        #: The last trouble, which is told once.
        self._told = ""
        #: What there was at the last look.
        self._last: tuple[PreparedStatus, ...] = ()

    async def stop(self) -> None:
        """Do nothing more; what is not done is found by the next service."""
        if self._working is not None:
            self._working.cancel()
            await asyncio.gather(self._working, return_exceptions=True)

    # -- For one kernel ----------------------------------------------------------

    def knows(self, pod: Manifest) -> bool:
        """Whether a kernel can begin in a pod that was prepared."""
        return pod["metadata"]["uid"] in self._keys

    async def take(self, order: KernelPodRequest) -> Manifest | None:
        """Let a kernel have a prepared pod of its server's; return that, None where there is none for it."""
        found = self._fitting(order)
        if found is None or len(self._content(order)) > _MOST_TOLD:
            return None
        metadata = found["metadata"]
        path = f"{path_of(metadata['namespace'], 'pods')}/{metadata['name']}"
        self._taking.add(metadata["uid"])
        try:
            taken: Manifest | None = await self._writer.change(path, taken_by(order, found, time.time()))
            if taken is not None:
                self._view.pods.put(taken)
        except NotAllowed as error:
            self._keys.pop(metadata["uid"], None)
            self._tell(
                f"Prepared pods cannot be taken: {error} The service needs the rights of "
                "examples/kubernetes/service/shared"
            )
            return None
        finally:
            self._taking.discard(metadata["uid"])
        return None if taken is None or is_ending(taken) else taken

    def beginning(self, pod: Manifest, order: KernelPodRequest) -> Beginning:
        """Return what the supervisor of a pod that was taken is to be told."""
        return Beginning(self._keys[pod["metadata"]["uid"]], self._content(order))

    def _content(self, order: KernelPodRequest) -> str:
        return json.dumps(manifests.beginning(order))

    def _fitting(self, order: KernelPodRequest) -> Manifest | None:
        lease = order.lease
        if not order.command.can_begin or len(lease.slices) != 1:
            return None
        device = lease.slices[0].device
        for pod in self._free():
            read = PreparedPod.read(pod)
            if read.server != order.notebook.uid or read.device != device.uuid or not read.is_running:
                continue
            request = self._request(order.notebook, lease.holder.course or "", device)
            is_same = request is not None and request.shape == read.shape and request.fits(order)
            if is_same and self.knows(pod) and self._view.is_ready(read.node):
                return pod
        return None

    def _free(self) -> list[Manifest]:
        """Return the prepared pods that nobody has taken, or is about to."""
        found = self._view.prepared.values()
        return [pod for pod in found if pod["metadata"]["uid"] not in self._taking]

    def _request(self, notebook: Notebook, course: str, device: Device) -> PreparedPodRequest | None:
        said = self._courses().usable.get(course)
        if said is None:
            return None
        try:
            counted = self._view.counted_as(said.default_slice.request)
            part = placement.cut(counted, device, self._rules)
            return self._pod_builder.prepared(notebook, course, part)
        except GpuPoolError:  # no such slices here, or no kernel of it could have its home
            return None

    # -- For all of them -----------------------------------------------------------

    def reconcile(self, leases: Sequence[Lease]) -> None:
        """Do what there is to do, for the leases that live: make some, end others."""
        if self._working is not None and not self._working.done():
            return
        courses = self._offering()
        if not courses and not self._view.prepared:
            self._last = ()
            return
        there = {pod["metadata"]["uid"] for pod in self._view.prepared.values()} | self._taking
        self._keys = {
            uid: key for uid, key in self._keys.items() if uid in there or self._view.own.pod(uid) is not None
        }
        facts = self._facts(leases, courses)
        most = {name: course.kubernetes.prepared_pods or 0 for name, course in courses.values()}
        self._last = statuses(facts, most)
        why = ends(facts, time.time())
        wanted = makes(facts)
        if why or wanted:
            self._working = asyncio.create_task(self._work(facts, why, wanted))

    def statuses(self) -> tuple[PreparedStatus, ...]:
        """Return what there was of each course that is open, at the last look."""
        return self._last

    def _facts(self, leases: Sequence[Lease], courses: Mapping[str, tuple[str, CourseFile]]) -> PreparedFacts:
        devices = {each.uuid: each for each in self._view.devices()}
        held: dict[str, list[Slice]] = {}
        for lease in leases:
            for part in lease.slices:
                if part.device.uuid in devices and self._view.takes_pods(part.device.node):
                    held.setdefault(part.device.uuid, []).append(part)
        pods = [PreparedPod.read(pod) for pod in self._free()]
        notebooks = {each.uid: each for each in self._view.notebooks()}
        shapes: dict[str, str] = {}
        for pod in pods:
            notebook, device = notebooks.get(pod.server), devices.get(pod.device)
            name = courses[notebook.course_label][0] if notebook and notebook.course_label in courses else ""
            request = self._request(notebook, name, device) if notebook and device and name else None
            if request is not None:
                shapes[pod.uid] = request.shape
        having = {(lease.holder.user, lease.holder.course) for lease in leases}
        servers = self._servers(list(notebooks.values()), courses, self._statuses(devices, held), having)
        return PreparedFacts(
            pods=pods,
            servers=servers,
            shapes=shapes,
            known=frozenset(self._keys),
            leases={uuid: len(parts) for uuid, parts in held.items()},
            crowded=self._crowded(devices),
            prepared_for=self._settings.prepared_for,
            per_node=self._settings.prepared_per_node,
        )

    def _crowded(self, devices: Mapping[str, Device]) -> set[str]:
        """Return the nodes on which a kernel's pod waits for room."""
        own, shared = self._view.own, self._view.shared
        pods = [pod for lease_id in own.leases() for pod in own.of(lease_id) if waits_for_room(pod)]
        held = (part for pod in map(Pod.read, pods) if pod and shared for part in shared.holds(pod))
        return {devices[part.uuid].node for part in held if part.uuid in devices}

    def _offering(self) -> Mapping[str, tuple[str, CourseFile]]:
        """Return the courses that are open and have prepared pods, by the label of their servers."""
        if self._view.shared is None or not self._settings.prepared_per_node:
            return {}
        now = datetime.now(timezone.utc)
        return {
            label_value(name): (name, course)
            for name, course in self._courses().usable.items()
            if course.kubernetes.prepared_pods and course.timetable.is_open(now)
        }

    def _servers(
        self,
        notebooks: Sequence[Notebook],
        courses: Mapping[str, tuple[str, CourseFile]],
        statuses: Sequence[DeviceStatus],
        having: Collection[tuple[str, str | None]],
    ) -> list[Server]:
        own = self._view.own
        busy = {
            str(each.get("uid"))
            for lease_id in own.leases()
            for pod in own.of(lease_id)
            for each in listing(pod["metadata"].get("ownerReferences"))
        }
        # And who is about to have one.
        busy |= {
            each.uid for each in notebooks if (each.user, courses.get(each.course_label, ("",))[0]) in having
        }
        could_use = {each.uid for each in notebooks} - busy
        self._in_vain = {uid: why for uid, why in self._in_vain.items() if uid in could_use}
        places: dict[str, Device | None] = {}
        found = []
        for notebook in notebooks:
            name, course = courses.get(notebook.course_label, ("", None))
            if course is None or not notebook.node:
                continue
            if name not in places:
                places[name] = self._place(course, statuses)
            place, most = places[name], course.kubernetes.prepared_pods or 0
            device, node = ("", "") if place is None else (place.uuid, place.node)
            has_kernel, in_vain = notebook.uid in busy, self._in_vain.get(notebook.uid, "")
            found.append(Server(notebook.uid, name, most, device, node, has_kernel, in_vain))
        return found

    def _statuses(
        self, devices: Mapping[str, Device], held: Mapping[str, Sequence[Slice]]
    ) -> list[DeviceStatus]:
        closed = {uuid for uuid, use in self._view.others(()).items() if use.closed}
        return [
            DeviceStatus(
                device,
                sum(part.milli for part in held.get(uuid, ())),
                sum(part.memory_mib for part in held.get(uuid, ())),
                sum(part.contexts for part in held.get(uuid, ())),
                len(held.get(uuid, ())),
                drained=uuid in closed,
            )
            for uuid, device in devices.items()
        ]

    def _place(self, course: CourseFile, statuses: Sequence[DeviceStatus]) -> Device | None:
        """Return the device on which the course's slice would be now; None where no lease has that one."""
        in_use = {each.device.uuid for each in statuses if each.leases}
        try:
            counted = self._view.counted_as(course.default_slice.request)
        except GpuPoolError:  # no such slices here
            return None
        parts = placement.place(counted, statuses, self._rules)
        if parts is None or len(parts) != 1 or parts[0].device.uuid not in in_use:
            return None
        return parts[0].device

    # -- What is written -------------------------------------------------------------

    async def _work(self, facts: PreparedFacts, why: Mapping[str, str], wanted: Sequence[Server]) -> None:
        """End pods and make others, one after the other: kernels come first."""
        by_uid = {pod.uid: pod for pod in facts.pods}
        for pod in self._free():
            uid = pod["metadata"]["uid"]
            if uid not in why or uid in self._taking:  # since it was looked at
                continue
            name = pod["metadata"]["name"]
            self._log.info("The prepared pod %s ends, since %s", ascii(name), why[uid])
            is_late = time.time() >= by_uid[uid].made_at + facts.prepared_for
            if by_uid[uid].is_over or is_late or by_uid[uid].node in facts.crowded:
                self._in_vain[by_uid[uid].server] = (
                    f"The last one ended, since {why[uid]}; another comes after its server's next kernel."
                )
            if not is_ending(pod):
                await self._writer.delete(pod)
        for server in wanted:
            await self._try_to_make(server)

    async def _try_to_make(self, server: Server) -> None:
        try:
            await self._make(server)
        except GpuPoolError as error:
            self._in_vain[server.uid] = f"It could not be made: {error}"
            self._tell(f"A pod cannot be prepared for course {server.course!a}: {error}")

    async def _make(self, server: Server) -> None:
        notebook = next((each for each in self._view.notebooks() if each.uid == server.uid), None)
        device = next((each for each in self._view.devices() if each.uuid == server.device), None)
        if notebook is None or device is None:
            return
        request = self._request(notebook, server.course, device)
        if request is None:
            return
        await self._volume_claims.check(Holder(notebook.user, server.course), notebook, device.node)
        namespace = notebook.namespace
        await self._writer.create(path_of(namespace, "configmaps"), request.supervisor)
        name = f"gpu-pool-prepared-{secrets.token_hex(_NAME_BYTES)}-0"
        made: Manifest | None = await self._writer.create(path_of(namespace, "pods"), request.pod(name))
        if made is None:
            return
        key = secrets.token_hex(_KEY_BYTES)
        self._keys[made["metadata"]["uid"]] = key
        self._view.pods.put(made)
        await self._writer.create(path_of(namespace, "secrets"), manifests.secret_of(made, {"key": key}))
        self._log.info("The pod %s is prepared on %s for course %s", name, device.node, server.course)

    def _tell(self, words: str) -> None:
        if words != self._told:
            self._log.warning("%s", words)
        self._told = words
