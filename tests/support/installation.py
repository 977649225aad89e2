"""JupyterHub and the pool in a cluster of containers, installed as docs/administrator/kubernetes.md says.

Its commands are typed as they stand there. In the place of a registry, images are handed to the node;
in that of the chart's own images, which no index of packages has, stand those of ``support.images``; the
chart's pre-puller, whose images are missing too, is left out. Homes and the store are on disks of this
machine. What enforces NetworkPolicies: ``support.kubelet``.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from support.control_plane import ASSETS
from support.guide import Guide
from support.images import ROOT, archive_of, build_as, build_base, building, name_of
from support.kube_examples import copied
from support.kubelet import NODE, PAUSE, RealCluster, no_names

#: The folder of the chart of Zero to JupyterHub.
CHART = "GPU_POOL_TEST_CHART"
NAMESPACE = "jupyterhub"
PASSWORD = "a password for this test"
#: The name of the file of :data:`_VALUES`.
HERE = "here.yaml"
_TARGETS = ("service", "hub", "notebook")
_DEPLOYMENTS = ("hub", "proxy", "gpu-pool")


def missing() -> str:
    """Return why nothing can be installed here, in words; nothing if it can."""
    if why := no_names():
        return why
    if shutil.which("helm", path=os.pathsep.join([str(ASSETS), os.environ["PATH"]])) is None:
        return f"no helm in {ASSETS} or on the PATH"
    if why := no_chart():
        return why
    if not (ROOT / "node_modules/configurable-http-proxy").is_dir():
        return "no node_modules/configurable-http-proxy (npm install configurable-http-proxy)"
    return ""


def no_chart() -> str:
    """Return why there is no chart of Zero to JupyterHub here, in words; nothing if there is."""
    if (Path(os.environ.get(CHART, "")) / "Chart.yaml").is_file():
        return ""
    return f"no chart of Zero to JupyterHub: {CHART} names its folder"


@dataclass(frozen=True)
class Installation:
    """What has been installed, and by whom."""

    cluster: RealCluster
    guide: Guide
    #: The administrator's copy of ``examples/kubernetes``.
    folder: Path
    #: What the commands below each heading printed.
    printed: dict[str, list[str]]
    #: The page of the chart of the service, ``docs/administrator/helm.md``.
    helm: Guide

    @property
    def url(self) -> str:
        """Where browsers come."""
        service = self.cluster.get("service", "-n", NAMESPACE, "proxy-public")
        return f"http://{service['spec']['clusterIP']}"

    def kernels(self) -> list[Any]:
        """Return the pods of kernels."""
        selector = "app.kubernetes.io/component=gpu-kernel"
        found: list[Any] = self.cluster.get("pods", "--all-namespaces", "-l", selector)["items"]
        return found

    def follow(self, heading: str, where: Path | None = None) -> None:
        """Type what stands below a heading, by default in the copy, and wait until all of it runs."""
        self.printed[heading] = self.guide.follow(heading, where or self.folder)
        if "helm upgrade" in " ".join(self.guide.commands(heading)):
            self.wait()

    def wait(self) -> None:
        """Wait until the Hub, its proxy and the service run as they were last told."""
        for name in _DEPLOYMENTS:
            words = ("rollout", "status", "-n", NAMESPACE, f"deployment/{name}", "--timeout=300s")
            self.cluster.kubectl(*words)

    def add(self, heading: str, name: str) -> None:
        """Add to a file of the copy what is shown of it below a heading."""
        path, more = self.folder / name, self.guide.file(heading, name)
        text = path.read_text()
        if path.suffix == ".yaml":
            path.write_text(yaml.safe_dump(_merged(yaml.safe_load(text), yaml.safe_load(more))))
        else:
            path.write_text(text + more)

    def fetch(self, image: str) -> None:
        """Let a course name this image, and the chart fetch it from its next upgrade on."""
        course, values = self.folder / "courses/vision.yaml", self.folder.parent / HERE
        told = yaml.safe_load(course.read_text())
        told["kubernetes"]["image"] = image
        course.write_text(yaml.safe_dump(told))
        name, _, tag = PAUSE.partition(":")
        more = {
            "prePuller": {"continuous": {"enabled": True}, "pause": {"image": {"name": name, "tag": tag}}}
        }
        values.write_text(yaml.safe_dump(_merged(_VALUES, more)))

    def upgrade(self, tag: str) -> None:
        """Build the images of this checkout under another tag, and go over to them and to its chart."""
        for target, base in (("service", ""), ("hub", "HUB_IMAGE"), ("notebook", "NOTEBOOK_IMAGE")):
            name = f"localhost/gpu-pool-{target}:{tag}"
            given = ["--build-arg", f"{base}={build_base(target, self.folder.parent)}"] if base else []
            build_as(target, name, *given)
            self.hand_over(name)
        install = self.helm.commands("Install")[0]
        changed, count = re.subn(r"(?<=image\.tag=)\S+", tag, install)
        assert count == 1
        self.helm.type(changed, ROOT)
        self.wait()

    def upgrade_hub(self, tag: str) -> None:
        """Let the Hub and the servers that it starts from now on have the images with this tag.

        Who reaches whom is what this checkout's ``values.yaml`` says: kernels have a port more than they had.
        """
        path = self.folder / "values.yaml"
        told, new = (
            yaml.safe_load(each.read_text()) for each in (path, ROOT / "examples/kubernetes/values.yaml")
        )
        told["singleuser"]["networkPolicy"] = new["singleuser"]["networkPolicy"]
        path.write_text(yaml.safe_dump(told))
        given = f"--set hub.image.tag={tag} --set singleuser.image.tag={tag}"
        (words,) = (each for each in self.guide.commands("5. JupyterHub") if "helm upgrade" in each)
        self.guide.type(f"{words.strip()} {given}", self.folder)
        self.wait()

    def hand_over(self, name: str) -> None:
        """Give the node an image that a registry would have."""
        archive = archive_of(name, self.folder.parent)
        self.cluster.ctr("images", "import", archive)
        archive.unlink()

    def pool(self, words: str) -> str:
        """Return what ``gpu-pool`` prints in the service's container."""
        return self.guide.type(
            f"kubectl -n {NAMESPACE} exec deploy/gpu-pool -- gpu-pool {words}", self.folder
        )


