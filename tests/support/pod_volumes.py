"""The volumes of a pod on a node of the tests, as a kubelet makes them. See node_agent."""

from __future__ import annotations

import base64
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kubernetes_asyncio.client import CoreV1Api
from kubernetes_asyncio.client.exceptions import ApiException

from support.containers import Mount

Manifest = Mapping[str, Any]
#: Kinds of volumes that are mounted read-only, whatever the mount says.
_NEVER_WRITTEN = {"secret", "configMap"}
KNOWN = {*_NEVER_WRITTEN, "emptyDir", "hostPath", "persistentVolumeClaim"}
_DATA = "..2026_01_01_00_00_00.1"


class NotYet(Exception):
    """What the pod names is not there yet; a kubelet tries again."""


class Volumes:
    """The volumes of one pod, by name."""

    def __init__(self, core: CoreV1Api, pod: Manifest, folder: Path, memory: Path, claims: Path) -> None:
        """They are made in ``folder``, and in ``memory`` those that a disk never sees."""
        self._core, self._pod, self._folder, self._memory, self._claims = core, pod, folder, memory, claims
        self._paths: dict[str, Path] = {}
        self._read_only: set[str] = set()

    async def make(self) -> None:
        """Make those that are not made yet. Raises NotYet, and has made as many as can be."""
        troubles = []
        for volume in self._pod["spec"].get("volumes", ()):
            name = volume["name"]
            try:
                self._paths[name] = self._paths.get(name) or await self._made(volume)
            except NotYet as trouble:
                troubles.append(f'MountVolume.SetUp failed for volume "{name}" : {trouble}')
            if volume.keys() & _NEVER_WRITTEN or _is_read_only_claim(volume):
                self._read_only.add(name)
        if troubles:
            raise NotYet("\n".join(troubles))

    def mounts(self, container: Manifest, expand: Callable[[str], str]) -> list[Mount]:
        """Return what a container mounts. ``expand`` puts variables into a ``subPathExpr``."""
        found = []
        for each in container.get("volumeMounts", ()):
            name, folder = each["name"], self._paths[each["name"]]
            part = each.get("subPath") or expand(each.get("subPathExpr", ""))
            # Never asked of the API here: that no mount leads out of its volume is the kubelet's to see to.
            if part.startswith("/") or ".." in part.split("/"):
                raise NotYet(f'unable to provision SubPath "{part}": must not contain ".."')
            source = folder / part
            _make_within(folder, source)
            is_read_only = bool(each.get("readOnly")) or name in self._read_only
            found.append(Mount(source, os.path.normpath(each["mountPath"]), is_read_only))
        return found

    async def _made(self, volume: Manifest) -> Path:
        name, namespace = volume["name"], self._pod["metadata"]["namespace"]
        if "hostPath" in volume:
            return _there(Path(volume["hostPath"]["path"]), 0o755)
        if "persistentVolumeClaim" in volume:
            path = self._claims / namespace / volume["persistentVolumeClaim"]["claimName"]
            return _there(path, 0o777)
        if "emptyDir" in volume:
            in_memory = volume["emptyDir"].get("medium") == "Memory"
            path = _folder(
                (self._memory if in_memory else self._folder) / name, 0o1777 if in_memory else 0o777
            )
        elif "secret" in volume:
            source, path = volume["secret"], self._memory / name
            found = await read_data(self._core, "secret", namespace, source["secretName"], source)
            # In memory, where everybody may make files and nobody remove another's.
            _write(_folder(path, 0o1777), found, source)
        else:
            source, path = volume["configMap"], self._folder / name
            found = await read_data(self._core, "config_map", namespace, source["name"], source)
            _write(_folder(path, 0o777), found, source)
        group = self._pod["spec"].get("securityContext", {}).get("fsGroup")
        if group is not None:
            _give(path, group, is_read_only="emptyDir" not in volume)
        return path


def _is_read_only_claim(volume: Manifest) -> bool:
    return bool(volume.get("persistentVolumeClaim", {}).get("readOnly"))


def _there(path: Path, mode: int) -> Path:
    return path if path.exists() else _folder(path, mode)


def _folder(path: Path, mode: int) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    path.chmod(mode)
    return path


def _make_within(folder: Path, path: Path) -> None:
    """Make a folder of a volume, with the mode that the volume has."""
    missing = [each for each in (path, *path.parents) if each.is_relative_to(folder) and not each.exists()]
    for each in reversed(missing):
        _folder(each, stat.S_IMODE(folder.stat().st_mode))


def _write(folder: Path, data: Mapping[str, bytes], source: Manifest) -> None:
    """Write files as links to a folder that can be replaced as a whole."""
    kept = _folder(folder / _DATA, 0o755)
    (folder / "..data").symlink_to(_DATA)
    items = source.get("items") or [{"key": key, "path": key} for key in data]
    for item in items:
        if item["key"] not in data:
            if source.get("optional"):
                continue
            raise NotYet(f"references non-existent secret key: {item['key']}")
        file = kept / item["path"]
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch(mode=0o600)
        file.write_bytes(data[item["key"]])
        file.chmod(item.get("mode", source.get("defaultMode", 0o644)))
        top = Path(item["path"]).parts[0]
        if not (folder / top).is_symlink():
            (folder / top).symlink_to(Path("..data") / top)


def _give(folder: Path, group: int, *, is_read_only: bool) -> None:
    """Give a volume to a group, as a kubelet does at each start of a pod."""
    for path in (folder, *folder.rglob("*")):
        os.chown(path, -1, group, follow_symlinks=False)
        if path.is_symlink():
            continue
        more = 0o440 if is_read_only else 0o660
        path.chmod(path.stat().st_mode | more | (0o2110 if path.is_dir() else 0))


async def read_data(
    core: CoreV1Api, kind: str, namespace: str, name: str, source: Manifest
) -> dict[str, bytes]:
    """Return the content of a Secret or ConfigMap. Raises NotYet where it is not there."""
    try:
        found = await getattr(core, f"read_namespaced_{kind}")(name, namespace)
    except ApiException as error:
        if error.status != 404:
            raise
        if source.get("optional"):
            return {}
        raise NotYet(f'{re.sub("_m", "M", kind).lower()} "{name}" not found') from None
    data = found.data or {}
    if kind == "secret":
        return {key: base64.b64decode(value) for key, value in data.items()}
    return {key: value.encode() for key, value in data.items()}
