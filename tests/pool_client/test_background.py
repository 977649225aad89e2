"""The background loop, asked from event loops that are not this process's alone."""

from __future__ import annotations

import subprocess
import sys

#: Children that share the event loop of their parent, as those of multiprocessing do that are forked.
FORKED = """
import asyncio, os
from gpu_pool_client._background import in_background

async def ask():
    for number in range(300):
        assert await in_background(asyncio.sleep(0, number)) == number

loop = asyncio.new_event_loop()
loop.run_until_complete(asyncio.sleep(0))
children = []
for _ in range(3):
    child = os.fork()
    if child == 0:
        loop.run_until_complete(ask())
        os._exit(0)
    children.append(child)
print([os.waitpid(child, 0)[1] for child in children])
"""


def test_forked_children_that_share_an_event_loop_are_all_answered() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKED], capture_output=True, text=True, timeout=300, check=True
    )
    assert done.stdout == "[0, 0, 0]\n"
