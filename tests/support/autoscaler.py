"""A stand-in for an autoscaler: adds nodes to one group for pods that no node can take.

It goes by what Cluster Autoscaler goes by: pods that the scheduler has found unschedulable, and what
the group's next node would be like. What it does not do is its simulation of the scheduler: a pod
is for the group if its node selector names the group's labels. Its events have the reasons and the
words of Cluster Autoscaler 1.36 (its FAQ, and ``processors/status``); it removes no nodes.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

from support.control_plane import Cluster
from support.node_agent import NodeAgent

#: Seconds between two looks; Cluster Autoscaler's own are 10.
_EVERY = 0.5


class Autoscaler:
    """Lets one group of nodes grow, as a thread."""

    def __init__(
        self,
        cluster: Cluster,
        agent: NodeAgent,
        select: Mapping[str, str],
        make: Callable[[str], dict[str, Any]],
        most: int,
    ) -> None:
        """``make`` returns a node of the group by its name; ``agent`` keeps it ready."""
        self._cluster, self._agent, self._select, self._make = cluster, agent, select, make
        #: How many nodes the group may have; may be changed at any time.
        self.most = most
        #: The names of the nodes that were added.
        self.added: list[str] = []
        #: While it is not set, nodes are announced and do not come.
        self.go_on = threading.Event()
        self.go_on.set()
        self._announced: list[str] = []
        #: The last that was said of a pod, by its uid.
        self._told: dict[str, str] = {}
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="autoscaler")

    def __enter__(self) -> Autoscaler:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stopped.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stopped.wait(_EVERY):
            # One node for each pod: the pods of these tests want a node of their own.
            for pod in self._pods():
                self._look(pod)
            if self.go_on.is_set():
                for name in self._announced:
                    self._agent.add(self._make(name))
                self.added += self._announced
                self._announced.clear()

    def _pods(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._cluster.get("pods", "-A")["items"]
        return [each for each in found if self._is_unschedulable(each)]

    def _is_unschedulable(self, pod: Mapping[str, Any]) -> bool:
        conditions = pod.get("status", {}).get("conditions", ())
        selector = pod["spec"].get("nodeSelector", {})
        unschedulable = any(each.get("reason") == "Unschedulable" for each in conditions)
        return unschedulable and self._select.items() <= selector.items()

    def _look(self, pod: Mapping[str, Any]) -> None:
        """Announce a node for a pod, or say that there can be none; each pod has one node at most."""
        uid, size = pod["metadata"]["uid"], len(self.added) + len(self._announced)
        if self._told.get(uid) == "TriggeredScaleUp":
            return
        if size >= self.most:
            words = "pod didn't trigger scale-up: 1 max node group size reached"
            self._say(pod, "NotTriggerScaleUp", words)
            return
        self._announced.append(f"grown-{secrets.token_hex(3)}")
        words = f"pod triggered scale-up: [{{group {size}->{size + 1} (max: {self.most})}}]"
        self._say(pod, "TriggeredScaleUp", words)

    def _say(self, pod: Mapping[str, Any], reason: str, message: str) -> None:
        """Write an event, unless it was the last that was written."""
        metadata = pod["metadata"]
        if self._told.get(metadata["uid"]) == reason:
            return
        self._told[metadata["uid"]] = reason
        now = f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}"
        about = {key: metadata[key] for key in ("name", "namespace", "uid")}
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"name": f"{metadata['name']}.{secrets.token_hex(4)}"},
            "involvedObject": {"apiVersion": "v1", "kind": "Pod", **about},
            "reason": reason,
            "message": message,
            "type": "Normal",
            "source": {"component": "cluster-autoscaler"},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
        self._cluster.apply(event, namespace=metadata["namespace"])
