"""The pool over a cluster: the store of any pool, the cluster's GPUs, and kernels in pods."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import ClassVar, Final
from weakref import WeakValueDictionary

from gpu_pool.caller import Caller
from gpu_pool.clock import Clock
from gpu_pool.cluster import kueue
from gpu_pool.cluster.api import Api, ApiAway, ApiRefused, ApiWriter, connect
from gpu_pool.cluster.kernel_pods import KernelPods
from gpu_pool.cluster.pod_builder import PodBuilder, VolumeClaims
from gpu_pool.cluster.pod_choices import refuse_beside_server
from gpu_pool.cluster.pod_starts import KueuePositions, PodStarts
from gpu_pool.cluster.pod_states import NODE_GONE, VANISHED, PodTaken
from gpu_pool.cluster.scale_up_controller import ScaleUpController
from gpu_pool.cluster.settings import KubernetesSettings
from gpu_pool.cluster.snapshot import served_of_kueue
from gpu_pool.cluster.view import ClusterView
from gpu_pool.courses import Courses
from gpu_pool.devices import Inventory
from gpu_pool.devices.inventory import Reading
from gpu_pool.embedded.pool import EmbeddedPool
from gpu_pool.enforcement import Isolation
from gpu_pool.enforcement.tiers import Tier, TierStatement
from gpu_pool.policy import placement
from gpu_pool.pool.reconciler import Facts
from gpu_pool.settings import PoolSettings
from gpu_pool.store.device_table import ForeignUse, SeenFrom
from gpu_pool.store.lease_table import gone, lease_number
from gpu_pool.store.leases import LeaseStore
from gpu_pool_client import (
    Activity,
    BadRequest,
    Device,
    EndReason,
    Enforcement,
    Failure,
    Holder,
    KernelCommand,
    KernelPod,
    Lease,
    LeaseGone,
    LeaseState,
    NotAllowed,
    Outlook,
    PodPhase,
    PoolUnreachable,
    Process,
    SliceRequest,
)
from gpu_pool_client._durations import format_duration
from gpu_pool_client._remote import bodies


class DialectTier(Tier):
    """Slices that the cluster enforces, or only counts. ``enforcement`` says which."""

    name = "kubernetes"

    def __init__(self, enforcement: Callable[[SliceRequest], Enforcement]) -> None:
        self._enforcement = enforcement

    def adapt(self, device: Device) -> Device:
        """Return the device as it is: the dialect has said all of it."""
        return device

    def describe(self, lease: Lease) -> TierStatement:
        """Say what the dialect says. Variables are set in the pod by the cluster's own parts."""
        return TierStatement(enforcement=self._enforcement(lease.request))


class ClusterIsolation(Isolation):
    """The isolation of a cluster's GPUs."""

    in_pods: ClassVar[bool] = True

    def __init__(self, enforcement: Callable[[SliceRequest], Enforcement]) -> None:
        tier = DialectTier(enforcement)
        super().__init__(lambda _: (tier,), otherwise=tier)


#: What devices are seen from, in the store: whichever pod the service runs in, it is the same cluster.
_SEEN_FROM: Final = "kubernetes"
#: Seconds between two looks at what has changed: many changes are looked at once.
_REST: Final = 0.5
#: Seconds that a forecast waits for what has just come to be written down, and between two looks at that.
_NOTED_WITHIN, _NOTED_EVERY = 2.0, 0.02
#: Requests that are being decided at the same time; the others wait for their turn here. In the
#: store they would be refused after some time, and what others ask of it would wait for them all.
_AT_ONCE: Final = 32
#: What is told to whoever waits while nodes do not show the GPUs that they have.
_AWAY: Final = (
    "A machine with GPUs cannot provide any at the moment, for instance because their driver is being "
    "replaced. Usually that takes less than a minute; your request waits for it."
)
#: Seconds after which it is looked whether anything was missed.
_LOOK_EVERY: Final = 30.0


