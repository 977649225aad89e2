"""Where a slice goes and what is left: the edges, one by one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpu_pool.policy import placement
from gpu_pool.policy.queue_state import Rules
from gpu_pool_client import Device, DeviceStatus, Slice, parse_request
from gpu_pool_client._free import fits
from support.pools import device

RULES = Rules()
V100 = device(0)
T4 = device(1, "T4", 16384, contexts=7)
SAME = replace(device(2), one_size=True)
MIG = device(3, "A100", 4864, milli=142, mig_profile="1g.5gb")


@pytest.mark.parametrize(
    ("statuses", "rules", "milli"),
    [
        ([], RULES, 0),
        ([DeviceStatus(V100, 0, 0, 0, 0)], RULES, 1000),
        ([DeviceStatus(V100, 1000, 32768, 0, 1)], RULES, 0),
        ([DeviceStatus(V100, 700, 700, 0, 1)], RULES, 300),
        # 20 thousandths are 655 MiB, 21 are 688.
        ([DeviceStatus(V100, 0, 32768 - 655, 0, 1)], RULES, 20),
        ([DeviceStatus(V100, 0, 32768 - 687, 0, 1)], RULES, 20),
        ([DeviceStatus(V100, 0, 32768 - 688, 0, 1)], RULES, 21),
        # CUDA itself needs 350 MiB: 10 thousandths are 327, 11 are 360.
        ([DeviceStatus(V100, 0, 32768 - 359, 0, 1)], RULES, 0),
        ([DeviceStatus(V100, 0, 32768 - 360, 0, 1)], RULES, 11),
        ([DeviceStatus(V100, 0, 0, 0, 0)], Rules(max_milli=400), 400),
        ([DeviceStatus(V100, 0, 0, 0, 0)], Rules(max_memory_mib=655), 20),
        ([DeviceStatus(V100, 900, 0, 0, 1), DeviceStatus(T4, 500, 0, 2, 1)], RULES, 500),
        ([DeviceStatus(T4, 0, 0, 6, 3)], RULES, 0),
        ([DeviceStatus(T4, 0, 0, 5, 2)], RULES, 1000),
        ([DeviceStatus(SAME, 40, 1310, 0, 2)], RULES, 20),
        ([DeviceStatus(SAME, 41, 1310, 0, 2)], RULES, 0),
        ([DeviceStatus(SAME, 0, 0, 0, 0)], RULES, 1000),
        ([DeviceStatus(MIG, 0, 0, 0, 0, 142)], RULES, 142),
        ([DeviceStatus(V100, 1500, 0, 0, 1, 2000)], RULES, 500),
    ],
)
def test_the_largest_share_that_is_free(statuses: list[DeviceStatus], rules: Rules, milli: int) -> None:
    assert placement.largest(statuses, rules) == milli


@pytest.mark.parametrize(
    ("text", "on", "rules", "limit"),
    [
        ("2%", V100, RULES, 0),
        ("2%..10%", V100, RULES, 3276),
        ("2%..1", V100, RULES, 32768),
        ("1GiB..4GiB", V100, RULES, 4096),
        ("10GiB..40GiB", V100, RULES, 32768),
        ("16GiB..40GiB", T4, RULES, 0),
        ("2%..50%", V100, Rules(max_milli=100), 3276),
        ("2%..50%", V100, Rules(max_memory_mib=2000), 2000),
        ("2%..50%", V100, Rules(max_milli=20), 0),
        ("1GiB..4GiB", V100, Rules(max_memory_mib=1024), 0),
        ("2%..10%", SAME, RULES, 0),
        ("2%..10%", MIG, RULES, 0),
    ],
)
def test_the_limit_of_a_slice_is_memory_that_it_may_have(
    text: str, on: Device, rules: Rules, limit: int
) -> None:
    part = placement.cut(parse_request(text), on, rules)
    assert (part.limit_mib, part.burst_mib, part.allowed_mib) == (limit, 0, part.memory_mib)
    # All else is that of its guarantee.
    assert replace(part, limit_mib=0) == placement.cut(parse_request(text).guarantee, on, rules)


@pytest.mark.parametrize(
    ("milli", "memory_mib", "contexts", "is_true"),
    [
        (300, 1000, 2, True),
        (301, 1000, 2, False),
        (300, 1001, 2, False),
        (300, 1000, 3, False),
        (0, 0, 0, True),
    ],
)
def test_what_fits_to_the_last_piece(milli: int, memory_mib: int, contexts: int, is_true: bool) -> None:
    status = DeviceStatus(T4, 700, 16384 - 1000, 5, 2)
    assert fits(Slice(T4, milli, memory_mib, contexts), status) is is_true


@pytest.mark.parametrize(
    ("part", "rules", "holds"),
    [
        (Slice(V100, 1000, 32768), RULES, True),
        (Slice(V100, 10, 350), RULES, True),
        (Slice(V100, 10, 349), RULES, False),
        (Slice(V100, 10, 32769), RULES, False),
        (Slice(V100, 501, 400), Rules(max_milli=500), False),
        (Slice(V100, 500, 400), Rules(max_milli=500), True),
        (Slice(V100, 10, 401), Rules(max_memory_mib=400), False),
        (Slice(V100, 10, 400), Rules(max_memory_mib=400), True),
        (Slice(MIG, 143, 4864), RULES, False),
        (Slice(T4, 10, 400, 7), RULES, True),
        (Slice(T4, 10, 400, 8), RULES, False),
        (Slice(V100, 10, 400, 99), RULES, True),
    ],
)
def test_what_a_device_could_hold_if_it_were_empty(part: Slice, rules: Rules, holds: bool) -> None:
    assert placement.holds(part, rules) is holds


def test_a_slice_of_a_mig_instance_is_all_of_it_or_more_than_there_is() -> None:
    cut = placement.cut(parse_request("2%"), MIG, RULES)
    assert (cut.milli, cut.memory_mib, cut.contexts) == (142, 4864, 0)
    assert placement.cut(parse_request("20%"), MIG, RULES).milli == 200
    assert placement.cut(parse_request("5GiB"), MIG, RULES).memory_mib == 5120


def test_slots_are_cut_where_they_are_counted() -> None:
    assert placement.cut(parse_request("2%"), T4, Rules(lease_contexts=3)).contexts == 3
    assert placement.cut(parse_request("2%"), V100, Rules(lease_contexts=3)).contexts == 0


def test_what_is_granted_is_taken_from_its_devices_alone() -> None:
    statuses = [DeviceStatus(V100, 100, 200, 0, 1), DeviceStatus(T4, 10, 20, 2, 1)]
    left = placement.deduct(statuses, [Slice(T4, 30, 400, 2)])
    assert left == [statuses[0], DeviceStatus(T4, 40, 420, 4, 2)]


def test_two_gpus_of_one_node_are_nearer_than_those_in_between() -> None:
    devices = [device(0, numa_node=0), device(1, numa_node=1), device(2, numa_node=0), device(3)]
    parts = placement.place(parse_request("2"), [DeviceStatus(each, 0, 0, 0, 0) for each in devices], RULES)
    assert parts is not None
    assert [part.device.index for part in parts] == [0, 2]
    unknown = [device(0), device(1), device(2)]
    parts = placement.place(parse_request("2"), [DeviceStatus(each, 0, 0, 0, 0) for each in unknown], RULES)
    assert parts is not None
    assert [part.device.index for part in parts] == [0, 1]
