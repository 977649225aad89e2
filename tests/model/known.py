"""Processes and leases, as the model knows them."""

from __future__ import annotations

from dataclasses import dataclass, field

from gpu_pool_client import EndReason, LeaseState, Slice, SliceRequest


@dataclass(eq=False)
class Life:
    """A process of the test's, as the model knows it."""

    alive: bool = True


@dataclass(eq=False)
class Known:
    """A lease as it should be."""

    id: str
    key: str
    user: str
    course: str
    request: SliceRequest
    keeper: Life
    #: Of the wall clock, as are all times but ``held_from``, ``ends_by`` and ``deadline``.
    asked_at: float
    since: float
    #: What it takes, or would take, of all devices together.
    milli: int
    memory_mib: int
    batch: bool = False
    state: LeaseState = LeaseState.WAITING
    home: frozenset[str] = frozenset()
    reserved: tuple[str, ...] = ()
    parts: tuple[Slice, ...] = ()
    first_held_at: float | None = None
    held_at: float | None = None
    held_from: float = 0.0
    ends_by: float | None = None
    process: Life | None = None
    grace: float = 0.0
    ready_within: float | None = None
    deadline: tuple[float, EndReason] | None = None
    #: Thousandths, from when and until when it had them, by the boot's clock.
    stretches: list[tuple[int, float, float]] = field(default_factory=list)
    reason: EndReason | None = None
    ended_at: float = 0.0

    @property
    def number(self) -> int:
        return int(self.id.partition("-")[0])

    @property
    def held_seconds(self) -> float:
        return sum(until - since for _, since, until in self.stretches)

    @property
    def used(self) -> float:
        """Thousandths of a GPU times seconds."""
        return sum(milli * (until - since) for milli, since, until in self.stretches)

    def stop_holding(self, uptime: float) -> None:
        if self.held_at is not None:
            self.stretches.append((self.milli, self.held_from, uptime))
        self.parts, self.held_at, self.ends_by = (), None, None

    def measure(self) -> None:
        """Take note of what it takes, now that it holds something."""
        self.milli = sum(part.milli for part in self.parts)
        self.memory_mib = sum(part.memory_mib for part in self.parts)
