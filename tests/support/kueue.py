"""What a cluster has of Kueue: the definition of its Workload, in the versions that a test chooses."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from support.control_plane import Cluster

GROUP = "kueue.x-k8s.io"


def workloads(*served: str) -> dict[str, Any]:
    """Return the definition of Kueue's Workload in these versions, without what it holds."""
    schema = {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}}
    versions = [
        {"name": each, "served": True, "storage": each == served[0], "schema": schema} for each in served
    ]
    names = {"plural": "workloads", "singular": "workload", "kind": "Workload", "listKind": "WorkloadList"}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"workloads.{GROUP}"},
        "spec": {"group": GROUP, "scope": "Namespaced", "names": names, "versions": versions},
    }


@contextmanager
def serving(cluster: Cluster, *versions: str) -> Iterator[None]:
    """Let the cluster serve Workloads in these versions."""
    cluster.apply(workloads(*versions))
    crd = f"crd/workloads.{GROUP}"
    cluster.kubectl("wait", "--for=condition=Established", crd, "--timeout=60s")
    until_served(cluster, *versions)
    yield
    cluster.kubectl("delete", crd)
    until_served(cluster)


def until_served(cluster: Cluster, *versions: str) -> None:
    """Return once the API server says so: it hears of a definition somewhat later."""
    deadline = time.monotonic() + 60
    while set(served_by(cluster)) != set(versions):
        assert time.monotonic() < deadline, f"{versions} are not what is served"
        time.sleep(0.1)


def served_by(cluster: Cluster) -> list[str]:
    """Return the versions of Kueue's objects that the API server says it serves."""
    groups = json.loads(cluster.kubectl("get", "--raw", "/apis"))["groups"]
    return [each["version"] for group in groups if group["name"] == GROUP for each in group["versions"]]
