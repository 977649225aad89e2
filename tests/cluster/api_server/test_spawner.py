"""The ways of a student and a researcher through a real JupyterHub to a pod, and the ways around it."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from support.clusters import hami, listed, node, plain, resource_slice
from support.control_plane import Cluster
from support.hub_with_proxy import Visitor, error_on
from support.jupyter_env import eventually
from support.kube_hub import KubeHub, running_kube_hub

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900), pytest.mark.long]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def hub(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KubeHub]:
    """Run a Hub over a HAMi card of 32 GiB, and a node without GPUs."""
    card = hami("hami-1", gpus=1, count=50)
    card["status"]["allocatable"] |= {"nvidia.com/gpumem": "32768", "nvidia.com/gpucores": "100"}
    await asyncio.to_thread(cluster.add, card, node("cpu-1", taints=[]))
    config = """
c.GPUPoolKubeSpawner.place_within = 20
homed = {
    "storage_pvc_ensure": True,
    "storage_capacity": "1Gi",
    "volumes": [{"name": "home", "hostPath": {"path": "/tmp"}}],
    "volume_mounts": [{"name": "home", "mountPath": "/mnt/home"}],
}
c.Spawner.group_overrides = {"homed": {"groups": ["homed"], "spawner_override": homed}}
"""
    async with running_kube_hub(cluster, tmp_path_factory.mktemp("hub"), config) as hub:
        yield hub


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def research_hub(cluster: Cluster, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[KubeHub]:
    """Run a Hub over a node with two whole GPUs, with a namespace for each course."""
    await asyncio.to_thread(cluster.add, plain("whole-1", gpus=2))
    config = """
