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
from collections.abc import Callable, Collection, Mapping
from contextlib import AsyncExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

from traitlets import TraitError, default
from traitlets.config import Application as Program
from traitlets.config import Config

from gpu_pool.audit import AuditLog
from gpu_pool.courses import SHARED_FOLDERS, CourseFolder, Courses
from gpu_pool.embedded.pool import local_pool, store_path
from gpu_pool.plugins import needs_extra
from gpu_pool.pool.pool import GpuPool
from gpu_pool.service.api import ApiOptions, api
from gpu_pool.service.callers import PeerIdentity
from gpu_pool.service.connections import ConnectionLimits, read_networks
from gpu_pool.service.course_log import CourseLog
from gpu_pool.service.decisions import CallLimits, RatePerMinute
from gpu_pool.service.event_streams import EventStreams, Snapshots, StreamLimits
from gpu_pool.service.handler import InFlightRequests
from gpu_pool.service.health import check_processes_are_seen
from gpu_pool.service.heartbeats import Heartbeats
from gpu_pool.service.http_server import BACKLOG, LimitedServer, PeerServer, ServiceSocket
from gpu_pool.service.hub import HubPlace, hub_place, named_by
from gpu_pool.service.hub_site import HubSite
from gpu_pool.service.lease_changes import LeaseChanges
from gpu_pool.service.metrics import Metrics
from gpu_pool.service.node_identity import NodeIdentity
from gpu_pool.service.served_pool import ServedPool
from gpu_pool.service.settings import ServeSettings
from gpu_pool.settings import PoolSettings, config_folders, load_settings
from gpu_pool_client import BadRequest, GpuPoolError, NotAllowed, PoolUnreachable
from gpu_pool_client._home import expanded
from gpu_pool_client._log import EscapingFormatter
from gpu_pool_client._remote.endpoints import own_socket

#: Seconds in which the answers under way have been given once the service is to stop.
_STOP_WITHIN: Final = 10.0
#: Seconds between two looks for what ended so long ago that less is kept of it.
_FORGET_EVERY: Final = 600.0
#: What the agent of one node may say in a minute: several times what it does.
_REPORTS: Final = 120
#: Files that the service needs itself, apart from connections: the store, the log, questions to the Hub.
_OWN_FILES: Final = 512
#: Seconds for which one thread may keep the interpreter while another wants it. Python's own 5 ms are
#: several times what a decision takes, and requests and decisions, each in a thread, alternate.
_SWITCH_EVERY: Final = 0.0005
#: When garbage is looked for, see ``gc.set_threshold``. A look at everything goes through the millions of
#: objects of thousands that wait: a third of the service's time, as seldom as Python does it by itself.
_COLLECT_AFTER: Final = 700, 10, 100


