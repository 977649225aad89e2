"""Pods that wait for their kernels: when they are made, for whom, who takes them, and when they end."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.cluster.prepared_pods import PreparedPod
from gpu_pool.courses import CourseFile, Courses, parse_course
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import Holder, KernelCommand, Lease, LeaseState, PodPhase, parse_request
from support.clusters import hami
from support.fake_kubernetes import FakeKubernetes, fake_kubernetes, trouble
from support.kernel_pods import backend_of, claim, cluster_pool, command, notebook, running
from support.pools import eventually, key
from support.whole_devices import assign, has_dra

HUB = "hub"


def course(more: str = "prepared_pods: 2", also: str = "") -> CourseFile:
    text = f"title: ML\nslices: [{{name: S, request: 2%}}]\n{also}kubernetes: {{{more}}}\npreload: [numpy]\n"
    return parse_course("ml.yaml", text.encode())


def server(user: str, name: str = "ml", **more: Any) -> dict[str, Any]:
    made = notebook(user, HUB, node="n1", **more)
    made["metadata"]["labels"] = {"jupyter-gpu-pool/course": name}
    return made


@pytest.fixture
async def fake() -> AsyncIterator[FakeKubernetes]:
    async with fake_kubernetes() as fake:
        has_dra(fake, "gpu-0")
        for user in ("ada", "bob"):
            fake.put("pods", server(user))
            fake.put("persistentvolumeclaims", claim(user, HUB))
        yield fake


@pytest.fixture
def courses() -> dict[str, CourseFile]:
    """Return the courses, which a test may change."""
    return {"ml": course()}


@pytest.fixture
async def pool(
    fake: FakeKubernetes, courses: dict[str, CourseFile], tmp_path: Path
) -> AsyncIterator[GpuPool]:
    async with opened(fake, courses, tmp_path) as pool:
        yield pool


def opened(fake: FakeKubernetes, courses: dict[str, CourseFile], folder: Path, **settings: Any) -> Any:
    config = fake.kubeconfig(folder / "kubeconfig")
    settings = {"dialect": "shared", "supervisor": {"launch.py": "pass"}, **settings}
    return cluster_pool(
        folder / "store.db", config, HUB, courses=Courses(courses), named={"ml": {}}, **settings
    )


def prepared(fake: FakeKubernetes, user: str = "") -> list[str]:
    """Return the names of the prepared pods that nobody has taken, of one user if one is named."""
    pods = [found for each, found in fake.objects.items() if each[2] == "pods"]
    return [
        pod["metadata"]["name"]
        for pod in pods
        if "jupyter-gpu-pool/prepared" in (labels := pod["metadata"].get("labels", {}))
        and "jupyter-gpu-pool/lease" not in labels
        and user in ("", labels["jupyter-gpu-pool/user"])
    ]


async def lease_of(pool: GpuPool, user: str, name: str | None = "ml", size: str = "2%") -> Lease:
    return await pool.acquire(parse_request(size), Holder(user, name), key(), timeout=60)


async def kernel_of_bob(pool: GpuPool, fake: FakeKubernetes) -> Lease:
    """Start bob's kernel, by which the device is the pool's."""
    lease = await lease_of(pool, "bob")
    await pool.launch(lease.id, command())
    assign(fake)
    fake.run(f"gpu-pool-{lease.id}-1")
    return lease


async def waiting(pool: GpuPool, fake: FakeKubernetes) -> str:
    """Let a pod be prepared for ada, and run; return its name."""
    await kernel_of_bob(pool, fake)
    return await runs(pool, fake)


async def runs(pool: GpuPool, fake: FakeKubernetes) -> str:
    """Let the pod run that is prepared for ada; return its name once the pool knows."""
    await eventually(lambda: prepared(fake, "ada"))
    (name,) = prepared(fake, "ada")
    await eventually(lambda: name in fake.named("secrets"))
    fake.run(name, address="10.0.0.9")
    known = backend_of(pool).view.prepared
    await eventually(lambda: any(PreparedPod.read(each).is_running for each in known.values()))
    return name


def beginner() -> KernelCommand:
    argv = ("python3", "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}")
    return command(*argv, environment={"MINE": "$(HOME)"}, folder="course", can_begin=True)


async def test_none_is_made_before_a_slice_of_its_device_is_held(pool: GpuPool, fake: FakeKubernetes) -> None:
    assert prepared(fake) == []
    (none,) = (await pool.status()).prepared
    assert none.why.startswith("No slice is held of the GPU")
    await kernel_of_bob(pool, fake)
    await runs(pool, fake)
    assert prepared(fake, "bob") == [], "who has a kernel needs none"

    async def is_told() -> bool:
        (found,) = (await pool.status()).prepared
        return (found.course, found.most, found.ready, found.why) == ("ml", 2, {"n1": 1}, "")

    await eventually(is_told)


async def test_it_is_a_kernels_pod_without_a_kernel_and_holds_no_slice(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    before = (await pool.status()).devices[0].free_milli
    lease = await kernel_of_bob(pool, fake)
    await eventually(lambda: prepared(fake, "ada"))
    (name,) = prepared(fake, "ada")
    await eventually(lambda: name in fake.named("secrets"))
    made, like = fake.get("pods", name), fake.get("pods", f"gpu-pool-{lease.id}-1")
    assert (await pool.status()).devices[0].free_milli == before - 20
    assert "jupyter-gpu-pool/slices" not in made["metadata"]["annotations"]
    assert made["metadata"]["ownerReferences"][0]["name"] == "jupyter-ada"
    same = ("securityContext", "tolerations", "resourceClaims", "affinity", "shareProcessNamespace")
    for name_of in same:
        assert made["spec"][name_of] == like["spec"][name_of], name_of
    (mine,), (other,) = made["spec"]["containers"], like["spec"]["containers"]
    for name_of in ("image", "resources", "securityContext"):
        assert mine[name_of] == other[name_of], name_of
    volumes = {each["name"]: each for each in made["spec"]["volumes"]}
    assert volumes["home"]["persistentVolumeClaim"] == {"claimName": "claim-ada"}
    assert "--preload=numpy" in mine["command"][2]
    (secret,) = (found for each, found in fake.objects.items() if each[2:] == ("secrets", name))
    told = json.loads(base64.b64decode(secret["data"]["connection.json"]))
    assert told.keys() == {"key"}
    assert len(told["key"]) == 64


async def test_the_first_kernel_of_its_server_begins_in_it(pool: GpuPool, fake: FakeKubernetes) -> None:
    name = await waiting(pool, fake)
    lease = await lease_of(pool, "ada")
    kernel = beginner()
    begun = await pool.launch(lease.id, kernel)
    assert (begun.phase, begun.address) == (PodPhase.RUNNING, "10.0.0.9")
    assert begun.beginning is not None
    secret = fake.get("secrets", name)
    assert json.loads(base64.b64decode(secret["data"]["connection.json"])) == {"key": begun.beginning.key}
    told = json.loads(begun.beginning.content)
    assert told["connection"]["key"] == kernel.connection["key"]
    assert told["argv"][-1] == "/run/gpu-pool/connection.json"
    assert told["folder"] == "/home/jovyan/course"
    assert told["environment"]["MINE"] == "$(HOME)", "as it is: no kubelet expands it"
    assert told["environment"]["GPU_POOL_LEASE"] == lease.id
    labels = fake.get("pods", name)["metadata"]["labels"]
    assert labels["jupyter-gpu-pool/lease"] == lease.id
    part = lease.slices[0]
    slices = fake.get("pods", name)["metadata"]["annotations"]["jupyter-gpu-pool/slices"]
    assert slices == f"GPU-gpu-0={part.milli}/{part.memory_mib}"
    assert fake.named("pods").count(f"gpu-pool-{lease.id}-1") == 0
    assert begun.beginning.key not in repr(begun)
    again = await pool.launch(lease.id, kernel)
    assert again.beginning == begun.beginning, "the same launch is carried out once"
    followed = await pool.pod(lease.id)
    assert (followed.address, followed.beginning) == ("10.0.0.9", None)


async def test_where_nothing_is_preloaded_a_slice_of_any_size_will_do(
    fake: FakeKubernetes, tmp_path: Path
) -> None:
    text = b"title: ML\nslices: [{name: S, request: 2%}]\nkubernetes: {prepared_pods: 2}\n"
    async with opened(fake, {"ml": parse_course("ml.yaml", text)}, tmp_path) as pool:
        await waiting(pool, fake)
        lease = await lease_of(pool, "ada", size="5%")
        begun = await pool.launch(lease.id, beginner())
        assert begun.beginning is not None
        found = json.loads(begun.beginning.content)["environment"]
        assert 0.03 < float(found["XLA_PYTHON_CLIENT_MEM_FRACTION"]) < 0.05


async def test_what_is_preloaded_is_limited_as_the_kernel_is(pool: GpuPool, fake: FakeKubernetes) -> None:
    name = await waiting(pool, fake)
    lease = await lease_of(pool, "ada")
    begun = await pool.launch(lease.id, beginner())
    assert begun.beginning is not None
    found = json.loads(begun.beginning.content)["environment"]
    waited = {each["name"]: each["value"] for each in fake.get("pods", name)["spec"]["containers"][0]["env"]}
    for each in ("XLA_PYTHON_CLIENT_MEM_FRACTION", "CUPY_GPU_MEMORY_LIMIT", "GPU_POOL_TORCH_FRACTION"):
        assert waited[each] == found[each]


async def test_its_end_is_the_leases_and_the_leases_its(pool: GpuPool, fake: FakeKubernetes) -> None:
    name = await waiting(pool, fake)
    lease = await lease_of(pool, "ada")
    await pool.launch(lease.id, beginner())
    await pool.release(lease.id)
    await eventually(lambda: name not in fake.named("pods"))
    other = await runs(pool, fake)
    second = await lease_of(pool, "ada")
    await pool.launch(second.id, beginner())
    fake.change("pods", other, phase="Failed", reason="Evicted", message="The node was low on memory.")
    await until_ended(pool, second.id)


async def until_ended(pool: GpuPool, lease_id: str) -> None:
    await eventually(lambda: pool.get_lease(lease_id), lambda lease: lease.state is LeaseState.ENDED)


@pytest.mark.parametrize(
    ("user", "name", "size", "can_begin"),
    [
        ("bob", "ml", "2%", True),
        ("ada", None, "2%", True),
        ("ada", "ml", "2%", False),
        # The limits of frameworks that were imported with those of 2%.
        ("ada", "ml", "5%", True),
    ],
)
async def test_nobody_else_gets_it(
    pool: GpuPool, fake: FakeKubernetes, user: str, name: str | None, size: str, can_begin: bool
) -> None:
    pod = await waiting(pool, fake)
    lease = await lease_of(pool, user, name, size)
    found = await pool.launch(lease.id, replace(beginner(), can_begin=can_begin))
    assert found.beginning is None
    assert f"gpu-pool-{lease.id}-1" in fake.named("pods")
    assert "jupyter-gpu-pool/lease" not in fake.get("pods", pod)["metadata"]["labels"]


async def test_a_second_kernel_of_the_lease_does_not_get_another(pool: GpuPool, fake: FakeKubernetes) -> None:
    name = await waiting(pool, fake)
    lease = await lease_of(pool, "ada")
    await pool.launch(lease.id, beginner())
    found = await pool.launch(lease.id, beginner())
    assert found.beginning is None
    await eventually(lambda: name not in fake.named("pods"))


@pytest.mark.parametrize("change", ["volume", "image", "gone"])
async def test_it_ends_when_its_server_is_another(pool: GpuPool, fake: FakeKubernetes, change: str) -> None:
    name = await waiting(pool, fake)
    if change == "gone":
        fake.remove("pods", "jupyter-ada")
    elif change == "image":
        fake.put("pods", server("ada", image="example.org/notebook:2"))
    else:
        fake.put("pods", server("ada", claim="claim-of-another"))
    lease = await lease_of(pool, "bob")  # something happens
    await eventually(lambda: name not in fake.named("pods"))
    await pool.release(lease.id)


async def test_it_ends_when_its_course_says_otherwise(
    pool: GpuPool, fake: FakeKubernetes, courses: dict[str, CourseFile]
) -> None:
    name = await waiting(pool, fake)
    courses["ml"] = course("home: none")
    lease = await lease_of(pool, "bob")
    await eventually(lambda: name not in fake.named("pods"))
    await pool.release(lease.id)
    assert prepared(fake) == []


async def test_it_ends_with_the_last_slice_of_its_device(pool: GpuPool, fake: FakeKubernetes) -> None:
    name = await waiting(pool, fake)
    for lease in (await pool.status()).leases:
        await pool.release(lease.id)
    await eventually(lambda: name not in fake.named("pods"))


async def test_it_ends_when_its_node_is_drained(pool: GpuPool, fake: FakeKubernetes) -> None:
    name = await waiting(pool, fake)
    node = fake.get("nodes", "n1")
    fake.put("nodes", {**node, "spec": {**node.get("spec", {}), "unschedulable": True}})
    await eventually(lambda: name not in fake.named("pods"))


async def another_is_made(fake: FakeKubernetes, name: str = "ml") -> None:
    """Return once a pod is prepared for the new server of eve, which comes after ada's."""
    fake.put("persistentvolumeclaims", claim("eve", HUB))
    fake.put("pods", server("eve", name))
    await eventually(lambda: prepared(fake, "eve"))


