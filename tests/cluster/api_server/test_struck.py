"""The cluster's part of chaos: service and node are lost at every point of a kernel's start and end.

A student runs a cell meanwhile. Whatever was lost, it runs or says why not, the
next one runs, and in the end nothing is left.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import psutil
import pytest

from chaos import points
from gpu_pool_client import PoolUnreachable, connect
from support.clusters import hami, node
from support.control_plane import Cluster
from support.fixtures import jupyter_env
from support.frontend import Cell
from support.jupyter_env import JupyterEnv, eventually
from support.pod_pages import Page, add_server, jupyter, kernels, nothing_runs, of_cluster, opened
from support.service import ForkServer, Service, serving

__all__ = ["jupyter_env"]
pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

#: As whom the service knows those who ask over its socket.
USER = psutil.Process().username()
_ARMED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
import gpu_pool.cluster.backend
from chaos import points
points.arm((*points.CLUSTER, *points.CLUSTER_WAITS, *points.CLUSTER_ENDS), Path({strikes!r}))
"""


def card_of(name: str) -> object:
    """Return a node with one GPU of 32 GiB that HAMi shares."""
    card = hami(name, count=50)
    card["status"]["allocatable"] |= {"nvidia.com/gpumem": "32768", "nvidia.com/gpucores": "100"}
    return card


class Struck:
    """A cluster, its service, which is started again whenever it ends, and a student's notebooks."""

    def __init__(self, cluster: Cluster, namespace: str, service: Service, strikes: Path) -> None:
        self.cluster, self.namespace, self.service = cluster, namespace, service
        self.strikes = strikes

    async def revive(self) -> None:
        """Start the service again whenever it has ended, as a Deployment does."""
        while True:
            assert self.service.process is not None
            if not self.service.process.is_alive():
                self.service.launch()
            await asyncio.sleep(0.2)  # as often as it is looked

    def strike(self, point: str, how: str) -> None:
        (self.strikes / "hit").unlink(missing_ok=True)
        points.strike(self.strikes, point, how)

    async def is_hit(self) -> None:
        await eventually(lambda: (self.strikes / "hit").exists())

    async def lose(self, name: str) -> None:
        """Lose a node, and let the cluster take note that its machine is gone for good."""
        assert self.cluster.agent is not None
        await asyncio.to_thread(self.cluster.agent.lose, name)
        await asyncio.to_thread(self.cluster.kubectl, "delete", "node", name)

    async def is_hit_and_moves(self, point: str, lost: str, other: str) -> None:
        """Lose a node while a process is held at a point, add another node, and let the process go on."""
        await self.is_hit()
        await self.lose(lost)
        self.cluster.add(card_of(other))
        (self.strikes / f"{point}.go").touch()

    async def runs(self, page: Page, attempts: int) -> None:
        """Run cells until one does; those that do not say why."""
        for attempt in range(attempts):
            cell = await page.run(f"print('well', {attempt})").done(within=240)
            if cell.outputs == [f"well {attempt}\n"]:
                return
            told = " ".join("".join(cell.outputs).split())
            assert told.startswith("GpuSliceNotGranted: "), told
            assert "GPU_POOL" not in told
        raise AssertionError(f"no cell has run: {told}")

    async def another_size(self, page: Page) -> None:
        """Let a kernel's pod not be the next one's after a restart: that is of another size."""
        cell = await page.run("%gpu use 40%").done(within=240)
        assert "Restart the kernel" in "".join(cell.outputs), cell.outputs

    async def ends_well(self, page: Page, cell: Cell, name: str) -> None:
        """Wait until a cell that prints *well*, or one after it that says why not, runs on a node."""
        done = await cell.done(within=240)
        if done.outputs != ["well\n"]:
            assert "GpuSliceNotGranted" in "".join(done.outputs)
            await self.knows(name)
            await self.runs(page, 3)
        await self.runs_on(name)

    async def knows(self, name: str) -> None:
        """Wait until the pool has seen a node: none may be there for a moment, and nothing ever fits."""

        async def does() -> bool:
            async with connect(self.service.url) as pool:
                devices = (await pool.status()).devices
            return any(each.device.node == name and not each.drained for each in devices)

        await eventually(does)

    async def runs_on(self, name: str) -> None:
        """Wait until the one kernel that is not told to end is there; what is elsewhere goes by and by."""

        async def does() -> bool:
            pods = await asyncio.to_thread(kernels, self.cluster, self.namespace)
            living = [each for each in pods if "deletionTimestamp" not in each["metadata"]]
            return [each["spec"].get("nodeName") for each in living] == [name]

        await eventually(does)

    async def is_left_with_nothing(self) -> None:
        """Wait until no pod, no Secret and no lease is there."""

        async def no_lease() -> bool:
            # It may just have been struck and not have started again, which takes a busy machine seconds.
            with suppress(PoolUnreachable):
                async with connect(self.service.url) as pool:
                    status = await pool.status()
                return not status.leases and not status.queue
            return False

        await eventually(no_lease)
        await eventually(lambda: nothing_runs(self.cluster, self.namespace))

        async def no_secret() -> bool:
            # The cluster removes it once it has noticed that the pod, its owner, has gone.
            secrets = await asyncio.to_thread(self.cluster.get, "secrets", "-n", self.namespace)
            return not secrets["items"]

        await eventually(no_secret)


