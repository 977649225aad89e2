"""What a Jupyter server does for its kernels when it ends: they go to disk, for the next one."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Iterable, Sequence
from typing import Any, Final

from jupyter_core.utils import ensure_async

from gpu_pool_provisioner.provisioner import GPUPoolProvisioner
from gpu_pool_provisioner.server.settings import GPUPoolServer
from gpu_pool_provisioner.settings import SESSION_VARIABLE

#: Kernels that go to disk at once: each is asked first whether it is idle, and some answer late.
_AT_ONCE: Final = 4
#: Bytes of kernels that go to disk at once, unless it is one alone: a small one is not to be late for those.
_BYTES_AT_ONCE: Final = 256 << 20


async def leave(kernels: Sequence[GPUPoolProvisioner], server: Any) -> None:
    """Let these kernels go to disk, the smallest first; log which could not, and why."""
    within = GPUPoolServer(config=server.config).leave_within
    give_up_at = time.monotonic() + within
    paths, going = await _paths(server), dict[asyncio.Task[None], int]()

    async def leave_one(kernel: GPUPoolProvisioner) -> None:
        why = await kernel.leave_image(paths.get(str(kernel.kernel_id), ""))
        if why:
            await _ends(kernel, why, server)
        else:
            server.log.info("The kernel of %s is on disk, for the next server.", kernel.notebook)

    tasks: dict[GPUPoolProvisioner, asyncio.Task[None]] = {}
    for size, kernel in await asyncio.to_thread(_sized, kernels, server):
        while not _has_room(going.values(), size) and (left := give_up_at - time.monotonic()) > 0:
            done, _ = await asyncio.wait(going, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            for each in done:
                del going[each]
        if time.monotonic() < give_up_at:
            task = tasks[kernel] = asyncio.create_task(leave_one(kernel))
            going[task] = size
    if going:
        await asyncio.wait(going, timeout=max(0.0, give_up_at - time.monotonic()))
    late = [each for each in kernels if each not in tasks or not tasks[each].done()]
    for kernel, task in tasks.items():
        if kernel in late:
            task.cancel()
        elif (error := asyncio.CancelledError() if task.cancelled() else task.exception()) is not None:
            server.log.error("The kernel of %s ends with this server: %r", kernel.notebook, error)
            what = error.strerror if isinstance(error, OSError) else ""
            await _note(kernel, f"It could not be written to disk{f' ({what})' if what else ''}.", server)
    for kernel in late:
        seconds = f"{within:g} second{'' if within == 1 else 's'}"
        await _ends(kernel, f"It was not on disk within {seconds}.", server)


async def _ends(kernel: GPUPoolProvisioner, why: str, server: Any) -> None:
    """Say in the log, and to who opens its notebook next, that a kernel ends with its server."""
    server.log.warning("The kernel of %s ends with this server. %s", kernel.notebook, why)
    await _note(kernel, why, server)


async def _note(kernel: GPUPoolProvisioner, why: str, server: Any) -> None:
    """Say to who opens a kernel's notebook next that it has ended with its server."""
    try:
        await kernel.sleep.note_not_left(why)
    except Exception:  # the others are to have their note
        server.log.exception("Whoever opens %s next does not read why its kernel is gone.", kernel.notebook)


def _sized(kernels: Iterable[GPUPoolProvisioner], server: Any) -> list[tuple[int, GPUPoolProvisioner]]:
    """Return how many bytes each takes at most, the smallest first. Blocks."""
    return sorted(((_size(each, server), each) for each in kernels), key=lambda each: each[0])


def _size(kernel: GPUPoolProvisioner, server: Any) -> int:
    """Return how many bytes it takes; a size that is not known is larger than all others."""
    try:
        return kernel.leaves_bytes()
    except Exception:  # it is tried all the same
        server.log.exception("How much the kernel of %s takes on disk is not known.", kernel.notebook)
        return sys.maxsize


def _has_room(going: Iterable[int], size: int) -> bool:
    """Whether a kernel of so many bytes may go to disk beside those."""
    sizes = [*going, size]
    return len(sizes) == 1 or (len(sizes) <= _AT_ONCE and sum(sizes) <= _BYTES_AT_ONCE)


async def _paths(server: Any) -> dict[str, str]:
    """Return the paths of the kernels' notebooks as they are now, by the kernels' ids: some were renamed.

    Those are left out that are not known: a kernel has the path with which it was started.
    """
    found: dict[str, str] = {}
    try:
        for each in await ensure_async(server.session_manager.list_sessions()):
            if each["kernel"]:
                variables = server.session_manager.get_kernel_env(each["path"], each["name"])
                found[each["kernel"]["id"]] = variables.get(SESSION_VARIABLE, "")
    except Exception:  # a session manager of somebody else's; it must keep no kernel from disk
        server.log.exception("The notebooks of some kernels are not known by their names of now.")
    return found
