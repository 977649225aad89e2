"""Simulated devices stay in the pool for as long as a process uses them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.devices.inventory import parse_devices
from gpu_pool.settings import PoolSettings
from gpu_pool.store import leases, registration
from gpu_pool.store.context import StoreContext
from gpu_pool.store.database import Database
from gpu_pool.store.errors import OtherDevices
from gpu_pool.store.locks import LivenessLocks

ONE, TWO = (parse_devices(f"V100-SXM2-32GB:{number}") for number in (1, 2))


@contextlib.contextmanager
def opened(path: Path) -> Iterator[StoreContext]:
    with closing(Database(path)) as database:
        yield StoreContext(database, PoolSettings())


def test_who_asks_whether_others_simulate_goes_on_to_do_so(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with closing(LivenessLocks(path)) as one, closing(LivenessLocks(path)) as other:
        one.use_simulated()
        with one.nobody_simulates() as alone, other.nobody_simulates() as others_alone:
            assert (alone, others_alone) == (True, False)
        with other.nobody_simulates() as alone:
            assert not alone
    with closing(LivenessLocks(path)) as later, later.nobody_simulates() as alone:
        assert alone


def test_who_does_not_simulate_keeps_nobody_from_it(tmp_path: Path) -> None:
    path = tmp_path / "lock"
    with closing(LivenessLocks(path)) as one, closing(LivenessLocks(path)) as other:
        with one.nobody_simulates():
            pass
        with other.nobody_simulates() as alone:
            assert alone


@pytest.mark.parametrize("devices", [ONE, TWO], ids=["the-same", "others"])
def test_nobody_empties_a_pool_of_simulated_devices_that_is_in_use(
    tmp_path: Path, devices: tuple[object, ...]
) -> None:
    path = tmp_path / "store.db"
    with opened(path) as lease_store:
        registration.register(lease_store, ONE)
    with opened(path) as user, opened(path) as other:
        registration.register(user, devices)  # type: ignore[arg-type]
        registration.forget_simulated(other)
        assert len(leases.status(user, "").devices) == len(devices)
        with pytest.raises(OtherDevices):
            registration.register(other, [replace(ONE[0], uuid="GPU-real", simulated=False)])
    with opened(path) as other:
        registration.forget_simulated(other)
        assert leases.status(other, "").devices == ()
