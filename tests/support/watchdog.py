"""A watchdog in a process of its own, whose NVML is the stub and whose clock is the test's."""

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

from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import Device, EndedLease, Holder, Lease, Process, parse_request
from support.pools import embedded

_WATCHDOG = """
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
watchdog = WatchdogThread(store, rules, evict=lambda lease, pids: evicted.extend(pids), clock=lambda: now[0])
for line in sys.stdin:
    now[0] += float(line)
    watchdog.measure()
    told = {"unmanaged": [each.process.pid for each in watchdog.unmanaged], "problems": watchdog.problems}
    print(json.dumps({**told, "logged": logged, "evicted": evicted}), flush=True)
watchdog.start()
watchdog.stop()
"""


@dataclass
class WatchedPool:
    """A pool, the cards that the driver tells of, and the watchdog."""

    pool: GpuPool
    folder: Path
    watchdog: subprocess.Popen[str]

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
        """Let so much time pass and the watchdog look, so many times; return what it says at last."""
        assert self.watchdog.stdin is not None
        assert self.watchdog.stdout is not None
        said = ""
        for _ in range(times):
            self.watchdog.stdin.write(f"{seconds}\n")
            self.watchdog.stdin.flush()
            said = self.watchdog.stdout.readline()
        found: dict[str, Any] = json.loads(said)
        return found


@asynccontextmanager
async def watched_pool(
    folder: Path, library: Path, *devices: Device, **settings: Any
) -> AsyncIterator[WatchedPool]:
    """Watch a pool of these devices, in ``folder``; ``library`` is where the stub was built.

    When the watchdog has ended it must have complained about nothing.
    """
    pool = embedded(folder / "store.db", *devices)
    watchdog = _start(folder, library, settings)
    try:
        yield WatchedPool(pool, folder, watchdog)
        _, complaints = watchdog.communicate(timeout=120)
        assert (complaints, watchdog.returncode) == ("", 0)
    finally:
        watchdog.kill()
        watchdog.communicate()
        await pool.close()


def _start(folder: Path, library: Path, settings: dict[str, Any]) -> subprocess.Popen[str]:
    scenario = folder / "scenario.txt"
    scenario.write_text("driver 550.54.14\n")
    stub = {"LD_LIBRARY_PATH": str(library), "NVML_STUB_SCENARIO": str(scenario)}
    return subprocess.Popen(
        [sys.executable, "-c", _WATCHDOG, str(folder / "store.db"), json.dumps(settings)],
        env={**os.environ, **stub},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
