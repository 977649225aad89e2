"""Who reaches whom where policies are enforced: those of the examples, and those of the Hub's chart.

Pods with the labels of each part of an installation listen on all ports, and try to connect to each other.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from support import cluster_dns
from support.charts import helm
from support.control_plane import Cluster
from support.guide import Guide
from support.installation import CHART, no_chart
from support.jupyter_env import eventually
from support.kube_examples import EXAMPLES, copied, one, rendered
from support.kubelet import RealCluster, no_firewall, no_names
from support.reachability import INTERNET, METADATA, WIRESERVER, Listener, Listeners, internet

pytestmark = pytest.mark.timeout(900)

Objects = list[dict[str, Any]]
#: What KubeSpawner writes on the pod of a server, by the settings of the Hub's chart.
_SERVER = {
    "app": "jupyterhub",
    "release": "hub",
    "component": "singleuser-server",
    "app.kubernetes.io/component": "singleuser-server",
    "hub.jupyter.org/network-access-hub": "true",
}
_KERNEL = {"app.kubernetes.io/component": "gpu-kernel"}
#: The namespaces of the Hub, of a course, and of others.
_HUB, _COURSE, _OTHERS = (f"policies-{name}-{secrets.token_hex(3)}" for name in ("hub", "course", "others"))
#: The pods in the Hub's namespace and elsewhere, where courses have no namespaces of their own.
_EVERYBODY = {"hub", "proxy", "service", "ada", "grace", "kernel", "kernel-of-grace", "neighbour", "stranger"}
#: Who reaches what then: "Who reaches whom" of docs/administrator/kubernetes.md.
_REACHED = {
    "hub:8081": {"proxy", "service", "ada", "grace"},
    "proxy:8000": {"hub", "ada", "grace", "neighbour", "stranger"},
    "proxy:8001": {"hub"},
    "service:8888": {"hub", "proxy", "ada", "grace"},
    "ada:8888": {"hub", "proxy"},
    # No policy can know whose kernel it is: its keys keep grace out.
    "kernel:9749": set(),
    "kernel:9750": {"ada", "grace"},
    "kernel:9755": {"ada", "grace"},
    "kernel:9756": set(),
    "kernel:8888": set(),
    "stranger:8000": {"hub", "proxy", "neighbour"},
    "kubernetes": {"hub", "proxy", "service", "neighbour", "stranger"},
    "internet:8000": _EVERYBODY - {"service"},
    "metadata:8000": {"hub", "proxy", "neighbour", "stranger"},
    "metadata:53": {"hub", "proxy", "neighbour", "stranger"},
    "wireserver:8000": {"hub", "proxy", "neighbour", "stranger"},
    "names:53": _EVERYBODY,
}
_COURSE_PODS = {"server-of-course", "kernel-of-course"}
#: Who reaches what where a course has its namespace; a stranger with a server's labels is one more course.
_REACHED_BY_COURSE = {
    "hub:8081": _REACHED["hub:8081"] | {"server-of-course"},
    "service:8888": _REACHED["service:8888"] | {"server-of-course"},
    "proxy:8001": {"hub"},
    "ada:8888": {"hub", "proxy"},
    "kernel:9750": {"ada", "grace"},
    "server-of-course:8888": {"hub", "proxy"},
    "server-of-course:8000": set(),
    "kernel-of-course:9750": {"server-of-course"},
    "kernel-of-course:9756": set(),
    "kubernetes": _REACHED["kubernetes"],
    "internet:8000": _REACHED["internet:8000"] | _COURSE_PODS,
    "metadata:8000": _REACHED["metadata:8000"],
    "metadata:53": _REACHED["metadata:53"],
    "wireserver:8000": _REACHED["wireserver:8000"],
    "names:53": _EVERYBODY | _COURSE_PODS,
}


def chart(*options: str) -> Objects:
    """Return what the Hub's chart makes."""
    words = ("template", "hub", os.environ[CHART], "--namespace", _HUB)
    text = helm(*words, "--values", str(EXAMPLES / "values.yaml"), *options)
    return [each for each in yaml.safe_load_all(text) if each]


def policies(objects: Objects) -> Objects:
    """Return the policies among these."""
    return [each for each in objects if each["kind"] == "NetworkPolicy"]


def example(folder: Path) -> Objects:
    """Return the policies of the examples, for the Hub's namespace."""
    return policies(rendered(copied(folder, _HUB)))


def of_a_course(folder: Path) -> Objects:
    """Return the policies of a course's namespace, whose Hub is in another one than ``jupyterhub``."""
    made = copied(folder, _HUB).parent / "kubernetes/course-namespace"
    for file in made.iterdir():
        text = file.read_text().replace("course-intro-ml", _COURSE)
        file.write_text(text.replace("metadata.name: jupyterhub", f"metadata.name: {_HUB}"))
    return policies(rendered(made))


def as_the_page_adds(folder: Path, kubeconfig: Path) -> Objects:
    """Return the policies of the Hub's namespace after what the page says to change for such courses."""
    page = Guide("administrator/kubernetes.md", kubeconfig, {})
    values = folder / "more.yaml"
    values.write_text(page.file("Where each course has a namespace", "values.yaml"))
    changed = example(folder)
    (entry,) = one(changed, "NetworkPolicy", "gpu-pool")["spec"]["ingress"]
    (allowed,) = entry["from"]
    allowed["namespaceSelector"] = {}
    return [*changed, *policies(chart("--values", str(values)))]


