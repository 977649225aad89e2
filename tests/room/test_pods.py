"""Kernels that the pool starts in pods: the room stands in for them, and relays to where they are."""

from __future__ import annotations

import signal

import pytest
from jupyter_client.ioloop import AsyncIOLoopKernelManager

from gpu_pool_client import NotAllowed
from support.classroom import Classroom, Managers, answer, eventually, kill, restarting_soon
from support.pods import AWAY, PodPool, pods
from support.room import frontend

__all__ = ["pods"]


async def test_a_kernel_runs_in_a_pod(classroom: Classroom, manager: Managers, pods: PodPool) -> None:
    km = manager(classroom.install("two"))
    await km.start_kernel()
    async with frontend(km) as page:
        cell = await page.run("import os; print(os.getpid(), os.environ['GPU_POOL_SLICE'])").done()
        (pod,) = pods.running
        assert pod.process is not None
        assert cell.outputs == [f"{pod.process.pid} 2%\n"]
        assert (await page.run("print(input('Who? '))", allow_stdin=True).done()).outputs == ["an answer\n"]
        assert page.questions == ["Who? "]
        await km.signal_kernel(signal.SIGUSR1)  # for which there is no process here
        assert (await page.run("%gpu").done()).status == "ok"
    assert await km.is_alive()
    assert (await classroom.only_lease()).process is not None
    await km.shutdown_kernel()
    assert not await km.is_alive()
    assert not pods.running
    assert await classroom.is_empty()


async def test_an_interrupt_is_a_message(classroom: Classroom, manager: Managers, pods: PodPool) -> None:
    km = manager(classroom.install("two"))
    await km.start_kernel()
    async with frontend(km) as page:
        cell = page.run("print('begun', flush=True); import time; time.sleep(600)")
        await cell.shows("begun")
        await km.interrupt_kernel()
        assert "KeyboardInterrupt" in (await cell.done()).outputs[-1]
        assert (await page.run("print('on')").done()).outputs == ["on\n"]
    assert len(pods.launched) == 1


async def test_nothing_of_the_server_reaches_a_pod_but_what_is_named(
    classroom: Classroom, manager: Managers, pods: PodPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "secret-of-the-server")
    monkeypatch.setenv("PASSED", "on")
    env = {"OWN": "own ${PASSED} ${JUPYTERHUB_API_TOKEN}"}
    km = manager(classroom.install("two", env=env, pod_environment=["PASSED", "JUPYTERHUB_API_TOKEN"]))
    await km.start_kernel(cwd=str(classroom.folder))
    printed = await answer(
        km, "import os, sys; print(os.environ, sys.argv, open('/proc/self/cmdline').read())"
    )
    assert "'OWN': 'own on ${JUPYTERHUB_API_TOKEN}'" in printed
    assert "'PASSED': 'on'" in printed
    (pod,) = pods.launched
    secrets = ["secret-of-the-server", km.session.key.decode(), pod.command.connection["curve_secretkey"]]
    assert not [secret for secret in secrets if secret in printed]
    assert pod.command.argv == (
        *("python3", "-m", "ipykernel_launcher", "--ext", "gpu_pool_kernels.inkernel"),
        *("-f", "{connection_file}"),
    )


async def test_the_first_cell_reads_what_a_starting_pod_does(
    classroom: Classroom, manager: Managers, pods: PodPool
) -> None:
    pods.images.clear()
    km = manager(classroom.install("two"))
    await km.start_kernel()
    async with frontend(km) as page:
        interrupted = page.run("print('never')")
        await interrupted.shows("The wait for a GPU slice of 2% is over. Its software is being fetched.")
        await km.interrupt_kernel()
        assert "KeyboardInterrupt" in (await interrupted.done()).outputs[0]
        cell = page.run("print('well')")
        await cell.shows("being fetched")
        pods.words = "It is being started."
        await cell.shows("It is being started.")
        pods.images.set()
        assert (await cell.done()).outputs == ["well\n"]
    assert len(pods.launched) == 1


@pytest.mark.parametrize("now", [False, True])
async def test_a_restart_keeps_slice_and_ports_and_replaces_the_pod(
    classroom: Classroom, manager: Managers, pods: PodPool, now: bool
) -> None:
    km = manager(classroom.install("two"))
    await km.start_kernel()
    ports = km.ports
    async with frontend(km) as page:
        await page.run("x = 1").done()
        lease = await classroom.only_lease()
        await km.restart_kernel(now=now)
        assert (await page.run("print('x' in dir())").done()).outputs == ["False\n"]
        # Nobody asked what had become of the pod before: it was told to end.
        assert (await page.run("print('quiet')").done()).outputs == ["quiet\n"]
    assert km.ports == ports
    assert (await classroom.only_lease()).id == lease.id
    first, second = pods.launched
    assert pods.running == [second]
    assert first.command.connection["curve_secretkey"] != second.command.connection["curve_secretkey"]


