"""The cluster as the Hub sees it while a device plugin is being replaced. No cluster."""

from __future__ import annotations

from typing import Any

from gpu_pool.courses import parse_course
from gpu_pool_client import parse_request
from gpu_pool_spawner.kube_capacity import capacity
from gpu_pool_spawner.kube_cluster import ClusterReader
from gpu_pool_spawner.kube_profiles import profile_of
from support.clusters import plain

COURSE = parse_course(
    "ml.yaml", b"title: ML\nslices: [{name: S, request: 2%}]\nkubernetes: {kernels: server}"
)


class Sight(ClusterReader):
    """Sees the nodes that it is given."""

    def __init__(self, *nodes: dict[str, Any]) -> None:
        super().__init__(api=None)  # type: ignore[arg-type]
        self.nodes = list(nodes)

    async def _list(self, path: str, accept: str = "") -> list[dict[str, Any]]:
        del accept
        return self.nodes if path == "/api/v1/nodes" else []


def shown() -> dict[str, Any]:
    return plain("n1", replicas=50, strategy="time-slicing")


async def test_gpus_that_a_node_does_not_show_for_a_moment_have_no_room_and_are_not_taken_for_none() -> None:
    sight, request = Sight(shown()), parse_request("2%")
    rooms = []
    silent = shown()
    silent["status"]["allocatable"]["nvidia.com/gpu"] = "0"
    for node in (shown(), silent, shown()):
        sight.nodes = [node]
        supply = await sight.look(fresh=True)
        assert supply is not None
        rooms.append(capacity(profile_of("ml", COURSE, request, supply.dialect), supply))
    assert rooms == [50, 0, 50]
