"""A backend of another package: found by its entry point, with a queue of somebody else's."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpu_pool.pool.pool import Pool
from gpu_pool_client import _pool, connect
from support.passes import NO_PASSES
from support.pools import held_milli, take
from support.racks import RackBackend, open_racks


async def test_it_is_found_by_the_scheme_of_its_url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "racks-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: racks\nVersion: 1\n")
    opens = f"racks = {open_racks.__module__}:{open_racks.__name__}"
    (info / "entry_points.txt").write_text(f"[{_pool.BACKENDS}]\n{opens}\n")
    monkeypatch.syspath_prepend(tmp_path)
    async with connect(f"racks:{tmp_path}/store.db") as pool:
        lease = await take(pool, "50%", "key")
        assert await held_milli(pool) == 500
        assert isinstance(pool, Pool)
        assert isinstance(pool.backend, RackBackend)
        assert pool.backend.bound == {lease}


async def test_what_waits_in_somebody_elses_queue_holds_nothing_until_it_is_let_in(tmp_path: Path) -> None:
    async with open_racks(f"racks:{tmp_path}/store.db", tuning=NO_PASSES) as pool:
        assert isinstance(pool.backend, RackBackend)
        outside = pool.backend.outside
        outside.is_full = True
        waits = await take(pool, "1", "waits")
        await pool.core.reconciler.once()
        assert (await held_milli(pool), pool.backend.bound) == (0, set())
        outside.is_full = False
        other = await take(pool, "1", "other")
        await pool.core.reconciler.once()
        assert (await held_milli(pool), pool.backend.bound) == (1000, {other})
        await pool.release(other)
        outside.let_in(waits)
        await pool.core.reconciler.once()
        assert (await held_milli(pool), pool.backend.bound) == (1000, {waits})
        outside.is_full = True
        given_up = await take(pool, "1", "given-up")
        await pool.release(given_up)
        assert given_up not in outside.waiting
