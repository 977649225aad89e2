"""Servers on Kubernetes: how much room there is for them, and how the page says it. No cluster, no Hub."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from gpu_pool.cluster.dialects import Node, Pod
from gpu_pool.courses import parse_course
from gpu_pool_client import DeviceStatus
from gpu_pool_spawner.choices import OwnCourses
from gpu_pool_spawner.kube_choices import granted_instead, server_choices
from gpu_pool_spawner.kube_cluster import UNBOUNDED, ClusterSupply, capacity, next_capacity
from gpu_pool_spawner.page import SpawnPage, spawn_page
from gpu_pool_spawner.pool_view import PoolSupply
from support.clusters import hami, node, plain, pod
from support.kube_profiles import HAMI, NOW, PODS, SERVER, WHOLE, dialect, profile
from support.pools import V100


def holding(name: str, gpus: int, *, hours: float | None = None, on: str = "n1") -> Pod:
    ends = None if hours is None else NOW + timedelta(hours=hours)
    return replace(pod(name, on, limits={"nvidia.com/gpu": gpus}), ends=ends)


def test_room_is_what_is_not_held() -> None:
    assert capacity(profile("1", WHOLE), ClusterSupply(WHOLE)) == 2
    assert capacity(profile("1", WHOLE), ClusterSupply(WHOLE, (holding("a", 1),))) == 1
    assert capacity(profile("2", WHOLE), ClusterSupply(WHOLE, (holding("a", 1),))) == 0
    assert capacity(profile("1", WHOLE), ClusterSupply(WHOLE, (holding("a", 2),))) == 0
    assert capacity(profile("1", WHOLE), ClusterSupply(WHOLE, (), frozenset({"n1"}))) == 0


def test_slices_of_all_nodes_are_room() -> None:
    assert capacity(profile("2%"), ClusterSupply(HAMI)) == 100
    assert capacity(profile("5%"), ClusterSupply(HAMI)) == 40


def test_resources_that_nodes_count_bound_the_room() -> None:
    full = hami("n1", count=50)
    full["status"]["allocatable"]["nvidia.com/gpumem"] = "2000"
    counted = dialect(full)
    assert capacity(profile("2%", counted), ClusterSupply(counted)) == 3
    held = pod("a", "n1", limits={"nvidia.com/gpumem": 1400})
    assert capacity(profile("2%", counted), ClusterSupply(counted, (held,))) == 0


def test_gpus_that_no_node_shows_are_not_told_to_be_full() -> None:
    bitfusion = dialect(node(allocatable={"bitfusion.io/gpu": 1000}), node("n2"))
    assert not bitfusion.gpus()
    supply = ClusterSupply(bitfusion)
    assert capacity(profile("2%", bitfusion), supply) == UNBOUNDED
    for choice in server_choices({"ml": SERVER}, supply, NOW, may_wait=False)["ml"]:
        assert choice.usable
        assert choice.about.endswith(", the cluster does not show how many are free")
    away = ClusterSupply(bitfusion, away=frozenset({"n1", "n2"}))
    assert capacity(profile("2%", bitfusion), away) == 0


def test_what_nodes_count_bounds_the_room_for_gpus_that_no_node_shows() -> None:
    counting = dialect(node(allocatable={"bitfusion.io/gpu": 1000, "bitfusion.io/gpu-amount": 3}))
    held = pod("a", "n1", limits={"bitfusion.io/gpu-amount": 1})
    assert capacity(profile("2%", counting), ClusterSupply(counting, (held,))) == 2
    assert capacity(profile("2%", counting), ClusterSupply(counting, (held,) * 3)) == 0


@pytest.mark.parametrize(("kind", "text"), [(hami, "2%"), (plain, "1")])
def test_a_cordoned_node_has_no_room(kind: Any, text: str) -> None:
    away = kind("n1")
    away["spec"]["unschedulable"] = True
    both, left = dialect(kind("n1"), kind("n2")), dialect(away, kind("n2"))
    assert (
        2 * capacity(profile(text, left), ClusterSupply(left))
        == capacity(profile(text, both), ClusterSupply(both))
        > 0
    )


def test_there_is_room_again_when_enough_have_ended() -> None:
    both = ClusterSupply(WHOLE, (holding("a", 1, hours=3), holding("b", 1, hours=1)))
    assert next_capacity(profile("1", WHOLE), both) == NOW + timedelta(hours=1)
    assert next_capacity(profile("2", WHOLE), both) == NOW + timedelta(hours=3)
    endless = ClusterSupply(WHOLE, (holding("a", 1), holding("b", 1, hours=1)))
    assert next_capacity(profile("2", WHOLE), endless) is None
    assert next_capacity(profile("1", WHOLE), endless) == NOW + timedelta(hours=1)


def test_the_page_offers_what_can_be_started_and_says_why_not() -> None:
    supply = ClusterSupply(WHOLE, (holding("a", 1, hours=1.51),))
    small, two = server_choices({"ml": SERVER, "pods": PODS}, supply, NOW, may_wait=False)["ml"]
    assert (small.value, small.usable) == ("ml/Small", False)
    assert "not available on this cluster" in small.about
    assert (two.value, two.usable) == ("ml/Two", False)
    assert two.about == "2 whole GPUs, none free now; more is free in at most 1h31min"
    (_, freed) = server_choices({"ml": SERVER}, ClusterSupply(WHOLE), NOW, may_wait=False)["ml"]
    assert (freed.about, freed.usable) == ("2 whole GPUs, 1 free now", True)
    html = spawn_page(
        SpawnPage(OwnCourses({"ml": SERVER}), None, NOW, last="ml/Two", servers={"ml": [small, freed]})
    )
    assert 'value="ml/Small" required disabled' in html
    assert 'value="ml/Two" required checked' in html
    assert "does not answer" not in html


def test_what_the_cluster_rounds_up_is_said_and_counted_on_the_page() -> None:
    text = b"title: ML\nslices: [{name: Odd, request: 14%}]"
    pods = parse_course("ml.yaml", text)
    server = parse_course("ml.yaml", text + b"\nkubernetes: {kernels: server}")
    fifths = ClusterSupply(dialect(plain("n1", replicas=5)))
    words = "14% of a GPU (20% of a GPU on this cluster)"
    (choice,) = server_choices({"ml": server}, fifths, NOW, may_wait=False)["ml"]
    assert choice.about == f"{words}, 5 free now"
    granted = granted_instead({"ml": pods}, fifths)
    pool = PoolSupply((DeviceStatus(V100, 0, 0, 0, 0),))
    html = spawn_page(SpawnPage(OwnCourses({"ml": pods}), pool, NOW, granted=granted))
    assert words in html
    assert "5 free now" in html
    assert not granted_instead({"ml": pods}, ClusterSupply(HAMI))
    assert not granted_instead({"ml": pods}, None)


def test_without_a_look_at_the_cluster_nothing_can_be_chosen() -> None:
    offered = server_choices({"ml": SERVER}, None, NOW, may_wait=True)["ml"]
    assert not any(each.usable for each in offered)


def test_where_nodes_are_added_one_may_wait() -> None:
    full = ClusterSupply(WHOLE, (holding("a", 2),))
    (_, two) = server_choices({"ml": SERVER}, full, NOW, may_wait=True)["ml"]
    assert two.usable
    assert isinstance(full.dialect.cluster.nodes[0], Node)
    assert not capacity(replace(profile("1", WHOLE)), full)
