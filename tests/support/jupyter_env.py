"""A Jupyter environment of a test's own: folders, kernelspecs, and a simulated pool of one GPU."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jupyter_client.asynchronous.client import AsyncKernelClient
from jupyter_client.manager import AsyncKernelManager
from traitlets.config import Config

from gpu_pool_client import Holder, Lease, LeaseState, Pool, parse_request
from gpu_pool_client._background import in_background
from gpu_pool_provisioner.driver import SessionDriver
from gpu_pool_provisioner.pools import open_pools, shared_pool
from gpu_pool_provisioner.session import Session
from support.pools import eventually as eventually
from support.tiny_kernel import __file__ as tiny_kernel

IPYKERNEL = (sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}")
#: A kernel of another language.
TINY = (sys.executable, tiny_kernel, "{connection_file}")
#: What stands in front of a kernel that needs no provisioner of ours, up to its options.
WRAP = (sys.executable, "-m", "gpu_pool_provisioner.wrap", "-f", "{connection_file}")
#: A kernel that never answers.
SLEEPER = (sys.executable, "-c", "import time; time.sleep(600)")

Managers = Callable[..., AsyncKernelManager]


@dataclass
class JupyterEnv:
    """Jupyter's folders in ``folder``, with kernelspecs whose kernels get slices of the pool at ``url``."""

    folder: Path
    url: str

    @property
    def pool(self) -> Pool:
        return shared_pool(self.url)

    async def close(self) -> None:
        """Close the pool, if this process has opened it: nothing is done for it after its test."""
        if pool := open_pools.pop((self.url, os.getpid()), None):
            await pool.close()

    async def asking(self, size: str = "2%") -> SessionDriver:
        """Return the session of a kernel that has asked for its slice; it belongs to the background loop."""
        session = Session(parse_request(size), 1.0, 600.0)
        driver = SessionDriver(session, self.url, lambda: Holder("ada"))
        await in_background(driver.ask(60.0))
        return driver

    def install(self, name: str, size: str = "2%", argv: Sequence[str] = IPYKERNEL, **config: Any) -> str:
        """Write a kernelspec whose kernels get a slice, and return its name; ``name`` is what people read.

        A test's bare kernel manager stands for a server's: somebody watches, unless it says ``unattended``.
        """
        config.setdefault("unattended", False)
        language, environment = config.pop("language", "python"), config.pop("env", {})
        metadata, interrupt_mode = config.pop("metadata", {}), config.pop("interrupt_mode", "signal")
        stanza = {"provisioner_name": "gpu-pool", "config": {"slice": size, **config}}
        spec = {
            "argv": list(argv),
            "display_name": name,
            "language": language,
            "env": environment,
            "interrupt_mode": interrupt_mode,
            "metadata": {**metadata, "kernel_provisioner": stanza},
        }
        folder = self.folder / "data" / "kernels" / name.lower().translate({ord(" "): "-", ord("%"): None})
        folder.mkdir(parents=True)
        (folder / "kernel.json").write_text(json.dumps(spec))
        return folder.name

    async def leases(self) -> tuple[Lease, ...]:
        return (await self.pool.status()).leases

    async def only_lease(self) -> Lease:
        (lease,) = await self.leases()
        return lease

    async def fill(self, size: str) -> Lease:
        """Hold a slice in the name of this test's process."""
        return await self.pool.request(
            parse_request(size), Holder("teacher"), key=f"fill-{time.monotonic_ns()}"
        )

    async def has_queue(self) -> bool:
        return bool((await self.pool.status()).queue)

    async def is_parked(self) -> bool:
        """Whether some kernel's slice is lent to others."""
        return any(lease.state is LeaseState.PARKED for lease in await self.leases())

    async def is_empty(self) -> bool:
        status = await self.pool.status()
        return not status.leases and not status.queue


def restarting_soon(limit: int = 5) -> Config:
    """Configure a manager that looks for dead kernels often, and restarts them."""
    return Config(KernelRestarter={"time_to_dead": 0.2, "restart_limit": limit})


async def started_kernel(manager: AsyncKernelManager, **options: Any) -> AsyncKernelManager:
    """Start the kernel of a manager, and return that."""
    await manager.start_kernel(**options)
    return manager


async def answer(manager: AsyncKernelManager, code: str = "", within: float = 120) -> str:
    """Wait until the kernel answers; return what ``code`` prints."""
    return await printed_by(manager.client(), code, within)


async def printed_by(client: AsyncKernelClient, code: str = "", within: float = 120) -> str:
    """Wait until the client's kernel answers; return what ``code`` prints."""
    client.start_channels(hb=False)  # a kernel that is slow to start has no heart yet
    printed: list[str] = []

    def keep(message: dict[str, Any]) -> None:
        if message["msg_type"] == "stream":
            printed.append(message["content"]["text"])

    try:
        await client.wait_for_ready(timeout=within)
        if code:
            await client.execute_interactive(code, output_hook=keep, timeout=within)
    finally:
        client.stop_channels()
    return "".join(printed)


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def is_running(pid: int) -> bool:
    """Whether a process that may be nobody's child runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] not in (b"Z", b"X")
    except FileNotFoundError:
        return False
