"""Tiers composed: when slices are opened and closed, and what is said of them."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.devices import Inventory
from gpu_pool.embedded.pool import local_pool
from gpu_pool.enforcement import Isolation, Tier, TierFailed, TierStatement
from gpu_pool.enforcement.machine import unowned
from gpu_pool.enforcement.tiers import Accounting
from gpu_pool.pool.pool import GpuPool
from gpu_pool.settings import PoolSettings, load_settings
from gpu_pool_client import (
    BadRequest,
    Device,
    EndReason,
    Enforcement,
    Lease,
    LeaseState,
    Limit,
    PoolUnreachable,
    Process,
    Strength,
    parse_request,
)
from support.passes import NO_PASSES
from support.pools import ME, V100, device, embedded, eventually, key

HALF = parse_request("50%")


class Recorder(Tier):
    """A tier that writes down what it was told, and fails where it should."""

    name = "recorder"

    def __init__(self, fails: str = "") -> None:
        self.told: list[str] = []
        self.fails = fails

    def adapt(self, device: Device) -> Device:
        return replace(device, one_size=True)

    def describe(self, lease: Lease) -> TierStatement:
        held = Limit(Strength.HARD, "recorder")
        return TierStatement({"LIMIT": str(lease.memory_mib)}, Enforcement(held, held))

    def prepare(self, device: Device) -> None:
        self._note("prepare")

    def open(self, lease: Lease) -> None:
        self._note(f"open {lease.request}")

    def attach(self, lease: Lease, process: Process) -> None:
        self._note(f"attach {process.pid}")

    def close(self, lease: Lease) -> None:
        self._note(f"close {lease.request}")

    def recover(self, leases: Sequence[Lease]) -> None:
        self._note(f"recover {len(leases)}")

    def tend(self) -> dict[str, str]:
        if self.fails == "tend":  # all others are tended whenever there is time
            self._note("tend")
        return {}

    def _note(self, what: str) -> None:
        self.told.append(what)
        if self.fails and what.startswith(self.fails):
            raise TierFailed("The recorder is broken.", "Mend it.")


def pool(
    path: Path, *tiers: Tier, devices: Sequence[Device] = (V100,), settings: PoolSettings | None = None
) -> GpuPool:
    inventory = Inventory(tuple(devices), "test")
    return local_pool(
        path, settings or PoolSettings(tuning=NO_PASSES), lambda: inventory, Isolation(lambda _: tiers)
    )


async def test_a_slice_is_enforced_before_it_is_handed_out_and_no_more_once_it_has_ended(
    tmp_path: Path,
) -> None:
    tier = Recorder()
    async with pool(tmp_path / "store.db", tier) as opened:
        first = await opened.request(HALF, ME, key())
        assert tier.told == ["prepare", "recover 0", "open 50%"]
        assert first.environment["LIMIT"] == "16384"
        assert first.describe_limits() == "memory: 16384 MiB, hard (recorder); compute: 50%, hard (recorder)"
        await opened.get_lease(first.id)
        await opened.attach(first.id, Process.current())
        await opened.release(first.id)
        assert tier.told[3:] == [f"attach {Process.current().pid}"]
        await opened.core.reconciler.once()
        assert tier.told[4:] == ["close 50%"]


async def test_where_something_firm_holds_slices_nothing_is_on_top_and_that_is_said(tmp_path: Path) -> None:
    class Firm(Recorder):
        def adapt(self, device: Device) -> Device:
            return device

    async with pool(tmp_path / "store.db", Firm()) as opened:
        lease = await opened.request(parse_request("2%..10%"), ME, key())
        await opened.core.reconciler.once()
        found = await opened.get_lease(lease.id)
        assert [(part.limit_mib, part.burst_mib) for part in found.slices] == [(0, 0)]
        assert "hard (recorder; the limit above it changes nothing here)" in found.describe_limits()


class Slow(Recorder):
    """A tier that opens what it is told to once it may."""

    def __init__(self) -> None:
        super().__init__()
        self.opens, self.may_open = threading.Event(), threading.Event()

    def open(self, lease: Lease) -> None:
        super().open(lease)
        self.opens.set()
        self.may_open.wait(60)


async def cancelled_while_it_is_opened(opened: GpuPool, tier: Slow) -> None:
    """Ask for a half, and ask no more once the tier is about to open it."""
    asking = asyncio.create_task(opened.request(HALF, ME, key()))
    await asyncio.to_thread(tier.opens.wait, 60)
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert (await opened.status()).leases == ()


async def test_a_request_that_is_cancelled_while_its_slice_is_opened_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    tier = Slow()
    async with pool(tmp_path / "store.db", tier) as opened:
        await cancelled_while_it_is_opened(opened, tier)
        before_last = opened.core.reconciler.counts["set bursts"]
        done = before_last.times
        passing = asyncio.create_task(opened.core.reconciler.once())
        await eventually(lambda: before_last.times > done)
        tier.may_open.set()  # in the pass's last step, which has begun
        await passing
        assert tier.told[-2:] == ["open 50%", "close 50%"]
        assert [ended.reason for ended in await opened.history()] == [EndReason.WITHDRAWN]


async def test_what_is_opened_for_nobody_any_more_is_closed_before_the_next_is_opened(
    tmp_path: Path,
) -> None:
    tier = Slow()
    async with pool(tmp_path / "store.db", tier) as opened:
        await cancelled_while_it_is_opened(opened, tier)
        following = asyncio.create_task(opened.request(parse_request("1"), ME, key()))
        while not (await opened.status()).leases:  # held, and not opened yet
            continue
        tier.may_open.set()
        await following
        assert tier.told[2:] == ["open 50%", "close 50%", "open 1"]


async def test_what_is_opened_for_nobody_any_more_is_closed_with_the_pool(tmp_path: Path) -> None:
    tier = Slow()
    async with pool(tmp_path / "store.db", tier) as opened:
        await cancelled_while_it_is_opened(opened, tier)
        closing = asyncio.create_task(opened.close())
        await asyncio.sleep(0)  # it has begun before the tier is done
        tier.may_open.set()
        await closing
        assert tier.told[2:] == ["open 50%", "close 50%"]


async def test_what_has_ended_is_closed_before_the_next_is_opened(tmp_path: Path) -> None:
    tier = Recorder()
    async with pool(tmp_path / "store.db", tier) as opened:
        first = await opened.request(parse_request("1"), ME, key())
        second = await opened.request(HALF, ME, key())
        assert second.state is LeaseState.WAITING
        await opened.release(first.id)
        assert (await opened.wait(second.id)).enforcement.memory.strength is Strength.HARD
        assert tier.told[2:] == ["open 1", "close 1", "open 50%"]


async def test_what_could_not_be_closed_is_closed_later(tmp_path: Path) -> None:
    tier = Recorder(fails="close")
    async with pool(tmp_path / "store.db", tier) as opened:
        await opened.release((await opened.request(HALF, ME, key())).id)
        second = await opened.request(HALF, ME, key())
        assert tier.told[2:] == ["open 50%", "close 50%", "open 50%"]
        tier.fails = ""
        await opened.request(HALF, ME, key())
        assert tier.told[5:] == ["close 50%", "open 50%"]
        await opened.release(second.id)
        await opened.request(HALF, ME, key())
        assert tier.told[7:] == ["close 50%", "open 50%"]


async def test_what_is_opened_again_is_not_closed_for_what_it_was_before(tmp_path: Path) -> None:
    tier = Recorder(fails="close")
    async with pool(tmp_path / "store.db", tier) as opened:
        lease = await opened.request(HALF, ME, key())
        await opened.park(lease.id)
        await opened.resume(lease.id)
        tier.fails = ""
        await opened.request(HALF, ME, key())
        assert tier.told[2:] == ["open 50%", "close 50%", "open 50%", "open 50%"]


async def test_a_slice_that_was_lent_and_came_back_is_opened_again(tmp_path: Path) -> None:
    tier = Recorder()
    async with pool(tmp_path / "store.db", tier) as opened:
        lease = await opened.request(HALF, ME, key())
        await opened.park(lease.id)
        await opened.resume(lease.id)
        assert tier.told[2:] == ["open 50%", "close 50%", "open 50%"]


async def test_a_slice_that_cannot_be_enforced_is_not_handed_out(tmp_path: Path) -> None:
    async with pool(tmp_path / "store.db", Recorder(fails="open")) as opened:
        mine = key()
        with pytest.raises(PoolUnreachable, match=r"The recorder is broken\. Mend it\."):
            await opened.request(HALF, ME, mine)
        assert (await opened.status()).leases == ()
        assert (await opened.request(HALF, ME, mine)).end_reason is EndReason.NOT_ENFORCED


async def test_a_process_that_cannot_be_held_to_its_limits_keeps_no_slice(tmp_path: Path) -> None:
    async with pool(tmp_path / "store.db", Recorder(fails="attach")) as opened:
        lease = await opened.request(HALF, ME, key())
        with pytest.raises(PoolUnreachable, match="Mend it"):
            await opened.attach(lease.id, Process.current())
        assert (await opened.get_lease(lease.id)).end_reason is EndReason.NOT_ENFORCED


async def test_a_tier_that_does_not_answer_is_told_in_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    (tmp_path / "gpu_pool_config.py").write_text("c.PoolSettings.enforced_within = 0.2")
    goes_on = threading.Event()

    class Hanging(Recorder):
        def open(self, lease: Lease) -> None:
            goes_on.wait(120)

    async with pool(tmp_path / "store.db", Hanging(), settings=load_settings()) as opened:
        with pytest.raises(PoolUnreachable, match=r"did not answer within 0\.2 seconds"):
            await opened.request(HALF, ME, key())
        goes_on.set()
        assert [each.reason for each in await opened.history()] == ["not-enforced"]


async def test_what_could_not_be_enforced_as_the_tiers_were_busy_is_enforced_at_the_next_pass(
    tmp_path: Path,
) -> None:
    goes_on = threading.Event()

    class Busy(Recorder):
        def attach(self, lease: Lease, process: Process) -> None:
            goes_on.wait(120)

    tier, settings = Busy(), PoolSettings(tuning=NO_PASSES)
    mine = replace(ME, process=Process.current())
    async with pool(tmp_path / "store.db", tier, settings=settings) as opened:
        first = await opened.request(parse_request("1"), mine, key())
        second = await opened.request(HALF, mine, key())
        settings.enforced_within = 0.2
        with pytest.raises(PoolUnreachable, match="did not answer"):
            await opened.attach(first.id, Process.current())
        assert (await opened.get_lease(second.id)).state is LeaseState.HELD, "it is its turn"
        with pytest.raises(PoolUnreachable, match="did not answer"):
            await opened.core.reconciler.once()
        assert opened.core.reconciler.counts["bind"].failures == 1
        assert (await opened.get_lease(second.id)).state is LeaseState.HELD
        settings.enforced_within = 60.0
        goes_on.set()
        await opened.core.reconciler.once()
        assert tier.told[2:] == ["open 1", "close 1", "open 50%"]


async def test_a_tier_that_cannot_be_mended_keeps_nobody_from_looking(tmp_path: Path) -> None:
    tier = Recorder(fails="tend")
    async with pool(tmp_path / "store.db", tier) as opened:
        await opened.core.reconciler.once()
        assert (await opened.status()).leases == ()
        assert "tend" in tier.told


async def test_after_a_restart_exactly_what_is_held_is_enforced(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with pool(path, Recorder()) as opened:
        kept = await opened.request(HALF, ME, key())
        await opened.release((await opened.request(HALF, ME, key())).id)
    again = Recorder()
    async with pool(path, again) as opened:
        lease = await opened.get_lease(kept.id)
        assert again.told == ["prepare", "recover 1"]
        assert lease.environment["LIMIT"] == "16384"
        await opened.release(kept.id)
        await opened.core.reconciler.once()
        assert again.told[2:] == ["close 50%"]


async def test_the_next_tier_is_used_where_the_preferred_one_does_not_work(tmp_path: Path) -> None:
    broken = Recorder(fails="prepare")
    isolation = Isolation(lambda _: (broken, Accounting()))
    assert isolation.adapt([V100]) == (V100,)
    assert isolation.problems == [
        "V100-SXM2-32GB (simulated): recorder is not used. The recorder is broken. Mend it."
    ]
    assert not isolation.acts


def test_a_tier_without_an_alternative_that_does_not_work_is_an_error() -> None:
    with pytest.raises(TierFailed):
        Isolation(lambda _: (Recorder(fails="prepare"),)).adapt([V100])


async def test_the_weakest_statement_holds_for_a_lease_on_devices_of_several_tiers(tmp_path: Path) -> None:
    first, second = device(0), device(1)
    firm, counted = Recorder(), Accounting()
    isolation = Isolation(lambda each: (firm if each.uuid == first.uuid else counted,))
    inventory = Inventory((first, second), "test")
    async with local_pool(
        tmp_path / "l.db", PoolSettings(tuning=NO_PASSES), lambda: inventory, isolation
    ) as opened:
        lease = await opened.request(parse_request("2x50%"), ME, key())
        assert lease.enforcement.memory.strength is Strength.NONE
        assert firm.told[2:] == ["open 2x50%"]


async def test_a_mig_instance_is_divided_by_the_hardware_and_chosen_by_the_process(tmp_path: Path) -> None:
    instance = replace(device(0), mig_profile="1g.5gb", memory_mib=4864, milli=142)
    async with embedded(tmp_path / "store.db", instance, tuning=NO_PASSES) as opened:
        lease = await opened.request(parse_request("2%"), ME, key())
        limits = lease.describe_limits()
    assert (
        limits == "memory: 4864 MiB, cooperative (MIG instance); compute: 14.2%, cooperative (MIG instance)"
    )


@pytest.mark.parametrize("tier", ["mps", "cgroups"])
def test_tiers_that_need_an_owner_are_refused_where_there_is_none(tier: str) -> None:
    with pytest.raises(BadRequest, match='Run "gpu-pool serve"'):
        unowned(PoolSettings(tier=tier))
