"""What the pool says of limits that a process keeps by itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool.enforcement.own_caps import HIDDEN_FOR, OwnCaps
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import Lease, Process, Strength
from gpu_pool_client._framework_caps import with_caps
from support.pools import embedded, take

TORCH = {"PYTORCH_CUDA_ALLOC_CONF": "per_process_memory_fraction:0.01"}


@contextmanager
def running(environment: dict[str, str]) -> Iterator[Process]:
    """Run a process with these variables, until the end."""
    code = "import sys; print('up', flush=True); sys.stdin.read()"
    with subprocess.Popen(
        [sys.executable, "-c", code],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        process = Process.of(child.pid)
        assert process is not None
        yield process
        child.kill()


async def memory_limit(pool: GpuPool) -> str:
    (lease,) = (await pool.status()).leases
    return str(lease.enforcement.memory)


async def held(pool: GpuPool) -> Lease:
    return await pool.get_lease(await take(pool, "2%", "key"))


async def test_the_pool_states_the_caps_that_a_process_was_started_with(tmp_path: Path) -> None:
    async with embedded(tmp_path / "store.db") as pool:
        lease = await held(pool)
        stated = with_caps(lease, TORCH).environment
        with running({**os.environ, **stated, **TORCH}) as process:
            await pool.attach(lease.id, process)
            assert await memory_limit(pool) == "cooperative (framework caps: torch)"
            # Whoever launches decides by what the pool itself does.
            assert (await pool.get_lease(lease.id)).enforcement.memory.strength is Strength.NONE


@pytest.mark.parametrize(
    "changed",
    [
        {"GPU_POOL_LEASE": "1-another"},
        {"GPU_POOL_ENFORCED": "memory: 655 MiB, none (accounting only); compute: 2%, none (accounting only)"},
        {"GPU_POOL_ENFORCED": "memory: 1 MiB, hard (framework caps: \x1b[2Jtorch)"},
        {"GPU_POOL_ENFORCED": "memory: 1 MiB, hard (a promise)"},
    ],
)
async def test_it_states_nothing_else_that_a_process_says(tmp_path: Path, changed: dict[str, str]) -> None:
    async with embedded(tmp_path / "store.db") as pool:
        lease = await held(pool)
        with running({**os.environ, **with_caps(lease, TORCH).environment, **changed}) as process:
            await pool.attach(lease.id, process)
            assert await memory_limit(pool) == "none (accounting only)"


async def test_a_process_that_is_hidden_is_not_looked_for_by_everybody_who_asks(tmp_path: Path) -> None:
    looked: list[int] = []

    def hide(process: Process, lease_id: str) -> str:
        looked.append(process.pid)
        raise PermissionError

    now = [1000.0]
    async with embedded(tmp_path / "store.db") as pool:
        # Another user's process, of which the kernel of this machine tells nothing: root is told of all.
        pool.core.own_caps = OwnCaps(hide, lambda: now[0])
        lease = await held(pool)
        with running(dict(os.environ)) as process:
            await pool.attach(lease.id, process)
            for _ in range(3):
                assert await memory_limit(pool) == "none (accounting only)"
            assert looked == [process.pid]
            now[0] += HIDDEN_FOR
            await memory_limit(pool)
            assert looked == [process.pid] * 2
            now[0] += HIDDEN_FOR
            in_pod = await pool.get_lease(lease.id)
            pool.core.own_caps.described(replace(in_pod, terms=replace(in_pod.terms, in_pod=True)))
            assert looked == [process.pid] * 2
