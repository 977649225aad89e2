"""The pod of a kernel and its Secret. Pure: what is known of both goes in, objects come out.

The pod has what its lease grants, as the cluster's dialect asks for it, and
nothing that its user says can change that: their variables come first and
ours win, what would lift a limit is refused, and nothing is expanded by the
kubelet (``$(NAME)``) that they wrote.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

from gpu_pool.dialects import Bans, Manifest, PodParts, identity_labels, label_value, merged
from gpu_pool.dialects.naming import PREFIX
from gpu_pool.kubernetes.kueue import QUEUE_LABEL
from gpu_pool.kubernetes.notebooks import Home, Notebook
from gpu_pool.kubernetes.settings import CONTAINER
from gpu_pool_client import BadRequest, KernelCommand, Lease, NotAllowed
from gpu_pool_client.pods import POD_VARIABLE

POOL_LABEL: Final = f"{PREFIX}/pool"
LEASE_LABEL: Final = f"{PREFIX}/lease"
#: What was asked for when the pod was made: the same launch asked for again finds it.
LAUNCH: Final = f"{PREFIX}/launch"
#: What kernels' pods are to a NetworkPolicy.
COMPONENT: Final = "gpu-kernel"
CONNECTION_FOLDER: Final = "/run/gpu-pool"
CONNECTION_FILE: Final = f"{CONNECTION_FOLDER}/connection.json"

_PORTS: Final = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")
_TEXTS: Final = ("key", "signature_scheme")
_KEYS: Final = ("curve_publickey", "curve_secretkey")
_MORE: Final = ("transport", "kernel_name", "jupyter_session")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}", re.ASCII)
#: Variables that are ours, or the cluster's, to set: a user's are left out.
_OURS: Final = re.compile(
    r"GPU_POOL_\w+|CUDA_VISIBLE_DEVICES|HOME|JUPYTERHUB_\w+|JPY_API_TOKEN|KUBERNETES_\w+"
)
#: By which a container would get other GPUs than it asked for, whatever shares them.
_NEVER: Final = frozenset({"NVIDIA_VISIBLE_DEVICES"})
_MOST_WORDS, _MOST_TEXT, _MOST_VARIABLES = 200, 16_384, 500
#: Seconds between the end of the longest lease and that of its pod, whose end the pool itself comes before.
_DEADLINE_MARGIN: Final = 60
#: Seconds from the order to end to the end: whoever shuts a kernel down has asked it before.
_GRACE: Final = 2


@dataclass(frozen=True, slots=True)
class Body:
    """What a kernel's container is besides its slice."""

    image: str
    #: Cores and MiB at most; 0 for no limit.
    cpu: float
    memory_mib: int
    #: Where the home is mounted, and what; None for an empty folder that goes with the pod.
    home_path: str
    home: Home | None
    uid: int
    gid: int
    tolerations: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Order:
    """One kernel to be started."""

    pool: str
    lease: Lease
    notebook: Notebook
    command: KernelCommand
    #: The node and what to ask there, by the cluster's dialect; no node where the cluster chooses it.
    node: str
    parts: PodParts
    bans: Bans
    body: Body
    #: The LocalQueue in which the pod waits, where Kueue has the queue.
    queue: str = ""
    #: How many pods are placed on the node at a time; 0 for any number.
    at_once: int = 0

    @property
    def launch(self) -> str:
        """The same for the same kernel, and nobody finds its key by it."""
        known = [list(self.command.argv), dict(self.command.connection), dict(self.command.environment)]
        text = json.dumps([*known, self.command.folder], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def check_command(command: KernelCommand, bans: Bans, *, require_curve: bool) -> None:
    """Refuse what no pod can be made of. Raises ``BadRequest`` and ``NotAllowed``."""
    words = [*command.argv, *command.environment.values(), command.folder or ""]
    if not command.argv or len(command.argv) > _MOST_WORDS or len(command.environment) > _MOST_VARIABLES:
        raise BadRequest(f"A kernel's command has 1 to {_MOST_WORDS} words, {_MOST_VARIABLES} variables.")
    if any("\0" in word or len(word) > _MOST_TEXT for word in words):
        raise BadRequest(f"Words and variables of a kernel have at most {_MOST_TEXT} characters, and no NUL.")
    for name in command.environment:
        if not _VARIABLE.fullmatch(name):
            raise BadRequest(f"{name[:40]!a} is not the name of a variable.")
        if name in bans.environment | _NEVER:
            raise NotAllowed(
                f"This kernel sets the variable {name}, by which the limits of its GPU slice would not hold.",
                "Leave it out of the kernel's kernel.json.",
            )
    _check_connection(command.connection, require_curve=require_curve)


def _check_connection(connection: Mapping[str, Any], *, require_curve: bool) -> None:
    wrong = [name for name in _PORTS if not _is_port(connection.get(name))]
    wrong += [name for name in _TEXTS if not isinstance(connection.get(name), str)]
    if wrong or connection.get("transport", "tcp") != "tcp":
        raise BadRequest(
            f"The connection of the kernel lacks {wrong[0] if wrong else 'the transport tcp'}.",
            "A kernel in a pod needs five fixed ports, a key and its signature scheme.",
        )
    if require_curve and not all(isinstance(connection.get(name), str) for name in _KEYS):
        raise NotAllowed(
            "The connection to this kernel would cross the network unencrypted.",
            "Upgrade jupyter-gpu-pool where your server runs, or ask the administrator.",
        )


def _is_port(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1024 <= value <= 65_535


def pod(order: Order, name: str, now: float) -> dict[str, Any]:
    """Return the Pod object. Raises ``NotAllowed`` for what would lift the slice's limit."""
    lease, notebook = order.lease, order.notebook
    labels = {
        **identity_labels(lease.holder.user, lease.holder.course),
        "app.kubernetes.io/component": COMPONENT,
        POOL_LABEL: label_value(order.pool),
        LEASE_LABEL: lease.id,
    }
    if order.queue:
        labels[QUEUE_LABEL] = order.queue
    owner = {"apiVersion": "v1", "kind": "Pod", "name": notebook.name, "uid": notebook.uid}
    metadata = {
        "name": name,
        "namespace": notebook.namespace,
        "labels": labels,
        "annotations": {LAUNCH: order.launch},
        "ownerReferences": [owner],
    }
    base = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": _spec(order, name, now)}
    return merged(base, CONTAINER, order.parts, order.bans)


def secret(made: Manifest, command: KernelCommand) -> dict[str, Any]:
    """Return the Secret with the connection file of a pod that was made; it goes with the pod."""
    names = (*_PORTS, *_TEXTS, *_KEYS, *_MORE)
    connection = {name: command.connection[name] for name in names if name in command.connection}
    text = json.dumps({**connection, "ip": "0.0.0.0", "transport": "tcp"})  # noqa: S104 - the pod's own address
    metadata = made["metadata"]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": {key: metadata["labels"][key] for key in (POOL_LABEL, LEASE_LABEL)},
            "ownerReferences": [owner],
        },
        "immutable": True,
        "data": {"connection.json": base64.b64encode(text.encode()).decode()},
    }


