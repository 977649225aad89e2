"""The program behind ``gpu-pool serve``: its settings, its start and its end."""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import re
import resource
import signal
import sys
import time
from collections.abc import Callable, Collection
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Final

from jupyter_core.paths import jupyter_config_path
from traitlets import Bool, Float, Integer, List, TraitError, Unicode, default
from traitlets.config import Application as Program
from traitlets.config import Config

from gpu_pool.audit import AuditLog
from gpu_pool.coursefiles import CourseFolder, Courses
from gpu_pool.embedded import EmbeddedPool, ledger_path
from gpu_pool.service.answering import UnderWay
from gpu_pool.service.callers import PeerIdentity
from gpu_pool.service.changes import Changes
from gpu_pool.service.desk import Desk
from gpu_pool.service.heartbeats import Heartbeats
from gpu_pool.service.hidepid import check_processes_are_seen
from gpu_pool.service.hubbed import HubPlace, hub_place, named_by
from gpu_pool.service.listening import BACKLOG, ServiceSocket
from gpu_pool.service.metrics import Metrics, read_networks
from gpu_pool.service.pace import Pace
from gpu_pool.service.rooms import Rooms, api
from gpu_pool.service.server import LimitedServer, PeerServer
from gpu_pool.service.streams import Limits, Streams
from gpu_pool.settings import PoolSettings, load_settings
from gpu_pool_client import BadRequest, NotAllowed, PoolUnreachable
from gpu_pool_client.remote.addresses import own_socket

#: Seconds in which the answers under way have been given once the service is to stop.
_STOP_WITHIN: Final = 10.0


