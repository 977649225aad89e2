"""A slice is given back whatever becomes of the first attempts."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from gpu_pool_client import EndReason, GpuPoolError, LeaseState, NotAllowed, PoolUnreachable
from support.pools import embedded, eventually, take


@pytest.mark.parametrize(
    "first",
    [
        asyncio.CancelledError(),
        PoolUnreachable("The pool is away."),
        GpuPoolError("Internal error in the pool."),
        NotAllowed("The token is not known."),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_what_was_not_heard_the_first_time_is_given_back_by_the_next_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: BaseException
) -> None:
    async with embedded(tmp_path / "store.db") as pool:
        lease_id, release, fails = await take(pool, "2%", "key"), pool.release, iter([first])

        async def fail_once(lease_id: str, reason: EndReason = EndReason.RELEASED) -> None:
            for error in fails:
                raise error
            await release(lease_id, reason)

        monkeypatch.setattr(pool, "release", fail_once)
        await pool.give_back(lease_id)
        found = await eventually(
            lambda: pool.get_lease(lease_id), lambda lease: lease.state is LeaseState.ENDED
        )
        assert found.end_reason is EndReason.RELEASED


async def test_what_has_failed_for_a_fault_of_this_program_can_be_given_back_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with embedded(tmp_path / "store.db") as pool:
        lease_id, release = await take(pool, "2%", "key"), pool.release

        async def fault(*_: object) -> None:
            raise ZeroDivisionError("a fault")

        monkeypatch.setattr(pool, "release", fault)
        await pool.give_back(lease_id)
        assert f"GPU lease {lease_id} ends when its process is seen gone: a fault" in caplog.text
        monkeypatch.setattr(pool, "release", release)
        await pool.give_back(lease_id)
        assert (await pool.get_lease(lease_id)).state is LeaseState.ENDED
