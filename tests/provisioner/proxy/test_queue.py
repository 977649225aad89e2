"""The line in front of a pool, watched for all proxies at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from gpu_pool_provisioner.lease_client import queue_watch_of
from support.jupyter_env import JupyterEnv
from support.pools import until


async def test_a_kernel_that_joins_the_queue_during_a_look_has_not_left_it(
    jupyter_env: JupyterEnv, monkeypatch: pytest.MonkeyPatch
) -> None:
    lesson, first = await jupyter_env.fill("1"), await jupyter_env.fill("2%")
    watch, positions = queue_watch_of(jupyter_env.pool), jupyter_env.pool.positions
    answered, may_arrive = asyncio.Event(), asyncio.Event()

    async def late() -> Mapping[str, int]:
        found = await positions()
        answered.set()
        await may_arrive.wait()
        return found

    monkeypatch.setattr(jupyter_env.pool, "positions", late)
    with watch.entry(first.id) as one:
        await answered.wait()
        second = await jupyter_env.fill("2%")
        with watch.entry(second.id) as other:
            may_arrive.set()
            await until(lambda: other.left.is_set() or other.position)
            assert [(one.left.is_set(), one.position), (other.left.is_set(), other.position)] == [
                (False, 1),
                (False, 2),
            ]
            await jupyter_env.pool.release(lesson.id)
            await until(lambda: one.left.is_set() and other.left.is_set())
