"""The service may create pods and Secrets such as it makes, and no others, whoever has taken it over."""

from __future__ import annotations

import copy
import json
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.cluster import manifests
from gpu_pool.cluster.dialects import PodBans, PodParts, choose
from gpu_pool.cluster.manifests import LEASE_LABEL, KernelPodRequest
from gpu_pool.cluster.nodes import NodeGroup
from gpu_pool.cluster.notebooks import HomeVolume, Identity, Notebook
from gpu_pool.cluster.pod_choices import ContainerSettings
from gpu_pool.cluster.scale_up import PlaceholderShape, placeholder
from gpu_pool_client import (
    GpuPoolError,
    Holder,
    KernelCommand,
    Lease,
    LeaseState,
    NotAllowed,
    parse_request,
)
from support.charts import find_helm, rendered_chart
from support.clusters import changing, everything, hami
from support.control_plane import ASSETS, Cluster
from support.kernel_pods import backend_of, cluster_pool, command, held, notebook, running, volume
from support.kube_examples import CLUSTER_WIDE, copied, kubeconfig_of, rendered, secret
from support.pools import eventually
from support.reachability import METADATA

Pod = dict[str, Any]
Change = Callable[[Pod], object]

NAME = "gpu-pool-7-0123abcd-1"
HOME = HomeVolume("claim-ada")
KINDS = {"ServiceAccount", "Role", "RoleBinding", *CLUSTER_WIDE}
#: A policy of the test that changes pods, as a webhook of a system that shares GPUs may.
ADDS = "adds-a-folder"


def kernel(namespace: str, parts: PodParts | None = None, home: HomeVolume | None = HOME) -> Pod:
    """Return the pod of a kernel, as the pool makes it."""
    lease = Lease("7-0123abcd", "k", parse_request("2%"), Holder("ada"), LeaseState.HELD, 1.0, held_at=2.0)
    server = Notebook(namespace, "jupyter-ada", "u-ada", "ada", "", "n1", "img:1", pull_secrets=("regcred",))
    body = ContainerSettings("course:2", 2.0, 4096, "/home/jovyan", home, Identity(1000, 100, fs_group=100))
    asked = KernelCommand(("python3",), {})
    order = KernelPodRequest(
        "gpu-pool", lease, server, asked, "n1", parts or PodParts(), PodBans(resources=()), body
    )
    return manifests.pod(order, NAME, now=1_000.0)


def node_placeholder(namespace: str) -> Pod:
    """Return the pod for which an autoscaler starts a node."""
    shape = PlaceholderShape("gpu-pool", namespace, "pause:1", cpu=0.5, memory_mib=512)
    group = NodeGroup("v100", {"pool": "gpu"}, 4, hami("v100/new"))
    parts = PodParts(limits={"nvidia.com/gpu": "1"})
    return placeholder(group, "gpu-pool-node-0123abcd", shape, parts, PodBans(), ())


def connection_file(namespace: str) -> dict[str, Any]:
    """Return the Secret of a kernel's pod."""
    made = kernel(namespace)
    made["metadata"]["uid"] = "u-kernel"
    return manifests.secret(made, command())


def supervisor(namespace: str) -> dict[str, Any]:
    """Return the ConfigMap with what starts kernels in their pods."""
    made = manifests.supervisor({"launch.py": "print()"}, "gpu-pool")
    made["metadata"]["namespace"] = namespace
    return made


class Namespace:
    """A namespace with the service's account, its rights and its policies."""

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self.name = cluster, name

    def refusal(self, made: Pod, account: str = "gpu-pool", verb: tuple[str, ...] = ("create",)) -> str:
        """Return what an account, by default the service's, reads of a refusal; empty if there is none."""
        words = [*verb, "-n", self.name, "-f", "-"]
        words += ["--dry-run=server", "--validate=ignore"] if verb == ("create",) else []
        if account:
            words.append(f"--as=system:serviceaccount:{self.name}:{account}")
        asked = [ASSETS / "kubectl", "--kubeconfig", self._cluster.kubeconfig, *words]
        done = subprocess.run(list(map(str, asked)), input=json.dumps(made), capture_output=True, text=True)
        return "" if done.returncode == 0 else done.stderr

    def give_all(self, account: str) -> None:
        """Let an account do everything to pods, Secrets and ConfigMaps."""
        resources = "pods,pods/ephemeralcontainers,secrets,configmaps"
        words = ("create", "role", f"all-{account}", "--verb=*", f"--resource={resources}")
        self._cluster.kubectl("-n", self.name, *words)
        bound = ("create", "rolebinding", f"all-{account}", f"--role=all-{account}")
        self._cluster.kubectl("-n", self.name, *bound, f"--serviceaccount={self.name}:{account}")

    async def is_kept(self) -> None:
        """Wait until all policies are in force: an API server takes a moment to learn of one."""
        wrong = kernel(self.name), secret("another"), supervisor(self.name)
        for each in wrong:
            each["metadata"]["name"] = "another"
        await eventually(
            lambda: all("not as jupyter-gpu-pool makes it" in self.refusal(x) for x in wrong), within=60
        )


