"""The nodes of the tests behave as nodes do: else what runs on them would prove nothing."""

from __future__ import annotations

import base64
import json
import socket
import time
from collections.abc import Callable
from typing import Any

import pytest

from support.clusters import hami, plain
from support.control_plane import Cluster
from support.probes import PORT, RECORD, WRITTEN, ProbedNode, differences, everything, writing

SLEEP = ["sleep", "600"]
HELD = {"nvidia.com/gpu": "1", "nvidia.com/gpumem": "655", "nvidia.com/gpucores": "2"}


@pytest.fixture(scope="module")
def nodes(cluster: Cluster) -> Cluster:
    if cluster.agent is None:
        pytest.skip("this cluster has nodes of its own (KUBECONFIG)")
    card = hami("hami-1", count=50)
    card["status"]["allocatable"] |= {"nvidia.com/gpumem": "32768", "nvidia.com/gpucores": "100"}
    cluster.add(card, plain("plain-1", gpus=8))
    return cluster


def pod(name: str, command: list[str], **spec: Any) -> dict[str, Any]:
    limits = spec.pop("limits", {})
    container = {"name": "main", "image": "example.org/any:1", "command": command}
    container |= {key: spec.pop(key) for key in ("env", "volumeMounts", "args") if key in spec}
    container["resources"] = {"limits": limits}
    metadata = {"name": name, **spec.pop("metadata", {})}
    toleration = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    # Whatever is the first process of its container does not hear that it is to end.
    defaults = {"restartPolicy": "Never", "tolerations": toleration, "terminationGracePeriodSeconds": 1}
    spec = {**defaults, **spec, "containers": [container]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def eventually(look: Callable[[], Any], within: float = 120.0) -> Any:
    """Return what it returns as soon as that is true."""
    deadline = time.monotonic() + within
    while not (found := look()):
        assert time.monotonic() < deadline
        time.sleep(0.2)
    return found


def status(cluster: Cluster, namespace: str, name: str) -> dict[str, Any]:
    return dict(cluster.get("pod", "-n", namespace, name)["status"])


def in_phase(cluster: Cluster, namespace: str, name: str, *phases: str) -> dict[str, Any]:
    """Wait until the pod is in one of these phases; return its status."""

    def look() -> dict[str, Any] | None:
        found = status(cluster, namespace, name)
        return found if found["phase"] in phases else None

    found: dict[str, Any] = eventually(look)
    return found


def names(cluster: Cluster, namespace: str) -> set[str]:
    return {each["metadata"]["name"] for each in cluster.get("pods", "-n", namespace)["items"]}


def test_a_container_finds_its_files_and_variables(nodes: Cluster, namespace: str) -> None:
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "s"},
        "data": {"key": base64.b64encode(b"hidden").decode()},
    }
    told = pod(
        "told",
        ["sh", "-c"],
        args=['cat /etc/told/key; echo " $NAME $(GREETING) $IP"; exit 3'],
        env=[
            {"name": "GREETING", "value": "hello"},
            {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
            {"name": "IP", "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        ],
        volumes=[{"name": "v", "secret": {"secretName": "s"}}],
        volumeMounts=[{"name": "v", "mountPath": "/etc/told"}],
    )
    nodes.apply(told, namespace=namespace)
    nodes.apply(secret, namespace=namespace)  # a kubelet waits for it, too
    found = in_phase(nodes, namespace, "told", "Failed")
    assert found["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 3
    assert nodes.agent is not None
    assert nodes.agent.log(namespace, "told") == f"hidden told hello {found['podIP']}\n"


@pytest.mark.parametrize(
    "names",
    [
        pytest.param(("of-image", "ours", "first", "no-secret", "refused", "words"), id="some"),
        pytest.param((), id="all", marks=pytest.mark.long),
    ],
)
def test_pods_find_and_become_what_a_kubelet_was_seen_to_make_of_them(
    nodes: Cluster, namespace: str, names: tuple[str, ...]
) -> None:
    assert nodes.agent is not None
    probed = ProbedNode.hollow(nodes, namespace, nodes.agent, f"compared-{namespace}")
    probes = [each for each in everything(nodes.image) if not names or each.name in names]
    probed.begin(probes)
    try:
        found = probed.follow(probes)
    finally:
        probed.let_go()
    seen = json.loads(RECORD.read_text())
    assert [f"{name}{each}" for name in found for each in differences(seen[name], found[name])] == []


def test_who_talks_to_a_pod_that_has_gone_hears_nothing(nodes: Cluster, namespace: str) -> None:
    assert nodes.agent is not None
    probed = ProbedNode.hollow(nodes, namespace, nodes.agent, f"serving-{namespace}")
    address = probed.serve()
    probed.await_answer(address, "answered")
    nodes.kubectl("delete", "pod", "-n", namespace, "serving", "--grace-period=1")
    probed.await_answer(address, "nothing")


def test_who_talks_to_a_pod_of_a_lost_node_hears_nothing(nodes: Cluster, namespace: str) -> None:
    assert nodes.agent is not None
    lost = f"lost-{namespace}"
    probed = ProbedNode.hollow(nodes, namespace, nodes.agent, lost)
    address = probed.serve()
    probed.await_answer(address, "answered")
    with socket.create_connection((address, PORT)) as talking:
        nodes.agent.lose(lost)
        talking.settimeout(1)
        with pytest.raises(TimeoutError):
            talking.recv(1)


def test_what_no_node_here_has_is_refused_in_words(nodes: Cluster, namespace: str) -> None:
    probe = {"exec": {"command": ["true"]}}
    asking = pod("asking", ["true"], volumes=[{"name": "v", "downwardAPI": {}}])
    asking["spec"]["containers"][0]["livenessProbe"] = probe
    nodes.apply(asking, namespace=namespace)
    found = in_phase(nodes, namespace, "asking", "Failed")
    assert found["reason"] == "NotOnThisNode"
    assert "no volume of the kind downwardAPI and livenessProbe" in found["message"]


def test_what_is_mounted_read_only_cannot_be_written_even_by_root(nodes: Cluster, namespace: str) -> None:
    nodes.apply(*writing("example.org/any:1"), namespace=namespace)
    in_phase(nodes, namespace, "writing", "Succeeded")
    assert nodes.agent is not None
    assert nodes.agent.log(namespace, "writing") == WRITTEN


def test_a_card_is_full_when_its_memory_is(nodes: Cluster, namespace: str) -> None:
    large = {**HELD, "nvidia.com/gpumem": "20000"}
    nodes.apply(pod("first", SLEEP, limits=large, schedulerName="hami-scheduler"), namespace=namespace)
    in_phase(nodes, namespace, "first", "Running")
    nodes.apply(pod("second", SLEEP, limits=large, schedulerName="hami-scheduler"), namespace=namespace)
    eventually(lambda: "Insufficient nvidia.com/gpumem" in str(status(nodes, namespace, "second")))
    nodes.kubectl("delete", "pod", "-n", namespace, "first", "--grace-period=1")
    in_phase(nodes, namespace, "second", "Running")


@pytest.mark.long
def test_a_deleted_pod_is_asked_and_then_killed(nodes: Cluster, namespace: str) -> None:
    nodes.apply(
        pod("kind", ["sh", "-c", "trap 'exit 0' TERM; while :; do sleep 0.1; done"]), namespace=namespace
    )
    nodes.apply(
        pod("stubborn", ["sh", "-c", "trap '' TERM; sleep 600 & wait; sleep 600"]), namespace=namespace
    )
    for name in ("kind", "stubborn"):
        in_phase(nodes, namespace, name, "Running")
    nodes.kubectl("delete", "pod", "-n", namespace, "kind", "--grace-period=600")
    nodes.kubectl("delete", "pod", "-n", namespace, "stubborn", "--grace-period=1")
    assert names(nodes, namespace) == set()


def test_a_deadline_ends_a_pod(nodes: Cluster, namespace: str) -> None:
    nodes.apply(pod("late", SLEEP, activeDeadlineSeconds=1), namespace=namespace)
    assert in_phase(nodes, namespace, "late", "Failed")["reason"] == "DeadlineExceeded"


def test_an_evicted_pod_and_a_killed_one_say_so(nodes: Cluster, namespace: str) -> None:
    assert nodes.agent is not None
    for name in ("evicted", "killed"):
        nodes.apply(pod(name, SLEEP), namespace=namespace)
        in_phase(nodes, namespace, name, "Running")
    nodes.agent.evict(namespace, "evicted", "The node was low on resource: memory.")
    assert in_phase(nodes, namespace, "evicted", "Failed")["reason"] == "Evicted"
    nodes.agent.kill(namespace, "killed")
    (container,) = in_phase(nodes, namespace, "killed", "Failed")["containerStatuses"]
    assert container["state"]["terminated"]["reason"] == "OOMKilled"
    assert container["state"]["terminated"]["exitCode"] == 137


def test_an_image_that_does_not_come_is_waited_for(nodes: Cluster, namespace: str) -> None:
    assert nodes.agent is not None
    nodes.agent.images["example.org/any:1"] = "missing"
    try:
        nodes.apply(pod("early", ["true"]), namespace=namespace)
        eventually(lambda: "ErrImagePull" in str(status(nodes, namespace, "early")))
    finally:
        nodes.agent.images["example.org/any:1"] = "there"
    in_phase(nodes, namespace, "early", "Succeeded")


@pytest.mark.long
def test_a_pod_goes_with_its_owner(nodes: Cluster, namespace: str) -> None:
    nodes.apply(pod("owner", SLEEP), namespace=namespace)
    uid = nodes.get("pod", "-n", namespace, "owner")["metadata"]["uid"]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "owner", "uid": uid}
    nodes.apply(pod("owned", SLEEP, metadata={"ownerReferences": [owner]}), namespace=namespace)
    in_phase(nodes, namespace, "owned", "Running")
    nodes.kubectl("delete", "pod", "-n", namespace, "owner", "--grace-period=1")
    eventually(lambda: names(nodes, namespace) == set())


def test_the_pods_of_a_lost_node_are_evicted(nodes: Cluster, namespace: str) -> None:
    assert nodes.agent is not None
    nodes.agent.add(plain("doomed", gpus=1, product="T4"))
    nodes.apply(pod("unlucky", SLEEP, nodeSelector={"kubernetes.io/hostname": "doomed"}), namespace=namespace)
    in_phase(nodes, namespace, "unlucky", "Running")
    nodes.agent.lose("doomed")
    eventually(lambda: "deletionTimestamp" in str(nodes.get("pod", "-n", namespace, "unlucky")))
    # Nobody is there to confirm it.
    nodes.kubectl(
        "delete", "pod", "-n", namespace, "unlucky", "--force", "--grace-period=0", "--ignore-not-found"
    )
    nodes.kubectl("delete", "node", "doomed")