@pytest.mark.parametrize("now", [False, True])
async def test_a_restart_and_a_shutdown_while_the_pod_starts(
    classroom: Classroom, manager: Managers, pods: PodPool, now: bool
) -> None:
    pods.images.clear()
    km = manager(classroom.install("two"))
    await km.start_kernel()
    async with frontend(km) as page:
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
    assert await classroom.is_empty()


async def test_a_kernel_that_dies_is_restarted_on_its_slice_and_says_why(
    classroom: Classroom, manager: Managers, pods: PodPool
) -> None:
    km = manager(classroom.install("two"), AsyncIOLoopKernelManager, config=restarting_soon())
    await km.start_kernel()
    async with frontend(km) as page:
        await page.run("1").done()
        lease = await classroom.only_lease()
        (pod,) = pods.running
        assert pod.process is not None
        kill(pod.process.pid)

        async def runs_again() -> bool:
            return len(pods.running) == 1 and pods.running != [pod]

        await eventually(runs_again)
        cell = await page.run("print('on')").done()
        text = " ".join("".join(cell.outputs).split())
        assert "ended by itself, and its variables are gone. It needed more memory" in text
        assert "on" in text
    assert (await classroom.only_lease()).id == lease.id


async def test_a_kernel_that_nobody_restarts_gives_its_slice_back(
    classroom: Classroom, manager: Managers, pods: PodPool
) -> None:
    km = manager(classroom.install("two"))
    await km.start_kernel()
    await answer(km, "1")
    (pod,) = pods.running
    assert pod.process is not None
    kill(pod.process.pid)
    await eventually(classroom.is_empty)
    assert not await km.is_alive()


async def test_a_pod_that_the_cluster_takes_is_told_of_and_the_next_cell_asks_anew(
    classroom: Classroom, manager: Managers, pods: PodPool
) -> None:
    km = manager(classroom.install("two"))
    await km.start_kernel()
    async with frontend(km) as page:
        cell = page.run("print('begun', flush=True); import time; time.sleep(600)")
        await cell.shows("begun")
        lease = await classroom.only_lease()
        await pods.evict(lease.id, "The machine that it ran on was lost.")
        text = " ".join("".join((await cell.done()).outputs).split())
        assert "The machine that it ran on was lost. Its variables are gone." in text
        assert await km.is_alive()
        assert (await page.run("print('anew')").done()).outputs == ["anew\n"]
    assert (await classroom.only_lease()).id != lease.id


async def test_a_revoked_lease_is_told_of_with_its_words(
    classroom: Classroom, manager: Managers, pods: PodPool
) -> None:
    km = manager(classroom.install("two"))
    await km.start_kernel()
    async with frontend(km) as page:
        await page.run("1").done()
        await pods.revoke((await classroom.only_lease()).id, "The course is over.")

        async def is_over() -> bool:
            return not pods.running

        await eventually(is_over)
        (error,) = (await page.run("1").done()).outputs
        assert "The course is over." in error
    assert await km.is_alive()


async def test_what_a_pool_refuses_is_what_the_cell_reads_and_the_next_cell_asks_again(
    classroom: Classroom, manager: Managers, pods: PodPool
) -> None:
    pods.fault = NotAllowed("Your home is on a machine without a GPU.", "Tell your teacher.")
    km = manager(classroom.install("two"))
    await km.start_kernel()
    async with frontend(km) as page:
        (error,) = (await page.run("1").done()).outputs
        assert "This cell did not run. Your home is on a machine without a GPU. Tell your teacher." in error
        assert await classroom.is_empty()
        assert await km.is_alive()
        pods.fault = None
        assert (await page.run("print('well')").done()).outputs == ["well\n"]


async def test_a_service_that_is_away_for_a_moment_does_no_harm(
    classroom: Classroom, manager: Managers, pods: PodPool
) -> None:
    pods.fault = AWAY
    km = manager(classroom.install("two"))
    await km.start_kernel()
    async with frontend(km) as page:
        cell = page.run("x = 1; print('well')")
        await cell.shows("is not there. Still trying.")
        pods.fault = None
        assert (await cell.done()).outputs == ["well\n"]
        pods.fault = AWAY
        # Longer than a question about a pod takes: so it has been heard of.
        assert (await page.run("import time; time.sleep(1.5); print(x)").done()).outputs == ["1\n"]
        pods.fault = None
        assert (await page.run("print(x)").done()).outputs == ["1\n"]
    assert len(pods.launched) == 1


