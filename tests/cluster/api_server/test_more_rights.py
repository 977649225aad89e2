"""What the service may do besides, with Kueue and with a namespace for each course, and no more."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import pytest
import yaml

from support.control_plane import Cluster
from support.kube_examples import EXAMPLES, one, rendered

ACCOUNT = "system:serviceaccount:jupyterhub:gpu-pool"
KUEUE, PENDING = "kueue.x-k8s.io", "visibility.kueue.x-k8s.io"


@pytest.fixture
def applied(cluster: Cluster, namespace: str) -> Iterator[str]:
    """Apply what is for a course's namespace, and what is for Kueue."""
    found = rendered(EXAMPLES / "course-namespace")
    for each in found:
        each["metadata"]["namespace"] = namespace
    found += yaml.safe_load_all((EXAMPLES / "service" / "kueue" / "rbac.yaml").read_text())
    cluster.apply(*found, flags=["--validate=strict"])
    # The API server follows its own rules with a little delay.
    deadline = time.monotonic() + 60
    while not (may(cluster, "watch", "workloads", group=KUEUE) and may(cluster, "get", "pods", namespace)):
        assert time.monotonic() < deadline, "the rights are not given"
    yield namespace
    cluster.kubectl("delete", "clusterrole,clusterrolebinding", "gpu-pool-kueue")


def may(cluster: Cluster, verb: str, what: str, namespace: str = "", group: str = "") -> bool:
    """Ask the API server what the service may do; also of kinds that it does not serve."""
    resource, _, subresource = what.partition("/")
    asked = {"verb": verb, "group": group, "resource": resource, "subresource": subresource}
    spec = {"user": ACCOUNT, "resourceAttributes": {**asked, "namespace": namespace}}
    review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SubjectAccessReview", "spec": spec}
    answer = cluster.kubectl("create", "-f", "-", "-o", "json", stdin=json.dumps(review))
    return bool(json.loads(answer)["status"]["allowed"])


@pytest.mark.long
def test_beside_the_hubs_namespace_it_may_the_same_in_a_courses_and_nowhere_else(
    cluster: Cluster, applied: str
) -> None:
    allowed = [
        ("create", "pods"),
        ("delete", "pods"),
        ("create", "secrets"),
        ("create", "configmaps"),
        ("get", "persistentvolumeclaims"),
    ]
    for verb, what in allowed:
        assert may(cluster, verb, what, applied), what
        assert not may(cluster, verb, what, "default"), what
    for verb, what in (("get", "secrets"), ("delete", "secrets"), ("patch", "pods"), ("create", "pods/exec")):
        assert not may(cluster, verb, what, applied), what


@pytest.mark.long
def test_of_kueue_it_may_read_what_is_said_and_decide_nothing(cluster: Cluster, applied: str) -> None:
    assert may(cluster, "list", "workloads", group=KUEUE)
    assert may(cluster, "get", "localqueues/pendingworkloads", applied, group=PENDING)
    for verb, what in (("update", "workloads"), ("delete", "workloads"), ("create", "localqueues")):
        assert not may(cluster, verb, what, group=KUEUE), what


def test_a_courses_namespace_has_the_same_rules_as_the_hubs() -> None:
    whole, course = rendered(EXAMPLES), rendered(EXAMPLES / "course-namespace")
    for name in ("gpu-pool", "gpu-pool-hub"):
        assert one(course, "Role", name)["rules"] == one(whole, "Role", name)["rules"]
        bound = one(course, "RoleBinding", name), one(whole, "RoleBinding", name)
        assert [each["subjects"] for each in bound] == [bound[1]["subjects"]] * 2
        assert [each["roleRef"] for each in bound] == [bound[1]["roleRef"]] * 2
        assert bound[0]["metadata"]["namespace"] == "course-intro-ml"
    rule = "NetworkPolicy", "gpu-pool-kernels"
    assert one(course, *rule)["spec"] == one(whole, *rule)["spec"]
