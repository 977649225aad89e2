"""Every pod that a dialect yields is accepted by a real API server, and nothing of it is dropped."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gpu_pool.cluster.dialects import choose, identity_labels, merged
from gpu_pool.cluster.dialects.objects import quantity
from gpu_pool_client import GpuPoolError, NotAllowed, parse_request
from support.clusters import everything

from .conftest import ApiServer

#: Accepted, and not stored: a scheduler would place them on the nodes of other tests.
PODS = "/api/v1/namespaces/default/pods?dryRun=All"
TEMPLATES = "/apis/resource.k8s.io/v1/namespaces/default/resourceclaimtemplates"
REQUESTS = ("2%", "2.5%", "14%", "10% model=V100 memory>=16GiB driver>=550", "4GiB", "2x50%", "1", "2")
HOSTILE = 'Zoë "the" O\'Hara\n{{evil}}: ../../' + "x" * 100


@pytest.fixture
def classes(api_server: ApiServer) -> ApiServer:
    """Return the server, with the RuntimeClass that some pods name."""
    found = {"metadata": {"name": "nvidia"}, "handler": "nvidia"}
    api_server.create("/apis/node.k8s.io/v1/runtimeclasses", found)
    return api_server


def base(name: str) -> dict[str, Any]:
    """Return a pod without a slice."""
    container = {
        "name": "notebook",
        "image": "example.org/notebook:1",
        "command": ["jupyterhub-singleuser"],
        "resources": {"limits": {"cpu": "1", "memory": "1Gi"}},
    }
    labels = identity_labels(HOSTILE, HOSTILE[::-1])
    metadata = {"name": name, "labels": labels}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"containers": [container]}}


def pods(name: str) -> list[tuple[str, dict[str, Any], tuple[Mapping[str, Any], ...]]]:
    """Return each request that this cluster can grant, its pod, and its claim templates."""
    dialect = choose(*everything()[name]).dialect
    assert dialect is not None
    made = []
    for index, text in enumerate(REQUESTS):
        try:
            parts = dialect.translate(parse_request(text)).pod
        except NotAllowed:
            raise
        except GpuPoolError:
            continue
        pod = merged(base(f"{name}-{index}"), "notebook", parts, dialect.table.bans)
        made.append((text, pod, parts.claim_templates))
    return made


@pytest.mark.parametrize("name", list(everything()))
def test_every_pod_is_accepted_as_it_is(name: str, classes: ApiServer) -> None:
    granted = pods(name)
    assert granted
    for text, pod, templates in granted:
        for template in templates:
            stored = classes.create(TEMPLATES, template)
            assert stored is None or missing(template, stored) == "", text
        stored = classes.create(PODS, pod)
        assert missing(pod, stored) == "", text


def test_a_pod_that_is_not_valid_is_refused(api_server: ApiServer) -> None:
    pod = base("invalid")
    pod["metadata"]["labels"]["jupyter-gpu-pool/user"] = HOSTILE
    status, answer = api_server.call("POST", PODS, pod)
    assert status == 422
    assert "metadata.labels" in answer["message"]


def missing(sent: Any, stored: Any, path: str = "") -> str:
    """Return where something that was sent is not stored, empty if everything is."""
    if isinstance(sent, Mapping):
        found = (missing(value, stored.get(key), f"{path}.{key}") for key, value in sent.items())
        return next(filter(None, found), "") if isinstance(stored, Mapping) else path
    if isinstance(sent, list | tuple):
        if not isinstance(stored, list) or len(stored) < len(sent):
            return path
        found = (missing(value, stored[index], f"{path}[{index}]") for index, value in enumerate(sent))
        return next(filter(None, found), "")
    same = sent == stored or quantity(sent) == quantity(stored) > 0
    return "" if same else f"{path}: {sent!r} became {stored!r}"
