"""A cluster as a pool, over a small served fake of the API: what is seen, counted, started and mended."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpu_pool.audit.callers import Caller
from gpu_pool.cluster import pod_builder
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import (
    BadRequest,
    EndReason,
    Holder,
    LeaseGone,
    LeaseState,
    NeverFits,
    NotAllowed,
    PodPhase,
    PoolUnreachable,
    Process,
    parse_request,
)
from support.clusters import hami
from support.fake_kubernetes import FakeKubernetes, trouble
from support.kernel_pods import (
    backend_of,
    claim,
    cluster_pool,
    command,
    foreign,
    free,
    held,
    notebook,
    running_no_more,
    start,
    until_free,
)
from support.pools import eventually, take

pytestmark = pytest.mark.usefixtures("second_node")
HUB = "hub"


# -- GPUs ------------------------------------------------------------------


async def test_the_devices_are_those_of_the_nodes_and_leases_say_what_holds_them(pool: GpuPool) -> None:
    devices = [each.device for each in (await pool.status()).devices]
    assert [(each.node, each.uuid, each.memory_mib) for each in devices] == [
        ("n1", "GPU-n1-0", 32768),
        ("n2", "GPU-n2-0", 32768),
    ]
    lease = await held(pool)
    assert lease.terms.in_pod
    assert lease.terms.revocable
    assert "HAMi's hook" in lease.enforcement.memory.by
    waiting = [await take(pool, "1", f"key-{number}") for number in range(3)]
    assert (await pool.get_lease(waiting[-1])).terms.in_pod


async def test_what_others_have_is_not_granted(pool: GpuPool, fake: FakeKubernetes) -> None:
    fake.put("pods", foreign("server", "n1"))
    await until_free(pool, 0, 1000)
    lease = await held(pool, "60%")
    assert lease.slices[0].device.node == "n2"
    waiting = await take(pool, "60%", "another")
    assert (await pool.get_lease(waiting)).state is LeaseState.WAITING
    fake.remove("pods", "server")
    assert (await pool.wait(waiting, 30)).slices[0].device.node == "n1"


async def test_a_pod_that_waits_or_has_finished_holds_nothing(pool: GpuPool, fake: FakeKubernetes) -> None:
    fake.put("pods", foreign("runs", "n1", milli=500))
    await until_free(pool, 500, 1000)
    fake.put("pods", foreign("waits", ""))
    fake.change("pods", "runs", phase="Succeeded")
    await until_free(pool, 1000, 1000)


async def test_the_pods_of_leases_are_counted_once(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease = await start(pool, fake)
    fake.put("nodes", hami("n3"))
    await until_free(pool, 980, 1000, 1000)
    await pool.release(lease)
    await until_free(pool, 1000, 1000, 1000)


async def test_a_cordoned_node_grants_nothing_more_and_keeps_what_it_has(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease = await held(pool)
    fake.put("nodes", _cordoned("n1"))
    await until_drained(pool, "n1", drained=True)
    assert (await held(pool)).slices[0].device.node == "n2"
    assert (await pool.get_lease(lease.id)).state is LeaseState.HELD
    fake.put("nodes", hami("n1"))
    await until_drained(pool, "n1", drained=False)


async def test_a_node_that_does_not_answer_for_a_moment_ends_nothing(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease = await start(pool, fake)
    fake.change("nodes", "n1", conditions=[{"type": "Ready", "status": "Unknown"}])
    await until_drained(pool, "n1", drained=True)
    pod = await pool.pod(lease)
    assert pod.phase is PodPhase.RUNNING
    assert pod.message == (
        "Its machine does not answer at the moment. If that continues, the kernel is given up."
    )
    fake.change("nodes", "n1", conditions=[{"type": "Ready", "status": "True"}])
    await until_drained(pool, "n1", drained=False)
    assert (await pool.pod(lease)).message == ""


async def test_a_node_that_is_gone_takes_its_kernels_along(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease = await start(pool, fake)
    fake.remove("nodes", "n1")
    with pytest.raises(LeaseGone, match="Its machine is gone"):
        await running_no_more(pool, lease)
    await eventually(lambda: fake.named("pods") == ["jupyter-ada"])
    assert (await held(pool)).slices[0].device.node == "n2"


async def test_a_slice_whose_node_is_gone_is_gone_before_a_kernel_was_there(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease = await held(pool)
    fake.remove("nodes", "n1")
    await eventually(lambda: pool.get_lease(lease.id), lambda seen: seen.state is LeaseState.ENDED)
    ended = await pool.get_lease(lease.id)
    assert (ended.end_reason, ended.notice) == (EndReason.DEVICE_LOST, "Its machine is gone.")


async def test_several_gpus_are_of_one_node(pool: GpuPool, fake: FakeKubernetes) -> None:
    with pytest.raises(NeverFits, match="no node has more than 1"):
        await held(pool, "2")
    fake.put("nodes", hami("n2", gpus=2))
    await until_free(pool, 1000, 1000, 1000)
    parts = (await held(pool, "2")).slices
    assert {part.device.node for part in parts} == {"n2"}


async def test_steady_state_lists_nothing_and_a_grant_writes_two_objects(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lists = fake.asked("LIST", "pods"), fake.asked("LIST", "nodes")
    assert lists == (1, 1)
    lease = await start(pool, fake)
    writes = [each for each in fake.requests if each[0] in ("POST", "DELETE", "PATCH", "PUT")]
    assert writes == [("POST", "pods"), ("POST", "secrets")]
    await pool.release(lease)
    await eventually(lambda: fake.asked("DELETE", "pods") == 1)
    assert (fake.asked("LIST", "pods"), fake.asked("LIST", "nodes")) == lists


async def test_the_supervisor_of_kernels_is_created_once(
    pool: GpuPool, fake: FakeKubernetes, tmp_path: Path
) -> None:
    del pool
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    async with cluster_pool(tmp_path / "other.db", config, "hub", supervisor={"launch.py": "1"}) as other:
        for _ in range(2):
            lease = await start(other, fake)
        assert fake.asked("POST", "configmaps") == 1
        (name,) = fake.named("configmaps")
        assert fake.get("configmaps", name)["data"] == {"launch.py": "1"}
        volumes = fake.get("pods", f"gpu-pool-{lease}-1")["spec"]["volumes"]
        assert volumes[-1]["configMap"]["name"] == name


async def test_a_kernel_starts_where_the_service_may_not_create_its_supervisor(
    pool: GpuPool, fake: FakeKubernetes, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    del pool
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    forbidden = trouble(403, "Forbidden", "you may not")
    fake.before_write = lambda _, kind: forbidden if kind == "configmaps" else None
    async with cluster_pool(tmp_path / "other.db", config, "hub", supervisor={"launch.py": "1"}) as other:
        await start(other, fake)
        fake.before_write = lambda *_: None
        await start(other, fake)
    assert caplog.text.count("Kernels in pods are not restarted in place: ") == 1
    assert fake.asked("POST", "configmaps") == 1


async def test_a_kernel_gets_the_very_gpu_of_its_lease(pool: GpuPool, fake: FakeKubernetes) -> None:
    fake.put("nodes", hami("n1", gpus=2))
    await until_free(pool, 1000, 1000, 1000)
    await held(pool, "1")
    lease = await held(pool)
    assert lease.slices[0].device.uuid == "GPU-n1-1"
    await pool.launch(lease.id, command())
    made = fake.get("pods", f"gpu-pool-{lease.id}-1")
    assert made["metadata"]["annotations"]["nvidia.com/use-gpuuuid"] == "GPU-n1-1"


# -- Kernels ---------------------------------------------------------------


@pytest.mark.parametrize("refusal", [PoolUnreachable("The cluster is away."), NeverFits("No node has it.")])
async def test_a_repeated_request_is_answered_whatever_the_cluster_has_for_a_new_one(
    pool: GpuPool, monkeypatch: pytest.MonkeyPatch, refusal: Exception
) -> None:
    lease_id = await take(pool, "50%", "key")

    async def refuse(*_: object) -> tuple[str, ...]:
        raise refusal

    monkeypatch.setattr(pool.backend, "adapt", refuse)
    assert await take(pool, "50%", "key") == lease_id
    with pytest.raises(type(refusal)):
        await take(pool, "50%", "another")
    assert (await pool.get_lease(lease_id)).state is LeaseState.HELD


async def test_a_kernel_is_started_on_a_held_lease_alone(pool: GpuPool) -> None:
    lease = await held(pool, "1")
    await held(pool, "1")
    waiting = await take(pool, "1", "third")
    with pytest.raises(BadRequest, match="waiting"):
        await pool.launch(waiting, command())
    with pytest.raises(BadRequest, match="No kernel was started"):
        await pool.pod(lease.id)
    await pool.release(lease.id)
    for asked in (pool.launch(lease.id, command()), pool.pod(lease.id), pool.end_pod(lease.id)):
        with pytest.raises(LeaseGone, match="released"):
            await asked


async def test_whoever_has_no_server_here_gets_no_pod(pool: GpuPool) -> None:
    lease = await held(pool, user="bob")
    with pytest.raises(NotAllowed, match="default server of 'bob' does not run in hub"):
        await pool.launch(lease.id, command())
    another = await held(pool)
    caller = Caller("ada", False, "ada", Process.current(), server="other")
    with pytest.raises(NotAllowed, match="server 'other' of 'ada'"):
        await pool.for_caller(caller).launch(another.id, command())


async def test_the_slice_of_a_kernel_stays_as_it_is(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease = await start(pool, fake)
    with pytest.raises(NotAllowed, match="cannot be lent"):
        await pool.park(lease)
    with pytest.raises(NotAllowed, match="cannot change its size"):
        await pool.resize(lease, parse_request("4%"))
    await pool.end_pod(lease)
    assert (await pool.resize(lease, parse_request("4%"))).slices[0].milli == 40


async def test_a_lease_whose_kernel_is_launched_needs_no_process_here(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease = await start(pool, fake)
    assert (await pool.get_lease(lease)).process is not None


async def test_a_home_on_one_node_is_where_its_kernels_are(pool: GpuPool, fake: FakeKubernetes) -> None:
    fake.put("persistentvolumeclaims", claim("bob", HUB, "ReadWriteOnce"))
    fake.put("pods", notebook("bob", HUB, node="n2"))
    await eventually(lambda: backend_of(pool).view.notebook("bob", ""))
    lease = await held(pool, "60%", user="bob")
    assert lease.slices[0].device.node == "n2"
    waiting = await pool.request(parse_request("60%"), Holder("bob"), "second")
    assert waiting.state is LeaseState.WAITING
    await pool.release(lease.id)
    assert (await pool.wait(waiting.id, 30)).slices[0].device.node == "n2"
    fake.put("nodes", hami("n1", gpus=2))
    await until_free(pool, 1000, 1000, 400)
    with pytest.raises(NotAllowed, match="on n2, and that machine has no GPU for 2"):
        await held(pool, "2", user="bob")


@pytest.mark.parametrize(
    ("modes", "anywhere"),
    [
        (["ReadWriteMany"], True),
        (["ReadWriteOnce", "ReadWriteMany"], True),
        (["ReadOnlyMany"], True),
        # Which of both it is bound as is not said.
        (["ReadWriteOnce", "ReadOnlyMany"], False),
        (["ReadWriteOnce"], False),
    ],
)
async def test_a_home_is_where_its_claim_lets_it_be(
    pool: GpuPool, fake: FakeKubernetes, modes: list[str], anywhere: bool
) -> None:
    fake.put("persistentvolumeclaims", claim("bob", HUB) | {"spec": {"accessModes": modes}})
    fake.put("nodes", hami("n3", gpus=0))
    fake.put("pods", notebook("bob", HUB, node="n3"))
    await eventually(lambda: backend_of(pool).view.notebook("bob", ""))
    if anywhere:
        assert (await held(pool, user="bob")).slices[0].device.node == "n1"
        return
    with pytest.raises(NotAllowed, match="one machine at a time"):
        await held(pool, user="bob")


async def test_a_claim_that_is_made_anew_counts_as_it_is_now(
    pool: GpuPool, fake: FakeKubernetes, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake.put("persistentvolumeclaims", claim("bob", HUB, "ReadWriteOnce"))
    fake.put("nodes", hami("n3", gpus=0))
    fake.put("pods", notebook("bob", HUB, node="n3"))
    await eventually(lambda: backend_of(pool).view.notebook("bob", ""))
    with pytest.raises(NotAllowed, match="one machine at a time"):
        await held(pool, user="bob")
    fake.remove("persistentvolumeclaims", "claim-bob")
    fake.put("persistentvolumeclaims", claim("bob", HUB, "ReadWriteMany"))
    later = time.monotonic() + 61
    monkeypatch.setattr(pod_builder, "time", SimpleNamespace(monotonic=lambda: later))
    assert (await held(pool, user="bob")).slices[0].device.node == "n1"


async def test_a_home_for_one_pod_is_refused_before_a_pod_would_wait_for_ever(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    fake.put("persistentvolumeclaims", claim("bob", HUB, "ReadWriteOncePod"))
    fake.put("pods", notebook("bob", HUB, node="n1"))
    await eventually(lambda: backend_of(pool).view.notebook("bob", ""))
    with pytest.raises(NotAllowed, match="by one pod at a time .ReadWriteOncePod."):
        await held(pool, user="bob")
    assert [each for each in fake.named("pods") if each.startswith("gpu-pool")] == []


async def test_a_server_that_is_stopped_ends_its_kernels(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease = await start(pool, fake)
    fake.remove("pods", "jupyter-ada")
    with pytest.raises(LeaseGone, match="Your notebook server was stopped"):
        await running_no_more(pool, lease)
    assert (await pool.get_lease(lease)).end_reason is EndReason.TAKEN
    await eventually(lambda: fake.named("pods") == [])


async def test_the_pods_of_another_pool_are_left_alone(
    pool: GpuPool, fake: FakeKubernetes, tmp_path: Path
) -> None:
    lease = await start(pool, fake)
    config = tmp_path / "kubeconfig"
    async with cluster_pool(tmp_path / "other.db", config, HUB, pool="another") as other:
        await other.status()
        assert (await pool.pod(lease)).phase is PodPhase.RUNNING
    assert fake.asked("DELETE", "pods") == 0


async def until_drained(pool: GpuPool, node: str, *, drained: bool) -> None:
    await eventually(
        pool.status, lambda status: {s.drained for s in status.devices if s.device.node == node} == {drained}
    )


def _cordoned(name: str) -> dict[str, Any]:
    node = hami(name)
    node["spec"]["unschedulable"] = True
    return node


async def test_what_the_cluster_rounds_up_is_counted_as_it_is_granted(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease = await held(pool, "2.5%")
    assert str(lease.request) == "3%"
    assert lease.environment["GPU_POOL_SLICE"] == "3%"
    assert await free(pool) == [970, 1000]
    await pool.launch(lease.id, command())
    pod = fake.get("pods", f"gpu-pool-{lease.id}-1")
    limits = pod["spec"]["containers"][0]["resources"]["limits"]
    assert (limits["nvidia.com/gpucores"], limits["nvidia.com/gpumem"]) == ("3", "983")
    # 33 of them fill a GPU, though 40 times 2.5% would.
    for _ in range(65):
        await held(pool, "2.5%")
    assert (await pool.get_lease(await take(pool, "2.5%", "more"))).state is LeaseState.WAITING
