"""A real JupyterHub whose servers are pods of a cluster for tests, with the rights of our example alone."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import yaml

from support.control_plane import Cluster
from support.hub_with_proxy import ROOT, Hub, need_proxy
from support.kube_courses import COURSES, GROUPS

RIGHTS = ROOT / "examples" / "kubernetes" / "hub-rbac.yaml"
_CONFIG = """
c.JupyterHub.spawner_class = "gpu_pool_spawner.kube.GPUPoolKubeSpawner"
c.JupyterHub.init_spawners_timeout = 0
# Reached by the servers: on another machine than the cluster's, that is another address.
c.JupyterHub.hub_ip = {hub!r}
c.JupyterHub.hub_connect_ip = {hub!r}
c.Spawner.cmd = ["jupyterhub-singleuser"]
c.Spawner.environment = {{"GPU_POOL_COURSE": "what a server must not get"}}
c.KubeSpawner.namespace = {namespace!r}
c.KubeSpawner.image = {image!r}
c.KubeSpawner.start_timeout = 120
c.KubeSpawner.http_timeout = 90
c.KubeSpawner.delete_grace_period = 5
"""


@asynccontextmanager
async def running_kube_hub(cluster: Cluster, folder: Path, config: str = "") -> AsyncIterator[KubeHub]:
    """Run a Hub over the cluster, with more of a configuration."""
    need_proxy()
    hub = await asyncio.to_thread(KubeHub, cluster, folder, config)
    await hub.start()
    try:
        yield hub
    finally:
        await hub.end()


class KubeHub(Hub):
    """A Hub that may do in the cluster what the example allows it."""

    def __init__(
        self,
        cluster: Cluster,
        folder: Path,
        config: str = "",
    ) -> None:
        self.namespace = f"hub-{secrets.token_hex(4)}"
        self._cluster, self._namespaces = cluster, [self.namespace]
        cluster.kubectl("create", "namespace", self.namespace)
        address = os.environ.get("GPU_POOL_TEST_HUB") or (
            cluster.agent.outside if cluster.agent else "127.0.0.1"
        )
        filled = _CONFIG.format(hub=address, namespace=self.namespace, image=cluster.image)
        environment = {"KUBECONFIG": str(self._log_in(folder))}
        config = filled + config.replace("NAMESPACE", self.namespace)
        super().__init__(folder, GROUPS, COURSES, config=config, environment=environment)

    async def end(self) -> None:
        """End it, and all its servers with their namespaces."""
        await super().end()
        self._cluster.kubectl("delete", "namespace", *self._namespaces, "--wait=false")

    def add_namespace(self, name: str) -> None:
        """Make a namespace in which the Hub may have servers, too."""
        self._cluster.kubectl("create", "namespace", name)
        self._namespaces.append(name)
        self._allow(name)

    def pod_of(self, user: str, namespace: str = "") -> dict[str, Any]:
        """Return the pod of a user's server."""
        selector = f"jupyter-gpu-pool/user={user}"
        found = self._cluster.get("pods", "-n", namespace or self.namespace, "-l", selector)
        (pod,) = found["items"]
        return dict(pod)

    def _allow(self, namespace: str) -> None:
        """Give the Hub's service account the rights of the example, there and in the cluster."""
        rights = RIGHTS.read_text().replace(
            "gpu-pool-hub-snapshot\n", f"gpu-pool-hub-snapshot-{self.namespace}\n"
        )
        documents = list(yaml.safe_load_all(rights))
        for each in documents:
            if "namespace" in each["metadata"]:
                each["metadata"]["namespace"] = namespace
            for subject in each.get("subjects", ()):
                subject["namespace"] = self.namespace
        self._cluster.kubectl("apply", "-f", "-", stdin=yaml.safe_dump_all(documents))

    def _log_in(self, folder: Path) -> Path:
        """Return a kubeconfig of the Hub's service account."""
        self._cluster.kubectl("create", "serviceaccount", "hub", "-n", self.namespace)
        self._allow(self.namespace)
        token = self._cluster.kubectl("create", "token", "hub", "-n", self.namespace, "--duration=1h")
        shown = self._cluster.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json")
        document = json.loads(shown)
        users = [{"name": each["name"], "user": {"token": token.strip()}} for each in document["users"]]
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / "kubeconfig"
        path.touch(mode=0o600)
        path.write_text(json.dumps({**document, "users": users}))
        return path