class ClusterPool(EmbeddedPool):
    """A pool whose devices are a cluster's, and whose kernels run in pods. Made by :func:`open_cluster`."""

    # Its store goes with the service's pod from one machine to another, whose uptimes say nothing.
    _clock = Clock(uptime=time.time)
    boot = ""

    def __init__(
        self,
        path: Path,
        settings: PoolSettings,
        kubernetes: KubernetesSettings,
        api: Api,
        courses: Callable[[], Courses],
        log: logging.Logger,
    ) -> None:
        self._kubernetes, self._api, self._log = kubernetes, api, log
        self._courses = courses
        self._view = ClusterView(api, kubernetes, log)
        writer = ApiWriter(api, log)
        self._kernels = KernelPods(writer, self._view, log, self._end_taken, self._keep_failure)
        self._volume_claims = VolumeClaims(api, kubernetes, courses, log)
        self._pod_builder = PodBuilder(kubernetes, self._view, self._volume_claims)
        self._live: frozenset[str] = frozenset()
        #: What is written down of the cluster, with which leases lived then.
        self._seen: tuple[tuple[Device, ...], Mapping[str, ForeignUse]] | None = None
        self._seen_with: frozenset[str] | None = None
        #: Since when leases wait for what nothing could give, by id.
        self._hopeless: dict[str, float] = {}
        #: The devices of which that was looked at.
        self._checked: tuple[Device, ...] | None = None
        #: When it is looked next whether anything was missed (``time.monotonic()``).
        self._look_at = 0.0
        self._looking = asyncio.Lock()
        self._turns = asyncio.Semaphore(_AT_ONCE)
        self._launching: WeakValueDictionary[str, asyncio.Lock] = WeakValueDictionary()
        self._following: list[asyncio.Task[None]] = []
        super().__init__(
            path,
            settings,
            # The devices come from the watches, in the event loop.
            lambda: Inventory((), "the cluster"),
            ClusterIsolation(self._view.enforcement),
            owner=True,
        )
        self._growth = ScaleUpController(
            api, writer, self._view, kubernetes, settings.rules, self._store, log
        )

    async def __aenter__(self) -> ClusterPool:
        """Learn what the cluster has, and follow it. Raises ``PoolUnreachable`` in words."""
        try:
            await self._start()
        except BaseException:
            await self.close()
            raise
        return self

    async def _start(self) -> None:
        await self._view.start()
        if self._kubernetes.kueue:
            await self._look_at_kueue()
        self._log.info("The cluster shares its GPUs by %s", self._view.choice)
        for namespace, count in sorted(self._view.strays().items()):
            self._log.warning(
                "%d kernels of this pool are in %s, which c.KubernetesSettings.more_namespaces does not "
                "list: they are not managed, and end with their notebook servers",
                count,
                namespace,
            )
        self._look_at = time.monotonic() + _LOOK_EVERY
        await self._follow_once()
        await self.reconcile()
        self._kernels.start()
        self._keep_in_order(asyncio.get_running_loop())
        self._following.append(asyncio.create_task(self._wake_on_changes()))
        starts = PodStarts(self._api, self._kernels, self._log, self._kubernetes.start_within)
        self._following.append(asyncio.create_task(starts.run()))
        if self._kubernetes.kueue:
            places = KueuePositions(self._api, self._kernels, self._log)
            self._following.append(asyncio.create_task(places.run()))
        if self._view.groups:
            self._following.append(asyncio.create_task(self._growth.run()))

    async def close(self) -> None:
        """Follow the cluster no more, and close the store. Kernels live on."""
        for task in self._following:
            task.cancel()
        await self._kernels.stop()
        await self._view.stop()
        await super().close()
        await self._api.close()

    def stop_waiting(self) -> None:
        """Let nobody wait for news of a pod any more."""
        self._kernels.stop_waiting()

    # -- The cluster's GPUs --------------------------------------------------

    async def _wake_on_changes(self) -> None:
        """Have a pass made when something of the cluster has changed, and not for each of many changes."""
        while True:
            await self._view.changed.wait()
            self._reconciler.wake()
            await asyncio.sleep(_REST)

    async def _observe(self, facts: Facts) -> bool:
        """See what the cluster has by now, now and then also whether anything was missed."""
        if time.monotonic() >= self._look_at or self._view.until_forgotten() == 0:
            self._look_at = time.monotonic() + _LOOK_EVERY
            self._kernels.look_at_all()
            self._view.look_again()
        facts.bound = self._kernels.known()
        # One odd node must not keep leases from being ended.
        try:
            await self._follow_once()
        finally:
            await super()._observe(facts)
        return False

    async def _end_gone(self, facts: Facts) -> bool:
        """End the leases whose processes are gone, and those whose nodes are, and the waits for nothing."""
        changed = await super()._end_gone(facts)
        facts.status = status = await self._store.run(LeaseStore.status, self.url)
        self._live = frozenset(each.id for each in (*status.leases, *status.queue))
        for lease in status.leases:
            parts = [part for part in lease.slices if not part.device.unbounded]
            if any(not self._view.has_node(part.device.node) for part in parts):
                await self._end_taken(lease.id, NODE_GONE)
                changed = True
        await self._refuse_the_hopeless()
        return changed

    async def _serve_queue(self, facts: Facts) -> bool:
        changed = await super()._serve_queue(facts)
        if self._kubernetes.kueue and facts.status is not None:
            await self._follow_queue(facts.status.leases)
        return changed

    async def _unbind(self, facts: Facts) -> bool:
        """End the kernels of leases that have ended."""
        if facts.status is not None:
            self._kernels.settle(facts.bound, self._live)
        return await super()._unbind(facts)

    async def _follow_once(self) -> None:
        """Write down what the cluster has by now. Many ends at once take one look at it."""
        async with self._looking:
            live = self._live
            if not self._view.changed.is_set() and live == self._seen_with:
                return
            self._view.changed.clear()
            try:
                await self._write_down(self._view.devices(), self._view.others(live))
            except BaseException:
                self._view.changed.set()
                raise
            self._seen_with = live

    async def _write_down(self, devices: tuple[Device, ...], others: Mapping[str, ForeignUse]) -> None:
        if (devices, others) == self._seen:
            return
        await self._store.run(_register, devices, others)
        self._seen = devices, others

    async def _refuse_the_hopeless(self) -> None:
        """End the waits for what no node could give any more, once that has been so for long enough."""
        devices, away = self._view.devices(), self._view.away
        if not away and not self._hopeless and devices == self._checked:
            return  # whoever came meanwhile was checked when they asked
        self._checked = devices
        there = self._view.lasting()
        found = await self._store.run(LeaseStore.hopeless, there)
        now, away_for = time.monotonic(), self._kubernetes.gpus_away_for
        self._hopeless = {lease_id: self._hopeless.get(lease_id, now) for lease_id in found}
        for lease_id, error in found.items():
            if now >= self._hopeless[lease_id] + away_for:
                message = f"{error.message} That has not changed for {format_duration(away_for)}."
                with suppress(LeaseGone):
                    await self.revoke(lease_id, message, EndReason.DEVICE_LOST)
                    self._log.warning("Lease %s no longer waits. %s", ascii(lease_id), message)

    # -- Kueue ---------------------------------------------------------------

    async def _look_at_kueue(self) -> None:
        """Refuse, with ``BadRequest``, to begin where Kueue's objects cannot be read: all would just wait."""
        try:
            version = kueue.version_of(await served_of_kueue(self._api))
        except ApiAway as away:
            raise PoolUnreachable(f"The cluster's API server does not answer: {away}.") from away
        except ApiRefused as refused:  # whoever may not ask finds out by reading them
            self._log.warning("The API server does not say in which versions it serves Kueue: %s", refused)
        else:
            self._log.info("Kueue has the cluster's queue; its objects are read as %s", version)

    async def _follow_queue(self, leases: Collection[Lease]) -> None:
        """Park the leases whose kernels wait in the cluster's queue, and resume those that were admitted."""
        for lease in leases:
            waits = self._kernels.is_queued(lease.id)
            if waits is not None and waits != (lease.state is LeaseState.PARKED):
                with suppress(LeaseGone):
                    await self._counted(lease.id, waits=waits)

    async def _counted(self, lease_id: str, *, waits: bool) -> Lease:
        """Count nothing for a lease that waits, and its slice from now on for one that does not."""
        if waits:
            return await self._store.run(LeaseStore.park, lease_id, queued=True)
        return await self._store.run(LeaseStore.resume, lease_id)

    def _counted_as(self, request: SliceRequest) -> SliceRequest:
        """Return what the cluster grants for a request, where it rounds that up."""
        return self._view.counted_as(request)

    async def request(
        self,
        request: SliceRequest,
        holder: Holder,
        key: str,
        *,
        caller: Caller | None = None,
    ) -> Lease:
        """See ``EmbeddedPool.request``."""
        async with self._turns:
            # One that is known is answered, whatever the cluster would have for a new one by now.
            found = await self._store.run(LeaseStore.find, key)
            if found is not None:
                return await self._enforcer.hand_out(found)
            return await super().request(request, holder, key, caller=caller)

    # -- Groups of nodes that can grow ----------------------------------------

    async def explain(self, lease_id: str) -> Outlook:
        """See ``Pool.explain``.

        Says how a machine comes, where one is to be started, and so where GPUs are waited for
        that their machines do not show.
        """
        outlook = await super().explain(lease_id)
        closed = self._why_closed((await self.get_lease(lease_id)).request)
        outlook = _with_growth(outlook, self._growth.outlook(lease_number(lease_id)))
        outlook = replace(outlook, why=" ".join(filter(None, (outlook.why, closed))))
        return replace(outlook, why=f"{_AWAY} {outlook.why}") if self._view.away else outlook

    async def forecast(
        self,
        request: SliceRequest,
        holder: Holder,
        *,
        caller: Caller | None = None,
    ) -> Outlook | None:
        """See ``Pool.forecast``, and :meth:`explain`."""
        await self._until_noted()
        outlook = await super().forecast(request, holder, caller=caller)
        return outlook and _with_growth(outlook, self._growth.prospect(request))

    def _why_closed(self, request: SliceRequest) -> str:
        """Say which machines could grant a request, and take no kernels now."""
        able = placement.candidates(request, self._view.devices(), self._settings.rules)
        return self._view.why_closed(part.device.node for part in able)

    # -- Whose turn it is ------------------------------------------------------

    async def _refresh(self) -> None:
        if not self._is_noted:
            await self._follow_once()  # nobody is refused for want of a node that came just now

    @property
    def _is_noted(self) -> bool:
        """Whether it is written down which GPUs there are now."""
        return self._seen is not None and self._view.devices() == self._seen[0]

    async def _until_noted(self) -> None:
        """Wait for it: whoever only asks writes nothing, and is not told of what was."""
        give_up_at = time.monotonic() + _NOTED_WITHIN
        while not self._is_noted and time.monotonic() < give_up_at:
            self._reconciler.wake()
            await asyncio.sleep(_NOTED_EVERY)

    async def _devices_for(
        self, request: SliceRequest, holder: Holder, caller: Caller | None
    ) -> Collection[str]:
        """Return the GPUs beside the holder's home, if it can be used on one machine alone."""
        if holder.user:
            refuse_beside_server(holder.course, self._courses())
        translation, dialect = self._view.translate(request), self._view.choice.dialect
        if self._kubernetes.kueue and holder.user and dialect is not None:
            kueue.check_counted(translation.pod.limits, dialect.table.title)
            kueue.queue_of(holder.course)
        notebook = self._view.notebook(holder.user, _server(caller))
        if notebook is None:
            return ()
        rules = self._settings.rules
        return await self._volume_claims.devices_beside(
            request, holder, notebook, self._view.devices_on, rules
        )

    # -- Kernels -------------------------------------------------------------

    async def launch(
        self, lease_id: str, kernel: KernelCommand, *, caller: Caller | None = None
    ) -> KernelPod:
        """See ``Pool.launch``."""
        async with self._launching.setdefault(lease_id, asyncio.Lock()):
            lease = await self._living(lease_id)
            if lease.state is LeaseState.PARKED and self._kubernetes.kueue:
                lease = await self._counted(lease_id, waits=False)  # its pod waits in the cluster's queue
            if lease.state is not LeaseState.HELD:
                raise BadRequest(f"The lease is {lease.state.value}.", "Start the kernel once it is held.")
            order = await self._pod_builder.of(lease, kernel, _server(caller))
            if lease.process is None:
                # Its turn and its image may take minutes, and whoever launches has come for it.
                await self.attach(lease_id, lease.holder.process or Process.current())
            found = await self._kernels.launch(order)
            if found.phase is PodPhase.QUEUED:
                await self._counted(lease_id, waits=True)
        return found

    async def pod(self, lease_id: str, seen: str = "", seconds: float = bodies.POD_POLL) -> KernelPod:
        """See ``Pool.pod``; ``seconds`` is for how long to wait for news."""
        give_up_at = time.monotonic() + seconds
        while True:
            await self._living(lease_id)
            found = await self._state(lease_id, seen)
            left = give_up_at - time.monotonic()
            if found.version != seen or left <= 0:
                return found
            await self._kernels.news(lease_id, left)
            if self._kernels.stopped:
                return found

    async def _state(self, lease_id: str, seen: str) -> KernelPod:
        found = self._kernels.state(lease_id)
        if found is not None:
            return found
        taken = self._kernels.taken(lease_id)
        if taken is None and not seen:
            raise BadRequest("No kernel was started on this slice, or it has ended.", "Start one.")
        # Otherwise it was seen, and went while nobody looked.
        await self._end_taken(lease_id, taken or VANISHED)
        raise gone(await self.get_lease(lease_id))

    async def end_pod(self, lease_id: str) -> None:
        """See ``Pool.end_pod``."""
        await self._living(lease_id)
        async with self._launching.setdefault(lease_id, asyncio.Lock()):  # what is being started is ended too
            self._kernels.end(lease_id)

    async def park(self, lease_id: str, *, caller: Caller | None = None) -> Lease:
        """See ``Pool.park``. What a pod keeps on its GPU stays there."""
        if self._kernels.has_any(lease_id):
            raise NotAllowed(
                "The slice of a kernel in a pod cannot be lent to others.", "End the kernel to give it back."
            )
        return await super().park(lease_id, caller=caller)

    async def _activity(self, lease: Lease) -> Activity:
        """Return what is known of a lease's kernel: whether there is one. Nobody here sees its GPU."""
        return Activity() if self._kernels.has_any(lease.id) else Activity(initialised=False)

    async def _living(self, lease_id: str) -> Lease:
        lease = await self.get_lease(lease_id)
        if lease.state is LeaseState.ENDED:
            raise gone(lease)
        return lease

    async def look_at_devices(self, devices: Collection[Device]) -> Mapping[str, Reading | None]:  # noqa: ARG002
        """Return nothing: the GPUs of other machines cannot be looked at from here."""
        return {}

    async def _keep_failure(self, lease_id: str, failure: Failure) -> None:
        await self._store.run(LeaseStore.record_failure, lease_id, failure)

    async def _end_taken(self, lease_id: str, taken: PodTaken) -> None:
        # What its machine can no longer give must not be granted to whoever waits.
        await self._follow_once()
        with suppress(LeaseGone):
            await self.revoke(lease_id, taken.message, taken.reason)
            self._log.info("Lease %s ended: %s", ascii(lease_id), taken.message)


def _server(caller: Caller | None) -> str:
    """Return the name of the server at the Hub that asks; '' is the default one."""
    return (caller.server if caller else None) or ""


def _register(store: LeaseStore, devices: tuple[Device, ...], others: Mapping[str, ForeignUse]) -> None:
    store.register(devices, SeenFrom(_SEEN_FROM), others)
    store.set_others(others)


def _with_growth(outlook: Outlook, message: str) -> Outlook:
    """Say of a wait that a machine ends it: what others have is not what it is for."""
    return replace(outlook, why=message, wait=None) if message else outlook


async def open_cluster(
    path: Path,
    settings: PoolSettings,
    kubernetes: KubernetesSettings,
    courses: Callable[[], Courses],
    log: logging.Logger,
) -> ClusterPool:
    """Return the pool of the cluster that the settings name. Raises ``PoolUnreachable`` in words."""
    settings.in_pods = True
    api = await connect(kubernetes.kubeconfig, lax=kubernetes.lax_certificates)
    return ClusterPool(path, settings, kubernetes, api, courses, log)
