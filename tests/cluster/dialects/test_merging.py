"""A slice put into a pod, and pods that would lift its limit."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_pool.cluster.dialects import Dialect, DialectOptions, choose, merged
from gpu_pool_client import NotAllowed, parse_request
from support.clusters import everything


def there(name: str) -> Dialect:
    found = choose(*everything()[name]).dialect
    assert found is not None
    return found


def pod(**container: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "ada", "labels": {"mine": "1"}},
        "spec": {"containers": [{"name": "notebook", "image": "jupyter", **container}, {"name": "beside"}]},
    }


def with_slice(base: dict[str, Any], name: str = "hami", text: str = "10%") -> dict[str, Any]:
    dialect = there(name)
    return merged(base, "notebook", dialect.translate(parse_request(text)).pod, dialect.table.bans)


def test_what_the_pod_had_is_kept_and_the_slice_added() -> None:
    base = pod(env=[{"name": "HOME", "value": "/home/ada"}], resources={"limits": {"cpu": "1"}})
    made = with_slice(base)
    first, beside = made["spec"]["containers"]
    assert made["metadata"]["labels"] == {"mine": "1"}
    assert made["spec"]["schedulerName"] == "hami-scheduler"
    assert first["env"] == [{"name": "HOME", "value": "/home/ada"}]
    assert first["resources"]["limits"] == {
        "cpu": "1",
        "nvidia.com/gpu": "1",
        "nvidia.com/gpumem": "3276",
        "nvidia.com/gpucores": "10",
    }
    assert first["resources"]["requests"]["nvidia.com/gpumem"] == "3276"
    assert beside == {"name": "beside"}
    assert "nvidia.com/gpu" not in str(base)


def test_claims_are_named_in_the_pod_and_its_container() -> None:
    made = with_slice(pod(), "dra-memory")
    (claim,) = made["spec"]["resourceClaims"]
    assert made["spec"]["containers"][0]["resources"]["claims"] == [{"name": claim["name"]}]


def test_requirements_are_added_to_each_alternative() -> None:
    base = pod()
    terms = [{"matchExpressions": [{"key": key, "operator": "Exists"}]} for key in ("a", "b")]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    base["spec"]["affinity"] = {"nodeAffinity": required}
    dialect = there("hami")
    parts = dialect.translate(parse_request("10%")).pod
    requirement = {"key": "kubernetes.io/hostname", "operator": "In", "values": ["n1"]}
    pinned = type(parts)(limits=parts.limits, node_affinity=(requirement,))
    made = merged(base, "notebook", pinned, dialect.table.bans)
    found = made["spec"]["affinity"]["nodeAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert [[each["key"] for each in term["matchExpressions"]] for term in found["nodeSelectorTerms"]] == [
        ["a", "kubernetes.io/hostname"],
        ["b", "kubernetes.io/hostname"],
    ]


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("hami", {"metadata": {"labels": {"hami.io/webhook": "ignore"}}}, "label hami.io/webhook"),
        ("hami", {"env": [{"name": "CUDA_DISABLE_CONTROL", "value": "true"}]}, "CUDA_DISABLE_CONTROL"),
        ("hami", {"env": [{"name": "LD_PRELOAD", "value": ""}]}, "LD_PRELOAD"),
        ("hami", {"envFrom": [{"secretRef": {"name": "mine"}}]}, "envFrom"),
        ("hami", {"securityContext": {"privileged": True}}, "privileged"),
        ("hami", {"resources": {"limits": {"nvidia.com/gpumem": "32768"}}}, "resource nvidia.com/gpumem"),
        ("hami", {"resources": {"requests": {"nvidia.com/gpu": "1"}}}, "resource nvidia.com/gpu"),
        ("whole", {"env": [{"name": "NVIDIA_VISIBLE_DEVICES", "value": "all"}]}, "NVIDIA_VISIBLE_DEVICES"),
        ("mps", {"env": [{"name": "CUDA_MPS_PIPE_DIRECTORY", "value": "/x"}]}, "CUDA_MPS_PIPE_DIRECTORY"),
        (
            "kai",
            {"metadata": {"annotations": {"kai-resource-isolator.io/inject": "false"}}},
            "kai-resource-isolator.io/inject",
        ),
        ("kai", {"resources": {"limits": {"nvidia.com/gpu": "1"}}}, "resource nvidia.com/gpu"),
        (
            "kai",
            {"metadata": {"annotations": {"nvidia.com/container.notebook.gpu-memory.limit": "32Gi"}}},
            "gpu-memory.limit",
        ),
        ("volcano", {"resources": {"limits": {"volcano.sh/vgpu-number": "8"}}}, "volcano.sh/vgpu-number"),
        (
            "koordinator",
            {"metadata": {"labels": {"koordinator.sh/gpu-isolation-provider": ""}}},
            "gpu-isolation-provider",
        ),
    ],
)
def test_a_pod_that_would_lift_its_limit_is_refused(name: str, change: dict[str, Any], words: str) -> None:
    metadata = change.pop("metadata", {})
    base = pod(**change)
    base["metadata"].update(metadata)
    with pytest.raises(NotAllowed, match=words):
        with_slice(base, name, "1" if name == "whole" else "2%")


def test_containers_beside_are_looked_at_too() -> None:
    base = pod()
    base["spec"]["initContainers"] = [
        {"name": "first", "env": [{"name": "CUDA_DISABLE_CONTROL", "value": "true"}]}
    ]
    with pytest.raises(NotAllowed, match="CUDA_DISABLE_CONTROL"):
        with_slice(base)


def test_a_pod_with_its_node_chosen_is_refused() -> None:
    base = pod()
    base["spec"]["nodeName"] = "n1"
    with pytest.raises(NotAllowed, match="nodeName"):
        with_slice(base)


def test_bitfusion_needs_a_command_in_this_container_and_no_other() -> None:
    with pytest.raises(NotAllowed, match="command is written"):
        with_slice(pod(), "bitfusion")
    assert with_slice(pod(command=["jupyterhub-singleuser"]), "bitfusion")
    other = pod(command=["jupyterhub-singleuser"])
    other["spec"]["containers"][1]["command"] = ["proxy"]
    with pytest.raises(NotAllowed, match="no other container"):
        with_slice(other, "bitfusion")


def test_the_container_must_be_there() -> None:
    dialect = there("hami")
    parts = dialect.translate(parse_request("10%")).pod
    with pytest.raises(NotAllowed, match="no container 'kernel'"):
        merged(pod(), DialectOptions(container="kernel").container, parts, dialect.table.bans)
