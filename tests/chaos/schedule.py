"""What is done to the world, when: a seed decides, and decides the same again."""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import Any, Final

from chaos import points
from chaos.laws import Laws
from chaos.world import KINDS, SIZES, School, World, gone, spec_name
from support.jupyter_env import eventually

#: Kernels in one server, at most.
_MOST_KERNELS: Final = 6
#: Blows between two rests.
_ROUND: Final = 30
#: Seconds that the world has to come to rest.
_REST_WITHIN: Final = 180.0
#: Seconds in which somebody comes by every point, while kernels start, work and end: some are passed seldom.
_HIT_WITHIN: Final = 600.0
#: How often kernels are started, used and restarted until all are ended, and it begins anew.
_PASSES: Final = 15
#: Seconds in which a kernel answers a cell.
_ANSWERS_WITHIN: Final = 120.0
#: What can happen to a template.
_BLOWS: Final = (points.KILL, points.STOP, points.STALL, points.NO_MEMORY)
_POINTS: Final = (*points.SERVICE, *points.SERVER, *points.TEMPLATE, *points.FORKED, *points.KERNEL)


class Schedule:
    """Strikes blow after blow, and looks now and then whether the laws hold."""

    def __init__(self, world: World, seed: int) -> None:
        self.world = world
        self.laws = Laws(world)
        self.told: list[str] = []
        self._random = random.Random(seed)
        #: How many kernels a server started while nothing but its templates was struck, and how many warm.
        self.started = self.warm = 0
        self._due = [*_POINTS]
        self._random.shuffle(self._due)
        self._under_way: set[asyncio.Task[object]] = set()
        #: What can happen, and how often relative to each other.
        self._blows: dict[Callable[[], Awaitable[None]], int] = {
            self._start_kernel: 16,
            self._use_kernel: 8,
            self._end_kernel: 4,
            self._restart_kernel: 3,
            self._interrupt_kernel: 2,
            self._kill_kernel: 3,
            self._kill_server: 1,
            self._kill_service: 1,
            self._upgrade_service: 1,
            self._stop_something: 2,
            self._break_template: 2,
            self._strike_template: 3,
            self._break_disk: 1,
            self._jump: 1,
            self._strike: 8,
            self._cut: 2,
            self._slow_down: 1,
        }

    async def round(self) -> None:
        """Strike some blows, mend everything, and wait until the laws hold again."""
        for _ in range(_ROUND):
            (blow,) = self._random.choices([*self._blows], [*self._blows.values()])
            await blow()
            await asyncio.sleep(self._random.uniform(0.0, 0.4))  # the blows' own rhythm
        await self.rest()

    async def rest(self) -> None:
        """Mend everything, and wait until the laws hold."""
        self._tell("-- rest --")
        await self.world.mend()
        if self._under_way:
            await asyncio.wait(self._under_way)
        try:
            await eventually(lambda: self.laws.hold(), within=_REST_WITHIN)
        except AssertionError as error:
            story = "\n".join(self.told[-60:])
            raise AssertionError("\n".join([*self.laws.problems, "after", story])) from error
        async with self.world.pool() as pool:
            self.laws.rest(await pool.status())

    @property
    def hit(self) -> set[str]:
        """The points that were hit so far."""
        file = self.world.strikes / "hit"
        return {line.split()[0] for line in file.read_text().splitlines()} if file.exists() else set()

    async def strike_templates_alone(self) -> None:
        """Strike nothing but templates: every kernel starts, answers, restarts, and keeps what it has.

        Called at rest. In the end no kernel is left.
        """
        await self.empty()
        await self._renew_servers()
        school = self._random.choice(self.world.schools)
        await self._until_warm(school)
        kernels = []
        for _ in range(4):
            await self._strike_template()
            kernels.append(await self._started(school))
        self.world.spare()
        for seen in self.world.templates():
            self._kill(seen.pid, "template")
        for kernel in kernels:
            kept = await self._answer(school, kernel, "kept")
            assert kept == "42", f"it keeps what a cell has made: {kept}"
            await self._strike_template()
            assert await school.ask("POST", f"api/kernels/{kernel}/restart", {}) is not None
            # Not by a cell that fails: ipykernel aborts what comes right behind one.
            kept = await self._answer(school, kernel, "'kept' in globals()")
            assert kept == "False", f"it begins anew: {kept}"
            answer = await self._answer(school, kernel, "6 * 7")
            assert answer == "42", f"it runs cells again: {answer}"
        await self.empty()
        await self.rest()

    async def _until_warm(self, school: School) -> None:
        """Start kernels until one is warm."""

        async def is_warm() -> bool:
            before = self.warm
            kernel = await self._started(school)
            await school.ask("DELETE", f"api/kernels/{kernel}")
            return self.warm > before

        await eventually(is_warm)

    async def _started(self, school: School) -> str:
        """Start a kernel, have it run a cell, and return its id."""
        asked = await school.ask("POST", "api/kernels", {"name": spec_name("warm", SIZES[0])})
        assert asked is not None, "a kernel does not start because of a template"
        kernel = str(asked["id"])
        self.started += 1
        imported = "'chaos.preloaded' in __import__('sys').modules"
        is_warm = await self._answer(school, kernel, imported, "kept = 42")
        assert is_warm in ("True", "False"), f"a kernel does not run a cell because of a template: {is_warm}"
        self.warm += is_warm == "True"
        return kernel

    async def _answer(self, school: School, kernel: str, expression: str, code: str = "") -> str:
        """Return what a kernel says of an expression once it has run a cell, or why that failed."""
        reply = await school.run(kernel, code, _ANSWERS_WITHIN, found=expression)
        if reply["status"] != "ok":
            return f"{reply.get('ename', reply['status'])}: {reply.get('evalue', '')}"
        return str(reply["user_expressions"]["found"].get("data", {}).get("text/plain", ""))

    async def empty(self) -> None:
        """End every kernel in peace; then nothing is held, waited for or running."""

        async def left() -> dict[str, Any]:
            refused = {}
            for school in self.world.schools:
                # Jupyter refuses to end a kernel that it is restarting.
                for kernel in await school.kernels():
                    if await school.ask("DELETE", f"api/kernels/{kernel}") is None:
                        refused[kernel] = await school.ask("GET", f"api/kernels/{kernel}")
            async with self.world.pool() as pool:
                status = await pool.status()
            found = {
                "refused": refused,
                "leases": [(each.id, each.state, each.holder) for each in (*status.leases, *status.queue)],
                "running": self.world.kernels(),
            }
            return {name: each for name, each in found.items() if each}

        await eventually(left, lambda found: not found, within=_REST_WITHIN)

    async def strike_at(self, point: str) -> None:
        """Let kernels live through everything until somebody was killed at this point, and mend it."""
        self._tell(f"kill at {point}")
        if point in (*points.TEMPLATE, *points.FORKED, *points.KERNEL):
            await self._renew_servers()
        points.strike(self.world.strikes, point, points.KILL)

        async def is_hit() -> bool:
            for _ in range(_PASSES):
                for _ in range(3):
                    await self._start_kernel(SIZES[-1], self._random.choice(["tiny", "warm"]))
                for school in self.world.schools:
                    for kernel in await school.kernels():
                        self._later(school.work(kernel))
                await self._restart_kernel()
                await self._end_kernel()
                self.world.revive()
                if point in self.hit:
                    return True
                await asyncio.sleep(0.2)  # so that some are idle for long enough to give way, or to be parked
            # Jupyter loses sight of a kernel that it is asked to end while it restarts it.
            if self._under_way:
                await asyncio.wait(self._under_way)
            # Where all wait for others, nobody is granted a slice at once.
            for school in self.world.schools:
                for kernel in await school.kernels():
                    self._ask(school, "DELETE", f"api/kernels/{kernel}", {})
            return False

        if point in points.UPGRADE:
            # It comes by as it starts, however long that takes: who starts it again keeps it from there.
            await self._upgrade_service()
            assert self.world.service is not None
            await gone(self.world.service)
        await eventually(is_hit, within=_HIT_WITHIN)
        await self.rest()

    # -- Blows -------------------------------------------------------------

    async def _start_kernel(self, size: str = "", kind: str = "") -> None:
        school, size = self._random.choice(self.world.schools), size or self._random.choice(SIZES)
        (any_kind,) = self._random.choices([*KINDS], [*KINDS.values()])
        if school.alive and len(await school.kernels(within=1)) < _MOST_KERNELS:
            self._ask(school, "POST", "api/kernels", {"name": spec_name(kind or any_kind, size)})

    async def _use_kernel(self) -> None:
        school = self._random.choice(self.world.schools)
        kernels = await school.kernels(within=1)
        if kernels:
            self._later(school.work(self._random.choice(kernels)))

    async def _end_kernel(self) -> None:
        await self._to_a_kernel("DELETE", "")

    async def _restart_kernel(self) -> None:
        await self._to_a_kernel("POST", "/restart")

    async def _interrupt_kernel(self) -> None:
        await self._to_a_kernel("POST", "/interrupt")

    async def _to_a_kernel(self, method: str, what: str) -> None:
        school = self._random.choice(self.world.schools)
        kernels = await school.kernels(within=1)
        if kernels:
            self._ask(school, method, f"api/kernels/{self._random.choice(kernels)}{what}", {})

    async def _kill_kernel(self) -> None:
        kernels = sorted(self.world.kernels())
        if kernels:
            self._kill(self._random.choice(kernels), "kernel")

    async def _renew_servers(self) -> None:
        """Start servers that have refused no template: they try none again that was killed as it imported."""
        for school in self.world.schools:
            await self._kill_server(school)
        await eventually(self.world.answers)

    async def _kill_server(self, school: School | None = None) -> None:
        school = school or self._random.choice(self.world.schools)
        if school.process is not None and school.alive:
            self._kill(school.process.pid, "server")
            await gone(school.process)
            school.start()

    async def _kill_service(self) -> None:
        if self.world.service is not None and self.world.service.poll() is None:
            self._kill(self.world.service.pid, "service")
            await gone(self.world.service)
        self.world.start_service()

    async def _upgrade_service(self) -> None:
        self.world.release()
        self._tell(f"release {self.world.releases}")
        await self._kill_service()

    async def _stop_something(self) -> None:
        pids = sorted(seen.pid for seen in self.world.processes())
        if pids:
            self._stop_for_a_moment(self._random.choice(pids))

    def _stop_for_a_moment(self, pid: int) -> None:
        self._tell(f"stop {pid}")
        self.world.stop(pid)
        asyncio.get_running_loop().call_later(self._random.uniform(0.2, 3.0), lambda: self.world.go_on(pid))

    async def _break_template(self) -> None:
        pids = sorted(seen.pid for seen in self.world.templates())
        if pids and self._random.random() < 0.5:
            self._kill(self._random.choice(pids), "template")
        elif pids:
            self._stop_for_a_moment(self._random.choice(pids))

    async def _strike_template(self) -> None:
        point, how = self._random.choice(points.TEMPLATE), self._random.choice(_BLOWS)
        self._tell(f"{how} at {point}")
        points.strike(self.world.strikes, point, how)

    async def _break_disk(self) -> None:
        full = self._random.random() < 0.5
        self._tell("full disk" if full else "read-only disk")
        for broken in (True, False):
            if full:
                self.world.fill_disk(full=broken)
            else:
                self.world.lock_disk(read_only=broken)
            await asyncio.sleep(self._random.uniform(0.2, 1.5) if broken else 0.0)  # for which it is broken

    async def _jump(self) -> None:
        ahead = self._random.choice((-86_400, -60, 0, 60, 86_400))
        self._tell(f"clock {ahead:+d} s")
        self.world.set_clock(ahead)

    async def _strike(self) -> None:
        """Kill at one of the points, each once before any of them again."""
        hit = self.hit
        self._due = [each for each in self._due if each not in hit] or [*_POINTS]
        point = self._random.choice(self._due)
        how = points.KILL if self._random.random() < 0.7 or point in self._due else points.STALL
        self._tell(f"{how} at {point}")
        points.strike(self.world.strikes, point, how)
        for part in (self.world.service, *(school.process for school in self.world.schools)):
            if part is not None and part.poll() is not None:  # one that was struck before
                self.world.revive()

    async def _cut(self) -> None:
        self._tell("a connection is closed")
        points.strike(self.world.strikes, points.CUTTABLE, points.CUT)

    async def _slow_down(self) -> None:
        seconds = self._random.uniform(0.2, 2.0)
        self._tell(f"slow network: {seconds:.1f} s each way")
        self.world.slow_network(seconds)
        asyncio.get_running_loop().call_later(
            self._random.uniform(1.0, 5.0), lambda: self.world.slow_network(0.0)
        )

    def _kill(self, pid: int, what: str) -> None:
        self._tell(f"kill {what} {pid}")
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)

    def _ask(self, school: School, method: str, path: str, body: object) -> None:
        """Ask a server for something, and do not wait for it: it may be stopped."""
        self._tell(f"{school.folder.name}: {method} {path} {body or ''}")

        self._later(school.ask(method, path, body))

    def _later(self, work: Coroutine[object, object, object]) -> None:
        task = asyncio.create_task(work)
        self._under_way.add(task)
        task.add_done_callback(self._under_way.discard)

    def _tell(self, words: str) -> None:
        self.told.append(words)
