"""A node on which the pods of ``support.probes`` run, and what becomes of them there."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.control_plane import Cluster
from support.node_agent import NodeAgent
from support.probes import NO_IMAGE, OBJECTS, Probe, container, observed, runs

#: Seconds in which everything has come to its end, on two cores that have other things to do.
_LONG = 400
#: Where :meth:`Side.serve` serves.
PORT = 8000
#: What a kubelet made of every probe; ``tests/cluster/kubelet/test_hollow_node.py`` writes it where told to.
RECORD = Path(__file__).with_name("kubelet_seen.json")


def _answer(address: str) -> str:
    """Return what comes of connecting: answered, refused, or nothing."""
    try:
        with socket.create_connection((address, PORT), timeout=2):
            return "answered"
    except ConnectionRefusedError:
        return "refused"
    except OSError:  # it is waited for in vain
        return "nothing"


@dataclass(frozen=True)
class Side:
    """A node, and the namespace of the pods on it."""

    cluster: Cluster
    namespace: str
    node: str
    #: None for a kubelet.
    agent: NodeAgent | None

    @classmethod
    def hollow(cls, cluster: Cluster, namespace: str, agent: NodeAgent, name: str) -> Side:
        """Return a new node of the tests."""
        agent.images[NO_IMAGE] = "missing"
        agent.add({"metadata": {"name": name, "labels": {"kubernetes.io/hostname": name}}})
        return cls(cluster, namespace, name, agent)

    def begin(self, probes: Sequence[Probe]) -> None:
        """Start all pods."""
        pods = []
        for each in probes:
            pod = json.loads(json.dumps(each.pod))
            pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": self.node}
            pods.append(pod)
        self.cluster.apply(*OBJECTS, namespace=self.namespace)
        self.cluster.apply(*pods, namespace=self.namespace)

    def pods(self) -> dict[str, Any]:
        """Return all pods by name."""
        found = self.cluster.get("pods", "-n", self.namespace)["items"]
        return {each["metadata"]["name"]: each for each in found}

    def events(self) -> dict[str, list[Any]]:
        """Return all events, by the name of their pod."""
        found: dict[str, list[Any]] = {}
        for each in self.cluster.get("events", "-n", self.namespace)["items"]:
            found.setdefault(each["involvedObject"]["name"], []).append(each)
        return found

    def log(self, name: str) -> str:
        """Return what the first container of a pod has written, lastly."""
        if self.agent is not None:
            return self.agent.log(self.namespace, name, "main")
        try:
            return self.cluster.kubectl("logs", "-n", self.namespace, name, "-c", "main")
        except AssertionError:  # it was never started
            return ""

    def follow(self, probes: Sequence[Probe]) -> dict[str, Any]:
        """Return what became of every pod."""
        seen: dict[str, Any] = {}
        asked: set[str] = set()
        deadline = time.monotonic() + _LONG
        while len(seen) < len(probes):
            pods, events = self.pods(), self.events()
            for each in probes:
                pod, told = pods[each.name], events.get(each.name, [])
                if each.name not in asked and runs(pod["status"]):
                    asked.add(each.name)
                    self._do(each)
                is_told = not each.event or each.event in {event["reason"] for event in told}
                if each.name not in seen and each.until(pod["status"]) and is_told:
                    seen[each.name] = observed(pod, told, "" if each.deleted else self.log(each.name))
            missing = {each.name: pods[each.name]["status"] for each in probes if each.name not in seen}
            assert time.monotonic() < deadline, f"{self.node}: {missing}"
            time.sleep(0.5)
        return seen

    def _do(self, probe: Probe) -> None:
        if probe.deleted:
            self.cluster.kubectl("delete", "pod", "-n", self.namespace, probe.name, "--wait=false")
        if probe.killed and self.agent is not None:
            self.agent.kill(self.namespace, probe.name, probe.killed)

    def serve(self) -> str:
        """Start a pod that answers, and return its address."""
        command = ["python3", "-m", "http.server", str(PORT)]
        pod = container("serving", command, self.cluster.image)
        pod["spec"]["nodeSelector"] = {"kubernetes.io/hostname": self.node}
        self.cluster.apply(pod, namespace=self.namespace)
        deadline = time.monotonic() + _LONG
        while not runs(status := self.pods()["serving"]["status"]):
            assert time.monotonic() < deadline, status
            time.sleep(0.2)
        return str(status["podIP"])

    def await_answer(self, address: str, expected: str) -> None:
        """Return once a pod that serves or has served answers so."""
        deadline = time.monotonic() + 120
        while (found := _answer(address)) != expected:
            assert time.monotonic() < deadline, found
            time.sleep(0.1)

    def let_go(self) -> None:
        """Let all pods go that are held."""
        for name in self.pods():
            about = ("pod", "-n", self.namespace, name)
            self.cluster.kubectl("patch", *about, "--type=merge", "-p", '{"metadata":{"finalizers":null}}')
