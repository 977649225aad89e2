"""Who reaches whom where a course has a namespace of its own: ``examples/kubernetes/course-namespace``."""

from __future__ import annotations

from ipaddress import ip_address, ip_network
from typing import Any

import pytest
import yaml

from support.control_plane import Cluster
from support.kube_examples import EXAMPLES, one, rendered

VALUES = yaml.safe_load((EXAMPLES / "values.yaml").read_text())
SERVER = {"app.kubernetes.io/component": "singleuser-server"}


@pytest.fixture(scope="module")
def course() -> list[dict[str, Any]]:
    return rendered(EXAMPLES / "course-namespace")


def of_pods(policies: list[dict[str, Any]], labels: dict[str, str]) -> Any:
    """Return what the one policy for pods of these labels says."""
    found = [each["spec"] for each in policies if each["kind"] == "NetworkPolicy"]
    (chosen,) = (each for each in found if each["podSelector"]["matchLabels"] == labels)
    assert chosen["policyTypes"] == ["Ingress", "Egress"]
    return chosen


def test_no_server_reaches_where_clouds_hand_out_credentials(course: list[dict[str, Any]]) -> None:
    """The chart's guard of it is off, and the chart's policy is in another namespace."""
    assert VALUES["singleuser"]["cloudMetadata"]["blockWithIptables"] is False
    egress = of_pods(course, SERVER)["egress"]
    assert [each for each in egress if "to" not in each] == []
    # But for the DNS of its node, at its port alone; see tests/cluster/test_network_policies.py.
    (block,) = (each["to"][0]["ipBlock"] for each in egress if "ipBlock" in each["to"][0])
    for address in ("169.254.169.254", "10.0.0.1", "100.100.100.200", "192.168.1.1"):
        assert any(ip_address(address) in ip_network(each) for each in block["except"]), address
    kernels = one(course, "NetworkPolicy", "gpu-pool-kernels")["spec"]
    assert [each for each in egress if each in kernels["egress"]] == kernels["egress"]


def test_a_server_reaches_the_hub_the_service_and_its_kernels(course: list[dict[str, Any]]) -> None:
    whole = rendered(EXAMPLES)
    reached = [
        (each["to"][0], each["ports"])
        for each in of_pods(course, SERVER)["egress"]
        if "podSelector" in each["to"][0] and {"port": 53} not in each["ports"]
    ]
    home = {"matchLabels": {"kubernetes.io/metadata.name": "jupyterhub"}}
    pool = one(whole, "NetworkPolicy", "gpu-pool")["spec"]
    kernels = one(course, "NetworkPolicy", "gpu-pool-kernels")["spec"]
    hub = {"matchLabels": {"app.kubernetes.io/component": "hub"}}
    assert reached == [
        ({"namespaceSelector": home, "podSelector": hub}, [{"port": 8081}]),
        ({"namespaceSelector": home, "podSelector": pool["podSelector"]}, pool["ingress"][0]["ports"]),
        ({"podSelector": kernels["podSelector"]}, kernels["ingress"][0]["ports"]),
    ]
    assert kernels["ingress"][0]["from"] == [{"podSelector": {"matchLabels": SERVER}}]


def test_the_hub_and_its_proxy_alone_reach_a_server(course: list[dict[str, Any]]) -> None:
    (admitted,) = of_pods(course, SERVER)["ingress"]
    assert admitted["ports"] == [{"port": 8888}]
    (source,) = admitted["from"]
    assert source["namespaceSelector"] == {"matchLabels": {"kubernetes.io/metadata.name": "jupyterhub"}}
    (said,) = source["podSelector"]["matchExpressions"]
    assert said == {"key": "app.kubernetes.io/component", "operator": "In", "values": ["proxy", "hub"]}


@pytest.mark.long
def test_a_cluster_accepts_the_policies(
    cluster: Cluster, namespace: str, course: list[dict[str, Any]]
) -> None:
    policies = [each for each in course if each["kind"] == "NetworkPolicy"]
    for each in policies:
        each["metadata"]["namespace"] = namespace
    cluster.apply(*policies, flags=["--validate=strict"])
