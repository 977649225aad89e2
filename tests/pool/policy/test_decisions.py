"""Placement, admission and the queue: pure functions, tested as such."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_pool.policy import admission, placement
from gpu_pool.policy.queue import Decision, Policy, Situation, Usage, Waiter, decide
from gpu_pool.policy.queue_state import Rules
from gpu_pool_client import (
    Device,
    DeviceStatus,
    NeverFits,
    NotAllowed,
    SliceRequest,
    format_share,
    parse_request,
)
from gpu_pool_client._free import accepts
from support.pools import device

RULES = Rules()
V100 = [device(index) for index in range(4)]


def status(of: Device, milli: int = 0, memory_mib: int | None = None, total: int = 1000) -> DeviceStatus:
    memory = of.memory_mib * milli // 1000 if memory_mib is None else memory_mib
    return DeviceStatus(of, milli, memory, 0, 1 if milli else 0, total)


def chosen(text: str, statuses: Sequence[DeviceStatus], rules: Rules = RULES) -> list[int] | None:
    parts = placement.place(parse_request(text), statuses, rules)
    return None if parts is None else [part.device.index for part in parts]


def test_the_lowest_index_that_fits_is_taken_so_that_whole_gpus_stay_free() -> None:
    assert chosen("2%", [status(V100[0], 500), status(V100[1]), status(V100[2])]) == [0]
    assert chosen("60%", [status(V100[0], 500), status(V100[1]), status(V100[2])]) == [1]
    assert chosen("60%", [status(V100[0], 500)]) is None


def test_a_memory_request_is_charged_compute_in_proportion_rounded_up() -> None:
    part = placement.cut(parse_request("655MiB"), V100[0], RULES)
    assert (part.milli, part.memory_mib) == (20, 655)
    part = placement.cut(parse_request("656MiB"), V100[0], RULES)
    assert (part.milli, part.memory_mib) == (21, 656)


@pytest.mark.parametrize(
    ("text", "indexes"),
    [
        ("2% model=a100", [1]),
        ("2% model=Tesla-V100", None),
        ("2% memory>=40GiB", [1]),
        ("2% driver>=560", [1]),
        ("2% driver>=550.54", [0]),
        ("2% index=1", [1]),
        ("2% index=7", None),
    ],
)
def test_filters(text: str, indexes: list[int] | None) -> None:
    devices = [device(0, driver="550.54.14"), device(1, "A100-SXM4-40GB", 40960, driver="565.1")]
    assert chosen(text, [status(each) for each in devices]) == indexes


def test_spaces_in_a_model_are_written_as_dashes() -> None:
    assert accepts(parse_request("2% model=rtx-a6000").filters, device(0, "NVIDIA RTX A6000"))


def test_several_devices_prefer_nvlink_then_numa_then_the_lowest_index() -> None:
    linked = [
        device(0, numa_node=0),
        device(1, numa_node=1, nvlink=("SIM-V100-SXM2-32GB-3",)),
        device(2, numa_node=0),
        device(3, numa_node=1, nvlink=("SIM-V100-SXM2-32GB-1",)),
    ]
    assert chosen("2", [status(each) for each in linked]) == [1, 3]
    assert chosen("2", [status(each) for each in linked if each.index != 3]) == [0, 2]
    assert chosen("2", [status(each) for each in V100]) == [0, 1]
    assert chosen("5", [status(each) for each in V100]) is None


def test_compute_may_be_granted_twice_over_and_memory_never() -> None:
    double = Rules(device_milli=2000)
    assert chosen("10%", [status(V100[0], 1000, 16000, total=2000)], double) == [0]
    assert chosen("10%", [status(V100[0], 1000, 32000, total=2000)], double) is None


def test_context_slots_are_a_third_resource() -> None:
    counted = device(0, contexts=48)
    full = DeviceStatus(counted, 480, 15000, 47, 24)
    assert chosen("2%", [full]) is None
    assert chosen("2%", [DeviceStatus(counted, 480, 15000, 46, 23)]) == [0]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("40GiB", "the largest GPU here, V100-SXM2-32GB (simulated), has 32GiB. Ask for at most 32GiB."),
        ("9", "that is 9 GPUs; 4 here could take part"),
        ("2% model=H100", "no GPU here matches that. There is: 0: V100-SXM2-32GB (simulated), 32GiB, 1:"),
        ("1%", "is 327 MiB. CUDA itself takes about 350 MiB before the first tensor"),
        ("1%", "Ask for at least 1.1% here."),
        ("100MiB", "is 100 MiB. CUDA itself takes about 350 MiB"),
    ],
)
def test_what_can_never_fit_is_refused_with_the_arithmetic(text: str, words: str) -> None:
    with pytest.raises(NeverFits) as caught:
        admission.check(parse_request(text), V100, RULES)
    assert words in str(caught.value)


def test_a_pool_without_devices_says_how_to_get_one() -> None:
    with pytest.raises(NeverFits, match='this pool has no GPU.*gpu-pool doctor.*GPU_POOL_DEVICES="V100'):
        admission.check(parse_request("2%"), [], RULES)


@pytest.mark.parametrize(
    ("text", "rules", "words"),
    [
        ("51%", Rules(max_milli=500), "most this pool gives to one lease is 50% of a GPU"),
        ("2GiB", Rules(max_memory_mib=1024), "most this pool gives to one lease is 1GiB on one GPU"),
        ("2x10%", Rules(max_devices=1), "at most 1 to one lease"),
    ],
)
def test_what_the_rules_forbid_is_not_allowed(text: str, rules: Rules, words: str) -> None:
    with pytest.raises(NotAllowed, match=words):
        admission.check_rules(parse_request(text), rules)


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("32GiB", Rules(max_milli=100)),
        ("1", Rules(max_memory_mib=1024)),
        ("2x50%", Rules(max_milli=500, max_memory_mib=1024)),
    ],
)
def test_a_limit_holds_in_whatever_unit_is_asked(text: str, rules: Rules) -> None:
    empty = [status(each) for each in V100]
    assert placement.place(parse_request(text), empty, rules) is None
    with pytest.raises(NotAllowed, match="You asked for .* the most this pool gives to one lease"):
        admission.check(parse_request(text), V100, rules)
    largest = SliceRequest(milli=placement.largest(empty, rules))
    assert placement.place(largest, empty, rules)


def decided(line: Sequence[Waiter], statuses: Sequence[DeviceStatus]) -> Decision:
    return decide(Situation(line, (), statuses, RULES, Policy(), Usage(), 0.0))


def test_a_parked_lease_waits_for_its_own_device_only() -> None:
    statuses = [status(V100[0], 1000), status(V100[1])]
    line = [
        Waiter(1, parse_request("50%"), frozenset([V100[0].uuid])),
        Waiter(2, parse_request("50%")),
    ]
    granted = [(waiter.number, parts[0].device.index) for waiter, parts in decided(line, statuses).grants]
    assert granted == [(2, 1)]


requests = st.one_of(
    st.builds(SliceRequest, count=st.integers(1, 3), milli=st.integers(11, 1000)),
    st.builds(SliceRequest, memory_mib=st.integers(350, 33000)),
)
pools = st.lists(st.integers(0, 1000), min_size=1, max_size=4).map(
    lambda held: [status(V100[index], milli) for index, milli in enumerate(held)]
)


@given(st.lists(requests, max_size=30), pools)
def test_nothing_is_ever_granted_twice(line: list[SliceRequest], statuses: list[DeviceStatus]) -> None:
    waiters = [Waiter(number, request) for number, request in enumerate(line)]
    for _, parts in decided(waiters, statuses).grants:
        statuses = placement.deduct(statuses, parts)
    for each in statuses:
        assert each.held_milli <= 1000
        assert each.held_memory_mib <= each.device.memory_mib


@given(pools)
def test_the_largest_that_would_fit_fits_and_nothing_larger_does(statuses: list[DeviceStatus]) -> None:
    milli = placement.largest(statuses, RULES)
    if milli:
        assert chosen(format_share(milli), statuses) is not None
    for larger in range(milli + 1, 1001, 37):
        assert placement.place(SliceRequest(milli=larger), statuses, RULES) is None


def test_a_device_for_slices_of_one_size_takes_another_size_only_when_it_is_empty() -> None:
    card = replace(V100[0], one_size=True)
    empty = DeviceStatus(card, 0, 0, 0, 0)
    two, ten = parse_request("2%"), parse_request("10%")
    first = placement.place(two, [empty], RULES)
    assert first is not None
    [occupied] = placement.deduct([empty], first)
    assert placement.place(two, [occupied], RULES) == first
    assert placement.place(ten, [occupied], RULES) is None
    assert placement.place(ten, [empty], RULES) is not None
    assert placement.largest([occupied], RULES) == 20


def instances() -> list[DeviceStatus]:
    """A GPU cut into instances of 3/7, 1/7 and 1/7, as MIG does, in the driver's order."""
    sizes = [("3g.20gb", 19968, 428), ("1g.5gb", 4864, 142), ("1g.5gb", 4864, 142)]
    cut = [
        replace(device(0), uuid=f"MIG-{n}", mig_profile=name, memory_mib=mib, milli=milli)
        for n, (name, mib, milli) in enumerate(sizes)
    ]
    return [DeviceStatus(each, 0, 0, 0, 0, each.milli) for each in cut]


