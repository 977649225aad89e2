"""The pod of a kernel and its Secret, and what stands in their way. Pure: values in, objects out.

The pod has what its lease grants, as the cluster's dialect asks for it, and nothing that its user says can
change that: their variables come first and ours win, what would lift a limit is refused, and nothing is
expanded by the kubelet (``$(NAME)``) that they wrote.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final, Protocol

from gpu_pool.cluster.dialects import Manifest, PodBans, PodParts, identity_labels, label_value, merged
from gpu_pool.cluster.dialects.objects import POOL_LABEL, PREFIX
from gpu_pool.cluster.kueue import QUEUE_LABEL
from gpu_pool.cluster.nodes import tolerations_of
from gpu_pool.cluster.notebooks import HomeMount, HomeVolume, Identity, Notebook
from gpu_pool.cluster.pod_choices import ContainerSettings
from gpu_pool.cluster.settings import CONTAINER
from gpu_pool_client import BadRequest, KernelCommand, Lease, NotAllowed
from gpu_pool_client._pods import POD_VARIABLE, ROOM

LEASE_LABEL: Final = f"{PREFIX}/lease"
#: What was asked for when the pod was made: the same launch asked for again finds it.
LAUNCH: Final = f"{PREFIX}/launch"
#: What kernels' pods are to a NetworkPolicy.
COMPONENT: Final = "gpu-kernel"
#: Where a kernel finds its connection file, and may write it: ipykernel writes down again what it read.
CONNECTION_FOLDER: Final = "/run/gpu-pool"
CONNECTION_FILE: Final = f"{CONNECTION_FOLDER}/connection.json"
#: Where its Secret is mounted, which nobody can write.
MOUNTED_FOLDER: Final = "/run/gpu-pool-secret"
#: Where what starts the kernel, and starts it again in the same pod, is mounted.
SUPERVISOR_FOLDER: Final = "/run/gpu-pool-supervisor"
SUPERVISOR: Final = f"{SUPERVISOR_FOLDER}/launch.py"
#: Below it, where Python looks for compiled code.
_CODE_FOLDER: Final = "__pycache__"
#: Runs a command (its arguments) once the connection file is where it can be written, by this user alone.
START: Final = f"(umask 077 && cat {MOUNTED_FOLDER}/connection.json > {CONNECTION_FILE}) && "
_ALONE: Final = 'exec "$@"'
#: How kernels start their Python, mostly. A supervisor that is started alike forks their template, which
#: spares the start of another Python; one of any other kernel hears of no variables of its user.
KERNELS_PYTHON: Final = ("python3", "-Xfrozen_modules=off")
_ISOLATED: Final = ("python3", "-I", "-S")
#: The same below the supervisor, where the image has a Python and the ConfigMap was there.
_SUPERVISED: Final = (
    f"if [ -r {SUPERVISOR} ] && command -v python3 >/dev/null 2>&1; then {ROOM}"
    f"exec {{python}} {SUPERVISOR} supervisor --connection {CONNECTION_FILE} --preload={{preload}} "
    f'-- "$@"; else {_ALONE}; fi'
)

_PORTS: Final = ("shell_port", "iopub_port", "stdin_port", "control_port", "hb_port")
_TEXTS: Final = ("key", "signature_scheme")
_KEYS: Final = ("curve_publickey", "curve_secretkey")
_MORE: Final = ("transport", "kernel_name", "jupyter_session")
#: Keys as ZeroMQ writes them: 32 bytes in Z85.
_CURVE_KEY: Final = re.compile(r"[0-9a-zA-Z.\-:+=^!/*?&<>()\[\]{}@%$#]{40}", re.ASCII)
_SCHEME: Final = re.compile(r"hmac-[a-z0-9_]{1,32}", re.ASCII)
_MODULE: Final = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,255}", re.ASCII)
#: Variables that are ours, or the cluster's, to set: a user's are left out.
_OURS: Final = re.compile(
    r"GPU_POOL_\w+|CUDA_VISIBLE_DEVICES|HOME|JUPYTERHUB_\w+|JPY_API_TOKEN|KUBERNETES_\w+"
)
#: By which a container would get other GPUs than it asked for, whatever shares them.
_NEVER: Final = frozenset({"NVIDIA_VISIBLE_DEVICES"})
#: What Kubernetes taints a node with that does not answer. Pods bear with it for five minutes by default.
_LOST: Final = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
#: What tells autoscalers that a kernel cannot be moved elsewhere: its node stays for as long as it runs.
STAYS: Final = {
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
    "karpenter.sh/do-not-disrupt": "true",
}
#: Most arguments of a kernel's command, characters of each, and variables of its environment.
_MOST_WORDS: Final = 200
_MOST_TEXT: Final = 16_384
_MOST_VARIABLES: Final = 500
#: Seconds between the end of the longest lease and that of its pod, whose end the pool itself comes before.
_DEADLINE_MARGIN: Final = 60
#: Seconds from the order to end to the end: whoever shuts a kernel down has asked it before.
_GRACE: Final = 2


class PodSetup(Protocol):
    """What is decided of every pod in which a kernel runs, before it is known which one."""

    @property
    def notebook(self) -> Notebook:
        """The notebook server beside which it is."""

    @property
    def node(self) -> str:
        """Its node; empty where the cluster chooses it."""

    @property
    def body(self) -> ContainerSettings:
        """Its container, but for the slice."""

    @property
    def supervisor(self) -> Manifest | None:
        """The ConfigMap with its supervisor; None for a kernel without one."""


@dataclass(frozen=True, slots=True)
class KernelPodRequest:
    """One kernel to be started."""

    pool: str
    lease: Lease
    notebook: Notebook
    command: KernelCommand
    #: The node and what to ask there, by the cluster's dialect; no node where the cluster chooses it.
    node: str
    parts: PodParts
    bans: PodBans
    body: ContainerSettings
    #: The LocalQueue in which the pod waits, where Kueue has the queue.
    queue: str = ""
    #: How many pods are placed on the node at a time; 0 for any number.
    at_once: int = 0
    #: The ConfigMap with the supervisor of the pod's kernel; None for a kernel without one.
    supervisor: Manifest | None = None

    @property
    def launch(self) -> str:
        """The same for the same kernel, and nobody finds its key by it."""
        known = [list(self.command.argv), dict(self.command.connection), dict(self.command.environment)]
        preload = [list(self.command.preload)] if self.command.preload else []
        text = json.dumps([*known, self.command.folder, *preload], sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:32]


def check_command(command: KernelCommand, bans: PodBans, *, require_curve: bool) -> None:
    """Refuse what no pod can be made of. Raises ``BadRequest`` and ``NotAllowed``."""
    words = [*command.argv, *command.environment.values(), command.folder or ""]
    if len(command.preload) > _MOST_WORDS or not all(map(_MODULE.fullmatch, command.preload)):
        raise BadRequest(f"A kernel may preload up to {_MOST_WORDS} modules, named as in import.")
    if not command.argv or len(command.argv) > _MOST_WORDS or len(command.environment) > _MOST_VARIABLES:
        raise BadRequest(
            f"A kernel's command may have 1 to {_MOST_WORDS} words and {_MOST_VARIABLES} variables."
        )
    if any("\0" in word or len(word) > _MOST_TEXT for word in words):
        raise BadRequest(
            f"Words and variables of a kernel may have at most {_MOST_TEXT} characters, and no NUL."
        )
    for name in command.environment:
        if not _VARIABLE.fullmatch(name):
            raise BadRequest(f"{name[:40]!a} is not the name of a variable.")
        if name in bans.environment | _NEVER:
            raise NotAllowed(
                f"This kernel sets the variable {name}, which would lift the limits of its GPU slice.",
                "Leave it out of the kernel's kernel.json.",
            )
    _check_connection(command.connection, require_curve=require_curve)


def _check_connection(connection: Mapping[str, Any], *, require_curve: bool) -> None:
    wrong = [name for name in _PORTS if not _is_port(connection.get(name))]
    # With an empty key, a kernel carries out what anybody sends it.
    wrong += [] if _is_text(connection.get("key"), least=1) else ["key"]
    wrong += [] if _matches(_SCHEME, connection.get("signature_scheme")) else ["signature_scheme"]
    wrong += [name for name in _MORE if not _is_text(connection.get(name, ""), least=0)]
    if wrong or connection.get("transport", "tcp") != "tcp":
        raise BadRequest(
            f"The connection of the kernel lacks {wrong[0] if wrong else 'the transport tcp'}.",
            "A kernel in a pod needs five fixed ports, a key and its signature scheme.",
        )
    given = [name for name in _KEYS if name in connection]
    if not given and require_curve:
        raise NotAllowed(
            "The connection to this kernel would cross the network unencrypted.",
            "Upgrade jupyter-gpu-pool where your server runs, or ask the administrator.",
        )
    for name in _KEYS if given else ():
        if not _matches(_CURVE_KEY, connection.get(name)):
            raise BadRequest(
                f"The connection of the kernel has no {name} that could encrypt it.",
                "Accepted: a pair of keys with 40 characters each, of zmq.curve_keypair(), or none.",
            )


def _is_text(value: object, *, least: int) -> bool:
    return isinstance(value, str) and least <= len(value) <= _MOST_TEXT


def _matches(pattern: re.Pattern[str], value: object) -> bool:
    return isinstance(value, str) and pattern.fullmatch(value) is not None


def _is_port(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 1024 <= value <= 65_535


def pod(order: KernelPodRequest, name: str, now: float) -> dict[str, Any]:
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
        "annotations": {LAUNCH: order.launch, **STAYS},
        "ownerReferences": [owner],
    }
    spec = spec_of(order, name, _container(order))
    if (seconds := runs_for(lease, now)) is not None:
        spec["activeDeadlineSeconds"] = seconds
    base = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
    return merged(base, CONTAINER, order.parts, order.bans)


def runs_for(lease: Lease, since: float) -> int | None:
    """Return for how many seconds a pod of this lease may run that has started then; None for any time."""
    ends_at = lease.terms.ends_at
    # Time parked does not count, and nobody can move a pod's deadline to a later time.
    if ends_at is None or lease.terms.parks_in_pod:
        return None
    return max(1, int(ends_at - since) + _DEADLINE_MARGIN)


def connection_in_pod(command: KernelCommand) -> dict[str, Any]:
    """Return what a kernel's connection file says in its pod."""
    names = (*_PORTS, *_TEXTS, *_KEYS, *_MORE)
    connection = {name: command.connection[name] for name in names if name in command.connection}
    return {**connection, "ip": "0.0.0.0", "transport": "tcp"}  # noqa: S104 - the pod's own address