@pytest.fixture
async def struck(
    cluster: Cluster, namespace: str, children: ForkServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Struck]:
    if cluster.agent is None:
        pytest.skip("this cluster has nodes of its own (KUBECONFIG)")
    # Apart from the kernels, since a notebook server that is lost takes these along.
    apart = f"apart-{namespace}"
    cluster.add(node(apart))
    add_server(cluster, namespace, USER, node=apart)
    strikes = tmp_path / "strikes"
    async with serving(children, tmp_path / "service", of_cluster(cluster, namespace)) as service:
        service.prelude = _ARMED.format(tests=str(Path(__file__).parents[2]), strikes=str(strikes))
        await service.end()
        await service.start()
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        yield Struck(cluster, namespace, service, strikes)


@asynccontextmanager
async def reviving(struck: Struck) -> AsyncIterator[None]:
    task = asyncio.create_task(struck.revive())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_service_is_lost_at_every_point_and_no_cell_is(
    jupyter_env: JupyterEnv, struck: Struck
) -> None:
    struck.cluster.add(card_of("struck-1"))
    kernel = jupyter_env.install("course", "50%", outage_timeout=600)
    async with jupyter(jupyter_env) as server, reviving(struck):
        for number, point in enumerate((*points.CLUSTER, *points.CLUSTER_ENDS)):
            print(point)
            struck.strike(point, points.KILL)
            async with opened(server, jupyter_env, f"{number}.ipynb", kernel) as page:
                await struck.runs(page, 1)
                assert len(await asyncio.to_thread(kernels, struck.cluster, struck.namespace)) == 1
                if point in points.CLUSTER_ENDS:
                    await page.do("restart")
                    await struck.runs(page, 1)
                await page.shut_down()
            await struck.is_hit()
            await struck.is_left_with_nothing()
    await struck.lose("struck-1")


async def test_the_node_is_lost_at_every_point_and_the_cell_runs_elsewhere(
    jupyter_env: JupyterEnv, struck: Struck
) -> None:
    kernel = jupyter_env.install("course", "50%", outage_timeout=600)
    struck.cluster.add(card_of("lost-a"))
    async with jupyter(jupyter_env) as server:
        for number, point in enumerate(points.CLUSTER):
            print(point)
            lost, other = f"lost-{chr(97 + number)}", f"lost-{chr(98 + number)}"
            struck.strike(point, points.HOLD)
            async with opened(server, jupyter_env, f"{number}.ipynb", kernel) as page:
                cell = page.run("print('well')")
                await struck.is_hit_and_moves(point, lost, other)
                await struck.ends_well(page, cell, other)
                await page.shut_down()
            await struck.is_left_with_nothing()
    await struck.lose(other)


