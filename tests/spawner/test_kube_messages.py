"""What a student reads while a pod starts. No cluster."""

from __future__ import annotations

import pytest

from gpu_pool.cluster.dialects.pod_troubles import NO_CONTAINER, NO_FILES, NO_GPU, NOT_FETCHED
from gpu_pool_spawner import kube_messages as words

VIOLATES = (
    'pods "jupyter-ada" is forbidden: violates PodSecurity "restricted:latest": allowPrivilegeEscalation != '
    'false (container "notebook" must set securityContext.allowPrivilegeEscalation=false), runAsNonRoot != '
    'true (pod or container "notebook" must set securityContext.runAsNonRoot=true)'
)
HOST = 'violates PodSecurity "baseline:v1.36": hostPath volumes (volume "data")'


@pytest.mark.parametrize(
    ("reason", "message", "said"),
    [
        ("FailedScheduling", "0/3 nodes are available: 3 Insufficient nvidia.com/gpumem.", words.NO_SLICE),
        (
            "FailedScheduling",
            "0/1 nodes are available: 1 Insufficient cpu, 1 Insufficient nvidia.com/gpu.",
            words.NO_PLACE,
        ),
        (
            "FailedScheduling",
            "0/2 nodes are available: 1 Insufficient memory, 1 node(s) had taint {nvidia.com/gpu: }.",
            words.NO_MACHINE,
        ),
        ("FailedScheduling", "0/1 nodes: pod has unbound immediate PersistentVolumeClaims.", words.HOME),
        ("FailedScheduling", "0/1 nodes are available: 1 node(s) were unschedulable.", words.NOT_READY),
        ("FailedScheduling", "Scheduling is blocked due to non-empty scheduling gates", words.NOT_YET),
        ("FailedScheduling", "0/1 nodes: 1 cannot allocate all claims: resourceclaim", words.NO_SLICE),
        ("FilteringFailed", "no available node, 1 nodes do not meet: CardInsufficientMemory", words.NO_SLICE),
        ("Pulling", 'Pulling image "secret.example.org/x"', words.FETCHING),
        ("Failed", 'Failed to pull image "x": not found', NOT_FETCHED.waiting),
        ("BackOff", 'Back-off pulling image "x"', NOT_FETCHED.waiting),
        (
            "BackOff",
            "Back-off restarting failed container",
            "Your server could not start; it is tried again.",
        ),
        ("FailedMount", 'MountVolume.SetUp failed for volume "home"', NO_FILES.waiting),
        ("FailedPrepareDynamicResources", "Failed to prepare dynamic resources", NO_GPU.waiting),
        ("FailedCreatePodSandBox", "Failed to create pod sandbox: no network", NO_CONTAINER.waiting),
        ("Started", "Started container notebook", words.STARTING),
        ("SomethingNew", "that nobody knows", None),
    ],
)
def test_an_event_is_told_as_what_it_means(reason: str, message: str, said: str | None) -> None:
    assert words.of_event(reason, message) == said


def test_a_pod_says_what_it_waits_for() -> None:
    unscheduled = {"type": "PodScheduled", "status": "False", "message": "1 Insufficient nvidia.com/gpu"}
    assert words.of_pod({"status": {"conditions": [unscheduled]}}) == words.NO_SLICE
    pulling = {"state": {"waiting": {"reason": "ImagePullBackOff"}}}
    assert words.of_pod({"status": {"containerStatuses": [pulling]}}) == NOT_FETCHED.final
    looping = {"state": {"waiting": {"reason": "CrashLoopBackOff"}}}
    assert "as soon as it has started" in words.of_pod({"status": {"containerStatuses": [looping]}})
    nothing: list[dict[str, object] | None] = [None, {}, {"status": None}, {"status": {"conditions": None}}]
    assert [words.of_pod(each) for each in nothing] == [""] * 4


@pytest.mark.parametrize(
    ("message", "said"),
    [
        ('pods "x" is forbidden: exceeded quota: gpus, requested: limits.nvidia.com/gpumem=655', "quota"),
        ('admission webhook "vgpu.hami.io" denied the request: exceeding resource quota', "quota"),
        ('admission webhook "vgpu.hami.io" denied the request: no', "refused the server with this slice"),
        (VIOLATES, "security rules of the cluster"),
        ("etcdserver: request timed out", "could not take the server (status 403)"),
    ],
)
def test_a_refusal_of_the_cluster_is_told_in_words(message: str, said: str) -> None:
    told, remedy = words.of_refusal(403, message)
    assert said in told
    assert remedy


def test_an_administrator_is_told_what_keeps_the_rules_of_pod_security() -> None:
    assert words.of_violation(VIOLATES, "jupyterhub") == (
        "Pod Security of the namespace jupyterhub (restricted) refuses servers: allowPrivilegeEscalation != "
        'false (container "notebook" must set securityContext.allowPrivilegeEscalation=false), runAsNonRoot '
        '!= true (pod or container "notebook" must set securityContext.runAsNonRoot=true). '
        "Under KubeSpawner set container_security_context: {allowPrivilegeEscalation: false}, "
        "pod_security_context: {runAsNonRoot: true}, as in "
        "examples/kubernetes/values.yaml; containers that you add yourself need the same."
    )
    assert "Change what KubeSpawner adds" in words.of_violation(HOST, "jupyterhub")
    assert words.of_violation("exceeded quota", "jupyterhub") == ""
