"""Pods that say how a node treats them: the nodes of the tests and a real kubelet are compared by them."""

from __future__ import annotations

import json
import re
import socket
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from support.control_plane import Cluster
from support.node_agent import NodeAgent

Status = Mapping[str, Any]
#: What a container finds around it; its arguments are folders to look at.
INSIDE = ["python3", "-c", Path(__file__).with_name("probe_inside.py").read_text()]
#: An image that is nowhere.
NO_IMAGE = "localhost/there-is-none:1"
#: What :func:`writing` says on a node as it should be.
WRITTEN = "own\nhidden"


def container(name: str, command: Sequence[str], image: str, **spec: Any) -> dict[str, Any]:
    """Return a pod of one container, which runs once."""
    main = {"name": "main", "image": image, "command": list(command)}
    of_container = ("env", "envFrom", "volumeMounts", "args", "workingDir", "imagePullPolicy", "resources")
    main |= {key: spec.pop(key) for key in of_container if key in spec}
    main |= {key: spec.pop(key) for key in ("terminationMessagePolicy",) if key in spec}
    main |= {"securityContext": spec.pop("rights")} if "rights" in spec else {}
    metadata = {"name": name, **spec.pop("metadata", {})}
    toleration = [{"key": "nvidia.com/gpu", "operator": "Exists"}]
    defaults = {"restartPolicy": "Never", "tolerations": toleration, "automountServiceAccountToken": False}
    spec = {**defaults, **spec, "containers": [main, *spec.get("containers", ())]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def writing(image: str) -> list[dict[str, Any]]:
    """Return a pod ``writing``, and its Secret: it tries to write wherever something is mounted."""
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "s"},
        "stringData": {"key": "hidden"},
    }
    places = {"secret": "/etc/told", "shared": "/srv/shared", "own": "/srv/own"}
    tries = [f"{{ echo x > {path}/key; }} 2> /dev/null && echo {name}" for name, path in places.items()]
    made = container(
        "writing",
        ["sh", "-c", f"{'; '.join(tries)}; cat /etc/told/key"],
        image,
        volumes=[
            {"name": "secret", "secret": {"secretName": "s"}},
            {"name": "shared", "emptyDir": {}},
            {"name": "own", "emptyDir": {}},
        ],
        volumeMounts=[
            {"name": name, "mountPath": path, "readOnly": name == "shared"} for name, path in places.items()
        ],
    )
    # Root, who is kept from writing by mounts alone.
    made["spec"]["securityContext"] = {"runAsUser": 0}
    return [secret, made]


def has_ended(status: Status) -> bool:
    """Whether the pod has run."""
    return status.get("phase") in ("Succeeded", "Failed")


def runs(status: Status) -> bool:
    """Whether all of the pod's containers run."""
    return status.get("phase") == "Running"


def waits(reason: str) -> Callable[[Status], bool]:
    """Return whether a container of the pod waits for this reason."""

    def look(status: Status) -> bool:
        found = status.get("containerStatuses", ())
        return any(each["state"].get("waiting", {}).get("reason") == reason for each in found)

    return look


@dataclass(frozen=True)
class Probe:
    """A pod, and when there is something to be seen."""

    pod: Mapping[str, Any]
    until: Callable[[Status], bool] = has_ended
    #: Looked for among the pod's events before anything is compared.
    event: str = ""
    #: Whether it is deleted once it runs; it is there still afterwards, for nobody lets it go.
    deleted: bool = False
    #: What a node of the tests is told to do once the pod runs, which a kubelet sees by itself.
    killed: str = ""

    @property
    def name(self) -> str:
        """That of its pod."""
        return str(self.pod["metadata"]["name"])


