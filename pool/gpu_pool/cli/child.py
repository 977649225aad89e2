"""Running a command on a slice: a child that waits at a pipe, its signals and exit status; Docker containers.

The child is forked before anything is asked of the pool, and waits.
So the lease can be attached to it before it becomes the command: there is no
moment in which the command runs and the lease hangs on another process.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Final, NoReturn

from gpu_pool.cli.screen import note
from gpu_pool.enforcement.hami_core import LOCKS
from gpu_pool_client import BadRequest, GpuPoolError, Lease, NotAllowed, Pool, Process

#: Passed on to the command. Of these a terminal sends INT, QUIT and TSTP to the
#: whole foreground group, the command included.
_FORWARDED: Final = (
    signal.SIGINT,
    signal.SIGTERM,
    signal.SIGHUP,
    signal.SIGQUIT,
    signal.SIGTSTP,
    signal.SIGCONT,
    signal.SIGUSR1,
    signal.SIGUSR2,
)
_FROM_TERMINAL: Final = (signal.SIGINT, signal.SIGQUIT, signal.SIGTSTP)
#: Stops that are the user's job control, in which the parent takes part.
_JOB_STOPS: Final = (signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU)
#: Seconds until the child is looked at although no signal came: a thread that is just
#: ending, left over from asking the pool, may have taken it.
_LOOK_AGAIN: Final = 1.0
_LINUX: Final = sys.platform.startswith("linux")
_PR_SET_PDEATHSIG: Final = 1


class CommandNotFound(GpuPoolError):
    """There is no such program. The exit status is the shells' own for it."""

    code: ClassVar[str] = "command-not-found"
    exit_code: ClassVar[int] = 127


class CommandNotRunnable(GpuPoolError):
    """The program is there and cannot be executed. The exit status is the shells' own for it."""

    code: ClassVar[str] = "command-not-runnable"
    exit_code: ClassVar[int] = 126


def check_command(program: str) -> None:
    """Refuse what cannot be run before anybody waits for it, as a shell would.

    Raises ``CommandNotFound`` or ``CommandNotRunnable``.
    """
    if shutil.which(program) is not None:
        return
    # Of what is looked for on the PATH, shells pass over folders.
    on_path = (Path(folder, program) for folder in os.get_exec_path())
    found = [Path(program)] if "/" in program else [path for path in on_path if path.is_file()]
    if not any(map(os.path.lexists, found)):
        raise CommandNotFound(f"{program[:80]!a}: command not found.", "Check its name and the PATH.")
    raise _not_runnable(found[0])


def _not_runnable(path: Path) -> GpuPoolError:
    """Say why what is at this path cannot be executed."""
    shown = f"{str(path)[:200]!a}"
    if path.is_dir():
        return CommandNotRunnable(f"{shown} is a folder.", "Name a program in it.")
    if not path.exists():
        return CommandNotFound(f"{shown} is a broken link.", "Check its target.")
    return CommandNotRunnable(
        f"{shown} is not executable.", f"If it is a program: chmod +x {shlex.quote(str(path))}"
    )


def become(command: Sequence[str], environment: Mapping[str, str]) -> NoReturn:
    """Replace this process by ``command``, found on the PATH.

    Raises ``CommandNotFound`` or ``CommandNotRunnable``.
    """
    # Python ignores these; a command expects them as they are everywhere else.
    for name in ("SIGPIPE", "SIGXFSZ"):
        signal.signal(getattr(signal, name), signal.SIG_DFL)
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(command[0], list(command), dict(environment))  # noqa: S606 - no shell is the point
    except FileNotFoundError as error:
        raise _missing(command[0]) from error
    except OSError as error:
        raise CommandNotRunnable(f"{command[0]} cannot be run: {error.strerror}.") from error
    except ValueError as error:
        raise CommandNotRunnable(f"{command[0]!a} cannot be run: {error}.") from error


def _missing(program: str) -> CommandNotFound:
    """Say what of a program is not there: itself, or what its first line or its header names."""
    if shutil.which(program) is None:
        return CommandNotFound(f"{program}: command not found.")
    return CommandNotFound(f"{program} cannot be run: its interpreter does not exist.", "See its first line.")


