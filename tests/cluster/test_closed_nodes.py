"""Nodes that take no kernels: which taints are tolerated, and who is told of the others."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.cluster.dialects import Node
from gpu_pool.cluster.nodes import closure_of, tolerations_of
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import LeaseState
from support.clusters import hami, listed, named, node, resource_slice
from support.fake_kubernetes import FakeKubernetes
from support.kernel_pods import cluster_pool, command, held
from support.pools import eventually, take

HUB = "hub"
USERS = {"key": "hub.jupyter.org_dedicated", "value": "user", "effect": "NoSchedule"}
CORE = {"key": "hub.jupyter.org/dedicated", "value": "core", "effect": "NoSchedule"}


def tainted(*taints: dict[str, Any], **more: Any) -> dict[str, Any]:
    found = hami("n1")
    return {**found, "spec": {"taints": list(taints), **more}}


def why(*taints: dict[str, Any], keys: tuple[str, ...] = (), **more: Any) -> str:
    found = closure_of(Node.read(tainted(*taints, **more)), tolerations_of(keys))
    return "" if found is None else f"{found.why} | {found.remedy}"


@pytest.mark.parametrize("effect", ["NoSchedule", "NoExecute"])
@pytest.mark.parametrize("key", ["hub.jupyter.org/dedicated", "hub.jupyter.org_dedicated"])
def test_kernels_tolerate_what_user_pods_of_zero_to_jupyterhub_do(key: str, effect: str) -> None:
    assert bool(why({"key": key, "value": "user", "effect": effect})) is (effect == "NoExecute")


@pytest.mark.parametrize(
    "taint",
    [
        {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"},
        {"key": "nvidia.com/gpu", "effect": "NoExecute"},
        {"key": "anything", "effect": "PreferNoSchedule"},
        {"key": "anything"},
        {},
    ],
)
def test_these_taints_keep_no_kernel_away(taint: dict[str, Any]) -> None:
    assert why(taint) == ""


def test_another_taint_is_named_with_what_to_set_unless_that_is_set() -> None:
    sku = {"key": "sku", "value": "gpu", "effect": "NoSchedule"}
    assert why(CORE, sku, USERS) == (
        "has a taint that kernels do not tolerate (hub.jupyter.org/dedicated=core:NoSchedule, "
        "sku=gpu:NoSchedule) | if kernels belong there: c.KubernetesSettings.tolerations = "
        "['hub.jupyter.org/dedicated', 'sku']"
    )
    assert why(CORE, sku, USERS, keys=("sku", "hub.jupyter.org/dedicated")) == ""


@pytest.mark.parametrize(
    ("taint", "words"),
    [
        ("node.kubernetes.io/unschedulable", "is cordoned | kubectl uncordon n1, once it may be used again"),
        ("ToBeDeletedByClusterAutoscaler", "is being removed by the cluster's autoscaler | "),
        ("DeletionCandidateOfClusterAutoscaler", "is being removed by the cluster's autoscaler | "),
        ("karpenter.sh/disrupted", "is being removed by the cluster's autoscaler | "),
        (
            "node.cloudprovider.kubernetes.io/uninitialized",
            "has a taint that kernels do not tolerate "
            "(node.cloudprovider.kubernetes.io/uninitialized:NoSchedule) | ",
        ),
    ],
)
def test_what_passes_is_called_what_it_is(taint: str, words: str) -> None:
    assert why({"key": taint, "effect": "NoSchedule"}) == words


def test_a_cordoned_node_and_one_that_is_silent_are_told_apart() -> None:
    assert why(unschedulable=True).startswith("is cordoned")
    silent = node()
    silent["status"]["conditions"] = []
    assert closure_of(Node.read(silent), ()) is not None


# -- A pool ----------------------------------------------------------------


async def test_kernels_run_on_nodes_that_are_kept_for_users(pool: GpuPool, fake: FakeKubernetes) -> None:
    fake.put("nodes", tainted(USERS))
    lease = await held(pool)
    await pool.launch(lease.id, command())
    tolerations = fake.get("pods", f"gpu-pool-{lease.id}-1")["spec"]["tolerations"]
    assert {**USERS, "operator": "Equal"} in tolerations


async def test_who_waits_and_the_log_are_told_of_a_taint_that_keeps_kernels_away(
    fake: FakeKubernetes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    fake.put("nodes", tainted(CORE))
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    async with cluster_pool(tmp_path / "store.db", config, HUB) as pool:
        waiting = await take(pool, "2%", "key")
        taint = "hub.jupyter.org/dedicated=core:NoSchedule"
        outlook = await pool.explain(waiting)
        assert f"The machine n1 has a taint that kernels do not tolerate ({taint})." in outlook.why
        assert "c.KubernetesSettings.tolerations = ['hub.jupyter.org/dedicated']" in caplog.text
        assert caplog.text.count(taint) == 1
        fake.put("nodes", tainted())
        assert (await pool.wait(waiting, 60)).state is LeaseState.HELD
        assert "'n1' is not closed to kernels any more" in caplog.text


async def test_a_rule_that_taints_a_device_closes_it_and_is_logged(
    fake: FakeKubernetes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The rules are served in one version of three, as by Kubernetes 1.33 to 1.35."""
    group = "/apis/resource.k8s.io"
    fake.absent = {f"{group}/v1/devicetaintrules", f"{group}/v1beta2"}
    fake.remove("nodes", "n1")
    fake.put("nodes", node("n1"))
    for each in named("gpu.nvidia.com"):
        fake.put_of(f"{group}/v1", "deviceclasses", each)
    fake.put_of(f"{group}/v1", "resourceslices", resource_slice(listed("gpu-0", default="32768Mi")))
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    async with cluster_pool(tmp_path / "store.db", config, HUB) as pool:
        assert not (await pool.status()).devices[0].drained
        rule = {"deviceSelector": {"pool": "n1"}, "taint": {"key": "k", "value": "v", "effect": "NoSchedule"}}
        fake.put_of(f"{group}/v1alpha3", "devicetaintrules", {"metadata": {"name": "r"}, "spec": rule})
        await eventually(pool.status, lambda status: status.devices[0].drained)
        assert "GPU 0 of n1: taint k=v (NoSchedule)" in caplog.text
