"""Reading a cluster's pool changes nothing of the cluster: a scrape ends no pod."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from gpu_pool.pool.pool import GpuPool
from gpu_pool.service.metrics import Metrics
from gpu_pool.store import leases
from gpu_pool_client import EndReason, Holder, Lease, LeaseGone, LeaseState, parse_request
from support.fake_kubernetes import FakeKubernetes
from support.kernel_pods import cluster_pool, start
from support.passes import NO_PASSES
from support.pools import eventually, take

HUB = "hub"


async def test_what_has_not_changed_is_not_described_anew(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease_id = await start(pool, fake)

    async def told() -> Lease:
        (lease,) = (await pool.status()).leases
        return lease

    before = await told()
    assert await told() is before
    assert before.enforcement.memory.by
    await pool.store.run(leases.set_notice, lease_id, "words")
    after = await told()
    assert (after.notice, after.enforcement) == ("words", before.enforcement)


async def test_looking_at_a_pool_ends_no_kernel_and_grants_nothing(
    fake: FakeKubernetes, tmp_path: Path
) -> None:
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    async with cluster_pool(tmp_path / "store.db", config, HUB, tuning=NO_PASSES) as pool:
        await _look_at_all(pool, fake, tmp_path / "store.db")


async def _look_at_all(pool: GpuPool, fake: FakeKubernetes, store: Path) -> None:
    lease = await start(pool, fake)
    waits = await take(pool, "1", "waits")
    await pool.renew(lease, 0)

    def writes() -> list[tuple[str, str]]:
        return [(verb, kind) for verb, kind in fake.requests if verb not in ("GET", "LIST", "WATCH")]

    with closing(sqlite3.connect(store)) as observer:
        before = writes(), observer.execute("PRAGMA data_version").fetchone()
        status = await pool.status()
        assert (status.leases, [each.id for each in status.queue]) == ((), [waits])
        assert (await pool.get_lease(lease)).end_reason is EndReason.EXPIRED
        with pytest.raises(LeaseGone, match="expired"):
            await pool.pod(lease)
        await Metrics(pool, lambda: ()).page()
        await pool.explain(waits)
        await pool.forecast(parse_request("1"), Holder("ada"))
        await pool.history()
        await pool.positions()
        await pool.core.device_fault()
        await pool.core.read_devices([each.device for each in status.devices])
        assert (writes(), observer.execute("PRAGMA data_version").fetchone()) == before
    await pool.core.reconciler.once()
    await eventually(lambda: ("DELETE", "pods") in writes())
    assert (await pool.get_lease(waits)).state is LeaseState.HELD
