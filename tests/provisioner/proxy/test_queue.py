"""The line in front of a pool, watched for all proxies at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from gpu_pool_client import GpuPoolError
from gpu_pool_provisioner.pools import queue_watch_of
from support.jupyter_env import JupyterEnv
from support.pools import eventually


async def test_a_kernel_that_joins_the_queue_during_a_look_has_not_left_it(
    jupyter_env: JupyterEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    lesson, first = await jupyter_env.fill("1"), await jupyter_env.fill("2%")
    watch, positions = queue_watch_of(jupyter_env.pool), jupyter_env.pool.positions
    answered, may_arrive = asyncio.Event(), asyncio.Event()
    told: dict[str, list[int | None]] = {}

    def follow(lease_id: str) -> asyncio.Task[None]:
        def tell(position: int | None, _: GpuPoolError | None) -> None:
            told.setdefault(lease_id, []).append(position)

        return asyncio.create_task(watch.follow(lease_id, tell))

    async def late() -> Mapping[str, int]:
        found = await positions()
        answered.set()
        await may_arrive.wait()
        return found

    monkeypatch.setattr(jupyter_env.pool, "positions", late)
    one = follow(first.id)
    await answered.wait()
    second = await jupyter_env.fill("2%")
    other = follow(second.id)
    await asyncio.sleep(0)  # it begins
    may_arrive.set()
    await eventually(lambda: other.done() or told.get(second.id))
    assert not one.done()
    assert not other.done()
    assert (told[first.id][-1], told[second.id][-1]) == (1, 2)
    await jupyter_env.pool.release(lesson.id)
    await asyncio.gather(one, other)