#: Events that say nothing of how the node treats the pod.
_OF_OTHERS = {"Scheduled", "MissingClusterDNS"}
#: What the pods below mount and name.
OBJECTS: list[dict[str, Any]] = [
    {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "s"},
        "stringData": {"key": "hidden", "k2": "2"},
    },
    {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "c"}, "data": {"a.txt": "told", "b": "2"}},
    {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "gpu-pool"},
        "spec": {"clusterIP": "None", "ports": [{"port": 80}]},
    },
    {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "my-hub"},
        "spec": {
            "ports": [{"port": 8081, "name": "api-port"}, {"port": 53, "name": "dns", "protocol": "UDP"}]
        },
    },
]
_VOLUMES: list[dict[str, Any]] = [
    {"name": "secret", "secret": {"secretName": "s"}},
    {
        "name": "items",
        "secret": {"secretName": "s", "defaultMode": 0o400, "items": [{"key": "key", "path": "p"}]},
    },
    {"name": "map", "configMap": {"name": "c"}},
    {"name": "own", "emptyDir": {}},
    {"name": "memory", "emptyDir": {"medium": "Memory"}},
]
_MOUNTS = [
    *({"name": each["name"], "mountPath": f"/srv/{each['name']}"} for each in _VOLUMES),
    {"name": "own", "mountPath": "/srv/part", "subPath": "a/b"},
    {"name": "own", "mountPath": "/srv/named", "subPathExpr": "for-$(NAME)", "readOnly": True},
    {"name": "map", "mountPath": "/srv/one-file.txt", "subPath": "a.txt"},
]
_FOLDERS = [each["mountPath"] for each in _MOUNTS if "." not in each["mountPath"]]
_VARIABLES: list[dict[str, Any]] = [
    {"name": "NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
    {"name": "LATER", "value": "$(AFTER)"},
    {"name": "AFTER", "value": "$(NAME)-$$(NAME)-$(NOBODY)-$5"},
    {"name": "OF_SERVICE", "value": "$(MY_HUB_SERVICE_PORT)"},
    {"name": "OF_IMAGE", "value": "$(HOME)"},
    {"name": "SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "key"}}},
    {"name": "NONE", "valueFrom": {"secretKeyRef": {"name": "s", "key": "no", "optional": True}}},
]
_ALL: dict[str, Any] = {"volumes": _VOLUMES, "volumeMounts": _MOUNTS, "env": _VARIABLES}
_OURS = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_TERM = "import os, signal; os.kill(os.getpid(), signal.SIGTERM); print('still here'); raise SystemExit(7)"
_HELD = {"finalizers": ["example.org/nobody-lets-it-go"]}
_KEPT = [{"name": "own", "emptyDir": {}}]
#: Told in its last words, since a kubelet removes logs of containers that are started anew.
_KEEP = (
    "(ls /srv/own; cat /tmp/lost) 2> /dev/null > /dev/termination-log; "
    "echo x | tee /srv/own/kept > /tmp/lost; exit 3"
)


def everything(image: str) -> Iterable[Probe]:
    """Return all probes, of an image that has Python and whose user is jovyan, 1000 of the group 100."""

    def pod(name: str, command: Sequence[str], **spec: Any) -> dict[str, Any]:
        return container(name, command, image, **spec)

    def inside(name: str, **spec: Any) -> Probe:
        return Probe(pod(name, INSIDE, **{**_ALL, "args": _FOLDERS, **spec}))

    def shell(name: str, script: str, **spec: Any) -> dict[str, Any]:
        return pod(name, ["sh", "-c", script], **spec)

    ids = {"runAsUser": 1234, "runAsGroup": 2345, "fsGroup": 3456, "supplementalGroups": [4567]}
    yield inside("of-image")
    yield inside("of-image-group", securityContext={"fsGroup": 100})
    yield inside("other-user", securityContext=ids, enableServiceLinks=False)
    yield inside("user-alone", securityContext={"runAsUser": 1234})
    yield inside("root", securityContext={"runAsUser": 0}, workingDir="/new/folder")
    yield inside("ours", rights={**_OURS, "runAsNonRoot": True}, shareProcessNamespace=True)
    yield inside("fixed", rights={**_OURS, "readOnlyRootFilesystem": True})
    yield inside(
        "environment", envFrom=[{"secretRef": {"name": "s"}, "prefix": "P_"}], args=[], volumeMounts=[]
    )
    yield Probe(pod("first", ["python3", "-c", _TERM]))
    yield Probe(pod("not-first", ["python3", "-c", _TERM], shareProcessNamespace=True))
    yield Probe(
        pod("killed", ["python3", "-c", "import os; os.kill(os.getpid(), 9)"], shareProcessNamespace=True)
    )
    refused = {"runAsNonRoot": True, "runAsUser": 0}
    yield Probe(
        pod("refused", ["true"], securityContext=refused), waits("CreateContainerConfigError"), "Failed"
    )
    none = [{"name": "v", "secret": {"secretName": "none"}}]
    mount = [{"name": "v", "mountPath": "/v"}]
    yield Probe(
        pod("no-secret", ["true"], volumes=none, volumeMounts=mount),
        waits("ContainerCreating"),
        "FailedMount",
    )
    key = [{"name": "K", "valueFrom": {"secretKeyRef": {"name": "s", "key": "none"}}}]
    yield Probe(pod("no-key", ["true"], env=key), waits("CreateContainerConfigError"), "Failed")
    part = [{"name": "own", "mountPath": "/v", "subPathExpr": "$(NOBODY)"}]
    yield Probe(
        pod("no-part", ["true"], volumes=_KEPT, volumeMounts=part),
        waits("CreateContainerConfigError"),
        "Failed",
    )
    yield Probe(pod("no-command", ["there-is-none"]))
    never = container("never", ["true"], NO_IMAGE, imagePullPolicy="Never")
    yield Probe(never, waits("ErrImageNeverPull"), "Failed")
    yield Probe(container("no-image", ["true"], NO_IMAGE), waits("ImagePullBackOff"), "BackOff")
    policy = "FallbackToLogsOnError"
    yield Probe(shell("failed", "echo one; echo two; exit 3", terminationMessagePolicy=policy))
    yield Probe(shell("silent", "echo one; exit 3"))
    yield Probe(shell("done", "echo one; exit 0", terminationMessagePolicy=policy))
    words = "echo one; printf 'last words' > /dev/termination-log; exit 3"
    yield Probe(shell("words", words, terminationMessagePolicy=policy))
    mounts = [{"name": "own", "mountPath": "/srv/own"}]
    for restart in ("OnFailure", "Always"):
        yield Probe(
            shell(
                f"again-{restart.lower()}", _KEEP, restartPolicy=restart, volumes=_KEPT, volumeMounts=mounts
            ),
            _twice,
            "BackOff",
        )
    # Long enough for it to have started before on a busy machine.
    yield Probe(shell("late", "sleep 600", activeDeadlineSeconds=30, shareProcessNamespace=True))
    yield Probe(shell("late-waiting", "true", activeDeadlineSeconds=3, volumes=none, volumeMounts=mount))
    trap = "trap 'echo told; exit 4' TERM; while :; do sleep 0.1; done"
    yield Probe(shell("asked", trap, metadata=_HELD), deleted=True)
    grace = {"terminationGracePeriodSeconds": 1, "metadata": _HELD}
    yield Probe(shell("deaf", "sleep 600", **grace), deleted=True)
    yield Probe(shell("shared-deaf", "sleep 600", shareProcessNamespace=True, **grace), deleted=True)
    before = [{"name": "before", "image": image, "command": ["sh", "-c", "echo first > /srv/own/f"]}]
    before[0]["volumeMounts"] = mounts  # type: ignore[assignment]
    yield Probe(shell("begun", "cat /srv/own/f", initContainers=before, volumes=_KEPT, volumeMounts=mounts))
    failing = [{"name": "before", "image": image, "command": ["false"]}]
    yield Probe(shell("not-begun", "true", initContainers=failing))
    beside = {
        "name": "beside",
        "image": image,
        "command": ["sh", "-c", "sleep 1; echo x > /dev/shm/x; exit 2"],
    }
    script = "while ! test -e /dev/shm/x; do sleep 0.1; done; hostname"
    yield Probe(shell("two", script, containers=[beside]))
    limits = {"limits": {"memory": "48Mi"}}
    grow = "import time; time.sleep(3); x = bytearray(400_000_000); time.sleep(600)"
    yield Probe(pod("grown", ["python3", "-c", grow], resources=limits), killed="OOMKilled")


def _twice(status: Status) -> bool:
    found = status.get("containerStatuses", ())
    return any(each["restartCount"] >= 1 and "waiting" in each["state"] for each in found)


def observed(pod: Mapping[str, Any], events: Iterable[Mapping[str, Any]], log: str) -> dict[str, Any]:
    """Return what became of a pod, without what differs from pod to pod."""
    status, own = pod["status"], {pod["metadata"][key]: key for key in ("uid", "namespace")}
    conditions = {each["type"]: each for each in status.get("conditions", ())}
    return {
        "phase": status.get("phase"),
        "reason": status.get("reason"),
        "message": status.get("message"),
        "conditions": {
            name: [conditions.get(name, {}).get(key) for key in ("status", "reason", "message")]
            for name in ("Initialized", "Ready", "ContainersReady")
        },
        "containers": [_container(each, own) for each in status.get("containerStatuses", ())],
        "initial": [_container(each, own) for each in status.get("initContainerStatuses", ())],
        "events": sorted({each["reason"] for each in events} - _OF_OTHERS),
        "log": _said(log, status.get("podIP", "?")),
    }


def differences(real: Any, made: Any, where: str = "") -> list[str]:
    """Return in what two observations differ, a line each."""
    if isinstance(real, dict) and isinstance(made, dict):
        keys = sorted(real.keys() | made.keys())
        return [line for key in keys for line in differences(real.get(key), made.get(key), f"{where}/{key}")]
    return [] if real == made else [f"{where}: a kubelet {real!r}, a node of the tests {made!r}"]


def _container(status: Mapping[str, Any], own: Mapping[str, str]) -> dict[str, Any]:
    found = {key: status.get(key) for key in ("name", "ready", "started")}
    found["again"] = status["restartCount"] > 0
    for key in ("state", "lastState"):
        for kind, about in status.get(key, {}).items():
            message = re.sub(r"back-off [\dms]+ ", "back-off ", about.get("message", ""))
            # Why a registry does not answer is its own affair.
            message = re.sub(r"(ErrImagePull: ).*", r"\1", message)
            for value, name in own.items():
                message = message.replace(value, name)
            found[key] = [kind, about.get("reason"), about.get("exitCode"), message]
    return found


def _said(log: str, address: str) -> Any:
    log = re.sub(r"\b10(\.\d+){3}", "OF_SERVICE", log.replace(address, "ADDRESS"))
    try:
        return json.loads(log)
    except ValueError:
        return log


#: Seconds in which everything has come to its end, on two cores that have other things to do.
_LONG = 400
#: Where :meth:`ProbedNode.serve` serves.
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
class ProbedNode:
    """A node, and the namespace of the pods on it."""

    cluster: Cluster
    namespace: str
    node: str
    #: None for a kubelet.
    agent: NodeAgent | None

    @classmethod
    def hollow(cls, cluster: Cluster, namespace: str, agent: NodeAgent, name: str) -> ProbedNode:
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
