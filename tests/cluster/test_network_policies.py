"""What kernels and servers cannot reach, and where they look up names: the same wherever it is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from ipaddress import IPv4Network, IPv6Network, ip_address, ip_network
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from support.charts import CHART, find_helm, helm_program, rendered_chart
from support.kube_examples import EXAMPLES, ROOT

PAGE = ROOT / "docs" / "administrator" / "kubernetes.md"
FILES = (EXAMPLES / "service" / "networkpolicy.yaml", EXAMPLES / "course-namespace" / "networkpolicy.yaml")
HUB = yaml.safe_load((EXAMPLES / "values.yaml").read_text())["singleuser"]["networkPolicy"]
VALUES = yaml.safe_load((CHART / "values.yaml").read_text())
CHOSEN = VALUES["networkPolicy"]
SCHEMA = yaml.safe_load((CHART / "values.schema.json").read_text())

#: Where clouds hand out credentials, and what else a machine's own programs ask them for.
METADATA = {
    "AWS, Azure, Google, Oracle, OpenStack": "169.254.169.254",
    "AWS: credentials of containers": "169.254.170.2",
    "AWS: pod identities": "169.254.170.23",
    "Alibaba": "100.100.100.200",
    "Azure: WireServer": "168.63.129.16",
    "Oracle, the older one": "192.0.0.192",
    "Scaleway": "169.254.42.42",
}
METADATA_IPV6 = {"AWS": "fd00:ec2::254", "Google": "fd20:ce::254", "by a translator": "64:ff9b::a9fe:a9fe"}

Rules = list[dict[str, Any]]


def egress_of_files() -> Iterator[tuple[str, Rules]]:
    """Yield the egress of each policy of the examples, by its name."""
    for file in FILES:
        for each in yaml.safe_load_all(file.read_text()):
            yield f"{file.parent.name}: {each['metadata']['name']}", each["spec"]["egress"]


def egress_of_chart(*options: str) -> Iterator[tuple[str, Rules]]:
    """Yield the egress of each policy of the chart, by its name, if Helm is there."""
    if find_helm():
        for each in rendered_chart("physics", *options):
            if each["kind"] == "NetworkPolicy":
                yield f"chart: {each['metadata']['name']}", each["spec"]["egress"]


def blocked(rules: Rules) -> list[list[str]]:
    """Return what is left out wherever much of the Internet is let in."""
    blocks = [to["ipBlock"] for rule in rules for to in rule.get("to", ()) if "ipBlock" in to]
    return [each.get("except", []) for each in blocks if ip_network(each["cidr"]).prefixlen < 24]


def names(rules: Rules, ports: tuple[int, ...] = (53,)) -> list[dict[str, Any]]:
    """Return where these rules let names be looked up, by UDP and by TCP."""
    wanted = [entry for port in ports for entry in ({"port": port, "protocol": "UDP"}, {"port": port})]
    return [to for rule in rules if rule.get("ports") == wanted for to in rule["to"]]


def of_the_page(column: re.Pattern[str]) -> list[str]:
    """Return the networks that the page names, of the first column of its table or of its YAML."""
    section = PAGE.read_text().split("\n## Who reaches whom\n")[1].split("\n## ")[0]
    return [network for text in column.findall(section) for network in re.findall(r"[0-9a-f.:]+/\d+", text)]


def test_the_chart_the_examples_and_the_page_leave_out_the_same() -> None:
    wanted = CHOSEN["kernelsCannotReach"]
    found = {name: blocked(rules) for name, rules in (*egress_of_files(), *egress_of_chart())}
    found["the Hub's values"] = blocked(HUB["egress"])
    to_internet = {name: each for name, each in found.items() if each}
    assert {name for name in to_internet if "chart" not in name} == {
        "service: gpu-pool-kernels",
        "course-namespace: gpu-pool-kernels",
        "course-namespace: gpu-pool-servers",
        "the Hub's values",
    }
    assert to_internet == {name: [wanted] for name in to_internet}
    assert sorted(of_the_page(re.compile(r"^\| (`[0-9][^|]*/[^|]*) \|", re.MULTILINE))) == sorted(wanted)
    by_ipv6 = re.compile(r"except:\n((?:      - .*\n)+)")
    assert of_the_page(by_ipv6) == CHOSEN["kernelsCannotReachIPv6"]


@pytest.mark.parametrize("cloud", [*METADATA, *METADATA_IPV6])
def test_no_metadata_of_a_cloud_is_reached(cloud: str) -> None:
    address = ip_address(METADATA.get(cloud) or METADATA_IPV6[cloud])
    key = "kernelsCannotReach" if cloud in METADATA else "kernelsCannotReachIPv6"
    networks: list[IPv4Network | IPv6Network] = [ip_network(each) for each in CHOSEN[key]]
    assert any(address in each for each in networks)
    # By IPv6, nothing is unless somebody asks for it.
    everything = [block for _, rules in egress_of_files() for block in rules]
    assert "::/0" not in str([everything, HUB["egress"]])
    assert CHOSEN["kernelsReachIPv6"] is False


def test_the_rules_of_the_hubs_chart_let_nothing_more_in() -> None:
    """Its own list lacks most of these addresses, and it lets port 53 of all private ones in."""
    open_ones = {"cloudMetadataServer", "dnsPortsCloudMetadataServer", "dnsPortsPrivateIPs", "nonPrivateIPs"}
    assert HUB["egressAllowRules"] == dict.fromkeys([*open_ones, "privateIPs"], False)


def test_names_are_looked_up_in_the_clusters_dns_alone() -> None:
    wanted = CHOSEN["dns"]["to"]
    assert wanted == [
        {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kube-system"}},
            "podSelector": {"matchLabels": {"k8s-app": "kube-dns"}},
        },
        {"ipBlock": {"cidr": "169.254.20.10/32"}},
    ]
    for name, rules in (*egress_of_files(), *egress_of_chart()):
        assert names(rules) == wanted, name
        # Without "to", a rule is for every address; only the API server's may be anywhere.
        anywhere = [rule["ports"] for rule in rules if "to" not in rule]
        assert anywhere in ([], [[{"port": 443}, {"port": 6443}]]), name
    # The Hub's chart lets in all of kube-system.
    assert names(HUB["egress"]) == wanted[1:]


def test_the_chart_takes_another_dns_and_ipv6() -> None:
    options = (
        "--set-json",
        'networkPolicy.dns={"to": [{"ipBlock": {"cidr": "10.96.0.10/32"}}], "ports": [53, 5353]}',
        "--set",
        "networkPolicy.kernelsReachIPv6=true",
    )
    helm_program()
    policies = dict(egress_of_chart(*options))
    for rules in policies.values():
        assert names(rules, (53, 5353)) == [{"ipBlock": {"cidr": "10.96.0.10/32"}}]
    assert blocked(policies["chart: gpu-pool-kernels"]) == [
        CHOSEN["kernelsCannotReach"],
        CHOSEN["kernelsCannotReachIPv6"],
    ]


@pytest.mark.parametrize(
    "given",
    [
        {"dns": {"to": [], "ports": [53]}},
        {"dns": {"to": [{}], "ports": [53]}},
        {"dns": {"to": CHOSEN["dns"]["to"], "ports": []}},
        {"dns": {"to": [{"ipblock": {"cidr": "10.0.0.10/32"}}], "ports": [53]}},
        {"kernelsCannotReach": ["fd00:ec2::254/128"]},
        {"kernelsCannotReachIPv6": ["169.254.169.254/32"]},
    ],
)
def test_values_that_would_open_everything_or_that_no_cluster_accepts_are_refused(
    given: dict[str, Any],
) -> None:
    jsonschema.validate(VALUES, SCHEMA)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({**VALUES, "networkPolicy": {**CHOSEN, **given}}, SCHEMA)


def test_every_file_with_such_a_list_is_looked_at() -> None:
    known = {*FILES, EXAMPLES / "values.yaml", CHART / "values.yaml"}
    folders = (ROOT / "examples", ROOT / "charts")
    found: set[Path] = {
        path
        for folder in folders
        for path in folder.rglob("*")
        if path.is_file() and "100.64.0.0/10" in path.read_text(errors="replace")
    }
    assert found == known
