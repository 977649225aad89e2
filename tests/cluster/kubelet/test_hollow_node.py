"""A node of the tests and a kubelet treat the same pods in the same way: ``support.probes`` has them.

With ``GPU_POOL_TESTS_RECORD`` what the kubelet does is written down anew, for the tests without one.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterator
from typing import Any

import pytest

from support.control_plane import Cluster
from support.kubelet import NODE
from support.node_agent import NodeAgent
from support.probes import RECORD, ProbedNode, differences, everything

Seen = dict[str, Any]
PROBES = [each.name for each in everything("")]


@pytest.fixture(scope="module")
def probed_nodes(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[ProbedNode, ProbedNode]]:
    """Return a kubelet and a node of the tests, in this order."""
    names = [f"test-{secrets.token_hex(4)}" for _ in range(2)]
    with NodeAgent(cluster.kubeconfig, tmp_path_factory.mktemp("hollow")) as agent:
        for name in names:
            cluster.kubectl("create", "namespace", name)
        made = (
            ProbedNode(cluster, names[0], NODE, None),
            ProbedNode.hollow(cluster, names[1], agent, "hollow-1"),
        )
        try:
            yield made
        finally:
            for probed in made:
                probed.let_go()
                cluster.kubectl("delete", "namespace", probed.namespace, "--wait=false")


@pytest.fixture(scope="module")
def both(probed_nodes: tuple[ProbedNode, ProbedNode], cluster: Cluster) -> tuple[Seen, Seen]:
    """Return what each node made of all pods, by their names."""
    probes = list(everything(cluster.image))
    for probed in probed_nodes:
        probed.begin(probes)
    real, hollow = (probed.follow(probes) for probed in probed_nodes)
    if os.environ.get("GPU_POOL_TESTS_RECORD"):
        RECORD.write_text(json.dumps(real, indent=1, sort_keys=True) + "\n")
    return real, hollow


@pytest.mark.parametrize("name", PROBES)
@pytest.mark.timeout(1200)
def test_a_node_of_the_tests_does_what_a_kubelet_does(both: tuple[Seen, Seen], name: str) -> None:
    real, hollow = both
    assert differences(real[name], hollow[name]) == []


@pytest.mark.parametrize("name", PROBES)
def test_a_kubelet_does_what_was_written_down(both: tuple[Seen, Seen], name: str) -> None:
    """The tests without a kubelet compare their nodes with it."""
    assert differences(json.loads(RECORD.read_text())[name], both[0][name]) == []


def test_who_talks_to_a_pod_that_has_gone_hears_nothing(probed_nodes: tuple[ProbedNode, ProbedNode]) -> None:
    for probed in probed_nodes:
        address = probed.serve()
        probed.await_answer(address, "answered")
        probed.cluster.kubectl("delete", "pod", "-n", probed.namespace, "serving", "--grace-period=1")
        probed.await_answer(address, "nothing")
