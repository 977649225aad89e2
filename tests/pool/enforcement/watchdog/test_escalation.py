"""When a lease uses too much, and what is done about it: values in, values out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_pool.devices.sampling import ProcessUse
from gpu_pool.enforcement.watchdog import Tolerance
from gpu_pool.enforcement.watchdog.attribution import OwnedUse
from gpu_pool.enforcement.watchdog.escalation import ExcessHistory, WatchdogStep, evaluate
from gpu_pool.enforcement.watchdog.excess import (
    Excess,
    clock_here,
    ended_text,
    is_watchdog_notice,
    notice_text,
)
from gpu_pool.enforcement.watchdog.watchdog import Watchdog
from gpu_pool_client import (
    Device,
    EndReason,
    Enforcement,
    Holder,
    Lease,
    LeaseState,
    Limit,
    PoolUnreachable,
    Process,
    Slice,
    Strength,
    parse_request,
)
from support.pools import identity, running

V100 = Device("GPU-0", 0, "V100", 32768)
TOLERANCE = Tolerance(notice_after=10, interrupt_after=30, end_after=60)


def steps(tolerance: Tolerance, over: list[bool], every: float = 1.0) -> dict[float, WatchdogStep]:
    """Evaluate at every moment; return the steps taken, by time."""
    history: ExcessHistory | None = None
    taken = {}
    for number, is_over in enumerate(over):
        history, step = evaluate(history, is_over, number * every, tolerance)
        if step is not WatchdogStep.NOTHING:
            taken[number * every] = step
    return taken


def test_the_steps_come_at_their_times() -> None:
    assert steps(TOLERANCE, [True] * 300) == {
        10: WatchdogStep.NOTICE,
        40: WatchdogStep.INTERRUPT,
        100: WatchdogStep.END,
    }


def test_going_under_forgives_everything() -> None:
    over = [True] * 50 + [False] + [True] * 45
    assert steps(TOLERANCE, over) == {
        10: WatchdogStep.NOTICE,
        40: WatchdogStep.INTERRUPT,
        50: WatchdogStep.CLEAR,
        61: WatchdogStep.NOTICE,
        91: WatchdogStep.INTERRUPT,
    }
    assert steps(TOLERANCE, [True] * 9 + [False]) == {}


@pytest.mark.parametrize(
    ("tolerance", "taken"),
    [
        (replace(TOLERANCE, ends=False), [WatchdogStep.NOTICE]),
        (replace(TOLERANCE, interrupt_after=None), [WatchdogStep.NOTICE, WatchdogStep.END]),
        (replace(TOLERANCE, end_after=None), [WatchdogStep.NOTICE, WatchdogStep.INTERRUPT]),
        (replace(TOLERANCE, interrupt_after=None, end_after=None), [WatchdogStep.NOTICE]),
    ],
)
def test_steps_may_be_left_out(tolerance: Tolerance, taken: list[WatchdogStep]) -> None:
    assert list(steps(tolerance, [True] * 500).values()) == taken


def test_every_step_is_preceded_by_its_warning_however_long_nobody_looked() -> None:
    assert steps(TOLERANCE, [True] * 5, every=1_000) == {
        1_000: WatchdogStep.NOTICE,
        2_000: WatchdogStep.INTERRUPT,
        3_000: WatchdogStep.END,
    }


@given(st.lists(st.booleans(), max_size=400))
def test_nothing_is_ended_that_was_not_over_all_the_time(over: list[bool]) -> None:
    for moment, step in steps(TOLERANCE, over).items():
        if step is WatchdogStep.END:
            assert all(over[int(moment) - 100 : int(moment) + 1])


@pytest.mark.parametrize(
    ("used", "granted", "allowed"),
    [(719, 655, True), (720, 655, False), (17203, 16384, True), (17204, 16384, False)],
)
def test_a_twentieth_or_64_mib_are_forgiven(used: int, granted: int, allowed: bool) -> None:
    assert Tolerance().allows(used, granted) is allowed


def test_a_notice_says_what_is_used_what_will_happen_and_what_to_do() -> None:
    excess = Excess(V100, used_mib=900, allowed_mib=655)
    first = notice_text(excess, ExcessHistory(0, noticed_at=10), TOLERANCE, 1_000 - 10, clock_here)
    assert "uses 900MiB of GPU 0's memory, and was granted 655MiB" in first
    assert first.index("what runs is interrupted") < first.index("its processes are ended")
    assert "torch.cuda.empty_cache()" in first
    second = notice_text(excess, ExcessHistory(0, 10, interrupted_at=40), TOLERANCE, 1_030 - 40, clock_here)
    assert "What ran was interrupted." in second
    assert "what runs is interrupted" not in second
    warned = notice_text(excess, ExcessHistory(0, 10), replace(TOLERANCE, ends=False), 1_000 - 10, clock_here)
    assert "If it stays so" not in warned


def test_a_notice_says_that_others_need_the_burst() -> None:
    excess = Excess(V100, used_mib=2_048, allowed_mib=655, was_burst=True)
    text = notice_text(excess, ExcessHistory(0, noticed_at=5), TOLERANCE.of_burst(), 1_000 - 5, clock_here)
    assert text.startswith(
        "This slice uses 2GiB of GPU 0's memory, and may use 655MiB now: "
        "others need what it had on top of its slice."
    )
    assert is_watchdog_notice(text)
    ended = ended_text(excess)
    assert "others need all but 655MiB" in ended
    assert ended.endswith("Its processes are ended. Start again with a slice that is granted more.")


@dataclass
class Decided:
    """Writes down what a watchdog decides."""

    told: list[tuple[str, EndReason | None]] = field(default_factory=list)

    def tell(self, lease_id: str, notice: str, ending: EndReason | None = None) -> None:
        self.told.append((notice, ending))

    def end(self, lease_id: str, reason: EndReason) -> None:
        raise AssertionError("nothing was to end")


def over(process: Process, **facts: object) -> tuple[Lease, dict[str, dict[str, list[OwnedUse]]]]:
    """Return a lease, and the use of far too much memory by its process."""
    parts = (Slice(V100, 20, 655),)
    plain = Lease("1-a", "key", parse_request("2%"), Holder("ada"), LeaseState.HELD, 0.0, slices=parts)
    lease = replace(plain, process=process, **facts)  # type: ignore[arg-type]
    return lease, {lease.id: {"GPU-0": [OwnedUse(process, ProcessUse(process.pid, 9_000))]}}


def test_processes_that_are_not_ours_to_signal_are_only_warned(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(_pid: int, _signum: int) -> None:
        raise PermissionError

    decided = Decided()
    watchdog = Watchdog(TOLERANCE, decided, lambda _lease, _pids: None)
    with running() as kernel:
        lease, used = over(identity(kernel))
        monkeypatch.setattr(os, "kill", refused)
        for moment in range(0, 1_000, 10):
            watchdog.watch([lease], used, moment)
        monkeypatch.undo()
        assert kernel.poll() is None
    [(notice, ending)] = decided.told
    assert "If it stays so" not in notice
    assert ending is None
    [record] = caplog.records
    assert "another user's" in record.getMessage()


@pytest.mark.parametrize("spared", ["of another container", "gone meanwhile"])
def test_what_is_not_certain_is_left_alone(spared: str) -> None:
    decided = Decided()
    watchdog = Watchdog(TOLERANCE, decided, lambda _lease, _pids: None)
    process = Process.current()
    lease, used = {
        "of another container": lambda: over(replace(process, namespace="pid:[1]")),
        "gone meanwhile": lambda: over(replace(process, start=1)),
    }[spared]()
    for moment in range(0, 1_000, 10):
        watchdog.watch([lease], used, moment)
    assert decided.told == []


@pytest.mark.parametrize(
    "memory",
    [
        Limit(),
        Limit(Strength.COOPERATIVE, "HAMi-core"),
        Limit(Strength.COOPERATIVE, "MPS, each process"),
        Limit(Strength.HARD, "MPS, each process"),
    ],
    ids=str,
)
def test_a_lease_is_evaluated_by_all_its_processes_even_where_each_of_them_is_held_firmly(
    memory: Limit,
) -> None:
    decided = Decided()
    watchdog = Watchdog(replace(TOLERANCE, ends=False), decided, lambda _lease, _pids: None)
    with running() as kernel, running() as second:
        first, other = identity(kernel), identity(second)
        lease, _ = over(first, enforcement=Enforcement(memory=memory))
        one, two = (OwnedUse(each, ProcessUse(each.pid, 650)) for each in (first, other))
        for moment in range(0, 100, 10):
            watchdog.watch([lease], {lease.id: {"GPU-0": [one]}}, moment)
        assert decided.told == []  # one process keeps to what the lease was granted
        for moment in range(100, 200, 10):
            watchdog.watch([lease], {lease.id: {"GPU-0": [one, two]}}, moment)
    [(notice, _)] = decided.told
    assert "uses 1300MiB of GPU 0's memory, and was granted 655MiB" in notice


def test_a_lease_that_has_a_whole_device_is_never_over() -> None:
    decided = Decided()
    watchdog = Watchdog(TOLERANCE, decided, lambda _lease, _pids: None)
    process = Process.current()
    instance = replace(V100, milli=143, memory_mib=4864, mig_profile="1g.5gb")
    lease, _ = over(process, slices=(Slice(instance, 143, 4864),))
    used = [OwnedUse(process, ProcessUse(process.pid, 4864))]
    for moment in range(0, 1_000, 10):
        watchdog.watch([lease], {lease.id: {"GPU-0": used}}, moment)
    assert decided.told == []


def first_told(allowed: Sequence[int], used_mib: int) -> tuple[int, str]:
    """Say when a lease on 655 MiB, up to 3276, is told first: it may use so much from second to second."""
    decided, process = Decided(), Process.current()
    watchdog = Watchdog(replace(TOLERANCE, ends=False), decided, lambda _lease, _pids: None)
    for moment, mib in enumerate([*allowed, *allowed[-1:] * 100]):
        part = Slice(V100, 20, 655, limit_mib=3_276, burst_mib=mib - 655)
        lease, _ = over(process, slices=(part,))
        watchdog.watch([lease], {lease.id: {"GPU-0": [OwnedUse(process, ProcessUse(1, used_mib))]}}, moment)
        if decided.told:
            return moment, decided.told[0][0]
    raise AssertionError("It was told nothing.")


def test_a_burst_is_asked_back_sooner_than_what_was_taken() -> None:
    moment, told = first_told([2_000, 2_000, 655], used_mib=2_000)
    assert (moment, "others need what it had on top" in told) == (2 + 5, True)
    moment, taken = first_told([655], used_mib=2_000)
    assert (moment, "others need" in taken) == (10, False)
    moment, beyond = first_told([2_000, 655], used_mib=3_000)
    assert (moment, "others need" in beyond) == (10, False)


def test_who_gave_up_a_burst_and_takes_the_memory_later_has_no_burst() -> None:
    decided, process = Decided(), Process.current()
    watchdog = Watchdog(replace(TOLERANCE, ends=False), decided, lambda _lease, _pids: None)
    for moment, (allowed, used) in enumerate([(2_000, 2_000), (655, 600), *[(655, 1_500)] * 20]):
        lease, _ = over(process, slices=(Slice(V100, 20, 655, limit_mib=3_276, burst_mib=allowed - 655),))
        watchdog.watch([lease], {lease.id: {"GPU-0": [OwnedUse(process, ProcessUse(1, used))]}}, moment)
    [(notice, _)] = decided.told
    assert "and was granted 655MiB" in notice


class FailsOnce(Decided):
    """The store is locked at one of the times when it is to write something."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left, self.ended = at, list[str]()

    def tell(self, lease_id: str, notice: str, ending: EndReason | None = None) -> None:
        self._write()
        super().tell(lease_id, notice, ending)

    def end(self, lease_id: str, reason: EndReason) -> None:
        self._write()
        self.ended.append(lease_id)

    def _write(self) -> None:
        self.left -= 1
        if not self.left:
            raise PoolUnreachable("The store is locked.")


