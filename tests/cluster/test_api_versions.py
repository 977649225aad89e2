"""All objects of the chart, the examples and the service, beside what each version of Kubernetes knows.

What an API server says to an expression of a policy, or to a value out of range, is in no such description:
``tests/cluster/api_server`` has a real one. Kinds of other makers, such as the Prometheus Operator's, are not
looked at.
"""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpu_pool.cluster import manifests
from gpu_pool.cluster.dialects import DEFAULTS, Cluster, DialectOptions, choose
from gpu_pool.cluster.dialects.dra import API
from gpu_pool.cluster.manifests import ContainerSettings, KernelPodRequest
from gpu_pool.cluster.notebooks import HomeVolume, Identity, Notebook
from gpu_pool_client import Device, Holder, Lease, LeaseState, NeverFits, Slice, Terms, parse_request
from support.charts import CHART, COURSE, ROOT, rendered_chart, try_helm
from support.clusters import dra, everything, listed
from support.kernel_pods import command
from support.kube_examples import copied, rendered
from support.kubernetes_api import Api

VERSIONS = Api.versions()
#: Values of the chart, each of which adds objects or fields.
OPTIONS = {
    "as it is": [],
    "courses": [COURSE],
    "node agent": [
        *("--set", "nodeAgent.enabled=true", "--set", "nodeAgent.runtimeClassName=nvidia"),
        *("--set", "nodeAgent.priorityClassName=system-node-critical"),
    ],
    "Prometheus": ["--set", "monitoring.enabled=true", "--set", "monitoring.labels.release=prometheus"],
    "Kueue": ["--set", "rbac.kueue=true"],
    "store": ["--set", "store.storageClass=fast", "--set", "store.size=5Gi"],
    "given store": ["--set", "store.existingClaim=disk"],
    "pull secret": ["--set", "imagePullSecrets[0].name=registry"],
    "placement": [
        *("--set", "nodeSelector.disk=fast", "--set", "priorityClassName=high"),
        *("--set-json", 'tolerations=[{"key":"a","operator":"Exists","effect":"NoSchedule"}]'),
        *(
            "--set-json",
            'affinity={"nodeAffinity":{"requiredDuringSchedulingIgnoredDuringExecution":'
            '{"nodeSelectorTerms":[{"matchExpressions":[{"key":"a","operator":"Exists"}]}]}}}',
        ),
    ],
    "IPv6 and exceptions": [
        "--set",
        "networkPolicy.kernelsReachIPv6=true",
        *("--set-json", 'networkPolicy.kernelsCanReach=[{"to":[{"ipBlock":{"cidr":"10.1.0.0/16"}}]}]'),
    ],
    "further mounts": [
        *(
            "--set",
            "admissionPolicy.secrets={webhook}",
            "--set",
            "admissionPolicy.hostPaths={/usr/local/vgpu}",
        ),
    ],
    "lines of Python": ["--set", "extraConfig=x = 1"],
    **{path.stem: ["--values", str(path)] for path in sorted((CHART / "dialects").iterdir())},
}
#: Kinds that are not Kubernetes' own.
OTHERS = ("ServiceMonitor",)


