"""The numbers for Prometheus: what is granted of each device and what it does, leases, waits and requests."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Final

from tornado.web import RequestHandler

from gpu_pool.audit import AuditLog
from gpu_pool.devices.inventory import Reading
from gpu_pool.plugins import needs_extra
from gpu_pool.pool.backend import Backend
from gpu_pool.pool.pool import GpuPool
from gpu_pool.pool.reconciler import StepCount
from gpu_pool.service.connections import Network, is_within
from gpu_pool.service.handler import Handler
from gpu_pool_client import WHOLE, DeviceStatus, EndedLease, Lease, LeaseState, NotAllowed, PoolStatus

if TYPE_CHECKING:
    from prometheus_client.core import Metric

_MIB: Final = 1024 * 1024
_LABELS: Final = ("device", "index")
#: What the store knows: its description, and how much it is.
_GRANTED: Final[Mapping[str, tuple[str, Callable[[DeviceStatus], float]]]] = {
    "memory_bytes": ("Memory of the device.", lambda each: each.device.memory_mib * _MIB),
    "memory_held_bytes": ("Memory that is granted.", lambda each: each.held_memory_mib * _MIB),
    "memory_free_bytes": ("Memory that can still be granted.", lambda each: each.free_memory_mib * _MIB),
    "share": ("Compute that may be granted, in GPUs.", lambda each: each.milli / WHOLE),
    "share_held": ("Compute that is granted, in GPUs.", lambda each: each.held_milli / WHOLE),
    "share_free": ("Compute that can still be granted, in GPUs.", lambda each: each.free_milli / WHOLE),
    "leases": ("Leases that hold a slice of it.", lambda each: each.leases),
    "drained": ("1 if nothing more is granted on it.", lambda each: each.drained),
}
#: What the device itself tells; None where it does not.
_DONE: Final[Mapping[str, tuple[str, Callable[[Reading], float | None]]]] = {
    "memory_used_bytes": ("Memory in use, whoever uses it.", lambda each: each.memory_used),
    "utilisation_ratio": (
        "Fraction of the last second or less in which it computed.",
        lambda each: each.utilisation,
    ),
    "temperature_celsius": ("Temperature of the GPU.", lambda each: each.temperature),
    "power_watts": ("Power that it draws.", lambda each: each.power),
}


def device_numbers(
    statuses: Iterable[DeviceStatus], readings: Mapping[str, Reading | None]
) -> Iterable[Metric]:
    """Yield the gauges of all devices; ``readings`` has real ones alone, and None for the silent."""
    from prometheus_client.core import GaugeMetricFamily

    statuses = list(statuses)
    described = GaugeMetricFamily(
        "gpu_pool_device_info", "Information about the device.", labels=[*_LABELS, "model", "simulated"]
    )
    for each in statuses:
        described.add_metric([*_names(each), each.device.model, str(each.device.simulated).lower()], 1)
    yield described
    for name, (description, value_of) in _GRANTED.items():
        family = GaugeMetricFamily(f"gpu_pool_device_{name}", description, labels=_LABELS)
        for each in statuses:
            family.add_metric(_names(each), value_of(each))
        yield family
    yield from _done(
        [(_names(each), readings[each.device.uuid]) for each in statuses if each.device.uuid in readings]
    )


def _done(read: Iterable[tuple[list[str], Reading | None]]) -> Iterable[Metric]:
    """Yield what devices tell; nothing stands for what one does not tell, least of all a 0."""
    from prometheus_client.core import GaugeMetricFamily

    answers = GaugeMetricFamily(
        "gpu_pool_device_answers", "1 if the driver can read the device, 0 if not.", labels=_LABELS
    )
    families = {
        name: GaugeMetricFamily(f"gpu_pool_device_{name}", description, labels=_LABELS)
        for name, (description, _) in _DONE.items()
    }
    for names, reading in read:
        answers.add_metric(names, reading is not None)
        for name, (_, value_of) in _DONE.items():
            value = None if reading is None else value_of(reading)
            if value is not None:
                families[name].add_metric(names, value)
    yield answers
    yield from families.values()


def _names(status: DeviceStatus) -> list[str]:
    return [status.device.uuid, str(status.device.index)]


#: What courses are called that nobody has configured, and leases of none.
OTHER: Final = "other"
NONE: Final = "none"
#: Seconds: most grants are made at once, and a queue may last for hours.
_WAITS: Final = (0.1, 0.5, 1, 5, 15, 60, 300, 900, 1_800, 3_600, 7_200, 14_400)


class Metrics:
    """The numbers of one pool. ``courses`` are those that are configured, as of now.

    Raises ``NotAllowed`` where the library is missing: the extra ``[metrics]``.
    """

    def __init__(self, pool: GpuPool, courses: Callable[[], Collection[str]]) -> None:
        with needs_extra("metrics", "The library for metrics"):
            from prometheus_client import CollectorRegistry, Histogram
            from prometheus_client import Counter as Counting

        self._pool = pool
        self._courses = courses
        self._registry = CollectorRegistry()
        self._answers = Counting(
            "gpu_pool_requests",
            "Requests answered, by kind and outcome.",
            ["request", "outcome"],
            registry=self._registry,
        )
        self._ended = Counting(
            "gpu_pool_leases_ended",
            "Leases that ended, by course and reason.",
            ["course", "reason"],
            registry=self._registry,
        )
        self._used = Counting(
            "gpu_pool_gpu_seconds",
            "GPUs times seconds of leases that ended.",
            ["course"],
            registry=self._registry,
        )
        self._lent = Counting(
            "gpu_pool_lent_gpu_seconds",
            "GPUs times seconds that others could have of leases that ended, while those were parked.",
            ["course"],
            registry=self._registry,
        )
        self._burst = Counting(
            "gpu_pool_burst_byte_seconds",
            "Bytes times seconds that leases which ended could use on top of what they were granted.",
            ["course"],
            registry=self._registry,
        )
        self._granted = Histogram(
            "gpu_pool_grant_seconds",
            "Seconds from a request to its first grant.",
            ["course"],
            buckets=_WAITS,
            registry=self._registry,
        )
        self._counted = _CountedLeases(time.time())
        #: Held from reading what has ended to counting it: two that read at once would count it twice.
        self._counting = asyncio.Lock()
        #: Requests since the numbers were last read, by handler and status: cheap, since every answer counts.
        self._answered: Counter[tuple[str, int]] = Counter()

    def answered(self, handler: RequestHandler) -> None:
        """Count a request. Called by tornado as the application's ``log_function``."""
        self._answered[type(handler).__name__.removesuffix("Handler").lower(), handler.get_status()] += 1

    async def page(self) -> tuple[bytes, str]:
        """Return all numbers as text, and its media type."""
        from prometheus_client import CollectorRegistry
        from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

        async with self._counting:
            status = await self._pool.status()
            rows, place = await self._pool.ended_after(self._counted.place, self._counted.since)
            known = frozenset(await asyncio.to_thread(self._courses))
            self._count(status, rows, known)
            self._counted.go_on(place)
        now = CollectorRegistry()
        readings = await self._pool.core.read_devices([each.device for each in status.devices])
        now.register(_Now(status, readings, known, time.time()))
        now.register(_Used(status, self._pool.backend, known))
        now.register(_Audited(self._pool.core.audit))
        now.register(_Reconciled(self._pool.core.reconciler.counts))
        return generate_latest(self._registry) + generate_latest(now), CONTENT_TYPE_PLAIN_0_0_4

    def _count(self, status: PoolStatus, rows: Sequence[EndedLease], known: frozenset[str]) -> None:
        """Count what was answered, what was granted and what has ended since the last time."""
        answered, self._answered = self._answered, Counter()
        for (handler, status_code), number in answered.items():
            self._answers.labels(handler, _outcome(status_code)).inc(number)
        for course, seconds in self._counted.granted((*status.leases, *status.queue), rows):
            self._granted.labels(course_of(course, known)).observe(seconds)
        for row in rows:
            course = course_of(row.course, known)
            self._ended.labels(course, row.reason).inc()
            self._used.labels(course).inc(row.gpu_seconds)
            self._lent.labels(course).inc(row.lent_gpu_seconds)
            self._burst.labels(course).inc(row.burst_mib_seconds * _MIB)


