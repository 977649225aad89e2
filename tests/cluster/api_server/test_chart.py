"""``charts/gpu-pool``: the same as the examples, refused where it is wrong, and upgraded without a loss."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml
from tornado.httpclient import AsyncHTTPClient
from traitlets.config import Config

from gpu_pool.cluster.dialects import dialect_names
from gpu_pool.cluster.settings import KubernetesSettings
from gpu_pool_client import LeaseState, Pool, connect
from support.charts import CHART, COURSE, ROOT, helm, kinds, rendered_chart, try_helm
from support.clusters import hami
from support.control_plane import Cluster
from support.earlier import source_of
from support.guide import Guide
from support.kube_examples import EXAMPLES, LocalPod, copied, kubeconfig_of, one, rendered, secret
from support.pools import eventually, take
from support.ports import free_port

#: The chart before node agents and policies of admission.
EARLIER = "32d9930"


def test_helm_finds_nothing_wrong_with_it() -> None:
    helm("lint", "--strict", CHART)


def test_its_version_is_the_programs() -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    (version,) = re.findall(r'^version = "(.*)"$', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert (chart["version"], chart["appVersion"]) == (version, version)


def test_it_makes_what_the_examples_make(tmp_path: Path) -> None:
    """There are two ways to install the service, and one truth about what it needs."""
    examples = rendered(copied(tmp_path, "physics", monitoring=True))
    chart = rendered_chart("physics", COURSE, "--set", "monitoring.enabled=true")
    for kind in kinds(examples) - {"ConfigMap"}:
        for given in (each for each in examples if each["kind"] == kind):
            made = one(chart, kind, given["metadata"]["name"])
            assert bare(made) == bare(given), given["metadata"]["name"]
    assert kinds(chart) == kinds(examples)


def test_its_node_agents_are_those_of_the_examples() -> None:
    """Off unless they are wanted, and then with their own namespace, account, settings and rights."""
    chart = rendered_chart("jupyterhub", "--set", "nodeAgent.enabled=true", "--set", "name=gpu-pool")
    for given in rendered(EXAMPLES / "node-agent"):
        made = one(chart, given["kind"], given["metadata"]["name"])
        assert bare(made) == bare(given), given["metadata"]["name"]
        assert made["metadata"].get("namespace") == given["metadata"].get("namespace")
    without = {(each["kind"], each["metadata"]["name"]) for each in rendered_chart("jupyterhub")}
    added = {(each["kind"], each["metadata"]["name"]) for each in chart} - without
    assert added == {(each["kind"], each["metadata"]["name"]) for each in rendered(EXAMPLES / "node-agent")}
    account = settings(chart)["KubernetesSettings"]["node_agent"]
    assert account == "gpu-pool-jupyterhub-agents/gpu-pool-node-agent"
    assert "node_agent" not in settings(rendered_chart("jupyterhub"))["KubernetesSettings"]
    files = EXAMPLES / "service" / "node-agent"
    (right,) = next(yaml.safe_load_all((files / "rbac.yaml").read_text()))["rules"]
    assert right in one(chart, "ClusterRole", "gpu-pool-jupyterhub")["rules"]
    assert right not in one(rendered_chart("jupyterhub"), "ClusterRole", "gpu-pool-jupyterhub")["rules"]
    (entry,) = yaml.safe_load((files / "networkpolicy.yaml").read_text())["spec"]["ingress"]
    assert entry in one(chart, "NetworkPolicy", "gpu-pool")["spec"]["ingress"]


def test_agents_that_suspend_are_those_of_the_examples(tmp_path: Path) -> None:
    """Only where one value says so, and then as root with what that needs, and no more."""
    folder = copied(tmp_path, "jupyterhub") / "node-agent"
    chosen = folder / "kustomization.yaml"
    chosen.write_text(f"{chosen.read_text()}\ncomponents: [suspend]\n")
    given = one(rendered(folder), "DaemonSet", "gpu-pool-node-agent")
    wanted = ("--set", "nodeAgent.enabled=true", "--set", "nodeAgent.suspend.enabled=true")
    made = one(rendered_chart("jupyterhub", *wanted), "DaemonSet", "gpu-pool-node-agent")
    for each in (made, given):
        pod = each["spec"]["template"]["spec"]
        # A patch puts what it adds first.
        for named in (pod["volumes"], pod["containers"][0]["env"], pod["containers"][0]["volumeMounts"]):
            named.sort(key=lambda one: str(one["name"]))
    assert bare(made) == bare(given)
    spec = made["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    assert (spec["securityContext"]["runAsUser"], spec["securityContext"].get("runAsNonRoot")) == (0, None)
    told = container["securityContext"]
    assert told["capabilities"] == {"drop": ["ALL"], "add": ["DAC_READ_SEARCH", "SYS_PTRACE"]}
    assert (told["readOnlyRootFilesystem"], told["allowPrivilegeEscalation"]) == (True, False)
    assert {each["hostPath"]["path"] for each in spec["volumes"] if "hostPath" in each} == {"/run/gpu-pool"}
    more = ("--set", "nodeAgent.suspend.untested=true", "--set", "nodeAgent.suspend.memoryMiB=4096")
    made = one(rendered_chart("jupyterhub", *wanted, *more), "DaemonSet", "gpu-pool-node-agent")
    args = made["spec"]["template"]["spec"]["containers"][0]["args"]
    assert args[-3:] == [
        "--suspend-in=/run/gpu-pool/suspended", "--suspend-untested", "--suspend-memory=4096",
    ]  # fmt: skip
    # Whoever upgrades with the values of an earlier chart has none of it.
    without = ("--set", "nodeAgent.enabled=true", "--set-json", "nodeAgent.suspend=null")
    made = one(rendered_chart("jupyterhub", *without), "DaemonSet", "gpu-pool-node-agent")
    assert made["spec"]["template"]["spec"]["securityContext"]["runAsNonRoot"] is True


def test_what_whole_gpus_of_the_pools_own_need_is_that_of_the_examples(tmp_path: Path) -> None:
    """Only where the settings say so, and then all of it by that one value."""
    folder = copied(tmp_path, "physics")
    chosen = folder / "kustomization.yaml"
    chosen.write_text(chosen.read_text().replace("components: []", "components: [service/shared]"))
    shared, plain = (
        {(e["kind"], e["metadata"]["name"]): e for e in found}
        for found in (
            rendered_chart("physics", "--values", str(CHART / "dialects" / "shared.yaml")),
            rendered_chart("physics"),
        )
    )
    given = {(each["kind"], each["metadata"]["name"]): each for each in rendered(folder)}
    added = shared.keys() - plain.keys()
    assert added == given.keys() - {
        (each["kind"], each["metadata"]["name"]) for each in rendered(copied(tmp_path / "again", "physics"))
    }
    assert len(added) == 6
    for name in added:
        assert bare(shared[name]) == bare(given[name]), name
        assert shared[name]["metadata"].get("namespace") == given[name]["metadata"].get("namespace")
    without = ("--set", "admissionPolicy.enabled=false")
    values = ("--values", str(CHART / "dialects" / "shared.yaml"))
    left = {(each["kind"], each["metadata"]["name"]) for each in rendered_chart("physics", *values, *without)}
    assert left & added == {("Role", "gpu-pool-shared"), ("RoleBinding", "gpu-pool-shared")}


def test_the_namespace_of_node_agents_is_theirs_alone() -> None:
    wanted = ("--set", "nodeAgent.enabled=true", "--set", "nodeAgent.namespace=jupyterhub")
    done = try_helm("template", "pool", CHART, "--namespace", "jupyterhub", *wanted)
    assert "choose one that is the agents' alone" in done.stderr
    made = ("--set", "nodeAgent.namespace=gpu-agents", "--set", "nodeAgent.createNamespace=false")
    chart = rendered_chart("jupyterhub", *wanted, *made)
    assert "Namespace" not in kinds(chart)
    assert one(chart, "DaemonSet", "gpu-pool-node-agent")["metadata"]["namespace"] == "gpu-agents"


def bare(given: dict[str, Any]) -> Any:
    """Return an object without what the two call differently: labels of a release, names of settings."""
    text = json.dumps({key: value for key, value in given.items() if key != "metadata"}, sort_keys=True)
    text = re.sub(r'"app\.kubernetes\.io/instance": "pool", ', "", text)
    text = re.sub(r'"gpu-pool-settings[^"]*"', '"gpu-pool-settings"', text)
    text = re.sub(r'"annotations": \{"checksum/settings": "[0-9a-f]+"\}, ', "", text)
    # What is the default of Kubernetes for an image with a version.
    return json.loads(text.replace('"imagePullPolicy": "IfNotPresent", ', ""))


def test_its_settings_are_those_of_the_examples() -> None:
    lines = (EXAMPLES / "service" / "gpu_pool_config.py").read_text()
    example = Config()
    exec(compile(lines, "gpu_pool_config.py", "exec"), {"get_config": lambda: example})
    assert {**settings(rendered_chart("physics")), "KubernetesSettings": None} == {
        **json.loads(json.dumps(example)),
        "KubernetesSettings": None,
    }
    kubernetes = settings(rendered_chart("physics"))["KubernetesSettings"]
    assert kubernetes == {**example["KubernetesSettings"], "kueue": False}


def settings(objects: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(
        one(objects, "ConfigMap", "gpu-pool-settings")["data"]["gpu_pool_config.json"]
    )
    return found


def test_every_dialect_has_a_file_of_values_whose_settings_are_accepted() -> None:
    files = {path.stem: path for path in (CHART / "dialects").iterdir()}
    assert files.keys() == set(dialect_names()) - {"auto"}
    for name, path in files.items():
        given = settings(rendered_chart("physics", "--values", str(path)))["KubernetesSettings"]
        chosen = KubernetesSettings(config=Config(KubernetesSettings=given))
        assert chosen.dialect == name
        assert chosen.dialect_options.container == "kernel"
        assert given.keys() <= KubernetesSettings.class_traits(config=True).keys()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--set", "imgae.tag=1"], "imgae"),
        (["--set", "store.size=much"], "store"),
        (["--set", "config.PoolSetings.course_required=true"], "PoolSetings"),
        (["--set", "networkPolicy.apiServerPorts={70000}"], "apiServerPorts"),
        # Helm takes it for text, and the service would not start.
        (["--set", "config.PoolSettings.max_share=0.5"], "max_share"),
        (["--set", "name=GPU_Pool"], "name"),
        # They become part of an expression.
        (["--set", 'admissionPolicy.secrets={a"]+["b}'], "secrets"),
        (["--set", 'admissionPolicy.hostPaths={/a"]+["/}'], "hostPaths"),
        # The service would not read it: the chart says where it listens, and whether Kueue decides.
        (["--set", "config.ServeApp.bind=127.0.0.1:1"], "config.ServeApp.bind is the chart's own"),
        (["--set", "config.KubernetesSettings.kueue=true"], "set rbac.kueue"),
        (["--set", "config.KubernetesSettings.node_agent=a/b"], "set nodeAgent.enabled"),
        (["--set", "nodeAgent.every=60s"], "every"),
        ([COURSE, "--set", "coursesConfigMap=elsewhere"], "Courses are given twice"),
    ],
)
def test_values_that_are_wrong_are_refused_by_name(options: list[str], said: str) -> None:
    done = try_helm("template", "pool", CHART, *options)
    assert done.returncode != 0
    assert said in done.stderr


def test_texts_are_in_it_as_they_are_written(tmp_path: Path) -> None:
    """Blanks before a file's first word, quotes, another document, or names that YAML takes for numbers."""
    course = '\n   title: "{{ fail }}"\n---\nkind: Secret\n'
    lines = "\n  # Python's\nx = 'a\\tb'\r\n---\n"
    chosen = {
        "courses": {"evil": course},
        "extraConfig": lines,
        "image": {"name": "a\n  command: [sh]", "tag": "1e3"},
        "hub": {"tokenSecret": {"name": "1234", "key": "a: b"}, "serviceAccount": "0x10"},
        "store": {"storageClass": "true"},
        "priorityClassName": "null",
    }
    values = tmp_path / "values.yaml"
    values.write_text(json.dumps(chosen))
    objects = rendered_chart("physics", "--values", str(values))
    assert one(objects, "ConfigMap", "gpu-pool-courses")["data"] == {"evil.yaml": course}
    assert one(objects, "ConfigMap", "gpu-pool-settings")["data"]["gpu_pool_config.py"] == lines
    pod = one(objects, "Deployment", "gpu-pool")["spec"]["template"]["spec"]
    assert pod["priorityClassName"] == "null"
    assert pod["containers"][0]["image"] == "a\n  command: [sh]:1e3"
    token = pod["containers"][0]["env"][-1]["valueFrom"]["secretKeyRef"]
    assert token == {"name": "1234", "key": "a: b"}
    assert one(objects, "RoleBinding", "gpu-pool-hub")["subjects"][0]["name"] == "0x10"
    assert one(objects, "PersistentVolumeClaim", "gpu-pool-store")["spec"]["storageClassName"] == "true"
    assert "Secret" not in kinds(objects)


