"""What ``gpu-pool doctor --cluster`` says of node agents, of images on nodes, and of prepared pods."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from gpu_pool.cli.checks import check_prepared
from gpu_pool.cli.cluster_checks import (
    Fetch,
    check_images,
    checks_of_agents,
    checks_of_suspension,
    full_name,
    longest_fetches,
    prepared_of,
)


def pod(node: str, *, ready: bool = True, placed: bool = True, **status: Any) -> dict[str, Any]:
    fields = [{"key": "metadata.name", "operator": "In", "values": [node]}]
    needed = {"nodeSelectorTerms": [{"matchFields": fields}]}
    affinity = {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": needed}}
    spec: dict[str, Any] = {"affinity": affinity, **({"nodeName": node} if placed else {})}
    conditions = [{"type": "Ready", "status": str(ready)}]
    return {
        "metadata": {"name": f"agent-{node}", "namespace": "agents"},
        "spec": spec,
        "status": {"phase": "Running", "conditions": conditions, **status},
    }


def look(nodes: list[str], *pods: dict[str, Any]) -> list[tuple[str, str, str]]:
    return [(each.state, each.text, each.remedy) for each in checks_of_agents(nodes, pods)]


def test_of_a_cluster_without_agents_it_says_what_is_not_known() -> None:
    ((state, text, remedy),) = look(["a"])
    assert state == "note"
    assert "no watchdog watches it" in text
    assert "nodeAgent.enabled=true" in remedy
    assert look([]) == []


def test_nodes_whose_agents_report_are_counted() -> None:
    assert look(["a", "b"], pod("a"), pod("b"), pod("b", ready=False)) == [
        ("ok", "2 of 2 nodes with GPUs have an agent whose reports are taken", "")
    ]


def test_each_other_node_is_named_with_why() -> None:
    waiting = {"waiting": {"reason": "ImagePullBackOff", "message": "no such image"}}
    found = look(
        ["a", "b", "c", "d", "e"],
        pod("a"),
        pod("b", ready=False),
        pod("c", ready=False, phase="Pending", containerStatuses=[{"state": waiting}]),
        pod("d", ready=False, placed=False, phase="Pending"),
    )
    assert found[0][:2] == ("note", "1 of 5 nodes with GPUs have an agent whose reports are taken")
    texts = [text for _, text, _ in found[1:]]
    assert texts == [
        "b has an agent whose reports are not taken",
        "c has an agent that does not run: ImagePullBackOff no such image",
        "d has an agent whose pod is Pending",
        "e has no agent's pod",
    ]
    assert found[1][2] == "its log says why: kubectl -n agents logs agent-b --tail=3"
    assert "nvidia.com/gpu.present=true" in found[4][2]


def test_of_very_many_not_all_are_named() -> None:
    nodes = [f"n{each:03}" for each in range(100)]
    found = look(nodes, pod("n000"))
    assert len(found) == 22
    assert found[-1][1] == "and 79 more nodes"


def test_what_agents_can_suspend_is_what_their_logs_say() -> None:
    can = "INFO: What kernels keep on {} of 2 GPUs can be moved to this node's memory\n"
    why = "INFO: Nothing is moved off GPU-9, since it needs driver 570 or newer, and this is 550\n"
    assert list(checks_of_suspension({})) == []
    (check,) = checks_of_suspension({"a": can.format(2), "b": can.format(1) + can.format(2)})
    assert (check.state, check.text) == (
        "ok",
        "2 of them suspend kernels: what these keep can be moved off 4 of 4 GPUs",
    )
    found = list(checks_of_suspension({"a": can.format(1) + why, "b": ""}))
    assert [(each.state, each.text) for each in found] == [
        ("note", "2 of them suspend kernels: what these keep can be moved off 1 of 2 GPUs"),
        ("note", "a: nothing is moved off GPU-9, since it needs driver 570 or newer, and this is 550"),
        ("note", "b: not known yet"),
    ]


IMAGE = "registry.example.org/gpu-kernel:1"


def node(*images: str) -> Mapping[str, Any]:
    return {"status": {"images": [{"names": [f"{image}@sha256:0", image]} for image in images]}}


def fetched(message: str, host: str = "node-1") -> Mapping[str, Any]:
    return {"reason": "Pulled", "message": message, "source": {"host": host}}


def look_at_images(
    nodes: Sequence[Any], fetches: Mapping[str, Fetch] | None = None
) -> list[tuple[str, str, str]]:
    found = check_images([IMAGE], nodes, fetches or {})
    return [(each.state, each.text, each.remedy) for each in found]


def test_a_node_without_the_image_lets_its_first_kernel_wait() -> None:
    ((state, text, remedy),) = look_at_images([node(IMAGE), node("other:1")])
    assert state == "note"
    assert text.startswith(f"{IMAGE} is on 1 of 2 nodes with GPUs: the first kernel on each other node waits")
    assert "gpu-pool courses export --images" in remedy


def test_what_fetching_took_is_said() -> None:
    ((state, text, _),) = look_at_images([node(IMAGE)], {IMAGE: Fetch("node-2", 83.4)})
    assert (state, text) == (
        "ok",
        f"{IMAGE} is on 1 of 1 nodes with GPUs; it took 1min23s to get to node-2",
    )


def test_a_node_that_does_not_name_all_of_its_images_is_left_out() -> None:
    many = node(*(f"other:{number}" for number in range(50)))
    assert look_at_images([many]) == []
    ((state, text, _),) = look_at_images([many, node(IMAGE)])
    assert (state, text) == ("ok", f"{IMAGE} is on 1 of 1 nodes with GPUs")
    assert look_at_images([node(IMAGE, *(f"other:{number}" for number in range(49)))])[0][0] == "ok"


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("in 1m23.4s (2m0.5s including waiting). Image size: 3400000000 bytes.", 120.5),
        ("in 850ms (850ms including waiting)", 0.85),
        ("in 1h0m5s", 3605.0),
    ],
)
def test_kubelets_say_how_long_it_took(said: str, seconds: float) -> None:
    (found,) = longest_fetches([fetched(f'Successfully pulled image "{IMAGE}" {said}')]).values()
    assert found == Fetch("node-1", pytest.approx(seconds))


def test_the_longest_fetch_counts_and_an_image_that_was_there_is_none() -> None:
    words = 'Successfully pulled image "{}" in {} ({} including waiting). Image size: 1 bytes.'
    events = [fetched(words.format(IMAGE, each, each), each) for each in ("3s", "1m0s", "40s")]
    events.append(fetched(f'Container image "{IMAGE}" already present on machine'))
    events.append({"reason": "Pulled"})
    assert longest_fetches(events) == {IMAGE: Fetch("1m0s", 60.0)}


@pytest.mark.parametrize(
    ("image", "name"),
    [
        ("python", "docker.io/library/python:latest"),
        ("jupyter/base:1", "docker.io/jupyter/base:1"),
        ("localhost/a", "localhost/a:latest"),
        ("example.org:5000/a/b", "example.org:5000/a/b:latest"),
        ("example.org/a@sha256:0", "example.org/a@sha256:0"),
    ],
)
def test_an_image_is_compared_by_its_full_name(image: str, name: str) -> None:
    assert full_name(image) == name


PREFIX = "jupyter-gpu-pool"


def pod_of_course(uid: str, labels: dict[str, str], *, owner: str = "", **more: Any) -> dict[str, Any]:
    metadata: dict[str, Any] = {"uid": uid, "labels": {f"{PREFIX}/course": "ml", **labels}}
    metadata["annotations"] = {f"{PREFIX}/node": "n1"}
    metadata["ownerReferences"] = [{"uid": owner}] if owner else []
    return {"metadata": metadata, **more}


def server(uid: str) -> dict[str, Any]:
    made = pod_of_course(uid, {"app.kubernetes.io/component": "singleuser-server"})
    made["metadata"]["annotations"] = {"hub.jupyter.org/username": uid}
    return made


def kernel(owner: str, **labels: str) -> dict[str, Any]:
    about = {"app.kubernetes.io/component": "gpu-kernel", f"{PREFIX}/lease": "1-a", **labels}
    return pod_of_course(f"kernel-of-{owner}", about, owner=owner)


def prepared(owner: str, *, runs: bool) -> dict[str, Any]:
    made = kernel(owner, **{f"{PREFIX}/prepared": "digits"})
    del made["metadata"]["labels"][f"{PREFIX}/lease"]
    if runs:
        made["status"] = {"podIP": "10.0.0.9", "containerStatuses": [{"state": {"running": {}}}]}
    return made


HOLDER = {"metadata": {"uid": "holder", "labels": {f"{PREFIX}/device-holder": "gpu-pool"}}}


def said(*pods: dict[str, Any], is_shared: bool = True) -> tuple[str, str]:
    (found,) = check_prepared(prepared_of({"ml": 5}, pods, "hub", "gpu-pool", is_shared=is_shared))
    assert found.name == "prepared pods"
    return found.state, found.text


def test_how_many_there_are_and_where() -> None:
    pods = [server(each) for each in ("ada", "bob", "eve")]
    pods += [prepared("ada", runs=True), prepared("bob", runs=False), kernel("eve"), HOLDER]
    assert said(*pods) == ("ok", "ml: 1 of at most 5 ready (n1: 1), 1 starting")


def test_who_begins_in_one_has_it_no_more() -> None:
    taken = kernel("ada", **{f"{PREFIX}/prepared": "digits"})
    assert said(server("ada"), taken, HOLDER) == ("ok", "ml: 0 of at most 5 ready")


@pytest.mark.parametrize(
    ("pods", "is_shared", "why"),
    [
        ([], True, "No notebook server of the course runs."),
        ([server("ada")], False, "a GPU comes with its pod"),
        ([server("ada")], True, "The pool has no GPU now"),
        ([server("ada"), HOLDER], True, "kubectl -n hub exec deploy/gpu-pool -- gpu-pool health"),
    ],
)
def test_why_there_is_none(pods: list[dict[str, Any]], is_shared: bool, why: str) -> None:
    state, text = said(*pods, is_shared=is_shared)
    assert state == "note"
    assert text.startswith("ml: 0 of at most 5 ready. ")
    assert why in text