def _outcome(status: int) -> str:
    try:
        return HTTPStatus(status).phrase.lower().replace(" ", "-")
    except ValueError:  # pragma: no cover - tornado refuses to set others
        return "unknown"


class _CountedLeases:
    """What was counted already. Pure but for what it remembers."""

    def __init__(self, began: float) -> None:
        #: After which place in the order of ends leases are counted. The clock may be set at any time.
        self.place = 0
        #: From when on they are, Unix seconds: until the first are counted, when the service began.
        self.since = began
        #: Leases that live and whose grant is counted.
        self._grants: set[str] = set()

    def granted(
        self, living: Iterable[Lease], rows: Iterable[EndedLease]
    ) -> Iterable[tuple[str | None, float]]:
        """Yield course and wait of every first grant that was not counted yet.

        What was granted before the service began is left out: the service before has counted it.
        """
        before, self._grants = self._grants, set()
        for lease in living:
            is_counted, granted_at = lease.id in before, lease.first_held_at
            if is_counted or granted_at is not None:
                self._grants.add(lease.id)
            if not is_counted and granted_at is not None and granted_at >= self.since:
                yield lease.holder.course, max(0.0, granted_at - lease.requested_at)
        counted = before | self._grants
        for row in rows:
            if row.id not in counted and row.held_at is not None and row.held_at >= self.since:
                yield row.course, max(0.0, row.held_at - row.requested_at)

    def go_on(self, place: int) -> None:
        """Count what ends after this place from now on: all else has been counted."""
        self.place, self.since = place, 0.0