c.GPUPoolKubeSpawner.dialect = "device-plugin"
claims = {"groups": ["claims"], "spawner_override": {"dialect": "dra"}}
c.Spawner.group_overrides = {"claims": claims}
c.GPUPoolKubeSpawner.course_namespace = "NAMESPACE-{course}"
c.GPUPoolKubeSpawner.kueue = True
"""
    async with running_kube_hub(cluster, tmp_path_factory.mktemp("research"), config) as hub:
        await asyncio.to_thread(hub.add_namespace, f"{hub.namespace}-research")
        yield hub


async def logged_in(hub: KubeHub, name: str) -> Visitor:
    visitor = Visitor(hub.url, name)
    await visitor.log_in()
    return visitor


def notebook(pod: dict[str, Any]) -> dict[str, Any]:
    (container,) = pod["spec"]["containers"]
    return dict(container)


def variables(pod: dict[str, Any]) -> dict[str, str]:
    return {each["name"]: each.get("value", "") for each in notebook(pod)["env"]}


async def end(hub: KubeHub, user: str) -> None:
    await hub.api("DELETE", f"users/{user}/server")
    await eventually(
        lambda: hub.api("GET", f"users/{user}"), lambda seen: not json.loads(seen.body)["servers"]
    )


async def test_a_student_gets_a_server_with_two_percent(cluster: Cluster, hub: KubeHub) -> None:
    ada = await logged_in(hub, "ada")
    page = await ada.spawn_page()
    assert "50 free now" in page
    assert "Research" not in page
    assert "Next century" not in page

    answer = await ada.choose(course="intro/Small")
    assert answer.code == 302, error_on(answer)
    await eventually(lambda: hub.is_ready("ada"))
    pod = await asyncio.to_thread(hub.pod_of, "ada")
    limits = notebook(pod)["resources"]["limits"]
    assert {key: limits[key] for key in limits if "nvidia" in key} == {
        "nvidia.com/gpu": "1",
        "nvidia.com/gpucores": "2",
        "nvidia.com/gpumem": "655",
    }
    assert (limits["cpu"], limits["memory"]) == ("1", str(2**30))
    assert pod["spec"]["schedulerName"] == "hami-scheduler"
    assert pod["spec"]["activeDeadlineSeconds"] == 7200
    assert pod["spec"]["enableServiceLinks"] is False
    assert pod["metadata"]["labels"]["jupyter-gpu-pool/course"] == "intro"
    assert variables(pod)["GPU_POOL_COURSE"] == "intro"
    assert (await hub.api("GET", "/user/ada/api/status")).code == 200
    await end(hub, "ada")


async def test_a_server_that_pod_security_refuses_says_so_and_the_log_what_to_set(
    cluster: Cluster, hub: KubeHub
) -> None:
    label = "pod-security.kubernetes.io/enforce"
    await asyncio.to_thread(cluster.kubectl, "label", "namespace", hub.namespace, f"{label}=restricted")
    try:
        ada = await logged_in(hub, "ada")
        answer = await ada.choose(course="intro/Small")
    finally:
        await asyncio.to_thread(cluster.kubectl, "label", "namespace", hub.namespace, f"{label}-")
    assert error_on(answer).startswith("The security rules of the cluster do not allow servers as this")
    log = (hub.folder / "log").read_text()
    assert f"Pod Security of the namespace {hub.namespace} (restricted) refuses servers" in log
    for advice in ("capabilities: {drop: [ALL]}", "seccompProfile: {type: RuntimeDefault}"):
        assert advice in log


async def test_a_researcher_takes_two_whole_gpus(cluster: Cluster, research_hub: KubeHub) -> None:
    edsger = await logged_in(research_hub, "edsger")
    page = await edsger.spawn_page()
    assert "no node has more than 2" in page  # three were never possible
    answer = await edsger.choose(course="research/Two GPUs")
    assert answer.code == 302, error_on(answer)
    await eventually(lambda: research_hub.is_ready("edsger"))
    pod = await asyncio.to_thread(research_hub.pod_of, "edsger", f"{research_hub.namespace}-research")
    assert notebook(pod)["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert pod["spec"]["activeDeadlineSeconds"] == 10800
    assert pod["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "gpu-pool-research"

    barbara = await logged_in(research_hub, "barbara")
    refused = await barbara.choose(course="research/One GPU")
    words = "Not enough is free for a whole GPU now; more is free in at most 3h"
    assert error_on(refused).startswith(words)
    assert "none free now; more is free in at most 3h" in await barbara.spawn_page()
    await end(research_hub, "edsger")
    answer = await barbara.choose(course="research/One GPU")
    assert answer.code == 302, error_on(answer)
    await eventually(lambda: research_hub.is_ready("barbara"))
    await end(research_hub, "barbara")


async def test_a_researcher_claims_a_gpu_where_they_are_claimed(
    cluster: Cluster, research_hub: KubeHub
) -> None:
    if cluster.agent is None:
        pytest.skip("what a driver of real nodes shows is not ours to write")
    driver = {"cel": {"expression": "device.driver == 'gpu.nvidia.com'"}}
    kind = {"metadata": {"name": "gpu.nvidia.com"}, "spec": {"selectors": [driver]}}
    found = [
        {"apiVersion": "resource.k8s.io/v1", "kind": "DeviceClass", **kind},
        {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceSlice",
            **resource_slice(listed("gpu-0"), listed("gpu-1"), name="whole-1"),
        },
    ]
    listing = json.dumps({"apiVersion": "v1", "kind": "List", "items": found})
    await asyncio.to_thread(cluster.kubectl, "apply", "-f", "-", stdin=listing)
    try:
        await research_hub.api("POST", "users/hedy")
        await start(research_hub, "hedy", {"course": "research", "slice": "Two GPUs"})
        pod = await asyncio.to_thread(research_hub.pod_of, "hedy", f"{research_hub.namespace}-research")
        assert notebook(pod)["resources"]["claims"]
        (claim,) = (
            await asyncio.to_thread(cluster.get, "resourceclaims", "-n", f"{research_hub.namespace}-research")
        )["items"]
        assert len(claim["status"]["allocation"]["devices"]["results"]) == 2
        await end(research_hub, "hedy")
    finally:
        await asyncio.to_thread(cluster.kubectl, "delete", "-f", "-", stdin=listing)


@pytest.mark.parametrize(
    ("user", "options", "words"),
    [
        ("alan", {"course": "later"}, "It opens on Mon 2101-01-03 at 10:00 (UTC)."),
        ("alan", {"course": "research"}, "You are not in this course."),
        ("alan", {"course": "nothing"}, "No course file describes the course"),
        ("alan", {"course": "intro", "slice": "Huge"}, "Huge"),
        ("alan", {"course": "intro", "slice": "100%"}, "Introduction offers 2% (Small), 90% (Large)"),
        ("alan", {"course": "intro", "slice": ["Small"]}, "is not text"),
        ("alan", {"course": "pods", "slice": "Small"}, "each of its kernels gets one"),
        ("alan", {"course": "intro", "profile": "any"}, "no option 'profile'"),
        (
            "alan",
            {"course": "intro", "extra_labels": {"hami.io/webhook": "ignore"}},
            "no option 'extra_labels'",
        ),
        (
            "alan",
            {"course": "intro", "environment": {"CUDA_DISABLE_CONTROL": "true"}},
            "no option 'environment'",
        ),
    ],
)
async def test_whoever_passes_the_form_by_meets_the_same_rules(
    cluster: Cluster, hub: KubeHub, user: str, options: object, words: str
) -> None:
    await hub.api("POST", f"users/{user}")
    answer = await hub.api("POST", f"users/{user}/server", options)
    assert answer.code in (400, 403), answer.body
    assert words in json.loads(answer.body)["message"]


async def test_nothing_of_one_course_is_left_in_the_next(cluster: Cluster, hub: KubeHub) -> None:
    await hub.api("POST", "users/grace")
    await start(hub, "grace", {"course": "intro"})
    await end(hub, "grace")
    await start(hub, "grace", {"course": "pods"})
    pod = await asyncio.to_thread(hub.pod_of, "grace")
    resources = notebook(pod).get("resources", {})
    assert not resources.get("limits")
    assert "activeDeadlineSeconds" not in pod["spec"]
    assert pod["spec"]["schedulerName"] == "default-scheduler"
    told = variables(pod)
    assert told["NVIDIA_VISIBLE_DEVICES"] == "void"
    assert (told["GPU_POOL_COURSE"], json.loads(told["GPU_POOL_KERNELS"])) == ("pods", ["2%"])
    assert told["GPU_POOL_URL"].startswith("embedded:")
    # In pods kernels start cold: the server prepares nothing.
    assert json.loads(told["GPU_POOL_PRELOAD"]) == {"modules": ["numpy"]}
    await end(hub, "grace")


async def test_a_course_without_volume_claims_mounts_none_and_makes_no_claim(
    cluster: Cluster, hub: KubeHub
) -> None:
    karen = await logged_in(hub, "karen")
    assert "your work is lost when the server ends" in await karen.spawn_page()

    async def volume(course: str) -> dict[str, Any]:
        await start(hub, "karen", {"course": course})
        pod = await asyncio.to_thread(hub.pod_of, "karen")
        await end(hub, "karen")
        return dict(next(each for each in pod["spec"]["volumes"] if each["name"] == "home"))

    async def claims() -> int:
        found = await asyncio.to_thread(cluster.get, "persistentvolumeclaims", "-n", hub.namespace)
        return len(found["items"])

    assert "emptyDir" in await volume("brief")
    assert not await claims()
    assert "hostPath" in await volume("pods")
    assert await claims()
    assert "emptyDir" in await volume("brief")


async def start(hub: KubeHub, user: str, options: object) -> None:
    answer = await hub.api("POST", f"users/{user}/server", options)
    assert answer.code in (201, 202), answer.body
    await eventually(lambda: hub.is_ready(user))


async def test_the_page_says_what_a_server_waits_for(cluster: Cluster, hub: KubeHub) -> None:
    if cluster.agent is None:
        pytest.skip("images come and go by the test's own nodes only")
    cluster.agent.images["example.org/large:1"] = "missing"
    words = await told(hub, "ada", {"course": "fetched"})
    assert "A machine for your server was found." in words
    assert "The course's software is being fetched. The first time this takes some minutes." in words
    assert "The course's software cannot be fetched." in words[-1]
    assert not any("example.org" in each for each in words)


async def test_a_server_that_finds_no_machine_is_given_up_in_words(cluster: Cluster, hub: KubeHub) -> None:
    words = await told(hub, "grace", {"course": "huge"})
    # The node with the card has too few cores, the other one no card.
    nothing = "No machine has a GPU slice, CPU and memory free together at the moment"
    assert any(nothing in each for each in words[:-1])
    assert nothing in words[-1]
    assert "Nothing was started." in words[-1]


async def test_a_server_whose_last_pod_does_not_go_is_given_up_in_words(
    cluster: Cluster, hub: KubeHub
) -> None:
    await hub.api("POST", "users/grace")
    await start(hub, "grace", {"course": "pods"})
    pod = await asyncio.to_thread(hub.pod_of, "grace")
    await end(hub, "grace")
    # As one on a node that does not answer any more.
    metadata = {key: pod["metadata"][key] for key in ("name", "namespace", "labels")}
    metadata["finalizers"] = ["example.org/kept"]
    spec = {"nodeName": "gone", "containers": [{"name": "notebook", "image": "example.org/last:1"}]}
    stuck = json.dumps({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})
    await asyncio.to_thread(cluster.kubectl, "create", "-f", "-", stdin=stuck)
    which = ("pod", metadata["name"], "-n", hub.namespace)
    await asyncio.to_thread(cluster.kubectl, "delete", *which, "--wait=false")
    try:
        words = await told(hub, "grace", {"course": "fetched"})
    finally:
        keep_none = json.dumps({"metadata": {"finalizers": None}})
        await asyncio.to_thread(cluster.kubectl, "patch", *which, "-p", keep_none)
    assert "A server of yours is still being ended." in words[-1]
    assert "Nothing was started." in words[-1]


async def told(hub: KubeHub, user: str, options: object) -> list[str]:
    """Return what the spawn page says of a start that fails in the end."""
    await hub.api("POST", f"users/{user}")
    answer = await hub.api("POST", f"users/{user}/server", options)
    # 202 while it starts; for a user whose last start has failed a Hub answers 201 all the same.
    assert answer.code in (201, 202), answer.body
    lines = (await hub.api("GET", f"users/{user}/server/progress")).body.decode().splitlines()
    events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: ")]
    assert events[-1]["failed"]
    return [each["message"] for each in events]


async def test_a_quota_of_the_cluster_is_told_in_words(cluster: Cluster, hub: KubeHub) -> None:
    namespace = hub.namespace
    quota = ["create", "quota", "small", "--hard=requests.nvidia.com/gpumem=700", "-n", namespace]
    await asyncio.to_thread(cluster.kubectl, *quota)

    def counted() -> bool:
        return "hard" in cluster.get("quota", "small", "-n", namespace).get("status", {})

    await eventually(lambda: asyncio.to_thread(counted))
    await hub.api("POST", "users/alan")
    answer = await hub.api("POST", "users/alan/server", {"course": "intro", "slice": "Large"})
    await asyncio.to_thread(cluster.kubectl, "delete", "quota", "small", "-n", namespace)
    assert answer.code == 403, answer.body
    assert "The quota that the cluster sets for your course is used up." in json.loads(answer.body)["message"]
