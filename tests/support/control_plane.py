"""The rest of a cluster around a real API server: kubeconfig, scheduler, controllers, nodes for tests."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from support import containers
from support.node_agent import NodeAgent

ASSETS = Path(os.environ.get("KUBEBUILDER_ASSETS", "/usr/local/kubebuilder/bin"))
PROGRAMS = ("kube-scheduler", "kube-controller-manager")
#: The schedulers that pods of the tests name. All are Kubernetes' own here, which counts
#: the extended resources that the nodes show.
SCHEDULERS = ("default-scheduler", "hami-scheduler", "kai-scheduler", "volcano")
#: Owners, lost nodes, pods of nodes that are gone, namespaces, claims, quotas.
_CONTROLLERS = (
    "garbage-collector-controller",
    "namespace-controller",
    "node-lifecycle-controller",
    "pod-garbage-collector-controller",
    "resourceclaim-controller",
    "resourcequota-controller",
    "taint-eviction-controller",
)


@dataclass
class Cluster:
    """A cluster for tests: one of processes of this machine, or that of ``KUBECONFIG``."""

    kubeconfig: Path
    #: None for a cluster with nodes of its own.
    agent: NodeAgent | None = None
    #: The image of pods that the tests start; on real nodes it must have this project and JupyterHub.
    image: str = os.environ.get("GPU_POOL_TEST_IMAGE", "example.org/notebook:1")

    def add(self, *nodes: Any) -> None:
        """Add nodes, where they are not given; skip where they could not run pods."""
        if self.agent is not None:
            if not self.agent.hollow and (why := containers.missing()):
                pytest.skip(why)
            self.agent.add(*nodes)

    def kubectl(self, *arguments: str, stdin: str | None = None) -> str:
        """Return what kubectl answers; fail with what it says if it fails."""
        command = [ASSETS / "kubectl", "--kubeconfig", self.kubeconfig, *arguments]
        done = subprocess.run(list(map(str, command)), input=stdin, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def apply(self, *objects: Any, namespace: str = "", flags: Sequence[str] = ()) -> None:
        """Create or change these objects; with ``namespace``, all of them there."""
        everything = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
        there = ["-n", namespace] if namespace else []
        self.kubectl("apply", *there, *flags, "-f", "-", stdin=json.dumps(everything))

    def get(self, *arguments: str) -> Any:
        """Return an object, or a list of them, as the API shows it."""
        return json.loads(self.kubectl("get", *arguments, "-o", "json"))


def missing_programs() -> list[str]:
    """Return the names of what a control plane needs besides the API server, and is not there."""
    return [name for name in PROGRAMS if not os.access(ASSETS / name, os.X_OK)]


def write_kubeconfig(path: Path, url: str, token: str, certificate: Path) -> Path:
    """Write down how a client reaches the API server as its administrator."""
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "clusters": [{"name": "c", "cluster": {"server": url, "certificate-authority": str(certificate)}}],
        "users": [{"name": "u", "user": {"token": token}}],
        "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
        "current-context": "x",
    }
    path.touch(mode=0o600)
    path.write_text(json.dumps(document))
    return path


@contextmanager
def scheduling_and_controlling(kubeconfig: Path) -> Iterator[None]:
    """Run a scheduler and the controllers for the API server of a kubeconfig."""
    folder = kubeconfig.parent
    settings = {
        "apiVersion": "kubescheduler.config.k8s.io/v1",
        "kind": "KubeSchedulerConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig), "qps": 1000, "burst": 1000},
        "leaderElection": {"leaderElect": False},
        "podMaxBackoffSeconds": 2,
        "profiles": [{"schedulerName": name} for name in SCHEDULERS],
    }
    (folder / "scheduler.json").write_text(json.dumps(settings))
    with ExitStack() as stack:
        stack.enter_context(_running("kube-scheduler", folder, f"--config={folder / 'scheduler.json'}"))
        more = (
            f"--kubeconfig={kubeconfig}",
            "--leader-elect=false",
            f"--controllers={','.join(_CONTROLLERS)}",
        )
        stack.enter_context(_running("kube-controller-manager", folder, *more))
        yield


@contextmanager
def _running(name: str, folder: Path, *arguments: str) -> Iterator[None]:
    command = [str(ASSETS / name), "--secure-port=0", *arguments]
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
    try:
        yield
    finally:
        early = process.poll()
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(60)
        if process.poll() is None:
            process.kill()
            process.wait()
        assert early is None, (folder / f"{name}.log").read_text()[-2_000:]