@contextmanager
def installing(
    cluster: RealCluster, folder: Path, *, by_helm: bool = False, source: Path = ROOT
) -> Iterator[Installation]:
    """Follow the page from its beginning to the end of step 6; the service also ``by_helm``, by its page.

    ``source`` is a checkout, whose pages, images, examples and chart are taken.
    """
    copy = copied(folder, NAMESPACE, examples=source / "examples/kubernetes")
    replaced, docs = replacements(folder), source / "docs"
    guide = Guide("administrator/kubernetes.md", cluster.kubeconfig, replaced, docs)
    helm = Guide("administrator/helm.md", cluster.kubeconfig, {**replaced, "my-cluster/": f"{copy}/"}, docs)
    made = Installation(cluster, guide, copy, {}, helm)
    with one_machine(cluster, folder):
        try:
            _follow(made, by_helm, source)
            yield made
        finally:
            cluster.kubectl("delete", "-k", str(made.folder), "--ignore-not-found", "--timeout=120s")


@contextmanager
def one_machine(cluster: RealCluster, folder: Path) -> Iterator[None]:
    """Let the one machine have the GPU and everything else besides, and disks for all claims."""
    disks = _disks(folder)
    cluster.apply(*disks)
    taints = cluster.get("node", NODE)["spec"].get("taints", [])
    _taint(cluster, [each for each in taints if each["key"] != "nvidia.com/gpu"])
    try:
        yield
    finally:
        _taint(cluster, taints)
        cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found", "--timeout=120s")
        names = [f"{each['kind']}/{each['metadata']['name']}" for each in disks]
        cluster.kubectl("delete", *names, "--timeout=120s")


def _taint(cluster: RealCluster, taints: Sequence[Any]) -> None:
    """Let the node have these taints and no other."""
    spec = json.dumps({"spec": {"taints": list(taints)}})
    cluster.kubectl("patch", "node", NODE, "--type=merge", "-p", spec)


