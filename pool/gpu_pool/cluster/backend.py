"""The backend of a Kubernetes cluster: its GPUs as its nodes show them, and kernels in pods."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Final

from gpu_pool.audit.callers import Caller
from gpu_pool.clock import Clock
from gpu_pool.cluster import kueue
from gpu_pool.cluster.api import Api, ApiAway, ApiRefused, ApiWriter, connect
from gpu_pool.cluster.device_claim_controller import DeviceClaims
from gpu_pool.cluster.device_claims import DRAINED
from gpu_pool.cluster.kernel_pods import KernelPods
from gpu_pool.cluster.lease_limits import LeaseLimits
from gpu_pool.cluster.node_use import NodeUseReports
from gpu_pool.cluster.pod_builder import PodBuilder, VolumeClaims
from gpu_pool.cluster.pod_choices import refuse_beside_server
from gpu_pool.cluster.pod_starts import KueuePositions, PodStarts
from gpu_pool.cluster.pod_states import NODE_GONE, VANISHED, PodTaken
from gpu_pool.cluster.pod_watchdog import PodWatchdog
from gpu_pool.cluster.prepared_pod_controller import PreparedPods
from gpu_pool.cluster.scale_up_controller import ScaleUpController
from gpu_pool.cluster.settings import SHARED, KubernetesSettings
from gpu_pool.cluster.snapshot import served_of_kueue
from gpu_pool.cluster.suspension import PodSuspension
from gpu_pool.cluster.view import ClusterView
from gpu_pool.courses import Courses
from gpu_pool.devices import Inventory
from gpu_pool.enforcement.watchdog import Tolerance, WatchdogRules
from gpu_pool.policy import placement
from gpu_pool.policy.queue_state import Rules
from gpu_pool.pool.backend import Adapted, Backend, DevicesFound, LeasesObserved, PoolSide, Taken
from gpu_pool.pool.core import PoolCore
from gpu_pool.pool.pool import GpuPool
from gpu_pool.settings import PoolSettings
from gpu_pool.store import leases, registration, requests
from gpu_pool.store.context import StoreContext
from gpu_pool.store.device_table import SeenFrom
from gpu_pool.store.lease_table import gone
from gpu_pool.store.usage import Measured
from gpu_pool_client import (
    Activity,
    BadRequest,
    Device,
    EndReason,
    Failure,
    Holder,
    KernelCommand,
    KernelPod,
    Lease,
    LeaseState,
    Outlook,
    Place,
    PoolUnreachable,
    PreparedStatus,
    Process,
    SliceRequest,
)
from gpu_pool_client._durations import format_duration

#: What devices are seen from, in the store: whichever pod the service runs in, it is the same cluster.
_SEEN_FROM: Final = SeenFrom("kubernetes")
#: Seconds between two looks at what has changed: many changes are looked at once.
_REST: Final = 0.5
#: Seconds after which it is looked whether anything was missed.
_EVALUATES_EVERY: Final = 30.0
#: What is told to whoever waits while nodes do not show the GPUs that they have.
_AWAY: Final = (
    "A machine with GPUs cannot provide any at the moment, for instance because their driver is being "
    "replaced. Usually that takes less than a minute; your request waits for it."
)


class ClusterBackend(Backend):
    """The GPUs of a cluster. It hosts kernels, in pods, and knows of machines that come and go."""

    def __init__(
        self,
        kubernetes: KubernetesSettings,
        rules: Rules,
        api: Api,
        courses: Callable[[], Courses],
        log: logging.Logger,
        tolerance: Tolerance | None = None,
        settings: PoolSettings | None = None,
    ) -> None:
        """``tolerance`` is the watchdog's; None for no watchdog."""
        self._kubernetes, self._rules, self.api, self.log = kubernetes, rules, api, log
        self._courses = courses
        self.view = ClusterView(api, kubernetes, log)
        times = kubernetes.times
        writer = ApiWriter(api, times, log)
        self._volume_claims = VolumeClaims(api, kubernetes, courses, log)
        self._pod_builder = PodBuilder(kubernetes, self.view, self._volume_claims)
        #: Where the pool divides whole devices itself.
        self._claims: DeviceClaims | None = None
        self._prepared: PreparedPods | None = None
        if kubernetes.dialect == SHARED:
            self._claims = DeviceClaims(api, writer, self.view, kubernetes, log, self._end_taken)
            self._prepared = PreparedPods(
                writer, self.view, kubernetes, courses, self._pod_builder, self._volume_claims, rules, log
            )
        self.kernels = KernelPods(
            writer, self.view, times, log, self._end_taken, self._keep_failure, self._prepared
        )
        self.growth = ScaleUpController(api, writer, self.view, kubernetes, rules, log)
        #: The leases that lived when it was last read, and those of them that were parked; and what was found
        #: with these.
        self._live: frozenset[str] = frozenset()
        self._parked: frozenset[str] = frozenset()
        self._found: DevicesFound | None = None
        self._found_with = self._live, self._parked
        #: Since when leases wait for what nothing could give, by id; and the devices of that look.
        self._hopeless: dict[str, float] = {}
        self._checked: tuple[Device, ...] | None = None
        #: When it is looked next whether anything was missed (``time.monotonic()``).
        self._evaluate_at = 0.0
        self._suspension: PodSuspension | None = None
        if self._claims is not None and kubernetes.node_agent:
            self._suspension = PodSuspension(
                self.view, writer, times, settings or PoolSettings(), log, self._end_taken
            )
        self.suspension = self._suspension
        self.agents = self._use = NodeUseReports(api, self.view, kubernetes, log, suspension=self._suspension)
        #: What the watchdog says to the users of leases, until it is written down.
        self._notices: dict[str, str] = {}
        self._watchdog: PodWatchdog | None = None
        if tolerance is not None and kubernetes.node_agent:
            tell, context = self._notices.__setitem__, kubernetes.dialect_options.context_mib
            self._watchdog = PodWatchdog(tolerance, self._use, tell, context)
        self._limits = LeaseLimits(
            self.view,
            self._use,
            self._watchdog,
            is_divided=self._claims is not None,
            has_agents=bool(kubernetes.node_agent),
        )
        self.host, self.capacity = self, self
        self.queue = self if kubernetes.kueue else None

    def join(self, pool: PoolSide) -> None:
        """See ``Backend.join``."""
        super().join(pool)
        self.growth.store = pool.store

    # -- Following the cluster -------------------------------------------------

    @asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Learn what the cluster has, and follow it. Raises ``PoolUnreachable`` in words."""
        following: list[asyncio.Task[None]] = []
        try:
            await self._start()
            self.kernels.start()
            starts = PodStarts(self.api, self.kernels, self.log, self._kubernetes.start_within)
            jobs = [self._wake_on_changes(), starts.run()]
            if self._kubernetes.kueue:
                jobs.append(KueuePositions(self.api, self.kernels, self.log).run())
            if self.view.groups:
                jobs.append(self.growth.run())
            following += map(asyncio.create_task, jobs)
            yield
        finally:
            for task in following:
                task.cancel()
            await self.kernels.stop()
            if self._claims is not None:
                await self._claims.stop()
            if self._prepared is not None:
                await self._prepared.stop()
            await self.view.stop()

    async def _start(self) -> None:
        await self.view.start()
        if self._kubernetes.kueue:
            await self._check_kueue()
        if self._claims is not None:
            await self._claims.start()
            for node in self.view.shared.unfit if self.view.shared is not None else ():
                self.log.warning(
                    "The node %s is set aside for the pool, and its GPU cannot be had: it %s",
                    ascii(node.name),
                    node.why_not,
                )
        self.log.info("The cluster shares its GPUs by %s", self.view.choice)
        for name, course in sorted(self._courses().usable.items()):
            if course.kubernetes.prepared_pods and self._claims is None:
                self.log.warning(
                    "Course %s has prepared_pods, and gets none: here a GPU comes with its pod, so one that "
                    "waits would keep it. Leave it out, or set c.KubernetesSettings.dialect = %r",
                    ascii(name),
                    SHARED,
                )
        for namespace, count in sorted(self.view.strays().items()):
            self.log.warning(
                "%d kernels of this pool are in %s, which c.KubernetesSettings.more_namespaces does not "
                "list: they are not managed, and end with their notebook servers",
                count,
                namespace,
            )
        self._evaluate_at = time.monotonic() + _EVALUATES_EVERY

    async def _check_kueue(self) -> None:
        """Refuse, with ``BadRequest``, to begin where Kueue's objects cannot be read: all would just wait."""
        try:
            version = kueue.version_of(await served_of_kueue(self.api))
        except ApiAway as away:
            raise PoolUnreachable(f"The cluster's API server does not answer: {away}.") from away
        except ApiRefused as refused:  # whoever may not ask finds out by reading them
            self.log.warning("The API server does not say in which versions it serves Kueue: %s", refused)
        else:
            self.log.info("Kueue has the cluster's queue; its objects are read as %s", version)

    async def _wake_on_changes(self) -> None:
        """Have the pool look when something of the cluster has changed, and not for each of many changes."""
        while True:
            await self.view.changed.wait()
            self.pool.wake()
            await asyncio.sleep(_REST)

    async def close(self) -> None:
        """Ask the API server nothing more. Kernels live on."""
        await self.api.close()

    # -- The cluster's GPUs ----------------------------------------------------

    async def devices(
        self,
        max_age: float,  # noqa: ARG002 - the watches tell of every change
        patience: float = 0.0,  # noqa: ARG002
        known: Collection[Device] = (),  # noqa: ARG002
    ) -> DevicesFound:
        """See ``Backend.devices``: those of the nodes, and what pods have that are no kernels of leases."""
        known_leases = self._live, self._parked
        if self._found is None or self.view.changed.is_set() or known_leases != self._found_with:
            self.view.changed.clear()
            try:
                inventory = Inventory(self.view.devices(), "the cluster")
                self._found = DevicesFound(inventory, _SEEN_FROM, self.view.others(*known_leases))
            except BaseException:
                self.view.changed.set()
                raise
            self._found_with = known_leases
        elif self._found.inventory.devices != self.view.devices():  # a node is away for too long, say
            self._found = replace(self._found, inventory=Inventory(self.view.devices(), "the cluster"))
        return self._found

    async def adapt(
        self, request: SliceRequest, holder: Holder | None = None, caller: Caller | None = None
    ) -> Adapted:
        """Return what the dialect grants for a request, on the GPUs beside the holder's home if need be."""
        if holder is None:
            return Adapted(self.view.counted_as(request))
        if holder.user:
            refuse_beside_server(holder.course, self._courses())
        translation, dialect = self.view.translate(request), self.view.choice.dialect
        if self._kubernetes.kueue and holder.user and dialect is not None:
            kueue.check_counted(translation.pod.limits, dialect.table.title)
            kueue.queue_of(holder.course)
        notebook = self.view.notebook(holder.user, _server(caller))
        within: Collection[str] = ()
        if notebook is not None:
            within = await self._volume_claims.devices_beside(
                request, holder, notebook, self.view.devices_on, self._rules
            )
        return Adapted(self.view.counted_as(request), within)

    def describe(self, lease: Lease) -> Lease:
        """See :meth:`LeaseLimits.described`. Variables are set in the pod by the cluster's own parts."""
        return self._limits.described(lease)

    def allows_burst(self, device: Device) -> bool:
        """See ``Backend.allows_burst``."""
        return self._limits.allows_burst(device)

    async def bind(self, lease: Lease, process: Process | None = None) -> Lease:  # noqa: ARG002
        """Return the lease described: it takes effect in the pod of its kernel, see :meth:`launch`."""
        shared = self.view.shared
        if self._claims is not None and shared is not None:
            self._claims.expect(lease)
            self.kernels.annotate(lease.id, shared.parts(lease.slices).annotations)
        return self.describe(lease)

    async def unbind(self, living: Callable[[], Awaitable[Sequence[Lease]]]) -> None:
        """End the kernels of leases that have ended."""
        known, every = self.kernels.known(), await living()
        self._live = frozenset(lease.id for lease in every)
        self._limits.keep(self._live)
        self.kernels.settle(known, self._live)
        if self._claims is not None:
            self._parked = frozenset(lease.id for lease in every if lease.state is LeaseState.PARKED)
            self._claims.reconcile(every)
        if self._prepared is not None:
            self._prepared.reconcile(every)

    async def observe(self, living: Callable[[], Awaitable[Sequence[Lease]]]) -> LeasesObserved:
        """Return whose nodes are gone, who waits for what no node could give, and whom Kueue has let in."""
        if time.monotonic() >= self._evaluate_at or self.view.until_forgotten() == 0:
            self._evaluate_at = time.monotonic() + _EVALUATES_EVERY
            self.kernels.evaluate_all()
            self.view.forget_what_is_shown()
        read_at = time.monotonic()
        every = await living()
        if self._suspension is not None:
            self._suspension.reconcile(every, read_at)
        await self._write_use(every)
        nodes_gone = {
            lease.id: Taken(NODE_GONE.reason, NODE_GONE.message)
            for lease in every
            if any(
                not part.device.unbounded and not self.view.has_node(part.device.node)
                for part in lease.slices
            )
        }
        for lease_id in nodes_gone:
            self.log.info("Lease %s ends: %s", ascii(lease_id), NODE_GONE.message)
        admitted = [
            lease.id
            for lease in every
            if lease.is_queued and self.has_kernel(lease.id) and not self.place(lease.id)
        ]
        too_much = await self._watch(every)
        drained = await self._follow_parked(every)
        hopeless = await self._give_up_the_hopeless()
        return LeasesObserved({**too_much, **drained, **nodes_gone, **hopeless}, admitted)

    async def _follow_parked(self, every: Sequence[Lease]) -> Mapping[str, Taken]:
        """Return the parked leases, by id, that keep a device which an administrator wants to have empty.

        Those without a pod, such as one whose kernel has ended while it was parked, may have another device.
        """
        parked = [
            lease
            for lease in every
            if not lease.slices and (lease.first_held_at is not None or lease.is_queued)
        ]
        if self._claims is None or not parked:
            return {}
        without_pods = [lease.id for lease in parked if not self.has_kernel(lease.id)]
        if without_pods:
            await self.pool.store.run(leases.forget_homes, without_pods)
        devices = await self.pool.store.run(registration.drained_devices)
        taken = Taken(DRAINED.reason, DRAINED.message)
        return dict.fromkeys(self._claims.parked_on(devices, parked), taken)

    async def _watch(self, every: Sequence[Lease]) -> Mapping[str, Taken]:
        """Have the watchdog judge these leases; return those that end for what they use."""
        if self._watchdog is None:
            return {}
        found = self._watchdog.watch(every, self._limits.by_dialect)
        while self._notices:
            lease_id = next(iter(self._notices))
            await self.pool.store.run(leases.set_notice, lease_id, self._notices[lease_id])
            del self._notices[lease_id]
        return {lease_id: Taken(EndReason.OVER_MEMORY, text) for lease_id, text in found.items()}

    async def _write_use(self, leases: Sequence[Lease]) -> None:
        """Add what the agents of nodes have seen to what is known of leases, now and then."""
        news = self._use.news(leases)
        if news:
            await self.pool.store.run(_add_use, news)

    async def _give_up_the_hopeless(self) -> Mapping[str, Taken]:
        """Return the waits for what no node could give any more, once that has been so for long enough."""
        devices, away = self.view.devices(), self.view.away
        if not away and not self._hopeless and devices == self._checked:
            return {}  # whoever came meanwhile was checked when they asked
        self._checked = devices
        found = await self.pool.store.run(requests.hopeless, self.view.lasting())
        now, away_for = time.monotonic(), self._kubernetes.gpus_away_for
        self._hopeless = {lease_id: self._hopeless.get(lease_id, now) for lease_id in found}
        given_up: dict[str, Taken] = {}
        for lease_id, error in found.items():
            if now >= self._hopeless[lease_id] + away_for:
                message = f"{error.message} That has not changed for {format_duration(away_for)}."
                given_up[lease_id] = Taken(EndReason.DEVICE_LOST, message)
                self.log.warning("Lease %s no longer waits. %s", ascii(lease_id), message)
        return given_up

    # -- Machines that come and go -----------------------------------------------

    def expected(self, outlook: Outlook, request: SliceRequest, number: int | None) -> Outlook:
        """Say how a machine comes, which are closed, and whether machines do not show their GPUs."""
        if number is None:
            return _with_growth(outlook, self.growth.prospect(request))
        outlook = _with_growth(outlook, self.growth.outlook(number))
        outlook = replace(outlook, why=" ".join(filter(None, (outlook.why, self._why_closed(request)))))
        return replace(outlook, why=f"{_AWAY} {outlook.why}") if self.view.away else outlook

    def _why_closed(self, request: SliceRequest) -> str:
        """Say which machines could grant a request, and take no kernels now."""
        able = placement.candidates(request, self.view.devices(), self._rules)
        return self.view.why_closed(part.device.node for part in able)

    # -- Kernels -------------------------------------------------------------------

    async def launch(self, lease: Lease, kernel: KernelCommand, caller: Caller | None) -> KernelPod:
        """See ``KernelHost.launch``."""
        order = await self._pod_builder.of(self._limits.at_launch(lease), kernel, _server(caller))
        if self._claims is not None:
            await self._claims.ready(lease)
        if lease.process is None:
            # Its turn and its image may take minutes, and whoever launches has come for it.
            process = lease.holder.process or Process.current()
            await self.pool.store.run(leases.bind_process, lease.id, process, None, 0.0)
        return await self.kernels.launch(order)

    async def follow(self, lease_id: str, seen: str, seconds: float) -> KernelPod:
        """See ``KernelHost.follow``."""
        give_up_at = time.monotonic() + seconds
        while True:
            await self.pool.living(lease_id)
            found = await self._state(lease_id, seen)
            left = give_up_at - time.monotonic()
            if found.version != seen or left <= 0:
                return found
            await self.kernels.news(lease_id, left)
            if self.kernels.stopped:
                return found

    async def _state(self, lease_id: str, seen: str) -> KernelPod:
        found = self.kernels.state(lease_id)
        if found is not None:
            return found
        taken = self.kernels.taken(lease_id)
        if taken is None and not seen:
            raise BadRequest("No kernel was started on this slice, or it has ended.", "Start one.")
        # Otherwise it was seen, and went while nobody looked.
        await self._end_taken(lease_id, taken or VANISHED)
        raise gone(await self.pool.store.run(leases.read, lease_id))

    async def end(self, lease_id: str) -> None:
        """See ``KernelHost.end``."""
        self.kernels.end(lease_id)

    def activity(self, lease_id: str) -> Activity:
        """Return what is known of a lease's kernel: whether there is one, and what its node's agent sees."""
        if not self.has_kernel(lease_id):
            return Activity(initialised=False)
        found = self._use.activity(lease_id)
        if self._suspension is not None and self._suspension.is_older(lease_id, found.age):
            return Activity()  # that it keeps nothing there was so while it was parked
        return found

    def memory_in_use(self) -> Mapping[str, Mapping[str, int]]:
        """See ``Backend.memory_in_use``: what the agents of nodes have said."""
        return self._use.memory_in_use()

    def prepared_pods(self) -> tuple[PreparedStatus, ...]:
        """See ``Backend.prepared_pods``."""
        return () if self._prepared is None else self._prepared.statuses()

    def has_kernel(self, lease_id: str) -> bool:
        """See ``KernelHost.has_kernel``."""
        return self.kernels.has_any(lease_id)

    def stop_waiting(self) -> None:
        """See ``KernelHost.stop_waiting``."""
        self.kernels.stop_waiting()
        if self._suspension is not None:
            self._suspension.stop_waiting()

    # -- Where Kueue decides whose turn it is ----------------------------------------

    async def submit(self, lease: Lease) -> None:
        """Hand nothing over yet: what Kueue is handed is the pod of a kernel, which names its queue."""

    def place(self, lease_id: str) -> Place | None:
        """See ``ExternalQueue.place``."""
        return self.kernels.place(lease_id)

    async def withdraw(self, lease_id: str) -> None:
        """Take the pod away."""
        self.kernels.end(lease_id)

    async def _end_taken(self, lease_id: str, taken: PodTaken) -> None:
        if await self.pool.end_taken(lease_id, Taken(taken.reason, taken.message)):
            self.log.info("Lease %s ended: %s", ascii(lease_id), taken.message)

    async def _keep_failure(self, lease_id: str, failure: Failure) -> None:
        await self.pool.record_failure(lease_id, failure)


