"""What is made when a kernel is started on a slice, its pod and its home, and how many at a time on one node.

HAMi locks a node for each pod that it binds, until the device plugin there has given out the GPU
(``pkg/util/nodelock``). Whoever comes meanwhile is refused, and is tried again after longer and longer
pauses; with some sixty at once that takes minutes (HAMi#915, #1130). So the next is created when one has
been placed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from typing import Final

from gpu_pool.cluster import kueue
from gpu_pool.cluster.api import Api, ApiAway, ApiRefused
from gpu_pool.cluster.dialects import Manifest, Translation
from gpu_pool.cluster.dialects.objects import mapping
from gpu_pool.cluster.dialects.shared import Shared
from gpu_pool.cluster.manifests import KernelPodRequest, check_command, supervisor
from gpu_pool.cluster.notebooks import Notebook
from gpu_pool.cluster.pod_choices import ContainerSettings, chosen_body, refuse_other_nodes, with_indexes
from gpu_pool.cluster.prepared_pods import PreparedPodRequest
from gpu_pool.cluster.settings import ClusterTimes, KubernetesSettings
from gpu_pool.cluster.view import ClusterView
from gpu_pool.courses import CourseFile, Courses
from gpu_pool.policy.queue_state import Rules
from gpu_pool_client import (
    BadRequest,
    Device,
    Holder,
    KernelCommand,
    Lease,
    NotAllowed,
    PoolUnreachable,
    Slice,
    SliceRequest,
)
from gpu_pool_client._framework_caps import pod_caps

#: Where HAMi writes how far it is: ``allocating`` while the node is locked.
_BIND_PHASE: Final = "hami.io/bind-phase"


class PlacementRate:
    """Lets so many pods at a time be placed on each node. Used in one event loop."""

    def __init__(self, times: ClusterTimes) -> None:
        self._times = times
        self._nodes: dict[str, asyncio.Semaphore] = {}
        self._placing: dict[str, tuple[asyncio.Semaphore, asyncio.TimerHandle]] = {}

    @asynccontextmanager
    async def slot(self, node: str, at_once: int) -> AsyncIterator[Callable[[Manifest], None]]:
        """Wait until a pod may be created for a node, and yield what is told of it as soon as it is.

        0 at once, or no node, is for as many as there are. Raises ``PoolUnreachable``.
        """
        if not at_once or not node:
            yield lambda _: None
            return
        slots = self._nodes.setdefault(node, asyncio.Semaphore(at_once))
        await self._acquire(slots)
        handed_on = False

        def placing(pod: Manifest) -> None:
            nonlocal handed_on
            if not is_placed(pod):
                handed_on = True
                self._keep(str(pod["metadata"]["uid"]), slots)

        try:
            yield placing
        finally:
            if not handed_on:
                slots.release()

    async def _acquire(self, slots: asyncio.Semaphore) -> None:
        try:
            await asyncio.wait_for(slots.acquire(), self._times.slot_within)
        except asyncio.TimeoutError:
            raise PoolUnreachable(
                "Many kernels start on the machine of your slice, a few at a time.",
                "Your slice is kept, and your kernel starts soon.",
            ) from None

    def _keep(self, uid: str, slots: asyncio.Semaphore) -> None:
        """Keep a slot for a pod that was created, until it is placed, is gone, or takes too long."""
        timer = asyncio.get_running_loop().call_later(self._times.placed_within, self.release, uid)
        self._placing[uid] = slots, timer

    def release(self, uid: str) -> None:
        """Let the next one come, if that pod kept it back."""
        held = self._placing.pop(uid, None)
        if held is not None:
            held[1].cancel()
            held[0].release()


def is_placed(pod: Manifest) -> bool:
    """Whether a pod has its node, and nothing is locked for it there any more."""
    annotations = mapping(mapping(pod.get("metadata")).get("annotations"))
    bound = bool(mapping(pod.get("spec")).get("nodeName"))
    return bound and annotations.get(_BIND_PHASE) != "allocating"


_MANY: Final = frozenset({"ReadWriteMany"})
#: Of a claim with nothing else: several machines can read it, and nobody writes.
_READERS: Final = frozenset({"ReadOnlyMany"})
_ONE_POD: Final = frozenset({"ReadWriteOncePod"})
#: Seconds for which it holds how a claim may be used: another claim may be made in its name.
_MODES_HOLD: Final = 60.0
#: Claims that are remembered before all are forgotten.
_MOST_CLAIMS: Final = 10_000


class VolumeClaims:
    """The homes of one pool's users."""

    def __init__(
        self, api: Api, settings: KubernetesSettings, courses: Callable[[], Courses], log: logging.Logger
    ) -> None:
        self._api, self._settings, self._courses, self._log = api, settings, courses, log
        #: How a claim may be used and until when that holds, by namespace and name.
        self._modes: dict[tuple[str, str], tuple[frozenset[str], float]] = {}

    def course(self, name: str | None) -> CourseFile | None:
        """Return a course by its name."""
        return self._courses().usable.get(name or "")

    def body(self, holder: Holder, notebook: Notebook) -> ContainerSettings:
        """Return what a kernel gets besides its slice. Raises ``NotAllowed`` where it lacks its home."""
        return chosen_body(self._settings, self.course(holder.course), notebook)

    async def devices_beside(
        self,
        request: SliceRequest,
        holder: Holder,
        notebook: Notebook,
        devices_on: Callable[[str], Sequence[Device]],
        rules: Rules,
    ) -> Collection[str]:
        """Return the uuids of the GPUs that a kernel can have with its home; none mean all.

        Raises ``NotAllowed`` where there will never be one.
        """
        if await self._is_anywhere(holder, notebook):
            return ()
        there = devices_on(notebook.node)
        refuse_other_nodes(request, there, notebook.node, rules)
        return [each.uuid for each in there]

    async def check(self, holder: Holder, notebook: Notebook, node: str) -> None:
        """Refuse a kernel on a node where its home cannot be used."""
        if notebook.node != node and not await self._is_anywhere(holder, notebook):
            raise NotAllowed(
                f"Your home folder can be used on one machine at a time, and is in use on {notebook.node}; "
                f"your slice is on {node}.",
                "Release the slice and ask for it again from this server.",
            )

    async def only_node(self, holder: Holder, notebook: Notebook) -> str:
        """Return the only node on which a kernel has its home; empty if any will do."""
        return "" if await self._is_anywhere(holder, notebook) else notebook.node

    async def _is_anywhere(self, holder: Holder, notebook: Notebook) -> bool:
        home = self.body(holder, notebook).home
        if home is None:
            return True
        modes = await self._modes_of(notebook.namespace, home.claim)
        if modes == _ONE_POD:
            raise NotAllowed(
                "Your home folder can be used by one pod at a time (ReadWriteOncePod), "
                "and your notebook server uses it.",
                "Ask the administrator for home folders that several pods can use (ReadWriteMany), "
                "or for a course with home: none.",
            )
        return bool(modes & _MANY) or modes == _READERS

    async def _modes_of(self, namespace: str, claim: str) -> frozenset[str]:
        known, until = self._modes.get((namespace, claim), (None, 0.0))
        if known is not None and time.monotonic() < until:
            return known
        path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{claim}"
        try:
            found = await self._api.ask("GET", path)
        except (ApiAway, ApiRefused) as error:
            if known is not None and isinstance(error, ApiAway):
                return known  # it is hardly another one now
            self._log.error("The volume claim %s cannot be read: %s", claim, error)
            raise PoolUnreachable(
                "The cluster does not say at the moment where your home folder can be used.",
                "Try again in a minute.",
            ) from error
        modes = frozenset(map(str, found.get("spec", {}).get("accessModes") or ()))
        if len(self._modes) >= _MOST_CLAIMS:
            self._modes.clear()
        self._modes[namespace, claim] = modes, time.monotonic() + _MODES_HOLD
        return modes