INTERRUPTED = """
import signal, sys
signal.signal(signal.SIGINT, lambda *_: print("interrupted", flush=True))
signal.signal(signal.SIGTERM, lambda *_: sys.exit())
print("there", flush=True)
while True:
    signal.pause()
"""


@pytest.mark.parametrize("at", [1, 2, 3, 4], ids=["notice", "interrupt", "end", "ended"])
@pytest.mark.parametrize("evicts", [True, False], ids=["evicted", "not evicted"])
def test_a_step_that_fails_once_is_taken_at_the_next_look_and_keeps_no_other_lease_from_its_own(
    at: int, evicts: bool
) -> None:
    decided, looked = FailsOnce(at), 0

    def evict(_lease: Lease, _pids: Sequence[int]) -> None:
        if not evicts:
            raise TimeoutError

    watchdog = Watchdog(TOLERANCE, decided, evict)
    with running(INTERRUPTED) as kernel:
        assert kernel.stdout is not None
        assert kernel.stdout.readline() == "there\n"
        lease, used = over(identity(kernel))
        for moment in range(0, 1_000, 10):
            try:
                watchdog.watch([lease], used, moment)
            except PoolUnreachable:
                looked += 1
            if decided.told and decided.told[-1][1] is not None:
                kernel.wait(60)  # it is asked to end
            if decided.ended:
                break
        assert kernel.stdout.read() == "interrupted\n"
    assert (looked, decided.ended) == (1, ["1-a"])
    assert [ending for _, ending in decided.told] == [None, None, EndReason.OVER_MEMORY]


def test_a_lease_of_which_nothing_can_be_told_keeps_no_other_one_from_being_told() -> None:
    decided = FailsOnce(1)
    watchdog = Watchdog(replace(TOLERANCE, ends=False), decided, lambda _lease, _pids: None)
    process = Process.current()
    lease, used = over(process)
    other = replace(lease, id="2-b")
    used |= {other.id: used[lease.id]}
    with suppress(PoolUnreachable):
        watchdog.watch([lease, other], used, 0)
        watchdog.watch([lease, other], used, 10)
    assert len(decided.told) == 1
    watchdog.watch([lease, other], used, 20)
    assert len(decided.told) == 2