def _add_use(store: StoreContext, news: Mapping[str, Measured]) -> None:
    store.measured_use.add(news)


def _server(caller: Caller | None) -> str:
    """Return the name of the server at the Hub that asks; '' is the default one."""
    return (caller.server if caller else None) or ""


def _with_growth(outlook: Outlook, message: str) -> Outlook:
    """Say of a wait that a machine ends it: what others have is not what it is for."""
    return replace(outlook, why=message, wait=None) if message else outlook


async def open_cluster(
    path: Path,
    settings: PoolSettings,
    kubernetes: KubernetesSettings,
    courses: Callable[[], Courses],
    log: logging.Logger,
) -> GpuPool:
    """Return the pool of the cluster that the settings name. Raises ``PoolUnreachable`` in words."""
    settings.in_pods = True
    # Only where the pool divides devices it can lend a slice while the pod stays, and only an agent knows
    # that a kernel keeps nothing on its device.
    settings.pods_park = kubernetes.dialect == SHARED and bool(kubernetes.node_agent)
    api = await connect(kubernetes.kubeconfig, lax=kubernetes.lax_certificates)
    tolerance = WatchdogRules.of(settings, auto="end").tolerance
    backend = ClusterBackend(kubernetes, settings.rules, api, courses, log, tolerance, settings)
    # Its store goes with the service's pod from one machine to another, whose uptimes say nothing.
    return GpuPool(PoolCore(path, backend, settings, Clock(uptime=time.time)))