class ServeApp(Program):
    """Serves the pool of this machine: on a Unix socket, and behind a JupyterHub on TCP as well.

    Settings stand in ``gpu_pool_config.py``.
    """

    name = "gpu-pool-serve"
    description = "Serve the pool of this machine."

    socket = Unicode(
        help="""The socket's path. By default /run/gpu-pool/gpu-pool.sock for root,
        $XDG_RUNTIME_DIR/gpu-pool/gpu-pool.sock for others."""
    ).tag(config=True)
    mode = Unicode("0600", help="The socket's mode: 0666 lets every user of the machine in.").tag(config=True)
    ledger = Unicode(help="The ledger's file. By default the one of an embedded pool.").tag(config=True)
    admins = List(
        Unicode(), help="Users who see all leases, may end them and drain GPUs; root may, too."
    ).tag(config=True)
    kubernetes = Bool(
        False,
        help="""Whether to serve the GPUs of a Kubernetes cluster in place of this machine's, and to run
        kernels there, in pods. See c.KubernetesSettings.""",
    ).tag(config=True)
    max_connections = Integer(1024, min=1, help="Open connections of one user to the socket.").tag(
        config=True
    )
    max_waits = Integer(512, min=1, help="Questions of one user that wait for news at once.").tag(config=True)

    max_decisions = Integer(
        600,
        min=1,
        help="What one user may ask for in a minute, questions apart; administrators may ask more.",
    ).tag(config=True)
    bind = Unicode(
        help="""HOST:PORT to listen on for the users of a JupyterHub. By default what a Hub that
        starts the service says; without one, there is the socket only."""
    ).tag(config=True)
    prefix = Unicode(
        help="What all addresses there begin with; by default what the Hub says, or /services/gpu-pool/."
    ).tag(config=True)
    system_users = Unicode(
        help="""What the Hub's users are called on this machine, such as "{username}" for the
        LocalProcessSpawner. Users of the socket with such a name are then the same to the pool.
        By default nobody is."""
    ).tag(config=True)
    ttl = Float(
        60.0,
        min=1.0,
        max=3600.0,
        help="Seconds after which a lease asked for over TCP ends if its process was not heard of.",
    ).tag(config=True)
    max_streams = Integer(32, min=1, help="Streams of events that one user may have open at once.").tag(
        config=True
    )
    comment_every = Float(
        15.0,
        min=0.01,
        max=60.0,
        help="""Seconds after which something is sent on a stream of events in any case, since proxies end
        silent connections, and after which is asked anew whose it is.""",
    ).tag(config=True)
    longest_stream = Float(
        600.0, min=0.01, help="Seconds after which a stream of events ends, and its client comes back."
    ).tag(config=True)
    taken_within = Float(
        30.0,
        min=0.1,
        help="Seconds in which a client must have taken its answer; one that has not loses its connection.",
    ).tag(config=True)
    metrics_from = List(
        Unicode(),
        help="""Networks, such as 127.0.0.1 or 10.0.0.0/8, from which /metrics may be read without a token
        by whoever does not come through a proxy. By default administrators alone read it.""",
    ).tag(config=True)
    other_courses = Bool(
        False,
        help="""Whether a server may ask in the name of another course than the one that it was started
        for, if its user may use that one, too.""",
    ).tag(config=True)
    max_clients = Integer(16_384, min=1, help="Open connections over TCP at once.").tag(config=True)

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
            self._networks = read_networks(self.metrics_from)
            self._place = hub_place(self.bind, self.prefix)
            named_by(self.system_users)
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
        pool = await self._open_pool()
        if pool.audit is not None:
            pool.audit.reopen()  # a log that cannot be written is told now
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reopen, pool.audit)
        async with AsyncExitStack() as stack:
            listening = ServiceSocket(path, self._mode)
            stack.callback(listening.close)
            await stack.enter_async_context(pool)
            await self._answer(pool, listening, stop)

    async def _open_pool(self) -> EmbeddedPool:
        ledger = ledger_path(f"embedded:{self.ledger}")
        if not self.kubernetes:
            return EmbeddedPool(ledger, self._pool_settings, owner=True)
        try:
            from gpu_pool.kubernetes.pool import open_cluster
            from gpu_pool.kubernetes.settings import KubernetesSettings
        except ImportError as error:
            raise NotAllowed(
                f"What a cluster needs is not installed: {error}.",
                "Install it: pip install 'jupyter-gpu-pool[kubernetes]'.",
            ) from error
        try:
            kubernetes = KubernetesSettings(config=self.config)
        except TraitError as error:
            raise BadRequest(f"A setting of the cluster is wrong: {error}") from error
        courses = _courses(self._pool_settings)[1]
        return await open_cluster(ledger, self._pool_settings, kubernetes, courses, self.log)

    def _reopen(self, audit: AuditLog) -> None:
        try:
            audit.reopen()
        except BadRequest as error:
            self.log.warning("%s", error)

    async def _answer(self, pool: EmbeddedPool, listening: ServiceSocket, stop: asyncio.Event) -> None:
        heartbeats = Heartbeats(self.ttl, self.log)
        status = await pool.status()  # a ledger that cannot be opened is told now
        await heartbeats.look(pool, (*status.leases, *status.line), time.monotonic())
        changes = Changes(pool, self.log, heartbeats)
        folder, courses = _courses(self._pool_settings)
        streams = Streams(pool, changes, self.log, self._limits())
        rooms = Rooms(
            pool=pool,
            desk=self._desk(pool, changes, heartbeats),
            changes=changes,
            streams=streams,
            under_way=UnderWay(),
            log=self.log,
            settings=self._pool_settings,
            admins=frozenset(self.admins),
            courses=courses,
            folder=folder,
            taken_within=self.taken_within,
            metrics=_metrics(pool, lambda: {*self._pool_settings.courses, *courses().usable}),
            metrics_from=self._networks,
            stops=[pool.stop_waiting, streams.stop],
        )
        servers = [self._open_socket(rooms, listening)]
        if self._place is not None:
            servers.append(self._open_hub(rooms, self._place))
        looking = asyncio.create_task(changes.run())
        self.log.info("Serving %s at unix:%s", pool.url, listening.path)
        # What is there now lives as long as the service: the search for garbage need not go through it
        # again and again.
        gc.freeze()
        await stop.wait()
        self.log.info("Stopping")
        for server in servers:
            server.stop()
        listening.close()
        for stopped in (changes.stop, *rooms.stops):
            stopped()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(rooms.under_way.none(), _STOP_WITHIN)
        for server in servers:
            await server.close_all_connections()
        looking.cancel()

    def _limits(self) -> Limits:
        return Limits(self.max_streams, self.comment_every, self.longest_stream)

    def _desk(self, pool: EmbeddedPool, changes: Changes, heartbeats: Heartbeats) -> Desk:
        pace, others = Pace(self.max_decisions), self.other_courses
        return Desk(pool, changes, heartbeats, self.log, self.max_waits, pace, other_courses=others)

    def _open_socket(self, rooms: Rooms, listening: ServiceSocket) -> LimitedServer:
        named = named_by(self.system_users) if self._place is not None else None
        identify = PeerIdentity(os.geteuid(), self.admins, *([named] if named else []))
        server = PeerServer(api(rooms, identify), self.log, self.max_connections)
        server.add_socket(listening.listener)
        return server

    def _open_hub(self, rooms: Rooms, place: HubPlace) -> LimitedServer:
        try:
            from gpu_pool.service.site import site
        except ImportError as error:
            raise NotAllowed(
                f"What a JupyterHub needs is not installed: {error}.",
                "Install it: pip install 'jupyter-gpu-pool[hub]'.",
            ) from error
        server = LimitedServer(site(rooms, place), self.log, self.max_clients)
        try:
            server.listen(place.port, place.host, backlog=BACKLOG)
        except OSError as error:
            raise PoolUnreachable(
                f"Port {place.port} of {place.host} cannot be listened on: {error.strerror}.",
                "Choose another one: c.ServeApp.bind, or the url of the service in the Hub's settings.",
            ) from error
        self.log.info("For the JupyterHub at http://%s:%d%s", place.host, place.port, place.prefix)
        return server


def _courses(settings: PoolSettings) -> tuple[CourseFolder | None, Callable[[], Courses]]:
    """Return the folder of course files, if there is one, and what reads them."""
    if not settings.courses_dir:
        none = Courses()
        return None, lambda: none
    folder = CourseFolder(Path(settings.courses_dir).expanduser(), settings.courses)
    return folder, folder.look


def _metrics(pool: EmbeddedPool, courses: Callable[[], Collection[str]]) -> Metrics | None:
    try:
        return Metrics(pool, courses)
    except ImportError:  # prometheus_client comes with a JupyterHub, and a socket alone needs none
        return None


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
