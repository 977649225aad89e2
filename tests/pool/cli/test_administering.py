"""``drain``, ``undrain``, ``why`` and ``history``, in real processes."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpu_pool.pool.pool import GpuPool
from gpu_pool.store import leases
from gpu_pool_client import Failure, Hibernation, connect
from gpu_pool_client._remote.exchange import ask
from support.service import ForkServer, Service, serving
from support.terminal import Terminal


@pytest.fixture
async def service(children: ForkServer, tmp_path: Path) -> AsyncIterator[Service]:
    async with serving(children, tmp_path / "service") as service:
        yield service


def test_a_gpu_is_drained_and_given_back(terminal: Terminal) -> None:
    terminal.hold("50%")
    assert "1 lease is still on it" in terminal.run("drain", "0").stdout
    assert "drained" in terminal.run("list").stdout
    refused = terminal.run("run", "2%", "--no-wait", "--", "true")
    assert refused.returncode == 6
    assert "No GPU slice of 2% is free now. An administrator has drained GPU 0 (since" in refused.stderr
    assert "Ask the administrator when it is in use again." in refused.stderr
    (device,) = json.loads(terminal.run("list", "--json").stdout)["devices"]
    assert (device["free_milli"], device["free_memory_mib"], device["held_milli"]) == (0, 0, 500)
    assert "GiB" not in terminal.run("list").stdout.replace("32GB", "")
    assert "is in use again" in terminal.run("undrain", "0").stdout
    assert terminal.run("run", "2%", "--no-wait", "--", "true").returncode == 0


def test_all_are_drained_for_the_disk_and_what_no_server_puts_there_is_told(terminal: Terminal) -> None:
    held = terminal.hold("50%")
    done = terminal.run("drain", "--hibernate")
    assert (done.returncode, done.stderr) == (1, "")
    assert f"{held}  " in done.stdout
    assert "awake   it is no IPython kernel, or its server does not put kernels to disk" in done.stdout
    assert "0 kernels are on disk, and 1 kernel is awake." in done.stdout
    assert "is in use again" in terminal.run("undrain").stdout
    assert terminal.run("undrain").stdout == "No GPU is drained.\n"
    terminal.free(held)
    done = terminal.run("drain", "--hibernate", "0")
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "No kernel is on them.")


def test_the_wait_for_kernels_that_work_has_an_end(terminal: Terminal) -> None:
    async def work() -> None:
        async with connect(terminal.environment["GPU_POOL_URL"]) as pool:
            await pool.report_hibernation(held, Hibernation(None, "it is at work.", is_for_now=True))

    held = terminal.hold("50%")
    asyncio.run(work())
    done = terminal.run("drain", "--hibernate", "--timeout", "0")
    assert done.returncode == 1
    assert "it goes to disk now, or as soon as it is idle." in done.stdout


def test_who_would_lose_what_is_on_disk_is_told_before_it_is_lost(terminal: Terminal) -> None:
    async def sleep() -> None:
        async with connect(terminal.environment["GPU_POOL_URL"]) as pool:
            for lease_id, outlives in ((kept, True), (lost, False)):
                await pool.drain("0", hibernate=True)
                await pool.park(lease_id)
                await pool.report_hibernation(lease_id, Hibernation(118, outlives_server=outlives))

    kept, lost = terminal.hold("20%"), terminal.hold("20%")
    asyncio.run(sleep())
    done = terminal.run("drain", "--hibernate")
    assert done.returncode == 1
    said = done.stdout.splitlines()[-1]
    assert said.startswith(
        "All are on disk. On disk, and gone all the same once their servers or this machine end: "
    )
    assert f"end: {lost}. Only kernels with hibernate_with_server stay." in said
    assert "their next cell wakes them" not in said
    terminal.free(lost)
    done = terminal.run("drain", "--hibernate")
    assert done.returncode == 0
    said = done.stdout.splitlines()[-1]
    assert said == "All are on disk. Once this is undone, their next cell wakes them: gpu-pool undrain"


#: Lets a service answer as one of a release whose drains put nothing to disk.
_OLDER = """
import gpu_pool.service.handler as _handler
_answer = _handler.Handler.answer
async def _as_before(self, body):
    for said in (b"true", b"false"):
        body = body.replace(b',"hibernates":' + said, b"")
    await _answer(self, body)
