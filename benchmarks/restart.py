"""How long a restart of the service is felt while 500 kernels run in pods, whoever ends it.

A Hub, a service behind it in a process of its own, and Kubernetes' own control plane; the nodes are
hollow, so pods run nothing. All of it shares this machine's cores with those who ask. The next service is
started as soon as the last one has ended: what a cluster takes to start a container comes on top.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from benchmarks.report import Line, Skipped, interval, percentile
from benchmarks.sizes import sized
from gpu_pool_client import Holder, Lease, LeaseState, PodPhase, Pool, Process, connect, parse_request
from support import api_server, control_plane
from support.hub import Hub, HubService, free_port, serving_hub, write_hub
from support.kernel_pods import command, launched, until_pod
from support.school import NAMESPACE, School, school
from support.service import ForkServer

#: As many GPUs as there are in one rack: the kernels of 2% leave some of them free.
NODES, USERS = 2, 50
KERNELS, ROUNDS = sized((500, 5), (50, 1))
#: Seconds in which a cluster is done with what so many starts have left to do.
SETTLES = sized(20.0, 1.0)
SIZE, WHOLE = parse_request("2%"), parse_request("1")
#: All of them come from one address here, and no server of students asks for ten kernels.
SETTINGS = f"""
c.KubernetesSettings.namespace = {NAMESPACE!r}
c.KubernetesSettings.memory_mib = 512
c.ServeApp.max_unknown_clients = c.ServeApp.max_unknown_tokens = c.ServeApp.max_connections = 10_000
c.ServeApp.max_requests = c.ServeApp.max_decisions = c.ServeApp.max_questions = 1_000_000
"""


class Programs(ForkServer):
    """Runs the program as a container does: nothing of it is imported before."""

    def __init__(self) -> None: ...

    def start(self, code: str, environment: dict[str, str], log: Path, uid: int = 0) -> Process:  # noqa: ARG002
        """Run code in a Python of its own; what it prints is appended to ``log``."""
        with log.open("ab") as out:
            words = [sys.executable, "-c", f"from gpu_pool.cli import main\n{code}"]
            self._process = subprocess.Popen(words, env={**os.environ, **environment}, stdout=out, stderr=out)
        found = Process.of(self._process.pid)
        assert found is not None
        return found

    def close(self) -> None:
        """Wait for the last one, which has been ended."""
        self._process.wait()


@dataclass(frozen=True, slots=True)
class Restart:
    """One of them. Seconds from the signal."""

    #: Until the last service had ended, and until the next one served.
    ended: float
    serves: float
    #: Until each kernel's server was answered that asked at the signal.
    answered: list[float]
    #: Until who waited in the queue had the slice that somebody gave back meanwhile, and until who asked
    #: meanwhile for a new one had it.
    granted: float
    new: float


class Class:
    """Kernels that run in pods, their servers, and the service."""

    def __init__(self, behind: HubService, known: School, pools: Sequence[Pool]) -> None:
        self._behind, self._known, self._pools = behind, known, pools
        self._following: list[asyncio.Task[None]] = []
        self.leases: list[Lease] = []

    def pool(self, number: int) -> Pool:
        """Return the pool as the server of one of the users sees it."""
        return self._pools[number % len(self._pools)]

    async def start(self) -> None:
        """Start all kernels, follow each as its server does, and let nothing be free."""
        self.leases = await asyncio.gather(*map(self._kernel, range(KERNELS)))
        self._following = [asyncio.create_task(self._follow(*each)) for each in enumerate(self.leases)]
        while await self._take_whole():
            pass

    async def stop(self) -> None:
        """Follow none any more."""
        for task in self._following:
            task.cancel()
        await asyncio.gather(*self._following, return_exceptions=True)

    async def _kernel(self, number: int) -> Lease:
        pool, holder = self.pool(number), Holder(f"user-{number % USERS}")
        lease = await pool.acquire(SIZE, holder, f"kernel-{number}", timeout=600)
        await launched(pool, lease.id, command())
        await until_pod(pool, lease.id, lambda pod: pod.phase is PodPhase.RUNNING, within=600)
        return lease

    async def _follow(self, number: int, lease: Lease) -> None:
        pool, seen = self.pool(number), ""
        while True:
            seen = (await pool.pod(lease.id, seen)).version

    async def _take_whole(self) -> bool:
        """Take a whole GPU that is free; return whether there was one."""
        lease = await self.pool(0).request(WHOLE, Holder("user-0"), uuid4().hex)
        if lease.state is LeaseState.HELD:
            self._whole = lease.id
            return True
        await self.pool(0).release(lease.id)
        return False

    async def restart(self, signum: int) -> Restart:
        """End the service by a signal and start it again; return how that was felt. Nothing may end."""
        pods = self._pods()
        waiting = await self.pool(1).request(SIZE, Holder("user-1"), uuid4().hex)
        assert waiting.state is LeaseState.WAITING
        waits = asyncio.create_task(self.pool(1).wait(waiting.id))
        await asyncio.sleep(1)  # until it does
        began = time.monotonic()
        anew = asyncio.create_task(self._anew(signum, began))
        await asyncio.sleep(0.01)

        async def answered(number: int, lease: Lease) -> float:
            assert (await self.pool(number).get_lease(lease.id)).state is LeaseState.HELD
            return time.monotonic() - began

        async def granted() -> float:
            await self.pool(0).release(self._whole)
            await waits
            return time.monotonic() - began

        async def asked() -> tuple[str, float]:
            lease = await self.pool(2).acquire(SIZE, Holder("user-2"), uuid4().hex, timeout=120)
            return lease.id, time.monotonic() - began

        every = asyncio.gather(*(answered(*each) for each in enumerate(self.leases)))
        (ended, serves), answers, had, (new, new_had) = await asyncio.gather(anew, every, granted(), asked())
        assert self._pods() == pods
        for number, lease_id in ((1, waiting.id), (2, new)):
            await self.pool(number).release(lease_id)
        while not await self._take_whole():  # noqa: ASYNC110 - what was released is unbound first
            await asyncio.sleep(0.1)
        return Restart(ended, serves, sorted(answers), had, new_had)

    async def _anew(self, signum: int, began: float) -> tuple[float, float]:
        await self._behind.service.end(signum)
        ended = time.monotonic() - began
        await self._behind.service.start()
        return ended, time.monotonic() - began

    def _pods(self) -> set[str]:
        selector = "app.kubernetes.io/component=gpu-kernel"
        found = self._known.cluster.get("pods", "-n", NAMESPACE, "-l", selector)["items"]
        assert len(found) == KERNELS
        return {each["metadata"]["uid"] for each in found}


@asynccontextmanager
async def a_class(folder: Path) -> AsyncIterator[Class]:
    """Run everything; all kernels run, and each server waits for news of its kernels."""
    async with AsyncExitStack() as stack:
        known = stack.enter_context(school(folder, NODES, USERS))
        hub, programs = Hub(folder / "hub", free_port(), free_port()), Programs()
        hub.folder.mkdir()
        write_hub(hub)
        hub.start()
        stack.callback(hub.close)
        serving = serving_hub(
            programs, hub, folder / "pool", SETTINGS, "--kubernetes", kubeconfig=str(known.kubeconfig)
        )
        behind = await stack.enter_async_context(serving)
        pools = []
        for number in range(USERS):
            os.environ["GPU_POOL_TOKEN"] = await hub.token(f"user-{number}")
            pools.append(connect(behind.url))
        found = Class(behind, known, pools)
        await found.start()
        stack.push_async_callback(found.stop)
        yield found


async def measure() -> dict[int, list[Restart]]:
    """Restart it by one signal and the other, in turn."""
    if missing := [*api_server.missing_programs(), *control_plane.missing_programs()]:
        raise Skipped(f"no {' and no '.join(missing)} in {control_plane.ASSETS}")
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    logging.getLogger("tornado.general").setLevel(logging.ERROR)
    found: dict[int, list[Restart]] = {signal.SIGTERM: [], signal.SIGKILL: []}
    with tempfile.TemporaryDirectory() as folder:
        async with a_class(Path(folder)) as of_500:
            await asyncio.sleep(SETTLES)
            for _ in range(ROUNDS):
                for signum, restarts in found.items():
                    restarts.append(await of_500.restart(signum))
    return found


def lines(found: dict[int, list[Restart]]) -> Iterator[Line]:
    """Put the figures into the report's lines."""
    for signum, restarts in found.items():
        name = signal.Signals(signum).name
        last = [each.answered[-1] for each in restarts]
        middles = [percentile(each.answered, 0.5) for each in restarts]
        ended, serves = ([getattr(each, key) for each in restarts] for key in ("ended", "serves"))
        made_of = (
            f"of {KERNELS} that ask at the signal; median of these {statistics.median(middles):.1f} s; "
            f"the last service had ended after {statistics.median(ended):.1f} s, the next one served after "
            f"{statistics.median(serves):.1f} s; {len(restarts)} restarts"
        )
        what = f"{name} of the service to the last answer"
        yield Line(
            what, max(last), made_of, 5.0, ours=statistics.median(last), unit="s", interval=interval(last)
        )
        for key, who in (("granted", "who waited"), ("new", "who asked meanwhile")):
            took = [getattr(each, key) for each in restarts]
            yield Line(
                f"{name} of the service until {who} had the slice",
                max(took),
                f"median {statistics.median(took):.1f} s",
                5.0,
                ours=statistics.median(took),
                unit="s",
                interval=interval(took),
            )


def run() -> Iterator[Line]:
    """Measure and yield the report's lines."""
    yield from lines(asyncio.run(measure()))
