"""Slices that somebody takes back: the kernel lives on where it can, and its user reads by whom it was."""

from __future__ import annotations

import asyncio
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.devices import Inventory
from gpu_pool.embedded import pool
from gpu_pool.embedded.pool import local_pool
from gpu_pool.pool.pool import GpuPool
from gpu_pool.settings import load_settings
from gpu_pool.store import leases
from gpu_pool.tuning import Tuning
from gpu_pool_client import (
    Activity,
    BadRequest,
    EndReason,
    Lease,
    LeaseState,
    NotAllowed,
    PoolUnreachable,
    Process,
    TakingEffect,
)
from gpu_pool_provisioner.provisioner import GPUPoolProvisioner
from gpu_pool_provisioner.proxy.relay import Relay
from gpu_pool_provisioner.session import SessionTimes, State
from support.frontend import Frontend, frontend, page_of
from support.jupyter_env import TINY, JupyterEnv, Managers, eventually, started_kernel
from support.pools import device, take

#: Stands for CUDA's device: whoever has it open has initialised CUDA.
CUDA = "/dev/full"
USE_CUDA = f"used = open({CUDA!r}, 'w')"
EXAM = "The exam begins at ten."
#: These tests wait for several of each. Nobody can say whether this card works.
OFTEN = SessionTimes(revocable_every=0.2, pause=0.2, may_work=0.2)


@pytest.fixture
def served(jupyter_env: JupyterEnv, course: Any, monkeypatch: pytest.MonkeyPatch) -> JupyterEnv:
    """A Jupyter environment whose GPU is not simulated, and whose kernels are looked at often."""
    card = replace(device(0), simulated=False, uuid="GPU-0")

    def open_pool(url: str) -> GpuPool:
        settings = load_settings()
        settings.tuning = Tuning(cuda_device=CUDA)
        settings.watchdog = "warn"  # such a pool's kernels look at their lease often, as at gpu-pool serve
        return local_pool(pool.store_path(url), settings, lambda: Inventory((card,), "test"))

    course(idle_limit="1h")
    monkeypatch.setattr(pool, "open_embedded", open_pool)
    monkeypatch.setattr(GPUPoolProvisioner, "times", OFTEN)
    return jupyter_env


def pool_of(served: JupyterEnv) -> GpuPool:
    assert isinstance(served.pool, GpuPool)
    return served.pool


async def has_noticed(km: Any) -> None:
    """Return once what stands in front of the kernel holds back its cells: until then one may yet run."""
    await eventually(lambda: km.provisioner.session.parking and km.provisioner.session.parking.taken)


async def shown(page: Frontend, code: str) -> str:
    return " ".join("".join((await page.run(code).done()).outputs).split())


async def test_a_kernel_that_has_not_used_cuda_lives_on_and_its_next_cell_says_who_took_its_slice(
    served: JupyterEnv, manager: Managers
) -> None:
    km = await started_kernel(manager(served.install("all", "1")))
    pool = pool_of(served)
    async with frontend(km) as page:
        await page.run("kept = 42").done()
        lease = await served.only_lease()
        assert await pool.effect_of_taking(lease.id) is TakingEffect.KEEPS_KERNEL
        taken = await pool.withdraw(lease.id, EXAM, EndReason.REVOKED)
        assert (taken.state, taken.asked_back) == (LeaseState.PARKED, EndReason.REVOKED)
        await has_noticed(km)
        other = await served.fill("1")
        assert other.state is LeaseState.HELD, "it was free at once"
        cell = page.run("print(kept)")
        await cell.shows(
            "An administrator took this kernel's GPU slice back; its variables are kept. "
            f"\u201c{EXAM}\u201d Waiting for a whole GPU."
        )
        await pool.release(other.id)
        assert "42\n" in (await cell.done()).outputs
        assert any(EXAM in text for text in cell.outputs), "it stays to be read below the cell"
        held = await served.only_lease()
        assert (held.id, held.state, held.asked_back, held.notice) == (lease.id, LeaseState.HELD, None, "")


