"""The program behind ``gpu-pool serve``: its settings, its start and its end."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import resource
import signal
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from jupyter_core.paths import jupyter_config_path
from traitlets import Integer, List, TraitError, Unicode, default
from traitlets.config import Application as Program
from traitlets.config import Config

from gpu_pool.embedded import EmbeddedPool, ledger_path
from gpu_pool.service.answering import UnderWay
from gpu_pool.service.callers import PeerIdentity
from gpu_pool.service.changes import Changes
from gpu_pool.service.desk import Desk
from gpu_pool.service.handlers import application
from gpu_pool.service.hidepid import check_processes_are_seen
from gpu_pool.service.listening import ServiceSocket
from gpu_pool.service.server import PeerServer
from gpu_pool.settings import load_settings
from gpu_pool_client import BadRequest, NotAllowed
from gpu_pool_client.remote.addresses import own_socket

#: Seconds in which the answers under way have been given once the service is to stop.
_STOP_WITHIN: Final = 10.0


class ServeApp(Program):
    """Serves the pool of this machine on a Unix socket. Settings stand in ``gpu_pool_config.py``."""

    name = "gpu-pool-serve"
    description = "Serve the pool of this machine on a Unix socket."

    socket = Unicode(
        help="""The socket's path. By default /run/gpu-pool/gpu-pool.sock for root,
        $XDG_RUNTIME_DIR/gpu-pool/gpu-pool.sock for others."""
    ).tag(config=True)
    mode = Unicode("0600", help="The socket's mode: 0666 lets every user of the machine in.").tag(config=True)
    ledger = Unicode(help="The ledger's file. By default the one of an embedded pool.").tag(config=True)
    admins = List(
        Unicode(), help="Users who see all leases, may end them and drain GPUs; root may, too."
    ).tag(config=True)
    max_connections = Integer(1024, min=1, help="Open connections of one user at once.").tag(config=True)
    max_waits = Integer(512, min=1, help="Leases that one user may wait for at once.").tag(config=True)

    @default("log_format")
    def _log_format(self) -> str:
        return "%(asctime)s %(levelname)s: %(message)s"

    @default("log_level")
    def _log_level(self) -> int:
        return logging.INFO

    def configure(self, given: Config) -> None:
        """Read the settings; ``given`` ones win. Raises ``BadRequest`` for one that is not understood."""
        # The files are those of the pool's own settings, which says what is wrong with them.
        self._pool_settings = load_settings()
        try:
            self.load_config_file("gpu_pool_config", path=jupyter_config_path())
            self.update_config(given)
            self._mode = _read_mode(self.mode)
        except TraitError as error:
            raise BadRequest(f"A setting of the service is wrong: {error}") from error

    def start(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises the pool's errors where it cannot begin."""
        if not sys.platform.startswith("linux"):
            raise NotAllowed("Only Linux tells a service who asks.", "Use the pool of one user, embedded:.")
        check_processes_are_seen()
        _allow_many_files()
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        stop = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, stop.set)
        path = _path(self.socket)
        pool = EmbeddedPool(ledger_path(f"embedded:{self.ledger}"), self._pool_settings, owner=True)
        listening = ServiceSocket(path, self._mode)
        try:
            async with pool:
                await pool.status()  # a ledger that cannot be opened is told now
                await self._answer(pool, listening, stop)
        finally:
            listening.close()

    async def _answer(self, pool: EmbeddedPool, listening: ServiceSocket, stop: asyncio.Event) -> None:
        changes = Changes(pool, self.log)
        desk = Desk(pool, changes, self.log, self.max_waits)
        identify = PeerIdentity(os.geteuid(), self.admins)
        under_way = UnderWay()
        answering = application(desk, identify, under_way, self.log)
        server = PeerServer(answering, self.log, self.max_connections)
        server.add_socket(listening.listener)
        looking = asyncio.create_task(changes.run())
        self.log.info("Serving %s at unix:%s", pool.url, listening.path)
        await stop.wait()
        self.log.info("Stopping")
        server.stop()
        listening.close()
        changes.stop()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(under_way.none(), _STOP_WITHIN)
        await server.close_all_connections()
        looking.cancel()


def _read_mode(text: str) -> int:
    if re.fullmatch("0?[0-7]{3}", text, re.ASCII) is None:
        raise BadRequest(
            f"mode is {text[:40]!a}.", "Accepted: an octal number of three digits, such as 0666."
        )
    return int(text, 8)


def _path(given: str) -> Path:
    path = Path(given).expanduser() if given else own_socket()
    if path is None:
        raise BadRequest(
            "There is no folder for this user's sockets: XDG_RUNTIME_DIR is not set.",
            "Name one: --socket PATH.",
        )
    return path


def _allow_many_files() -> None:
    """Raise the limit of open files as far as this process may: each client has one."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
