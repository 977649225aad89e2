"""What one process decides in an embedded pool is seen at once by those of others who wait, or follow."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.pool.pool import GpuPool
from gpu_pool.store import files
from gpu_pool_client import EndReason, Holder, LeaseState, Process
from support.passes import NO_PASSES
from support.pools import embedded, eventually, take

#: Kernels, which give way.
ADA, BOB = (Holder(user, yields=True) for user in ("ada", "bob"))


@pytest.fixture
async def pools(tmp_path: Path) -> AsyncIterator[tuple[GpuPool, GpuPool]]:
    """Yield two pools on one store, as two processes have them, which look by themselves once an hour."""
    tuning = replace(NO_PASSES, waiting_read_every=3600.0, held_read_every=3600.0)
    async with (
        embedded(tmp_path / "store.db", tuning=tuning) as one,
        embedded(tmp_path / "store.db", tuning=tuning) as other,
    ):
        await other.status()
        yield one, other


async def test_who_waits_is_woken_by_the_decision_of_another_process(pools: tuple[GpuPool, GpuPool]) -> None:
    here, there = pools
    held = await take(here, "1", "held", ADA)
    waits = await take(there, "1", "waits", BOB)
    granted = asyncio.create_task(there.wait(waits))
    await here.status()  # the other one has looked by now, or looks
    await here.release(held)
    assert (await asyncio.wait_for(granted, 60)).state is LeaseState.HELD


async def test_who_follows_a_kernel_is_woken_where_another_process_needs_its_slice(
    pools: tuple[GpuPool, GpuPool],
) -> None:
    here, there = pools
    held = await take(here, "1", "held", ADA)
    await here.attach(held, Process.current())
    await here.report_busy(held, (), gives_way_since=time.time() - 3600.0)
    news = here.watch(held)
    assert (await anext(news)).asked_back is None
    asked = asyncio.ensure_future(anext(news))
    await take(there, "1", "waits", BOB)
    assert (await asyncio.wait_for(asked, 60)).asked_back is EndReason.YIELDED


async def test_nobody_looks_while_nothing_is_decided(
    pools: tuple[GpuPool, GpuPool], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = pools
    held = await take(here, "1", "held", ADA)
    waits = await take(there, "1", "waits", BOB)
    glances, read = 0, files.last_write

    def counted(path: Path) -> tuple[int, int]:
        nonlocal glances
        glances += 1
        return read(path)

    monkeypatch.setattr(files, "last_write", counted)
    looked = 0
    state = there.store.run

    def run(transaction: object, *args: object, **kwargs: object) -> object:
        nonlocal looked
        looked += 1
        return state(transaction, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(there.store, "run", run)
    granted = asyncio.create_task(there.wait(waits))
    await eventually(lambda: glances >= 10)
    assert looked <= 3, "it has looked although nothing was decided"
    await here.release(held)
    await asyncio.wait_for(granted, 60)


def test_a_store_that_is_not_there_was_never_written(tmp_path: Path) -> None:
    assert files.last_write(tmp_path / "store.db") == (0, 0)