def _follow(made: Installation, by_helm: bool, source: Path) -> None:
    for heading in ("What must be there", "1. Images"):
        made.follow(heading, source)
    hand_over_images(made)
    _write_names(made.folder)
    _make_kernels_small(made.folder / "courses/intro-ml.yaml")
    made.follow("3. Courses")
    if by_helm:
        # The chart is in the clone; the second command of that heading shows a mistake.
        made.helm.type(made.helm.commands("Install")[0], source)
    else:
        made.follow("4. The service")
    # From now on: what the chart, the Hub and the service make keeps the strictest rules.
    level = "pod-security.kubernetes.io/enforce=restricted"
    made.cluster.kubectl("label", "namespace", NAMESPACE, level)
    (made.folder / "login.yaml").write_text(made.guide.file("5. JupyterHub", "login.yaml"))
    for heading in ("5. JupyterHub", "6. Look at it"):
        made.follow(heading)


def _merged(old: Any, new: Any) -> Any:
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return new
    return {**old, **{key: _merged(old.get(key), value) for key, value in new.items()}}


def replacements(folder: Path) -> dict[str, str]:
    """Return what stands in the place of which texts of the pages."""
    (folder / HERE).write_text(yaml.safe_dump(_VALUES))
    return {
        # It is in this environment.
        'pip install "jupyter-gpu-pool[kubernetes]"': "gpu-pool --version",
        "docker build": " ".join(building()),
        "REGISTRY/": "localhost/",
        "HUB_IMAGE=IMAGE:TAG": f"HUB_IMAGE={build_base('hub', folder)}",
        "NOTEBOOK_IMAGE=IMAGE:TAG": f"NOTEBOOK_IMAGE={build_base('notebook', folder)}",
        "docker push": "true",
        "helm repo add jupyterhub https://hub.jupyter.org/helm-chart/": "helm version",
        "helm search repo jupyterhub/jupyterhub --versions": "helm version",
        "jupyterhub/jupyterhub --version VERSION": os.environ[CHART],
        "password: …": f"password: {PASSWORD}",
        "research: {users: [edsger]}": "research: {users: [edsger]}\n        vision: {users: [alan]}",
        "--values login.yaml": f"--values login.yaml --values {folder / HERE}",
    }


#: What is not as in a cluster with a registry.
_VALUES = {
    "proxy": {"chp": {"image": {"name": "localhost/gpu-pool-test-proxy", "tag": "1"}}},
    "prePuller": {"hook": {"enabled": False}, "continuous": {"enabled": False}},
}


def hand_over_images(made: Installation) -> None:
    """Give the node what a registry would have."""
    for name in (*map(name_of, _TARGETS), build_base("proxy", made.folder.parent)):
        made.hand_over(name)


def _write_names(folder: Path) -> None:
    """Change what step 2 says."""
    for file, key, target in (
        ("kustomization.yaml", "newName", "service"),
        ("values.yaml", "name", "hub"),
        ("values.yaml", "name", "notebook"),
    ):
        path, image = folder / file, f"gpu-pool-{target}\n"
        text = path.read_text()
        assert text.count(f" {key}: {image}") == 1, f"{file}: where is {image}?"
        path.write_text(text.replace(f" {key}: {image}", f" {key}: localhost/{image}"))


def _make_kernels_small(course: Path) -> None:
    """Let several kernels be on a machine of two cores."""
    told = yaml.safe_load(course.read_text())
    told["kubernetes"] |= {"kernel_cpu": 0.1, "kernel_memory": "1GiB"}
    course.write_text(yaml.safe_dump(told))


def _disks(folder: Path) -> list[Any]:
    """Return a default storage class, and disks of it."""
    meta = {"name": "disks", "annotations": {"storageclass.kubernetes.io/is-default-class": "true"}}
    kind = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "metadata": meta}
    return [
        {**kind, "provisioner": "kubernetes.io/no-provisioner"},
        *(_disk(folder / f"disk-{number}") for number in range(8)),
    ]


def _disk(folder: Path) -> dict[str, Any]:
    folder.mkdir()
    here = {"matchExpressions": [{"key": "kubernetes.io/os", "operator": "Exists"}]}
    spec = {
        "capacity": {"storage": "10Gi"},
        "accessModes": ["ReadWriteOnce", "ReadWriteMany"],
        "storageClassName": "disks",
        "persistentVolumeReclaimPolicy": "Retain",
        "local": {"path": str(folder)},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [here]}},
    }
    about = {"name": folder.name}
    return {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": about, "spec": spec}
