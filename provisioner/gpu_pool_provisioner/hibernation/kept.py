"""A kernel on this machine that may sleep on disk: its launch, its way there, and its way back."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, Final

from gpu_pool_client import Lease, Process
from gpu_pool_client._log import get_logger
from gpu_pool_client._requests import memory_in_words
from gpu_pool_provisioner.folders import HeldFolder
from gpu_pool_provisioner.hibernation import images, left
from gpu_pool_provisioner.launchers.base import CannotWakeError, StaysAwakeError
from gpu_pool_provisioner.launchers.process import ContinuedProcess

#: The oldest CRIU with which this was seen to work on today's kernels.
OLDEST: Final = (4, 1)
#: How many pid namespaces a user may make.
_NAMESPACES: Final = Path("/proc/sys/user/max_pid_namespaces")
_CAP_SYS_ADMIN: Final = 21
_KEEPER: Final = Path(__file__).with_name("keeper.py")
#: What dump and restore are both told: deleted files that are open go into the image, up to this size.
_BOTH: Final = ("--file-locks", "--link-remap")
_GHOST_BYTES: Final = 64 << 20
_MIB: Final = 1 << 20
#: Seconds in which a kernel has heard that its connections are closed. Where it has not, CRIU refuses.
_CLOSED_WITHIN: Final = 1.0
_LOOK_EVERY: Final = 0.01
#: The state of a connected socket in /proc/net/unix.
_CONNECTED: Final = b"03"


def why_not(criu: str) -> str:
    """Return why no kernel of this process can sleep on disk, in a sentence; empty where one can. Blocks."""
    if not sys.platform.startswith("linux"):
        return "only Linux can."
    if os.geteuid() != 0 or not _may_administer():
        return (
            "it takes a server that runs as root with CAP_SYS_ADMIN: whoever else could write a kernel's "
            "image could become root by it."
        )
    if _NAMESPACES.exists() and _NAMESPACES.read_bytes().strip() == b"0":
        return "this system allows no pid namespaces: set user.max_pid_namespaces (sysctl) to more than 0."
    path = shutil.which(criu)
    if path is None:
        return f"there is no {criu}: install CRIU {OLDEST[0]}.{OLDEST[1]} or newer, or say where it is."
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=10, check=False)
        checked = subprocess.run([path, "check"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"{path} does not run ({error})."
    found = re.search(r"Version: (\d+)\.(\d+)", said.stdout)
    if found is None or tuple(map(int, found.groups())) < OLDEST:
        has = f"is {found.group(1)}.{found.group(2)}" if found else "does not say its version"
        return f"{path} {has}, and {OLDEST[0]}.{OLDEST[1]} or newer is needed."
    if checked.returncode:
        return f"{path} check says that this machine cannot: {_first_error(checked.stderr)}"
    return ""


def _may_administer() -> bool:
    status = Path("/proc/self/status").read_bytes()
    found = re.search(rb"CapEff:\s*([0-9a-f]+)", status)
    return found is not None and bool(int(found.group(1), 16) >> _CAP_SYS_ADMIN & 1)


def _first_error(log: str) -> str:
    """Return the first error in what CRIU says, as a sentence has it."""
    errors = [line.partition("): ")[2] or line for line in log.splitlines() if "Error" in line]
    # It says of each process of root in a container that its limits cannot be raised, and goes on.
    told = [each for each in errors if "RLIMIT" not in each]
    return f"{told[0].strip().rstrip('.')[:300]}." if told else "it does not say why."


#: What one of several CRIUs that run at once says, where two make a directory; how often it is run again.
_IN_THE_WAY: Final = "Can't create a directory (-17)"
_TRIES: Final = 3
#: The folders of kernels of this process that are being written, and the bytes that each may take.
_reserved: Final[dict[int, tuple[str, int]]] = {}
_reserving: Final = threading.Lock()


class KeptKernel:
    """One kernel that may sleep, and each process that it has had: jupyter_client's view of it as well."""

    def __init__(self, criu: str, parent: str, most_mib: int) -> None:
        """Launch nothing yet. Images go into folders in ``parent``; all of them take so much at most."""
        self._criu = shutil.which(criu) or criu
        self._parent = parent
        self._most = most_mib * _MIB
        self._folder: HeldFolder | None = None
        #: Its image, where that outlives this process, and whether it is left to the next one.
        self._left: left.LeftImage | None = None
        self._is_left = False
        #: Whether it goes on from its image, or did since it slept last: the image is nobody's then.
        self._goes_on = False
        #: What the next server must know of it; None where its images end with this process.
        self.record: left.KernelRecord | None = None
        #: What changes in its environment where it goes on from another server's image.
        self.changed: dict[str, tuple[str | None, str | None]] = {}
        self._process: ContinuedProcess | None = None
        #: The first of its pid namespace: with it all of them end.
        self._first: ContinuedProcess | None = None
        self._pipe = 0
        #: Keeps the ports at which it listened from others while it sleeps.
        self._ports: Sequence[socket.socket] = ()
        self._is_over = False
        #: Closes what keeps the kernel alive: its keeper ends it then.
        self._let_go: Callable[[], object] = _nothing
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None

    @classmethod
    def claimed(cls, criu: str, parent: str, most_mib: int, owner: left.Owner) -> KeptKernel | None:
        """Return the owner's kernel that another server has left; None where there is none. Blocks."""
        left.remove_expired(parent, time.time())
        image = left.claim(parent, owner)
        if image is None:
            return None
        kept = cls(criu, parent, most_mib)
        kept._left, kept.record = image, image.record
        return kept

    # -- As jupyter_client knows a process -------------------------------------

    @property
    def pid(self) -> int:
        """Of the process that it has, or had last."""
        assert self._process is not None
        return self._process.pid

    def poll(self) -> int | None:
        """Return None while it has a process."""
        return 0 if self._process is None else self._process.poll()

    def wait(self, timeout: float | None = None) -> int:
        """Return its status once its process has ended. Raises ``subprocess.TimeoutExpired``."""
        return 0 if self._process is None else self._process.wait(timeout)

    def send_signal(self, signum: int) -> None:
        """Send a signal to its process and what that has started, unless it has ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, signum)

    def terminate(self) -> None:
        """Ask it to end."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once, with all that it has started."""
        if self._first is not None:
            self._first.send_signal(signal.SIGKILL)

    # -- Its launch, its way to disk and back ----------------------------------

    async def launch(self, command: Sequence[str], environment: Mapping[str, str], cwd: str | None) -> int:
        """Launch it, and return its pid. Raises ``OSError``."""
        # Its parent is its keeper, which ends it: it must not look for another one.
        known = {name: value for name, value in environment.items() if name != "JPY_PARENT_PID"}
        return await asyncio.to_thread(self._keep, ["launch", *command], known, cwd)

    def _keep(self, arguments: Sequence[str], env: Mapping[str, str] | None, cwd: str | None) -> int:
        held, ours = os.pipe()
        said, says = os.pipe()
        let_go = weakref.finalize(self, os.close, ours)
        try:
            argv = [sys.executable, "-I", "-S", str(_KEEPER), *arguments]
            # It holds the image, too: where this process is killed meanwhile, nobody else restores it.
            holds = [] if self._left is None else [self._left.held]
            keeper = subprocess.Popen(
                argv, stdin=held, stdout=says, env=env, cwd=cwd, start_new_session=True, pass_fds=holds
            )
        except BaseException:
            let_go()
            os.close(said)
            raise
        finally:
            os.close(held)
            os.close(says)
        # It ends with the kernel; nobody else would wait for that.
        threading.Thread(target=keeper.wait, name="kept kernel", daemon=True).start()
        with open(said, "rb") as file:
            line = file.readline()
        try:
            told = json.loads(line)
        except ValueError:
            told = {"errno": 0, "error": "its keeper ended"}
        if "pid" not in told:
            let_go()
            # Nor goes on what a keeper that was killed has begun.
            with contextlib.suppress(ProcessLookupError):
                os.killpg(keeper.pid, signal.SIGKILL)
            raise OSError(told["errno"], told["error"])
        process, first = Process.of(told["pid"]), Process.of(told["first"])
        if process is None or first is None:
            let_go()
            raise OSError(0, "it ended at once")
        if self._is_over:  # it was ended while it came back
            let_go()
            raise OSError(0, "it was ended")
        self._let_go, self._pipe = let_go, told["pipe"]
        self._process, self._first = ContinuedProcess(process), ContinuedProcess(first)
        return process.pid

    async def closed(self, prefix: str) -> None:
        """Return once nobody is connected to the kernel's sockets, whose paths begin so, or after a while."""
        give_up_at = time.monotonic() + _CLOSED_WITHIN
        while _is_connected(os.fsencode(prefix)) and time.monotonic() < give_up_at:  # noqa: ASYNC110
            await asyncio.sleep(_LOOK_EVERY)

    async def sleep(self, lease: Lease) -> int:
        """Write it to disk and end its process; return the bytes of its image.

        Raises ``StaysAwakeError``, and it runs as before.

        Given up, it leaves no image, and a process that may be stopped.
        """
        try:
            folder = await asyncio.to_thread(self._prepared)
            log = await self._dumped(folder)
            for _ in range(_TRIES):
                if log is None or _IN_THE_WAY not in log:
                    break
                folder = await asyncio.to_thread(self._prepared)
                log = await self._dumped(folder)
            if log is not None:
                get_logger().info("CRIU did not write a kernel to disk: %s", log)
                raise StaysAwakeError(f"CRIU says: {log}")  # noqa: TRY301 - as where the disk is full
            now = time.time()
            header = await asyncio.to_thread(images.finish, folder, self.pid, self._pipe, lease, now)
            image = self._image
            folder.rename(image)
            await asyncio.to_thread(images.sync_folder, image.parent)
            if self.record is not None and self._folder is not None:
                await self._leave_folder(self._folder, replace(self.record, at=time.time()))
        except StaysAwakeError:
            self.remove_image()
            raise
        except OSError as error:
            self.remove_image()
            raise StaysAwakeError(f"it could not be written ({error.strerror or error}).") from error
        except Exception as error:  # a mistake of ours must not end a kernel that was idle
            self.remove_image()
            get_logger().exception("A kernel was not written to disk")
            raise StaysAwakeError(f"it could not be written ({error!r}).") from error
        except BaseException:
            self.remove_image()
            raise
        finally:
            _reserved.pop(id(self), None)
            if not self._image_is_whole:
                self._go_on()
        self._goes_on = False
        self.kill()
        await asyncio.to_thread(self.wait)
        with contextlib.suppress(CannotWakeError):  # somebody was faster, and may have ended when it wakes
            self._ports = _hold(header.listens)
        return header.size

    async def _leave_folder(self, folder: HeldFolder, record: left.KernelRecord) -> None:
        """Let the image outlive this process. Given up meanwhile, it is known all the same, to be removed."""
        leaving = asyncio.ensure_future(asyncio.to_thread(left.leave, folder, record))
        try:
            await asyncio.shield(leaving)
        finally:
            await asyncio.wait({leaving})
            if leaving.exception() is None:
                self._left, self._folder = leaving.result(), None

    def _prepared(self) -> Path:
        """Return the folder into which CRIU writes. Raises ``OSError`` and ``StaysAwakeError``."""
        Path(self._parent).mkdir(0o700, parents=True, exist_ok=True)
        self._folder = self._folder or HeldFolder(self._parent, "asleep-")
        with _reserving:  # several go to disk at once when a server ends
            self._reserve(self._folder)
        folder = Path(self._folder.path) / "image.new"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(0o700)
        return folder

    def _reserve(self, folder: HeldFolder) -> None:
        """Note that it is about to take room. Raises ``OSError``, and ``StaysAwakeError`` for too little."""
        others = sum(max(0, needs - images.taken_bytes(path)) for path, needs in _reserved.values())
        needs, free = images.needs_bytes(self.pid), images.free_bytes(self._parent) - others
        if needs > free:
            raise StaysAwakeError(
                f"it has {memory_in_words(needs // _MIB)} of memory, and the disk has "
                f"{memory_in_words(max(0, free) // _MIB)} left."
            )
        room = self._most - images.taken_bytes(self._parent) - others if self._most else needs
        if needs > room:
            raise StaysAwakeError(
                f"it has {memory_in_words(needs // _MIB)} of memory, and of the "
                f"{memory_in_words(self._most // _MIB)} that kernels may take on disk "
                f"{memory_in_words(max(0, room) // _MIB)} are left."
            )
        _reserved[id(self)] = folder.path, needs

    async def _dumped(self, folder: Path) -> str | None:
        """Let CRIU write the kernel, and leave it stopped; return what is wrong, if anything."""
        assert self._first is not None
        argv = [self._criu, "dump", "-t", str(self._first.pid), "-D", str(folder), "-o", "dump.log"]
        argv += ["--leave-stopped", "--ghost-limit", str(_GHOST_BYTES), *_BOTH]
        criu = await asyncio.create_subprocess_exec(
            *argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            status = await criu.wait()
        except BaseException:
            with contextlib.suppress(ProcessLookupError):
                criu.kill()
            raise
        if status == 0:
            return None
        log = folder / "dump.log"
        return _first_error(log.read_text(errors="replace")) if log.exists() else f"it ended with {status}."

    def _go_on(self) -> None:
        """Let a kernel go on that CRIU has left stopped."""
        for pid in images.pids_with(self.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    @property
    def _image(self) -> Path:
        held = self._left or self._folder
        assert held is not None
        return Path(held.path) / images.IMAGE

    @property
    def _image_is_whole(self) -> bool:
        return (self._left or self._folder) is not None and self._image.is_dir()

    @property
    def image(self) -> left.LeftImage | None:
        """Its image, where another server may go on from it; None where there is none."""
        return self._left

    async def wake(self) -> int:
        """Let it go on from disk; return its pid. Its image stays until :meth:`remove_image`.

        Raises ``CannotWakeError``: then it sleeps on.
        """
        if self._is_left:
            raise CannotWakeError("its server ends, and the next one goes on with it.")
        self._goes_on = True
        try:
            return await self._woken(self._image)
        except BaseException:
            self._goes_on = False
            raise

    async def _woken(self, image: Path) -> int:
        header = await asyncio.to_thread(images.checked, image)
        self._ports = self._ports or _hold(header.listens)
        _share(self._ports)
        pid_file = image / "pid"
        pid_file.unlink(missing_ok=True)
        argv = [self._criu, "restore", "-D", str(image), "-o", "restore.log", "-d"]
        argv += ["--pidfile", str(pid_file), *_BOTH]
        try:
            arguments = ["restore", str(header.output_pipe), *argv]
            pid = await asyncio.to_thread(self._keep, arguments, None, None)
        except OSError as error:
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(pid_file.read_text()), signal.SIGKILL)
            log = image / "restore.log"
            why = _first_error(log.read_text(errors="replace")) if log.exists() else f"{error}."
            get_logger().error("CRIU did not restore a kernel: %s", why)
            self._let_ports_go()
            with contextlib.suppress(CannotWakeError):
                self._ports = _hold(header.listens)
            raise CannotWakeError(f"CRIU says: {why}") from error
        self._let_ports_go()
        return pid

    def _let_ports_go(self) -> None:
        _close(self._ports)
        self._ports = ()

    @property
    def needs_bytes(self) -> int:
        """How many bytes it takes at most to put it to disk; 0 where it is there."""
        return 0 if self.poll() is not None else images.needs_bytes(self.pid)

    def end(self) -> None:
        """End the process that it has, or is about to have."""
        self._is_over = True
        self.kill()
        self._let_go()
        self._let_ports_go()

    async def belong_to(self, owner: left.Owner) -> None:
        """Let its images be another owner's: its notebook was renamed. Raises ``OSError``."""
        if self.record is not None:
            self.record = replace(self.record, owner=owner)
        if self._left is not None:
            await asyncio.to_thread(self._left.belong_to, owner)

    def leave_image(self) -> bool:
        """Leave its image to the next server from now on, and do not wake; return whether there is one.

        There is none any more of a kernel that goes on from it already: there are never two of one kernel.
        """
        if self._left is not None and not self._goes_on:
            self._is_left = True
            self._left.note_use()
        return self._is_left

    def remove_image(self) -> None:
        """Remove what is on disk of it, unless it is left. May be repeated."""
        if self._folder is not None:
            self._folder.close()
            self._folder = None
        if self._left is not None and not self._is_left:
            self._left.remove()
            self._left = None


def _hold(listens: Iterable[tuple[str, int]]) -> list[socket.socket]:
    """Listen at ports in place of a kernel that sleeps, so that nobody else does.

    Raises ``CannotWakeError`` where somebody else does already.
    """
    held: list[socket.socket] = []
    for address, port in listens:
        is_ipv6 = ":" in address
        each = socket.socket(socket.AF_INET6 if is_ipv6 else socket.AF_INET)
        held.append(each)
        if is_ipv6:  # the same port of the other protocol may be another socket's
            each.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            each.bind((address, port))
            each.listen(0)
        except OSError as error:
            _close(held)
            raise CannotWakeError(
                f"it listened at {address}, port {port}, which another program of this machine has now "
                f"({error.strerror})."
            ) from error
    return held


def _share(held: Iterable[socket.socket]) -> None:
    """Listen no more at ports that are kept: who wakes may share them (``SO_REUSEADDR``, socket(7))."""
    for each in held:
        each.shutdown(socket.SHUT_RD)


def _close(held: Iterable[socket.socket]) -> None:
    for each in held:
        each.close()


def _nothing() -> None:
    """Let go of a kernel that was never launched."""


def _is_connected(prefix: bytes) -> bool:
    for line in Path("/proc/net/unix").read_bytes().split(b"\n"):
        words = line.split(b" ", 7)
        if len(words) == 8 and words[5] == _CONNECTED and words[7].strip().startswith(prefix):
            return True
    return False