def test_what_an_administrator_chooses_is_in_it() -> None:
    objects = rendered_chart(
        "physics",
        *("--set", "store.storageClass=fast", "--set", "store.size=5Gi"),
        *("--set", "hub.serviceAccount=", "--set", "rbac.kueue=true", "--set", "networkPolicy.enabled=false"),
        *("--set", "image.name=registry.example.org/gpu-pool-service", "--set", "image.tag=0.2.0-rc1"),
        *("--set", "imagePullSecrets[0].name=registry-password"),
    )
    claim = one(objects, "PersistentVolumeClaim", "gpu-pool-store")
    assert claim["spec"]["storageClassName"] == "fast"
    assert claim["spec"]["resources"]["requests"]["storage"] == "5Gi"
    pod = one(objects, "Deployment", "gpu-pool")["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "registry.example.org/gpu-pool-service:0.2.0-rc1"
    assert pod["imagePullSecrets"] == [{"name": "registry-password"}]
    assert settings(objects)["KubernetesSettings"]["kueue"] is True
    kueue = [
        rule
        for rule in one(objects, "ClusterRole", "gpu-pool-physics")["rules"]
        if "kueue" in rule["apiGroups"][0]
    ]
    assert len(kueue) == 2
    assert "NetworkPolicy" not in kinds(objects)
    assert not [each for each in objects if "hub" in each["metadata"]["name"]]


def test_a_change_of_the_settings_and_nothing_else_restarts_the_service() -> None:
    def pod(*options: str) -> Any:
        return one(rendered_chart("physics", *options), "Deployment", "gpu-pool")["spec"]["template"]

    assert pod() == pod(COURSE)
    assert pod() != pod("--set", "config.PoolSettings.max_share=1")


def test_two_releases_in_one_cluster_have_no_object_in_common() -> None:
    of_each = [
        {
            (each["kind"], each["metadata"].get("namespace"), each["metadata"]["name"])
            for each in rendered_chart(name)
        }
        for name in ("physics", "history")
    ]
    assert of_each[0].isdisjoint(of_each[1])


@pytest.fixture
def installed(cluster: Cluster, namespace: str) -> Iterator[str]:
    """Install the chart into a namespace that is restricted; return its name."""
    cluster.kubectl("label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
    upgrade(cluster, namespace)
    yield namespace
    try_helm("uninstall", "pool", "--namespace", namespace, kubeconfig=cluster.kubeconfig)


def upgrade(cluster: Cluster, namespace: str, *options: str) -> None:
    words = ("upgrade", "--install", "pool", CHART, "--namespace", namespace, COURSE)
    helm(*words, *options, kubeconfig=cluster.kubeconfig)


def store_claim(cluster: Cluster, namespace: str) -> str:
    return cluster.kubectl(
        *("-n", namespace, "get", "pvc", "gpu-pool-store"), "-o", "jsonpath={.metadata.uid}"
    )


@pytest.mark.long
def test_the_store_outlives_upgrade_rollback_and_uninstallation(cluster: Cluster, installed: str) -> None:
    first = store_claim(cluster, installed)
    assert first
    upgrade(cluster, installed, "--set", "config.PoolSettings.max_share=1")
    helm("rollback", "pool", "--namespace", installed, kubeconfig=cluster.kubeconfig)
    assert store_claim(cluster, installed) == first
    helm("uninstall", "pool", "--namespace", installed, kubeconfig=cluster.kubeconfig)
    assert store_claim(cluster, installed) == first
    # And whoever installs it again has it.
    helm(
        *("upgrade", "--install", "pool", CHART, "--namespace", installed),
        *(COURSE, "--set", "store.existingClaim=gpu-pool-store"),
        kubeconfig=cluster.kubeconfig,
    )
    assert store_claim(cluster, installed) == first


@pytest.mark.long
async def test_an_upgrade_and_a_rollback_lose_no_lease(
    cluster: Cluster, installed: str, tmp_path: Path
) -> None:
    """As a Deployment does that has one pod at most: the next begins when the last has gone."""
    if cluster.agent is None:
        pytest.skip("this cluster has nodes of its own (KUBECONFIG)")
    cluster.add(hami("chart-2", gpus=1, count=50))
    anybody = ("--set", "config.PoolSettings.course_required=false")
    lease = ""
    for version, options in enumerate(((), ("--set", "config.PoolSettings.max_share=1"), ())):
        if version == 2:
            helm("rollback", "pool", "1", "--namespace", installed, kubeconfig=cluster.kubeconfig)
        else:
            upgrade(cluster, installed, *options)
        objects = rendered_chart(installed, COURSE, *anybody, *options)
        async with served(cluster, installed, objects, tmp_path / str(version), tmp_path) as (pool, _):
            if not lease:
                lease = await take(pool, "2%", "kept")
            assert (await pool.wait(lease, 60)).state is LeaseState.HELD
            (kept,) = (await pool.status()).leases
            assert kept.id == lease


@asynccontextmanager
async def served(
    cluster: Cluster, namespace: str, objects: list[dict[str, Any]], folder: Path, disks: Path
) -> AsyncIterator[tuple[Pool, LocalPod]]:
    """Run the service as a Deployment's pod would, over the disks of the one before; yield its pool."""
    token = secret("hub", **{"hub.services.gpu-pool.apiToken": "0" * 32})
    pod = LocalPod([*objects, token], "gpu-pool", folder, disks)
    pod.replaced["0.0.0.0:8888"] = f"127.0.0.1:{free_port()}"
    kubeconfig = kubeconfig_of(cluster, "gpu-pool", namespace, folder / "config")
    with pod.running({"KUBECONFIG": str(kubeconfig)}) as process:
        await eventually(lambda: ": Serving " in pod.log or process.poll() is not None)
        assert process.poll() is None, pod.log
        async with connect(pod.variables()["GPU_POOL_URL"]) as pool:
            yield pool, pod


@pytest.mark.long
async def test_the_service_starts_as_the_chart_says_and_with_its_rights_alone(
    cluster: Cluster, installed: str, tmp_path: Path
) -> None:
    if cluster.agent is None:
        pytest.skip("this cluster has nodes of its own (KUBECONFIG)")
    cluster.add(hami("chart-1", gpus=1, count=50))
    objects = rendered_chart(installed, COURSE)
    async with served(cluster, installed, objects, tmp_path / "p", tmp_path) as (_, pod):
        path = pod.container["readinessProbe"]["httpGet"]["path"]
        address = f"http://{pod.replaced['0.0.0.0:8888']}{path}"
        answer = await AsyncHTTPClient().fetch(address, request_timeout=120)
        assert json.loads(answer.body)["status"] == "ok"
    said = re.findall(r".*(?:ERROR|WARNING|orbidden).*", pod.log)
    assert [line for line in said if "LimitNOFILE" not in line] == []


@pytest.mark.long
def test_who_has_an_earlier_chart_goes_over_by_the_pages_words_and_keeps_their_values(
    cluster: Cluster, namespace: str, tmp_path: Path
) -> None:
    (words,) = Guide("administrator/node-agent.md", cluster.kubeconfig, {}).commands("Switch it on")[:1]
    kept, *_ = re.findall(r"--\S*reuse-values", words)
    earlier = source_of(EARLIER, tmp_path / "earlier") / "charts" / "gpu-pool"
    release = ("pool", "--namespace", namespace)
    chosen = (COURSE, "--set", "store.size=5Gi", "--set", "name=earlier")
    helm("install", release[0], earlier, *release[1:], *chosen, kubeconfig=cluster.kubeconfig)
    agents = f"{namespace}-agents"
    cluster.kubectl("create", "namespace", agents)
    wanted = ("nodeAgent.enabled=true", "nodeAgent.createNamespace=false", f"nodeAgent.namespace={agents}")
    more = [word for each in wanted for word in ("--set", each)]
    try:
        helm("upgrade", release[0], CHART, *release[1:], kept, *more, kubeconfig=cluster.kubeconfig)
        claim = cluster.get("pvc", "-n", namespace, "earlier-store")
        assert claim["spec"]["resources"]["requests"]["storage"] == "5Gi"
        assert cluster.get("configmap", "-n", namespace, "earlier-courses")["data"].keys() == {
            "intro-ml.yaml"
        }
        assert cluster.get("daemonset", "-n", agents, "earlier-node-agent")["spec"]
    finally:
        helm("uninstall", *release, kubeconfig=cluster.kubeconfig)
        cluster.kubectl("delete", "namespace", agents, "--wait=false")