def ours(objects: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [each for each in objects if each["kind"] not in OTHERS]


def faults(version: str, objects: list[dict[str, Any]]) -> list[str]:
    api = Api(version)
    return [fault for each in ours(objects) for fault in api.faults(each)]


def oldest() -> str:
    """Return the oldest version that the chart says it is for."""
    told = yaml.safe_load((CHART / "Chart.yaml").read_text())["kubeVersion"]
    (found,) = re.findall(r"^>=(\d+\.\d+)\.0-0$", told)
    assert isinstance(found, str)
    return found


SERVED = VERSIONS[VERSIONS.index(oldest()) :]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_every_version_that_the_chart_is_for_knows_all_of_it(options: list[str]) -> None:
    objects = rendered_chart("jupyterhub", "--kube-version", f"{SERVED[0]}.0", *options)
    assert len(ours(objects)) > 10
    for version in SERVED:
        assert faults(version, objects) == [], version


def test_the_chart_is_the_same_for_every_version() -> None:
    """So that it is enough to render it for one of them."""
    every = [rendered_chart("jupyterhub", "--kube-version", f"{version}.0") for version in SERVED]
    assert all(each == every[0] for each in every)
    assert not [path for path in (CHART / "templates").iterdir() if ".Capabilities" in path.read_text()]


def test_an_older_version_is_refused_in_words() -> None:
    for version in VERSIONS[: VERSIONS.index(oldest())]:
        done = try_helm("template", "pool", CHART, "--kube-version", f"{version}.0")
        assert done.returncode != 0
        assert f">={oldest()}" in done.stderr


def bases() -> list[Path]:
    folder = ROOT / "examples" / "kubernetes"
    found = [path.parent for path in sorted(folder.rglob("kustomization.yaml"))]
    # A component alone makes nothing.
    return [each for each in found if "kind: Component" not in (each / "kustomization.yaml").read_text()]


@pytest.mark.parametrize("base", bases(), ids=lambda path: path.name)
def test_every_version_knows_all_of_each_base_of_the_examples(base: Path) -> None:
    objects = rendered(base)
    assert ours(objects)
    for version in SERVED:
        assert faults(version, objects) == [], version


def test_every_version_knows_all_of_the_examples_with_every_component(tmp_path: Path) -> None:
    folder = copied(tmp_path, "physics")
    components = sorted(
        path.parent.relative_to(folder)
        for path in (folder / "service").rglob("kustomization.yaml")
        if "kind: Component" in path.read_text()
    )
    assert {each.name for each in components} == {"kueue", "monitoring", "node-agent", "shared"}
    chosen = folder / "kustomization.yaml"
    given = json.dumps([str(each) for each in components])
    chosen.write_text(chosen.read_text().replace("components: []", f"components: {given}"))
    objects = rendered(folder)
    for version in SERVED:
        assert faults(version, objects) == [], version


def kernel_objects(
    found: Cluster, options: DialectOptions = DEFAULTS, size: str = "2%"
) -> list[dict[str, Any]]:
    """Return what the service makes for a kernel with a slice of this size in a cluster such as this.

    Raises NeverFits where there are no such slices.
    """
    dialect = choose(found, options).dialect
    assert dialect is not None
    parts = dialect.translate(parse_request(size)).pod
    home, run_as = HomeVolume("claim-ada"), Identity(1000, 100, fs_group=100)
    notebook = Notebook("hub", "jupyter-ada", "u-ada", "ada", "", "n1", "img:1", home)
    lease = Lease(
        "7-0123abcd", "k", parse_request("2%"), Holder("ada", "cs101"), LeaseState.HELD, 1.0,
        held_at=2.0, slices=(Slice(Device("GPU-1", 0, "V100", 32768, node="n1"), 20, 655),),
        terms=Terms(ends_at=9_000.0),
    )  # fmt: skip
    body = ContainerSettings("img:1", 2.0, 4096, "/home/jovyan", home, run_as)
    asked = command()
    order = KernelPodRequest("gpu-pool", lease, notebook, asked, "n1", parts, dialect.table.bans, body)
    made = manifests.pod(order, "kernel", 10.0)
    secret = manifests.secret({**made, "metadata": {**made["metadata"], "uid": "u"}}, asked)
    files = manifests.supervisor({"a.py": ""}, "gpu-pool")
    return [made, secret, files, *map(dict, parts.claim_templates)]


@pytest.mark.parametrize(
    ("found", "options"),
    [each for name, each in everything().items() if "dra" not in name],
    ids=[name for name in everything() if "dra" not in name],
)
def test_every_version_knows_all_of_a_kernels_objects(found: Cluster, options: DialectOptions) -> None:
    made = []
    for size in ("2%", "10%", "50%", "1"):
        with suppress(NeverFits):
            made += kernel_objects(found, options, size)
    assert made
    for version in SERVED:
        assert faults(version, made) == [], version


def test_a_claim_of_a_slice_is_known_from_the_version_on_that_serves_its_api() -> None:
    objects = kernel_objects(dra(listed("gpu-0", default="32768Mi")))
    knowing = [version for version in VERSIONS if faults(version, objects) == []]
    assert API == "resource.k8s.io/v1"
    assert knowing == VERSIONS[VERSIONS.index("1.34") :]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"apiVersion": "extensions/v1beta1"}, "extensions/v1beta1 Pod is not served"),
        ({"spec": {}}, "v1 Pod a.spec.containers is missing"),
        ({"spec": {"containers": [{"nam": "a"}]}}, "v1 Pod a.spec.containers[0].name is missing"),
        ({"spec": {"containers": [], "hostPid": True}}, "v1 Pod a.spec.hostPid is not known"),
        (
            {"spec": {"containers": [], "hostPID": "yes"}},
            "v1 Pod a.spec.hostPID is not of type boolean: 'yes'",
        ),
        (
            {"spec": {"containers": [], "priority": True}},
            "v1 Pod a.spec.priority is not of type integer: True",
        ),
        ({"spec": {"containers": {}}}, "v1 Pod a.spec.containers is not a list: {}"),
        ({"spec": {"containers": [], "nodeSelector": {"a": 1}}}, "['a'] is not of type string: 1"),
        ({"spec": {"containers": [], "securityContext": []}}, "securityContext is not an object: []"),
        ({"spec": {"containers": [], "workloadRef": {}}}, "v1 Pod a.spec.workloadRef is not known"),
    ],
)
def test_what_a_version_does_not_take_is_found(changed: dict[str, Any], said: str) -> None:
    """So that the tests above find something, if there is something."""
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **changed}
    assert said in " ".join(Api("1.36").faults(pod))


def test_a_field_is_known_in_its_versions_only() -> None:
    image = {"name": "v", "image": {"reference": "a:1"}}
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}}
    pod["spec"] = {"containers": [], "volumes": [image]}
    assert Api("1.30").faults(pod) == ["v1 Pod a.spec.volumes[0].image is not known"]
    assert Api("1.31").faults(pod) == []
