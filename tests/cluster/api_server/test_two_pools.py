"""Two pools that divide GPUs of one cluster, over a real API server whose scheduler assigns their claims."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.cluster.settings import ClusterTimes
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import EndReason, Lease, LeaseGone, LeaseState, NotAllowed
from support.clusters import listed, node, resource_slice
from support.control_plane import Cluster
from support.kernel_pods import backend_of, command, held, notebook, running, volume
from support.node_agent import NodeAgent
from support.pools import eventually, take
from support.service import ForkServer, serving
from support.whole_devices import DEVICE_CLASS

from .test_shared import Pools, of_course, prepared, runs, with_course

NODE = "two-1"
#: As if there was one GPU: both pools want the same.
ONE = {"options": {"shared_most": 1}}


@pytest.fixture(scope="module")
def cluster(kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node with two GPUs, listed as NVIDIA's DRA driver does. What its pods run does not matter here."""
    with NodeAgent(kubeconfig, tmp_path_factory.mktemp("nodes"), hollow=True) as agent:
        cluster = Cluster(kubeconfig, agent)
        cluster.add(node(NODE))
        about = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"}
        listing = resource_slice(listed("gpu-0"), listed("gpu-1"), name=NODE)
        cluster.apply(DEVICE_CLASS, {**about, **listing})
        yield cluster
        cluster.kubectl(
            "delete", f"resourceslice/{listing['metadata']['name']}", "deviceclass/gpu.nvidia.com"
        )


def add_ada(cluster: Cluster, namespace: str) -> None:
    home = volume("claim-ada", namespace, "ReadWriteMany")
    cluster.apply(*home, notebook("ada", namespace), namespace=namespace)


@pytest.fixture
def elsewhere(cluster: Cluster, namespace: str) -> Iterator[str]:
    """Return the name of another namespace, with a notebook server of its own."""
    name = f"{namespace}-b"
    cluster.kubectl("create", "namespace", name)
    add_ada(cluster, name)
    yield name
    cluster.kubectl("delete", "namespace", name, "--wait=false")


@pytest.fixture
async def here(cluster: Cluster, namespace: str, tmp_path: Path) -> AsyncIterator[Pools]:
    add_ada(cluster, namespace)
    async with AsyncExitStack() as stack:
        yield Pools(cluster, namespace, tmp_path, stack)


@pytest.fixture
async def there(cluster: Cluster, elsewhere: str, tmp_path: Path) -> AsyncIterator[Pools]:
    folder = tmp_path / "there"
    folder.mkdir()
    async with AsyncExitStack() as stack:
        yield Pools(cluster, elsewhere, folder, stack)


async def launched(pool: GpuPool) -> Lease:
    """Start a kernel; return its lease once it runs, or has ended."""
    lease = await held(pool)
    with suppress(LeaseGone):
        await pool.launch(lease.id, command())
        await running(pool, lease.id)
    return await pool.get_lease(lease.id)


@pytest.mark.parametrize("name", ["gpu-pool", "other"])
async def test_of_two_pools_that_claim_the_same_gpu_at_once_one_has_it_and_the_other_waits(
    here: Pools, there: Pools, name: str
) -> None:
    settings: dict[str, Any] = {**ONE, "times": ClusterTimes(assigned_within=10.0), "shared_empty_for": 0}
    pools = {await here.open(**settings): here, await there.open(**settings, pool=name): there}
    leases = dict(zip(pools, await asyncio.gather(*map(launched, pools)), strict=True))
    (winner,) = [pool for pool, lease in leases.items() if lease.state is LeaseState.HELD]
    (loser,) = [pool for pool, lease in leases.items() if lease.state is LeaseState.ENDED]
    assert leases[loser].end_reason in (EndReason.TAKEN, EndReason.NOT_READY)
    # What it had made goes again, and it waits.
    await eventually(lambda: not pools[loser].claims() and not pools[loser].holders(), within=60)
    waiting = await take(loser, "2%", "waits")
    assert (await loser.get_lease(waiting)).state is LeaseState.WAITING
    assert (await winner.get_lease(leases[winner].id)).state is LeaseState.HELD
    await winner.release(leases[winner].id)
    lease = await loser.wait(waiting, 120)
    await loser.launch(lease.id, command())
    await running(loser, lease.id)
    await eventually(lambda: not pools[winner].claims(), within=60)


async def test_two_pools_in_one_namespace_take_neither_claims_nor_prepared_pods_of_each_other(
    here: Pools, tmp_path: Path
) -> None:
    """The policies of the chart refuse that; where they are not installed, nothing collides."""
    here.cluster.kubectl("-n", here.namespace, "label", "pod", "jupyter-ada", "jupyter-gpu-pool/course=ml")
    add_bob = volume("claim-bob", here.namespace, "ReadWriteMany")
    here.cluster.apply(*add_bob, notebook("bob", here.namespace), namespace=here.namespace)
    here.cluster.kubectl("-n", here.namespace, "label", "pod", "jupyter-bob", "jupyter-gpu-pool/course=ml")
    first = await here.open(**with_course())
    mine = await of_course(first, "bob")
    await first.launch(mine, command())
    await running(first, mine)
    await eventually(lambda: [pod for pod in prepared(here) if runs(pod)], within=60)
    (pod,) = prepared(here)
    (claim,) = here.claims()
    folder = tmp_path / "second"
    folder.mkdir()
    async with AsyncExitStack() as stack:
        second = await Pools(here.cluster, here.namespace, folder, stack).open(
            **with_course(prepared_per_node=0), pool="other"
        )
        theirs = await of_course(second, "ada")
        both = [(await pool.get_lease(each)).slices[0] for pool, each in ((first, mine), (second, theirs))]
        assert {part.device.uuid for part in both} == {"GPU-gpu-0", "GPU-gpu-1"}
        begun = await second.launch(theirs, command(can_begin=True))
        assert begun.beginning is None
        await running(second, theirs)
        assert {each["metadata"]["uid"] for each in prepared(here)} == {pod["metadata"]["uid"]}
        await eventually(lambda: len(here.claims()) == len(here.holders()) == 2, within=60)
        # What one of them ends is nothing of the other's.
        await second.release(theirs)
        await eventually(lambda: not backend_of(second).view.own.of(theirs))
        await first.core.reconciler.once()
        assert (await first.get_lease(mine)).state is LeaseState.HELD
        assert claim in here.claims()


async def test_a_device_belongs_to_one_namespace_which_is_said_at_the_start_and_to_who_is_in_another(
    here: Pools, there: Pools, children: ForkServer, tmp_path: Path
) -> None:
    """One service for both namespaces is refused; and one for one of them starts no kernel in the other."""
    there.cluster.apply(
        *volume("claim-bob", there.namespace, "ReadWriteMany"),
        notebook("bob", there.namespace),
        namespace=there.namespace,
    )
    settings = f"""
c.ServeApp.kubernetes = True
c.KubernetesSettings.kubeconfig = {str(here.cluster.kubeconfig)!r}
c.KubernetesSettings.namespace = {here.namespace!r}
c.KubernetesSettings.more_namespaces = [{there.namespace!r}]
c.KubernetesSettings.dialect = "shared"
"""
    with pytest.raises(AssertionError, match="more_namespaces.*belongs to one namespace"):
        async with serving(children, tmp_path / "service", settings):
            pass
    pool = await here.open()
    lease = await held(pool, user="bob")
    with pytest.raises(NotAllowed, match=f"server of 'bob' does not run in {here.namespace}"):
        await pool.launch(lease.id, command())
    assert not there.claims()
