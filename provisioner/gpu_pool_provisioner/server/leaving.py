"""What a Jupyter server does for its kernels when it ends: they go to disk, for the next one."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, Final

from jupyter_core.utils import ensure_async

from gpu_pool_provisioner.provisioner import GPUPoolProvisioner
from gpu_pool_provisioner.server.settings import GPUPoolServer
from gpu_pool_provisioner.settings import SESSION_VARIABLE

#: Kernels that go to disk at once: each is asked first whether it is idle, and some answer late.
_AT_ONCE: Final = 4


async def leave(kernels: Sequence[GPUPoolProvisioner], server: Any) -> None:
    """Let these kernels go to disk, the smallest first; log which could not, and why."""
    within = GPUPoolServer(config=server.config).leave_within
    few, paths = asyncio.Semaphore(_AT_ONCE), await _paths(server)

    async def leave_one(kernel: GPUPoolProvisioner) -> None:
        async with few:
            why = await kernel.leave_image(paths.get(str(kernel.kernel_id), ""))
        if why:
            server.log.warning("The kernel of %s ends with this server. %s", kernel.notebook, why)
            await kernel.sleep.note_not_left(why)
        else:
            server.log.info("The kernel of %s is on disk, for the next server.", kernel.notebook)

    smallest_first = sorted(kernels, key=lambda each: each.leaves_bytes or 0)
    tasks = {asyncio.create_task(leave_one(each)): each for each in smallest_first}
    done, late = await asyncio.wait(tasks, timeout=within)
    for task in late:
        task.cancel()
        kernel, why = tasks[task], f"{within:g} seconds were too few to put it on disk."
        server.log.warning("The kernel of %s ends with this server. %s", kernel.notebook, why)
        await kernel.sleep.note_not_left(why)
    for task in done:
        if (error := task.exception()) is not None:
            server.log.error("A kernel ends with this server: %r", error)


async def _paths(server: Any) -> dict[str, str]:
    """Return the paths of the kernels' notebooks as they are now, by the kernels' ids: some were renamed."""
    sessions = [each for each in await ensure_async(server.session_manager.list_sessions()) if each["kernel"]]
    variables = {
        each["kernel"]["id"]: server.session_manager.get_kernel_env(each["path"], each["name"])
        for each in sessions
    }
    return {kernel_id: each[SESSION_VARIABLE] for kernel_id, each in variables.items()}
