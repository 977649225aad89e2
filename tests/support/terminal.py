"""A terminal per test: the real program in real processes, over a simulated pool of one GPU."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from gpu_pool_client import Holder, Lease, Pool, PoolStatus, connect, parse_request
from support.service import ForkServer

T = TypeVar("T")
GPU_POOL = (sys.executable, "-m", "gpu_pool.cli")
#: What Python and the loader of libraries read when a process starts, and never again.
_READ_AT_THE_START = {"LD_PRELOAD", "PYTHONPATH"}


@dataclass
class Terminal:
    """Where people type."""

    children: ForkServer
    folder: Path
    environment: dict[str, str]
    started: list[subprocess.Popen[str]] = field(default_factory=list)

    def run(
        self, *words: str, env: Mapping[str, str] | None = None, cwd: Path | None = None, given: str = ""
    ) -> subprocess.CompletedProcess[str]:
        """Run ``gpu-pool WORDS`` to its end, where possible in a process that has imported it."""
        environment = {**self.environment, **(env or {})}
        if environment.keys() & _READ_AT_THE_START:
            return self.call(*GPU_POOL, *words, env=environment, cwd=cwd, input=given)
        children = self.children.finding(environment.get("LD_LIBRARY_PATH", ""))
        return children.run(*words, environment=environment, cwd=cwd, given=given)

    def call(self, *command: str, **settings: Any) -> subprocess.CompletedProcess[str]:
        """Run any command to its end."""
        environment = {**self.environment, **settings.pop("env", {})}
        return subprocess.run(
            command, env=environment, capture_output=True, text=True, timeout=300, check=False, **settings
        )

    def start(
        self,
        *words: str,
        program: tuple[str, ...] = GPU_POOL,
        environment: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[str]:
        """Start ``gpu-pool WORDS``, or another program, in a process group of its own."""
        process = subprocess.Popen(
            [*program, *words],
            env={**self.environment, **(environment or {})},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            preexec_fn=_as_from_a_shell,
        )
        self.started.append(process)
        return process

    def status(self) -> PoolStatus:
        """Return the pool as this test's process sees it."""
        return self.ask(lambda pool: pool.status())

    def lease(self, lease_id: str) -> Lease:
        """Return a lease, or what it was when it ended."""
        return self.ask(lambda pool: pool.get_lease(lease_id))

    def is_empty(self) -> bool:
        """Whether nothing is held and nobody waits."""
        status = self.status()
        return not status.leases and not status.queue

    def hold(self, size: str) -> str:
        """Hold a slice in the name of this test's process; return the lease's id."""
        request, key = parse_request(size), f"test-{time.monotonic_ns()}"
        return self.ask(lambda pool: pool.request(request, Holder("somebody"), key)).id

    def free(self, lease_id: str) -> None:
        """Give a slice back."""
        self.ask(lambda pool: pool.release(lease_id))

    def ask(self, question: Callable[[Pool], Awaitable[T]]) -> T:
        """Ask the pool something in the name of this test's process."""

        async def asked() -> T:
            async with connect(self.environment["GPU_POOL_URL"]) as pool:
                return await question(pool)

        return asyncio.run(asked())


def _as_from_a_shell() -> None:
    """Give a child its own group, and the signals that whoever runs the tests may ignore, as nohup does."""
    os.setpgrp()
    for signum in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_DFL)


def eventually(condition: Callable[[], bool], within: float = 120) -> None:
    """Wait until the condition holds, or fail."""
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"{condition} did not come true in {within} s"
        time.sleep(0.05)
