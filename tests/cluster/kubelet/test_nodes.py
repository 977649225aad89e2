"""A real kubelet does with these pods what the nodes of the other tests do."""

from __future__ import annotations

import asyncio

from support.control_plane import Cluster
from support.jupyter_env import eventually
from support.probes import WRITTEN, writing


async def test_what_is_mounted_read_only_cannot_be_written_even_by_root(
    cluster: Cluster, namespace: str
) -> None:
    cluster.apply(*writing(cluster.image), namespace=namespace)

    async def has_ended() -> bool:
        found = await asyncio.to_thread(cluster.get, "pod", "-n", namespace, "writing")
        return bool(found["status"]["phase"] == "Succeeded")

    await eventually(has_ended)
    assert cluster.kubectl("logs", "-n", namespace, "writing") == WRITTEN
