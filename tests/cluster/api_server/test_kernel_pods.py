"""Kernels in pods, over a real API server and scheduler: they start, end, and leave nothing behind."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.embedded.pool import local_pool
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import EndReason, Holder, LeaseGone, LeaseState, NotAllowed, PodPhase
from support.clusters import hami
from support.control_plane import Cluster
from support.kernel_pods import (
    backend_of,
    cluster_pool,
    command,
    foreign,
    held,
    notebook,
    running,
    until_free,
    until_pod,
    volume,
)
from support.pools import eventually, take


@pytest.fixture(scope="module")
def card(cluster: Cluster) -> Cluster:
    """A node with one GPU of 32 GiB, shared by HAMi, and one without a GPU."""
    if cluster.agent is None:
        pytest.skip("this cluster has nodes of its own (KUBECONFIG)")
    node = hami("hami-1", count=50)
    node["status"]["allocatable"] |= {"nvidia.com/gpumem": "32768", "nvidia.com/gpucores": "100"}
    bare = hami("cpu-1", gpus=0)
    bare["metadata"] |= {"annotations": {}, "labels": {}}
    cluster.add(node, bare)
    return cluster


def kernels(cluster: Cluster, namespace: str) -> list[Any]:
    found: list[Any] = cluster.get("pods", "-n", namespace, "-l", "app.kubernetes.io/component=gpu-kernel")[
        "items"
    ]
    return found


@pytest.fixture
async def pool(card: Cluster, namespace: str, tmp_path: Path) -> AsyncIterator[GpuPool]:
    card.apply(
        *volume("claim-ada", namespace, "ReadWriteMany"), notebook("ada", namespace), namespace=namespace
    )
    async with cluster_pool(tmp_path / "store.db", card.kubeconfig, namespace) as pool:
        await eventually(lambda: backend_of(pool).view.notebook("ada", ""))
        yield pool


async def test_a_kernel_starts_where_its_slice_is_and_goes_with_its_lease(
    pool: GpuPool, card: Cluster, namespace: str
) -> None:
    lease = await held(pool)
    assert lease.terms.in_pod
    assert lease.slices[0].device.node == "hami-1"
    await pool.launch(lease.id, command())
    pod = await running(pool, lease.id)
    assert pod.address
    (made,) = kernels(card, namespace)
    assert made["spec"]["nodeName"] == "hami-1"
    assert made["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpumem"] == "655"
    found = card.get("secret", "-n", namespace, made["metadata"]["name"])
    assert found["metadata"]["ownerReferences"][0]["uid"] == made["metadata"]["uid"]
    assert json.loads(base64.b64decode(found["data"]["connection.json"]))["ip"] == "0.0.0.0"
    await pool.release(lease.id)
    with pytest.raises(LeaseGone, match="released"):
        await until_pod(pool, lease.id, lambda _: False)
    await eventually(lambda: not kernels(card, namespace))


@pytest.mark.long
async def test_fifty_slices_fill_a_card_and_the_next_runs_when_one_ends(
    pool: GpuPool, card: Cluster, namespace: str
) -> None:
    leases = [await held(pool) for _ in range(50)]
    await asyncio.gather(*(pool.launch(each.id, command()) for each in leases))
    next_one = await take(pool, "2%", "the-next", Holder("ada"))
    assert (await pool.get_lease(next_one)).position == 1
    await asyncio.gather(*(running(pool, each.id) for each in leases))
    assert len({each["metadata"]["name"] for each in kernels(card, namespace)}) == 50
    await pool.release(leases[7].id)
    lease = await pool.wait(next_one, 120)
    await pool.launch(lease.id, command())
    assert (await running(pool, lease.id)).address


async def test_the_same_launch_is_carried_out_once_and_another_takes_its_place(
    pool: GpuPool, card: Cluster, namespace: str
) -> None:
    lease, kernel = await held(pool), command()
    await asyncio.gather(*(pool.launch(lease.id, kernel) for _ in range(2)))
    await running(pool, lease.id)
    assert len(kernels(card, namespace)) == 1
    await pool.launch(lease.id, command())
    await eventually(lambda: [each["metadata"]["name"][-2:] for each in kernels(card, namespace)] == ["-2"])
    assert (await running(pool, lease.id)).address


async def test_a_kernel_that_fails_leaves_its_last_output_to_its_user_and_to_the_log(
    pool: GpuPool, caplog: pytest.LogCaptureFixture
) -> None:
    lease = await held(pool)
    await pool.launch(lease.id, command("sh", "-c", "echo begun; echo no module of that name >&2; exit 3"))
    pod = await until_pod(pool, lease.id, lambda pod: pod.phase is PodPhase.ENDED)
    assert (pod.exit_code, pod.message) == (
        3,
        "It ended with status 3. Its last output: begun no module of that name",
    )
    (line,) = (each for each in caplog.messages if "failed" in each)
    assert f"The kernel of lease {lease.id} failed: pod 'gpu-pool-{lease.id}-1' on 'hami-1', image" in line
    assert "no module of that name" in line


async def test_a_kernel_that_ends_by_itself_leaves_its_lease(pool: GpuPool) -> None:
    lease = await held(pool)
    await pool.launch(lease.id, command("sh", "-c", "exit 3"))
    pod = await until_pod(pool, lease.id, lambda pod: pod.phase is PodPhase.ENDED)
    assert (pod.exit_code, pod.message) == (3, "It ended with status 3.")
    assert (await pool.get_lease(lease.id)).state is LeaseState.HELD
    await pool.launch(lease.id, command())
    await running(pool, lease.id)


async def test_a_kernel_is_ended_and_its_lease_is_kept(pool: GpuPool, card: Cluster, namespace: str) -> None:
    lease = await held(pool)
    await pool.launch(lease.id, command())
    await running(pool, lease.id)
    await pool.end_pod(lease.id)
    assert (await pool.pod(lease.id)).phase is PodPhase.ENDED
    await eventually(lambda: not kernels(card, namespace))
    assert (await pool.pod(lease.id)).message == "It was ended."
    assert (await pool.get_lease(lease.id)).state is LeaseState.HELD


async def test_out_of_memory_is_told(pool: GpuPool, card: Cluster, namespace: str) -> None:
    assert card.agent
    lease = await held(pool)
    await pool.launch(lease.id, command())
    await running(pool, lease.id)
    card.agent.kill(namespace, kernels(card, namespace)[0]["metadata"]["name"])
    pod = await until_pod(pool, lease.id, lambda pod: pod.phase is PodPhase.ENDED)
    assert "more than its 4Gi of memory (not of the GPU)" in pod.message


def evict(card: Cluster, namespace: str, name: str) -> None:
    assert card.agent
    card.agent.evict(namespace, name, "The node was low on resource: memory.")


def delete(card: Cluster, namespace: str, name: str) -> None:
    card.kubectl("delete", "pod", "-n", namespace, name, "--wait=false")


def stop_notebook(card: Cluster, namespace: str, _name: str) -> None:
    card.kubectl("delete", "pod", "-n", namespace, "jupyter-ada", "--wait=false")


@pytest.mark.parametrize(
    ("take_away", "words"),
    [
        (evict, "short of memory or disk: The node was low on resource: memory."),
        (delete, "Somebody who manages the cluster deleted it"),
        (stop_notebook, "Your notebook server was stopped"),
    ],
)
async def test_what_the_cluster_takes_ends_the_lease_in_words(
    pool: GpuPool, card: Cluster, namespace: str, take_away: Any, words: str
) -> None:
    lease = await held(pool)
    await pool.launch(lease.id, command())
    await running(pool, lease.id)
    take_away(card, namespace, kernels(card, namespace)[0]["metadata"]["name"])
    with pytest.raises(LeaseGone, match=words):
        await until_pod(pool, lease.id, lambda _: False)
    ended = await pool.get_lease(lease.id)
    assert ended.end_reason is EndReason.TAKEN
    assert words in ended.notice
    await eventually(lambda: not kernels(card, namespace))


async def test_an_image_that_is_not_there_is_told_until_it_is(
    pool: GpuPool, card: Cluster, namespace: str
) -> None:
    assert card.agent
    card.agent.images["example.org/notebook:1"] = "missing"
    try:
        lease = await held(pool)
        await pool.launch(lease.id, command())
        await until_pod(pool, lease.id, lambda pod: "software cannot be fetched" in pod.message)
    finally:
        card.agent.images["example.org/notebook:1"] = "there"
    await running(pool, lease.id)


async def test_a_home_that_one_machine_can_use_ties_the_kernel_to_it(
    card: Cluster, namespace: str, tmp_path: Path
) -> None:
    volumes = [*volume("here", namespace, "ReadWriteOnce"), *volume("there", namespace, "ReadWriteOnce")]
    beside = notebook("ada", namespace, claim="here", node="hami-1")
    apart = notebook("bob", namespace, claim="there", node="cpu-1")
    card.apply(*volumes, beside, apart, namespace=namespace)
    async with cluster_pool(tmp_path / "store.db", card.kubeconfig, namespace) as pool:
        await eventually(
            lambda: backend_of(pool).view.notebook("ada", "") and backend_of(pool).view.notebook("bob", "")
        )
        with pytest.raises(NotAllowed, match="one machine at a time.*cpu-1, and that machine has no GPU"):
            await held(pool, user="bob")
        lease = await held(pool)
        await pool.launch(lease.id, command())
        await running(pool, lease.id)


async def test_a_kernel_has_the_folder_of_its_user_in_a_volume_of_everybodys_volume_claims(
    card: Cluster, namespace: str, tmp_path: Path
) -> None:
    assert card.agent
    server = notebook("ada", namespace, claim="homes")
    container = server["spec"]["containers"][0]
    container["env"] = [{"name": "JUPYTERHUB_USER", "value": "ada"}]
    container["volumeMounts"][0]["subPathExpr"] = "users/$(JUPYTERHUB_USER)"
    materials = {"mountPath": "/home/jovyan/materials", "subPath": "materials", "readOnly": True}
    container["volumeMounts"].append({"name": "home", **materials})
    card.apply(*volume("homes", namespace, "ReadWriteMany"), server, namespace=namespace)
    async with cluster_pool(tmp_path / "store.db", card.kubeconfig, namespace) as pool:
        await eventually(lambda: backend_of(pool).view.notebook("ada", ""))
        lease = await held(pool)
        await pool.launch(lease.id, command("sh", "-c", "touch /home/jovyan/mine; sleep 600"))
        await running(pool, lease.id)
        (made,) = kernels(card, namespace)
        volume_claims = card.agent.claims(namespace, "homes")
        await eventually((volume_claims / "users/ada/mine").exists)
    mounts = [each for each in made["spec"]["containers"][0]["volumeMounts"] if each["name"] == "home"]
    assert mounts == [
        {"name": "home", "mountPath": "/home/jovyan", "subPath": "users/ada"},
        {"name": "home", **materials},
    ]
    assert sorted(each.name for each in volume_claims.iterdir()) == ["materials", "users"]


async def test_a_kernel_touches_its_home_as_its_notebook_server_does(
    card: Cluster, namespace: str, tmp_path: Path
) -> None:
    server = notebook("ada", namespace, claim="homes")
    security = {"runAsUser": 4711, "runAsGroup": 5000, "supplementalGroups": [7000], "fsGroup": 6000}
    server["spec"] |= {"securityContext": security, "hostUsers": False}
    card.apply(*volume("homes", namespace, "ReadWriteMany"), server, namespace=namespace)
    async with cluster_pool(tmp_path / "store.db", card.kubeconfig, namespace) as pool:
        await eventually(lambda: backend_of(pool).view.notebook("ada", ""))
        lease = await held(pool)
        await pool.launch(lease.id, command())
        await running(pool, lease.id)
        (made,) = kernels(card, namespace)
    assert made["spec"]["securityContext"].items() >= security.items()
    assert made["spec"]["hostUsers"] is False


@pytest.mark.parametrize(
    ("mount", "volume_is", "words"),
    [
        ({"subPathExpr": "$(WHOSE)"}, None, "uses 'WHOSE', which is not known"),
        ({}, {"hostPath": {"path": "/srv"}}, "its volume is of the kind hostPath"),
    ],
)
async def test_a_home_that_no_kernel_can_have_is_refused_before_there_is_a_lease(
    card: Cluster,
    namespace: str,
    tmp_path: Path,
    mount: dict[str, Any],
    volume_is: dict[str, Any] | None,
    words: str,
) -> None:
    server = notebook("ada", namespace, claim="homes")
    container = server["spec"]["containers"][0]
    label = {"fieldRef": {"fieldPath": "metadata.labels['whose']"}}
    container["env"] = [{"name": "WHOSE", "valueFrom": label}]
    container["volumeMounts"][0] |= mount
    if volume_is is not None:
        server["spec"]["volumes"] = [{"name": "home", **volume_is}]
    card.apply(*volume("homes", namespace, "ReadWriteMany"), server, namespace=namespace)
    async with cluster_pool(tmp_path / "store.db", card.kubeconfig, namespace) as pool:
        await eventually(lambda: backend_of(pool).view.notebook("ada", ""))
        with pytest.raises(NotAllowed, match=words):
            await held(pool)
        assert kernels(card, namespace) == []


async def test_two_hubs_share_the_gpus_of_a_cluster_and_nothing_else(
    card: Cluster, namespace: str, tmp_path: Path
) -> None:
    other = f"{namespace}-other"
    card.kubectl("create", "namespace", other)
    try:
        async with AsyncExitStack() as stack:
            pools = []
            for each in (namespace, other):
                server = notebook("ada", each)
                card.apply(*volume("claim-ada", each, "ReadWriteMany"), server, namespace=each)
                about = cluster_pool(tmp_path / f"{each}.db", card.kubeconfig, each, pool=each)
                pools.append(await stack.enter_async_context(about))
            one, two = pools
            await eventually(lambda: all(backend_of(each).view.notebook("ada", "") for each in pools))
            lease = await held(one, "60%")
            await one.launch(lease.id, command())
            await running(one, lease.id)
            (kernel,) = kernels(card, namespace)
            # What HAMi's scheduler, which is not here, writes down.
            given = foreign("", "", milli=600, gpu="GPU-hami-1-0")["metadata"]["annotations"]
            card.kubectl(
                "annotate", "pod", "-n", namespace, kernel["metadata"]["name"],
                *(f"{key}={value}" for key, value in given.items()),
            )  # fmt: skip
            await until_free(two, 400)
            waiting = await take(two, "60%", "waits", Holder("ada"))
            assert (await two.get_lease(waiting)).position == 1
            await one.release(lease.id)
            lease = await two.wait(waiting, 120)
            await two.launch(lease.id, command())
            await running(two, lease.id)
            await eventually(lambda: not kernels(card, namespace))
            assert len(kernels(card, other)) == 1
    finally:
        card.kubectl("delete", "namespace", other, "--wait=false")


async def test_a_node_is_emptied_by_the_command_that_the_page_names(
    card: Cluster, namespace: str, tmp_path: Path
) -> None:
    server = notebook("ada", namespace, node="cpu-1")
    card.apply(*volume("claim-ada", namespace, "ReadWriteMany"), server, namespace=namespace)
    drain = ["drain", "hami-1", "--ignore-daemonsets", "--timeout=120s"]
    # What earlier tests have left cannot be evicted, since their namespaces go.
    there = ["get", "pods", "-A", "--field-selector", "spec.nodeName=hami-1", "-o", "name"]
    await eventually(lambda: card.kubectl(*there).strip() == "")
    async with cluster_pool(tmp_path / "store.db", card.kubeconfig, namespace) as pool:
        await eventually(lambda: backend_of(pool).view.notebook("ada", ""))
        lease = await held(pool)
        await pool.launch(lease.id, command())
        await running(pool, lease.id)
        try:
            with pytest.raises(AssertionError, match="Pods with local storage .use --delete-emptydir-data"):
                await asyncio.to_thread(card.kubectl, *drain)
            drain.append("--delete-emptydir-data")
            with pytest.raises(AssertionError, match="Pods that declare no controller .use --force"):
                await asyncio.to_thread(card.kubectl, *drain)
            await asyncio.to_thread(card.kubectl, *drain, "--force")
            with pytest.raises(LeaseGone, match="being drained for maintenance"):
                await until_pod(pool, lease.id, lambda _: False)
        finally:
            card.kubectl("uncordon", "hami-1")
        # Its GPUs are back.
        await held(pool)


@pytest.mark.long
async def test_what_the_service_left_is_put_right_when_it_comes_back(
    card: Cluster, namespace: str, tmp_path: Path
) -> None:
    card.apply(
        *volume("claim-ada", namespace, "ReadWriteMany"), notebook("ada", namespace), namespace=namespace
    )
    store = tmp_path / "store.db"
    async with cluster_pool(store, card.kubeconfig, namespace) as pool:
        await eventually(lambda: backend_of(pool).view.notebook("ada", ""))
        orphaned, kept, vanished = [await held(pool) for _ in range(3)]
        seen = ""
        for lease in (orphaned, kept, vanished):
            await pool.launch(lease.id, command())
            seen = (await running(pool, lease.id)).version
    async with local_pool(store, owner=True) as away:
        await away.release(orphaned.id)
    delete(card, namespace, f"gpu-pool-{vanished.id}-1")
    await eventually(lambda: len(kernels(card, namespace)) == 2)
    async with cluster_pool(store, card.kubeconfig, namespace) as pool:
        assert (await pool.pod(kept.id)).phase is PodPhase.RUNNING
        await eventually(
            lambda: (
                [each["metadata"]["name"] for each in kernels(card, namespace)] == [f"gpu-pool-{kept.id}-1"]
            ),
            within=60,
        )
        with pytest.raises(LeaseGone, match="deleted while the pool's service was down"):
            await pool.pod(vanished.id, seen)
        assert (await pool.get_lease(kept.id)).state is LeaseState.HELD
