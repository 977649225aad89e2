"""The slices of this server's kernels, their pools, and the pages that listen: all ask each pool as one."""

from __future__ import annotations

import asyncio
import concurrent.futures
import json
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, Final

from jupyter_core.utils import ensure_async

from gpu_pool_client import GpuPoolError, LeaseGone, LeaseState, Pool, SliceRequest, parse_request
from gpu_pool_client._background import background_loop, in_background
from gpu_pool_client._log import get_logger
from gpu_pool_provisioner.driver import SessionDriver
from gpu_pool_provisioner.pools import shared_pool
from gpu_pool_provisioner.provisioner import GPUPoolProvisioner
from gpu_pool_provisioner.server import model
from gpu_pool_provisioner.server.model import KeepBody, SizeBody
from gpu_pool_provisioner.server.offers import Offers, check_other_size
from gpu_pool_provisioner.server.settings import GPUPoolServer
from gpu_pool_provisioner.session import events
from gpu_pool_provisioner.session.events import SizeChange
from gpu_pool_provisioner.settings import kernel_name, name_on_size

#: Seconds between two looks at the pool, and in which it answers.
_POOL_EVERY: Final = 5.0
_ANSWERS_WITHIN: Final = 10.0
#: Seconds for which measurements are kept.
_KEPT_FOR: Final = 600.0
#: Seconds that each measured lease adds to the pause: a server asks a pool no more than so often.
_EACH: Final = 0.5
_SILENT: Final = "The GPU pool does not answer at the moment."
#: Seconds between two looks at this server's kernels while a page listens: a page is told no more often.
_TICK: Final = 0.25
#: Seconds between two looks at the notebooks of the kernels.
_SESSIONS_EVERY: Final = 2.0
#: Seconds for which a pool is watched after the last page has gone.
_LINGER: Final = 10.0
#: Seconds by which the clock may differ from what it was before it counts as having been set.
_CLOCK_SET: Final = 1.0


class NoSuchKernelError(Exception):
    """There is no kernel of that id, or it has no slice."""


class Listener:
    """One page that listens. It is told the newest state alone, however slowly it reads."""

    def __init__(self) -> None:
        self._text = ""
        self._changed = asyncio.Event()

    def tell(self, text: str) -> None:
        """Have it told, in place of what it has not been told yet."""
        self._text = text
        self._changed.set()

    async def next(self) -> str:
        """Return what to send it next, once there is something."""
        await self._changed.wait()
        self._changed.clear()
        return self._text


