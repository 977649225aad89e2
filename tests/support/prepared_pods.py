"""Kernels that begin in prepared pods, in turn with others in pods of their own, and how long both take."""

from __future__ import annotations

import asyncio
import base64
import json
import statistics
import time
from contextlib import suppress
from typing import Any

from gpu_pool_provisioner.launchers.supervised import SupervisorAway, SupervisorConnection
from support.control_plane import Cluster
from support.frontend import frontend
from support.jupyter_env import Managers, eventually
from support.pod_pages import kernels
from support.supervisors import IS_FORKED

COURSE = """
title: ML
slices: [{name: S, request: 2%}]
preload: [json.tool]
kubernetes: {prepared_pods: 3}
"""
#: Seconds in which a pod is there, on two cores that have other things to do.
LONG = 120
_WAITS = "jupyter-gpu-pool/prepared,!jupyter-gpu-pool/lease"
_CELL = f"import os, sys; print(os.environ['OWN'], 'json.tool' in sys.modules, {IS_FORKED})"


def with_lease(cluster: Cluster, namespace: str) -> list[Any]:
    """Return the pods in which kernels run."""
    found = kernels(cluster, namespace)
    return [each for each in found if "jupyter-gpu-pool/lease" in each["metadata"]["labels"]]


async def _is_ready(cluster: Cluster, namespace: str) -> bool:
    """Whether a pod waits that has imported everything."""
    pods = await asyncio.to_thread(cluster.get, "pods", "-n", namespace, "-l", _WAITS)
    for pod in pods["items"]:
        name, address = pod["metadata"]["name"], pod["status"].get("podIP")
        if pod["status"]["phase"] != "Running" or not address:
            continue
        secret = await asyncio.to_thread(cluster.get, "secret", "-n", namespace, name)
        key = json.loads(base64.b64decode(secret["data"]["connection.json"]))["key"].encode()
        with suppress(SupervisorAway):
            asked = await SupervisorConnection.connect(address, key, within=10)
            is_importing = (await asked._ask({"verb": "state"}))["importing"]
            asked.close()
            return not is_importing
    return False


async def _begun(
    manager: Managers, cluster: Cluster, namespace: str, kernel: str, *, prepared: bool
) -> float:
    """Start a kernel, and return after how many seconds its first cell had its reply; restart and end it."""
    km = manager(kernel)
    began = time.perf_counter()
    await km.start_kernel()
    # At once, and not through a page, which first listens for a while whether everything was said to it.
    client = km.client()
    client.start_channels(iopub=False, stdin=False, hb=False, control=False)
    await client.execute("1", reply=True, timeout=LONG)
    took = time.perf_counter() - began
    client.stop_channels()
    async with frontend(km) as page:
        assert (await page.run(_CELL).done(within=LONG)).outputs == [f"mine {prepared} True\n"]
        (pod,) = await asyncio.to_thread(with_lease, cluster, namespace)
        assert ("jupyter-gpu-pool/prepared" in pod["metadata"]["labels"]) is prepared
        await page.run("x = 1").done()
        await km.restart_kernel()
        assert (await page.run("print('x' in dir())").done()).outputs == ["False\n"]
        (after,) = await asyncio.to_thread(with_lease, cluster, namespace)
        assert after["metadata"]["uid"] == pod["metadata"]["uid"]
    await km.shutdown_kernel()
    await eventually(
        lambda: asyncio.to_thread(with_lease, cluster, namespace), lambda found: not found, within=LONG
    )
    return took


async def compared(
    manager: Managers, cluster: Cluster, namespace: str, *, prepared: str, other: str, rounds: int
) -> dict[bool, list[float]]:
    """Start kernels of a course with prepared pods and of none in turn; return what they took, in seconds."""
    took: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        await eventually(lambda: _is_ready(cluster, namespace), within=LONG)
        took[True].append(await _begun(manager, cluster, namespace, prepared, prepared=True))
        took[False].append(await _begun(manager, cluster, namespace, other, prepared=False))
    return took


def told(took: dict[bool, list[float]]) -> str:
    """Say what was measured."""
    own, waiting = (statistics.median(took[each]) for each in (False, True))
    every = {each: ", ".join(f"{seconds:.2f}" for seconds in found) for each, found in took.items()}
    return (
        f"from the click to the first reply: {waiting:.3f} s in a prepared pod ({every[True]}), "
        f"{own:.3f} s in one of its own ({every[False]}), {waiting / own:.2f} of that"
    )
