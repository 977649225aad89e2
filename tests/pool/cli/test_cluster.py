"""``list --nodes`` and ``doctor --kubernetes``, over a small served fake of the API."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from gpu_pool.cli.cluster import checks_of
from support.clusters import claim_of, gke, hami, listed, named, node, plain, resource_slice
from support.fake_kubernetes import FakeKubernetes, fake_kubernetes, trouble
from support.terminal import Terminal
from support.whole_devices import has_dra

pytest.importorskip("kubernetes_asyncio", reason="the extra [kubernetes] is not installed")


@pytest.fixture
async def fake(terminal: Terminal) -> AsyncIterator[FakeKubernetes]:
    async with fake_kubernetes() as fake:
        config = fake.kubeconfig(terminal.folder / "kubeconfig")
        terminal.environment["KUBECONFIG"] = str(config)
        yield fake


async def run(terminal: Terminal, *arguments: str) -> Any:
    return await asyncio.to_thread(terminal.run, *arguments)


def research(gpu: str, node: str) -> dict[str, Any]:
    annotations = {"hami.io/vgpu-devices-allocated": f"{gpu},NVIDIA,16384,50:;"}
    metadata = {"name": "server", "namespace": "research", "annotations": annotations}
    spec = {"nodeName": node, "containers": [{"name": "c", "resources": {"limits": {"nvidia.com/gpu": "1"}}}]}
    return {"metadata": metadata, "spec": spec, "status": {"phase": "Running"}}


async def test_nodes_show_what_is_held_of_them_by_whomever(terminal: Terminal, fake: FakeKubernetes) -> None:
    fake.put("nodes", hami("n1", gpus=2))
    fake.put("pods", research("GPU-n1-1", "n1"))
    done = await run(terminal, "list", "--nodes")
    assert done.stdout.splitlines()[1].split() == "n1 2 50% of 200% 16GiB of 64GiB 1".split()
    details = (await run(terminal, "list", "--nodes", "-d")).stdout
    assert "NVIDIA-Tesla-V100-SXM2-32GB  50% of 100%  16GiB of 32GiB  1" in details
    assert "research/server  1     50%    16GiB" in details
    found = json.loads((await run(terminal, "list", "--nodes", "--json")).stdout)["nodes"]
    assert [(each["index"], each["held_milli"]) for each in found[0]["gpus"]] == [(0, 0), (1, 500)]


@pytest.mark.long
async def test_a_cluster_without_gpus_is_told(terminal: Terminal, fake: FakeKubernetes) -> None:
    fake.put("nodes", node("n1"))
    done = await run(terminal, "list", "--nodes")
    assert (done.returncode, done.stdout) == (4, "")
    assert "None of 1 nodes offers GPUs" in done.stderr
    done = await run(terminal, "doctor", "--kubernetes")
    assert done.returncode == 1
    assert "broken dialect: None of 1 nodes" in done.stdout


async def test_the_doctor_says_how_gpus_are_shared_and_what_two_percent_are(
    terminal: Terminal, fake: FakeKubernetes
) -> None:
    fake.put("nodes", hami("n1", count=10))
    done = await run(terminal, "doctor", "--kubernetes")
    assert done.returncode == 0
    assert "ok     dialect: hami: 1 nodes carry the annotation" in done.stdout
    assert "memory: 655MiB" in done.stdout
    assert "deviceSplitCount" in done.stdout
    fake.put("nodes", plain("n2", memory=0))
    done = await run(terminal, "doctor", "--kubernetes")
    assert "note   dialect: hami: " in done.stdout
    assert "c.KubernetesSettings.dialect = 'hami'" in done.stdout


async def checked(terminal: Terminal) -> dict[str, tuple[str, str]]:
    """Look at the cluster in this process, and return how each thing is, and in which words."""
    from gpu_pool.cluster.snapshot import take_snapshot

    snapshot = await take_snapshot(terminal.environment["KUBECONFIG"])
    return {each.name: (each.state, each.text) for each in checks_of(snapshot)}


async def test_the_doctor_recommends_claims_where_gpus_can_be_shared_by_them(
    terminal: Terminal, fake: FakeKubernetes
) -> None:
    async def says() -> str:
        return ": ".join((await checked(terminal)).get("claims", ()))

    resource = "/apis/resource.k8s.io/v1"
    fake.put("nodes", plain("n1", replicas=50))
    fake.pages["/version"] = {"major": "1", "minor": "35"}
    assert await says() == ""
    fake.pages["/version"] = {"major": "1", "minor": "36+"}
    assert (await says()).startswith("note: Kubernetes 1.36 can share GPUs by claims of any size")
    fake.absent.clear()
    fake.put_of(resource, "deviceclasses", *named("gpu.nvidia.com"))
    fake.put_of(resource, "resourceslices", resource_slice(listed("gpu-0")))
    assert (await says()).endswith("does not let claims share GPUs")
    fake.put_of(resource, "resourceslices", resource_slice(listed("gpu-0", default="0")))
    assert (await says()).startswith("ok: the scheduler can share GPUs by claims of any size")
    fake.put("nodes", hami("h"))
    assert (await says()).startswith("note: the scheduler can share GPUs by claims of any size")


async def test_the_doctor_says_whether_the_pool_could_divide_whole_gpus_itself(
    terminal: Terminal, fake: FakeKubernetes
) -> None:
    async def says() -> tuple[str, str]:
        return (await checked(terminal)).get("shared", ("", ""))

    resource = "/apis/resource.k8s.io/v1"
    fake.put("nodes", plain("n1"))
    fake.pages["/version"] = {"major": "1", "minor": "33"}
    assert "Kubernetes 1.33 does not serve resource.k8s.io/v1" in (await says())[1]
    fake.pages["/version"] = {"major": "1", "minor": "34"}
    assert await says() == ("", "")
    fake.absent.clear()
    fake.put_of(resource, "deviceclasses", *named("gpu.nvidia.com"))
    assert "No ResourceSlice of the driver gpu.nvidia.com" in (await says())[1]
    fake.put_of(resource, "resourceslices", resource_slice(listed("gpu-0"), listed("gpu-1")))
    assert (await says())[1] == "the pool could claim 2 GPUs whole and divide them itself"
    fake.put_of(resource, "resourceclaims", claim_of("gpu-1", name="research"))
    assert (await says())[1].endswith("; 1 are in use or closed")


async def test_the_doctor_says_with_what_a_dialect_was_seen(terminal: Terminal, fake: FakeKubernetes) -> None:
    fake.put("nodes", gke("time-sharing", 10))
    assert (await checked(terminal))["seen"][1].startswith("gke: not seen on a cluster")
    fake.put("nodes", plain("n1"))
    assert (await checked(terminal))["seen"][1].startswith("device-plugin: without GPUs: time-slicing")


async def test_the_doctor_says_which_nodes_take_no_kernels_and_what_is_known_of_gpus(
    terminal: Terminal, fake: FakeKubernetes
) -> None:
    resource = "/apis/resource.k8s.io/v1"
    taint = {"key": "sku", "value": "gpu", "effect": "NoSchedule"}
    xid = {"key": "gpu.nvidia.com/xid", "value": "43", "effect": "None"}
    fake.absent.clear()
    fake.put("nodes", {**node("n1"), "spec": {"taints": [taint]}})
    fake.put_of(resource, "deviceclasses", *named("gpu.nvidia.com"))
    fake.put_of(resource, "resourceslices", resource_slice(listed("gpu-0", default="0", taints=[xid])))
    found = await checked(terminal)
    closed = "n1 has a taint that kernels do not tolerate (sku=gpu:NoSchedule): no kernels"
    assert found["nodes"] == ("note", closed)
    assert found["devices"] == ("note", "GPU 0 of n1: taint gpu.nvidia.com/xid=43 (for information only)")


@pytest.mark.long
async def test_what_may_not_be_read_is_told(terminal: Terminal, fake: FakeKubernetes) -> None:
    fake.put("nodes", hami("n1"))
    fake.before_read = lambda kind: trouble(403, "Forbidden", "no") if kind == "runtimeclasses" else None
    assert (
        "note   rights: runtimeclasses cannot be read: no"
        in (await run(terminal, "doctor", "--kubernetes")).stdout
    )
    fake.before_read = lambda kind: trouble(403, "Forbidden", "no") if kind == "nodes" else None
    done = await run(terminal, "doctor", "--kubernetes")
    assert done.returncode == 1
    assert "does not let you read its nodes: no" in done.stdout


async def test_courses_are_exported_as_the_cluster_has_it(terminal: Terminal, fake: FakeKubernetes) -> None:
    fake.put("nodes", hami("n1"))
    file = terminal.folder / "ml.yaml"
    file.write_text("title: ML\nslices: [{name: Small, request: 2%}]\nquota: {share: 50%}\n")
    done = await run(terminal, "courses", "export", "--kubernetes", str(file))
    assert done.returncode == 0
    assert "kind: ResourceQuota" in done.stdout
    assert "limits.nvidia.com/gpucores" in done.stdout
    assert "hami: 1 nodes carry the annotation" in done.stderr


async def test_of_slices_that_the_pool_divides_the_cluster_can_count_none(
    terminal: Terminal, fake: FakeKubernetes
) -> None:
    has_dra(fake, "gpu-0")
    file = terminal.folder / "ml.yaml"
    file.write_text("title: ML\nslices: [{name: Small, request: 2%}]\nquota: {share: 50%}\n")
    words = ("courses", "export", "--kubernetes", "--dialect", "shared")
    done = await run(terminal, *words, str(file))
    assert done.returncode == 0
    assert "kind: ResourceQuota" not in done.stdout
    assert "It cannot count slices of the pool's own division of whole GPUs" in done.stderr
    done = await run(terminal, *words, "--kueue", str(file))
    assert done.returncode != 0
    assert "Kueue" in done.stderr


async def test_no_cluster_is_told(terminal: Terminal) -> None:
    terminal.environment["KUBECONFIG"] = "/nowhere"
    done = await run(terminal, "doctor", "--kubernetes")
    assert done.returncode == 1
    assert "There is no cluster" in done.stdout