@pytest.mark.parametrize(
    ("text", "uuid"),
    [("2%", "MIG-1"), ("14%", "MIG-1"), ("15%", "MIG-0"), ("4GiB", "MIG-1"), ("5GiB", "MIG-0")],
)
def test_the_smallest_mig_instance_that_offers_enough_is_granted_as_a_whole(text: str, uuid: str) -> None:
    free = instances()
    [part] = placement.place(parse_request(text), free, RULES) or ()
    assert part.device.uuid == uuid
    assert (part.milli, part.memory_mib) == (part.device.milli, part.device.memory_mib)
    [next_part] = placement.place(parse_request(text), placement.deduct(free, [part]), RULES) or (None,)
    assert next_part is None or next_part.device != part.device


def test_no_mig_instance_is_more_of_a_gpu_than_it_is() -> None:
    with pytest.raises(NeverFits, match=r"the largest MIG instance here, .* is 42\.8% of its GPU"):
        admission.check(parse_request("50%"), [each.device for each in instances()], RULES)
    assert placement.largest(instances(), RULES) == 428
    assert placement.largest(instances()[1:], RULES) == 142


def test_several_gpus_are_not_granted_where_each_is_shared_by_mps() -> None:
    shared = [replace(each, contexts=48) for each in V100]
    with pytest.raises(NeverFits, match="each GPU is shared by MPS"):
        admission.check(parse_request("2x50%"), shared, RULES)
    assert placement.place(parse_request("2x50%"), [status(each) for each in shared], RULES) is None
    mixed = [*shared[:2], *V100[2:]]
    assert chosen("2x50%", [status(each) for each in mixed]) == [2, 3]