async def test_a_kernel_that_has_used_cuda_is_ended_and_the_page_can_know_before(
    served: JupyterEnv, manager: Managers
) -> None:
    km = await started_kernel(manager(served.install("two")))
    pool = pool_of(served)
    async with frontend(km) as page:
        await page.run(USE_CUDA).done()
        lease = await served.only_lease()
        assert await pool.effect_of_taking(lease.id) is TakingEffect.ENDS_KERNEL
        with pytest.raises(NotAllowed, match="has used the GPU"):
            await pool.withdraw(lease.id, EXAM, EndReason.REVOKED)
        assert (await served.only_lease()).state is LeaseState.HELD
        await pool.revoke(lease.id, EXAM)
        await eventually(
            lambda: shown(page, "1"),
            lambda seen: "its GPU slice is over: an administrator took it back" in seen,
        )
        assert await shown(page, "print('anew')") == "anew"


@pytest.mark.parametrize(("code", "status"), [("stay busy", "ok"), ("say nothing", "aborted")])
async def test_a_cell_of_which_half_the_end_was_lost_ends_with_its_kernel_and_the_next_one_is_told_why(
    served: JupyterEnv, manager: Managers, code: str, status: str
) -> None:
    async with page_of(manager(served.install("tiny", argv=TINY, language="tiny"))) as (_, page):
        cell = page.run(code)
        await cell.shows(f"{code.upper()} on 2%")
        await eventually(
            lambda: bool(cell.reply) or cell.heard[-1]["content"].get("execution_state") == "idle"
        )
        await pool_of(served).revoke((await served.only_lease()).id, EXAM)
        assert (await cell.done()).status == status
        assert EXAM in await shown(page, "well")
        assert cell.outputs == [f"{code.upper()} on 2%"]


async def test_a_cell_that_uses_cuda_after_its_slice_was_taken_is_ended(
    served: JupyterEnv, manager: Managers, tmp_path: Path
) -> None:
    km = await started_kernel(manager(served.install("two")))
    pool = pool_of(served)
    go_on = tmp_path / "go on"
    waits = f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.05)\n"
    async with frontend(km) as page:
        cell = page.run(f"print('begun', flush=True)\n{waits}{USE_CUDA}\ntime.sleep(600)")
        await cell.shows("begun")
        await pool.withdraw((await served.only_lease()).id, EXAM, EndReason.REVOKED)
        await cell.shows("An administrator took this kernel's GPU slice back")
        go_on.touch()
        text = " ".join("".join((await cell.done()).outputs).split())
        assert "it used the GPU after its slice had been taken back. An administrator took" in text
        assert EXAM in text


@pytest.mark.parametrize(("by", "told"), [(EndReason.REVOKED, EXAM), (EndReason.RELEASED, "")])
async def test_what_is_asked_back_goes_when_the_cell_that_runs_has_ended(
    served: JupyterEnv, manager: Managers, tmp_path: Path, by: EndReason, told: str
) -> None:
    km = await started_kernel(manager(served.install("two")))
    pool = pool_of(served)
    go_on = tmp_path / "go on"
    waits = f"import os, time\nwhile not os.path.exists({str(go_on)!r}): time.sleep(0.05)\n"
    async with frontend(km) as page:
        cell = page.run(f"{USE_CUDA}\nprint('begun', flush=True)\n{waits}print('done')")
        await cell.shows("begun")
        lease = await served.only_lease()
        await pool.ask_back(lease.id, told, by)
        await cell.shows("it goes back as soon as the kernel is idle.")
        go_on.touch()
        assert "done" in "".join((await cell.done()).outputs)
        await eventually(served.is_empty)
        assert (await pool.get_lease(lease.id)).end_reason is by
        said = await shown(page, "1")
        assert "its GPU slice had been asked back" in said
        assert ("An administrator asks" in said) == (by is EndReason.REVOKED)
        assert told in said


async def test_what_is_asked_back_of_a_kernel_that_has_not_used_cuda_is_parked(
    served: JupyterEnv, manager: Managers
) -> None:
    km = await started_kernel(manager(served.install("two")))
    pool = pool_of(served)
    async with frontend(km) as page:
        await page.run("kept = 42").done()
        await pool.ask_back((await served.only_lease()).id, "", EndReason.RELEASED)
        await has_noticed(km)
        said = await shown(page, "print(kept)")
        assert "42" in said
        assert "You gave this kernel's GPU slice back on the pool's page; its variables are kept." in said


