"""The cluster as the Hub reads it, from an API server that is small and refuses at will."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gpu_pool.cluster.api import connect
from gpu_pool.courses import parse_course
from gpu_pool_client import parse_request
from gpu_pool_spawner.kube_cluster import ClusterReader, ClusterSupply, capacity, next_capacity
from gpu_pool_spawner.kube_profiles import profile_of
from gpu_pool_spawner.pool_view import log_once
from support.clusters import hami, listed, named, plain, resource_slice
from support.fake_kubernetes import FakeKubernetes, fake_kubernetes, trouble

COURSE = parse_course(
    "ml.yaml", b"title: ML\nslices: [{name: S, request: 2%}]\nkubernetes: {kernels: server}"
)


@pytest.fixture
async def fake() -> AsyncIterator[FakeKubernetes]:
    async with fake_kubernetes() as fake:
        yield fake


@pytest.fixture
async def reader(fake: FakeKubernetes, tmp_path: Path) -> AsyncIterator[ClusterReader]:
    log_once.cache_clear()
    api = await connect(str(fake.kubeconfig(tmp_path / "kubeconfig")))
    yield ClusterReader(api)
    await api.close()


def shown() -> dict[str, Any]:
    return plain("n1", replicas=50, strategy="time-slicing")


def running(**spec: Any) -> dict[str, Any]:
    """Return a pod that holds one replica since noon."""
    containers = [{"resources": {"limits": {"nvidia.com/gpu": "1"}}}]
    return {
        "metadata": {"namespace": "hub", "name": "jupyter-ada"},
        "spec": {"nodeName": "n1", "containers": containers, **spec},
        "status": {"phase": "Running", "startTime": "2026-11-02T12:00:00Z"},
    }


async def look(reader: ClusterReader) -> ClusterSupply:
    supply = await reader.supply(fresh=True)
    assert supply is not None
    return supply


def room(supply: ClusterSupply, text: str = "2%") -> int:
    return capacity(profile_of("ml", COURSE, parse_request(text), supply.dialect), supply)


async def test_gpus_that_a_node_does_not_show_for_a_moment_have_no_room_and_are_not_taken_for_none(
    fake: FakeKubernetes, reader: ClusterReader
) -> None:
    silent = shown()
    silent["status"]["allocatable"]["nvidia.com/gpu"] = "0"
    rooms = []
    for node in (shown(), silent, shown()):
        fake.put("nodes", node)
        rooms.append(room(await look(reader)))
    assert rooms == [50, 0, 50]


def _unready(node: dict[str, Any]) -> None:
    node["status"]["conditions"] = [{"type": "Ready", "status": "Unknown"}]


def _cordoned(node: dict[str, Any]) -> None:
    node["spec"]["unschedulable"] = True


@pytest.mark.parametrize("close", [_unready, _cordoned])
async def test_a_node_that_takes_no_pods_has_no_room(
    fake: FakeKubernetes, reader: ClusterReader, close: Callable[[dict[str, Any]], None]
) -> None:
    node = shown()
    close(node)
    fake.put("nodes", node)
    assert room(await look(reader)) == 0


async def test_pods_hold_their_part_until_their_deadline(fake: FakeKubernetes, reader: ClusterReader) -> None:
    fake.put("nodes", plain("n1", replicas=2, strategy="time-slicing"))
    fake.put("pods", running(activeDeadlineSeconds=3600))
    fake.put("pods", {**running(), "metadata": {"namespace": "hub", "name": "two"}})
    supply = await look(reader)
    assert room(supply, "50%") == 0
    profile = profile_of("ml", COURSE, parse_request("50%"), supply.dialect)
    assert next_capacity(profile, supply) == datetime(2026, 11, 2, 13, tzinfo=timezone.utc)
    fake.change("pods", "two", phase="Succeeded")
    assert room(await look(reader), "50%") == 1


async def test_claims_are_read_where_there_are_classes_of_devices(
    fake: FakeKubernetes, reader: ClusterReader
) -> None:
    group = "/apis/resource.k8s.io/v1"
    fake.absent.clear()
    fake.put("nodes", plain("n1"))
    await look(reader)
    assert not any("resourceslices" in path for _, path in fake.requests)
    fake.put_of(group, "deviceclasses", *named("gpu.nvidia.com"))
    fake.put_of(group, "resourceslices", resource_slice(listed("gpu-0", default="0")))
    again = ClusterReader(reader._api)
    assert (await look(again)).dialect.table.name == "dra"


async def test_what_may_not_be_read_counts_as_not_there_and_the_log_says_so_once(
    fake: FakeKubernetes, reader: ClusterReader, caplog: pytest.LogCaptureFixture
) -> None:
    fake.put("nodes", shown())
    fake.put("pods", running())
    fake.before_read = lambda kind: trouble(403, "Forbidden", "not yours") if kind == "pods" else None
    for _ in range(2):
        assert room(await look(reader)) == 50
    (told,) = [each for each in caplog.messages if "No permission to read" in each]
    assert told.endswith("treated as empty: pods cannot be read: not yours")


async def test_without_nodes_nothing_is_known_and_the_log_says_why(
    fake: FakeKubernetes, reader: ClusterReader, caplog: pytest.LogCaptureFixture
) -> None:
    fake.put("nodes", hami("n1"))
    fake.before_read = lambda kind: trouble(403, "Forbidden", "not yours") if kind == "nodes" else None
    assert await reader.supply() is None
    assert "nodes cannot be read, so no GPU can be granted: 403 Forbidden: not yours" in caplog.text


async def test_whatever_keeps_the_cluster_from_being_read_nothing_is_known_and_the_log_says_why(
    fake: FakeKubernetes, reader: ClusterReader, caplog: pytest.LogCaptureFixture
) -> None:
    fake.put("nodes", shown())
    odd = {"metadata": {"resourceVersion": "1"}, "items": ["odd"]}
    fake.before_read = lambda kind: web.json_response(odd) if kind == "nodes" else None
    assert await reader.supply(fresh=True) is None
    assert "nodes cannot be understood, so no GPU can be granted: " in caplog.text
    fake.before_read = lambda _: None
    assert room(await look(reader)) == 50


def no_such_group(kind: str) -> web.Response | None:
    """Answer as an API server does that has no version of a group, such as DRA's."""
    return web.Response(status=404, text="404 page not found\n") if kind == "deviceclasses" else None


async def test_a_cluster_without_a_group_of_objects_has_gpus_all_the_same(
    fake: FakeKubernetes, reader: ClusterReader
) -> None:
    fake.put("nodes", shown())
    fake.absent.clear()
    fake.before_read = no_such_group
    assert room(await look(reader)) == 50


async def test_where_pods_are_said_not_to_be_there_nothing_is_taken_for_free(
    fake: FakeKubernetes, reader: ClusterReader
) -> None:
    fake.put("nodes", shown())
    fake.absent.add("pods")
    assert await reader.supply() is None


async def test_whoever_chooses_at_the_same_time_asks_once(
    fake: FakeKubernetes, reader: ClusterReader
) -> None:
    fake.put("nodes", shown())
    await reader.supply()
    before = len(fake.requests)
    await reader.supply()
    assert len(fake.requests) == before
