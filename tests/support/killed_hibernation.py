"""One notebook whose kernel goes to disk and back, the servers that it has, and who of them is killed.

A real CRIU, with a program in front of it that waits at a step for as long as the test says.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from asyncio.subprocess import PIPE, Process
from contextlib import suppress
from pathlib import Path
from typing import Final

import psutil

from gpu_pool_provisioner.hibernation import program
from support.hibernating import CRIU
from support.jupyter_env import JupyterEnv, eventually

#: A variable that each process of a kernel has.
MARK: Final = "GPU_POOL_TEST_OF_KILLED"
#: A server, as far as a kernel is concerned: it runs the cells that it reads, and ends with its input.
SERVER = """
import asyncio, json, os, sys
from jupyter_client.manager import AsyncKernelManager

async def main():
    km = AsyncKernelManager(kernel_name=sys.argv[1])
    await km.start_kernel(env={**os.environ, "JPY_SESSION_NAME": sys.argv[2]})
    client = km.client()
    client.start_channels()
    await client.wait_for_ready()
    while line := await asyncio.to_thread(sys.stdin.readline):
        said = []
        def hears(message):
            content = message["content"]
            said.append(content.get("text") or content.get("evalue", ""))
        reply = await client.execute_interactive(line, output_hook=hears)
        print(json.dumps("".join(said) or reply["content"]["status"]), flush=True)
    await km.shutdown_kernel(now=True)