class ServeApp(ServeSettings, Program):
    """Serves the pool of this machine: on a Unix socket, and behind a JupyterHub on TCP as well.

    Its settings are those of :class:`ServeSettings`, read from ``gpu_pool_config.py``.
    """

    name = "gpu-pool-serve"
    description = "Serve the pool of this machine."
    #: Returns the files of what runs kernels in their pods, by their paths: they are compiled, which only a
    #: service of a cluster needs. Without any, each restart is a new pod.
    supervisor_files: Callable[[], Mapping[str, str | bytes]] = dict

    # What traitlets makes the formatter of. Not all that is logged is ours, nor are all names.
    _log_formatter_cls = EscapingFormatter  # type: ignore[assignment]

    @default("log_format")
    def _log_format(self) -> str:
        return "%(asctime)s %(levelname)s: %(message)s"

    @default("log_level")
    def _log_level(self) -> int:
        return logging.INFO

    def get_default_logging_config(self) -> dict[str, Any]:
        """Return how the log is written: that of the libraries, too. Called by traitlets."""
        return {
            **super().get_default_logging_config(),
            "root": {"handlers": ["console"], "level": "WARNING"},
        }

    def configure(self, given: Config) -> None:
        """Read the settings; ``given`` ones win. Raises ``BadRequest`` for one that is not understood."""
        # The files are those of the pool's own settings, which says what is wrong with them.
        self._pool_settings = load_settings()
        try:
            self.load_config_file("gpu_pool_config", path=config_folders())
            self.update_config(given)
            self._mode = _read_mode(self.mode)
            self._networks = read_networks(self.metrics_from, "metrics_from")
            self._proxies = read_networks(self.trusted_downstream_ips, "trusted_downstream_ips")
            self._place = hub_place(self.bind, self.prefix)
            named_by(self.system_users)
        except TraitError as error:
            raise BadRequest(f"A setting of the service is wrong: {error}") from error

    def start(self) -> None:
        """Serve until SIGTERM or SIGINT. Raises the pool's errors where it cannot begin."""
        if not sys.platform.startswith("linux"):
            raise NotAllowed(
                "The service runs on Linux only: it needs the credentials of whoever connects to its socket.",
                "Use the pool of one user: --pool embedded:",
            )
        check_processes_are_seen()
        self._fit_connections(_allow_many_files())
        sys.setswitchinterval(_SWITCH_EVERY)
        gc.set_threshold(*_COLLECT_AFTER)
        asyncio.run(self._serve())

    async def _serve(self) -> None:
        stop = asyncio.Event()
        for signum in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(signum, stop.set)
        path = _path(self.socket)
        pool = await self._open_pool()
        if pool.core.audit is not None:
            pool.core.audit.reopen()  # a log that cannot be written is told now
            asyncio.get_running_loop().add_signal_handler(signal.SIGHUP, self._reopen, pool.core.audit)
        async with AsyncExitStack() as stack:
            listening = ServiceSocket(path, self._mode)
            stack.callback(listening.close)
            await stack.enter_async_context(pool)
            await self._answer(pool, listening, stop)

    async def _open_pool(self) -> GpuPool:
        store = store_path(f"embedded:{self.store}")
        self._is_new = not store.exists()
        if not self.kubernetes:
            return local_pool(store, self._pool_settings, owner=True)
        with needs_extra("kubernetes", "Kubernetes support"):
            from gpu_pool.cluster.backend import open_cluster
            from gpu_pool.cluster.settings import KubernetesSettings
        try:
            kubernetes = KubernetesSettings(config=self.config)
        except TraitError as error:
            raise BadRequest(f"A setting of the cluster is wrong: {error}") from error
        kubernetes.supervisor = dict(self.supervisor_files())
        folder, courses = _courses(self._pool_settings)
        # Whoever asks for a slice has just looked, in the store's thread.
        if folder is not None:
            courses = folder.latest
        return await open_cluster(store, self._pool_settings, kubernetes, courses, self.log)

    def _reopen(self, audit: AuditLog) -> None:
        try:
            audit.reopen()
        except BadRequest as error:
            self.log.warning("%s", error)

    async def _answer(self, pool: GpuPool, listening: ServiceSocket, stop: asyncio.Event) -> None:
        heartbeats = Heartbeats(self.ttl, self.log)
        status = await pool.status()  # a store that cannot be opened is told now
        if self._is_new:  # said aloud: where the whole folder of another is lost, nothing else tells of it
            self.log.info("There was no store; a new, empty one was created")
        # A cluster's GPUs may come and go; this machine's are looked for at the start alone.
        if not (status.devices or self.kubernetes):
            self.log.warning(
                "There is no GPU here, so nothing can be granted. Run gpu-pool doctor as the user of this "
                "service to see why, and start the service again once that is mended."
            )
        for problem in pool.core.registry.problems:
            self.log.warning("%s", problem)
        await heartbeats.end_unheard(pool, (*status.leases, *status.queue), time.monotonic())
        changes = LeaseChanges(pool, self.log, heartbeats, self._pool_settings.tuning.looked_every)
        options = self._options(pool, changes, heartbeats)
        servers, tasks = [self._open_socket(options, listening)], options.served.health.tasks
        if self._place is not None:
            hub_site = self._hub_site(options, self._place)
            servers.append(self._open_hub(options, self._place, hub_site))
            tasks.begin(
                "Showing the pages for browsers",
                partial(_show_pages, hub_site, servers[-1]),
                needed=False,
            )
        courses = CourseLog(options.courses, self.log)
        await asyncio.to_thread(courses.log_changes)
        tasks.begin("Looking for changes of leases", changes.run)
        tasks.begin("Trying whether the pool works", options.served.health.run)
        tasks.begin("Following the course files for the log", courses.run, needed=False)
        tasks.begin("Forgetting what ended long ago", partial(self._forget_old, pool), needed=False)
        self.log.info("Serving %s at unix:%s", pool.url, listening.path)
        # What is there now lives as long as the service: the search for garbage need not go through it
        # again and again.
        gc.freeze()
        await stop.wait()
        self.log.info("Stopping")
        for server in servers:
            server.stop()
        listening.close()
        await self._give_last_answers(options)
        for server in servers:
            await server.close_all_connections()
        tasks.end()

    async def _forget_old(self, pool: GpuPool) -> None:
        """Keep less of what ended long ago, for as long as the service runs."""
        while True:
            try:
                await pool.core.forget_old()
            except GpuPoolError as error:
                self.log.warning("What ended long ago stays in the history for now: %s", error)
            await asyncio.sleep(_FORGET_EVERY)

    async def _give_last_answers(self, options: ApiOptions) -> None:
        """Let nobody wait for changes any more, and finish what is being answered."""
        for stop in (options.changes.stop, *options.stops):
            stop()
        with suppress(asyncio.TimeoutError):
            await asyncio.wait_for(options.in_flight.none(), _STOP_WITHIN)

    def _options(self, pool: GpuPool, changes: LeaseChanges, heartbeats: Heartbeats) -> ApiOptions:
        folder, courses = _courses(self._pool_settings)
        streams = EventStreams(Snapshots(pool, changes, self.log), self._limits())
        agents = pool.backend.agents
        return ApiOptions(
            pool=pool,
            served=ServedPool(
                pool, changes, heartbeats, self.log, self._call_limits(), other_courses=self.other_courses
            ),
            changes=changes,
            streams=streams,
            in_flight=InFlightRequests(),
            log=self.log,
            settings=self._pool_settings,
            admins=frozenset(self.admins),
            courses=courses,
            folder=folder,
            taken_within=self.taken_within,
            metrics=_metrics(pool, lambda: {*self._pool_settings.courses, *courses().usable}),
            metrics_from=self._networks,
            agents=None if agents is None else NodeIdentity(agents, pool.backend.boot),
            stops=[pool.core.stop_waiting, streams.snapshots.stop],
        )

    def _limits(self) -> StreamLimits:
        return StreamLimits(self.max_streams, self.comment_every, self.longest_stream)

    def _connection_limits(self, most: int) -> ConnectionLimits:
        return ConnectionLimits(
            most,
            per_user=self.max_connections,
            per_address=self.max_unknown_clients,
            most_waiting=self.max_unknown_tokens,
            # Never all of them.
            reserved=min(self.reserved_clients, most // 2),
            first_request_within=self.first_request_within,
            proxies=self._proxies,
        )

    def _fit_connections(self, files: int) -> None:
        """Allow no more connections than this process may have files, besides those that it needs itself."""
        own = min(_OWN_FILES, files // 4)
        wanted = self.max_socket_clients + (self.max_clients if self._place is not None else 0)
        if wanted <= files - own:
            return
        part = (files - own) / wanted
        self.max_socket_clients = max(1, int(part * self.max_socket_clients))
        self.max_clients = max(1, int(part * self.max_clients))
        self.log.warning(
            "The system allows this process %d open files: at most %d connections to the socket and %d over "
            "TCP. To allow more, raise LimitNOFILE of the service.",
            files,
            self.max_socket_clients,
            self.max_clients if self._place is not None else 0,
        )

    def _call_limits(self) -> CallLimits:
        return CallLimits(
            self.max_waits,
            RatePerMinute(self.max_decisions),
            RatePerMinute(
                self.max_questions,
                message="You have asked the pool {most} questions in a minute, which is the limit.",
            ),
            RatePerMinute(
                self.max_requests,
                message="You have asked the pool for {most} leases within a minute, which is the limit.",
            ),
            RatePerMinute(
                _REPORTS,
                message="This node's agent has reported {most} times in a minute, which is the limit.",
            ),
        )

    def _open_socket(self, options: ApiOptions, listening: ServiceSocket) -> LimitedServer:
        named = named_by(self.system_users) if self._place is not None else None
        identify = PeerIdentity(os.geteuid(), self.admins, named)
        limits = self._connection_limits(self.max_socket_clients)
        server = PeerServer(api(options, identify), self.log, limits, identify, options.changes.holds)
        server.add_socket(listening.listener)
        return server

    def _hub_site(self, options: ApiOptions, place: HubPlace) -> HubSite:
        with needs_extra("hub", "JupyterHub support"):
            return HubSite(options, place, self.max_unknown_tokens)

    def _open_hub(self, options: ApiOptions, place: HubPlace, hub_site: HubSite) -> LimitedServer:
        limits = self._connection_limits(self.max_clients)
        server = LimitedServer(hub_site.without_pages(), self.log, limits, options.changes.holds)
        try:
            server.listen(place.port, place.host, backlog=BACKLOG)
        except OSError as error:
            raise PoolUnreachable(
                f"Cannot listen on port {place.port} of {place.host}: {error.strerror}.",
                "Choose another one: c.ServeApp.bind, or the url of the service in the Hub's settings.",
            ) from error
        self.log.info("For the JupyterHub at http://%s:%d%s", place.host, place.port, place.prefix)
        return server


async def _show_pages(hub_site: HubSite, server: LimitedServer) -> None:
    """Serve the pages, too, as soon as they are loaded."""
    application = await hub_site.with_pages()
    if application is not None:
        server.request_callback = application
    hub_site.go_on()
    gc.freeze()  # as what was there before


def _courses(settings: PoolSettings) -> tuple[CourseFolder | None, Callable[[], Courses]]:
    """Return the folder of course files, if there is one, and what reads them."""
    if not settings.courses_dir:
        none = Courses()
        return None, lambda: none
    folder = SHARED_FOLDERS.folder(Path(settings.courses_dir), settings.courses)
    return folder, folder.current


def _metrics(pool: GpuPool, courses: Callable[[], Collection[str]]) -> Metrics | NotAllowed:
    try:
        return Metrics(pool, courses)
    except NotAllowed as error:  # the library comes with a JupyterHub, and most who serve a socket need none
        return error


def _read_mode(text: str) -> int:
    if re.fullmatch("0?[0-7]{3}", text, re.ASCII) is None:
        raise BadRequest(
            f"{text[:40]!a} is not a valid mode for the socket.",
            "Accepted: an octal number of three digits, such as 0666.",
        )
    return int(text, 8)


def _path(given: str) -> Path:
    path = expanded(given) if given else own_socket()
    if path is None:
        raise BadRequest(
            "There is no folder for this user's sockets: XDG_RUNTIME_DIR is not set.",
            "Name one: --socket PATH.",
        )
    return path


def _allow_many_files() -> int:
    """Raise the limit of open files as far as this process may: each client has one. Return the limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return sys.maxsize if soft == resource.RLIM_INFINITY else soft
