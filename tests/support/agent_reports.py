"""What the agent of a node reports, with a token of a real cluster, said by the test in the agent's place."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

from tornado.httpclient import AsyncHTTPClient

from support.control_plane import Cluster

ACCOUNT = "agent"
#: Seconds between two reports: 120 a minute are taken.
_EVERY = 0.6


def add_agent(cluster: Cluster, namespace: str, node: str) -> str:
    """Add the pod of a node's agent, which does nothing itself, and return its token."""
    account = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": ACCOUNT}}
    container = {"name": "agent", "image": "example.org/agent:1", "command": ["sleep", "600"]}
    spec = {
        "nodeName": node,
        "serviceAccountName": ACCOUNT,
        "containers": [container],
        "terminationGracePeriodSeconds": 0,
    }
    agent = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "agent"}, "spec": spec}
    cluster.apply(account, agent, namespace=namespace)
    bound = ("--audience=gpu-pool", "--bound-object-kind=Pod", "--bound-object-name=agent")
    return cluster.kubectl("create", "token", ACCOUNT, "-n", namespace, *bound).strip()


@asynccontextmanager
async def reporting(
    url: str, token: str, device: str, uses: Sequence[Mapping[str, Any]] = ()
) -> AsyncIterator[None]:
    """Say again and again to the service at a URL what is used of the node's only device."""
    told = [{"container": "", "device": device, **use} for use in uses]
    body = json.dumps({"devices": [device], "uses": told, "complete": True})
    headers = {"Authorization": f"Bearer {token}"}

    async def say() -> None:
        while True:
            await AsyncHTTPClient().fetch(f"{url}/api/v1/node/use", method="POST", headers=headers, body=body)
            await asyncio.sleep(_EVERY)

    saying = asyncio.create_task(say())
    try:
        yield
        assert not saying.done(), saying.exception()
    finally:
        saying.cancel()
        with suppress(asyncio.CancelledError):
            await saying
