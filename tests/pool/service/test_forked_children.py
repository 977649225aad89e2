"""A service that was killed answers nobody any more, though a child that was forked from it lives on."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from support.hub import Hub, serving_hub
from support.pools import eventually
from support.service import ForkServer, is_closed

#: Forks a child once there is a file, and says its pid in another one.
FORKS = """
import os, signal, threading, time
def fork():
    while not os.path.exists({asked!r}):
        time.sleep(0.01)
    if not (child := os.fork()):
        signal.pause()
    with open({said!r} + ".new", "w") as file:
        file.write(str(child))
    os.rename({said!r} + ".new", {said!r})
threading.Thread(target=fork, daemon=True).start()
"""


@pytest.mark.timeout(300)
async def test_its_clients_are_told_and_the_next_one_is_served(
    children: ForkServer, hub: Hub, folder: Path, tmp_path: Path
) -> None:
    asked, said = tmp_path / "asked", tmp_path / "said"
    async with serving_hub(children, hub, folder / "pool") as behind:
        service = behind.service
        await service.end()
        service.prelude = FORKS.format(asked=str(asked), said=str(said))
        await service.start()
        with socket.socket(socket.AF_UNIX) as local, socket.socket() as remote:
            local.connect(str(service.socket))
            remote.connect(("127.0.0.1", hub.service_port))
            # Both are served by the time at which another one has its answer.
            token = await hub.token("ada")
            assert (await behind.ask(token, "GET", "/status"))[0] == 200
            asked.touch()
            await eventually(said.exists)
            child = int(said.read_text())
            try:
                await service.end(signal.SIGKILL)
                await eventually(lambda: is_closed(local) and is_closed(remote))
                service.prelude = ""
                await service.start()
                assert (await behind.ask(token, "GET", "/status"))[0] == 200
                os.kill(child, 0)  # it lives
            finally:
                os.kill(child, signal.SIGKILL)
