"""Kernels that the pool starts in pods: the proxy stands in for them, and relays to where they are."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from typing import Any

import pytest

from gpu_pool.pool.backend import Adapted
from gpu_pool_client import PodPhase, parse_request
from support.frontend import frontend, page_of
from support.jupyter_env import JupyterEnv, Managers, answer, eventually, started_kernel
from support.pods import PodPool, pods

__all__ = ["pods"]


async def test_a_kernel_runs_in_a_pod(jupyter_env: JupyterEnv, manager: Managers, pods: PodPool) -> None:
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        cell = await page.run("import os; print(os.getpid(), os.environ['GPU_POOL_SLICE'])").done()
        (pod,) = pods.running
        assert pod.process is not None
        assert cell.outputs == [f"{pod.kernel} 2%\n"]
        assert (await page.run("print(input('Who? '))", allow_stdin=True).done()).outputs == ["an answer\n"]
        assert page.questions == ["Who? "]
        catch = "import signal; signal.signal(signal.SIGUSR1, lambda *_: print('caught', flush=True))"
        cell = page.run(f"{catch}; print('begun', flush=True); signal.pause(); print('on')")
        await cell.shows("begun")
        await km.signal_kernel(signal.SIGUSR1)
        assert "caught" in "".join((await cell.done()).outputs)
        assert (await page.run("%gpu").done()).status == "ok"
    assert await km.is_alive()
    assert (await jupyter_env.only_lease()).process is not None
    await km.shutdown_kernel()
    assert not await km.is_alive()
    assert not pods.running
    assert await jupyter_env.is_empty()


@pytest.mark.parametrize("supervised", [True, False])
async def test_a_cell_is_interrupted(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool, supervised: bool
) -> None:
    pods.supervised = supervised
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        code = "print('begun', flush=True); import subprocess, time; subprocess.run(['sleep', '3'])"
        cell = page.run(f"{code}; time.sleep(600)")
        await cell.shows("begun")
        await km.interrupt_kernel()
        assert "KeyboardInterrupt" in (await cell.done()).outputs[-1]
        assert (await page.run("print('on')").done()).outputs == ["on\n"]
        if not supervised:
            await km.signal_kernel(signal.SIGUSR1)  # for which there is nobody
            assert (await page.run("print('on')").done()).outputs == ["on\n"]
    assert len(pods.launched) == 1


async def test_nothing_of_the_server_reaches_a_pod_but_what_is_named(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "secret-of-the-server")
    monkeypatch.setenv("PASSED", "on")
    env = {"OWN": "own ${PASSED} ${JUPYTERHUB_API_TOKEN}"}
    km = manager(jupyter_env.install("two", env=env, pod_environment=["PASSED", "JUPYTERHUB_API_TOKEN"]))
    await km.start_kernel(cwd=str(jupyter_env.folder))
    printed = await answer(
        km, "import os, sys; print(os.environ, sys.argv, open('/proc/self/cmdline').read())"
    )
    assert "'OWN': 'own on ${JUPYTERHUB_API_TOKEN}'" in printed
    assert "'PASSED': 'on'" in printed
    (pod,) = pods.launched
    secrets = ["secret-of-the-server", km.session.key.decode(), pod.command.connection["curve_secretkey"]]
    assert not [secret for secret in secrets if secret in printed]
    assert pod.command.argv == (
        *(
            "python3",
            "-Xfrozen_modules=off",
            "-m",
            "ipykernel_launcher",
            "--ext",
            "gpu_pool_kernels.inkernel",
        ),
        *("-f", "{connection_file}"),
    )


async def test_the_first_cell_reads_what_a_starting_pod_does(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    pods.images.clear()
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        interrupted = page.run("print('never')")
        await interrupted.shows("The kernel is starting on a GPU slice of 2%. Its software is being fetched.")
        await km.interrupt_kernel()
        assert "KeyboardInterrupt" in (await interrupted.done()).outputs[0]
        cell = page.run("print('well')")
        await cell.shows("being fetched")
        pods.message = "It is being started."
        await cell.shows("It is being started.")
        pods.images.set()
        assert (await cell.done()).outputs == ["well\n"]
    assert len(pods.launched) == 1


@pytest.mark.long
async def test_a_start_that_waits_for_its_pod_has_the_time_that_the_pod_has(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    pods.images.clear()
    km = manager(jupyter_env.install("two", unattended=True, ready_timeout=10))
    starting = asyncio.create_task(km.start_kernel())
    assert not (await asyncio.wait({starting}, timeout=12))[0], "longer than a kernel has that runs"
    pods.images.set()
    await starting
    assert await answer(km, "print('well')") == "well\n"


@pytest.mark.parametrize("now", [False, True])
async def test_a_restart_keeps_slice_ports_and_pod(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool, now: bool
) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")))
    ports = km.ports
    async with frontend(km) as page:
        await page.run("x = 1").done()
        lease = await jupyter_env.only_lease()
        (pod,) = pods.running
        kernels = {pod.kernel}
        for _ in range(2):
            await km.restart_kernel(now=now)
            assert (await page.run("print('x' in dir())").done()).outputs == ["False\n"]
            # Nobody asked what had become of the kernel before: it was told to end.
            assert (await page.run("print('quiet')").done()).outputs == ["quiet\n"]
            kernels.add(pod.kernel)
    assert km.ports == ports
    assert (await jupyter_env.only_lease()).id == lease.id
    assert pods.launched == pods.running == [pod]
    assert len(kernels) == 3
    await km.shutdown_kernel()
    assert not pods.running
    assert await jupyter_env.is_empty()


@pytest.mark.parametrize("now", [False, True])
async def test_a_restart_where_the_image_has_no_supervisor_replaces_the_pod(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool, now: bool
) -> None:
    pods.supervised = False
    km = await started_kernel(manager(jupyter_env.install("two")))
    ports = km.ports
    async with frontend(km) as page:
        await page.run("x = 1").done()
        lease = await jupyter_env.only_lease()
        await km.restart_kernel(now=now)
        assert (await page.run("print('x' in dir())").done()).outputs == ["False\n"]
        assert (await page.run("print('quiet')").done()).outputs == ["quiet\n"]
    assert km.ports == ports
    assert (await jupyter_env.only_lease()).id == lease.id
    first, second = pods.launched
    assert pods.running == [second]
    assert first.command.connection["curve_secretkey"] != second.command.connection["curve_secretkey"]


@pytest.mark.long
async def test_a_restart_where_the_supervisor_does_not_answer_makes_a_new_pod(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        await page.run("x = 1").done()
        (first,) = pods.running
        assert first.process is not None
        os.kill(first.process.pid, signal.SIGSTOP)
        await km.restart_kernel(now=True)
        assert (await page.run("print('x' in dir())").done()).outputs == ["False\n"]
    _, second = pods.launched
    assert pods.running == [second]


@pytest.mark.parametrize("now", [False, True])
async def test_a_restart_and_a_shutdown_while_the_pod_starts(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool, now: bool
) -> None:
    pods.images.clear()
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        cell = page.run("print('never')")
        await cell.shows("being fetched")
        await km.restart_kernel(now=now)
        assert (await cell.done()).status == "aborted"
        cell = page.run("print('never')")
        await cell.shows("being fetched")
        await km.shutdown_kernel(now=now)
    pods.images.set()
    assert len(pods.launched) == 2
    assert not pods.running
    assert await jupyter_env.is_empty()


@pytest.mark.long
async def test_an_idle_kernel_is_warned_and_ended_where_its_course_says_so(
    jupyter_env: JupyterEnv, manager: Managers, course: Any, request: pytest.FixtureRequest
) -> None:
    course(idle_limit="8s", when_idle="end", warn_before="8s")
    pods: PodPool = request.getfixturevalue("pods")
    async with page_of(manager(jupyter_env.install("two"))) as (_, page):
        told = await page.run("import os; print([n for n in os.environ if '_IDLE_' in n])").done()
        shown = told.outputs
        assert "GPU_POOL_IDLE_ENDS" in shown[-1]

        async def is_warned() -> bool:
            shown.extend((await page.run("1").done()).outputs)
            return "This kernel has been idle for a long time and ends in" in "".join(shown)

        async def is_over() -> bool:
            return not pods.running and await jupyter_env.is_empty()

        await eventually(is_warned)
        await eventually(is_over)
        assert [each.reason for each in await pods.history()] == ["idle"]
        (error,) = (await page.run("1").done()).outputs
        assert "it had been idle for longer than its course allows" in error
        assert "anew\n" in (await page.run("print('anew')").done()).outputs


@pytest.mark.long
async def test_the_time_in_the_clusters_own_queue_does_not_count(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    pods.images.clear()
    pods.message, pods.phase = "You are number 3 there.", PodPhase.QUEUED
    km = await started_kernel(manager(jupyter_env.install("two", start_timeout=5.0)))
    began = time.monotonic()
    async with frontend(km) as page:
        cell = page.run("print('well')")
        await cell.shows("Waiting for a GPU slice of 2%. You are number 3 there.")
        await eventually(lambda: time.monotonic() > began + 5.5)  # longer than a start may take
        pods.message, pods.phase = "Its software is being fetched.", PodPhase.STARTING
        await cell.shows("The wait for a GPU slice of 2% is over. Its software is being fetched.")
        pods.images.set()
        assert (await cell.done()).outputs == ["well\n"]
    assert len(pods.launched) == 1


@pytest.mark.long
async def test_another_size_comes_with_a_restart(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        cell = page.run("%gpu use 10%")
        await cell.shows("Restart the kernel: it then changes to 10%, if that is free.")
        await page.run("%gpu use lots").done()
        # What can never be is not kept for the restart.
        for never, words in (
            ("8", "this pool has one"),
            ("40GiB", "has 32GiB"),
            ("0.1%", "Ask for at least"),
        ):
            cell = page.run(f"%gpu use {never}")
            await cell.shows(words)
        await km.restart_kernel()
        cell = await page.run("import os; print(os.environ['GPU_POOL_SLICE'])").done()
        assert cell.outputs == ["10%\n"]
        held = await jupyter_env.fill("90%")
        await page.run("%gpu use 50%").done()
        await km.restart_kernel()
        cell = await page.run("1").done()
        printed = " ".join("".join(cell.outputs).split())
        assert "You asked for 50%. This kernel still has 10% of a GPU." in printed
        await jupyter_env.pool.release(held.id)


@pytest.mark.parametrize(
    ("mistake", "says"),
    [(ValueError("no such thing"), "The kernel proxy failed at that"), (asyncio.CancelledError(), "")],
    ids=["raised", "cancelled"],
)
async def test_what_fails_as_another_size_is_asked_for_keeps_no_output_back(
    jupyter_env: JupyterEnv,
    manager: Managers,
    pods: PodPool,
    monkeypatch: pytest.MonkeyPatch,
    mistake: BaseException,
    says: str,
) -> None:
    async def fails(*_: object, **__: object) -> None:
        raise mistake

    km = manager(jupyter_env.install("two"))
    await km.start_kernel()
    async with frontend(km) as page:
        await page.run("1").done()
        monkeypatch.setattr(jupyter_env.pool, "resize", fails)
        assert says in "".join((await page.run("%gpu use 10%").done()).outputs)
        assert (await page.run("print('on')").done()).outputs == ["on\n"]


async def test_a_slice_of_another_size_than_was_asked_for_is_told(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def adapt(*_: object) -> Adapted:
        return Adapted(parse_request("3%"))

    monkeypatch.setattr(pods.inner.backend, "adapt", adapt)
    async with page_of(manager(jupyter_env.install("two"))) as (_, page):
        await page.run("print('on')").shows("You asked for 2% of a GPU. This cluster has no slice of exactly")
        assert (await page.run("import os; print(os.environ['GPU_POOL_SLICE'])").done()).outputs == ["3%\n"]


async def test_kernels_in_pods_queue(jupyter_env: JupyterEnv, manager: Managers, pods: PodPool) -> None:
    managers = [manager(jupyter_env.install(name, "50%")) for name in ("one", "two", "three")]
    for km in managers[:2]:
        await km.start_kernel()
        await answer(km, "1")
    await managers[2].start_kernel()
    async with frontend(managers[2]) as page:
        cell = page.run("print('my turn')")
        await cell.shows("You are next in the queue")
        await managers[0].shutdown_kernel()
        assert (await cell.done()).outputs == ["my turn\n"]
    assert len(pods.running) == 2


@pytest.mark.long
async def test_a_restart_on_new_ports(jupyter_env: JupyterEnv, manager: Managers, pods: PodPool) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")))
    await answer(km, "1")
    await km.restart_kernel(newports=True)
    assert await answer(km, "print('well')") == "well\n"
    assert len(pods.running) == 1
    assert len(await jupyter_env.leases()) == 1
