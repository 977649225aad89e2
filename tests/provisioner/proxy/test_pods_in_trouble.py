"""Kernels in pods that end, or do not start: what the student reads, and where the slice goes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.ioloop import AsyncIOLoopKernelManager

from gpu_pool_client import BadRequest, GpuPoolError, Lease, NotAllowed
from gpu_pool_provisioner.launchers.supervised import SupervisorAway, SupervisorConnection
from support.frontend import frontend, page_of
from support.jupyter_env import (
    JupyterEnv,
    Managers,
    answer,
    eventually,
    kill,
    restarting_soon,
    started_kernel,
)
from support.pods import AWAY, PodPool, pods, until_followed

__all__ = ["pods"]


@pytest.mark.parametrize(
    ("supervised", "why"),
    [
        (True, "It was ended by the signal SIGKILL."),
        (False, "It needed more memory than a kernel may have here."),
    ],
)
async def test_a_kernel_that_dies_is_restarted_on_its_slice_and_says_why(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool, tmp_path: Path, supervised: bool, why: str
) -> None:
    pods.supervised = supervised
    async with page_of(
        manager(jupyter_env.install("two"), AsyncIOLoopKernelManager, config=restarting_soon())
    ) as (km, page):
        await page.run("1").done()
        if supervised:
            await until_followed(km, page, tmp_path / "followed")
        lease = await jupyter_env.only_lease()
        (pod,) = pods.running
        before = pod.kernel
        kill(before)

        async def runs_again() -> bool:
            (*_, last) = pods.launched
            return pods.running == [last] and last.kernel not in (0, before)

        await eventually(runs_again)
        cell = await page.run("print('on')").done()
        text = " ".join("".join(cell.outputs).split())
        assert f"ended by itself, and its variables are gone. {why}" in text
        assert "on\n" in cell.outputs
    assert (await jupyter_env.only_lease()).id == lease.id
    assert (pods.running == [pod]) == supervised


async def test_who_restarts_no_kernels_hears_of_its_end_and_may_restart_it(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool, tmp_path: Path
) -> None:
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        await until_followed(km, page, tmp_path / "followed")
        lease = await jupyter_env.only_lease()
        (pod,) = pods.running
        kill(pod.kernel)
        await eventually(km.is_alive, lambda alive: not alive)
        await km.restart_kernel()
        text = " ".join("".join((await page.run("print('on')").done()).outputs).split())
        assert "its variables are gone. It was ended by the signal SIGKILL." in text
    assert (await jupyter_env.only_lease()).id == lease.id
    assert pods.launched == pods.running == [pod]


async def test_a_supervisor_that_answers_late_restarts_its_kernel_all_the_same(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    connect, made = SupervisorConnection.connect, list[SupervisorConnection]()
    late = iter([SupervisorAway("It does not answer within 2 s.")])

    async def connected(*args: Any, **options: Any) -> SupervisorConnection:
        for error in late:
            raise error
        made.append(await connect(*args, **options))
        return made[-1]

    monkeypatch.setattr(SupervisorConnection, "connect", connected)
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        await page.run("1").done()
        (pod,) = pods.running
        await eventually(lambda: made)
        await km.restart_kernel()
        assert (await page.run("print('on')").done()).outputs == ["on\n"]
    assert pods.launched == pods.running == [pod]


@pytest.mark.long
async def test_a_restart_that_cannot_change_the_size_is_in_the_same_pod(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def away(*_: object, **__: object) -> Lease:
        raise AWAY

    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        await page.run("%gpu use 10%").shows("Restart the kernel: it then changes to 10%")
        (pod,) = pods.running
        pods.fault = AWAY
        monkeypatch.setattr(pods, "resize", away)
        await km.restart_kernel()
        text = " ".join("".join((await page.run("1").done()).outputs).split())
        assert "You asked for 10%. This kernel still has 2% of a GPU." in text
        pods.fault = None
    assert pods.launched == pods.running == [pod]


async def test_of_a_kernel_that_ends_with_its_pod_it_is_told_what_took_that(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    async with page_of(
        manager(jupyter_env.install("two"), AsyncIOLoopKernelManager, config=restarting_soon())
    ) as (_, page):
        cell = page.run("print('begun', flush=True); import time; time.sleep(600)")
        await cell.shows("begun")
        lease = await jupyter_env.only_lease()
        (pod,) = pods.running
        assert pod.process is not None
        # Its kernel ends before the pool has heard that its pod does, as where a machine is drained.
        pod.process.terminate()
        pod.process.wait()
        await pods.evict(lease.id, "Its machine is being drained for maintenance.")
        text = " ".join("".join((await cell.done()).outputs).split())
        assert "Its machine is being drained for maintenance. Its variables are gone." in text


async def test_a_running_cell_is_told_of_trouble_with_its_machine_and_that_it_is_over(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        cell = page.run("print('begun', flush=True); import time; time.sleep(600)")
        await cell.shows("begun")
        (pod,) = pods.running
        pod.trouble = "Its machine does not answer at the moment."
        await cell.shows("Its machine does not answer at the moment.")
        pod.trouble = ""
        await cell.shows("Its machine answers again.")
        await km.interrupt_kernel()
        await cell.done()
    assert "".join(cell.outputs).count("at the moment") == 1


async def test_a_cell_that_does_not_begin_is_told_of_trouble_with_its_machine(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    async with page_of(manager(jupyter_env.install("two"))) as (_, page):
        await page.run("1").done()
        (pod,) = pods.running
        os.kill(pod.kernel, signal.SIGSTOP)
        cell = page.run("print('ran')")
        pod.trouble = "Its machine does not answer at the moment."
        await cell.shows("Its machine does not answer at the moment.")
        os.kill(pod.kernel, signal.SIGCONT)
        assert (await cell.done()).outputs[-1] == "ran\n"


@pytest.mark.long
async def test_a_kernel_that_nobody_restarts_gives_its_slice_back(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")))
    await answer(km, "1")
    (pod,) = pods.running
    kill(pod.kernel)
    await eventually(jupyter_env.is_empty)
    assert not await km.is_alive()


async def test_a_pod_that_the_cluster_takes_is_told_of_and_the_next_cell_asks_anew(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        cell = page.run("print('begun', flush=True); import time; time.sleep(600)")
        await cell.shows("begun")
        lease = await jupyter_env.only_lease()
        await pods.evict(lease.id, "The machine that it ran on was lost.")
        text = " ".join("".join((await cell.done()).outputs).split())
        assert "The machine that it ran on was lost. Its variables are gone." in text
        assert await km.is_alive()
        assert (await page.run("print('anew')").done()).outputs == ["anew\n"]
    assert (await jupyter_env.only_lease()).id != lease.id


async def test_a_revoked_lease_is_told_of_with_its_words(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        await page.run("1").done()
        await pods.revoke((await jupyter_env.only_lease()).id, "The course is over.")
        await eventually(lambda: not pods.running)
        (error,) = (await page.run("1").done()).outputs
        assert "The course is over." in error
    assert await km.is_alive()


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            NotAllowed("Your home is on a machine without a GPU.", "Tell your teacher."),
            "Your home is on a machine without a GPU. Tell your teacher.",
        ),
        (ModuleNotFoundError("No module named 'lost'"), "ModuleNotFoundError: No module named 'lost'"),
    ],
    ids=["refusal", "mistake"],
)
async def test_what_a_pool_refuses_is_what_the_cell_reads_and_the_next_cell_asks_again(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool, fault: Exception, words: str
) -> None:
    pods.fault = fault
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        (error,) = (await page.run("1").done()).outputs
        assert f"This cell did not run. {words}" in error
        await eventually(jupyter_env.is_empty)
        assert await km.is_alive()
        pods.fault = None
        assert (await page.run("print('well')").done()).outputs == ["well\n"]


@pytest.mark.long
async def test_a_service_that_is_away_for_a_moment_does_no_harm(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    pods.fault = AWAY
    async with page_of(manager(jupyter_env.install("two"))) as (_, page):
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


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (GpuPoolError("The pool failed (500)."), "The pool failed (500)."),
        (NotAllowed("Sign in first."), "Sign in first."),
        (KeyError("phase"), "KeyError: 'phase'."),
    ],
    ids=["failure", "refusal", "mistake"],
)
async def test_no_odd_answer_about_its_pod_ends_a_kernel(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool, fault: Exception, words: str
) -> None:
    km = manager(jupyter_env.install("two"))
    await km.start_kernel()
    async with frontend(km) as page:
        cell = page.run("x = 1; print('begun', flush=True); import time; time.sleep(600)")
        await cell.shows("begun")
        pods.fault = fault
        await cell.shows(f"cannot be known at the moment: {words} Still trying.")
        pods.fault = None
        await cell.shows("How the machine of this kernel is can be known again.")
        await km.interrupt_kernel()
        await cell.done()
        assert (await page.run("print(x)").done()).outputs == ["1\n"]
    assert len(pods.launched) == 1


async def test_a_pod_of_which_the_pool_knows_nothing_has_ended(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    km = manager(jupyter_env.install("two"))
    await km.start_kernel()
    async with frontend(km) as page:
        cell = page.run("print('begun', flush=True); import time; time.sleep(600)")
        await cell.shows("begun")
        pods.fault = BadRequest("No kernel was started on this slice, or it has ended.", "Start one.")
        text = " ".join("".join((await cell.done()).outputs).split())
        assert "No kernel was started on this slice, or it has ended. Start one." in text
        pods.fault = None


async def test_a_kernel_is_ended_while_the_service_is_away(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")))
    await answer(km, "1")
    pods.fault = AWAY
    await km.shutdown_kernel(now=True)
    assert not await km.is_alive()
    # In the end it is the lease that counts.
    assert await jupyter_env.is_empty()
    assert not pods.running


@pytest.mark.long
async def test_a_kernel_whose_pod_does_not_end_gives_its_slice_back_all_the_same(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")))
    await answer(km, "1")
    pods.lingering = True
    await km.shutdown_kernel(now=True)
    assert await jupyter_env.is_empty()


async def test_a_pod_that_does_not_start_in_time_says_what_it_waited_for(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    pods.images.clear()
    km = await started_kernel(manager(jupyter_env.install("two", start_timeout=1.0)))
    await eventually(jupyter_env.is_empty)
    async with frontend(km) as page:
        (error,) = (await page.run("1").done()).outputs
        assert "Its last report: Its software is being fetched." in " ".join(error.split())
        pods.images.set()
        assert (await page.run("print('well')").done()).outputs == ["well\n"]


async def test_a_kernel_that_does_not_encrypt_is_told_of_at_once(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    pods.encrypted = False
    async with page_of(manager(jupyter_env.install("two"))) as (_, page):
        (error,) = (await page.run("1").done()).outputs
        assert "needs ipykernel 7.4 or newer" in " ".join(error.split())
    assert not pods.running


async def test_a_kernel_that_ends_at_once_says_how(
    jupyter_env: JupyterEnv, manager: Managers, pods: PodPool
) -> None:
    async with page_of(manager(jupyter_env.install("two", pod_argv=["sh", "-c", "exit 3"]))) as (_, page):
        (error,) = (await page.run("1").done()).outputs
        assert "The kernel ended before it was ready. It ended with exit status 3." in " ".join(error.split())
