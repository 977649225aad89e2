"""Taking a slice: what was asked for and not got is withdrawn."""

from __future__ import annotations

import pytest

from gpu_pool.cli.requesting import acquire
from gpu_pool_client import EndReason, Holder, LeaseState, Process, TimedOut, connect, parse_request

SIZE = parse_request("2%")


@pytest.mark.parametrize(
    ("timeout", "said"), [(0, ""), (0.2, "gpu-pool: waiting for 2%: 1st in the queue\n")]
)
async def test_a_request_that_timed_out_is_withdrawn(terminal, capfd, timeout, said):
    async with connect() as pool:
        await pool.request(parse_request("100%"), Holder("somebody"), "all")
        with pytest.raises(TimedOut):
            await acquire(pool, SIZE, "mine", "test", Process.current(), timeout)
        mine = await pool.request(SIZE, Holder("me"), "mine")
    assert (mine.state, mine.end_reason) == (LeaseState.ENDED, EndReason.WITHDRAWN)
    assert capfd.readouterr().err == said