def beginning(order: KernelPodRequest) -> dict[str, Any]:
    """Return what the supervisor of a pod that runs already is told, so that it starts this kernel."""
    return {
        "connection": connection_in_pod(order.command),
        "argv": _argv(order.command),
        "environment": {**_variables(order), **order.parts.environment},
        "folder": _folder(order.body, order.command.folder),
    }


def secret(made: Manifest, command: KernelCommand) -> dict[str, Any]:
    """Return the Secret with the connection file of a pod that was made; it goes with the pod."""
    return secret_of(made, connection_in_pod(command))


def secret_of(made: Manifest, connection: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Secret of a pod that was made, with what its connection file says."""
    text = json.dumps(connection)
    metadata = made["metadata"]
    owner = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
    return {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {
            "name": metadata["name"],
            "namespace": metadata["namespace"],
            "labels": {
                key: metadata["labels"][key] for key in (POOL_LABEL, LEASE_LABEL) if key in metadata["labels"]
            },
            "ownerReferences": [owner],
        },
        "immutable": True,
        "data": {"connection.json": base64.b64encode(text.encode()).decode()},
    }


def supervisor(files: Mapping[str, str | bytes], pool: str) -> dict[str, Any]:
    """Return the ConfigMap with the supervisor's files, by their paths, which all pods of a namespace mount.

    Its name is another one for each version of them, so that nobody ever writes to one that is used.
    """
    texts = {path: content for path, content in files.items() if isinstance(content, str)}
    code = {path: content for path, content in files.items() if isinstance(content, bytes)}
    # The same text may be compiled to other bytes, which do the same.
    digest = hashlib.sha256(json.dumps([texts, sorted(code)], sort_keys=True).encode()).hexdigest()
    labels = {"app.kubernetes.io/managed-by": PREFIX, POOL_LABEL: label_value(pool)}
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": f"gpu-pool-supervisor-{digest[:12]}", "labels": labels},
        "immutable": True,
        "data": texts,
        # A key has no slash; pods mount all that is bytes in the folder where Python looks for code.
        "binaryData": {
            path.rpartition("/")[2]: base64.b64encode(content).decode() for path, content in code.items()
        },
    }


def spec_of(order: PodSetup, name: str, container: dict[str, Any]) -> dict[str, Any]:
    """Return what a pod of that name is, with this container."""
    body = order.body
    # Without a group for its files, it belongs to root; nobody but this kernel has it mounted.
    mode = 0o444 if body.run_as.fs_group is None else 0o440
    connection = {"secretName": name, "defaultMode": mode}
    spec: dict[str, Any] = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": _GRACE,
        "securityContext": _security(body.run_as),
        "tolerations": _tolerations(body),
        # A container's first process is told of no signal that it does not handle, and inherits every
        # orphan; with this, that process is the runtime's own, which does nothing else.
        "shareProcessNamespace": True,
        "volumes": [
            _home_volume(body.home),
            {"name": "connection-secret", "secret": connection},
            {"name": "connection", "emptyDir": {"medium": "Memory", "sizeLimit": "1Mi"}},
            *_supervisor_volume(order.supervisor),
        ],
        "containers": [container],
    }
    if not body.run_as.host_users:
        spec["hostUsers"] = False
    if order.node:
        spec["affinity"] = {"nodeAffinity": _on(order.node)}
    if order.notebook.pull_secrets:
        spec["imagePullSecrets"] = [{"name": each} for each in order.notebook.pull_secrets]
    return spec


def _tolerations(body: ContainerSettings) -> list[dict[str, Any]]:
    """Return which taints a kernel tolerates: those of users' nodes, those that were named, a lost node's."""
    lost = {"operator": "Exists", "effect": "NoExecute", "tolerationSeconds": body.lost_after}
    return [*tolerations_of(body.tolerations), *({"key": key, **lost} for key in _LOST)]


def _security(run_as: Identity) -> dict[str, Any]:
    security: dict[str, Any] = {
        "runAsNonRoot": True,
        "runAsUser": run_as.uid,
        "runAsGroup": run_as.gid,
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    if run_as.fs_group is not None:
        # A home with many files would be gone through at every start.
        security |= {"fsGroup": run_as.fs_group, "fsGroupChangePolicy": "OnRootMismatch"}
    if run_as.groups:
        security["supplementalGroups"] = list(run_as.groups)
    if run_as.groups_policy:
        security["supplementalGroupsPolicy"] = run_as.groups_policy
    if run_as.selinux_level:
        security["seLinuxOptions"] = {"level": run_as.selinux_level}
    return security


def _home_volume(home: HomeVolume | None) -> dict[str, Any]:
    if home is None:
        return {"name": "home", "emptyDir": {}}
    claim: dict[str, Any] = {"claimName": home.claim}
    if home.is_read_only:
        claim["readOnly"] = True
    return {"name": "home", "persistentVolumeClaim": claim}


def _supervisor_volume(supervisor: Manifest | None) -> list[dict[str, Any]]:
    """Return the volume with the supervisor: a pod runs without it, too, where somebody has deleted it."""
    if supervisor is None:
        return []
    places = {key: key for key in supervisor["data"]}
    places |= {key: f"{_CODE_FOLDER}/{key}" for key in supervisor["binaryData"]}
    items = [{"key": key, "path": path} for key, path in places.items()]
    source = {"name": supervisor["metadata"]["name"], "items": items, "optional": True}
    return [{"name": "supervisor", "configMap": source}]


def _home_mounts(body: ContainerSettings) -> list[dict[str, Any]]:
    """Return the mounts of the home, each as the notebook server has it."""
    mounts = (HomeMount(),) if body.home is None else body.home.mounts
    return [_home_mount(body.home_path, each) for each in mounts]


def _home_mount(path: str, mount: HomeMount) -> dict[str, Any]:
    made: dict[str, Any] = {"name": "home", "mountPath": f"{path.rstrip('/')}/{mount.below}".rstrip("/")}
    said = {
        "subPath": mount.sub_path,
        "readOnly": mount.read_only,
        "recursiveReadOnly": mount.recursive_read_only,
        "mountPropagation": mount.propagation,
    }
    return made | {key: value for key, value in said.items() if value}


def _on(node: str) -> dict[str, Any]:
    """Return the affinity for one node: the pool has chosen, and its scheduler has to agree or wait."""
    field = {"key": "metadata.name", "operator": "In", "values": [node]}
    return {
        "requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [{"matchFields": [field]}]}
    }


def _container(order: KernelPodRequest) -> dict[str, Any]:
    command = order.command
    starts_alike = command.argv[:3] == (*KERNELS_PYTHON, "-m")
    python = " ".join(KERNELS_PYTHON if starts_alike else _ISOLATED)
    supervised = _SUPERVISED.format(python=python, preload=",".join(command.preload))  # which need no quotes
    start = START + (_ALONE if order.supervisor is None else supervised)
    folder = _folder(order.body, command.folder)
    return container_of(order, start, _argv(command), folder, _variables(order))


def _argv(command: KernelCommand) -> list[str]:
    return [word.replace("{connection_file}", CONNECTION_FILE) for word in command.argv]


def container_of(
    order: PodSetup, start: str, argv: Iterable[str], folder: str, variables: Mapping[str, str]
) -> dict[str, Any]:
    """Return the container in which a kernel runs.

    Parameters
    ----------
    order
        What is decided of its pod.
    start
        What the shell runs first, with ``argv`` as its arguments.
    argv
        The kernel's command.
    folder
        Where it starts.
    variables
        Its own variables.
    """
    body = order.body
    limits = {}
    if body.cpu:
        limits["cpu"] = f"{round(body.cpu * 1000)}m"
    if body.memory_mib:
        limits["memory"] = f"{body.memory_mib}Mi"
    mounts = [
        *_home_mounts(body),
        {"name": "connection-secret", "mountPath": MOUNTED_FOLDER, "readOnly": True},
        {"name": "connection", "mountPath": CONNECTION_FOLDER},
    ]
    if order.supervisor is not None:
        mounts.append({"name": "supervisor", "mountPath": SUPERVISOR_FOLDER, "readOnly": True})
    return {
        "name": CONTAINER,
        "image": body.image,
        "command": ["/bin/sh", "-c", _literal(start), "kernel"],
        "args": [_literal(word) for word in argv],
        "workingDir": folder,
        # The end of its log, where it has ended: nobody can read that once its pod is gone.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "env": [{"name": name, "value": _literal(value)} for name, value in sorted(variables.items())],
        "resources": {"limits": limits, "requests": dict(limits)},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "privileged": False,
            "runAsNonRoot": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "volumeMounts": mounts,
    }


def _folder(body: ContainerSettings, folder: str | None) -> str:
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


def _variables(order: KernelPodRequest) -> dict[str, str]:
    theirs = {k: v for k, v in order.command.environment.items() if not _OURS.fullmatch(k)}
    # Which GPU a container sees is the cluster's affair, by the names that it has there.
    ours = {k: v for k, v in order.lease.environment.items() if k != "CUDA_VISIBLE_DEVICES"}
    return {**theirs, **ours, "HOME": order.body.home_path, POD_VARIABLE: "1"}


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
