"""Root of a container is somebody like any other to a service outside, whatever its process is called."""

from __future__ import annotations

import json

from gpu_pool_client import LeaseState, Pool
from support.disguises import TAKE_NAME, needs_root, root_of_a_container
from support.pools import take
from support.service import Service

pytestmark = needs_root

#: Tries whatever an administrator may, and says what came of it.
_ATTACK = """
import asyncio, json, sys, uuid
from gpu_pool_client import GpuPoolError, Holder, connect, parse_request

async def act(url, theirs):
    async with connect(url) as pool:
        mine = await pool.request(parse_request("2%"), Holder("root"), uuid.uuid4().hex)
        refused = {}
        for name, attempt in (
            ("drain", pool.drain("0")), ("release", pool.release(theirs)), ("lease", pool.get_lease(theirs)),
        ):
            try:
                await attempt
            except GpuPoolError as error:
                refused[name] = error.code
        seen = [lease.id for lease in (await pool.status()).leases]
        print(json.dumps([mine.id, mine.holder.user, seen, refused]), flush=True)
        sys.stdin.readline()

asyncio.run(act(*sys.argv[1:]))
"""


NAMES = (b"python", b"a\rNSpid:\t1", b"a\x0bNSpid:\t1", b"a\x1cUid:\t0")


async def test_root_of_a_container_neither_drains_nor_sees_nor_ends(service: Service, pool: Pool) -> None:
    ours = await take(pool, "2%", "outside")
    for name in NAMES:
        code = TAKE_NAME.format(name=name) + _ATTACK
        with root_of_a_container(code, service.url, ours) as attacker:
            assert attacker.stdout is not None
            mine, user, seen, refused = json.loads(attacker.stdout.readline())
            assert (user, seen) == ("uid-0", [mine])
            # To release what is not there is no error; it is there still, as the last line says.
            assert refused == {"drain": "not-allowed", "lease": "lease-gone"}
            attacker.communicate("\n")
        assert not (await pool.status()).devices[0].drained
        assert (await pool.get_lease(ours)).state is LeaseState.HELD