class PodBuilder:
    """Makes the requests for the pods of one pool's kernels."""

    def __init__(self, settings: KubernetesSettings, view: ClusterView, volume_claims: VolumeClaims) -> None:
        self._settings, self._view, self._volume_claims = settings, view, volume_claims
        files = settings.supervisor
        self._supervisor = supervisor(files, settings.pool) if files else None

    async def of(self, lease: Lease, kernel: KernelCommand, server: str) -> KernelPodRequest:
        """Return the request for a kernel's pod on a held lease, beside its user's notebook server.

        Raises ``PoolUnreachable`` where the cluster shares no GPUs any more, ``BadRequest`` for a command
        that no pod may have, and ``NotAllowed`` where there is no such notebook server, or no home with it.
        """
        dialect = self._view.choice.dialect
        if dialect is None:
            raise PoolUnreachable(f"{self._view.choice}", "Tell the administrator; your slice is kept.")
        bans = dialect.table.bans
        check_command(kernel, bans, require_curve=self._settings.require_curve)
        notebook = self._notebook(lease.holder.user, server)
        body = self._volume_claims.body(lease.holder, notebook)
        queue = kueue.queue_of(lease.holder.course) if self._settings.kueue else ""
        if queue:
            node = await self._volume_claims.only_node(lease.holder, notebook)
            asked = kueue.of_its_kind(lease, self._view.devices())
            translation = self._view.translate(with_indexes(asked, ()), node)
        else:
            node = lease.slices[0].device.node
            await self._volume_claims.check(lease.holder, notebook, node)
            translation = self._translate(lease, node)
        parts = translation.pod
        if isinstance(dialect, Shared):
            caps = pod_caps(lease.slices, kernel.environment)
            parts = replace(dialect.parts(lease.slices), environment=caps)
        name, at_once = self._settings.pool, dialect.table.at_once
        return KernelPodRequest(
            name,
            lease,
            notebook,
            kernel,
            node,
            parts,
            bans,
            body,
            queue,
            at_once,
            self._supervisor,
        )

    def prepared(self, notebook: Notebook, course: str, part: Slice) -> PreparedPodRequest | None:
        """Return the pod that could be prepared for a notebook server and a course, for this slice.

        None where it cannot be: the dialect, or the device plugin, gives the device with the pod, or there is
        no supervisor.
        Raises ``NotAllowed`` where no kernel could have the home.
        """
        dialect, said = self._view.choice.dialect, self._volume_claims.course(course)
        if not isinstance(dialect, Shared) or self._supervisor is None or said is None:
            return None
        parts, device = dialect.parts((part,)), part.device
        if dialect.is_replicated(device.uuid):
            return None  # it would have a replica that a kernel needs
        # Some frameworks read theirs when they are imported.
        caps = pod_caps((part,), {}) if said.preload else {}
        return PreparedPodRequest(
            pool=self._settings.pool,
            course=course,
            notebook=notebook,
            device=device.uuid,
            node=device.node,
            parts=replace(parts, annotations={}, environment=caps),
            bans=dialect.table.bans,
            body=self._volume_claims.body(Holder(notebook.user, course), notebook),
            supervisor=self._supervisor,
            preload=said.preload or (),
            seconds=self._settings.prepared_for,
        )

    def _notebook(self, user: str, server: str) -> Notebook:
        found = self._view.notebook(user, server)
        if found is None:
            name = f"server {server!a}" if server else "default server"
            raise NotAllowed(
                f"The {name} of {user!a} does not run in {self._view.namespaces}, "
                "so no kernel can be started for it.",
                "Start it from a notebook server that the JupyterHub has started there.",
            )
        return found

    def _translate(self, lease: Lease, node: str) -> Translation:
        """Ask for the very GPUs of a lease where the dialect can say which, else for any of that node."""
        indexes = tuple(sorted(part.device.index for part in lease.slices))
        exact = with_indexes(lease.request, indexes)
        with suppress(BadRequest):
            return self._view.translate(exact, node)
        return self._view.translate(with_indexes(lease.request, ()), node)
