"""What the queue and the placement are set against does what its name says."""

from __future__ import annotations

import random
import sys
from pathlib import Path

from gpu_pool.policy import placement
from gpu_pool.policy.queue_state import Rules
from gpu_pool.simulation import Arrival, simulate
from gpu_pool_client import DeviceStatus, parse_request
from support.pools import device

# The benchmarks are nowhere installed.
sys.path.append(str(Path(__file__).parents[2]))

from benchmarks.queues import at_random, backfill, best_fit, observed, shortest_first, worst_fit
from benchmarks.store import SAME_ROWS, Work, bare, ours, same_rows

V100 = [device(index) for index in range(3)]


def statuses() -> list[DeviceStatus]:
    """Return three devices of which the second is fullest and the third empty."""
    free = [DeviceStatus(each, 0, 0, 0, 0, Rules().device_milli) for each in V100]
    for each, size in ((0, "10%"), (1, "50%")):
        parts = placement.place(parse_request(size), free[each : each + 1], Rules())
        assert parts is not None
        free = placement.deduct(free, parts)
    return free


def test_placements_try_devices_in_their_order() -> None:
    assert [each.device.index for each in best_fit(statuses())] == [1, 0, 2]
    assert [each.device.index for each in worst_fit(statuses())] == [2, 0, 1]
    drawn = {at_random(random.Random(seed), statuses())[0].device.index for seed in range(20)}
    assert drawn == {0, 1, 2}


def test_shortest_first_lets_the_shortest_stay_pass() -> None:
    coming = [
        Arrival(float(n), "", "", parse_request("1"), stay) for n, stay in enumerate((100.0, 50.0, 9.0))
    ]
    outcomes = simulate(coming, V100[:1], shortest_first(coming)).outcomes
    assert [each.arrival.stay for each in outcomes] == [100.0, 9.0, 50.0]


def test_what_is_free_beside_others_counts_as_scattered() -> None:
    seen: list[float] = []
    coming = [Arrival(float(n), "", "", parse_request(size), 100.0) for n, size in enumerate(("40%", "1"))]
    simulate(coming, V100[:2], observed(backfill, seen))
    assert seen[:2] == [0.0, 600 / 1600]


async def pages_written(work: Work, folder: Path, log: str, steps: int) -> int:
    """Return the pages that some steps of a benchmark's work write, entries in indexes included."""
    doing, before = work(folder, 0), 0
    for step in range(2 * steps + 1):  # the first sets it up, and the others come twice: nothing is cold
        before = (folder / log).stat().st_size if step == steps + 1 else before
        await anext(doing)
    written = (folder / log).stat().st_size - before
    await doing.aclose()
    return written // (4096 + 24)


async def test_bare_transactions_of_the_same_rows_write_as_many_pages_as_a_pair(tmp_path: Path) -> None:
    connection = bare(tmp_path)
    connection.execute("PRAGMA journal_mode = WAL")
    connection.executescript(SAME_ROWS)
    of_a_pair = await pages_written(ours, tmp_path, "store.db-wal", 1)
    assert await pages_written(same_rows, tmp_path, "bare.db-wal", 2) == of_a_pair > 0
    connection.close()
