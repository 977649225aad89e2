"""How a container of a pod becomes a local process: its files, its variables, its command. See node_agent."""

from __future__ import annotations

import base64
import os
import re
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kubernetes_asyncio.client import CoreV1Api
from kubernetes_asyncio.client.exceptions import ApiException

Manifest = Mapping[str, Any]
#: Kinds of volumes that a kubelet mounts read-only, whatever the mount says.
_NEVER_WRITTEN = {"secret", "configMap", "projected", "downwardAPI"}
_REFERENCE = re.compile(r"\$\(([A-Za-z_][A-Za-z0-9_.-]*)\)")


class NotYet(Exception):
    """What the pod names is not there yet; a kubelet tries again."""


@dataclass(frozen=True)
class Command:
    """What is run, with which variables, and in which folder."""

    argv: list[str]
    environment: dict[str, str]
    folder: Path


@dataclass(frozen=True)
class Place:
    """Where a pod lives: its address, and its folder on this machine."""

    address: str
    folder: Path
    #: Holds a folder for each PersistentVolumeClaim, which pods share.
    claims: Path
    #: The variables of every image here.
    image_environment: Mapping[str, str]


async def command_of(core: CoreV1Api, pod: Manifest, container: Manifest, place: Place) -> Command:
    """Return how to run a container. Raises NotYet, and ValueError for what is not known here."""
    volumes = {each["name"]: await _volume(core, pod, each, place) for each in pod["spec"].get("volumes", ())}
    values = dict(place.image_environment)
    values |= {"HOSTNAME": pod["metadata"]["name"], "HOME": str(place.folder)}
    given: dict[str, str] = {}
    async for name, value in _variables(core, pod, container, place):
        given[name] = values[name] = _expanded(value, values)
    mounts = dict(_mounts(container, volumes, given))
    local = _localiser(mounts, place.address)
    values |= {name: local(value) for name, value in given.items()}
    argv = [*container.get("command", ()), *container.get("args", ())]
    if not argv:
        raise ValueError("an image's own command is not known here: give command or args")
    folder = Path(local(container["workingDir"])) if "workingDir" in container else place.folder
    words = [local(_expanded(each, values)) for each in argv]
    return Command(_locked(words, [mounts[path] for path in _read_only(container, pod)]), values, folder)


def _read_only(container: Manifest, pod: Manifest) -> Iterator[str]:
    """Yield where a container has what it cannot write, root or not."""
    kept = {each["name"] for each in pod["spec"].get("volumes", ()) if each.keys() & _NEVER_WRITTEN}
    for mount in container.get("volumeMounts", ()):
        if mount.get("readOnly") or mount["name"] in kept:
            yield mount["mountPath"].rstrip("/")


def _locked(argv: list[str], folders: list[Path]) -> list[str]:
    """Return a command that runs where these folders are read-only, as mounts are; it stays one process."""
    if not folders:
        return argv
    if os.geteuid() != 0:
        for folder in folders:
            for each in (folder, *folder.rglob("*")):
                each.chmod(each.stat().st_mode & ~0o222)
        return argv
    paths = [shlex.quote(str(folder)) for folder in folders]
    bound = " && ".join(f"mount --bind {path} {path} && mount -o remount,bind,ro {path}" for path in paths)
    return ["unshare", "--mount", "sh", "-c", f'{bound} && exec "$@"', "locked", *argv]


def _expanded(text: str, values: Mapping[str, str]) -> str:
    """Replace ``$(NAME)`` as a kubelet does; a name that is not known stays."""
    return _REFERENCE.sub(lambda found: values.get(found[1], found[0]), text)


def _localiser(mounts: Mapping[str, Path], address: str) -> Callable[[str], str]:
    """Return what rewrites a text to this machine's paths and to the pod's own address."""
    paths = sorted(mounts, key=len, reverse=True)
    known = "|".join([rf"(?<![\w./-]){re.escape(path)}" for path in paths] + [r"(?<![\w.-])0\.0\.0\.0"])
    pattern = re.compile(rf"(?:{known})(?![\w.-])")

    def local(text: str) -> str:
        return pattern.sub(lambda found: str(mounts.get(found[0], address)), text)

    return local