async def test_whoever_takes_a_parked_kernel_s_lease_is_told_of_with_their_words(
    served: JupyterEnv, manager: Managers
) -> None:
    km = await started_kernel(manager(served.install("two")))
    pool = pool_of(served)
    async with frontend(km) as page:
        await page.run("1").done()
        lease = await served.only_lease()
        await pool.withdraw(lease.id, "", EndReason.RELEASED)
        await has_noticed(km)
        assert await pool.effect_of_taking(lease.id) is TakingEffect.ENDS_KERNEL
        await pool.revoke(lease.id, EXAM)
        await eventually(lambda: shown(page, "1"), lambda seen: EXAM in seen)


async def test_what_no_kernel_manager_looks_after_goes_at_once_or_not_at_all(served: JupyterEnv) -> None:
    pool = pool_of(served)
    held = await take(pool, "60%", "held")
    waiting = await take(pool, "60%", "waiting")
    await pool.attach(held, Process.current())
    assert await pool.effect_of_taking(held) is TakingEffect.FREES_SLICE
    assert await pool.effect_of_taking(waiting) is TakingEffect.LEAVES_QUEUE
    with pytest.raises(NotAllowed):
        await pool.withdraw(held, "", EndReason.RELEASED)
    with pytest.raises(BadRequest, match="Only a kernel's"):
        await pool.ask_back(held, "", EndReason.RELEASED)


def waits_for(go_on: Path) -> str:
    """Return a cell that says when it has begun, and ends once the file is there."""
    waits = f"while not os.path.exists({str(go_on)!r}): time.sleep(0.05)"
    return f"import os, time\nprint('begun', flush=True)\n{waits}\nprint('done')"


