"""Kernels of two students on a real kubelet, on one GPU that the pool divides: they take turns."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpu_pool_client import EndReason, LeaseState
from support.agent_reports import add_agent
from support.fixtures import jupyter_env
from support.jupyter_env import JupyterEnv, eventually
from support.kernel_pods import server_with_home
from support.kubelet import NODE, PAUSE, RealCluster, make_home
from support.parked_pods import GPU, KEPT, LONG, Students, students_of
from support.pod_pages import kernels, nothing_runs
from support.service import ForkServer

__all__ = ["jupyter_env"]

pytestmark = pytest.mark.timeout(900)


@pytest.fixture
async def students(
    jupyter_env: JupyterEnv,
    card: RealCluster,
    namespace: str,
    cluster_children: ForkServer,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Students]:
    for user in ("ada", "bob"):
        home = tmp_path / f"home-{user}"
        make_home(home, tmp_path)
        card.apply(*server_with_home(user, namespace, home, card.image), namespace=namespace)
    token = add_agent(card, namespace, NODE)
    image = f"c.KubernetesSettings.placeholder_image = {PAUSE!r}"
    async with students_of(
        card, namespace, token, cluster_children, tmp_path, monkeypatch, image
    ) as students:
        yield students


async def test_a_kernel_gives_way_and_comes_back_in_the_same_container_with_its_variables(
    students: Students, card: RealCluster, namespace: str
) -> None:
    async with students.reporting():
        ada, _ = await students.notebook("ada")
        await ada.run("kept = 'of ada'").done(within=LONG)
        (first,) = kernels(card, namespace)
        bob, _ = await students.notebook("bob")
        assert (await bob.run("kept = 'of bob'; print(kept)").done(within=LONG)).outputs[-1] == "of bob\n"
        (parked,) = await students.leases(LeaseState.PARKED)
        assert (parked.holder.user, parked.asked_back) == ("ada", EndReason.YIELDED)
        (holder,) = set(students.users_of_gpu()) - {
            each["metadata"]["name"] for each in kernels(card, namespace)
        }
        assert holder.startswith("gpu-pool-holder-")
        assert (await ada.run(KEPT).done(within=LONG)).outputs[-1] == f"of ada {GPU}\n"
        assert (await bob.run(KEPT).done(within=LONG)).outputs[-1] == f"of bob {GPU}\n"
        after = {each["metadata"]["uid"]: each for each in kernels(card, namespace)}
        assert len(after) == 2
        (status,) = after[first["metadata"]["uid"]]["status"]["containerStatuses"]
        assert (status["restartCount"], list(status["state"])) == (0, ["running"])
        await ada.shut_down()
        await bob.shut_down()
        await eventually(lambda: nothing_runs(card, namespace), within=LONG)