class WaitingChild:
    """A child process that waits, and becomes a command when the pipe tells it which.

    As a context manager: leaving it sends away a child that is still waiting.
    """

    def __init__(self) -> None:
        waits, self._pipe = os.pipe()
        parent = os.getpid()
        self.pid = os.fork()
        if self.pid == 0:
            os.close(self._pipe)
            _wait_and_become(waits, parent)
        os.close(waits)
        process = Process.of(self.pid)
        assert process is not None, "a child that waits for its parent is alive"
        #: The child, now and once it is the command.
        self.process = process
        self._over = False

    def __enter__(self) -> WaitingChild:
        return self

    def __exit__(self, *failure: object) -> None:
        self._close_pipe()
        if not self._over:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(self.pid, 0)

    def send(self, command: Sequence[str], environment: Mapping[str, str]) -> None:
        """Let the child become ``command``, with ``environment`` and nothing else."""
        with contextlib.suppress(BrokenPipeError):  # it was killed: `supervise` tells
            _write_all(self._pipe, json.dumps([list(command), dict(environment)]).encode())
        self._close_pipe()

    def supervise(
        self,
        command: Sequence[str],
        environment: Mapping[str, str],
        meanwhile: Callable[[], object] | None = None,
    ) -> int:
        """Send the command, pass signals on, and return the command's exit status (128+n for signals).

        ``meanwhile`` is called once the command has begun: threads that it starts take none of the signals.
        """
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        watched = {*_FORWARDED, signal.SIGCHLD}
        before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
        # A thread that is just ending, left over from asking the pool, does not block them: where it takes
        # one, that is to end nothing here. What nohup(1) ignores stays ignored.
        heeded = [each for each in _FORWARDED if signal.getsignal(each) is not signal.SIG_IGN]
        handlers = {each: signal.signal(each, self._taken_elsewhere) for each in heeded}
        try:
            self.send(command, environment)
            if meanwhile is not None:
                meanwhile()
            while (status := self._ended()) is None:
                self._pass_on(*_next_signal(watched))
            return status
        finally:
            for signum, handler in handlers.items():
                signal.signal(signum, handler)
            signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def _taken_elsewhere(self, signum: int, _frame: object) -> None:
        """Pass on a signal that another thread has taken: who sent it is not known then."""
        if not self._over:
            self._pass_on(signum, by_terminal=False)

    def _ended(self) -> int | None:
        """Look at the child: its exit status, or None while it lives. Stops when it was stopped."""
        pid, status = os.waitpid(self.pid, os.WNOHANG | os.WUNTRACED)
        if pid == 0:
            return None
        if os.WIFSTOPPED(status):
            if os.WSTOPSIG(status) in _JOB_STOPS:
                # The shell waits for this process, and must see that its job stopped.
                os.kill(os.getpid(), signal.SIGSTOP)
            return None
        self._over = True
        return 128 + os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)

    def _pass_on(self, signum: int, by_terminal: bool) -> None:
        # What the terminal sent, the child has had already: it is in the same group.
        if signum in _FORWARDED and not (by_terminal and signum in _FROM_TERMINAL):
            os.kill(self.pid, signum)

    def _close_pipe(self) -> None:
        if self._pipe >= 0:
            os.close(self._pipe)
            self._pipe = -1


def _next_signal(watched: set[signal.Signals]) -> tuple[int, bool]:
    """Wait for a signal; return it (0: none yet) and whether the kernel sent it, for a terminal."""
    if sys.platform == "linux":
        found = signal.sigtimedwait(watched, _LOOK_AGAIN)
        return (found.si_signo, found.si_code > 0) if found else (0, False)
    # Elsewhere the sender is not known; these come from a terminal as a rule.
    signum = signal.sigwait(watched)
    return signum, signum in _FROM_TERMINAL


def _wait_and_become(pipe: int, parent: int) -> NoReturn:
    """Run in the child, from fork to exec. Never returns into the parent's code."""
    status = 1
    try:
        _die_with(parent)
        if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
            signal.signal(signal.SIGINT, signal.SIG_DFL)
        with open(pipe, "rb") as file:
            message = file.read()
        if message:
            become(*json.loads(message))
    except GpuPoolError as error:
        status = error.exit_code
        os.write(2, f"gpu-pool: {error}\n".encode(errors="replace"))
    finally:
        os._exit(status)


def _die_with(parent: int) -> None:
    """Ask for SIGTERM when the parent dies, so that kill -9 of it leaves no job behind."""
    if not _LINUX:
        return
    import ctypes

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    if os.getppid() != parent:  # it died before it was asked
        os._exit(1)


def _write_all(fd: int, data: bytes) -> None:
    while data:
        data = data[os.write(fd, data) :]


