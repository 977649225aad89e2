"""Students whose kernels are pods on one GPU that the pool divides: one gives way, and comes back."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from gpu_pool_client import EndReason, LeaseState
from support.control_plane import Cluster
from support.fixtures import jupyter_env
from support.jupyter_env import eventually
from support.parked_pods import GPU, KEPT, LONG, Students
from support.pod_pages import kernels, nothing_runs

__all__ = ["jupyter_env"]

pytestmark = pytest.mark.timeout(600)


async def test_a_student_s_kernel_gives_way_to_another_s_and_comes_back_with_its_variables(
    students: Students, card: Cluster, namespace: str
) -> None:
    async with students.reporting():
        ada, _ = await students.notebook("ada")
        await ada.run("kept = 'of ada'").done(within=LONG)
        (first,) = kernels(card, namespace)
        bob, _ = await students.notebook("bob")
        assert (await bob.run("kept = 'of bob'; print(kept)").done(within=LONG)).outputs[-1] == "of bob\n"
        (parked,) = await students.leases(LeaseState.PARKED)
        assert (parked.holder.user, parked.asked_back) == ("ada", EndReason.YIELDED)
        # Both pods are there, on one claim, with the one that keeps it.
        pods = sorted(each["metadata"]["name"] for each in kernels(card, namespace))
        assert len(pods) == 2
        assert set(pods) < set(students.users_of_gpu())
        assert (await ada.run(KEPT).done(within=LONG)).outputs[-1] == f"of ada {GPU}\n"
        assert (await bob.run(KEPT).done(within=LONG)).outputs[-1] == f"of bob {GPU}\n"
        uids = {each["metadata"]["uid"] for each in kernels(card, namespace)}
        assert len(uids) == 2
        assert first["metadata"]["uid"] in uids
        await ada.shut_down()
        await bob.shut_down()
        await eventually(lambda: nothing_runs(card, namespace), within=LONG)
    assert {each.reason for each in await students.pool.history()} == {"released"}


@pytest.mark.long
async def test_a_service_that_is_killed_meanwhile_finds_the_parked_kernel_again(
    students: Students, card: Cluster, namespace: str
) -> None:
    async with students.reporting():
        ada, _ = await students.notebook("ada")
        await ada.run("kept = 'of ada'").done(within=LONG)
        bob, _ = await students.notebook("bob")
        await bob.run("kept = 'of bob'").done(within=LONG)
        await eventually(students.is_parked, within=LONG)
    await students.service.service.end(signal.SIGKILL)
    await students.service.service.start()
    async with students.reporting():
        assert (await ada.run(KEPT).done(within=LONG)).outputs[-1] == f"of ada {GPU}\n"
        assert len(kernels(card, namespace)) == 2


@pytest.mark.long
async def test_a_parked_kernel_whose_pod_is_evicted_says_so_at_its_next_cell(
    students: Students, card: Cluster, namespace: str
) -> None:
    async with students.reporting():
        ada, _ = await students.notebook("ada")
        await ada.run("kept = 'of ada'").done(within=LONG)
        (pod,) = kernels(card, namespace)
        bob, _ = await students.notebook("bob")
        await bob.run("kept = 'of bob'").done(within=LONG)
        await eventually(students.is_parked, within=LONG)
        assert card.agent is not None
        card.agent.evict(namespace, pod["metadata"]["name"], "The node was low on resource: memory.")
        await eventually(students.is_parked, lambda seen: not seen, within=LONG)
        text = " ".join("".join((await ada.run(KEPT).done(within=LONG)).outputs).split())
        assert "The node was low on resource: memory." in text
        assert "Its variables are gone." in text
        assert (await bob.run("print(kept)").done(within=LONG)).outputs[-1] == "of bob\n"
        assert [each.reason for each in await students.pool.history()] == [EndReason.TAKEN.value]


@pytest.mark.long
async def test_a_notebook_server_that_is_killed_while_its_kernel_is_parked_leaves_no_pod(
    students: Students, card: Cluster, namespace: str
) -> None:
    async with students.reporting():
        ada, server = await students.notebook("ada")
        await ada.run("kept = 'of ada'").done(within=LONG)
        bob, _ = await students.notebook("bob")
        await bob.run("kept = 'of bob'").done(within=LONG)
        await eventually(students.is_parked, within=LONG)
        os.kill(server.process.pid, signal.SIGKILL)
        await eventually(
            lambda: asyncio.to_thread(kernels, card, namespace), lambda found: len(found) == 1, within=LONG
        )
        assert (await bob.run("print(kept)").done(within=LONG)).outputs[-1] == "of bob\n"
        assert len(await students.pool.history()) == 1