@pytest.fixture(scope="module")
def listeners(own_cluster: RealCluster) -> Iterator[Listeners]:
    """Start a pod for each part of an installation."""
    if why := no_firewall() or no_names() or no_chart():
        pytest.skip(why)
    made = chart()
    labels = {
        each: one(made, "Deployment", each)["spec"]["template"]["metadata"]["labels"]
        for each in ("hub", "proxy")
    }
    service = yaml.safe_load((EXAMPLES / "service/deployment.yaml").read_text())
    pods = [
        Listener("hub", _HUB, labels["hub"]),
        Listener("proxy", _HUB, labels["proxy"]),
        Listener("service", _HUB, service["spec"]["template"]["metadata"]["labels"]),
        Listener("ada", _HUB, _SERVER),
        Listener("grace", _HUB, _SERVER),
        Listener("kernel", _HUB, _KERNEL),
        Listener("kernel-of-grace", _HUB, _KERNEL),
        Listener("neighbour", _HUB),
        Listener("stranger", _OTHERS),
        Listener("server-of-course", _COURSE, _SERVER),
        Listener("kernel-of-course", _COURSE, _KERNEL),
    ]
    for each in (_HUB, _COURSE, _OTHERS):
        own_cluster.kubectl("create", "namespace", each)
    try:
        with internet(own_cluster.machine):
            yield Listeners(own_cluster, pods)
    finally:
        for each in (_HUB, _COURSE, _OTHERS):
            own_cluster.kubectl("delete", "namespace", each, "--wait=false")


@pytest.fixture
def no_policies(cluster: Cluster, listeners: Listeners) -> Iterator[None]:
    """Leave no policy to the next test."""
    yield
    for each in (_HUB, _COURSE):
        cluster.kubectl("delete", "networkpolicies", "--all", "-n", each)


def targets(cluster: Cluster, listeners: Listeners, names: Mapping[str, Any]) -> dict[str, tuple[str, int]]:
    """Return the address and the port of each of these."""
    api = cluster.get("service", "kubernetes")["spec"]["clusterIP"]
    dns = cluster.get("service", "-n", cluster_dns.NAMESPACE, "kube-dns")["spec"]["clusterIP"]
    elsewhere = {"internet": INTERNET, "metadata": METADATA, "wireserver": WIRESERVER}
    elsewhere |= {"kubernetes": api, "names": dns}
    found = {}
    for each in names:
        name, _, port = each.partition(":")
        found[each] = (elsewhere.get(name) or listeners.address(name), int(port or 443))
    return found


async def becomes(
    cluster: Cluster, listeners: Listeners, expected: Mapping[str, set[str]], among: set[str]
) -> None:
    """Wait until exactly these reach each target, of those that are considered."""
    where = targets(cluster, listeners, expected)
    wrong: dict[str, dict[str, list[str]]] = {}

    async def is_so() -> bool:
        seen = await listeners.reached(where)
        wrong.clear()
        for each, who in seen.items():
            # What is between a pod and itself, no policy rules.
            found = (who & among) - {each.partition(":")[0]}
            if found != expected[each]:
                wrong[each] = {
                    "too many": sorted(found - expected[each]),
                    "too few": sorted(expected[each] - found),
                }
        return not wrong

    try:
        await eventually(is_so)
    except AssertionError:
        raise AssertionError(wrong) from None


async def test_without_policies_everybody_reaches_everything(cluster: Cluster, listeners: Listeners) -> None:
    everybody = _EVERYBODY | _COURSE_PODS
    everything = {each: everybody - {each.partition(":")[0]} for each in _REACHED | _REACHED_BY_COURSE}
    for outside in ("internet:8000", "metadata:8000", "metadata:53", "wireserver:8000"):
        everything[outside] = everybody
    await becomes(cluster, listeners, everything, everybody)


@pytest.mark.usefixtures("no_policies")
async def test_with_the_policies_of_the_examples_only_who_must_reaches_the_service_and_kernels(
    cluster: Cluster, listeners: Listeners, tmp_path: Path
) -> None:
    cluster.apply(*example(tmp_path), *policies(chart()), namespace=_HUB)
    await becomes(cluster, listeners, _REACHED, _EVERYBODY)


@pytest.mark.usefixtures("no_policies")
async def test_where_a_course_has_a_namespace_its_server_reaches_the_hub_the_service_and_its_own_kernels(
    cluster: Cluster, listeners: Listeners, tmp_path: Path
) -> None:
    hub, course = tmp_path / "hub", tmp_path / "course"
    for folder in (hub, course):
        folder.mkdir()
    cluster.apply(*as_the_page_adds(hub, cluster.kubeconfig), namespace=_HUB)
    cluster.apply(*of_a_course(course), namespace=_COURSE)
    await becomes(cluster, listeners, _REACHED_BY_COURSE, _EVERYBODY | _COURSE_PODS)
