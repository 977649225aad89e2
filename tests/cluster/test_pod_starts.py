"""Pods that do not start for a while, over the fake of the API: what is told, and to whom."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_pool.cluster import pod_starts
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import EndReason, LeaseGone, LeaseState, PodPhase
from support.fake_kubernetes import FakeKubernetes, trouble
from support.kernel_pods import backend_of, cluster_pool, command, held, running, running_no_more, until_pod
from support.pools import eventually

HUB = "hub"
MOUNT = 'MountVolume.SetUp failed for volume "home": mount failed: exit status 32'


@pytest.fixture(autouse=True)
def _often(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look often, and from the beginning."""
    for name, seconds in {"_EVERY": 0.05, "_SOON": 0.0, "_FIRST_PAUSE": 0.0}.items():
        monkeypatch.setattr(pod_starts, name, seconds)


async def launched(pool: GpuPool) -> str:
    """Launch a kernel, and return its lease's id."""
    lease = await held(pool)
    await pool.launch(lease.id, command())
    return lease.id


def happen(fake: FakeKubernetes, pod: str, reason: str, message: str) -> None:
    """Let an event tell of a pod."""
    uid = fake.get("pods", pod)["metadata"]["uid"]
    about = {"kind": "Pod", "namespace": HUB, "name": pod, "uid": uid}
    name = f"{pod}.{reason}"
    event = {"type": "Warning", "reason": reason, "message": message, "involvedObject": about}
    fake.put("events", {"metadata": {"name": name, "namespace": HUB}, **event})


def creating(fake: FakeKubernetes, pod: str) -> None:
    waiting = {"state": {"waiting": {"reason": "ContainerCreating"}}}
    fake.change("pods", pod, phase="Pending", containerStatuses=[waiting])


async def test_what_events_say_is_told_to_the_student_in_words_and_to_the_log_as_it_is(
    pool: GpuPool, fake: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    lease = await launched(pool)
    pod = f"gpu-pool-{lease}-1"
    creating(fake, pod)
    happen(fake, pod, "FailedMount", MOUNT)
    told = await until_pod(pool, lease, lambda pod: "home folder" in pod.message)
    assert (told.phase, told.message) == (
        PodPhase.STARTING,
        "Your home folder cannot be connected at the moment; it is tried again. "
        "If this goes on, tell the administrator.",
    )
    assert f"The kernel of lease {lease} does not start yet: pod '{pod}'" in caplog.text
    assert f"FailedMount: {MOUNT}" in caplog.text.replace("\\", "")
    # The last one counts.
    happen(fake, pod, "FailedPrepareDynamicResources", "NodePrepareResources failed")
    await until_pod(pool, lease, lambda pod: "cannot prepare the GPU" in pod.message)
    fake.run(pod)
    assert (await running(pool, lease)).message == ""


async def test_while_nothing_starts_no_event_is_asked_for(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease = await launched(pool)
    fake.run(f"gpu-pool-{lease}-1")
    await running(pool, lease)
    looks: list[int] = []
    backend_of(pool).kernels.tell_starts = lambda *_: looks.append(fake.asked("LIST", "events"))  # type: ignore[method-assign]
    await eventually(lambda: len(looks) > 3)
    assert looks[-1] == looks[1]


async def test_without_the_right_to_read_events_kernels_start_all_the_same(
    pool: GpuPool, fake: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(kind: str) -> Any:
        return trouble(403, "Forbidden", "events is forbidden") if kind == "events" else None

    fake.before_read = refuse
    lease = await launched(pool)
    await eventually(lambda: fake.asked("LIST", "events") > 2)
    fake.run(f"gpu-pool-{lease}-1")
    await running(pool, lease)
    assert caplog.text.count("The reasons why pods do not start are known only in part: 403 Forbidden") == 1
    assert "examples/kubernetes/service/rbac.yaml" in caplog.text


async def test_what_does_not_start_in_the_time_that_is_set_ends_with_what_it_waited_for(
    fake: FakeKubernetes, tmp_path: Path
) -> None:
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    async with cluster_pool(tmp_path / "store.db", config, HUB, start_within=5) as pool:
        runs, lease = await launched(pool), await launched(pool)
        fake.run(f"gpu-pool-{runs}-1")
        waiting = {"reason": "ImagePullBackOff", "message": 'Back-off pulling image "x"'}
        fake.change(
            "pods",
            f"gpu-pool-{lease}-1",
            phase="Pending",
            containerStatuses=[{"state": {"waiting": waiting}}],
        )
        with pytest.raises(LeaseGone):
            await running_no_more(pool, lease)
        ended = await pool.get_lease(lease)
        assert (ended.end_reason, ended.notice) == (
            EndReason.NOT_READY,
            "It did not start within 5s. The course's software cannot be fetched. "
            "Tell the course's instructor.",
        )
        await eventually(lambda: f"gpu-pool-{lease}-1" not in fake.named("pods"))
        assert (await pool.pod(runs)).phase is PodPhase.RUNNING


def refuse(fake: FakeKubernetes, pod: str) -> None:
    """Refuse a pod as a kubelet does whose device plugin is being replaced."""
    message = "Allocate failed due to requested number of devices unavailable for nvidia.com/gpu"
    fake.change("pods", pod, phase="Failed", reason="UnexpectedAdmissionError", message=message)


async def test_a_pod_that_its_machine_refuses_for_the_moment_is_made_again(
    pool: GpuPool, fake: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    lease = await launched(pool)
    seen: list[str] = []
    for number in (1, 2):
        refuse(fake, f"gpu-pool-{lease}-{number}")
        following = f"gpu-pool-{lease}-{number + 1}"
        await eventually(lambda following=following: following in fake.named("pods"))  # type: ignore[arg-type, misc]
        seen.append((await pool.pod(lease)).phase)
    assert set(seen) == {PodPhase.STARTING}
    fake.run(f"gpu-pool-{lease}-3")
    await running(pool, lease)
    await eventually(
        lambda: [each for each in fake.named("pods") if "gpu-pool" in each] == [f"gpu-pool-{lease}-3"]
    )
    assert (await pool.get_lease(lease)).state is LeaseState.HELD
    assert "UnexpectedAdmissionError: Allocate failed" in caplog.text


async def test_what_its_machine_refuses_until_it_is_too_late_ends(
    fake: FakeKubernetes, tmp_path: Path
) -> None:
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    fake.webhook = lambda kind, made: made if kind != "pods" else made | {"status": _REFUSED}
    async with cluster_pool(tmp_path / "store.db", config, HUB, start_within=1) as pool:
        lease = await launched(pool)
        with pytest.raises(LeaseGone):
            await running_no_more(pool, lease)
        ended = await pool.get_lease(lease)
        assert ended.notice == (
            "It did not start within 1s. The machine cannot prepare the GPU. Tell the administrator."
        )
        await eventually(lambda: fake.named("pods") == ["jupyter-ada"])


_REFUSED = {"phase": "Failed", "reason": "OutOfnvidia.com/gpu", "message": "no room"}


async def test_a_kernel_that_is_ended_while_its_pod_is_made_again_leaves_none(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease = await launched(pool)

    def ended_meanwhile(kind: str, made: dict[str, Any]) -> dict[str, Any]:
        if kind == "pods":
            backend_of(pool).kernels.end(lease)
        return made

    fake.webhook = ended_meanwhile
    refuse(fake, f"gpu-pool-{lease}-1")
    await eventually(lambda: fake.asked("POST", "pods") == 2)
    await eventually(lambda: fake.named("pods") == ["jupyter-ada"])
    assert (await pool.get_lease(lease)).state is LeaseState.HELD
