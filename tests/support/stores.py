"""A store of a test's own, without a pool around it; time is the test's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.clock import Clock
from gpu_pool.settings import PoolSettings
from gpu_pool.store import leases, registration, requests
from gpu_pool.store.context import StoreContext
from gpu_pool.store.database import Database
from gpu_pool_client import Device, EndReason, Holder, Lease, LeaseState, parse_request
from support.pools import device

#: A Wednesday.
START = 1_760_000_000.0


class TimedStore:
    """A store over simulated GPUs, and a clock that stands still until it is told."""

    def __init__(self, path: Path, *devices: Device, **settings: Any) -> None:
        self.now = START
        self.database = Database(path)
        # Leases of tests are attached to nothing.
        chosen = PoolSettings(attach_within="3650d", **settings)
        self.lease_store = StoreContext(self.database, chosen, Clock(lambda: self.now, lambda: self.now))
        registration.register(self.lease_store, devices or [device(0)])

    def ask(self, text: str, user: str = "ada", course: str | None = None) -> Lease:
        self.now += 0.001
        return requests.decide(
            self.lease_store, parse_request(text), Holder(user, course), f"{user}-{self.now}"
        )

    def state(self, lease: Lease) -> LeaseState:
        return leases.read(self.lease_store, lease.id).state

    def end(self, lease: Lease) -> None:
        leases.end_lease(self.lease_store, lease.id, EndReason.RELEASED)

    def resize(self, lease: Lease, text: str) -> Lease:
        return leases.change_size(self.lease_store, lease.id, parse_request(text))

    def placed(self, lease: Lease) -> list[int]:
        return [part.device.index for part in leases.read(self.lease_store, lease.id).slices]

    def held(self) -> list[int]:
        return [status.held_milli for status in leases.status(self.lease_store, "").devices]


@pytest.fixture
def pools(tmp_path: Path) -> Iterator[Callable[..., TimedStore]]:
    """Makes such stores, one after the other over the same file."""
    made: list[TimedStore] = []

    def make(*devices: Device, **settings: Any) -> TimedStore:
        made.append(TimedStore(tmp_path / "store.db", *devices, **settings))
        return made[-1]

    yield make
    for store in made:
        store.database.close()
