"""Pods that wait for their kernels: what is decided of them, and why there are no more."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpu_pool.cluster.prepared_pods import PreparedFacts, PreparedPod, Server, ends, makes, statuses

NOW = 1_000.0
POD = PreparedPod("p1", "ada", "s1", "GPU-0", "n1", NOW - 10, is_running=True)
ADA = Server("ada", "ml", 5, "GPU-0", "n1")


def facts(*pods: PreparedPod, **more: Any) -> PreparedFacts:
    about = {
        "servers": [ADA],
        "shapes": {each.uid: "s1" for each in pods},
        "known": {each.uid for each in pods},
        "leases": {"GPU-0": 1},
        "crowded": (),
        "prepared_for": 60.0,
        "per_node": 10,
    }
    return PreparedFacts(pods=pods, **{**about, **more})


@pytest.mark.parametrize(
    ("pod", "more", "why"),
    [
        (POD, {}, None),
        (replace(POD, is_over=True), {}, "it has ended"),
        (POD, {"known": ()}, "its key is not known"),
        (POD, {"shapes": {}}, "its server, its volumes or its course have changed"),
        (POD, {"shapes": {"p1": "s2"}}, "its server, its volumes or its course have changed"),
        (POD, {"leases": {}}, "no slice of its GPU is held any more"),
        (POD, {"leases": {"GPU-0": 249}}, None),
        (POD, {"leases": {"GPU-0": 250}}, "as many kernels as can use its claim"),
        (POD, {"crowded": {"n1"}}, "a kernel finds no room on its machine"),
        (replace(POD, made_at=NOW - 60), {}, "no kernel has begun in it"),
    ],
)
def test_when_a_pod_ends(pod: PreparedPod, more: dict[str, Any], why: str | None) -> None:
    found = ends(facts(pod, **more), NOW)
    if why is None:
        assert found == {}
    else:
        assert why in found["p1"]


def test_of_two_of_one_server_the_newer_one_ends() -> None:
    other = replace(POD, uid="p2", made_at=NOW - 5)
    assert ends(facts(other, POD), NOW).keys() == {"p2"}


@pytest.mark.parametrize(
    ("server", "more", "is_made"),
    [
        (ADA, {}, True),
        (replace(ADA, has_kernel=True), {}, False),
        (replace(ADA, in_vain="It could not be made."), {}, False),
        (replace(ADA, device="", node=""), {}, False),
        (replace(ADA, most=0), {}, False),
        (ADA, {"per_node": 0}, False),
        (ADA, {"crowded": {"n1"}}, False),
        (ADA, {"leases": {"GPU-0": 248}}, True),
        (ADA, {"leases": {"GPU-0": 249}}, False),
    ],
)
def test_when_a_pod_is_made(server: Server, more: dict[str, Any], is_made: bool) -> None:
    assert makes(facts(servers=[server], **more)) == ([server] if is_made else [])


def test_no_more_are_made_than_a_course_and_a_node_may_have() -> None:
    servers = [Server(f"u{number}", f"c{number % 2}", 3, "GPU-0", "n1") for number in range(20)]
    assert [each.uid for each in makes(facts(servers=servers))] == ["u0", "u1", "u2", "u3", "u4", "u5"]
    assert len(makes(facts(servers=servers, per_node=4))) == 4
    have = replace(POD, server="u0")
    assert [each.uid for each in makes(facts(have, servers=servers))] == ["u1", "u2", "u3", "u4", "u5"]
    other = replace(have, node="n2")
    assert len(makes(facts(other, servers=servers, per_node=5))) == 5


@pytest.mark.parametrize(
    ("servers", "more", "why"),
    [
        ([], {}, "No notebook server of the course runs."),
        ([ADA], {}, ""),
        ([replace(ADA, has_kernel=True)], {"per_node": 0}, ""),
        ([replace(ADA, in_vain="It could not be made: quota.")], {}, "It could not be made: quota."),
        ([replace(ADA, device="", node="")], {}, "No slice is held of the GPU"),
        ([ADA], {"leases": {"GPU-0": 249}}, "as many kernels as can use its claim"),
        ([ADA], {"crowded": {"n1"}}, "A kernel finds no room on the machine n1."),
        ([replace(ADA, most=0)], {}, "as many as its file allows"),
        ([ADA], {"per_node": 0}, "prepared_per_node = 0"),
    ],
)
def test_it_is_said_why_there_are_no_more(servers: list[Server], more: dict[str, Any], why: str) -> None:
    (found,) = statuses(facts(servers=servers, **more), {"ml": 5})
    assert why in found.why
    assert bool(found.why) == bool(why)
    assert (found.course, found.most, found.ready, found.starting) == ("ml", 5, {}, 0)


def test_it_is_said_how_many_there_are() -> None:
    starts = replace(POD, uid="p2", server="bob", is_running=False)
    ended = replace(POD, uid="p3", server="eve", is_running=False, is_over=True)
    servers = [ADA, replace(ADA, uid="bob"), replace(ADA, uid="eve"), replace(ADA, uid="dan", course="other")]
    found, none = statuses(facts(POD, starts, ended, servers=servers), {"ml": 5, "other": 1})
    assert str(found) == "1 of at most 5 ready (n1: 1), 1 starting"
    assert str(none) == "0 of at most 1 ready"
