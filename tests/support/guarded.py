"""A guard in a process of its own, whose NVML is the stub and whose clock is the test's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpu_pool.embedded.pool import EmbeddedPool
from gpu_pool_client import Device, EndedLease, Holder, Lease, Process, parse_request
from support.pools import embedded

_GUARD = """
import json, logging, sys
from pathlib import Path
from gpu_pool.devices import sampling
from gpu_pool.enforcement.watchdog import OwnStore, WatchdogRules, WatchdogThread
from gpu_pool.settings import PoolSettings
from gpu_pool_client._processes import pid_namespace

logged, evicted, now = [], [], [0.0]
handler = logging.Handler()
handler.emit = lambda record: logged.append(record.getMessage())
logging.getLogger("gpu_pool.watchdog").addHandler(handler)
logging.getLogger("gpu_pool.watchdog").setLevel("INFO")
sampling.FIRST_NAMESPACE = pid_namespace()  # the tests may run in a container
settings = PoolSettings(**json.loads(sys.argv[2]))
store = OwnStore(Path(sys.argv[1]), settings)
rules = WatchdogRules.of(settings, auto="end")
guard = WatchdogThread(store, rules, evict=lambda lease, pids: evicted.extend(pids), clock=lambda: now[0])
for line in sys.stdin:
    now[0] += float(line)
    guard.look()
    told = {"unmanaged": [each.process.pid for each in guard.unmanaged], "problems": guard.problems}
    print(json.dumps({**told, "logged": logged, "evicted": evicted}), flush=True)
guard.start()
guard.stop()
"""


@dataclass
class Guarded:
    """A pool, the cards that the driver tells of, and the guard."""

    pool: EmbeddedPool
    folder: Path
    guard: subprocess.Popen[str]

    def scene(self, *lines: str) -> None:
        """Change what the driver says, at once."""
        draft = self.folder / "draft.txt"
        draft.write_text("driver 550.54.14\n" + "".join(f"{line}\n" for line in lines))
        draft.replace(self.folder / "scenario.txt")

    async def hold(self, size: str, process: Process, key: str = "key") -> Lease:
        """Take a slice for a process."""
        lease = await self.pool.request(parse_request(size), Holder("ada", "ml101"), key)
        return await self.pool.attach(lease.id, process)

    async def history(self) -> EndedLease:
        """Return what became of the only lease that has ended."""
        (row,) = await self.pool.history()
        return row

    def look(self, seconds: float = 1.0, times: int = 1) -> dict[str, Any]:
        """Let so much time pass and the guard look, so many times; return what it says at last."""
        assert self.guard.stdin is not None
        assert self.guard.stdout is not None
        said = ""
        for _ in range(times):
            self.guard.stdin.write(f"{seconds}\n")
            self.guard.stdin.flush()
            said = self.guard.stdout.readline()
        found: dict[str, Any] = json.loads(said)
        return found


@asynccontextmanager
async def guarded(folder: Path, library: Path, *devices: Device, **settings: Any) -> AsyncIterator[Guarded]:
    """Guard a pool of these devices, in ``folder``; ``library`` is where the stub was built.

    When the guard has ended it must have complained about nothing.
    """
    pool = embedded(folder / "store.db", *devices)
    guard = _start(folder, library, settings)
    try:
        yield Guarded(pool, folder, guard)
        _, complaints = guard.communicate(timeout=120)
        assert (complaints, guard.returncode) == ("", 0)
    finally:
        guard.kill()
        guard.communicate()
        await pool.close()


def _start(folder: Path, library: Path, settings: dict[str, Any]) -> subprocess.Popen[str]:
    scenario = folder / "scenario.txt"
    scenario.write_text("driver 550.54.14\n")
    stub = {"LD_LIBRARY_PATH": str(library), "NVML_STUB_SCENARIO": str(scenario)}
    return subprocess.Popen(
        [sys.executable, "-c", _GUARD, str(folder / "store.db"), json.dumps(settings)],
        env={**os.environ, **stub},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
