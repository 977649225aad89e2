"""Grants per second, against what one would write first: a JSON file under a lock."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import AsyncIterator, Iterator
from dataclasses import astuple
from functools import partial
from pathlib import Path

from filelock import FileLock

from benchmarks.report import Line
from benchmarks.sizes import sized
from benchmarks.store import PROCESSES, Result, Work, measure
from gpu_pool.devices import Inventory
from gpu_pool.embedded.pool import local_pool
from gpu_pool_client import Device, Holder, LeaseState, Process, parse_request

#: Eight GPUs have room for four hundred slices; fifty are left for the processes that are measured.
DEVICES = tuple(Device(f"SIM-{n}", n, "A100-SXM4-80GB", 81920, simulated=True) for n in range(8))
HELD = 350
ROUNDS = sized(2, 1)
SIZE = parse_request("2%")


async def ours(folder: Path, worker: int, held: int) -> AsyncIterator[None]:
    """Acquire and release through the contract, with that many leases held by others."""
    devices = Inventory(DEVICES, "benchmark")
    holder = Holder("bench", process=Process.current())
    count = 0
    async with local_pool(folder / "store.db", find_devices=lambda: devices) as pool:
        for number in range(held if worker == 0 else 0):
            await pool.request(SIZE, holder, f"held-{number}")
        await pool.status()
        while True:
            yield
            lease = await pool.request(SIZE, holder, f"{worker}-{count}")
            assert lease.state is LeaseState.HELD
            await pool.release(lease.id)
            count += 1


async def json_file(folder: Path, worker: int, held: int) -> AsyncIterator[None]:
    """Acquire and release by writing a file anew, first fit, nothing checked."""
    path, lock, count = folder / "pool.json", FileLock(folder / "pool.lock"), 0
    if worker == 0:
        written(path, {f"held-{number}": granted({}, f"held-{number}") for number in range(held)})
    while True:
        key = f"{worker}-{count}"
        yield
        with lock:
            leases = json.loads(path.read_text())
            leases[key] = granted(leases, key)
            written(path, leases)
        with lock:
            leases = json.loads(path.read_text())
            del leases[key]
            written(path, leases)
        count += 1


def granted(leases: dict[str, dict[str, object]], key: str) -> dict[str, object]:
    """Return a lease of the first device with room for it."""
    on = [lease["device"] for lease in leases.values()]
    device = next((device.uuid for device in DEVICES if on.count(device.uuid) < 50), DEVICES[0].uuid)
    return {"key": key, "device": device, "milli": 20, "user": "bench", "pid": os.getpid(), "held_at": 0.0}


def written(path: Path, leases: dict[str, dict[str, object]]) -> None:
    """Replace the file, so that a reader sees the old one or the new one; survives a killed process."""
    draft = path.with_name(f"{path.name}.{os.getpid()}")
    draft.write_text(json.dumps(leases))
    draft.replace(path)


STORES: dict[str, Work] = {
    "ours": partial(ours, held=0),
    "ours full": partial(ours, held=HELD),
    "JSON": partial(json_file, held=0),
    "JSON full": partial(json_file, held=HELD),
}


def run() -> Iterator[Line]:
    """Measure all in turn and yield the report's lines."""
    rounds = [{name: measure(store) for name, store in STORES.items()} for _ in range(ROUNDS)]
    found = {name: _mean([each[name] for each in rounds]) for name in STORES}
    yield _line("pairs, to a JSON file under filelock, empty", found["ours"], found["JSON"])
    yield _line(f"the same, with {HELD} leases held", found["ours full"], found["JSON full"])
    yield Line(
        "least served process to most served, to the JSON file's",
        found["ours"].evenness / max(found["JSON"].evenness, 1e-3),
        f"1 when all are served alike; {PROCESSES} processes",
        ours=found["ours"].evenness,
        yardstick=found["JSON"].evenness,
        unit="of the most",
    )


def _mean(results: list[Result]) -> Result:
    return Result(*(statistics.fmean(each) for each in zip(*map(astuple, results), strict=True)))


def _line(what: str, mine: Result, other: Result) -> Line:
    made_of = f"acquire and release by {PROCESSES} processes, each as often as it can"
    rates = (mine.per_second, other.per_second)
    return Line(what, rates[0] / rates[1], made_of, ours=rates[0], yardstick=rates[1], unit="pairs/s")