async def test_a_pool_that_cannot_park_what_is_asked_back_is_left_alone_for_a_while(
    served: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    km = await started_kernel(manager(served.install("two")))
    pool = pool_of(served)
    asked, looked = [], []
    look = pool.get_lease

    async def park(lease_id: str, **_: Any) -> Lease:
        asked.append(lease_id)
        looked.clear()
        raise PoolUnreachable("The disk is full.")

    async def count(lease_id: str) -> Lease:
        looked.append(lease_id)
        return await look(lease_id)

    monkeypatch.setattr(pool, "park", park)
    monkeypatch.setattr(pool, "get_lease", count)
    async with frontend(km) as page:
        await page.run("kept = 42").done()
        await pool.ask_back((await served.only_lease()).id, "", EndReason.RELEASED)
        await eventually(lambda: asked and len(looked) > 5)
        assert len(asked) == 1
        assert (await page.run("print(kept)").done()).outputs[-1] == "42\n"


async def test_a_cell_that_begins_while_its_device_is_looked_at_is_not_cut_off(
    served: JupyterEnv, manager: Managers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    km = await started_kernel(manager(served.install("two")))
    pool = pool_of(served)
    looks, goes_on = threading.Event(), threading.Event()

    async def activity(_: str) -> Activity:
        looks.set()
        await asyncio.to_thread(goes_on.wait)
        return Activity(initialised=True, working=False)

    # Whoever decides on what was known before the look ends the kernel, whatever is asked of it then.
    monkeypatch.setattr(Relay, "is_idle", _says_yes)
    async with frontend(km) as page:
        lease = await served.only_lease()
        await page.run("1").done()
        monkeypatch.setattr(pool, "activity", activity)
        await pool.ask_back(lease.id, EXAM, EndReason.REVOKED)
        await eventually(looks.is_set)
        cell = page.run(waits_for(tmp_path / "go on"))
        await cell.shows("begun")
        goes_on.set()
        await has_looked_again(pool, monkeypatch)
        (tmp_path / "go on").touch()
        assert "done" in "".join((await cell.done()).outputs)


async def _says_yes(_: object, __: float) -> bool:
    return True


async def has_looked_again(pool: GpuPool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Return once whoever looks after a kernel has begun its look at the lease twice more."""
    look, looked = pool.get_lease, []

    async def count(lease_id: str) -> Lease:
        looked.append(lease_id)
        return await look(lease_id)

    monkeypatch.setattr(pool, "get_lease", count)
    await eventually(lambda: len(looked) > 1)


@pytest.mark.long
async def test_a_cell_that_begins_when_its_kernel_is_about_to_be_ended_is_not_cut_off(
    served: JupyterEnv, manager: Managers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    km = manager(served.install("two"))
    is_idle, goes_on = Relay.is_idle, threading.Event()

    async def late(self: Relay, within: float) -> bool:
        await asyncio.to_thread(goes_on.wait)
        return await is_idle(self, within)

    monkeypatch.setattr(Relay, "is_idle", late)
    await km.start_kernel()
    pool = pool_of(served)
    async with frontend(km) as page:
        await page.run(USE_CUDA).done()
        lease = await served.only_lease()
        await pool.ask_back(lease.id, EXAM, EndReason.REVOKED)
        await eventually(lambda: km.provisioner.session.state is State.PARKING)
        cell = page.run(waits_for(tmp_path / "go on"))
        await eventually(lambda: km.provisioner.session.parking.is_wanted)
        goes_on.set()
        await cell.shows("begun")
        await has_looked_again(pool, monkeypatch)
        (tmp_path / "go on").touch()
        assert "done" in "".join((await cell.done()).outputs)
        await eventually(served.is_empty)
        assert (await pool.get_lease(lease.id)).end_reason is EndReason.REVOKED, "then it goes"


@pytest.mark.parametrize("at_work", [False, True], ids=["idle", "at work"])
async def test_a_kernel_whose_parking_was_not_answered_is_parked_all_the_same(
    served: JupyterEnv, manager: Managers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at_work: bool
) -> None:
    km = await started_kernel(manager(served.install("two")))
    pool = pool_of(served)
    park, asked = pool.park, threading.Event()
    # What is late is seen, and not asked again.
    monkeypatch.setattr(GPUPoolProvisioner, "times", replace(OFTEN, park_again=3_600))

    async def activity(_: str) -> Activity:
        return Activity(initialised=True, working=False, movable=True)

    async def late(lease_id: str, **how: Any) -> Lease:
        if asked.is_set():
            return await park(lease_id, **how)
        asked.set()
        raise PoolUnreachable("Nobody answers.")

    monkeypatch.setattr(pool, "activity", activity)
    monkeypatch.setattr(pool, "park", late)
    async with frontend(km) as page:
        await page.run("kept = 42").done()
        lease = await served.only_lease()
        await pool.ask_back(lease.id, EXAM, EndReason.REVOKED)
        await eventually(asked.is_set)
        cell = page.run(waits_for(tmp_path / "go on")) if at_work else None
        if cell is not None:
            await cell.shows("begun")
        await pool.store.run(leases.lend, lease.id)
        if cell is not None:
            (tmp_path / "go on").touch()
            assert "done" in "".join((await cell.done()).outputs)
        else:
            await has_noticed(km)
        assert "42\n" in (await page.run("print(kept)").done()).outputs
    held = await served.only_lease()
    assert held.id == lease.id


async def test_a_user_does_not_replace_what_an_administrator_has_said(
    served: JupyterEnv, manager: Managers
) -> None:
    await started_kernel(manager(served.install("two")))
    pool = pool_of(served)
    lease = await served.only_lease()
    for by, words in [(EndReason.RELEASED, ""), (EndReason.REVOKED, EXAM), (EndReason.RELEASED, "")]:
        asked = await pool.ask_back(lease.id, words, by)
    assert (asked.asked_back, asked.notice) == (EndReason.REVOKED, EXAM)


async def test_what_is_parked_at_its_user_s_wish_keeps_an_administrator_s_reason(
    served: JupyterEnv,
) -> None:
    pool = pool_of(served)
    held = await take(pool, "60%", "held")
    await pool.attach(held, Process.current(), grace=5.0)
    await pool.ask_back(held, EXAM, EndReason.REVOKED)
    parked = await pool.store.run(leases.ask_back, held, "", EndReason.RELEASED, now=True)
    assert (parked.state, parked.asked_back, parked.notice) == (LeaseState.PARKED, EndReason.REVOKED, EXAM)
