"""How a container of a pod becomes a process: variables, command, user, rights. See node_agent."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes_asyncio.client import CoreV1Api

from support.containers import DEFAULT_CAPABILITIES, Container, Image, Mount
from support.pod_volumes import KNOWN, Manifest, NotYet, Volumes, read_data

_REFERENCE = re.compile(r"\$\$|\$\(([^)]*)\)")
_PROBES = ("startupProbe", "readinessProbe", "livenessProbe", "lifecycle")
_OF_THIS_MACHINE = ("hostNetwork", "hostPID", "hostIPC")


@dataclass(frozen=True)
class Place:
    """Where a pod lives: its address, and its folder on this machine."""

    address: str
    folder: Path
    #: Holds a folder for each PersistentVolumeClaim, which pods share.
    claims: Path
    #: The variables of every image here.
    image_environment: Mapping[str, str]


def unknown_in(pod: Manifest) -> str:
    """Return what a pod asks for and no node of the tests does, in words; nothing for other pods.

    What is left out here by intent is in ``node_agent``.
    """
    spec, found = pod["spec"], []
    for volume in spec.get("volumes", ()):
        found += [f"volume of the kind {kind}" for kind in volume.keys() - KNOWN - {"name"}]
    found += [name for name in _OF_THIS_MACHINE if spec.get(name)]
    for container in (*spec.get("initContainers", ()), *spec["containers"]):
        found += [name for name in _PROBES if container.get(name)]
        found += ["privileged container"] if _security(pod, container).get("privileged") else []
        found += ["init container that goes on"] if "restartPolicy" in container else []
        found += [] if _command(container) else ["command of an image's own"]
        for each in container.get("env", ()):
            found += ["resourceFieldRef"] if "resourceFieldRef" in each.get("valueFrom", {}) else []
    return " and ".join(dict.fromkeys(found))


def _command(container: Manifest) -> list[str]:
    """Return what a container runs; what images of the name pause run by themselves does nothing."""
    said = [*container.get("command", ()), *container.get("args", ())]
    return said or (["sleep", "infinity"] if "/pause:" in container["image"] else [])


async def container_of(
    core: CoreV1Api, pod: Manifest, spec: Manifest, place: Place, image: Image, volumes: Volumes, last: Path
) -> Container:
    """Return how to run a container; ``last`` is the file of its last words. Raises NotYet."""
    uid, gid = _user(pod, spec, image)
    links = await _links(core, pod)
    known = {**links, **await _variables(core, pod, spec, place, links)}
    home = {"HOSTNAME": pod["metadata"]["name"], "HOME": image.home_of(uid)}
    mounts = volumes.mounts(spec, lambda text: _expanded(text, known, must_know=True))
    mounts.append(Mount(last, spec.get("terminationMessagePath", "/dev/termination-log")))
    words = [_expanded(each, known) for each in _command(spec)]
    security = _security(pod, spec)
    return Container(
        words,
        {**place.image_environment, **home, **known},
        spec.get("workingDir", image.home),
        uid,
        gid,
        _groups(pod, gid),
        mounts,
        _capabilities(security.get("capabilities", {})),
        security.get("allowPrivilegeEscalation") is False,
        bool(security.get("readOnlyRootFilesystem")),
    )


def _command(container: Manifest) -> tuple[str, ...]:
    """Return what a container runs. Of what images run by themselves, the pause of Kubernetes is known."""
    said = (*container.get("command", ()), *container.get("args", ()))
    return said or (("sleep", "infinity") if "/pause:" in container.get("image", "") else ())


def _security(pod: Manifest, container: Manifest) -> dict[str, Any]:
    return {**pod["spec"].get("securityContext", {}), **container.get("securityContext", {})}


def _user(pod: Manifest, container: Manifest, image: Image) -> tuple[int, int]:
    """Return as whom it runs. Raises NotYet where that is not allowed."""
    security, metadata = _security(pod, container), pod["metadata"]
    uid = security.get("runAsUser", image.uid)
    if security.get("runAsNonRoot") and uid == 0:
        why = "container's runAsUser breaks non-root policy"
        if "runAsUser" not in security:
            why = "container has runAsNonRoot and image will run as root"
        about = f'"{metadata["name"]}_{metadata["namespace"]}({metadata["uid"]})"'
        raise NotYet(f"{why} (pod: {about}, container: {container['name']})")
    return uid, security.get("runAsGroup", image.group_of(uid))


def _groups(pod: Manifest, gid: int) -> list[int]:
    of_pod = pod["spec"].get("securityContext", {})
    found = [gid, *of_pod.get("supplementalGroups", ())]
    return sorted({*found, *([of_pod["fsGroup"]] if "fsGroup" in of_pod else [])})


def _capabilities(said: Manifest) -> frozenset[str]:
    added, dropped = ({name.lower() for name in said.get(key, ())} for key in ("add", "drop"))
    return frozenset((set() if "all" in dropped else DEFAULT_CAPABILITIES - dropped) | added)


def _expanded(text: str, values: Mapping[str, str], *, must_know: bool = False) -> str:
    """Replace ``$(NAME)`` as a kubelet does; a name that is not known stays, or is an error."""

    def replaced(found: re.Match[str]) -> str:
        name = found[1]
        if name is None:
            return "$"
        if must_know and name not in values:
            raise NotYet(f"missing value for {name}")
        return values.get(name, found[0])

    return _REFERENCE.sub(replaced, text)


async def _links(core: CoreV1Api, pod: Manifest) -> dict[str, str]:
    """Return the variables by which a container finds the services of its namespace, and the API."""
    of_all = await _services(core, "default")
    found = {name: spec for name, spec in of_all.items() if name == "kubernetes"}
    if pod["spec"].get("enableServiceLinks", True):
        found |= await _services(core, pod["metadata"]["namespace"])
    values: dict[str, str] = {}
    for name, spec in found.items():
        values |= _link(name.upper().replace("-", "_"), spec)
    return values


async def _services(core: CoreV1Api, namespace: str) -> dict[str, Any]:
    listed = await core.list_namespaced_service(namespace)
    items = {each.metadata.name: each.spec for each in listed.items}
    return {name: spec for name, spec in items.items() if spec.cluster_ip not in (None, "", "None")}


def _link(prefix: str, spec: Any) -> dict[str, str]:
    first, host = spec.ports[0], spec.cluster_ip
    url = f"{first.protocol.lower()}://{host}:{first.port}"
    values = {
        f"{prefix}_SERVICE_HOST": host,
        f"{prefix}_SERVICE_PORT": str(first.port),
        f"{prefix}_PORT": url,
    }
    for port in spec.ports:
        if port.name:
            values[f"{prefix}_SERVICE_PORT_{port.name.upper().replace('-', '_')}"] = str(port.port)
        protocol = port.protocol.lower()
        start = f"{prefix}_PORT_{port.port}_{port.protocol.upper()}"
        values |= {start: f"{protocol}://{host}:{port.port}", f"{start}_PROTO": protocol}
        values |= {f"{start}_PORT": str(port.port), f"{start}_ADDR": host}
    return values


async def _variables(
    core: CoreV1Api, pod: Manifest, container: Manifest, place: Place, links: Mapping[str, str]
) -> dict[str, str]:
    """Return a container's own variables, in which those before and the services' may be named."""
    values: dict[str, str] = {}
    for each in container.get("envFrom", ()):
        kind, key = ("secret", "secretRef") if "secretRef" in each else ("config_map", "configMapRef")
        found = await read_data(core, kind, pod["metadata"]["namespace"], each[key]["name"], each[key])
        values |= {each.get("prefix", "") + name: value.decode() for name, value in found.items()}
    for each in container.get("env", ()):
        if "valueFrom" in each:
            value = await _value_from(core, pod, each["valueFrom"], place)
        else:
            value = _expanded(each.get("value", ""), {**links, **values})
        if value is not None:
            values[each["name"]] = value
    return values


async def _value_from(core: CoreV1Api, pod: Manifest, source: Manifest, place: Place) -> str | None:
    namespace = pod["metadata"]["namespace"]
    for kind, key in (("secret", "secretKeyRef"), ("config_map", "configMapKeyRef")):
        if key in source:
            found = await read_data(core, kind, namespace, source[key]["name"], source[key])
            if source[key]["key"] in found:
                return found[source[key]["key"]].decode()
            if source[key].get("optional"):
                return None
            about = "Secret" if kind == "secret" else "ConfigMap"
            words = f"{source[key]['key']} in {about} {namespace}/{source[key]['name']}"
            raise NotYet(f"couldn't find key {words}")
    return _field(pod, source["fieldRef"]["fieldPath"], place)


def _field(pod: Manifest, path: str, place: Place) -> str:
    if path in ("status.podIP", "status.podIPs"):
        return place.address
    if path in ("status.hostIP", "status.hostIPs"):
        return "127.0.0.1"
    found = re.fullmatch(r"metadata\.(labels|annotations)\['(.+)'\]", path)
    if found:
        return str(pod["metadata"].get(found[1], {}).get(found[2], ""))
    value: Any = pod
    for key in path.split("."):
        value = value.get(key, {})
    return str(value or "")


def own_environment() -> dict[str, str]:
    """Return the variables that any program needs here; what lies beside this Python is found first."""
    found = {name: os.environ[name] for name in ("LANG", "LC_ALL") if name in os.environ}
    return {**found, "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"}
