"""A connection that is lost ends nothing: its client asks again."""

from __future__ import annotations

import socket
from contextlib import closing
from pathlib import Path

from gpu_pool_client import LeaseState, connect
from support.pools import eventually, take
from support.service import ForkServer, serving

#: Run by the service first: to hand out a slice that was waited for takes until that is cancelled.
SLOW = """
import asyncio, pathlib
from gpu_pool.enforcement.enforcer import Enforcer

async def restore(self, lease):
    pathlib.Path({folder!r}, "begun").touch()
    try:
        await asyncio.Event().wait()
    finally:
        pathlib.Path({folder!r}, "cut-off").touch()

Enforcer.restore = restore
"""


async def test_a_wait_that_is_cut_off_at_its_end_keeps_the_slice(children: ForkServer, folder: Path) -> None:
    async with serving(children, folder / "pool", "", "--mode=0666") as service:
        await service.end()
        service.prelude = SLOW.format(folder=str(folder))
        await service.start()
        async with connect(service.url) as pool:
            lease = await take(pool, "50%", "key")
            with closing(socket.socket(socket.AF_UNIX)) as connection:
                connection.connect(str(service.socket))
                connection.sendall(f"GET /api/v1/leases/{lease}/wait HTTP/1.1\r\nHost: x\r\n\r\n".encode())
                await eventually((folder / "begun").exists)
            await eventually((folder / "cut-off").exists)
            assert (await pool.get_lease(lease)).state is LeaseState.HELD