class Slices:
    """What this server knows of its kernels' slices. To be used on the server's event loop."""

    def __init__(self, server: Any) -> None:
        """Take the Jupyter server's application."""
        self._server = server
        self._settings = GPUPoolServer(config=server.config)
        self._listeners: set[Listener] = set()
        self._watching: asyncio.Task[None] | None = None
        self._pools: dict[str, tuple[PoolWatch, concurrent.futures.Future[None]]] = {}
        self._needed_until = 0.0
        self._text = ""
        self._paths: dict[str, str] = {}
        self._sessions_at = 0.0
        #: The kernels whose notebooks were asked for last.
        self._seen: set[str] = set()
        self._clock = WallClock()
        self.offers = Offers(server)

    # -- Telling -----------------------------------------------------------

    async def state(self) -> str:
        """Return the State as JSON, and go on watching for some seconds."""
        self._needed_until = time.monotonic() + _LINGER
        self._tell(text := await self._as_json())
        self._watch()
        return text

    @contextmanager
    def listening(self) -> Iterator[Listener]:
        """Tell a page of every change while the context lasts."""
        listener = Listener()
        self._listeners.add(listener)
        try:
            if self._text and self._watching is not None:
                listener.tell(self._text)
            else:
                self._text = ""  # whatever is found now is told to all
            self._watch()
            yield listener
        finally:
            self._listeners.discard(listener)
            self._needed_until = time.monotonic() + _LINGER

    def _watch(self) -> None:
        if self._watching is None:
            self._watching = asyncio.create_task(self._keep_watching())

    async def _keep_watching(self) -> None:
        try:
            while self._listeners or time.monotonic() < self._needed_until:
                await self._tell_changes()
                await asyncio.sleep(_TICK)
        finally:
            self._watching, self._text = None, ""
            self._watch_pools({})

    async def _tell_changes(self) -> None:
        try:
            text = await self._as_json()
        except Exception:
            self._server.log.exception("Looking at the GPU slices of this server's kernels failed.")
            return
        self._tell(text)

    def _tell(self, text: str) -> None:
        """Tell the pages if that is new."""
        if text != self._text:
            self._text = text
            for listener in self._listeners:
                listener.tell(text)

    # -- Looking -----------------------------------------------------------

    async def _as_json(self) -> str:
        kernels = self._kernels()
        await self._read_sessions(kernels)
        slices, by_pool = [], dict[str, dict[str, GPUPoolProvisioner]]()
        for kernel_id, provisioner in kernels.items():
            driver = provisioner.driver
            if driver is None:
                continue
            if not driver.session.is_explained:
                background_loop().call_soon_threadsafe(driver.want_explanation)
            state = driver.state
            by_pool.setdefault(provisioner.url, {})[kernel_id] = provisioner
            name = self._name(kernel_id, provisioner, model.size_of(state))
            slices.append(model.slice_of(name, state, self.offers.sizes(provisioner), self._clock))
        self._watch_pools(by_pool)
        pools = [{"url": url, **self._pool(url)} for url in sorted(by_pool)]
        return json.dumps({"slices": slices, "pools": pools})

    def _kernels(self) -> dict[str, GPUPoolProvisioner]:
        """Return the provisioners of this server's kernels that are ours."""
        manager = self._server.kernel_manager
        kernels = {each: manager.get_kernel(each) for each in manager.list_kernel_ids()}
        found = {kernel_id: getattr(kernel, "provisioner", None) for kernel_id, kernel in kernels.items()}
        return {
            kernel_id: provisioner
            for kernel_id, provisioner in found.items()
            if isinstance(provisioner, GPUPoolProvisioner)
        }

    async def _read_sessions(self, kernels: Mapping[str, GPUPoolProvisioner]) -> None:
        """Learn which notebook a kernel belongs to."""
        is_same = kernels.keys() == self._seen
        if not kernels or (is_same and time.monotonic() < self._sessions_at + _SESSIONS_EVERY):
            return
        self._sessions_at, self._seen = time.monotonic(), set(kernels)
        sessions = await ensure_async(self._server.session_manager.list_sessions())
        self._paths = {each["kernel"]["id"]: each["path"] for each in reversed(sessions) if each["kernel"]}
        for kernel_id, provisioner in kernels.items():  # a notebook may have been renamed
            path = PurePath(self._paths.get(kernel_id, ""))
            if path.suffix == ".ipynb":
                provisioner.notebook = path.name

    def _name(self, kernel_id: str, provisioner: GPUPoolProvisioner, now: SliceRequest) -> model.KernelName:
        manager = self._server.kernel_manager.get_kernel(kernel_id)
        display = kernel_name(provisioner.kernel_spec.display_name)
        if provisioner.slice:
            display = name_on_size(display, parse_request(provisioner.slice), now)
        return model.KernelName(kernel_id, manager.kernel_name, display, self._paths.get(kernel_id))

    # -- Pools -------------------------------------------------------------

    def _watch_pools(self, needed: Mapping[str, Mapping[str, GPUPoolProvisioner]]) -> None:
        for url in self._pools.keys() - needed.keys():
            self._pools.pop(url)[1].cancel()
        for url, provisioners in needed.items():
            if url not in self._pools:
                watch = PoolWatch(url, self._settings.memory_every)
                running = asyncio.run_coroutine_threadsafe(watch.run(), background_loop())
                self._pools[url] = watch, running
            drivers = {name: each.driver for name, each in provisioners.items()}
            self._pools[url][0].drivers = {name: each for name, each in drivers.items() if each is not None}

    def _pool(self, url: str) -> dict[str, Any]:
        state = self._pools[url][0].state
        return {"reachable": state.reachable, "simulated": state.simulated, "message": state.message}

    # -- Doing -------------------------------------------------------------

    def driver(self, kernel_id: str) -> SessionDriver:
        """Return the session of a kernel with a slice. Raises ``NoSuchKernelError``."""
        provisioner = self._kernels().get(kernel_id)
        driver = provisioner.driver if provisioner is not None else None
        if driver is None:
            raise NoSuchKernelError(kernel_id)
        return driver

    async def keep(self, kernel_id: str, body: KeepBody) -> dict[str, Any]:
        """Count a kernel as in use. Raises ``NoSuchKernelError`` and ``NotAllowed``, as all of these."""
        return {"message": await in_background(self.driver(kernel_id).keep(body.seconds))}

    async def resume(self, kernel_id: str) -> dict[str, Any]:
        """Take the slice of a parked kernel again."""
        return {"message": await in_background(self.driver(kernel_id).resume())}

    async def leave_queue(self, kernel_id: str) -> dict[str, Any]:
        """Let a kernel's user give up the wait."""
        return {"message": await in_background(self.driver(kernel_id).leave_queue())}

    async def give_back(self, kernel_id: str) -> dict[str, Any]:
        """Let a kernel's slice go as soon as it is idle."""
        return {"message": await in_background(self.driver(kernel_id).give_back())}

    async def resize(self, kernel_id: str, body: SizeBody) -> dict[str, Any]:
        """Change a kernel's size. Also raises what the pool refuses it with."""
        driver = self.driver(kernel_id)
        if not body.at_restart:
            return _told(await in_background(driver.resize(body.size)))
        wanted, provisioner = parse_request(body.size), self._kernels()[kernel_id]
        outlook = await check_other_size(driver.pool_work.pool, wanted, provisioner.holder())
        return _told(await in_background(driver.resize_at_restart(wanted, outlook)))

    def memory(self, kernel_id: str) -> dict[str, Any]:
        """Return a kernel's memory over the last minutes, and go on watching."""
        driver = self.driver(kernel_id)
        lease = driver.session.lease
        self._needed_until = time.monotonic() + _LINGER
        self._watch()
        watch = self._pools.get(driver.pool_work.url)
        samples = watch[0].samples.get(kernel_id, ()) if watch is not None else ()
        granted = sum(part.memory_mib for part in lease.slices) if lease is not None else 0
        return {"samples": [list(each) for each in tuple(samples)], "granted_mib": granted}