class _Audited:
    """Collects what became of the lines of the audit log."""

    def __init__(self, log: AuditLog | None) -> None:
        self._written, self._lost = (log.written, log.lost) if log is not None else (0, 0)

    def collect(self) -> Iterable[Metric]:
        """Yield the counters. Called by the library."""
        from prometheus_client.core import CounterMetricFamily

        for name, description, value in (
            ("gpu_pool_audit_lines", "Lines that were written to the audit log.", self._written),
            ("gpu_pool_audit_lines_lost", "Lines that could not be written to it.", self._lost),
        ):
            yield CounterMetricFamily(name, description, value=value)


class _Reconciled:
    """Collects how the pool is kept in order: by the steps of the reconciler."""

    def __init__(self, counts: Mapping[str, StepCount]) -> None:
        self._counts = counts

    def collect(self) -> Iterable[Metric]:
        """Yield the counters. Called by the library."""
        from prometheus_client.core import CounterMetricFamily

        for name, description, value in (
            ("steps", "How often each step of keeping the pool in order was done.", "times"),
            ("step_failures", "How often it failed.", "failures"),
            ("step_seconds", "How long it took in all.", "seconds"),
        ):
            family = CounterMetricFamily(f"gpu_pool_reconciler_{name}", description, labels=["step"])
            for step, count in self._counts.items():
                family.add_metric([step], getattr(count, value))
            yield family


