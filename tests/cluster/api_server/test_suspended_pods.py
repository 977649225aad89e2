"""A student's kernel that keeps memory on its GPU gives way to another's: the node's agent moves it away."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from gpu_pool.cli.cluster_checks import checks_of_suspension
from gpu_pool_client import LeaseState
from support import cuda_stub
from support.control_plane import Cluster
from support.cuda_stub import Driver
from support.fixtures import jupyter_env
from support.jupyter_env import eventually
from support.parked_pods import GPU, KEPT, LONG, Students
from support.pod_pages import Page, kernels, nothing_runs
from support.suspending_agents import suspending_agent, users_of_cuda, uses_cuda
from support.whole_devices import WHOLE_NODE

__all__ = ["jupyter_env"]

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return cuda_stub.build(tmp_path_factory.mktemp("libraries"))


@pytest.fixture
def driver(tmp_path: Path) -> Driver:
    folder = tmp_path / "driver"
    folder.mkdir()
    return Driver(folder)


async def keeps(page: Page, driver: Driver, pods: Path, card: Cluster, namespace: str) -> int:
    """Let a kernel keep 512 MiB on its GPU; return its pid."""
    (pod,) = kernels(card, namespace)
    assert (await page.run(uses_cuda("of ada")).done(within=LONG)).outputs[-1] == "opened\n"
    (pid,) = users_of_cuda()
    (pods / str(pid)).write_text(pod["metadata"]["uid"])
    (driver.folder / str(pid)).write_text("running 512 1\n")
    return pid


async def test_a_kernel_that_keeps_memory_gives_way_and_comes_back_with_it(
    students: Students, card: Cluster, namespace: str, driver: Driver, libraries: Path, tmp_path: Path
) -> None:
    url = students.service.url
    with suspending_agent(url, students.token, tmp_path, driver, libraries) as pods:
        ada, _ = await students.notebook("ada")
        await ada.run("1").done(within=LONG)
        pid = await keeps(ada, driver, pods, card, namespace)
        bob, _ = await students.notebook("bob")
        assert (await bob.run("kept = 'of bob'; print(kept)").done(within=LONG)).outputs[-1] == "of bob\n"
        assert driver.state(pid) == "checkpointed"
        (parked,) = await students.leases(LeaseState.PARKED)
        assert parked.holder.user == "ada"
        assert (await ada.run(KEPT).done(within=LONG)).outputs[-1] == f"of ada {GPU}\n"
        assert driver.calls(pid) == ["lock", "checkpoint", "restore", "unlock"]
        assert len(kernels(card, namespace)) == 2
        await ada.shut_down()
        await bob.shut_down()
        await eventually(lambda: nothing_runs(card, namespace), within=LONG)
    assert {each.reason for each in await students.pool.history()} == {"released"}
    (check,) = checks_of_suspension({WHOLE_NODE: (tmp_path / "agent.log").read_text()})
    assert "can be moved off 1 of 1 GPUs" in check.text


@pytest.mark.long
async def test_service_and_agent_that_are_replaced_meanwhile_bring_it_back(
    students: Students, card: Cluster, namespace: str, driver: Driver, libraries: Path, tmp_path: Path
) -> None:
    url = students.service.url
    with suspending_agent(url, students.token, tmp_path, driver, libraries) as pods:
        ada, _ = await students.notebook("ada")
        await ada.run("1").done(within=LONG)
        pid = await keeps(ada, driver, pods, card, namespace)
        bob, _ = await students.notebook("bob")
        await bob.run("kept = 'of bob'").done(within=LONG)
        await eventually(students.is_parked, within=LONG)
    await bob.shut_down()
    await students.service.service.end(signal.SIGKILL)
    await students.service.service.start()
    # No agent is there yet: what was submitted waits, and the kernel is as it was.
    cell = ada.run(KEPT)
    assert driver.state(pid) == "checkpointed"
    with suspending_agent(url, students.token, tmp_path, driver, libraries):
        assert (await cell.done(within=LONG)).outputs[-1] == f"of ada {GPU}\n"
        assert driver.calls(pid) == ["lock", "checkpoint", "restore", "unlock"]