def _told(change: SizeChange) -> dict[str, Any]:
    """Return what came of asking for another size, as JSON has it."""
    return {"granted": change.granted, "at_restart": change.at_restart, "message": change.message}


class WallClock:
    """Turns times of ``time.monotonic()`` into Unix seconds, the same ones unless somebody sets the clock."""

    def __init__(self) -> None:
        self._ahead = time.time() - time.monotonic()

    @property
    def ahead(self) -> float:
        """By how many seconds Unix time is ahead of ``time.monotonic()``."""
        ahead = time.time() - time.monotonic()
        if abs(ahead - self._ahead) > _CLOCK_SET:
            self._ahead = ahead
        return self._ahead

    def __call__(self, seconds: float) -> float:
        """Return the Unix seconds of a time by ``time.monotonic()``."""
        return round(seconds + self.ahead, 1)


@dataclass(frozen=True, slots=True)
class PoolState:
    """How a pool answered last."""

    reachable: bool = True
    simulated: bool = False
    #: Why it does not answer, or what it has to say; often empty.
    message: str = ""


class PoolWatch:
    """Looks at one pool, on the background loop, while somebody listens. Its state may be read anywhere."""

    def __init__(self, url: str, memory_every: float, answers_within: float = _ANSWERS_WITHIN) -> None:
        """Look at nothing yet.

        ``memory_every`` is the seconds between two measurements of the memory in use; ``answers_within``
        those in which the pool answers.
        """
        self._answers_within = answers_within
        self._url = url
        self._memory_every = memory_every
        self.state = PoolState()
        #: The sessions of kernels that are watched, by kernel id. Replaced as a whole.
        self.drivers: Mapping[str, SessionDriver] = {}
        #: Memory in use by kernel id: Unix seconds and MiB, oldest first.
        self.samples: dict[str, deque[tuple[float, int]]] = {}
        self._measured_at = 0.0

    async def run(self) -> None:
        """Look again and again, until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(min(_POOL_EVERY, self._memory_every) + _EACH * len(self.drivers))

    async def refresh(self) -> None:
        """Look once at the pool, and at the memory of the kernels where that is due."""
        drivers = dict(self.drivers)
        try:
            pool = shared_pool(self._url)
            found = await asyncio.wait_for(self._compare(pool, drivers.values()), self._answers_within)
            due = time.monotonic() >= self._measured_at + self._memory_every
            if due or any(_is_unmeasured(each) for each in drivers.values()):
                self._measured_at = time.monotonic()
                await asyncio.wait_for(self._measure(pool, drivers), self._answers_within)
            self.state = found
        except GpuPoolError as error:
            self.state = PoolState(False, self.state.simulated, str(error))
        except asyncio.TimeoutError:
            self.state = PoolState(False, self.state.simulated, _SILENT)
        except Exception as error:  # noqa: BLE001 - a mistake of ours must not end the watch for all pages
            get_logger().error("Looking at the GPU pool failed.", exc_info=error)
            self.state = PoolState(False, self.state.simulated, _SILENT)

    async def _compare(self, pool: Pool, drivers: Iterable[SessionDriver]) -> PoolState:
        """Take note of leases as the pool has them, unless somebody has seen them since; return how it is."""
        asked_at = time.monotonic()
        status = await pool.status()
        found = {lease.id: lease for lease in (*status.leases, *status.queue)}
        for driver in drivers:
            known = driver.session
            if known.lease_id is None or known.seen_at > asked_at or known.lease is None:
                continue
            lease = found.get(known.lease_id)
            if lease is None and known.lease.state is not LeaseState.ENDED:
                with suppress(LeaseGone):  # whoever has it learns of that in a moment
                    lease = await pool.get_lease(known.lease_id)
            if lease is not None:
                driver.post(events.LeaseSeen(lease))
        return PoolState(True, status.simulated, status.note)

    async def _measure(self, pool: Pool, drivers: Mapping[str, SessionDriver]) -> None:
        for kernel_id, driver in drivers.items():
            lease = driver.session.lease
            if lease is None or lease.state is not LeaseState.HELD:
                continue
            try:
                activity = await pool.activity(lease.id)
            except LeaseGone:
                continue
            driver.post(events.LeaseSeen(activity=activity))
            if activity.memory_mib is not None:
                self._keep(kernel_id, activity.memory_mib)
        for kernel_id in self.samples.keys() - drivers.keys():
            del self.samples[kernel_id]

    def _keep(self, kernel_id: str, mib: int) -> None:
        now = time.time()
        samples = self.samples.setdefault(kernel_id, deque())
        samples.append((round(now, 1), mib))
        while samples[0][0] < now - _KEPT_FOR:
            samples.popleft()


def _is_unmeasured(driver: SessionDriver) -> bool:
    """Whether nobody has looked yet at what a kernel does with its slice, so at what giving back costs."""
    return driver.session.activity is None and driver.session.is_held
