"""The claims by which the pool has whole devices: made, kept, given back, lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from gpu_pool.cluster.device_claims import (
    DELETED,
    NOT_ASSIGNED,
    TAKEN,
    UNLISTED,
    Claim,
    DeviceFacts,
    DeviceMemory,
    Limits,
    Todo,
    decide,
)
from gpu_pool.cluster.settings import ClusterTimes, KubernetesSettings
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
    parse_request,
)
from support.clusters import claim_of, node
from support.fake_kubernetes import FakeKubernetes, trouble
from support.kernel_pods import cluster_pool, command, held, until_free, until_pod
from support.pools import eventually, take
from support.whole_devices import CLAIM, DRA, holders, lists_devices, start_whole

HUB = "hub"
LIMITS = Limits(empty_for=60.0, assigned_within=30.0, unlisted_for=10.0)
POD: dict[str, Any] = {"metadata": {"name": "h"}}


# -- What is decided -----------------------------------------------------------


def facts(**more: Any) -> DeviceFacts:
    """Return a device in use whose claim has it and is held, but for what is said."""
    about = {"in_use": True, "claim": Claim("u1", is_allocated=True, is_ending=False)}
    return DeviceFacts(**{**about, "holders": (POD,), "is_held": True, **more})


def waits(uid: str = "u1") -> Claim:
    return Claim(uid, is_allocated=False, is_ending=False)


def ends(uid: str = "u1") -> Claim:
    return Claim(uid, is_allocated=True, is_ending=True)


KNOWN = DeviceMemory(claim="u1")


@pytest.mark.parametrize(
    ("memory", "seen", "todo"),
    [
        (DeviceMemory(), facts(claim=None, holders=(), is_held=False), Todo(make_claim=True)),
        (DeviceMemory(), facts(holders=(), is_held=False), Todo(make_holder=True)),
        (KNOWN, facts(), Todo()),
        (KNOWN, facts(is_held=False), Todo(make_holder=True)),
        (KNOWN, facts(is_held=False, is_open=False), Todo()),
        (KNOWN, facts(claim=ends()), Todo(end_leases=DELETED)),
        (DeviceMemory(), facts(claim=ends()), Todo(end_leases=DELETED)),
        (KNOWN, facts(claim=None), Todo(end_leases=DELETED, vanished="u1")),
        (KNOWN, facts(claim=waits("u2")), Todo(end_leases=DELETED, vanished="u1")),
        (DeviceMemory(given_back="u1"), facts(claim=ends()), Todo(end_holders=True)),
        (DeviceMemory(given_back="u1"), facts(claim=None), Todo(make_claim=True)),
        (DeviceMemory(unlisted_since=90.0), facts(is_listed=False), Todo(end_leases=UNLISTED)),
        (DeviceMemory(claim="u1", unlisted_since=91.0), facts(is_listed=False), Todo()),
        (DeviceMemory(claim="u1", unlisted_since=1.0), facts(), Todo()),
        (DeviceMemory(waits_since=70.0), facts(claim=waits()), Todo(end_leases=NOT_ASSIGNED)),
        (DeviceMemory(waits_since=70.0), facts(claim=waits(), is_taken=True), Todo(end_leases=TAKEN)),
        (DeviceMemory(claim="u1", waits_since=71.0), facts(claim=waits()), Todo()),
        (DeviceMemory(waits_since=1.0), facts(claim=None), Todo(end_leases=NOT_ASSIGNED)),
    ],
)
def test_of_a_device_in_use(memory: DeviceMemory, seen: DeviceFacts, todo: Todo) -> None:
    assert decide(memory, seen, 100.0, LIMITS).todo == todo


@pytest.mark.parametrize(
    ("memory", "seen", "todo"),
    [
        (DeviceMemory(claim="u1"), facts(in_use=False), Todo()),
        (DeviceMemory(empty_since=41.0), facts(in_use=False), Todo()),
        (DeviceMemory(empty_since=40.0), facts(in_use=False), Todo(end_holders=True)),
        (DeviceMemory(empty_since=40.0), facts(in_use=False, is_held=False), Todo()),
        (
            DeviceMemory(empty_since=40.0),
            facts(in_use=False, is_held=False, holders=()),
            Todo(end_claim=True),
        ),
        (DeviceMemory(empty_since=99.0), facts(in_use=False, claim=ends()), Todo(end_holders=True)),
        (DeviceMemory(empty_since=99.0), facts(in_use=False, claim=None), Todo(end_holders=True)),
        (DeviceMemory(), facts(in_use=False, claim=ends(), is_held=False, holders=()), Todo()),
    ],
)
def test_of_an_empty_device(memory: DeviceMemory, seen: DeviceFacts, todo: Todo) -> None:
    assert decide(memory, seen, 100.0, LIMITS).todo == todo


def test_it_is_known_since_when_it_is_empty_and_no_longer_once_it_is_in_use() -> None:
    empty = decide(KNOWN, facts(in_use=False), 100.0, LIMITS).memory
    assert empty == DeviceMemory(empty_since=100.0)
    assert decide(empty, facts(in_use=False), 130.0, LIMITS).memory == empty
    used = decide(empty, facts(), 140.0, LIMITS).memory
    assert used == DeviceMemory(claim="u1")
    gone = facts(in_use=False, claim=None, holders=(), is_held=False)
    assert decide(empty, gone, 200.0, LIMITS).memory is None


# -- Over the fake of the API ----------------------------------------------------


@pytest.fixture
def times() -> ClusterTimes:
    return ClusterTimes()


@pytest.fixture
def empty_for() -> int:
    return 60


@pytest.fixture
def fake(dra: FakeKubernetes) -> FakeKubernetes:
    return dra


@pytest.fixture
async def pool(
    fake: FakeKubernetes, times: ClusterTimes, empty_for: int, tmp_path: Path
) -> AsyncIterator[GpuPool]:
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    settings: dict[str, Any] = {"dialect": "shared", "shared_empty_for": empty_for, "times": times}
    async with cluster_pool(tmp_path / "store.db", config, HUB, **settings) as pool:
        yield pool


async def why_ended(pool: GpuPool, lease_id: str) -> tuple[EndReason | None, str]:
    """Return how a lease has ended, once it has."""
    with pytest.raises(LeaseGone) as gone:
        await until_pod(pool, lease_id, lambda _: False)
    lease = await pool.get_lease(lease_id)
    assert lease.state is LeaseState.ENDED
    return lease.end_reason, str(gone.value)


async def test_slices_of_one_device_share_one_claim_and_one_holder(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    leases = [await held(pool, text) for text in ("2%", "0.5GiB", "30%")]
    for lease in leases:
        await pool.launch(lease.id, command())
    assert fake.named("resourceclaims") == [CLAIM]
    await eventually(lambda: holders(fake))
    (pod,) = holders(fake)
    assert pod["spec"]["resourceClaims"] == [{"name": "gpu", "resourceClaimName": CLAIM}]
    assert "claims" not in pod["spec"]["containers"][0]["resources"]
    for lease in leases:
        made = fake.get("pods", f"gpu-pool-{lease.id}-1")
        assert made["spec"]["resourceClaims"] == [{"name": "gpu-0", "resourceClaimName": CLAIM}]
        assert made["spec"]["containers"][0]["resources"]["claims"] == [{"name": "gpu-0"}]
        part = lease.slices[0]
        assert made["metadata"]["annotations"]["jupyter-gpu-pool/slices"] == (
            f"GPU-gpu-0={part.milli}/{part.memory_mib}"
        )
    free = (await pool.status()).devices[0].free_milli
    assert free == 1000 - sum(each.slices[0].milli for each in leases)


async def test_frameworks_are_limited_and_the_lease_says_so(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease = await held(pool, "50%")
    assert "framework caps: jax, cupy; torch, tensorflow" in str(lease.enforcement.memory)
    theirs = {"CUPY_GPU_MEMORY_LIMIT": "1"}
    await pool.launch(lease.id, command(environment=theirs))
    variables = fake.get("pods", f"gpu-pool-{lease.id}-1")["spec"]["containers"][0]["env"]
    found = {each["name"]: each["value"] for each in variables}
    assert 0.4 < float(found["XLA_PYTHON_CLIENT_MEM_FRACTION"]) < 0.5
    assert 0.4 < float(found["GPU_POOL_TORCH_FRACTION"]) < 0.5
    assert found["CUPY_GPU_MEMORY_LIMIT"] == "1", "what the user has set is kept"
    assert "PYTORCH_CUDA_ALLOC_CONF" not in found, "a torch that lacks it would fail"


async def test_claims_and_holders_go_with_the_services_account(pool: GpuPool, fake: FakeKubernetes) -> None:
    await start_whole(pool, fake)
    owner = {"apiVersion": "v1", "kind": "ServiceAccount", "name": "gpu-pool", "uid": "u-account"}
    for found in (fake.get("resourceclaims", CLAIM), holders(fake)[0]):
        assert found["metadata"]["ownerReferences"] == [owner]


@pytest.mark.parametrize("empty_for", [0])
async def test_a_device_that_is_empty_for_long_enough_is_the_clusters_again(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease_id = await start_whole(pool, fake)
    await pool.release(lease_id)
    await eventually(lambda: not fake.named("resourceclaims") and not holders(fake))
    order = [each for each in fake.requests if each[0] == "DELETE"]
    assert order[-1] == ("DELETE", "resourceclaims"), "its claim goes last"
    again = await start_whole(pool, fake)
    assert again != lease_id


async def test_a_device_is_kept_for_a_while_between_two_slices(pool: GpuPool, fake: FakeKubernetes) -> None:
    await pool.release(await start_whole(pool, fake))
    (before,) = holders(fake)
    second = await start_whole(pool, fake)
    assert [each["metadata"]["uid"] for each in holders(fake)] == [before["metadata"]["uid"]]
    assert (await pool.get_lease(second)).state is LeaseState.HELD


async def test_a_holder_that_is_taken_away_is_made_again(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease_id = await start_whole(pool, fake)
    (before,) = holders(fake)
    fake.change("pods", before["metadata"]["name"], phase="Failed", reason="Evicted")
    await eventually(lambda: len(holders(fake)) == 2)
    newest = max(each["metadata"]["name"] for each in holders(fake))
    assert newest == before["metadata"]["name"][:-1] + "2"
    assert (await pool.get_lease(lease_id)).state is LeaseState.HELD


async def test_while_its_claim_waits_the_cell_says_for_what(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease = await held(pool)
    pod = await pool.launch(lease.id, command())
    assert pod.message == "The cluster has not assigned its GPU to the pool yet."
    fake.put_of(DRA, "resourceclaims", claim_of("gpu-0", name="research"))
    told = await until_pod(pool, lease.id, lambda pod: "Somebody else" in pod.message)
    assert told.phase is PodPhase.STARTING


async def test_a_claim_that_an_administrator_deletes_ends_its_slices_once(
    pool: GpuPool, fake: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    ids = [await start_whole(pool, fake) for _ in range(2)]
    found = fake.get("resourceclaims", CLAIM)
    about = {**found["metadata"], "deletionTimestamp": "2026-11-27T12:00:00Z"}
    fake.put_of(DRA, "resourceclaims", {**found, "metadata": about})
    for lease_id in ids:
        reason, words = await why_ended(pool, lease_id)
        assert reason is EndReason.TAKEN
        assert "deleted the claim by which this pool had the GPU" in words
    await eventually(lambda: not holders(fake))
    waiting = await take(pool, "2%", "meanwhile")
    assert (await pool.get_lease(waiting)).state is LeaseState.WAITING
    fake.remove("resourceclaims", CLAIM)
    lease = await pool.wait(waiting, 60)
    await eventually(lambda: fake.named("resourceclaims") == [CLAIM])
    assert lease.state is LeaseState.HELD
    assert caplog.text.count("leases on GPU 'GPU-gpu-0' end") == 1


async def test_a_claim_that_is_gone_at_once_ends_them_too(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease_id = await start_whole(pool, fake)
    fake.remove("resourceclaims", CLAIM)
    reason, _ = await why_ended(pool, lease_id)
    assert reason is EndReason.TAKEN


@pytest.mark.parametrize("times", [ClusterTimes(unlisted_for=0.0)])
async def test_a_device_that_is_not_listed_any_more_ends_its_slices(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lists_devices(fake, "gpu-0", "gpu-1", generation=2)
    await until_free(pool, 1000, 1000)
    lease_id = await start_whole(pool, fake)
    lists_devices(fake, "gpu-1", generation=3)
    reason, words = await why_ended(pool, lease_id)
    assert reason is EndReason.DEVICE_LOST
    assert "does not list its GPU any more" in words


@pytest.mark.parametrize("times", [ClusterTimes(assigned_within=0.0)])
async def test_a_device_that_somebody_else_gets_first_ends_the_slice(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    fake.put_of(DRA, "resourceclaims", claim_of(name="research"))
    lease = await held(pool)
    fake.put_of(DRA, "resourceclaims", claim_of("gpu-0", name="research"))
    await eventually(lambda: _has_ended(pool, lease.id))
    found = await pool.get_lease(lease.id)
    assert found.end_reason in (EndReason.TAKEN, EndReason.NOT_READY)


async def _has_ended(pool: GpuPool, lease_id: str) -> bool:
    return (await pool.get_lease(lease_id)).state is LeaseState.ENDED


async def test_what_others_have_claimed_is_waited_for(pool: GpuPool, fake: FakeKubernetes) -> None:
    fake.put_of(DRA, "resourceclaims", claim_of("gpu-0", name="research"))
    await until_free(pool, 0)
    waiting = await take(pool, "2%", "waits")
    assert (await pool.get_lease(waiting)).state is LeaseState.WAITING
    fake.remove("resourceclaims", "research")
    assert (await pool.wait(waiting, 60)).state is LeaseState.HELD


async def test_a_missing_right_is_told_at_the_start_and_written_down_once(
    pool: GpuPool, fake: FakeKubernetes, caplog: pytest.LogCaptureFixture
) -> None:
    def refused(method: str, kind: str) -> Any:
        words = "resourceclaims is forbidden: User gpu-pool cannot create"
        is_it = (method, kind) == ("POST", "resourceclaims")
        return trouble(403, "Forbidden", words) if is_it else None

    fake.before_write = refused
    lease = await held(pool)
    with pytest.raises(NotAllowed, match="resourceclaims is forbidden"):
        await pool.launch(lease.id, command())
    assert fake.named("pods") == ["jupyter-ada"], "a pod without its claim would wait without a word"
    assert "cannot be kept: The cluster refused" in caplog.text


async def test_a_cluster_without_it_refuses_in_words(pool: GpuPool, fake: FakeKubernetes) -> None:
    fake.remove("deviceclasses", "gpu.nvidia.com")
    await eventually(lambda: _is_refused(pool))


async def _is_refused(pool: GpuPool) -> bool:
    try:
        await pool.forecast(parse_request("2%"), Holder("ada"))
    except NeverFits as error:
        return "resource.k8s.io/v1" in str(error)
    return False


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"kueue": True}, "both dialect = 'shared' and kueue.*KEP-2941"),
        ({"more_namespaces": ["course-{course}"]}, "more_namespaces.*belongs to one namespace"),
        ({"node_groups": {"v100": {}}}, "node_groups.*by its uuid"),
    ],
)
def test_what_does_not_go_with_it_is_refused_before_anything_starts(more: dict[str, Any], words: str) -> None:
    with pytest.raises(BadRequest, match=words):
        KubernetesSettings(dialect="shared", **more).check_dialect()


async def test_no_holder_is_made_on_a_closed_node(pool: GpuPool, fake: FakeKubernetes) -> None:
    await start_whole(pool, fake)
    (before,) = holders(fake)
    fake.put("nodes", node("n1", unschedulable=True))
    await until_free(pool, 0)
    fake.remove("pods", before["metadata"]["name"])
    await asyncio.gather(*(pool.status() for _ in range(3)))
    assert holders(fake) == []
    fake.put("nodes", node("n1"))
    await eventually(lambda: holders(fake))


@pytest.mark.parametrize("empty_for", [0])
async def test_a_device_is_not_empty_before_the_last_pod_of_a_kernel_has_gone(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    lease_id = await start_whole(pool, fake)
    answers = [web.json_response({})]  # its pod is asked to end, and takes its time

    def slow(method: str, kind: str) -> Any:
        return answers.pop() if answers and (method, kind) == ("DELETE", "pods") else None

    fake.before_write = slow
    await pool.release(lease_id)
    await eventually(lambda: not answers)
    fake.put("nodes", node("n1", unschedulable=True))
    await until_free(pool, 0)
    fake.put("nodes", node("n1"))
    await until_free(pool, 1000)
    assert len(holders(fake)) == 1
    fake.remove("pods", f"gpu-pool-{lease_id}-1")
    await eventually(lambda: not fake.named("resourceclaims") and not holders(fake))