class _Now:
    """Collects what is true at one time."""

    def __init__(
        self,
        status: PoolStatus,
        readings: Mapping[str, Reading | None],
        known: frozenset[str],
        now: float,
    ) -> None:
        self._status = status
        self._readings = readings
        self._known = known
        self._now = now

    def collect(self) -> Iterable[Metric]:
        """Yield all gauges. Called by the library."""
        yield from device_numbers(self._status.devices, self._readings)
        yield from self._held()
        yield from self._queue()

    def _held(self) -> Iterable[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        leases: Counter[tuple[str, str]] = Counter()
        memory: Counter[str] = Counter()
        burst: Counter[str] = Counter()
        milli: Counter[str] = Counter()
        for lease in self._status.leases:
            course = course_of(lease.holder.course, self._known)
            leases[course, lease.state.value] += 1
            memory[course] += sum(part.memory_mib for part in lease.slices) * _MIB
            # On a node of a cluster it is the pool that decides of it only where it divides the devices.
            ours = [part for part in lease.slices if lease.terms.parks_in_pod or not part.device.node]
            burst[course] += sum(part.burst_mib for part in ours) * _MIB
            milli[course] += sum(part.milli for part in lease.slices)
        living = GaugeMetricFamily("gpu_pool_leases", "Leases held or parked.", labels=["course", "state"])
        for (course, state), number in sorted(leases.items()):
            living.add_metric([course, state], number)
        of_memory = GaugeMetricFamily("gpu_pool_held_memory_bytes", "Memory granted.", labels=["course"])
        of_burst = GaugeMetricFamily(
            "gpu_pool_burst_memory_bytes",
            "Memory that may be used on top of what is granted.",
            labels=["course"],
        )
        of_share = GaugeMetricFamily("gpu_pool_held_share", "Compute granted, in GPUs.", labels=["course"])
        for course in sorted(memory):
            of_memory.add_metric([course], memory[course])
            of_burst.add_metric([course], burst[course])
            of_share.add_metric([course], milli[course] / WHOLE)
        warned = sum(bool(lease.notice) for lease in self._status.leases)
        yield from (living, of_memory, of_burst, of_share)
        yield GaugeMetricFamily("gpu_pool_leases_warned", "Leases whose user is warned now.", value=warned)

    def _queue(self) -> Iterable[Metric]:
        from prometheus_client.core import GaugeMetricFamily

        waits = [self._now - lease.requested_at for lease in self._status.queue]
        waiting = Counter(course_of(lease.holder.course, self._known) for lease in self._status.queue)
        length = GaugeMetricFamily("gpu_pool_queue_length", "Requests that wait.", labels=["course"])
        for course in sorted(self._known | {NONE, *waiting}):
            length.add_metric([course], waiting[course])
        yield length
        longest = max(waits, default=0.0)
        yield GaugeMetricFamily(
            "gpu_pool_queue_longest_wait_seconds", "The longest wait so far.", value=longest
        )
        wanted = sum((lease.request.milli or 0) * lease.request.count for lease in self._status.queue) / WHOLE
        yield GaugeMetricFamily(
            "gpu_pool_queue_wanted_share",
            "Compute requested by waiting leases, in GPUs, where asked for as a share.",
            value=wanted,
        )
        parked = sum(lease.state is LeaseState.PARKED for lease in self._status.leases)
        yield GaugeMetricFamily(
            "gpu_pool_leases_parked", "Leases whose slices are lent to others.", value=parked
        )


class _Used:
    """Collects what leases use, as far as somebody has seen it lately."""

    def __init__(self, status: PoolStatus, backend: Backend, known: frozenset[str]) -> None:
        in_use = backend.memory_in_use()
        self._ages = {} if backend.agents is None else backend.agents.ages()
        self._of_course: Counter[str] = Counter()
        self._seen: Counter[str] = Counter()
        for lease in status.leases:
            if lease.id in in_use:
                course = course_of(lease.holder.course, known)
                self._of_course[course] += sum(in_use[lease.id].values()) * _MIB
                self._seen[course] += 1

    def collect(self) -> Iterable[Metric]:
        """Yield the gauges. Called by the library."""
        from prometheus_client.core import GaugeMetricFamily

        memory = GaugeMetricFamily(
            "gpu_pool_used_memory_bytes",
            "GPU memory that leases use, of those of which it is known.",
            labels=["course"],
        )
        seen = GaugeMetricFamily(
            "gpu_pool_leases_seen", "Leases of which it is known how much memory they use.", labels=["course"]
        )
        for course, leases in sorted(self._seen.items()):
            memory.add_metric([course], self._of_course[course])
            seen.add_metric([course], leases)
        ages = GaugeMetricFamily(
            "gpu_pool_node_report_age_seconds",
            "Seconds since a node's agent last said what is used there, and was believed.",
            labels=["node"],
        )
        for node, age in sorted(self._ages.items()):
            ages.add_metric([node], age)
        yield from (memory, seen, ages)


def course_of(name: str | None, known: Collection[str]) -> str:
    """Return a course's label: one that nobody has configured is ``other``, however many there are."""
    if not name:
        return NONE
    return name if name in known else OTHER


class MetricsHandler(Handler):
    """``GET /metrics``: for administrators, and for the networks that may read it without a token."""

    def initialize(  # type: ignore[override]
        self, metrics: Metrics | NotAllowed, networks: Iterable[Network], **shared: Any
    ) -> None:
        """Take what it is about, or why there is nothing. Called by tornado."""
        super().initialize(**shared)
        self._metrics = metrics
        self._networks = networks

    async def prepare(self) -> None:
        """Find out who asks, unless their address may. Called by tornado."""
        # What comes through a proxy comes from its address, whoever asks there.
        is_direct = "X-Forwarded-For" not in self.request.headers
        if is_direct and is_within(self.request.remote_ip or "", self._networks):
            return
        await super().prepare()
        if not self.caller.is_admin:
            raise NotAllowed("Metrics are for administrators.", "Use an administrator's token.")

    async def get(self) -> None:
        """Answer with all numbers."""
        if isinstance(self._metrics, NotAllowed):
            raise self._metrics
        body, media_type = await self._metrics.page()
        self.set_header("Content-Type", media_type)
        self.finish(body)
