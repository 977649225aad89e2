"""Kubernetes quantities, and objects of which nothing can be taken for granted."""

from __future__ import annotations

from datetime import datetime, timezone

import pytest

from gpu_pool.cluster.dialects import Cluster, Node, Pod
from gpu_pool.cluster.dialects.device_plugin import DevicePlugin
from gpu_pool.cluster.dialects.objects import mib, quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10", 10),
        (10, 10),
        ("32Gi", 32 * 2**30),
        ("8000M", 8_000_000_000),
        ("1.5Ki", 1536),
        ("500m", 0),
        ("2500m", 2),
        ("1e3", 1000),
        ("12E", 12 * 10**18),
        ("", 0),
        ("Gi", 0),
        ("1.2.3", 0),
        ("NaN", 0),
        (None, 0),
    ],
)
def test_quantities(text: object, value: int) -> None:
    assert quantity(text) == value


def test_bytes_are_read_in_whole_mib() -> None:
    assert (mib("655Mi"), mib("1G")) == (655, 953)


def test_pods_that_have_finished_hold_nothing() -> None:
    assert Pod.read({"status": {"phase": "Succeeded"}}) is None
    assert Pod.read({"status": {"phase": "Failed"}}) is None


@pytest.mark.parametrize(
    ("seconds", "started", "ends"),
    [
        (3600, "2026-11-02T12:00:00Z", datetime(2026, 11, 2, 13, tzinfo=timezone.utc)),
        (None, "2026-11-02T12:00:00Z", None),
        (3600, None, None),
        (3600, "noon", None),
        (10**30, "2026-11-02T12:00:00Z", None),
    ],
)
def test_a_pod_ends_at_its_deadline(seconds: object, started: object, ends: datetime | None) -> None:
    found = Pod.read({"spec": {"activeDeadlineSeconds": seconds}, "status": {"startTime": started}})
    assert found is not None
    assert found.ends == ends


def test_limits_of_all_containers_are_added_up() -> None:
    containers = [{"resources": {"limits": {"nvidia.com/gpu": "1"}}} for _ in range(2)]
    found = Pod.read({"spec": {"containers": containers}})
    assert found is not None
    assert found.limit("nvidia.com/gpu") == 2


def test_a_node_that_claims_a_billion_gpus_is_not_believed() -> None:
    node = Node("n", allocatable={"nvidia.com/gpu": 10**9})
    assert len(DevicePlugin(Cluster((node,))).gpus()) == 1024


def test_nodes_are_in_the_order_of_their_names() -> None:
    nodes = [{"metadata": {"name": name}} for name in ("b", "a")]
    assert [node.name for node in Cluster.read(nodes).nodes] == ["a", "b"]
    assert Cluster.read(nodes).node("missing") == Node("missing")
