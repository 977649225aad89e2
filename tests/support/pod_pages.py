"""Notebooks of a real Jupyter Server whose kernels are pods, and the service that starts these."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient

from support.control_plane import Cluster
from support.frontend import Frontend, listening
from support.jupyter_env import JupyterEnv, eventually
from support.kernel_pods import notebook, volume
from support.server import Server


def of_cluster(card: Cluster, namespace: str) -> str:
    """Return the settings of a service for the cluster."""
    return f"""
c.ServeApp.kubernetes = True
c.KubernetesSettings.kubeconfig = {str(card.kubeconfig)!r}
c.KubernetesSettings.namespace = {namespace!r}
"""


def add_server(card: Cluster, namespace: str, user: str, **more: Any) -> None:
    """Add the pod and the home of a notebook server, as a Hub does; the server itself is not in it here."""
    home = volume(f"claim-{user}", namespace, "ReadWriteMany")
    card.apply(*home, notebook(user, namespace, **more), namespace=namespace)


@asynccontextmanager
async def jupyter(jupyter_env: JupyterEnv, **variables: str) -> AsyncIterator[Server]:
    server = Server(jupyter_env, variables)
    try:
        await eventually(server.started)
        yield server
    finally:
        server.process.send_signal(signal.SIGKILL)
        await server.ended()


@asynccontextmanager
async def opened(server: Server, jupyter_env: JupyterEnv, name: str, kernel: str) -> AsyncIterator[Page]:
    """Open a notebook, and a page that shows it."""
    answer = await server.open_notebook(name, kernel)
    found = json.loads(answer.body)["kernel"]["id"]
    client = AsyncKernelClient()
    client.load_connection_file(str(jupyter_env.folder / "runtime" / f"kernel-{found}.json"))
    async with listening(client) as page:
        yield Page(server, found, page)


class Page:
    """A notebook in a browser."""

    def __init__(self, server: Server, kernel: str, frontend: Frontend) -> None:
        self._server, self._kernel = server, kernel
        self.run = frontend.run

    async def do(self, what: str, *, strict: bool = True) -> bool:
        """Interrupt or restart; return whether that was done, where it is not ``strict``."""
        answer = await self._server.ask("POST", f"api/kernels/{self._kernel}/{what}", {}, strict)
        return answer.code < 400

    async def resize(self, size: str) -> dict[str, Any]:
        """Ask for another size as JupyterLab's panel does; return what its user reads."""
        path = f"gpu-pool/api/slices/{self._kernel}/resize"
        found: dict[str, Any] = json.loads((await self._server.ask("POST", path, {"size": size})).body)
        return found

    async def shut_down(self) -> None:
        await self._server.ask("DELETE", f"api/kernels/{self._kernel}")


def kernels(card: Cluster, namespace: str) -> list[Any]:
    found: list[Any] = card.get("pods", "-n", namespace, "-l", "app.kubernetes.io/component=gpu-kernel")[
        "items"
    ]
    return found


async def nothing_runs(card: Cluster, namespace: str) -> bool:
    """Whether there is no kernel's pod."""
    return not await asyncio.to_thread(kernels, card, namespace)