asyncio.run(main())
"""
#: Stands before CRIU: says that it is before or after a dump or restore, and waits there where it is to.
PROGRAM = """#!/bin/sh
step=$1
case $step in dump|restore) ;; *) exec {criu} "$@";; esac
reach() {{ touch {steps}/$step.$1; while [ -e {steps}/wait.$step.$1 ]; do sleep 0.02; done; }}
reach before
{criu} "$@" &
criu=$!
wait $criu
status=$?
reach after
exit $status
"""


#: Who takes part in a kernel's way to disk and back; the first process is that of its pid namespace.
_ALL: Final = ("criu", "dump", "first", "launch", "restore", "server")


class Machine:
    """One notebook with its kernel, the servers that it has one after the other, and who is killed."""

    def __init__(self, env: JupyterEnv) -> None:
        self._env = env
        self._asleep, self._steps = env.folder / "asleep", env.folder / "steps"
        self._steps.mkdir()
        notebooks = env.folder / "notebooks"
        notebooks.mkdir()
        self._notebook = notebooks / "week1.ipynb"
        self._notebook.write_text("{}")
        program = env.folder / "criu"
        program.write_text(PROGRAM.format(criu=CRIU, steps=self._steps))
        program.chmod(0o755)
        self._kernel = env.install(
            *("killed", "50%"),
            hibernate_after=0.3,
            hibernate_with_server=True,
            criu=str(program),
            hibernation_folder=str(self._asleep),
            env={MARK: str(env.folder)},
        )

    async def server(self) -> Process:
        command = sys.executable, "-c", SERVER, self._kernel, str(self._notebook)
        return await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)

    async def ask(self, server: Process, code: str) -> str:
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(code.encode() + b"\n")
        line = await asyncio.wait_for(server.stdout.readline(), 300)
        assert line, "the server has ended"
        return str(json.loads(line))

    def images(self) -> list[Path]:
        """Return the whole images that the next server may go on with."""
        return list(self._asleep.glob("*/image/header.json"))

    def let_wait(self, step: str, moment: str) -> None:
        for each in self._steps.glob(f"{step}.*"):
            each.unlink()
        if moment in ("before", "after"):
            (self._steps / f"wait.{step}.{moment}").touch()

    def let_go_on(self) -> None:
        for each in self._steps.glob("wait.*"):
            each.unlink()

    async def reached(self, step: str, moment: str) -> None:
        async def is_reached() -> bool:
            if moment == "writing":
                return any(self._asleep.glob("*/image.new/*.img"))
            if moment == "named":
                return any(self._asleep.glob("*/image"))
            return (self._steps / f"{step}.{moment}").exists()

        await eventually(is_reached)

    def processes(self) -> list[tuple[int, str]]:
        """Return what there is of the kernel, each with what it is: its processes, the program's, CRIU's."""
        found, folder = [], str(self._env.folder)
        for each in psutil.process_iter():
            with suppress(psutil.Error):
                words = " ".join(each.cmdline())
                # CRIU is run by a descriptor, with no variables of the kernel's.
                signs = (folder, program.FOLDER, "--no-default-config")
                is_ours = any(sign in words for sign in signs) and SERVER not in words
                if is_ours or each.environ().get(MARK) == folder:
                    found.append(
                        (each.pid, _role(words, parent=" ".join(psutil.Process(each.ppid()).cmdline())))
                    )
        return found

    def kernels(self) -> list[int]:
        return [pid for pid, role in self.processes() if role == "kernel"]

    def there(self, server: Process) -> list[tuple[int, str]]:
        """Return who takes part, each with what it is."""
        return [*self.processes(), (server.pid, "server")]

    async def until_nothing_is_left(self) -> None:
        try:
            await eventually(lambda: not self.processes())
        except AssertionError as error:
            raise AssertionError(f"these are left: {self.processes()}") from error

    async def until_asleep(self) -> None:
        """Return once the kernel is on disk, and nowhere else."""
        await eventually(lambda: bool(self.images()) and not self.kernels())

    async def _at(self, step: str, moment: str, megabytes: int = 0) -> Process:
        """Let a kernel go to disk, and perhaps come back; return its server once that is at this moment."""
        server = await self.server()
        if step == "dump":
            self.let_wait(step, moment)
        code = f"kept, more = 41, b'x' * {megabytes}_000_000; print(kept)"
        assert (await self.ask(server, code)).endswith("41\n")
        if step == "restore":
            await self.until_asleep()
            self.let_wait(step, moment)
            assert server.stdin is not None
            server.stdin.write(b"print(kept)\n")
        await self.reached(step, moment)
        return server

    async def _is_left_to_the_next(self, server: Process) -> None:
        """Kill a server, unless it has ended, and see that the next one has what it leaves."""
        with suppress(ProcessLookupError):
            server.kill()
        await server.wait()
        await self.until_nothing_is_left()
        assert len(self.images()) <= 1
        await self.next_one_has_it()

    async def killed(self, step: str, moment: str, who: str) -> None:
        """Let a kernel go to disk, and perhaps come back, and kill one of those who take part."""
        is_held = moment in ("before", "after")
        server = await self._at(step, moment if is_held else "before", megabytes=0 if is_held else 100)
        # Looked for now: to look through all processes takes longer than a kernel takes to disk.
        there = self.there(server)
        if not is_held:
            self.let_go_on()
            await self.reached(step, moment)
        killed = kill(who, there)
        assert len(killed) > 1 or (moment, who) != ("writing", "criu"), "there was no CRIU to be killed"
        self.let_go_on()
        if who != "server":
            # CRIU may be killed just while its own code runs in the kernel.
            may_end = (moment, who) == ("writing", "criu")
            await self.goes_on(server, is_answered=step == "restore", may_end=may_end)
        await self._is_left_to_the_next(server)

    async def struck(self, name: str, chance: random.Random) -> None:
        """Kill one of those who take part at a random moment after CRIU was called, and say so."""
        step, seconds = chance.choice(["dump", "restore"]), chance.uniform(0, 0.4)
        server = await self._at(step, "before")
        there = self.there(server)
        who = chance.choice([each for each in _ALL if any(role == each for _, role in there)])
        print(f"{name}: {seconds:.3f} s into a {step}, {who} is killed.", flush=True)
        self.let_go_on()
        await asyncio.sleep(seconds)
        kill(who, there)
        # The first process is the kernel's own, and ends it: a cell that runs then is answered by nobody.
        if who != "server" and (step, who) != ("restore", "first"):
            # CRIU's code may just run in the kernel.
            may_end = who == "first" or (step, who) == ("dump", "criu")
            await self.goes_on(server, is_answered=step == "restore", may_end=may_end)
        await self._is_left_to_the_next(server)

    async def goes_on(self, server: Process, *, is_answered: bool, may_end: bool) -> None:
        """See that the kernel has what it had: its server lives, and there is one of it; or that it ended."""
        if is_answered:  # the cell that woke it, or why it did not
            assert server.stdout is not None
            assert await asyncio.wait_for(server.stdout.readline(), 300)
        said = await self.ask(server, "print(kept)")
        assert "41\n" in said or (may_end and said == "aborted")
        assert len(self.kernels()) <= ("41\n" in said)

    async def next_one_has_it(self) -> None:
        """See that the next server goes on with the image; it begins anew where there is none."""
        has = bool(self.images())
        server = await self.server()
        assert ("41\n" in await self.ask(server, "print(globals().get('kept'))")) is has
        assert len(self.kernels()) == 1
        assert server.stdin is not None
        server.stdin.close()
        await server.wait()
        await self.until_nothing_is_left()
        for each in self.images():  # it fell asleep once more, and its server has left it
            raise AssertionError(f"a kernel that was shut down is on disk: {each}")


def kill(who: str, there: list[tuple[int, str]]) -> list[int]:
    """Kill one of those who took part, as with kill -9; return the processes that had not ended."""
    pids = [pid for pid, role in there if role == who]
    if who == "criu":  # which has begun meanwhile, as a child of what stands before it
        for pid in list(pids):
            with suppress(OSError):
                pids += map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
    killed = []
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
            killed.append(pid)
    return killed


#: Calls of the program that name a kernel.
_CALLS: Final = ("dump", "restore", "note", "remove")


def _role(words: str, parent: str) -> str:
    """Return what a process is, by its command line and that of its parent."""
    if program.FOLDER in words:  # the first process of the kernel's pid namespace is forked from a call
        return (
            "first" if program.FOLDER in parent else words.split()[-2 if words.split()[-2] in _CALLS else -1]
        )
    if " dump " in words or " restore " in words:
        return "criu"
    if "ipykernel_launcher" in words:
        return "reaper" if program.FOLDER in parent else "kernel"
    return "other"