def _spec(order: Order, name: str, now: float) -> dict[str, Any]:
    body, lease = order.body, order.lease
    ends_at = lease.terms.ends_at
    home: dict[str, Any] = {"name": "home", "emptyDir": {}}
    if body.home is not None:
        home = {"name": "home", "persistentVolumeClaim": {"claimName": body.home.claim}}
    connection = {"secretName": name, "defaultMode": 0o440}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _GRACE,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": body.uid,
            "runAsGroup": body.gid,
            "fsGroup": body.gid,
            # A home with many files would be gone through at every start.
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "tolerations": [{"key": key, "operator": "Exists"} for key in body.tolerations],
        "volumes": [home, {"name": "connection", "secret": connection}],
        "containers": [_container(order)],
    }
    if order.node:
        spec["affinity"] = {"nodeAffinity": _on(order.node)}
    if ends_at is not None:
        spec["activeDeadlineSeconds"] = max(1, int(ends_at - now) + _DEADLINE_MARGIN)
    if order.notebook.pull_secrets:
        spec["imagePullSecrets"] = [{"name": each} for each in order.notebook.pull_secrets]
    return spec


def _on(node: str) -> dict[str, Any]:
    """Return the affinity for one node: the pool has chosen, and its scheduler has to agree or wait."""
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    return {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": [field]}]}
    }


def _container(order: Order) -> dict[str, Any]:
    body, command = order.body, order.command
    mount: dict[str, Any] = {"name": "home", "mountPath": body.home_path}
    if body.home is not None and body.home.sub_path:
        mount["subPath"] = body.home.sub_path
    limits = {}
    if body.cpu:
        limits["cpu"] = f"{round(body.cpu * 1000)}m"
    if body.memory_mib:
        limits["memory"] = f"{body.memory_mib}Mi"
    return {
        "name": CONTAINER,
        "image": body.image,
        "command": [_literal(word.replace("{connection_file}", CONNECTION_FILE)) for word in command.argv],
        "workingDir": _folder(body, command.folder),
        "env": _environment(order),
        "resources": {"limits": limits, "requests": dict(limits)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": [
            mount,
            {"name": "connection", "mountPath": CONNECTION_FOLDER, "readOnly": True},
        ],
    }


def _folder(body: Body, folder: str | None) -> str:
    """Return where the kernel starts: below its home, and nowhere else."""
    if body.home is None or not folder:
        return body.home_path
    inside = folder.removeprefix(body.home_path).strip("/")
    parts = inside.split("/")
    if folder.startswith("/") and not f"{folder}/".startswith(f"{body.home_path.rstrip('/')}/"):
        return body.home_path
    if any(part in ("", ".", "..") for part in parts):
        return body.home_path
    return f"{body.home_path.rstrip('/')}/{'/'.join(parts)}"


def _environment(order: Order) -> list[dict[str, str]]:
    theirs = {k: v for k, v in order.command.environment.items() if not _OURS.fullmatch(k)}
    # Which GPU a container sees is the cluster's affair, by the names that it has there.
    ours = {k: v for k, v in order.lease.environment.items() if k != "CUDA_VISIBLE_DEVICES"}
    values = {**theirs, **ours, "HOME": order.body.home_path, POD_VARIABLE: "1"}
    return [{"name": name, "value": _literal(value)} for name, value in sorted(values.items())]


def _literal(text: str) -> str:
    """Return a text in which a kubelet finds no ``$(NAME)`` to replace."""
    return text.replace("$", "$$") if "$$" in text or "$(" in text else text


def number_of(name: str) -> int:
    """Return which pod of its lease a pod is, 0 if its name does not say."""
    tail = name.rpartition("-")[2]
    return int(tail) if tail.isdecimal() else 0


def next_name(lease_id: str, names: Iterable[str]) -> str:
    """Return the name of a lease's next pod, after those of these names."""
    return f"gpu-pool-{lease_id}-{1 + max(map(number_of, names), default=0)}"