async def test_the_service_is_lost_while_a_kernel_waits_in_line_and_its_turn_comes(
    jupyter_env: JupyterEnv, struck: Struck
) -> None:
    struck.cluster.add(card_of("waiting-1"))
    kernel = jupyter_env.install("course", "60%", outage_timeout=600)
    async with jupyter(jupyter_env) as server, reviving(struck):
        for number, point in enumerate(points.CLUSTER_WAITS):
            print(point)
            async with opened(server, jupyter_env, f"{number}.ipynb", kernel) as first:
                await struck.runs(first, 1)
                struck.strike(point, points.KILL)
                async with opened(server, jupyter_env, f"{number}-next.ipynb", kernel) as page:
                    cell = page.run("print('well')")
                    await cell.shows("Waiting for a GPU slice of 60%.")
                    await first.shut_down()
                    assert (await cell.done(within=240)).outputs == ["well\n"]
                    await page.shut_down()
            await struck.is_hit()
            await struck.is_left_with_nothing()
    await struck.lose("waiting-1")


async def test_the_node_is_lost_while_a_kernel_waits_in_line_and_its_turn_comes(
    jupyter_env: JupyterEnv, struck: Struck
) -> None:
    kernel = jupyter_env.install("course", "60%", outage_timeout=600)
    struck.cluster.add(card_of("turn-a"))
    async with jupyter(jupyter_env) as server:
        for number, point in enumerate(points.CLUSTER_WAITS):
            print(point)
            lost, other = f"turn-{chr(97 + number)}", f"turn-{chr(98 + number)}"
            async with opened(server, jupyter_env, f"{number}.ipynb", kernel) as first:
                await struck.runs(first, 1)
                struck.strike(point, points.HOLD)
                async with opened(server, jupyter_env, f"{number}-next.ipynb", kernel) as page:
                    cell = page.run("print('well')")
                    if point in points.GRANT:
                        await cell.shows("Waiting for a GPU slice of 60%.")
                        await first.shut_down()
                    await struck.is_hit_and_moves(point, lost, other)
                    await struck.ends_well(page, cell, other)
                    await page.shut_down()
                if point not in points.GRANT:
                    await first.shut_down()
            await struck.is_left_with_nothing()
    await struck.lose(other)


async def test_the_node_is_lost_while_a_kernel_is_restarted_or_ended(
    jupyter_env: JupyterEnv, struck: Struck
) -> None:
    kernel = jupyter_env.install("course", "50%", outage_timeout=600)
    struck.cluster.add(card_of("end-a"))
    async with jupyter(jupyter_env) as server:
        for number, point in enumerate(points.CLUSTER_ENDS):
            print(point)
            lost, other = f"end-{chr(97 + number)}", f"end-{chr(98 + number)}"
            async with opened(server, jupyter_env, f"{number}.ipynb", kernel) as page:
                await struck.runs(page, 1)
                is_restart = "_delete_until_done" in point
                if is_restart:
                    await struck.another_size(page)
                struck.strike(point, points.HOLD)
                acts = page.do("restart", strict=False) if is_restart else page.shut_down()
                acting = asyncio.create_task(acts)
                await struck.is_hit_and_moves(point, lost, other)
                # A restart that comes after the slice was lost with its node is refused, and says so.
                goes_on = await acting
                if is_restart:
                    await struck.knows(other)
                if goes_on:
                    await struck.runs(page, 3)
                    await struck.runs_on(other)
                if is_restart:
                    await page.shut_down()
            if is_restart and not goes_on:
                assert "no longer has its GPU slice" in (jupyter_env.folder / "log").read_text()
                async with opened(server, jupyter_env, f"{number}-anew.ipynb", kernel) as page:
                    await struck.runs(page, 3)
                    await struck.runs_on(other)
                    await page.shut_down()
            await struck.is_left_with_nothing()
    await struck.lose(other)


async def test_a_kernel_that_is_restarted_after_its_node_was_lost_runs_elsewhere(
    jupyter_env: JupyterEnv, struck: Struck
) -> None:
    """Its pod would have been the next one's, too."""
    kernel = jupyter_env.install("course", "50%", outage_timeout=600)
    struck.cluster.add(card_of("pod-a"))
    async with jupyter(jupyter_env) as server, opened(server, jupyter_env, "lost.ipynb", kernel) as page:
        await struck.runs(page, 1)
        await struck.lose("pod-a")
        struck.cluster.add(card_of("pod-b"))
        await page.do("restart")
        await struck.knows("pod-b")
        await struck.runs(page, 3)
        await struck.runs_on("pod-b")
        await page.shut_down()
    await struck.is_left_with_nothing()
    await struck.lose("pod-b")
