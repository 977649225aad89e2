"""What ``examples/kubernetes`` comes to: its objects, and its service as a process of this machine."""

from __future__ import annotations

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from support.control_plane import ASSETS

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples" / "kubernetes"
#: Kinds of objects that belong to no namespace, so that they don't go with one.
CLUSTER_WIDE = (
    "ClusterRole",
    "ClusterRoleBinding",
    "ValidatingAdmissionPolicy",
    "ValidatingAdmissionPolicyBinding",
)
#: The folder of a pod that every container can write, like /tmp elsewhere.
_SHM = "/dev/shm"


def copied(folder: Path, namespace: str, *, monitoring: bool = False, examples: Path = EXAMPLES) -> Path:
    """Copy the examples as an administrator does, with a namespace of one's own, and Prometheus if wanted."""
    made = folder / "kubernetes"
    shutil.copytree(examples, made)
    where = made / "namespace.yaml"
    where.write_text(_of(namespace, where.read_text()))
    if monitoring:
        chosen = made / "kustomization.yaml"
        chosen.write_text(
            chosen.read_text().replace("components: []", "").replace("# components:", "components:")
        )
    return made


def _of(namespace: str, text: str) -> str:
    named = text.replace("namespace: jupyterhub", f"namespace: {namespace}")
    return named.replace("suffix: -jupyterhub", f"suffix: -{namespace}")


def rendered(folder: Path) -> list[dict[str, Any]]:
    """Return the objects that ``kubectl kustomize`` makes of a folder; skip if there is no kubectl."""
    if not os.access(ASSETS / "kubectl", os.X_OK):
        pytest.skip(f"no kubectl in {ASSETS} (KUBEBUILDER_ASSETS names another folder)")
    done = subprocess.run([ASSETS / "kubectl", "kustomize", folder], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))


def one(objects: Sequence[Mapping[str, Any]], kind: str, name: str) -> Any:
    """Return the object of this kind and name."""
    (found,) = (each for each in objects if (each["kind"], each["metadata"]["name"]) == (kind, name))
    return found


class LocalPod:
    """A Deployment's container as a process: its command, arguments, variables and volumes."""

    def __init__(
        self, objects: Sequence[Mapping[str, Any]], name: str, folder: Path, disks: Path | None = None
    ) -> None:
        self._objects = objects
        #: Where claims are: they outlive the pod.
        self._disks = disks or folder
        self._spec = one(objects, "Deployment", name)["spec"]["template"]["spec"]
        (self.container,) = self._spec["containers"]
        self._folders = {_SHM: _made(folder / "shm", 0o1777)}
        for number, mount in enumerate(self.container["volumeMounts"]):
            (volume,) = (each for each in self._spec["volumes"] if each["name"] == mount["name"])
            self._folders[mount["mountPath"]] = self._volume(volume, folder / str(number))
        self._log = folder / "log"
        #: Its settings as they are written, for the next start: what has been replaced may be so again.
        self._written: dict[Path, str] = {}
        #: What else is not as in the pod: texts in arguments, variables and files, and what is there instead.
        self.replaced: dict[str, str] = {}

    @property
    def log(self) -> str:
        """What the process has written."""
        return self._log.read_text()

    @contextmanager
    def running(self, more: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
        """Run it with its variables and ``more``, and none of this process's but ``PATH``."""
        self._open_to_group()
        for path in self._settings():
            path.write_text(self._here(self._written.setdefault(path, path.read_text())))
        environment = {"PATH": os.environ["PATH"], "HOME": "/nonexistent", **self.variables(), **more}
        words: list[str] = [*self.container["command"], *self.container.get("args", ())]
        assert words[0] == "gpu-pool"
        command = [sys.executable, "-m", "gpu_pool.cli", *map(self._here, words[1:])]
        with self._log.open("wb") as log:
            process = subprocess.Popen(command, env=environment, cwd="/", stdout=log, stderr=log)
        try:
            yield process
        finally:
            process.terminate()
            process.wait(60)

    def variables(self) -> dict[str, str]:
        """Return the container's own variables."""
        return {each["name"]: self._value(each) for each in self.container["env"]}

    def _value(self, variable: Mapping[str, Any]) -> str:
        if "value" in variable:
            return self._here(variable["value"])
        asked = variable["valueFrom"]["secretKeyRef"]
        data = one(self._objects, "Secret", asked["name"])["data"]
        return base64.b64decode(data[asked["key"]]).decode()

    def _volume(self, volume: Mapping[str, Any], folder: Path) -> Path:
        if "configMap" not in volume:
            # As a kubelet makes volumes of a pod with an fsGroup: its group can write them.
            if "persistentVolumeClaim" not in volume:
                return _made(folder, 0o2777)
            disk = self._disks / str(volume["persistentVolumeClaim"]["claimName"])
            return disk if disk.exists() else _made(disk, 0o2775)
        # As a kubelet writes them: links to a folder that is replaced as a whole.
        data = folder / "..2026"
        data.mkdir(parents=True)
        (folder / "..data").symlink_to(data.name)
        for name, text in one(self._objects, "ConfigMap", volume["configMap"]["name"])["data"].items():
            (data / name).write_text(text)
            (folder / name).symlink_to(f"..data/{name}")
        return folder

    def _open_to_group(self) -> None:
        """Do to volumes what a kubelet does at each start of a pod, unless it is told not to."""
        if self._spec["securityContext"].get("fsGroupChangePolicy") == "OnRootMismatch":
            return
        for folder in self._folders.values():
            for path in folder.rglob("*"):
                path.chmod(path.stat().st_mode | (0o2770 if path.is_dir() else 0o660))

    def _settings(self) -> list[Path]:
        return [path for each in self._folders.values() for path in each.glob("gpu_pool_config.*")]

    def _here(self, text: str) -> str:
        here = {**self._folders, **self.replaced}
        # At once: what has been replaced may look like what is to be.
        return re.sub("|".join(map(re.escape, here)), lambda found: str(here[found[0]]), text)


def _made(folder: Path, mode: int) -> Path:
    folder.mkdir(parents=True)
    folder.chmod(mode)
    return folder


def secret(name: str, **data: str) -> dict[str, Any]:
    """Return a Secret."""
    encoded = {key: base64.b64encode(value.encode()).decode() for key, value in data.items()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "data": encoded}


def kubeconfig_of(cluster: Any, account: str, namespace: str, path: Path) -> Path:
    """Write down how to reach the API server as a service account of a namespace does."""
    token = cluster.kubectl("create", "token", account, "-n", namespace, "--duration=1h").strip()
    known = json.loads(cluster.kubectl("config", "view", "--raw", "--minify", "--flatten", "-o", "json"))
    known["users"] = [{"name": each["name"], "user": {"token": token}} for each in known["users"]]
    known["contexts"][0]["context"]["namespace"] = namespace
    path.touch(mode=0o600)
    path.write_text(json.dumps(known))
    return path
