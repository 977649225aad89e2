"""Whether it is said that decisions cannot be kept, why, and to whom."""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import sqlite3
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.service.background import BackgroundTasks
from gpu_pool.service.health import Health
from gpu_pool.service.heartbeats import Heartbeats
from gpu_pool.service.lease_changes import LeaseChanges
from gpu_pool_client._remote.exchange import ask
from support.hub import Hub, HubService
from support.pools import embedded, eventually
from support.service import Service

LOG = logging.getLogger("health-test")


async def healthy(service: Service) -> tuple[int, dict[str, Any]]:
    answer = await ask(service.socket, "GET", "/api/v1/health", None, 60)
    return answer.status, json.loads(answer.body)


async def until_status(service: Service, status: int) -> dict[str, Any]:
    """Ask until that is answered: an answer holds for some seconds."""
    return (await _until(service, lambda found, _: found == status))[1]


async def until_told(service: Service, words: str) -> None:
    """Ask until the problem is told in these words: a slow machine's may have been another before."""
    await _until(service, lambda status, answer: status == 503 and words in answer["message"])


async def _until(
    service: Service, is_it: Callable[[int, dict[str, Any]], bool]
) -> tuple[int, dict[str, Any]]:
    end = asyncio.get_running_loop().time() + 120
    while not is_it(*(found := await healthy(service))):
        assert asyncio.get_running_loop().time() < end, found
        await asyncio.sleep(0.2)
    return found


def let_write(service: Service, most: int) -> None:
    """Let no file of the service's grow beyond that: as if its disk were full."""
    assert service.process
    _, hard = resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE)
    resource.prlimit(service.process.pid, resource.RLIMIT_FSIZE, (most, hard))


@pytest.mark.long
async def test_a_full_disk_is_told_and_its_end_too(service: Service) -> None:
    assert await healthy(service) == (200, {"status": "ok"})
    let_write(service, (service.folder / "store.db-wal").stat().st_size)
    await until_told(service, "cannot be read or written: the disk reports an error")
    assert service.log.count("The pool cannot be written") == 1
    let_write(service, resource.RLIM_INFINITY)
    assert await until_status(service, 200) == {"status": "ok"}
    assert "The pool can be written again" in service.log


@pytest.mark.long
async def test_a_store_that_another_program_has_locked_is_told_soon(service: Service) -> None:
    await healthy(service)
    with closing(sqlite3.connect(service.folder / "store.db", isolation_level=None)) as other:
        other.execute("BEGIN IMMEDIATE")
        await until_told(service, "has been locked for 2 seconds")
        other.execute("ROLLBACK")
    await until_status(service, 200)


async def test_a_store_that_is_gone_is_told(service: Service) -> None:
    (service.folder / "store.db").rename(service.folder / "away.db")
    await until_told(service, "was removed or replaced")


async def test_what_fails_beside_answering_is_begun_again_and_told_for_a_while(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    goes_on, begun = asyncio.Event(), list[str]()

    async def fails_once() -> None:
        begun.append("begun")
        if len(begun) == 1:
            raise ZeroDivisionError("once")
        await goes_on.wait()

    async with embedded(tmp_path / "store.db") as pool:
        for told_for, needed, told in [(1_000.0, True, True), (0.0, True, False), (1_000.0, False, False)]:
            begun.clear()
            tasks = BackgroundTasks(LOG, again_after=0.01, told_for=told_for)
            health = Health(pool, LeaseChanges(pool, LOG, Heartbeats(60, LOG)), LOG, tasks)
            await health.try_once()
            health.tasks.begin("Looking", fails_once, needed=needed)
            await eventually(lambda: len(begun) == 2)
            problem = await health.problem()
            said = None if problem is None else str(problem)
            assert said == ("Looking has failed. The service's log says why." if told else None)
            health.tasks.end()
    assert caplog.text.count("Looking has failed, and is begun again") == 3
    assert "ZeroDivisionError: once" in caplog.text


async def test_who_is_not_known_learns_no_more_than_that(behind_hub: HubService, hub: Hub) -> None:
    (behind_hub.service.folder / "store.db").rename(behind_hub.service.folder / "away.db")
    await until_told(behind_hub.service, "was removed or replaced")
    for token in (None, "of-nobody"):
        status, problem = await behind_hub.ask(token, "GET", "/health")
        assert (status, problem["message"]) == (503, "The pool is not working.")
        assert "store" not in json.dumps(problem)
    status, problem = await behind_hub.ask(await hub.token("ada"), "GET", "/health")
    assert status == 503
    assert "was removed or replaced" in problem["message"], problem


async def test_whoever_asks_is_told_of_the_last_try_and_writes_nothing(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    async with embedded(path) as pool:
        await pool.status()
        health = Health(pool, LeaseChanges(pool, LOG, Heartbeats(60, LOG)), LOG)
        with closing(sqlite3.connect(path)) as store:
            written = []
            for _ in range(2):
                await health.try_once()
                assert await asyncio.gather(*(health.problem() for _ in range(20))) == [None] * 20
                written.append(store.execute("SELECT tried_at FROM pool").fetchone()[0])
                path.rename(tmp_path / "away.db")
                assert await health.problem() is None, "it is as of the last try"
                (tmp_path / "away.db").rename(path)
    assert 0 < written[0] < written[1]
