"""What must hold whenever nothing is broken and everything has come to rest."""

from __future__ import annotations

import sqlite3
from collections import Counter
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

from chaos.world import World
from gpu_pool_client import EndReason, Lease, LeaseState, PoolStatus


@dataclass
class Laws:
    """The laws, and what was seen before, which must not be forgotten."""

    world: World
    #: Every lease that was ever seen alive.
    seen: set[str] = field(default_factory=set)
    #: The queue as it was at the last rest: what is still in it keeps its order.
    queue: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    async def hold(self) -> bool:
        """Look at everything; what is wrong is in :attr:`problems`."""
        async with self.world.pool() as pool:
            status = await pool.status()
            ended = Counter(str(row.id) for row in await pool.history())
        kernels = self.world.kernels()
        live = {lease.id: lease for lease in (*status.leases, *status.queue)}
        self.seen |= live.keys()
        self.problems = [
            *_amounts(status),
            *_bursts(status),
            *_line(status),
            *_asked(status),
            *_processes(kernels, live),
            *_templates(self.world),
            *(f"{each} has ended {number} times" for each, number in ended.items() if number > 1),
            *(f"{each} has ended and lives" for each in ended.keys() & live.keys()),
            *(f"{each} is forgotten" for each in self.seen - ended.keys() - live.keys()),
            *self._order(status),
            *_file(self.world.store, self.world.releases),
        ]
        return not self.problems

    def rest(self, status: PoolStatus) -> None:
        """Remember the queue of a world at rest."""
        self.queue = [lease.id for lease in status.queue]

    def _order(self, status: PoolStatus) -> list[str]:
        """All are one user's requests of one course: those that wait still keep their order."""
        now = [lease.id for lease in status.queue if lease.id in self.queue]
        before = [each for each in self.queue if each in now]
        return [] if now == before else [f"the queue was {before} and is {now}"]


def _amounts(status: PoolStatus) -> list[str]:
    problems = []
    for device in status.devices:
        parts = [part for lease in status.leases for part in lease.slices if lease.state is LeaseState.HELD]
        milli, memory = sum(part.milli for part in parts), sum(part.memory_mib for part in parts)
        if milli > device.milli or memory > device.device.memory_mib:
            problems.append(f"granted {milli} and {memory} MiB of {device}")
        if (milli, memory) != (device.held_milli, device.held_memory_mib):
            problems.append(f"held are {milli} and {memory} MiB, and counted {device}")
    return problems


def _bursts(status: PoolStatus) -> list[str]:
    """What is used on top is nobody's guarantee, within each limit, and of leases that are held alone."""
    problems = []
    for lease in (*status.leases, *status.queue):
        for part in lease.slices:
            most = max(0, part.limit_mib - part.memory_mib) if lease.state is LeaseState.HELD else 0
            if not 0 <= part.burst_mib <= most:
                problems.append(f"{lease.id}, {lease.state.value}, has {part.burst_mib} MiB on top of {part}")
    for device in status.devices:
        parts = [part for lease in status.leases for part in lease.slices if part.device == device.device]
        if sum(part.allowed_mib for part in parts) > device.device.memory_mib:
            problems.append(f"{sum(part.allowed_mib for part in parts)} MiB may be used of {device}")
    return problems


def _line(status: PoolStatus) -> list[str]:
    problems = []
    if [lease.position for lease in status.queue] != list(range(1, len(status.queue) + 1)):
        problems.append(f"the positions are {[lease.position for lease in status.queue]}")
    if status.queue and status.devices:
        wanted, device = status.queue[0].request.milli or 0, status.devices[0]
        if wanted <= device.free_milli and wanted * 32768 // 1000 <= device.free_memory_mib:
            problems.append(f"{status.queue[0].id} waits for {wanted}, and free are {device.free_milli}")
    return problems


def _asked(status: PoolStatus) -> list[str]:
    """An idle kernel is asked to give way for somebody."""
    held = [lease for lease in status.leases if lease.state is LeaseState.HELD and not status.queue]
    asked = [lease.id for lease in held if lease.asked_back is EndReason.YIELDED]
    return [f"{each} is asked to give way, and nobody waits" for each in asked]


def _processes(kernels: dict[int, str], live: dict[str, Lease]) -> list[str]:
    problems = []
    for pid, lease_id in kernels.items():
        lease = live.get(lease_id)
        if not lease_id:
            problems.append(f"kernel {pid} runs on no lease")
        elif lease is None or lease.state is LeaseState.ENDED:
            problems.append(f"kernel {pid} runs on {lease_id}, which has ended")
        elif lease.process is None or lease.process.pid != pid:
            problems.append(f"kernel {pid} runs on {lease_id}, which is tied to {lease.process}")
    for lease in live.values():
        if lease.holder.process is not None and not lease.holder.process.is_alive():
            problems.append(f"{lease.id} outlives who asked for it")
        if lease.state is LeaseState.HELD and lease.process is not None and not lease.process.is_alive():
            problems.append(f"{lease.id} outlives its kernel")
    return problems


def _templates(world: World) -> list[str]:
    servers = {school.process.pid for school in world.schools if school.process is not None and school.alive}
    return [
        f"template {seen.pid} outlives its server, and its parent is {seen.parent}"
        for seen in world.templates()
        if seen.parent not in servers
    ]


def _file(store: Path, releases: int) -> list[str]:
    """Look whether the store's file is whole, and was brought to each release's schema once."""
    with closing(sqlite3.connect(f"file:{store}?mode=ro", uri=True)) as connection:
        (found,) = connection.execute("PRAGMA integrity_check").fetchone()
        tables = "SELECT count(*) FROM sqlite_master WHERE type = 'table' AND name LIKE 'later%'"
        (upgrades,) = connection.execute(tables).fetchone()
    problems = [] if found == "ok" else [f"the store: {found}"]
    if upgrades != releases:
        problems.append(f"the store has seen {upgrades} of {releases} releases")
    return problems
