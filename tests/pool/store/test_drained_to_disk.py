"""Which kernels a drain puts to disk: those on the device, while any device of theirs is drained so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.settings import PoolSettings
from gpu_pool.store import leases, registration, requests
from gpu_pool.store.context import StoreContext
from gpu_pool.store.database import Database
from gpu_pool_client import Holder, LeaseState, Process, parse_request
from support.pools import device

TWO = [replace(device(index), simulated=False) for index in range(2)]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture(params=[False, True], ids=["processes", "pods"])
def in_pods(request: pytest.FixtureRequest) -> bool:
    found: bool = request.param
    return found


@pytest.fixture
def store(path: Path, in_pods: bool) -> Iterator[StoreContext]:
    database = Database(path)
    settings = PoolSettings()
    settings.in_pods = settings.pods_park = in_pods
    opened = StoreContext(database, settings)
    registration.register(opened, TWO)
    yield opened
    database.close()


def asked(store: StoreContext, size: str, key: str) -> str:
    holder = Holder("ada", process=Process.current())
    return requests.decide(store, parse_request(size), holder, key).id


def hibernates(store: StoreContext, lease_id: str) -> bool:
    return leases.read(store, lease_id).hibernates


def test_a_kernel_on_two_devices_stays_on_disk_until_neither_is_drained_for_that(store: StoreContext) -> None:
    both = asked(store, "2", "both")
    leases.lend(store, both)
    one = asked(store, "1", "one")
    for index in "01":
        registration.close_device(store, index, True, hibernate=True)
    assert hibernates(store, both)
    assert hibernates(store, one)
    registration.close_device(store, "0", False)
    assert hibernates(store, both)
    assert not hibernates(store, one)
    registration.close_device(store, "1", True)  # which takes nothing back
    assert hibernates(store, both)
    registration.close_device(store, "1", False)
    assert not hibernates(store, both)


def test_one_that_is_parked_and_may_come_back_to_any_device_is_meant_unless_kernels_run_in_pods(
    store: StoreContext, in_pods: bool
) -> None:
    parked = asked(store, "1", "parked")
    leases.lend(store, parked)
    leases.forget_homes(store, [parked])
    registration.close_device(store, "1", True, hibernate=True)
    assert hibernates(store, parked) is not in_pods
    registration.close_device(store, "0", False)
    assert hibernates(store, parked) is not in_pods
    registration.close_device(store, "1", False)
    assert not hibernates(store, parked)


@pytest.mark.parametrize("has_home", [True, False])
def test_a_device_that_has_gone_meanwhile_is_shown_and_can_be_undrained(
    store: StoreContext, in_pods: bool, has_home: bool
) -> None:
    """Else the kernels that went to disk for it would stay there."""
    asked(store, "1", "held")
    parked = asked(store, "1", "parked")
    leases.lend(store, parked)
    if not has_home:
        leases.forget_homes(store, [parked])
    registration.close_device(store, "1", True, hibernate=True)
    is_meant = has_home or not in_pods
    assert hibernates(store, parked) is is_meant
    registration.register(store, TWO[:1])
    assert hibernates(store, parked) is is_meant
    gone = leases.status(store, "").devices[1]
    assert (gone.device, gone.drained, gone.hibernates) == (TWO[1], True, True)
    undrained = registration.close_device(store, TWO[1].uuid, False)
    assert (undrained.device, undrained.drained_at, undrained.hibernates) == (TWO[1], None, False)
    assert not hibernates(store, parked)
    assert [each.device for each in leases.status(store, "").devices] == TWO[:1]


def test_nothing_is_granted_on_a_drained_device_that_has_gone(store: StoreContext) -> None:
    registration.close_device(store, "1", True, hibernate=True)
    registration.register(store, TWO[:1])
    asked(store, "1", "held")
    assert leases.read(store, asked(store, "1", "waits")).state is LeaseState.WAITING
