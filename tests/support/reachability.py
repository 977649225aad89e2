"""Who reaches whom in a cluster: pods that listen, an Internet outside it, and attempts to connect.

Each of them listens on every port of :data:`PORTS`, so that only a firewall can make a difference.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from support.control_plane import Cluster
from support.namespaces import Machine

#: Of the Hub, its proxy (for browsers and for the Hub), servers and the service, kernels; and one of nobody.
PORTS = (8081, 8000, 8001, 8888, 9749, 9750, 9755, 9756)
#: As KubeSpawner and the Hub's chart call them: their policies use these names.
_NAMES = {"hub": {8081: "http"}, "proxy": {8000: "http", 8001: "api"}}
_SERVER = {8888: "notebook-port"}
#: An address for documentation (RFC 5737), in the place of the Internet.
INTERNET = "203.0.113.1"
#: Where clouds hand out credentials: most of them, and Azure beside that.
METADATA = "169.254.169.254"
WIRESERVER = "168.63.129.16"
#: Of names. Only that other machine listens there: a pod's user may not.
DNS = 53
_LISTEN = """
import asyncio, sys
async def main():
    async def answer(reader, writer):
        writer.close()
    for port in sys.argv[1:]:
        await asyncio.start_server(answer, "0.0.0.0", int(port))
    print("listening", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
_CONNECT = """
import asyncio, json, sys
async def reaches(host, port):
    try:
        async with asyncio.timeout(10):
            _, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    writer.close()
    return True
async def main():
    targets = json.loads(sys.argv[1])
    print(json.dumps(await asyncio.gather(*(reaches(*each) for each in targets))))
asyncio.run(main())
"""


@dataclass(frozen=True)
class Listener:
    """A pod that listens: its labels are all by which policies know it."""

    name: str
    namespace: str
    labels: Mapping[str, str] = field(default_factory=dict)

    def pod(self, image: str) -> dict[str, Any]:
        """Return the pod."""
        component = self.labels.get("app.kubernetes.io/component", "")
        names = _SERVER if component == "singleuser-server" else _NAMES.get(component, {})
        container = {
            "name": "listener",
            "image": image,
            "command": ["python3", "-c", _LISTEN, *map(str, PORTS)],
            "ports": [{"containerPort": port, "name": name} for port, name in names.items()],
        }
        spec = {
            "containers": [container],
            "tolerations": [{"operator": "Exists"}],
            "terminationGracePeriodSeconds": 0,
        }
        about = {"name": self.name, "namespace": self.namespace, "labels": dict(self.labels)}
        return {"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": spec}


class Listeners:
    """Pods that run, by their names."""

    def __init__(self, cluster: Cluster, pods: Sequence[Listener]) -> None:
        """Start them, and wait until all listen."""
        self._cluster = cluster
        self._pods = {each.name: each for each in pods}
        for each in pods:
            cluster.apply(each.pod(cluster.image), namespace=each.namespace)
        for each in pods:
            words = ("wait", "-n", each.namespace, "--for=condition=Ready", f"pod/{each.name}")
            cluster.kubectl(*words, "--timeout=120s")

    def address(self, name: str) -> str:
        """Return the address of a pod."""
        found = self._cluster.get("pod", "-n", self._pods[name].namespace, name)
        return str(found["status"]["podIP"])

    async def reached(self, targets: Mapping[str, tuple[str, int]]) -> dict[str, set[str]]:
        """Return for each target, an address and a port, which of the pods can connect to it."""
        answers = await asyncio.gather(*(self._reaches(name, targets) for name in self._pods))
        seen = dict(zip(self._pods, answers, strict=True))
        return {each: {name for name in seen if each in seen[name]} for each in targets}

    async def _reaches(self, name: str, targets: Mapping[str, tuple[str, int]]) -> set[str]:
        words = ("exec", "-n", self._pods[name].namespace, name, "--", "python3", "-c", _CONNECT)
        said = await asyncio.to_thread(self._cluster.kubectl, *words, json.dumps(list(targets.values())))
        return {each for each, reached in zip(targets, json.loads(said), strict=True) if reached}


@contextmanager
def internet(made: Machine) -> Iterator[None]:
    """Put another machine beside this one, which has the addresses of the Internet and of a cloud."""
    made.run("ip", "netns", "add", "outside")
    made.run("ip", "link", "add", "outside", "type", "veth", "peer", "name", "inside", "netns", "outside")
    made.run("ip", "address", "add", "192.0.2.1/30", "dev", "outside")
    made.run("ip", "link", "set", "outside", "up")
    there = ("ip", "-n", "outside")
    made.run(*there, "address", "add", "192.0.2.2/30", "dev", "inside")
    made.run(*there, "link", "set", "inside", "up")
    made.run(*there, "link", "set", "lo", "up")
    made.run(*there, "route", "add", "default", "via", "192.0.2.1")
    for address in (INTERNET, METADATA, WIRESERVER):
        made.run(*there, "address", "add", f"{address}/32", "dev", "lo")
        made.run("ip", "route", "add", address, "via", "192.0.2.2")
    listen = ("ip", "netns", "exec", "outside", sys.executable, "-c", _LISTEN, *map(str, (*PORTS, DNS)))
    with subprocess.Popen(made.inside(*listen), stdout=subprocess.PIPE, text=True) as listener:
        try:
            assert listener.stdout is not None
            assert listener.stdout.readline() == "listening\n"
            yield
        finally:
            listener.kill()
            made.run("ip", "netns", "delete", "outside")