async def test_one_that_cannot_wait_is_not_made_again(
    pool: GpuPool, fake: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    name = await waiting(pool, fake)
    fake.change("pods", name, phase="Failed", containerStatuses=[{"state": {"terminated": {"exitCode": 3}}}])
    await eventually(lambda: name not in fake.named("pods"))
    await another_is_made(fake)
    assert prepared(fake, "ada") == []
    mine = await lease_of(pool, "ada")
    await pool.launch(mine.id, beginner())
    await pool.release(mine.id)
    await eventually(lambda: prepared(fake, "ada"))


async def test_an_earlier_services_pods_end_and_what_they_run_goes_on(
    fake: FakeKubernetes, courses: dict[str, CourseFile], tmp_path: Path
) -> None:
    fake.put("pods", server("eve"))
    fake.put("persistentvolumeclaims", claim("eve", HUB))
    async with opened(fake, courses, tmp_path) as first:
        name = await waiting(first, fake)
        lease = await lease_of(first, "ada")
        kernel = beginner()
        await first.launch(lease.id, kernel)
        await eventually(lambda: prepared(fake, "eve"))
        (left,) = prepared(fake, "eve")
    async with opened(fake, courses, tmp_path) as second:
        await eventually(lambda: left not in fake.named("pods"))
        assert (await second.pod(lease.id)).phase is PodPhase.RUNNING
        # Who has not got the answer asks again: nobody knows the key any more.
        again = await second.launch(lease.id, kernel)
        assert again.beginning is None
        await eventually(lambda: name not in fake.named("pods"))
        assert (await second.get_lease(lease.id)).state is LeaseState.HELD


async def test_without_the_right_a_kernel_starts_in_a_pod_of_its_own(
    pool: GpuPool, fake: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    name = await waiting(pool, fake)
    words = 'pods is forbidden: User "gpu-pool" cannot patch resource "pods"'
    fake.before_write = lambda method, _: trouble(403, "Forbidden", words) if method == "PATCH" else None
    lease = await lease_of(pool, "ada")
    assert (await pool.launch(lease.id, beginner())).beginning is None
    assert f"gpu-pool-{lease.id}-1" in fake.named("pods")
    assert "examples/kubernetes/service/shared" in caplog.text
    await eventually(lambda: name not in fake.named("pods"))


async def test_one_that_goes_as_it_is_taken_is_none(pool: GpuPool, fake: FakeKubernetes) -> None:
    name = await waiting(pool, fake)
    lease = await lease_of(pool, "ada")

    def gone(method: str, _: str) -> Any:
        if method == "PATCH":
            fake.remove("pods", name)

    fake.before_write = gone
    assert (await pool.launch(lease.id, beginner())).beginning is None
    assert f"gpu-pool-{lease.id}-1" in fake.named("pods")


async def test_a_kernel_that_finds_no_room_has_that_of_prepared_pods(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    name = await waiting(pool, fake)
    lease = await lease_of(pool, "bob")
    await pool.launch(lease.id, command())
    condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
    fake.change("pods", f"gpu-pool-{lease.id}-1", phase="Pending", conditions=[condition])
    await eventually(lambda: name not in fake.named("pods"))
    fake.run(f"gpu-pool-{lease.id}-1")
    fake.change("pods", f"gpu-pool-{lease.id}-1", conditions=[])
    await running(pool, lease.id)
    await another_is_made(fake)
    assert prepared(fake, "ada") == [], "it would be in the way again"


@pytest.mark.parametrize("also", ["weeks: {from: 2001-01-01, to: 2001-01-02}\ntime_zone: UTC\n"])
async def test_none_is_made_while_a_course_is_closed(fake: FakeKubernetes, tmp_path: Path, also: str) -> None:
    async with opened(fake, {"ml": course(also=also), "open": course()}, tmp_path) as pool:
        await kernel_of_bob(pool, fake)
        await another_is_made(fake, "open")
        assert prepared(fake, "ada") == []


async def test_the_cluster_may_be_away(pool: GpuPool, fake: FakeKubernetes) -> None:
    name = await waiting(pool, fake)
    lease = await lease_of(pool, "ada")
    kernel, away = beginner(), [True]

    def answer(method: str, _: str) -> Any:
        return trouble(503, "ServiceUnavailable", "later") if method == "PATCH" and away[0] else None

    fake.before_write = answer
    launching = asyncio.create_task(pool.launch(lease.id, kernel))
    await eventually(lambda: fake.asked("PATCH", "pods") > 1)
    away[0] = False
    begun = await launching
    assert begun.beginning is not None
    assert fake.get("pods", name)["metadata"]["labels"]["jupyter-gpu-pool/lease"] == lease.id


async def test_where_the_gpu_comes_with_its_pod_none_is_made_and_that_is_told(
    fake: FakeKubernetes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    fake.put("nodes", hami("n1"))
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    courses = Courses({"ml": course()})
    async with cluster_pool(tmp_path / "store.db", config, HUB, courses=courses, dialect="hami"):
        assert "Course 'ml' has prepared_pods, and gets none: here a GPU comes with its pod" in caplog.text
        assert prepared(fake) == []
