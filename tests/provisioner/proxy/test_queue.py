"""The line in front of a pool, watched for all proxies at once."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

import pytest

from gpu_pool_provisioner.proxy.queue_watch import queue_watch_of
from support.classroom import Classroom
from support.pools import until


async def test_a_kernel_that_gets_in_line_during_a_look_has_not_left_it(
    classroom: Classroom, monkeypatch: pytest.MonkeyPatch
) -> None:
    lesson, first = await classroom.fill("1"), await classroom.fill("2%")
    line, places = queue_watch_of(classroom.pool), classroom.pool.positions
    answered, may_arrive = asyncio.Event(), asyncio.Event()

    async def late() -> Mapping[str, int]:
        found = await places()
        answered.set()
        await may_arrive.wait()
        return found

    monkeypatch.setattr(classroom.pool, "positions", late)
    with line.standing(first.id) as one:
        await answered.wait()
        second = await classroom.fill("2%")
        with line.standing(second.id) as other:
            may_arrive.set()
            await until(lambda: other.left or other.position)
            assert [(one.left, one.position), (other.left, other.position)] == [(False, 1), (False, 2)]
            await classroom.pool.release(lesson.id)
            await until(lambda: one.left and other.left)