_handler.Handler.answer = _as_before
"""


async def test_a_service_that_would_put_nothing_to_disk_drains_nothing(
    terminal: Terminal, children: ForkServer, tmp_path: Path
) -> None:
    older = Service(children, tmp_path / "older", prelude=_OLDER)
    older.configure("")
    await older.start()
    try:
        where = {"GPU_POOL_URL": older.url}
        for words in (("drain", "--hibernate"), ("drain", "0", "--hibernate")):
            done = await asyncio.to_thread(terminal.run, *words, env=where)
            assert (done.returncode, done.stdout) == (7, "")
            assert "is of an older release, which puts no kernel to disk: nothing was drained." in done.stderr
        async with connect(older.url) as pool:
            assert not any(each.drained for each in (await pool.status()).devices)
        done = await asyncio.to_thread(terminal.run, "drain", "0", env=where)
        assert done.returncode == 0
        assert "gets no new leases, and none is on it." in done.stdout
    finally:
        await older.end(signal.SIGKILL)


async def test_a_client_that_knows_of_no_disk_drains_by_a_service_that_does(service: Service) -> None:
    body = json.dumps({"drained": True}).encode()
    answer = await ask(service.socket, "POST", "/api/v1/devices/0/drain", body, 60)
    told = json.loads(answer.body)
    assert (answer.status, told["drained"], told["hibernates"]) == (200, True, False)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("drain",), "It is not said which GPU is to be drained."),
        (("drain", "0", "--timeout", "5min"), "--timeout is for --hibernate alone."),
        (("drain", "7", "--hibernate"), "There is: 0 (SIM-V100"),
    ],
)
def test_what_a_drain_is_not_given(terminal: Terminal, words: tuple[str, ...], told: str) -> None:
    done = terminal.run(*words)
    assert done.returncode == 2
    assert told in done.stderr


def test_a_gpu_that_is_not_there(terminal: Terminal) -> None:
    done = terminal.run("drain", "9")
    assert done.returncode == 2
    assert "There is: 0 (SIM-V100" in done.stderr


def test_why_a_lease_waits(terminal: Terminal) -> None:
    assert terminal.run("why").stdout == "The queue is empty.\n"
    terminal.hold("1")
    waiting = terminal.hold("2%")
    assert terminal.run("why", waiting).stdout.startswith(f"{waiting}: You are next in the queue")
    (line,) = json.loads(terminal.run("why", "--json").stdout)["queue"]
    assert (line["lease"], line["position"]) == (waiting, 1)


@pytest.mark.long
def test_the_history_is_a_table_or_one_object_a_line(terminal: Terminal) -> None:
    config = terminal.folder / "config"
    config.mkdir()
    (config / "gpu_pool_config.py").write_text("c.PoolSettings.courses = {'ml101': {}}")
    terminal.run("run", "2%", "--", "true", env={"GPU_POOL_COURSE": "ml101"})
    assert "released" in terminal.run("history").stdout
    (row,) = map(json.loads, terminal.run("history", "--json").stdout.splitlines())
    assert (row["request"], row["milli"], row["course"], row["reason"]) == ("2%", 20, "ml101", "released")
    assert terminal.run("history", "--since", "0").stdout == "No lease has ended in this time.\n"
    assert "is not a duration" in terminal.run("history", "--since", "once").stderr


def test_how_a_kernel_failed_in_its_pod_is_told_by_why_and_history(terminal: Terminal) -> None:
    async def fail() -> None:
        async with connect(terminal.environment["GPU_POOL_URL"]) as pool:
            assert isinstance(pool, GpuPool)
            failure = Failure(
                1.0, "It ended with status 1. Its last output: no torch", "pod-1", "n1", "lab:1"
            )
            await pool.store.run(leases.record_failure, lease_id, failure)

    lease_id = terminal.hold("2%")
    asyncio.run(fail())
    expected = "It ended with status 1. Its last output: no torch (pod pod-1 on n1, image lab:1)\n"
    assert terminal.run("why", lease_id).stdout.endswith(expected)
    told = json.loads(terminal.run("why", lease_id, "--json").stdout)
    assert (told["queue"], told["failure"]["pod"]) == ([], "pod-1")
    (lease,) = json.loads(terminal.run("status", "--json").stdout)["leases"]
    assert lease["failure"] == told["failure"]
    terminal.free(lease_id)
    assert terminal.run("why", lease_id).stdout.startswith(f"{lease_id}: its kernel failed at ")
    assert terminal.run("history").stdout.endswith(expected)
    (row,) = map(json.loads, terminal.run("history", "--json").stdout.splitlines())
    assert row["failure"] == told["failure"]


def test_of_what_neither_waits_nor_failed_there_is_nothing_to_say(terminal: Terminal) -> None:
    done = terminal.run("why", terminal.hold("2%"))
    assert (done.returncode, done.stdout) == (2, "")
