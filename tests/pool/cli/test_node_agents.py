"""What ``gpu-pool doctor --cluster`` says of the agents of nodes."""

from __future__ import annotations

from typing import Any

from gpu_pool.cli.node_agents import checks_of_agents, checks_of_suspension


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