def _mounts(
    container: Manifest, volumes: Mapping[str, Path], values: Mapping[str, str]
) -> Iterator[tuple[str, Path]]:
    for mount in container.get("volumeMounts", ()):
        part = mount.get("subPath") or _expanded(mount.get("subPathExpr", ""), values)
        folder = volumes[mount["name"]] / part
        if not folder.exists():
            folder.mkdir(parents=True)
        yield mount["mountPath"].rstrip("/"), folder


async def _volume(core: CoreV1Api, pod: Manifest, volume: Manifest, place: Place) -> Path:
    namespace, folder = pod["metadata"]["namespace"], place.folder / "volumes" / volume["name"]
    if "hostPath" in volume:
        return Path(volume["hostPath"]["path"])
    if "persistentVolumeClaim" in volume:
        folder = place.claims / namespace / volume["persistentVolumeClaim"]["claimName"]
    elif "secret" in volume:
        found = await _data(core, "secret", namespace, volume["secret"]["secretName"], volume["secret"])
        # What listens on all of a pod's addresses listens on its own here.
        own = {key: text.replace(b'"0.0.0.0"', f'"{place.address}"'.encode()) for key, text in found.items()}
        _write(folder, own, volume["secret"])
    elif "configMap" in volume:
        found = await _data(core, "config_map", namespace, volume["configMap"]["name"], volume["configMap"])
        _write(folder, found, volume["configMap"])
    elif "emptyDir" not in volume:
        raise ValueError(f"volumes of this kind are not known here: {volume}")
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _write(folder: Path, data: Mapping[str, bytes], source: Manifest) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    paths = {each["key"]: each["path"] for each in source.get("items", ())} or {key: key for key in data}
    for key, path in paths.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.write_bytes(data[key])
        file.chmod(source.get("defaultMode", 0o644))


async def _data(core: CoreV1Api, kind: str, namespace: str, name: str, source: Manifest) -> dict[str, bytes]:
    """Return the content of a Secret or ConfigMap."""
    try:
        found = await getattr(core, f"read_namespaced_{kind}")(name, namespace)
    except ApiException as error:
        if error.status != 404:
            raise
        if source.get("optional"):
            return {}
        raise NotYet(f"there is no {kind} {name}") from None
    data = found.data or {}
    if kind == "secret":
        return {key: base64.b64decode(value) for key, value in data.items()}
    return {key: value.encode() for key, value in data.items()}


async def _variables(core: CoreV1Api, pod: Manifest, container: Manifest, place: Place) -> Any:
    for each in container.get("envFrom", ()):
        kind, key = ("secret", "secretRef") if "secretRef" in each else ("config_map", "configMapRef")
        found = await _data(core, kind, pod["metadata"]["namespace"], each[key]["name"], each[key])
        for name, value in found.items():
            yield each.get("prefix", "") + name, value.decode()
    for each in container.get("env", ()):
        value = each.get("value", "")
        if "valueFrom" in each:
            value = await _value_from(core, pod, each["valueFrom"], place)
        if value is not None:
            yield each["name"], value


async def _value_from(core: CoreV1Api, pod: Manifest, source: Manifest, place: Place) -> str | None:
    namespace = pod["metadata"]["namespace"]
    for kind, key in (("secret", "secretKeyRef"), ("config_map", "configMapKeyRef")):
        if key in source:
            found = await _data(core, kind, namespace, source[key]["name"], source[key])
            if source[key]["key"] in found:
                return found[source[key]["key"]].decode()
            if source[key].get("optional"):
                return None
            raise NotYet(f"{source[key]['name']} has no {source[key]['key']}")
    if "fieldRef" in source:
        return _field(pod, source["fieldRef"]["fieldPath"], place)
    raise ValueError(f"a variable from this is not known here: {source}")


def _field(pod: Manifest, path: str, place: Place) -> str:
    if path in ("status.podIP", "status.podIPs"):
        return place.address
    if path == "status.hostIP":
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
    found = {name: os.environ[name] for name in ("LANG", "LC_ALL", "TMPDIR") if name in os.environ}
    return {**found, "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', os.defpath)}"}