async def test_a_kernel_is_ended_while_the_service_is_away(
    classroom: Classroom, manager: Managers, pods: PodPool
) -> None:
    km = manager(classroom.install("two"))
    await km.start_kernel()
    await answer(km, "1")
    pods.fault = AWAY
    await km.shutdown_kernel(now=True)
    assert not await km.is_alive()
    # In the end it is the lease that counts.
    assert await classroom.is_empty()
    assert not pods.running


async def test_a_kernel_whose_pod_does_not_end_gives_its_slice_back_all_the_same(
    classroom: Classroom, manager: Managers, pods: PodPool
) -> None:
    km = manager(classroom.install("two"))
    await km.start_kernel()
    await answer(km, "1")
    pods.lingering = True
    await km.shutdown_kernel(now=True)
    assert await classroom.is_empty()


async def test_a_pod_that_does_not_start_in_time_says_what_it_waited_for(
    classroom: Classroom, manager: Managers, pods: PodPool
) -> None:
    pods.images.clear()
    km = manager(classroom.install("two", start_timeout=1.0))
    await km.start_kernel()
    await eventually(classroom.is_empty)
    async with frontend(km) as page:
        (error,) = (await page.run("1").done()).outputs
        assert "The last that was heard of it: Its software is being fetched." in " ".join(error.split())
        pods.images.set()
        assert (await page.run("print('well')").done()).outputs == ["well\n"]


async def test_a_kernel_that_does_not_encrypt_is_told_of_at_once(
    classroom: Classroom, manager: Managers, pods: PodPool
) -> None:
    pods.encrypted = False
    km = manager(classroom.install("two"))
    await km.start_kernel()
    async with frontend(km) as page:
        (error,) = (await page.run("1").done()).outputs
        assert "needs ipykernel 7.4 or newer" in " ".join(error.split())
    assert not pods.running


async def test_a_kernel_that_ends_at_once_says_how(
    classroom: Classroom, manager: Managers, pods: PodPool
) -> None:
    km = manager(classroom.install("two", pod_argv=["sh", "-c", "exit 3"]))
    await km.start_kernel()
    async with frontend(km) as page:
        (error,) = (await page.run("1").done()).outputs
        assert "The kernel ended before it was ready. It ended with exit status 3." in " ".join(error.split())


async def test_another_size_comes_with_a_restart(
    classroom: Classroom, manager: Managers, pods: PodPool
) -> None:
    km = manager(classroom.install("two"))
    await km.start_kernel()
    async with frontend(km) as page:
        cell = page.run("%gpu use 10%")
        await cell.shows("Restart the kernel: it then changes to 10%, if that is free.")
        await page.run("%gpu use lots").done()
        await km.restart_kernel()
        cell = await page.run("import os; print(os.environ['GPU_POOL_SLICE'])").done()
        assert cell.outputs == ["10%\n"]
        held = await classroom.fill("90%")
        await page.run("%gpu use 50%").done()
        await km.restart_kernel()
        cell = await page.run("1").done()
        assert "You wished for 50%. This kernel still has 10%." in " ".join("".join(cell.outputs).split())
        await classroom.pool.release(held.id)


async def test_kernels_in_pods_wait_in_line(classroom: Classroom, manager: Managers, pods: PodPool) -> None:
    managers = [manager(classroom.install(name, "50%")) for name in ("one", "two", "three")]
    for km in managers[:2]:
        await km.start_kernel()
        await answer(km, "1")
    await managers[2].start_kernel()
    async with frontend(managers[2]) as page:
        cell = page.run("print('my turn')")
        await cell.shows("You are next in line")
        await managers[0].shutdown_kernel()
        assert (await cell.done()).outputs == ["my turn\n"]
    assert len(pods.running) == 2


async def test_a_restart_on_new_ports(classroom: Classroom, manager: Managers, pods: PodPool) -> None:
    km = manager(classroom.install("two"))
    await km.start_kernel()
    await answer(km, "1")
    await km.restart_kernel(newports=True)
    assert await answer(km, "print('well')") == "well\n"
    assert len(pods.running) == 1
    assert len(await classroom.leases()) == 1
