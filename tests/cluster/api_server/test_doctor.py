"""``gpu-pool doctor --cluster --namespace``: what an administrator still has to do, and in which order."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import yaml

from gpu_pool.cli.checks import Check
from gpu_pool.cli.installation import DRA_RIGHTS, RIGHTS, SHARED_RIGHTS, check_installation
from support.charts import COURSE, rendered_chart
from support.control_plane import Cluster
from support.kube_examples import EXAMPLES, secret

KEY = "hub.services.gpu-pool.apiToken"


def test_it_asks_for_the_rights_that_the_examples_give() -> None:
    given = set()
    for each in yaml.safe_load_all((EXAMPLES / "service/rbac.yaml").read_text()):
        for rule in each.get("rules", []) if each else []:
            for resource in rule["resources"]:
                verbs = " ".join(rule["verbs"])
                given.add((verbs, rule["apiGroups"][0], resource, each["kind"] == "ClusterRole"))
    assert given == {*RIGHTS, *DRA_RIGHTS}
    role = next(yaml.safe_load_all((EXAMPLES / "service/shared/rbac.yaml").read_text()))
    given = set()
    for rule in role["rules"]:
        ((resource,), (group,)) = rule["resources"], rule["apiGroups"]
        given.add((" ".join(rule["verbs"]), group, resource, role["kind"] == "ClusterRole"))
    assert given == set(SHARED_RIGHTS)


def look(namespace: str, gpu_nodes: Sequence[str] = ()) -> dict[str, Check]:
    """Return what the doctor says last of each thing; the first that is broken is "first"."""
    found = asyncio.run(check_installation(namespace, gpu_nodes))
    broken = [each for each in found if each.state == "broken"]
    return {each.name: each for each in found} | {"first": (broken or [Check("nothing", "ok", "")])[0]}


def installed(namespace: str, *options: str) -> list[dict[str, Any]]:
    return rendered_chart(namespace, *options)


def hub(namespace: str, ready: int) -> Mapping[str, Any]:
    labels = {"app": "jupyterhub", "component": "hub"}
    pod = {"metadata": {"labels": labels}, "spec": {"containers": [{"name": "hub", "image": "hub:1"}]}}
    spec = {"replicas": ready, "selector": {"matchLabels": labels}, "template": pod}
    about = {"name": "hub", "namespace": namespace, "labels": labels}
    return {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": about, "spec": spec}


def is_ready(cluster: Cluster, namespace: str, name: str) -> None:
    """Say of a Deployment what its controller would; there is none for them here."""
    status = '{"status": {"replicas": 1, "readyReplicas": 1}}'
    words = ("patch", f"deployment/{name}", "--subresource=status", "--type=merge", "--patch", status)
    cluster.kubectl("-n", namespace, *words)


@pytest.mark.long
def test_it_leads_from_nothing_to_an_installation_that_runs(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    assert "kubectl create namespace elsewhere" in look("elsewhere")["first"].remedy
    nothing = look(namespace)
    assert nothing["first"].name == "service"
    assert nothing["hub"].state == "broken"
    # Without a course, without rights, and with a store that no disk is for.
    cluster.apply(*installed(namespace, "--set", "rbac.create=false,networkPolicy.enabled=false"))
    found = look(namespace)
    assert found["first"].name == "courses"
    assert "nobody gets a slice" in found["courses"].text
    assert "names no storage class" in found["store"].text
    assert "may not list nodes, watch nodes" in found["rights"].text
    assert "create secrets here" in found["rights"].text
    assert [found[name].state for name in ("network", "admission")] == ["note"] * 2
    assert "keeps the service to pods and secrets" in found["admission"].text
    # With the chart as it is: what is left is the disk, the Hub and its token.
    cluster.apply(*installed(namespace, COURSE))
    found = look(namespace)
    assert found["first"].name == "store"
    assert [found[name].state for name in ("courses", "rights", "admission", "network")] == ["ok"] * 4
    assert found["hub"].text == "there is no JupyterHub in this namespace"
    # A Secret of a Hub whose values do not name the service has no token for it.
    cluster.apply(hub(namespace, 1), secret("hub", other="x"), namespace=namespace)
    is_ready(cluster, namespace, "hub")
    found = look(namespace)
    assert found["hub"].state == "ok"
    assert f"has no {KEY}" in found["token"].text
    cluster.apply(secret("hub", **{KEY: "0" * 32}), namespace=namespace)
    assert look(namespace)["token"].state == "ok"


def test_where_the_pool_divides_whole_gpus_it_looks_for_those_rights_too(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    shared = ("--set", "config.KubernetesSettings.dialect=shared")
    made = installed(namespace, COURSE, *shared)
    cluster.apply(*(each for each in made if each["metadata"]["name"] != "gpu-pool-shared"))
    missing = look(namespace)["rights"]
    words = "may not create resourceclaims here, delete resourceclaims here, get resourceclaims here"
    assert words in missing.text
    cluster.apply(*made)
    assert look(namespace)["rights"].state == "ok"


def pod(name: str, labels: Mapping[str, str]) -> Mapping[str, Any]:
    about = {"name": name, "labels": labels}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": about,
        "spec": {"containers": [{"name": "c", "image": "x"}]},
    }


@pytest.mark.long
def test_it_says_where_names_are_looked_up_and_that_nothing_is_there(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    cluster.apply(*installed(namespace, COURSE))
    said = look(namespace)["names"]
    assert said.state == "note"
    assert "in the pods k8s-app=kube-dns of kube-system only, and there are none" in said.text
    assert "Who reaches whom" in said.remedy
    cluster.apply(pod("dns", {"k8s-app": "kube-dns"}), namespace="kube-system")
    try:
        assert (
            look(namespace)["names"].text == "may be looked up in the pods k8s-app=kube-dns of kube-system: 1"
        )
    finally:
        cluster.kubectl("delete", "pod", "dns", "-n", "kube-system", "--grace-period=0", "--force")
    # Whoever has named another DNS knows why.
    own = ("--set", "networkPolicy.dns.to[0].ipBlock.cidr=169.254.169.254/32")
    cluster.apply(*installed(namespace, COURSE, *own))
    assert "names" not in look(namespace)


@pytest.mark.long
def test_it_says_which_nodes_lack_a_courses_image_and_how_long_it_takes_to_get_there(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    image = "registry.example.org/own:1"
    objects = installed(namespace, COURSE)
    (courses,) = (each for each in objects if each["kind"] == "ConfigMap" and "intro-ml.yaml" in each["data"])
    text = courses["data"]["intro-ml.yaml"]
    courses["data"]["intro-ml.yaml"] = text.replace("kubernetes:\n", f"kubernetes:\n  image: {image}\n")
    cluster.apply(*objects)
    nodes = [f"{namespace}-{number}" for number in range(2)]
    for each in nodes:
        cluster.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": each}})
    status = {"status": {"images": [{"names": [image], "sizeBytes": 1}]}}
    words = ("patch", "node", nodes[0], "--subresource=status", "--type=merge", "--patch", json.dumps(status))
    cluster.kubectl(*words)
    message = f'Successfully pulled image "{image}" in 1m30s (1m40s including waiting). Image size: 1 bytes.'
    fetched = {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": "fetched", "namespace": namespace},
        "involvedObject": {"kind": "Pod", "name": "x", "namespace": namespace},
        "reason": "Pulled",
        "message": message,
        "source": {"host": nodes[0]},
    }
    cluster.apply(fetched)
    try:
        said = look(namespace, nodes)["image"]
    finally:
        cluster.kubectl("delete", "node", *nodes)
    assert said.state == "note"
    assert said.text.startswith(
        f"{image} is on 1 of 2 nodes with GPUs; it took 1min40s to get to {nodes[0]}: the first kernel"
    )


@pytest.mark.long
def test_a_service_that_somebody_has_made_otherwise_is_no_mistake_of_ours(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    objects = installed(namespace, COURSE)
    (deployment,) = (each for each in objects if each["kind"] == "Deployment")
    pod = deployment["spec"]["template"]["spec"]
    pod["volumes"] = [{"name": "store", "emptyDir": {}}]
    token = [{"name": "JUPYTERHUB_API_TOKEN", "value": "secret"}]
    pod["containers"] = [{"name": name, "image": "x", "env": token} for name in ("one", "two")]
    cluster.apply(deployment)
    found = look(namespace)
    assert [found[name].state for name in ("courses", "store", "token")] == ["note"] * 3
    assert "may be lost" in found["store"].text


@pytest.mark.long
def test_it_says_in_the_clusters_words_why_the_service_does_not_run(
    cluster: Cluster, namespace: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(cluster.kubeconfig))
    objects = installed(namespace, COURSE)
    cluster.apply(*objects)
    assert "no pod yet" in look(namespace)["service"].text
    (deployment,) = (each for each in objects if each["kind"] == "Deployment")
    pod = deployment["spec"]["template"]
    about = {"name": "gpu-pool-1", "namespace": namespace, "labels": pod["metadata"]["labels"]}
    alone = {"containers": [{"name": "service", "image": "x"}], "nodeSelector": {"no": "such"}}
    cluster.apply({"apiVersion": "v1", "kind": "Pod", "metadata": about, "spec": alone})
    waiting = {"reason": "ImagePullBackOff", "message": "no such image"}
    state = {"name": "service", "image": "x", "imageID": "", "ready": False, "restartCount": 0}
    status = {"status": {"containerStatuses": [{**state, "state": {"waiting": waiting}}]}}
    words = ("patch", "pod/gpu-pool-1", "--subresource=status", "--type=merge", "--patch", json.dumps(status))
    cluster.kubectl("-n", namespace, *words)
    assert "does not run: ImagePullBackOff: no such image" in look(namespace)["service"].text
    is_ready(cluster, namespace, "gpu-pool")
    assert look(namespace)["service"].state == "ok"
