"""``examples/kubernetes``, as an administrator takes it: accepted by a cluster, and it starts."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from jupyterhub.app import JupyterHub
from kubernetes_asyncio.client import ApiClient
from kubespawner import KubeSpawner
from tornado.httpclient import AsyncHTTPClient
from traitlets.config import Config

from gpu_pool.cli import main
from gpu_pool.cluster.manifests import COMPONENT
from gpu_pool_client import connect
from gpu_pool_provisioner.environment import PORTS
from gpu_pool_provisioner.launchers.supervised import PORT
from gpu_pool_spawner.kube import GPUPoolKubeSpawner
from support.clusters import hami
from support.control_plane import Cluster
from support.kube_examples import (
    CLUSTER_WIDE,
    EXAMPLES,
    ROOT,
    LocalPod,
    copied,
    kubeconfig_of,
    one,
    rendered,
    secret,
)
from support.pools import eventually
from support.ports import free_port
from support.spawner_without_cluster import connect_to_none

VALUES = yaml.safe_load((EXAMPLES / "values.yaml").read_text())
PROJECT = (ROOT / "pyproject.toml").read_text()
TOKEN = "hub.services.gpu-pool.apiToken"


@pytest.fixture
def objects(tmp_path: Path, namespace: str, cluster: Cluster) -> Iterator[list[dict[str, Any]]]:
    """Return all objects, with monitoring, applied to a namespace of the test's own that is restricted."""
    level = "pod-security.kubernetes.io/enforce=restricted"
    cluster.kubectl("label", "namespace", namespace, level)
    cluster.apply(SERVICE_MONITORS)
    cluster.kubectl("wait", "--for=condition=Established", "crd/servicemonitors.monitoring.coreos.com")
    found = rendered(copied(tmp_path, namespace, monitoring=True))
    cluster.apply(*found, flags=["--validate=strict"])
    yield found
    names = [f"{each['kind']}/{each['metadata']['name']}" for each in found if each["kind"] in CLUSTER_WIDE]
    cluster.kubectl("delete", *names)


def test_the_cluster_accepts_everything_and_the_service_under_the_strictest_rules(
    cluster: Cluster, namespace: str, objects: list[dict[str, Any]]
) -> None:
    assert {each["kind"] for each in objects} >= {"PersistentVolumeClaim", "NetworkPolicy", "ServiceMonitor"}
    template = one(objects, "Deployment", "gpu-pool")["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", **template}
    pod["metadata"] = {"name": "gpu-pool", "labels": template["metadata"]["labels"]}
    cluster.kubectl("create", "--dry-run=server", "-n", namespace, "-f", "-", stdin=json.dumps(pod))


