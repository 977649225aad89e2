"""What a person reads who cannot have what they asked for: every sentence, as it is."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace

import pytest

from gpu_pool.policy import admission
from gpu_pool.policy.queue_state import Rules
from gpu_pool_client import (
    BadRequest,
    Device,
    DeviceStatus,
    GpuPoolError,
    NeverFits,
    NotAllowed,
    OverQuota,
    parse_request,
)
from support.pools import device

V100, SECOND = device(0), device(1)
T4 = device(2, "T4", 16384, contexts=7)
MIG = device(3, "A100", 4864, milli=142, mig_profile="1g.5gb")


def refusal(act: Callable[[], object]) -> tuple[type[GpuPoolError], str, str]:
    """Return the class of an error, its message and its remedy."""
    with pytest.raises(GpuPoolError) as caught:
        act()
    return type(caught.value), caught.value.message, caught.value.remedy


_ASK = "Ask for less, or ask the administrator."


@pytest.mark.parametrize(
    ("text", "rules", "message", "remedy"),
    [
        (
            "3",
            Rules(max_devices=2),
            "You asked for 3, that is 3 GPUs; this pool gives at most 2 to one lease.",
            "Ask for 2 or less, or ask the administrator.",
        ),
        (
            "60%",
            Rules(max_milli=500),
            "You asked for 60%; the most this pool gives to one lease is 50% of a GPU.",
            _ASK,
        ),
        (
            "9GiB",
            Rules(max_memory_mib=8192),
            "You asked for 9GiB; the most this pool gives to one lease is 8GiB on one GPU.",
            _ASK,
        ),
        (
            "9GiB",
            Rules(max_memory_mib=8192, max_milli=500),
            "You asked for 9GiB; the most this pool gives to one lease is 50% of a GPU and 8GiB on one GPU.",
            _ASK,
        ),
    ],
)
def test_what_the_rules_forbid(text: str, rules: Rules, message: str, remedy: str) -> None:
    found = refusal(lambda: admission.check_rules(parse_request(text), rules))
    assert found == (NotAllowed, message, remedy)


@pytest.mark.parametrize(
    ("text", "rules"),
    [
        ("2", Rules(max_devices=2)),
        ("50%", Rules(max_milli=500)),
        ("8GiB", Rules(max_memory_mib=8192)),
        ("100%", Rules(max_memory_mib=8192)),
        ("40GiB", Rules(max_milli=500)),
        ("999", Rules()),
    ],
)
def test_what_is_exactly_a_limit_is_allowed(text: str, rules: Rules) -> None:
    admission.check_rules(parse_request(text), rules)


def test_one_who_waits_for_too_much_already() -> None:
    request = parse_request("2%")
    admission.check_waiting(request, 2, 3)
    admission.check_waiting(request, 99, 0)
    kind, message, remedy = refusal(lambda: admission.check_waiting(request, 3, 3))
    assert kind is OverQuota
    assert message == (
        "You asked for 2%, and you wait for 3 slices already; "
        "3 is the most that one user may wait for at once."
    )
    assert remedy.startswith("Wait until one of them is granted, or withdraw what you do not need: gpu-pool ")


_V100S = "0: V100-SXM2-32GB (simulated), 32GiB"


@pytest.mark.parametrize(
    ("text", "devices", "rules", "message", "remedy"),
    [
        (
            "2%",
            [],
            Rules(),
            "You asked for 2%; this pool has no GPU.",
            'Run "gpu-pool doctor" to see why. To try things out without one, '
            'set GPU_POOL_DEVICES="V100-SXM2-32GB:1" for a simulated GPU.',
        ),
        (
            "2% model=h100",
            [V100, T4],
            Rules(),
            f"You asked for 2% model=h100; no GPU here matches that. There is: {_V100S}, "
            "2: T4 (simulated), 16GiB.",
            "Ask for one of these, or leave the filter out.",
        ),
        (
            "2x50%",
            [V100],
            Rules(),
            f"You asked for 2x50%, that is 50% of each of 2 GPUs; this pool has one: {_V100S}.",
            "Ask for at most 50%.",
        ),
        (
            "4",
            [V100],
            Rules(),
            f"You asked for 4, that is 4 GPUs; this pool has one: {_V100S}.",
            "Ask for at most 1.",
        ),
        (
            "3x1.5GiB",
            [V100, SECOND],
            Rules(),
            f"You asked for 3x1.5GiB, that is 1.5GiB of each of 3 GPUs; 2 here could take part: {_V100S}, "
            "1: V100-SXM2-32GB (simulated), 32GiB.",
            "Ask for at most 2x1.5GiB.",
        ),
        (
            "2",
            [T4, T4],
            Rules(),
            "You asked for 2, that is 2 GPUs; here each GPU is shared by MPS, "
            "and a process can use one of them.",
            "Ask for one GPU, or ask the administrator.",
        ),
        (
            "2",
            [T4, V100],
            Rules(),
            f"You asked for 2, that is 2 GPUs; 1 here could take part: {_V100S}.",
            "Ask for at most 1.",
        ),
        (
            "33GiB",
            [T4, V100],
            Rules(),
            "You asked for 33GiB; the largest GPU here, V100-SXM2-32GB (simulated), has 32GiB.",
            "Ask for at most 32GiB.",
        ),
        (
            "50%",
            [MIG],
            Rules(),
            "You asked for 50%; the largest MIG instance here, A100 MIG 1g.5gb (simulated), "
            "is 14.2% of its GPU.",
            "Ask for at most 14.2%.",
        ),
        (
            "0.5%",
            [V100],
            Rules(),
            "0.5% of V100-SXM2-32GB (simulated) (32GiB) is 163 MiB. CUDA itself takes about 350 MiB before "
            "the first tensor, so nothing would be left.",
            "Ask for at least 1.1% here.",
        ),
        (
            "10%",
            [replace(T4, contexts=1)],
            Rules(),
            "You asked for 10%; T4 (simulated) has 1 CUDA context slots, and each kernel needs 2.",
            "Ask the administrator.",
        ),
        (
            "3",
            [V100, SECOND],
            Rules(),
            f"You asked for 3, that is 3 GPUs; 2 here could take part: {_V100S}, "
            "1: V100-SXM2-32GB (simulated), 32GiB.",
            "Ask for at most 2.",
        ),
    ],
)
def test_what_never_fits(text: str, devices: list[Device], rules: Rules, message: str, remedy: str) -> None:
    found = refusal(lambda: admission.check(parse_request(text), devices, rules))
    assert found == (NeverFits, message, remedy)


def test_where_only_the_rules_stand_in_the_way() -> None:
    found = refusal(lambda: admission.check(parse_request("60%"), [V100], Rules(max_memory_mib=8192)))
    most = "the most this pool gives to one lease is 8GiB on one GPU"
    assert found == (NotAllowed, f"You asked for 60%; {most}.", _ASK)
    small = refusal(lambda: admission.check(parse_request("0.5%"), [V100], Rules(max_milli=500)))
    assert small[0] is NeverFits


@pytest.mark.parametrize(
    ("name", "devices", "message", "there_is"),
    [
        ("9", [V100, SECOND], "'9' is not a GPU of this pool.", f"0 ({V100.uuid}), 1 ({SECOND.uuid})"),
        ("x" * 99, [], f"'{'x' * 64}' is not a GPU of this pool.", "none"),
        (
            "0",
            [V100, replace(SECOND, index=0)],
            "'0' means several; name one by its uuid.",
            f"0 ({V100.uuid}), 0 ({SECOND.uuid})",
        ),
    ],
)
def test_a_device_that_is_not_there(name: str, devices: list[Device], message: str, there_is: str) -> None:
    found = refusal(lambda: admission.find_device(name, devices))
    assert found == (BadRequest, message, f"There is: {there_is}.")


def test_a_device_is_named_by_index_or_uuid() -> None:
    assert admission.find_device("1", [V100, SECOND]) is SECOND
    assert admission.find_device(V100.uuid, [V100, SECOND]) is V100


def test_no_list_of_devices_is_endless() -> None:
    many = [device(index) for index in range(40)]
    assert refusal(lambda: admission.find_device("x", many))[2].count("SIM-") == 16
    assert (
        refusal(lambda: admission.check(parse_request("2% model=h100"), many, Rules()))[1].count("32GiB")
        == 16
    )


def test_why_it_does_not_fit_now() -> None:
    statuses = [DeviceStatus(V100, 700, 22937, 0, 3), DeviceStatus(T4, 100, 16384, 0, 1)]
    held = (
        "V100-SXM2-32GB (simulated): 30% and 9.6 GiB free, 3 in use; "
        "T4 (simulated): 90% and 0 MiB free, 1 in use."
    )
    request, rules = parse_request("50%"), Rules()
    assert admission.shortage(request, statuses, 0, rules) == (
        f"No GPU slice of 50% is free now. {held}",
        "Free at this moment: up to 30% of one GPU. Choose a smaller slice, or try again later.",
        "30%",
    )
    later = "Try again when somebody has finished."
    assert admission.shortage(request, statuses, 2, rules) == (
        f"No GPU slice of 50% is free now. {held} 2 waiting before you.",
        later,
        None,
    )
    full = [DeviceStatus(V100, 1000, 32768, 0, 1)]
    assert admission.shortage(request, full, 0, rules)[1:] == (later, None)


def test_of_many_gpus_the_freest_are_named() -> None:
    statuses = [DeviceStatus(device(index), 1000 - 10 * index, 32768, 0, 1) for index in range(9)]
    message = admission.shortage(parse_request("1"), statuses, 0, Rules())[0]
    label = device(0).label
    named = "; ".join(f"{label}: {share}% and 0 MiB free, 1 in use" for share in range(8, 0, -1))
    assert message == f"No whole GPU is free now. The freest of 9 GPUs: {named}."
    message = admission.shortage(parse_request("2"), statuses[1:], 0, Rules())[0]
    named = "; ".join(f"{label}: {share}% and 0 MiB free, 1 in use" for share in range(1, 9))
    assert message == f"2 whole GPUs are not free together now. {named}."


def test_what_is_drained_is_told_and_only_then_is_the_administrator_to_be_asked() -> None:
    request, rules = parse_request("2x50%"), Rules()
    drained = [replace(DeviceStatus(device(index), 0, 0, 0, 0), drained=True) for index in (1, 2)]
    by_admin = [replace(each, drained_at=60.0 * index) for index, each in enumerate(drained)]
    since = time.strftime("%Y-%m-%d %H:%M %Z", time.localtime(0))
    gpus = f"GPUs 1 and 2 (the first since {since})"
    told = f"An administrator has drained {gpus}: nothing new is granted on them."
    none = "No GPU slice of 2x50% is free now."
    ask = "Ask the administrator when they are in use again."
    assert admission.shortage(request, [], 0, rules, by_admin) == (f"{none} {told}", ask, None)
    # Whose end would make room is waited for, and a smaller slice is offered, as ever.
    full = DeviceStatus(V100, 1000, 32768, 0, 1)
    message, remedy, _ = admission.shortage(request, [full], 1, rules, by_admin)
    assert message == f"{none} {full.device.label}: 0% and 0 MiB free, 1 in use. {told} 1 waiting before you."
    assert remedy == "Try again when somebody has finished."
    some = admission.shortage(request, [DeviceStatus(V100, 700, 22937, 0, 3)], 0, rules, by_admin)
    assert some[1].startswith("Free at this moment: up to 30%")
    # A cluster closes machines by itself; and what the request would not have anyway is not spoken of.
    assert (
        "The cluster has closed GPU 1: nothing new"
        in admission.shortage(request, [], 0, rules, drained[:1])[0]
    )
    other = parse_request("2% model=A100")
    assert "drained" not in admission.shortage(other, [full], 0, rules, by_admin)[0]