@pytest.fixture
def objects(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[list[dict[str, Any]]]:
    """Apply the service's rights and policies in a namespace of the test's own, and return them."""
    # A fresh API server makes its own roles after it has begun to answer.
    cluster.kubectl("wait", "--for=create", "clusterrolebinding/system:basic-user", "--timeout=60s")
    found = [each for each in rendered(copied(tmp_path, namespace)) if each["kind"] in KINDS]
    cluster.apply(*found, flags=["--validate=strict"])
    yield found
    names = [f"{each['kind']}/{each['metadata']['name']}" for each in found if each["kind"] in CLUSTER_WIDE]
    cluster.kubectl("delete", *names)


@pytest.fixture
async def kept(cluster: Cluster, namespace: str, objects: list[dict[str, Any]]) -> Namespace:
    assert objects
    where = Namespace(cluster, namespace)
    await where.is_kept()
    return where


async def test_what_the_pool_makes_is_created(kept: Namespace) -> None:
    assert kept.refusal(kernel(kept.name)) == ""
    assert kept.refusal(kernel(kept.name, home=None)) == ""
    assert kept.refusal(node_placeholder(kept.name)) == ""
    assert kept.refusal(connection_file(kept.name)) == ""
    assert kept.refusal(supervisor(kept.name)) == ""


@pytest.mark.long
async def test_a_kernels_pod_is_created_in_every_dialect(kept: Namespace, cluster: Cluster) -> None:
    runtime = {"apiVersion": "node.k8s.io/v1", "kind": "RuntimeClass", "metadata": {"name": "nvidia"}}
    cluster.apply({**runtime, "handler": "nvidia"})
    for name in everything():
        dialect = choose(*everything()[name]).dialect
        assert dialect is not None
        made = []
        for text in ("2%", "14%", "4GiB", "2x50%", "1", "2"):
            with suppress(GpuPoolError):
                made.append(kernel(kept.name, dialect.translate(parse_request(text)).pod))
        assert made, name
        assert [kept.refusal(each) for each in made] == [""] * len(made), name


def add_volume(source: dict[str, Any]) -> Change:
    return lambda pod: pod["spec"]["volumes"].append({"name": "more", **source})


def add_token(pod: Pod) -> None:
    pod["spec"]["serviceAccountName"] = "default"
    add_volume({"projected": {"sources": [{"serviceAccountToken": {"path": "token"}}]}})(pod)


def in_container(**more: Any) -> Change:
    return lambda pod: pod["spec"]["containers"][0].update(more)


def in_security(**more: Any) -> Change:
    return lambda pod: pod["spec"]["containers"][0]["securityContext"].update(more)


def in_spec(**more: Any) -> Change:
    return lambda pod: pod["spec"].update(more)


def in_labels(**more: str) -> Change:
    return lambda pod: pod["metadata"]["labels"].update(more)


FROM_SECRET = {"name": "X", "valueFrom": {"secretKeyRef": {"name": "hub", "key": "x"}}}
ANOTHER = {"name": "another", "image": "x", "securityContext": {"privileged": True}}
CHANGES: dict[str, tuple[Change, str]] = {
    "another's Secret": (add_volume({"secret": {"secretName": "hub"}}), "it has the volumes more"),
    "a Secret among others": (
        add_volume({"projected": {"sources": [{"secret": {"name": "hub"}}]}}),
        "it has the volumes more",
    ),
    "a token": (add_token, "it has the volumes more"),
    "its machine": (add_volume({"hostPath": {"path": "/"}}), "it has the volumes more"),
    "a driver that reads Secrets": (
        add_volume({"csi": {"driver": "x", "nodePublishSecretRef": {"name": "hub"}}}),
        "it has the volumes more",
    ),
    "a variable from a Secret": (
        in_container(env=[FROM_SECRET]),
        "come from a Secret in the containers kernel",
    ),
    "all of a Secret": (
        in_container(envFrom=[{"secretRef": {"name": "hub"}}]),
        "come from a Secret in the containers kernel",
    ),
    "a variable of a first container": (
        in_spec(initContainers=[{"name": "first", "image": "x", "env": [FROM_SECRET]}]),
        "come from a Secret in the containers first",
    ),
    "another's name": (lambda pod: pod["metadata"].update(name="hub"), "by its name and labels"),
    "the name of another Secret": (
        lambda pod: pod["metadata"].update(name="gpu-pool-reader"),
        "by its name and labels",
    ),
    "another lease's name": (
        lambda pod: pod["metadata"].update(name="gpu-pool-8-0123abcd-1"),
        "by its name and labels",
    ),
    "no mark of the pool": (
        lambda pod: pod["metadata"]["labels"].pop("jupyter-gpu-pool/pool"),
        "by its name and labels",
    ),
    "no labels": (lambda pod: pod["metadata"].pop("labels"), "by its name and labels"),
    "a server's component": (
        in_labels(**{"app.kubernetes.io/component": "singleuser-server"}),
        "by its name and labels",
    ),
    "the Hub's labels": (in_labels(app="jupyterhub", component="hub"), "labels or annotations of the Hub"),
    "a server's annotation": (
        lambda pod: pod["metadata"]["annotations"].update({"hub.jupyter.org/username": "ada"}),
        "labels or annotations of the Hub",
    ),
    "a service account": (in_spec(serviceAccountName="hub"), "a service account, or its token"),
    "its token": (in_spec(automountServiceAccountToken=True), "a service account, or its token"),
    "its token, unsaid": (
        lambda pod: pod["spec"].pop("automountServiceAccountToken"),
        "a service account, or its token",
    ),
    "the network": (in_spec(hostNetwork=True), "its machine's network or processes"),
    "processes": (in_spec(hostPID=True, shareProcessNamespace=False), "its machine's network or processes"),
    "memory": (in_spec(hostIPC=True), "its machine's network or processes"),
    "a port": (
        in_container(ports=[{"containerPort": 80, "hostPort": 80}]),
        "its machine's network or processes",
    ),
    "root": (in_spec(securityContext={"runAsUser": 0}), "it may run as root"),
    "a container's root": (
        in_security(runAsNonRoot=False, runAsUser=0),
        "privileges in the containers kernel",
    ),
    "privileged": (
        in_security(privileged=True, allowPrivilegeEscalation=True),
        "privileges in the containers kernel",
    ),
    "a capability": (in_security(capabilities={"add": ["SYS_ADMIN"]}), "privileges in the containers kernel"),
    "any program's rights": (in_container(securityContext={}), "privileges in the containers kernel"),
    "no seccomp": (in_security(seccompProfile={"type": "Unconfined"}), "privileges in the containers kernel"),
    "no AppArmor": (
        in_security(appArmorProfile={"type": "Unconfined"}),
        "privileges in the containers kernel",
    ),
    "no SELinux": (in_security(seLinuxOptions={"type": "spc_t"}), "privileges in the containers kernel"),
    "no SELinux for all": (
        lambda pod: pod["spec"]["securityContext"].update(seLinuxOptions={"type": "spc_t"}),
        "not as the runtime confines pods",
    ),
    "a setting of the kernel": (
        lambda pod: pod["spec"]["securityContext"].update(sysctls=[{"name": "net.core.x", "value": "1"}]),
        "not as the runtime confines pods",
    ),
    "metadata, by its machine": (
        in_container(livenessProbe={"httpGet": {"host": METADATA, "port": 80}}),
        "its machine asks other hosts for the containers kernel",
    ),
    "metadata, at its start": (
        in_container(lifecycle={"postStart": {"httpGet": {"host": METADATA, "port": 80}}}),
        "its machine asks other hosts for the containers kernel",
    ),
    "another container": (
        lambda pod: pod["spec"]["containers"].append(ANOTHER),
        "privileges in the containers another",
    ),
    "its node": (in_spec(nodeName="n1"), "it names its node"),
}


@pytest.mark.long
async def test_a_pod_that_gives_more_than_a_kernels_is_refused(kept: Namespace) -> None:
    whole = kernel(kept.name)
    told = {}
    for what, (change, _) in CHANGES.items():
        made = copy.deepcopy(whole)
        change(made)
        # Whoever may do it is not refused: it is the policy that does it.
        assert kept.refusal(made, account="") == "", what
        told[what] = kept.refusal(made)
    missing = {what: said for what, said in told.items() if CHANGES[what][1] not in said}
    assert missing == {}
    assert all("The pod is not as jupyter-gpu-pool makes it: " in said for said in told.values())


async def test_a_pod_cannot_be_given_more_afterwards(kept: Namespace, cluster: Cluster) -> None:
    """The service may change no pod; with a right that somebody has added, it still gets no shell by that."""
    made = kernel(kept.name, home=None)
    del made["metadata"]["ownerReferences"]
    cluster.kubectl("create", "-f", "-", stdin=json.dumps(made))
    kept.give_all("gpu-pool")
    found = cluster.get("pod", "-n", kept.name, NAME)
    found["metadata"]["labels"]["component"] = "hub"
    assert "labels or annotations of the Hub" in kept.refusal(found, verb=("replace",))
    del found["metadata"]["labels"]["component"]
    found["spec"]["ephemeralContainers"] = [{"name": "shell", "image": "x", "stdin": True}]
    path = f"/api/v1/namespaces/{kept.name}/pods/{NAME}/ephemeralcontainers"
    assert "it has an ephemeral container" in kept.refusal(found, verb=("replace", f"--raw={path}"))


@pytest.mark.parametrize(
    "change",
    [
        # The cluster would fill it with a token of that account.
        lambda made: made.update(type="kubernetes.io/service-account-token"),
        lambda made: made["metadata"].update(name="hub"),
        lambda made: made["metadata"].pop("ownerReferences"),
        lambda made: made["data"].update(token="eA=="),
    ],
)
async def test_a_secret_that_is_no_connection_file_is_refused(
    kept: Namespace, change: Callable[[dict[str, Any]], object]
) -> None:
    made = connection_file(kept.name)
    made["metadata"]["annotations"] = {"kubernetes.io/service-account.name": "gpu-pool"}
    change(made)
    assert kept.refusal(made, account="") == ""
    assert "The Secret is not as jupyter-gpu-pool makes it: " in kept.refusal(made)


@pytest.mark.parametrize(
    "change", [{"metadata": {"name": "gpu-pool-courses"}}, {"immutable": False}, {"immutable": None}]
)
async def test_a_config_map_that_is_no_supervisor_is_refused(kept: Namespace, change: dict[str, Any]) -> None:
    made = {**supervisor(kept.name), **change}
    assert kept.refusal(made, account="") == ""
    assert "The ConfigMap is not as jupyter-gpu-pool makes it: " in kept.refusal(made)


async def test_nobody_elses_pods_and_secrets_are_looked_at(kept: Namespace) -> None:
    kept.give_all("hub")
    server = notebook("ada", kept.name)
    server["spec"]["volumes"].append({"name": "more", "secret": {"secretName": "of-the-course"}})
    for account in ("hub", ""):
        assert kept.refusal(server, account) == ""
        assert kept.refusal(secret("of-the-course"), account) == ""


def allowed_by_the_examples(folder: Path, namespace: str) -> list[dict[str, Any]]:
    where = copied(folder, namespace)
    file = where / "service" / "admissionpolicy.yaml"
    text = file.read_text()
    for name, value in (("secrets", '["client"]'), ("hostPaths", '["/usr/local/vgpu"]')):
        line = f'    - name: {name}\n      expression: "[]"\n'
        assert line in text
        text = text.replace(line, f"    - name: {name}\n      expression: '{value}'\n")
    file.write_text(text)
    return rendered(where)


def allowed_by_the_chart(folder: Path, namespace: str) -> list[dict[str, Any]]:
    assert folder.is_dir()
    words = ["admissionPolicy.secrets={client}", "admissionPolicy.hostPaths={/usr/local/vgpu}"]
    return rendered_chart(namespace, "--set", ",".join(words))


@pytest.mark.parametrize("allowed", [allowed_by_the_examples, allowed_by_the_chart])
async def test_what_an_administrator_allows_a_webhook_to_add_is_created(
    kept: Namespace,
    cluster: Cluster,
    tmp_path_factory: pytest.TempPathFactory,
    allowed: Callable[[Path, str], list[dict[str, Any]]],
) -> None:
    made = kernel(kept.name)
    add_volume({"secret": {"secretName": "client"}})(made)
    made["spec"]["volumes"].append({"name": "vgpu", "hostPath": {"path": "/usr/local/vgpu"}})
    made["spec"]["containers"][0]["envFrom"] = [{"secretRef": {"name": "client"}}]
    assert "it has the volumes more, vgpu" in kept.refusal(made)
    objects = allowed(tmp_path_factory.mktemp("changed"), kept.name)
    cluster.apply(*(each for each in objects if each["kind"] == "ValidatingAdmissionPolicy"))
    await eventually(lambda: kept.refusal(made) == "", within=60)
    add_volume({"hostPath": {"path": "/usr/local"}})(made)
    made["spec"]["volumes"][-1]["name"] = "all"
    assert "it has the volumes all" in kept.refusal(made)


def test_the_chart_leaves_it_out_where_it_is_not_wanted_or_not_allowed_to_make_it() -> None:
    if not find_helm():
        pytest.skip("no helm")
    for option in ("admissionPolicy.enabled=false", "rbac.create=false"):
        made = rendered_chart("physics", "--set", option)
        assert not [each for each in made if each["kind"].startswith("ValidatingAdmissionPolicy")]


def adding(namespace: str) -> list[dict[str, Any]]:
    """Return a policy that gives pods of a namespace a folder of their machine."""
    folder = (
        'Object.spec.volumes{name: "vgpu", hostPath: Object.spec.volumes.hostPath{path: "/usr/local/vgpu"}}'
    )
    labels = {"matchLabels": {"kubernetes.io/metadata.name": namespace}}
    change = f"Object{{spec: Object.spec{{volumes: [{folder}]}}}}"
    return changing(ADDS, LEASE_LABEL, change, namespaceSelector=labels)


async def test_a_kernel_lives_under_it_and_says_what_a_webhook_has_added(
    kept: Namespace,
    cluster: Cluster,
    tmp_path_factory: pytest.TempPathFactory,
    caplog: pytest.LogCaptureFixture,
) -> None:
    if cluster.agent is None:
        pytest.skip("this cluster has nodes of its own (KUBECONFIG)")
    node = hami("policy-1", count=50)
    node["status"]["allocatable"] |= {"nvidia.com/gpumem": "32768", "nvidia.com/gpucores": "100"}
    cluster.add(node)
    folder = tmp_path_factory.mktemp("pool")
    home = volume("claim-ada", kept.name, "ReadWriteMany")
    cluster.apply(*home, notebook("ada", kept.name), namespace=kept.name)
    config = kubeconfig_of(cluster, "gpu-pool", kept.name, folder / "config")
    async with cluster_pool(folder / "store.db", config, kept.name) as pool:
        await eventually(lambda: backend_of(pool).view.notebook("ada", ""))
        lease = await held(pool)
        await pool.launch(lease.id, command())
        await running(pool, lease.id)
        cluster.apply(*adding(kept.name))

        async def refused() -> str:
            try:
                await pool.launch(lease.id, command())
            except NotAllowed as error:
                return str(error)
            return ""

        told = ""
        try:
            while not told:  # the API server learns of the policy a moment later
                told = await refused()
        finally:
            cluster.kubectl("delete", "mutatingadmissionpolicybinding,mutatingadmissionpolicy", ADDS)
        assert told == (
            "The security rules of the cluster do not allow this kernel. Tell the administrator: "
            "the log of the pool's service has what to set."
        )
        name = f"gpu-pool-pods-{kept.name}"
        assert (
            f"The admission policy {name} refuses the kernel's pod: it has the volumes vgpu." in caplog.text
        )
        assert ".hostPaths of the chart" in caplog.text
        await pool.release(lease.id)
        await eventually(lambda: not backend_of(pool).view.own.of(lease.id))
