"""kill -9 of the service and of a Jupyter server at each step at which a kernel gives way and returns."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from chaos import points
from gpu_pool_client import Holder, Lease, LeaseState, Pool, connect, parse_request
from support.frontend import frontend, page_of
from support.jupyter_env import JupyterEnv, Managers
from support.pools import eventually
from support.service import ForkServer, Service, serving

YIELDS = 'c.PoolSettings.default_course = {"yield_after": "1s"}\n'
TESTS = str(Path(__file__).parents[1])
_ARMED = """
import sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from chaos import points
points.arm(points.{points}, Path({strikes!r}))
"""
#: A Jupyter server with one kernel, which runs a cell for each line that it reads.
_SERVER = """
import asyncio, sys
from jupyter_client.manager import AsyncKernelManager

async def main():
    km = AsyncKernelManager(kernel_name={kernel!r})
    await km.start_kernel()
    client = km.client()
    client.start_channels(hb=False)
    await client.wait_for_ready(timeout=120)
    print("ready", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        client.execute("1")

asyncio.run(main())
"""


@pytest.fixture
def strikes(tmp_path: Path) -> Path:
    return tmp_path / "strikes"


@pytest.fixture
async def service(
    jupyter_env: JupyterEnv, children: ForkServer, strikes: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Service]:
    """Serve the pool of the test's kernels, and let it be struck."""
    async with serving(children, jupyter_env.folder / "service", YIELDS) as service:
        service.prelude = _ARMED.format(tests=TESTS, points="SERVICE", strikes=str(strikes))
        await service.end()
        await service.start()
        monkeypatch.setenv("GPU_POOL_URL", service.url)
        yield service


@pytest.fixture
async def pool(service: Service) -> AsyncIterator[Pool]:
    """Connect as an administrator."""
    async with connect(service.url) as pool:
        yield pool


@contextmanager
def serving_a_kernel(kernel: str, strikes: Path) -> Iterator[subprocess.Popen[str]]:
    """Run a Jupyter server that can be struck; its kernel has answered."""
    armed = _ARMED.format(tests=TESTS, points="SERVER", strikes=str(strikes))
    process = subprocess.Popen(
        [sys.executable, "-c", armed + _SERVER.format(kernel=kernel)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout
        assert process.stdout.readline() == "ready\n"
        yield process
    finally:
        process.kill()
        process.communicate()


async def ask(pool: Pool, name: str) -> Lease:
    return await pool.request(parse_request("1 for 10min"), Holder("teacher"), name)


async def revived(service: Service) -> None:
    """Start the service again once it was struck."""
    process = service.process
    assert process is not None
    await eventually(lambda: not process.is_alive())
    await service.start()


async def seen(pool: Pool) -> Counter[LeaseState]:
    """Count the leases by their states; the whole GPU is held by one of them at most."""
    status = await pool.status()
    found = Counter(lease.state for lease in (*status.leases, *status.queue))
    assert [device.held_milli for device in status.devices] == [1000 * found[LeaseState.HELD]]
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "point",
    [
        "gpu_pool.policy.yielding:ask_back:before",
        "gpu_pool.policy.yielding:ask_back:after",
        "gpu_pool.store.leases:lend:after",
    ],
)
async def test_the_service_is_killed_as_a_kernel_gives_way(
    jupyter_env: JupyterEnv, manager: Managers, service: Service, pool: Pool, strikes: Path, point: str
) -> None:
    first, second = (manager(jupyter_env.install(name, "1")) for name in ("one", "other"))
    await first.start_kernel()
    async with frontend(first) as page:
        await page.run("kept = 42").done()
        points.strike(strikes, point, points.KILL)
        await second.start_kernel()
        await revived(service)
        async with frontend(second) as other:
            assert (await other.run("print('mine')").done()).outputs[-1] == "mine\n"
            assert await seen(pool) == {LeaseState.HELD: 1, LeaseState.PARKED: 1}
            assert (await page.run("print(kept)").done()).outputs[-1] == "42\n"
            assert await seen(pool) == {LeaseState.HELD: 1, LeaseState.PARKED: 1}
    assert not await pool.history()


@pytest.mark.long
@pytest.mark.parametrize(
    "point", ["gpu_pool.store.yielding:place:after", "gpu_pool.store.leases:queue_again:after"]
)
async def test_the_service_is_killed_as_a_kernel_asks_to_return(
    jupyter_env: JupyterEnv, manager: Managers, service: Service, pool: Pool, strikes: Path, point: str
) -> None:
    async with page_of(manager(jupyter_env.install("one", "1"))) as (_, page):
        await page.run("runs = 0").done()
        other = await pool.wait((await ask(pool, "other")).id, 120)
        points.strike(strikes, point, points.KILL)
        cell = page.run("runs += 1; print(runs)")
        await revived(service)
        next_one = await ask(pool, "next")
        # Once it has asked again, it comes before the newcomer.
        await eventually(lambda: seen(pool), lambda seen: seen[LeaseState.WAITING] == 2)
        await pool.release(other.id)
        assert (await cell.done()).outputs[-1] == "1\n"
        # It was overtaken, and has the slice once the kernel is idle.
        assert (await pool.wait(next_one.id, 120)).state is LeaseState.HELD
        assert await seen(pool) == {LeaseState.HELD: 1, LeaseState.PARKED: 1}
    assert [row.id for row in await pool.history()] == [other.id]


@pytest.mark.parametrize(
    "point",
    [
        "gpu_pool_provisioner.pool_work:PoolWork._park:before",
        pytest.param("gpu_pool_provisioner.pool_work:PoolWork._park:after", marks=pytest.mark.long),
        pytest.param("gpu_pool_provisioner.pool_work:PoolWork._until_asked:after", marks=pytest.mark.long),
    ],
)
async def test_a_server_is_killed_as_its_kernel_gives_way(
    jupyter_env: JupyterEnv, service: Service, pool: Pool, strikes: Path, point: str
) -> None:
    kernel = jupyter_env.install("one", "1")
    with serving_a_kernel(kernel, strikes) as server:
        (owner,) = (await pool.status()).leases
        points.strike(strikes, point, points.KILL)
        other, next_one = await ask(pool, "other"), await ask(pool, "next")
        assert (await pool.wait(other.id, 120)).state is LeaseState.HELD
        await eventually(lambda: server.poll() is not None)
    assert server.returncode == -signal.SIGKILL
    assert (await pool.get_lease(next_one.id)).position == 1
    await until_ended(pool, owner.id)
    assert await seen(pool) == {LeaseState.HELD: 1, LeaseState.WAITING: 1}


@pytest.mark.parametrize(
    "point",
    [
        pytest.param("gpu_pool_provisioner.pool_work:PoolWork._resume:before", marks=pytest.mark.long),
        "gpu_pool_provisioner.pool_work:PoolWork._resume:after",
    ],
)
async def test_a_server_is_killed_as_its_kernel_asks_to_return(
    jupyter_env: JupyterEnv, service: Service, pool: Pool, strikes: Path, point: str
) -> None:
    kernel = jupyter_env.install("one", "1")
    with serving_a_kernel(kernel, strikes) as server:
        (owner,) = (await pool.status()).leases
        other = await pool.wait((await ask(pool, "other")).id, 120)
        next_one = await ask(pool, "next")
        points.strike(strikes, point, points.KILL)
        assert server.stdin
        server.stdin.write("\n")
        server.stdin.flush()
        await eventually(lambda: server.poll() is not None)
    await until_ended(pool, owner.id)
    await pool.release(other.id)
    assert (await pool.wait(next_one.id, 120)).state is LeaseState.HELD
    assert await seen(pool) == {LeaseState.HELD: 1}
    assert sorted(row.id for row in await pool.history()) == sorted([owner.id, other.id])


async def until_ended(pool: Pool, lease_id: str) -> None:
    """Return once it is kept that a lease has ended, which it has once."""
    await eventually(pool.history, lambda history: lease_id in [row.id for row in history])
    assert [row.id for row in await pool.history()].count(lease_id) == 1
