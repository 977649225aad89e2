"""Whether the next kernel of a session is started in the pod of the last one."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from gpu_pool_client import (
    Device,
    Enforcement,
    Holder,
    KernelCommand,
    Lease,
    LeaseState,
    Limit,
    Slice,
    Strength,
    parse_request,
)
from gpu_pool_provisioner.launchers.base import HeldLease
from gpu_pool_provisioner.launchers.lease_pod import LeasePod
from gpu_pool_provisioner.launchers.supervised import SupervisorAway

LEASE = Lease(
    "1-abc",
    "key",
    parse_request("2%"),
    Holder("ada"),
    LeaseState.HELD,
    0.0,
    held_at=1.0,
    slices=(Slice(Device("GPU-0", 0, "V100", 32_768), 20, 655),),
)
COMMAND = KernelCommand(("python3", "-m", "ipykernel"), {"key": "k"})


def running(address: str = "10.0.0.1", **more: Any) -> LeasePod:
    """Return a pod that runs for the lease."""
    held: Any = HeldLease(None, LEASE.id, "2%", 1.0, lambda _: None, False)  # type: ignore[arg-type]
    pod = LeasePod(held, replace(LEASE, **more), COMMAND)
    pod._address.set_result(address)
    return pod


async def test_a_pod_fits_what_would_be_launched_now_and_nothing_else() -> None:
    pod = running()
    assert pod.fits(LEASE, COMMAND)
    larger = replace(LEASE, slices=(replace(LEASE.slices[0], memory_mib=1_310),))
    assert not pod.fits(larger, COMMAND)
    assert not pod.fits(replace(LEASE, id="2-abc"), COMMAND)
    assert not pod.fits(LEASE, replace(COMMAND, argv=("R",)))


async def test_what_enforces_a_slice_may_change_while_its_pod_runs() -> None:
    """Such as when the agent of its node is away for a while: the kernel restarts in place all the same."""
    watched = Enforcement(memory=Limit(Strength.COOPERATIVE, "the pool's watchdog"))
    assert running().fits(replace(LEASE, enforcement=watched), COMMAND)
    assert running(enforcement=watched).fits(LEASE, COMMAND)


async def test_whoever_waits_for_a_connection_that_another_gives_up_hears_of_it() -> None:
    asked = asyncio.Event()

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await gone.wait()
        writer.close()

    gone = asyncio.Event()
    async with await asyncio.start_server(silent, "127.0.0.1", 0) as server:
        pod = running("127.0.0.1")
        pod.ports = {"supervisor": server.sockets[0].getsockname()[1]}
        two = [asyncio.create_task(pod.supervisor()) for _ in range(2)]
        await asked.wait()
        pod.lost()
        for each in two:
            with pytest.raises(SupervisorAway, match="was given up"):
                await each
        gone.set()
