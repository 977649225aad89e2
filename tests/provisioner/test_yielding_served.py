"""Idle kernels of a pool that is served give way to who waits, and take their slices again."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest

from gpu_pool_client import EndReason, Holder, Lease, LeaseState, Pool, Process, connect, parse_request
from support.frontend import frontend
from support.jupyter_env import JupyterEnv, Managers, eventually
from support.service import ForkServer, Service, serving

#: Kernels that are idle for a second give way to who waits; nothing else happens to them.
YIELDS = 'c.PoolSettings.default_course = {"yield_after": "1s"}\n'


@pytest.fixture
async def service(
    jupyter_env: JupyterEnv, children: ForkServer, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Service]:
    """Serve the pool of the test's kernels."""
    async with serving(children, jupyter_env.folder / "service", YIELDS) as service:
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        yield service


@pytest.fixture
async def pool(service: Service) -> AsyncIterator[Pool]:
    """Connect as an administrator."""
    async with connect(service.url) as pool:
        yield pool


async def leases(pool: Pool, state: LeaseState) -> tuple[Lease, ...]:
    return tuple(lease for lease in (await pool.status()).leases if lease.state is state)


async def test_two_kernels_share_one_gpu_in_turns_and_lose_nothing(
    jupyter_env: JupyterEnv, manager: Managers, pool: Pool
) -> None:
    first, second = (manager(jupyter_env.install(name, "1")) for name in ("one", "other"))
    await first.start_kernel()
    async with frontend(first) as page:
        await page.run("kept = 42").done()
        (held,) = await leases(pool, LeaseState.HELD)
        await second.start_kernel()
        async with frontend(second) as other:
            assert (await other.run("own = 'mine'; print(own)").done()).outputs[-1] == "mine\n"
            (parked,) = await leases(pool, LeaseState.PARKED)
            assert (parked.id, parked.asked_back) == (held.id, EndReason.YIELDED)
            assert (await page.run("print(kept)").done()).outputs[-1] == "42\n"
            # The other one has given way in its turn, and its next cell takes the GPU again.
            assert (await other.run("print(own)").done()).outputs[-1] == "mine\n"


@pytest.mark.long
async def test_what_is_said_to_be_in_use_stays_and_another_kernel_goes(
    jupyter_env: JupyterEnv, manager: Managers, pool: Pool
) -> None:
    keeps, idles = (manager(jupyter_env.install(name, "50%")) for name in ("keeps", "idles"))
    await keeps.start_kernel()
    async with frontend(keeps) as page:
        await page.run("kept = 42").done()
        (kept,) = await leases(pool, LeaseState.HELD)
        said = await page.run("%gpu keep 10m").done()
        await said.shows("keeps its GPU slice for 10min")
        await idles.start_kernel()
        async with frontend(idles) as other:
            await other.run("1").done()
            # The one that has been idle for less long gives way, since the other is in use.
            waits = await pool.request(
                parse_request("50%"), Holder("ada", kernel="other", yields=True), "waits"
            )
            await eventually(lambda: pool.get_lease(waits.id), lambda lease: lease.state is LeaseState.HELD)
            (parked,) = await leases(pool, LeaseState.PARKED)
            assert parked.id != kept.id
        assert (await page.run("print(kept)").done()).outputs[-1] == "42\n"


async def test_who_waits_reads_that_an_idle_kernel_gives_way(
    pool: Pool,
) -> None:
    # What this test says in a kernel's stead is not followed by its leaving the GPU.
    idle = await pool.request(parse_request("1"), Holder("ada", kernel="notebook", yields=True), "idle")
    await pool.attach(idle.id, Process.current())
    waits = await pool.request(parse_request("1"), Holder("bob", kernel="other", yields=True), "waits")
    await pool.attach(waits.id, Process.current())
    before = await pool.explain(waits.id)
    assert "giving way" not in before.reason
    await pool.report_busy(idle.id, (), gives_way_since=time.time() - 60)
    assert (await pool.get_lease(idle.id)).asked_back is EndReason.YIELDED
    outlook = await pool.explain(waits.id)
    assert outlook.reason.startswith("1 idle kernel is giving way. ")
    # It works again before it has given way, and nobody else idles.
    await pool.report_busy(idle.id, ())
    assert (await pool.explain(waits.id)).reason == before.reason
    assert (await pool.get_lease(idle.id)).asked_back is None