DOCKER: Final = "docker"
_LABEL: Final = "org.jupyter.gpu-pool.lease"
#: Seconds between two looks for the container, which Docker takes a moment to start.
_EVERY: Final = 0.1
#: Seconds in which Docker answers a question about a container.
_ANSWERS_WITHIN: Final = 30.0
#: Where a client of MPS finds its daemon; both also need the same shared memory.
_MPS: Final = "CUDA_MPS_PIPE_DIRECTORY"
#: The file in which HAMi-core's processes share their limits; the first of them makes it.
_HAMI: Final = "CUDA_DEVICE_MEMORY_SHARED_CACHE"


class DockerContainer:
    """The container on a lease, known by a label that Docker keeps with it."""

    def __init__(self, lease: Lease, hami_locks: Path = LOCKS) -> None:
        """``hami_locks`` is where HAMi-core keeps the lock that is one for the whole machine."""
        self._hami_locks = hami_locks
        # Docker numbers the GPUs of a container from 0, whichever they are.
        self._lease = lease.named_by_uuid()
        self._label = f"{_LABEL}={lease.id}"

    def command(self, arguments: tuple[str, ...]) -> list[str]:
        """Return the command that runs the container: our options, then whatever the user wrote.

        With an init of its own, since a program that is the first process of a
        container ignores SIGTERM. Variables are named and not written: what is
        an argument, everybody reads.
        """
        lease = self._lease
        command = [DOCKER, "run", "--rm", "--init", "--interactive", "--label", self._label]
        if sys.stdin.isatty() and sys.stdout.isatty():
            command.append("--tty")
        real = [part.device.uuid for part in lease.slices if not part.device.simulated]
        if real:
            # Docker splits at commas, unless the whole is quoted.
            command += ["--gpus", f'"device={",".join(real)}"']
        for name in lease.environment:
            command += ["--env", name]
        for path in sorted(_paths(lease.variables, self._hami_locks)):
            command += ["--volume", f"{path}:{path}"]
        if _MPS in lease.variables:
            command += ["--ipc", "host"]
        return [*command, *arguments]

    async def attach(self, pool: Pool) -> None:
        """Tie the lease to the container's own process, once that runs and where the pool lets us."""
        try:
            await pool.attach(self._lease.id, await self._process())
        except (BadRequest, NotAllowed) as error:  # it may be another user's process
            note(f"the lease stays attached to this program instead of the container. {error}")
        except GpuPoolError:
            return  # whoever follows the lease says so

    async def _process(self) -> Process:
        """Return the container's first process, once it runs."""
        while True:
            found = await asyncio.to_thread(self._find_process)
            if found is not None:
                return found
            await asyncio.sleep(_EVERY)

    def _find_process(self) -> Process | None:
        pids = (_ask("inspect", "--format", "{{.State.Pid}}", name) for name in self._names())
        return next((found for pid in pids if (found := Process.of(int(pid or 0))) is not None), None)

    async def stop(self, grace: float) -> None:
        """End the container: SIGTERM, and SIGKILL after so many seconds."""
        if names := await asyncio.to_thread(self._names):
            await asyncio.to_thread(_ask, "stop", "-t", f"{grace:.0f}", *names)
        await asyncio.to_thread(self.end)

    def end(self) -> None:
        """End the container at once, if it still is there."""
        if names := self._names():
            _ask("rm", "--force", *names)

    def _names(self) -> list[str]:
        return _ask("ps", "--all", "--quiet", "--no-trunc", "--filter", f"label={self._label}").split()


def _ask(*words: str) -> str:
    """Say something to Docker; return its answer, empty if there is none."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        done = subprocess.run(
            [DOCKER, *words], capture_output=True, text=True, timeout=_ANSWERS_WITHIN, check=False
        )
        return done.stdout.strip() if done.returncode == 0 else ""
    return ""


def _paths(variables: Mapping[str, str], hami_locks: Path) -> set[Path]:
    """Return the files and folders by which a tier enforces a slice."""
    named = {name: Path(value) for name, value in variables.items() if value.startswith("/")}
    # Not the file itself, which is not there until a process of the container makes it.
    file = named.pop(_HAMI, None)
    more = {file.parent, hami_locks} if file else set()
    return {path for path in {*named.values(), *more} if path.exists() and not _is_anothers_link(path)}


def _is_anothers_link(path: Path) -> bool:
    """Whether another user says where it leads: Docker, which is root, would mount whatever that is."""
    return path.is_symlink() and path.lstat().st_uid not in (0, os.geteuid())
