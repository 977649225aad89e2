"""What the Hub learns from a pool, and what it does where there is none."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from gpu_pool_client import Holder, Pool, SliceRequest, connect, parse_request
from gpu_pool_spawner import pool_view
from gpu_pool_spawner.pool_view import PoolView

HALF, MOST, SMALL = (parse_request(text) for text in ("50%", "60%", "2%"))
OFFERED = [("ml", MOST), ("ml", SMALL), ("art", HALF)]


@pytest.fixture
def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return the URL of a pool over a simulated V100, with a quota for one course."""
    monkeypatch.setenv("GPU_POOL_DEVICES", "V100-SXM2-32GB:1")
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path))
    courses = {"ml": {"longest_lease": "4h"}, "art": {"quota": {"share": "10%"}}}
    (tmp_path / "gpu_pool_config.py").write_text(f"c.PoolSettings.courses = {courses}\n")
    return f"embedded:{tmp_path}/store.db"


async def take(pool: Pool, request: SliceRequest, key: str, user: str = "ada") -> str:
    return (await pool.request(request, Holder(user, "ml"), key)).id


@pytest.mark.parametrize("url", ["unix:{}/nobody.sock", "nonsense:"])
async def test_a_pool_that_cannot_be_asked_is_none(tmp_path: Path, url: str) -> None:
    assert await PoolView(url.format(tmp_path)).supply(OFFERED) is None


async def test_what_is_free_has_no_wait(url: str) -> None:
    supply = await PoolView(url, within=60.0).supply(OFFERED[:2])
    assert supply is not None
    assert [status.free_milli for status in supply.devices] == [1000]
    assert (supply.waits, supply.simulated) == ({}, True)


async def test_where_none_is_free_the_wait_is_that_of_somebody_new(url: str) -> None:
    async with connect(url) as pool:
        for number in range(30):
            await pool.release(await take(pool, SMALL, f"before-{number}"))
        await take(pool, MOST, "held")
        # Nobody waits in the queue yet.
        alone = await PoolView(url, within=60.0).supply(OFFERED)
        await take(pool, MOST, "waits")
        behind = await PoolView(url, within=60.0).supply(OFFERED)
    assert alone is not None
    assert behind is not None
    assert (alone.waits.keys(), alone.refusals.keys()) == ({("ml", MOST)}, {("art", HALF)})
    # "About" or "up to": by how different the times are for which slices were held, on a busy machine.
    assert alone.waits["ml", MOST].startswith("a wait of perhaps ")
    assert behind.waits["ml", MOST].startswith("a wait of perhaps ")
    assert ("ml", SMALL) not in behind.waits  # there is room for it beside those who wait
    async with connect(url) as pool:
        assert [lease.key for lease in (await pool.status()).queue] == ["waits"]


async def test_where_nothing_is_known_of_the_wait_the_place_is_told(url: str) -> None:
    async with connect(url) as pool:
        await take(pool, MOST, "held")
        first = await PoolView(url, within=60.0).supply(OFFERED)
        await take(pool, MOST, "waits", "grace")
        second = await PoolView(url, within=60.0).supply(OFFERED)
    assert first is not None
    assert second is not None
    assert first.waits["ml", MOST] == "you would be next in the queue"
    assert second.waits["ml", MOST] == "1 in the queue before you"


async def test_what_a_quota_forbids_is_told(url: str) -> None:
    async with connect(url) as pool:
        await take(pool, MOST, "held")
        supply = await PoolView(url, within=60.0).supply(OFFERED)
    assert supply is not None
    assert ("art", HALF) not in supply.waits
    assert supply.refusals["art", HALF] == (
        "Together, art may hold 10% of a GPU at most; you asked for 50% of a GPU. Ask for at most 10%."
    )


async def test_what_no_gpu_of_the_pool_could_ever_hold_is_told(url: str) -> None:
    large = parse_request("64GiB")
    supply = await PoolView(url, within=60.0).supply([("ml", large)])
    assert supply is not None
    assert supply.waits == {}
    assert supply.refusals["ml", large].startswith("You asked for 64GiB; the largest GPU here")


async def test_everybody_gets_one_answer(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def counted(name: str, ask: Callable[..., object]) -> Callable[..., object]:
        return lambda *given: asked.append(name) or ask(*given)

    async with connect(url) as pool:
        await take(pool, MOST, "held")
        for name in ("status", "forecast"):
            monkeypatch.setattr(pool, name, counted(name, getattr(pool, name)))
        monkeypatch.setattr(pool_view, "connect", lambda _: pool)
        view = PoolView(url, within=60.0)
        supplies = await asyncio.gather(*(view.supply(OFFERED[:2]) for _ in range(20)))
    assert len({str(each) for each in supplies}) == 1
    assert sorted(asked) == ["forecast", "forecast", "status"]