async def test_the_service_starts_as_its_deployment_says_and_with_its_rights_alone(
    cluster: Cluster, namespace: str, objects: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    if cluster.agent is None:
        pytest.skip("this cluster has nodes of its own (KUBECONFIG)")
    cluster.add(hami("examples-1", gpus=1, count=50))
    pod = LocalPod([*objects, secret("hub", **{TOKEN: "0" * 32})], "gpu-pool", tmp_path_factory.mktemp("p"))
    port = free_port()
    pod.replaced["0.0.0.0:8888"] = f"127.0.0.1:{port}"
    account = one(objects, "Deployment", "gpu-pool")["spec"]["template"]["spec"]["serviceAccountName"]
    kubeconfig = kubeconfig_of(cluster, account, namespace, tmp_path_factory.mktemp("k") / "config")
    for _ in range(2):  # the second time with the store of the first
        with pod.running({"KUBECONFIG": str(kubeconfig)}) as process:
            await eventually(lambda: ": Serving " in pod.log or process.poll() is not None)
            assert process.poll() is None, pod.log
            for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
                path = pod.container[probe]["httpGet"]["path"]
                answer = await AsyncHTTPClient().fetch(f"http://127.0.0.1:{port}{path}", request_timeout=120)
                assert json.loads(answer.body)["status"] == "ok"
            async with connect(pod.variables()["GPU_POOL_URL"]) as pool:
                (gpu,) = (await pool.status()).devices
            assert gpu.device.node == "examples-1"
        assert process.returncode == 0
        # Of what it may not do, and of settings that it does not know, it would speak; also of how many
        # files a process may have here, which is this machine's affair.
        said = re.findall(r".*(?:ERROR|WARNING|orbidden).*", pod.log)
        assert [line for line in said if "LimitNOFILE" not in line] == []


def test_the_namespace_is_set_in_one_place(tmp_path: Path) -> None:
    found = rendered(copied(tmp_path, "elsewhere", monitoring=True))
    kept = {each["kind"] for each in found if each["metadata"].get("namespace") != "elsewhere"}
    assert kept == set(CLUSTER_WIDE)
    subjects = [subject for each in found for subject in each.get("subjects", ())]
    assert {each["namespace"] for each in subjects} == {"elsewhere"}


def test_two_hubs_in_one_cluster_have_no_object_in_common(tmp_path: Path) -> None:
    of_each = []
    for name in ("physics", "history"):
        found = rendered(copied(tmp_path / name, name))
        of_each.append(
            {(each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"]) for each in found}
        )
        bound = [each for each in found if each["kind"] == "ClusterRoleBinding"]
        assert {each["roleRef"]["name"] for each in bound} == {
            f"gpu-pool-{name}",
            f"gpu-pool-hub-snapshot-{name}",
        }
    assert of_each[0].isdisjoint(of_each[1])


def test_the_service_is_there_without_an_operator_for_prometheus() -> None:
    assert "ServiceMonitor" not in {each["kind"] for each in rendered(EXAMPLES)}


def test_every_course_is_good_and_is_installed(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["courses", "check", str(EXAMPLES / "courses"), "--device", "V100-SXM2-32GB:4"])
    assert status == 0, capsys.readouterr().err
    installed = one(rendered(EXAMPLES), "ConfigMap", "gpu-pool-courses")["data"]
    assert installed.keys() == {path.name for path in (EXAMPLES / "courses").iterdir()}


async def test_the_hub_accepts_its_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    """The chart hands ``hub.config`` to traitlets, which pass over what they do not know."""
    sections = {cls.__name__: cls for cls in (JupyterHub, *GPUPoolKubeSpawner.mro()) if cls is not object}
    given = VALUES["hub"]["config"]
    unknown = [f"{name}.{key}" for name in given for key in given[name].keys() - traits(sections.get(name))]
    assert unknown == []
    where = f"{GPUPoolKubeSpawner.__module__}:{GPUPoolKubeSpawner.__name__}"
    assert f'{given["JupyterHub"]["spawner_class"]} = "{where}"' in PROJECT
    connect_to_none(monkeypatch)
    spawner = GPUPoolKubeSpawner(config=Config(given), _mock=True)
    assert spawner.pool_url == "http://gpu-pool:8888/services/gpu-pool"


async def test_a_users_server_may_run_under_the_strictest_rules(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    level = "pod-security.kubernetes.io/enforce=restricted"
    cluster.kubectl("label", "namespace", namespace, level)
    config = Config(VALUES["hub"]["config"])
    # What the chart itself makes of its section "singleuser".
    config.KubeSpawner.merge({"image": "gpu-pool-notebook:0.1.0", "uid": 1000, "fs_gid": 100})
    connect_to_none(monkeypatch)
    spawner = KubeSpawner(config=config, _mock=True)
    monkeypatch.setattr(spawner, "get_env", dict)
    async with ApiClient() as client:
        pod = client.sanitize_for_serialization(await spawner.get_pod_manifest())
    cluster.kubectl("create", "--dry-run=server", "-n", namespace, "-f", "-", stdin=json.dumps(pod))


def traits(cls: Any) -> set[str]:
    return set() if cls is None else set(cls.class_traits(config=True))


def test_the_hub_and_the_service_find_each_other() -> None:
    found, hub = rendered(EXAMPLES), VALUES["hub"]
    service, settings = one(found, "Service", "gpu-pool")["spec"], hub["config"]["GPUPoolSpawnerMixin"]
    (port,) = service["ports"]
    assert hub["services"]["gpu-pool"]["url"] == f"http://gpu-pool:{port['port']}"
    assert settings["pool_url"] == f"http://gpu-pool:{port['port']}/services/gpu-pool"
    (volume,), (mount,) = hub["extraVolumes"], hub["extraVolumeMounts"]
    assert one(found, "ConfigMap", volume["configMap"]["name"])
    assert settings["courses_dir"] == mount["mountPath"]
    (container,) = one(found, "Deployment", "gpu-pool")["spec"]["template"]["spec"]["containers"]
    (token,) = (each for each in container["env"] if each["name"] == "JUPYTERHUB_API_TOKEN")
    assert token["valueFrom"]["secretKeyRef"] == {"name": "hub", "key": TOKEN}


def test_servers_reach_kernels_and_the_service_and_these_let_them_in() -> None:
    out = VALUES["singleuser"]["networkPolicy"]["egress"]
    to_pods = [each for each in out if "podSelector" in each["to"][0]]
    reached = {json.dumps(each["to"][0]["podSelector"]["matchLabels"]): each["ports"] for each in to_pods}
    found = rendered(EXAMPLES)
    server = {"podSelector": {"matchLabels": {"app.kubernetes.io/component": "singleuser-server"}}}
    kernels = one(found, "NetworkPolicy", "gpu-pool-kernels")["spec"]
    ports = [{"port": PORT, "endPort": max(PORTS.values())}]
    assert min(PORTS.values()) == PORT + 1
    assert kernels["podSelector"]["matchLabels"] == {"app.kubernetes.io/component": COMPONENT}
    assert kernels["ingress"] == [{"from": [server], "ports": ports}]
    assert reached[json.dumps(kernels["podSelector"]["matchLabels"])] == ports
    pool = one(found, "NetworkPolicy", "gpu-pool")["spec"]
    assert reached[json.dumps(pool["podSelector"]["matchLabels"])] == pool["ingress"][0]["ports"]


def test_every_image_to_begin_with_has_a_name_as_buildkit_wants_it() -> None:
    text = (EXAMPLES / "Containerfile").read_text()
    named = dict(re.findall(r"^ARG (\w+)=(\S+)$", text, re.MULTILINE))
    begun_with = re.findall(r"^FROM \$\{(\w+)\}", text, re.MULTILINE)
    assert begun_with == ["PYTHON_IMAGE", "HUB_IMAGE", "NOTEBOOK_IMAGE"]
    assert all(
        named[each] == f"name-it-with-build-arg-{each.lower().replace('_', '-')}" for each in begun_with[1:]
    )


def test_every_command_about_the_release_names_its_namespace() -> None:
    page = (ROOT / "docs" / "administrator" / "kubernetes.md").read_text()
    typed = re.findall(r"kubectl [a-z-][^`\n]*", page)
    # These are of the folder's own namespace, of namespaces, or of what the whole cluster has.
    everywhere = ("kubectl cordon", "kubectl drain", "kubectl uncordon", "kubectl get storageclass")
    elsewhere = ("kubectl apply -k", "kubectl delete -k", "kubectl create namespace", *everywhere)
    there = [each for each in typed if not each.startswith(elsewhere)]
    assert len(there) > 5
    assert [each for each in there if not each.startswith("kubectl -n jupyterhub ")] == []


def test_the_images_get_all_of_the_package() -> None:
    folders = re.findall(r'^    "(\w+)/gpu_pool\w*",$', PROJECT, re.MULTILINE)
    copied_in = re.findall(r"^COPY (\w+) \1$", (EXAMPLES / "Containerfile").read_text(), re.MULTILINE)
    assert len(folders) > 3
    assert set(copied_in) == {*folders, "labextension"}


_ANYTHING = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}
#: The Prometheus Operator's kind, without what it says of its fields.
SERVICE_MONITORS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": "servicemonitors.monitoring.coreos.com"},
    "spec": {
        "group": "monitoring.coreos.com",
        "scope": "Namespaced",
        "names": {"kind": "ServiceMonitor", "plural": "servicemonitors", "singular": "servicemonitor"},
        "versions": [
            {"name": "v1", "served": True, "storage": True, "schema": {"openAPIV3Schema": _ANYTHING}}
        ],
    },
}
