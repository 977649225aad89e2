"""A slice in a Docker container: its command line, its process, and its end."""

from __future__ import annotations

import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from gpu_pool.cli.screen import note
from gpu_pool.enforcement.hami_core import LOCKS
from gpu_pool_client import BadRequest, GpuPoolError, Lease, NotAllowed, Pool, Process

DOCKER: Final = "docker"
_LABEL: Final = "org.jupyter.gpu-pool.lease"
#: Seconds between two looks for the container, which Docker takes a moment to start.
_EVERY: Final = 0.1
#: Seconds in which Docker answers a question about a container.
_ANSWERS_WITHIN: Final = 30.0
#: Where a client of MPS finds its daemon; both also need the same shared memory.
_MPS: Final = "CUDA_MPS_PIPE_DIRECTORY"
#: The file in which HAMi-core's processes share their limits; the first of them makes it.
_HAMI: Final = "CUDA_DEVICE_MEMORY_SHARED_CACHE"


class Container:
    """The container on a lease, known by a label that Docker keeps with it."""

    def __init__(self, lease: Lease, hami_locks: Path = LOCKS) -> None:
        """``hami_locks`` is where HAMi-core keeps the lock that is one for the whole machine."""
        self._hami_locks = hami_locks
        # Docker numbers the GPUs of a container from 0, whichever they are.
        self._lease = lease.named_by_uuid()
        self._label = f"{_LABEL}={lease.id}"

    def command(self, arguments: tuple[str, ...]) -> list[str]:
        """Return the command that runs the container: our options, then whatever the user wrote.

        With an init of its own, since a program that is the first process of a
        container ignores SIGTERM. Variables are named and not written: what is
        an argument, everybody reads.
        """
        lease = self._lease
        command = [DOCKER, "run", "--rm", "--init", "--interactive", "--label", self._label]
        if sys.stdin.isatty() and sys.stdout.isatty():
            command.append("--tty")
        real = [part.device.uuid for part in lease.slices if not part.device.simulated]
        if real:
            # Docker splits at commas, unless the whole is quoted.
            command += ["--gpus", f'"device={",".join(real)}"']
        for name in lease.environment:
            command += ["--env", name]
        for path in sorted(_paths(lease.variables, self._hami_locks)):
            command += ["--volume", f"{path}:{path}"]
        if _MPS in lease.variables:
            command += ["--ipc", "host"]
        return [*command, *arguments]

    async def attach(self, pool: Pool) -> None:
        """Tie the lease to the container's own process, once that runs and where the pool lets us."""
        try:
            await pool.attach(self._lease.id, await self._process())
        except (BadRequest, NotAllowed) as error:  # it may be another user's process
            note(f"the lease stays attached to this program instead of the container. {error}")
        except GpuPoolError:
            return  # whoever follows the lease says so

    async def _process(self) -> Process:
        """Return the container's first process, once it runs."""
        while True:
            found = await asyncio.to_thread(self._find_process)
            if found is not None:
                return found
            await asyncio.sleep(_EVERY)

    def _find_process(self) -> Process | None:
        pids = (_ask("inspect", "--format", "{{.State.Pid}}", name) for name in self._names())
        return next((found for pid in pids if (found := Process.of(int(pid or 0))) is not None), None)

    async def stop(self, grace: float) -> None:
        """End the container: SIGTERM, and SIGKILL after so many seconds."""
        if names := await asyncio.to_thread(self._names):
            await asyncio.to_thread(_ask, "stop", "-t", f"{grace:.0f}", *names)
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """End the container at once, if it still is there."""
        if names := self._names():
            _ask("rm", "--force", *names)

    def _names(self) -> list[str]:
        return _ask("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={self._label}").split()


def _ask(*words: str) -> str:
    """Say something to Docker; return its answer, empty if there is none."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [DOCKER, *words], capture_output=True, text=True, timeout=_ANSWERS_WITHIN, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def _paths(variables: Mapping[str, str], hami_locks: Path) -> set[Path]:
    """Return the files and folders by which a tier enforces a slice."""
    named = {name: Path(value) for name, value in variables.items() if value.startswith("/")}
    # Not the file itself, which is not there until a process of the container makes it.
    file = named.pop(_HAMI, None)
    more = {file.parent, hami_locks} if file else set()
    return {path for path in {*named.values(), *more} if path.exists() and not _is_anothers_link(path)}


def _is_anothers_link(path: Path) -> bool:
    """Whether another user says where it leads: Docker, which is root, would mount whatever that is."""
    return path.is_symlink() and path.lstat().st_uid not in (0, os.geteuid())
