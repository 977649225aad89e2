"""What a service says and does while there is no room on its store's disk. The disk is real."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpu_pool_client import Pool, PoolUnreachable, connect
from gpu_pool_client._remote.exchange import ask
from support.disks import small_disk
from support.pools import eventually, take
from support.service import ForkServer, Service, serving


async def health(service: Service) -> tuple[int, str]:
    answer = await ask(service.socket, "GET", "/api/v1/health", None, 60)
    return answer.status, str(json.loads(answer.body).get("message"))


async def until_refused(pool: Pool) -> None:
    """Ask until the room that the store has is used up."""
    for number in range(1_000):
        await take(pool, "2%", f"more-{number}")


async def test_a_full_disk_is_called_so_the_pool_is_shown_and_releases_go_through_later(
    children: ForkServer, folder: Path, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk") as disk:
        store = f"--store={disk.path / 'store.db'}"
        async with serving(children, folder / "pool", "", store) as service, connect(service.url) as pool:
            lease = await take(pool, "10%", "key")
            disk.fill()

            async def is_told() -> bool:
                status, message = await health(service)
                return status == 503 and f"the disk at {disk.path}: it is full" in message

            with pytest.raises(PoolUnreachable, match="it is full"):
                await until_refused(pool)
            await eventually(is_told)
            assert lease in {each.id for each in (await pool.status()).leases}
            assert service.log.count("The pool cannot be written") == 1
            disk.empty()
            await pool.release(lease)
            assert lease not in {each.id for each in (await pool.status()).leases}
            await eventually(lambda: health(service), lambda seen: seen[0] == 200)
            assert "The pool can be written again" in service.log
