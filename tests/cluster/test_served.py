"""``gpu-pool serve --kubernetes`` as its clients see it, and what is left when it is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from gpu_pool_client import Holder, LeaseState, NotAllowed, PodPhase, connect, parse_request
from support.clusters import hami
from support.fake_kubernetes import FakeKubernetes, fake_kubernetes
from support.hub import ADMIN
from support.kernel_pods import claim, command, held, notebook, running, serving_cluster
from support.pools import embedded, eventually
from support.service import ForkServer, Service


@pytest.fixture
async def fake() -> AsyncIterator[FakeKubernetes]:
    async with fake_kubernetes() as fake:
        fake.put("nodes", hami("n1"))
        fake.put("pods", notebook(ADMIN, "hub", node="n1"))
        fake.put("persistentvolumeclaims", claim(ADMIN, "hub"))
        yield fake


@pytest.fixture
async def service(
    cluster_children: ForkServer, fake: FakeKubernetes, tmp_path: Path
) -> AsyncIterator[Service]:
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    async with serving_cluster(cluster_children, tmp_path / "service", config) as service:
        yield service


async def test_a_client_starts_follows_and_ends_a_kernel(service: Service, fake: FakeKubernetes) -> None:
    async with connect(service.url) as pool:
        lease = await held(pool)
        assert lease.terms.in_pod
        first = await pool.launch(lease.id, command())
        assert first.phase is PodPhase.STARTING
        following = asyncio.create_task(running(pool, lease.id))
        fake.run(f"gpu-pool-{lease.id}-1", address="10.0.0.9")
        assert (await following).address == "10.0.0.9"
        await pool.end_pod(lease.id)
        await eventually(lambda: fake.named("pods") == [f"jupyter-{ADMIN}"])
        assert (await pool.get_lease(lease.id)).state is LeaseState.HELD
    secret = command().connection["curve_secretkey"]
    assert "curve" not in service.log
    assert secret not in service.log


async def test_a_kernel_gets_what_its_course_says(
    cluster_children: ForkServer, fake: FakeKubernetes, tmp_path: Path
) -> None:
    (tmp_path / "courses").mkdir()
    course = "{kernel_image: kernel:2, kernel_memory: 2GiB, home: none}"
    text = f"title: T\nslices: [{{name: Small, request: 2%}}]\nlongest_lease: 1h\nkubernetes: {course}\n"
    (tmp_path / "courses" / "cs101.yaml").write_text(text)
    settings = f"c.PoolSettings.courses_dir = {str(tmp_path / 'courses')!r}"
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    serving = serving_cluster(cluster_children, tmp_path / "service", config, settings)
    async with serving as service, connect(service.url) as pool:
        lease = await pool.request(parse_request("2%"), Holder("ada", "cs101"), "key")
        await pool.launch(lease.id, command())
    spec = fake.get("pods", f"gpu-pool-{lease.id}-1")["spec"]
    assert spec["containers"][0]["image"] == "kernel:2"
    assert spec["containers"][0]["resources"]["limits"]["memory"] == "2048Mi"
    assert spec["volumes"][0] == {"name": "home", "emptyDir": {}}
    assert 3_000 < spec["activeDeadlineSeconds"] <= 3_660


async def test_a_service_killed_between_a_pod_and_its_answer_makes_no_second_one(
    service: Service, fake: FakeKubernetes
) -> None:
    async with connect(service.url) as pool:
        lease = await held(pool)
        before = service.process
        assert before

        def kill(method: str, kind: str) -> Any:
            if (method, kind) == ("POST", "secrets") and service.process is before and before.is_alive():
                os.kill(before.pid, signal.SIGKILL)
            return None

        fake.before_write = kill
        launching = asyncio.create_task(pool.launch(lease.id, command()))
        await eventually(lambda: not before.is_alive())
        await service.start()
        await asyncio.wait_for(launching, 120)
        fake.run(f"gpu-pool-{lease.id}-1")
        await running(pool, lease.id)
    assert fake.named("pods") == [f"gpu-pool-{lease.id}-1", f"jupyter-{ADMIN}"]
    assert fake.named("secrets") == [f"gpu-pool-{lease.id}-1"]


async def test_a_service_that_stops_lets_nobody_wait_and_leaves_kernels_alone(
    service: Service, fake: FakeKubernetes
) -> None:
    async with connect(service.url) as pool:
        lease = await held(pool)
        await pool.launch(lease.id, command())
        fake.run(f"gpu-pool-{lease.id}-1")
        seen = (await running(pool, lease.id)).version
        polling = asyncio.create_task(pool.pod(lease.id, seen))
        await eventually(lambda: fake.asked("WATCH", "pods"))
        await service.end()
        assert f"gpu-pool-{lease.id}-1" in fake.named("pods")
        await service.start()
        assert (await asyncio.wait_for(polling, 120)).version == seen


async def test_a_pool_without_a_cluster_starts_no_kernels(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db") as pool:
        lease = await held(pool)
        assert not lease.terms.in_pod
        for asked in (pool.launch(lease.id, command()), pool.pod(lease.id), pool.end_pod(lease.id)):
            with pytest.raises(NotAllowed, match="starts no kernels"):
                await asked


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ("c.KubernetesSettings.dialect = 'slurm'", "'slurm' is not a dialect"),
        ("c.KubernetesSettings.options = {'quue': 'x'}", "options has 'quue'"),
        ("c.KubernetesSettings.uid = 0", "uid"),
    ],
)
async def test_a_wrong_setting_is_told_at_the_start(
    cluster_children: ForkServer, fake: FakeKubernetes, tmp_path: Path, settings: str, words: str
) -> None:
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    service = Service(
        cluster_children, tmp_path / "service", ("--kubernetes",), environment={"KUBECONFIG": str(config)}
    )
    service.configure(settings)
    process = service.launch()
    await eventually(lambda: not process.is_alive())
    assert words in service.log


async def test_a_cluster_that_cannot_be_reached_is_told_at_the_start(
    cluster_children: ForkServer, tmp_path: Path
) -> None:
    service = Service(
        cluster_children, tmp_path / "service", ("--kubernetes",), environment={"KUBECONFIG": "/nowhere"}
    )
    service.configure("")
    process = service.launch()
    await eventually(lambda: not process.is_alive())
    assert "There is no cluster to serve" in service.log
