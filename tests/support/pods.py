"""A pool that starts kernels in pods: each is a process of this machine, at an address of its own.

It is the embedded pool of the test's jupyter_env, with leases that are in pods.
Nothing but the command, the connection and the pool's own variables reaches a
pod, as in a cluster. Not compared with one: ``support.node_agent`` and ``tests/cluster/kubelet`` have pods.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.manager import AsyncKernelManager

from gpu_pool.embedded.pool import open_embedded
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import (
    Activity,
    BadRequest,
    Beginning,
    EndReason,
    KernelCommand,
    KernelPod,
    Lease,
    LeaseGone,
    LeaseState,
    NotAllowed,
    PodPhase,
    Pool,
    PoolUnreachable,
)
from gpu_pool_client._pods import POD_VARIABLE
from gpu_pool_kernels.inkernel.commands import PLACE
from gpu_pool_provisioner import pools
from support.frontend import Frontend
from support.jupyter_env import eventually
from support.supervisors import write_supervisor

_NUMBERS = itertools.count(1)
#: Seconds until a question about a pod is answered although nothing has changed.
_POLL = 1.0
#: Seconds in which a pod's main process ends that is asked to.
_GRACE = 2.0


@dataclass
class PodProcess:
    """One pod: its main process, and what became of it."""

    command: KernelCommand
    folder: Path
    address: str = field(default_factory=lambda: _next_address())
    process: subprocess.Popen[bytes] | None = None
    supervised: bool = True
    #: What is the matter while it runs.
    trouble: str = ""
    #: Whether the cluster took it, and what it said.
    taken: str | None = None
    #: The key of its supervisor where that waits for its kernel.
    key: str = ""

    @property
    def kernel(self) -> int:
        """The process number of its kernel; 0 while there is none."""
        assert self.process is not None
        if not self.supervised:
            return self.process.pid
        for each in psutil.Process(self.process.pid).children():
            with contextlib.suppress(psutil.Error):  # it has ended
                if "ipykernel_launcher" in each.cmdline() and "supervisor" not in each.cmdline():
                    return int(each.pid)
        return 0

    def start(self, environment: Mapping[str, str], *, encrypted: bool, supervised: bool) -> None:
        file = self.folder / "connection.json"
        connection = {**self.command.connection, "ip": self.address}
        if not encrypted:
            connection = {name: value for name, value in connection.items() if "curve" not in name}
        file.write_text(json.dumps(connection))
        argv = [word.replace("{connection_file}", str(file)) for word in self.command.argv]
        if argv[0] == "python3":
            argv[0] = sys.executable
        self.supervised = supervised
        if supervised:
            write_supervisor(self.folder)
            supervisor = [str(self.folder / "launch.py"), "supervisor", "--connection", str(file)]
            supervisor += [f"--preload={','.join(self.command.preload)}", "--"]
            argv = [sys.executable, "-I", "-S", *supervisor, *argv]
        own = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "IPYTHONDIR": str(self.folder)}
        self.process = subprocess.Popen(
            argv,
            env={**own, **self.command.environment, **environment, POD_VARIABLE: "1"},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def prepare(self, *options: str) -> None:
        """Let it wait for its kernel."""
        self.key, file = secrets.token_hex(32), self.folder / "connection.json"
        file.write_text(json.dumps({"key": self.key, "ip": self.address}))
        write_supervisor(self.folder)
        usual = [sys.executable, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", str(file)]
        supervisor = [str(self.folder / "launch.py"), "supervisor", "--connection", str(file)]
        own = {"PATH": os.environ["PATH"], "HOME": str(self.folder), "IPYTHONDIR": str(self.folder)}
        self.process = subprocess.Popen(
            [*usual[:2], *supervisor, "--prepared", "600", *options, "--", *usual],
            env={**own, POD_VARIABLE: "1", PLACE: "-" * 16_384},
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )

    def beginning(self, kernel: KernelCommand, environment: Mapping[str, str]) -> Beginning:
        """Return what starts a kernel in it."""
        self.command, file = kernel, str(self.folder / "connection.json")
        argv = [word.replace("{connection_file}", file) for word in kernel.argv]
        told = {
            "connection": {**kernel.connection, "ip": self.address},
            "argv": [sys.executable if argv[0] == "python3" else argv[0], *argv[1:]],
            "environment": {**kernel.environment, **environment},
            "folder": None,
        }
        return Beginning(self.key, json.dumps(told))

    def end(self, signum: int = signal.SIGKILL) -> None:
        if self.process is not None and self.process.poll() is None:
            inside = psutil.Process(self.process.pid).children(recursive=True)
            with contextlib.suppress(ProcessLookupError):  # another thread ends it, too
                os.killpg(self.process.pid, signum)
            try:
                self.process.wait(_GRACE)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
            for each in inside:  # nothing outlives its pod
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()

    def seen(self, words: str, phase: PodPhase) -> KernelPod:
        code = self.process.poll() if self.process else None
        if self.taken is not None:
            found = KernelPod("", PodPhase.ENDED, message=self.taken)
        elif self.process is None:
            found = KernelPod("", phase, message=words)
        elif code is None:
            found = KernelPod("", PodPhase.RUNNING, self.address, self.trouble)
        else:
            code = code if code >= 0 else 128 - code
            killed = "It needed more memory than a kernel may have here." if code == 137 else ""
            found = KernelPod("", PodPhase.ENDED, message=killed, exit_code=code)
        return replace(found, version=f"{self.address} {found}")


class PodPool(Pool):
    """See above. Its pods start when :attr:`images` says so."""

    def __init__(self, url: str) -> None:
        self.inner: GpuPool = open_embedded(url)
        self.url = self.inner.url
        self._folder = Path(url.removeprefix("embedded:")).parent
        #: The last pod of each lease.
        self.pods: dict[str, PodProcess] = {}
        self.launched: list[PodProcess] = []
        #: Pods that wait for a kernel.
        self.waiting: list[PodProcess] = []
        #: Set once the software is there; until then pods wait with these words.
        self.images = threading.Event()
        self.images.set()
        self.message, self.phase = "Its software is being fetched.", PodPhase.STARTING
        #: Raised by whatever is asked about pods.
        self.fault: Exception | None = None
        self.encrypted = True
        #: Whether their image has what a supervisor needs.
        self.supervised = True
        #: Whether pods take longer to end than anybody waits.
        self.lingering = False
        #: Whether they go on while their slices are lent to others, and what is known of their GPUs.
        self.parks, self.seen = False, Activity()
        #: How often somebody has asked for the latter.
        self.looks = 0

    # -- Pods --------------------------------------------------------------

    async def launch(self, lease_id: str, kernel: KernelCommand) -> KernelPod:
        self._check()
        if (await self.inner.get_lease(lease_id)).state is not LeaseState.HELD:
            raise BadRequest("This lease is not held.")
        await self.end_pod(lease_id)
        if self.waiting and kernel.can_begin and lease_id not in self.pods:
            pod = self.pods[lease_id] = self.waiting.pop()
            self.launched.append(pod)
            variables = (await self.get_lease(lease_id)).environment
            return replace(pod.seen("", self.phase), beginning=pod.beginning(kernel, variables))
        pod = self.pods[lease_id] = self._made(kernel)
        self.launched.append(pod)
        return pod.seen(self.message, self.phase)

    def prepare(self, *options: str) -> PodProcess:
        """Let a pod wait for the first kernel of whoever comes."""
        pod = self._made(KernelCommand((), {}))
        pod.prepare(*options)
        self.waiting.append(pod)
        return pod

    def _made(self, kernel: KernelCommand) -> PodProcess:
        folder = self._folder / f"pod-{next(_NUMBERS)}"
        folder.mkdir(parents=True)
        return PodProcess(kernel, folder)

    async def pod(self, lease_id: str, seen: str = "") -> KernelPod:
        end = time.monotonic() + _POLL
        while True:
            self._check()
            lease = await self.get_lease(lease_id)
            pod = self.pods.get(lease_id)
            if pod is None:
                raise BadRequest("No pod was launched on this lease.")
            if lease.state is LeaseState.ENDED and pod.taken is None:
                pod.end()
                pod.taken = ""
            if pod.process is None and pod.taken is None and self.images.is_set():
                pod.start(lease.environment, encrypted=self.encrypted, supervised=self.supervised)
            found = pod.seen(self.message, self.phase)
            if found.version != seen or time.monotonic() > end:
                return found
            await asyncio.sleep(0.02)

    async def end_pod(self, lease_id: str) -> None:
        self._check()
        if self.lingering:
            await asyncio.Event().wait()
        if lease_id in self.pods:
            await asyncio.to_thread(self.pods[lease_id].end, signal.SIGTERM)

    def _check(self) -> None:
        if self.fault is not None:
            raise self.fault

    async def evict(self, lease_id: str, words: str) -> None:
        """Take a pod and its lease, as a cluster does when a node is lost."""
        pod = self.pods[lease_id]
        pod.taken = words
        pod.end()
        with contextlib.suppress(LeaseGone):  # whoever saw the pod's end may have been faster
            await self.inner.revoke(lease_id, words)

    @property
    def running(self) -> list[PodProcess]:
        """The pods whose process lives."""
        return [pod for pod in self.launched if pod.process and pod.process.poll() is None]

    def _has_kernel(self, lease_id: str) -> bool:
        pod = self.pods.get(lease_id)
        return pod is not None and pod.process is not None and pod.process.poll() is None

    # -- The rest ----------------------------------------------------------

    async def _perform(self, verb: Any, /, *args: Any, **kwargs: Any) -> Any:
        if verb.__name__ == "resize" and not kwargs.get("ahead") and self._has_kernel(str(args[0])):
            raise NotAllowed("The slice cannot change its size: its pod is still there.")
        if verb.__name__ == "park" and self.seen.initialised is not False and self._has_kernel(str(args[0])):
            raise NotAllowed("The kernel keeps memory on the GPU.")
        found = await getattr(self.inner, verb.__name__)(*args, **kwargs)
        return self._in_pod(found) if isinstance(found, Lease) else found

    async def wait(self, lease_id: str, timeout: float | None = None) -> Lease:
        return self._in_pod(await self.inner.wait(lease_id, timeout))

    async def watch(self, lease_id: str) -> AsyncIterator[Lease]:
        async for lease in self.inner.watch(lease_id):
            yield self._in_pod(lease)

    async def activity(self, lease_id: str) -> Activity:
        self.looks += 1
        return self.seen

    def _in_pod(self, lease: Lease) -> Lease:
        return replace(lease, terms=replace(lease.terms, in_pod=True, parks_in_pod=self.parks))

    async def release(self, lease_id: str, reason: EndReason = EndReason.RELEASED) -> None:
        await super().release(lease_id, reason)
        if lease_id in self.pods:
            await asyncio.to_thread(self.pods[lease_id].end)

    async def close(self) -> None:
        self.images.clear()
        for pod in (*self.launched, *self.waiting):
            pod.end()
        await self.inner.close()


def _next_address() -> str:
    """Return an address that no other pod of this machine's tests has."""
    pid, number = os.getpid(), next(_NUMBERS)
    return f"127.{20 + pid % 200}.{pid // 200 % 250}.{number % 250 + 1}"


AWAY = PoolUnreachable("The pool's service is not there.", "Try again in a minute.")


@pytest.fixture
def pods(jupyter_env: object, monkeypatch: pytest.MonkeyPatch) -> PodPool:
    """Let the pool of a test's kernels start them in pods; their image has the ipykernel of the tests."""
    if tuple(map(int, version("ipykernel").split(".")[:2])) < (7, 4):
        pytest.skip("kernels in pods need ipykernel 7.4, which knows transport encryption")
    monkeypatch.setattr(pools, "connect", PodPool)
    pool = pools.shared_pool(jupyter_env.url)  # type: ignore[attr-defined]
    assert isinstance(pool, PodPool)
    return pool


async def until_followed(km: AsyncKernelManager, page: Frontend, file: Path) -> None:
    """Return once a kernel's server follows it by its supervisor, which else ends with its kernel.

    It has, once a signal arrives, for which ``file`` is made.
    """
    handler = f"lambda *_: pathlib.Path({str(file)!r}).touch()"
    await page.run(f"import pathlib, signal; signal.signal(signal.SIGUSR1, {handler})").done()

    async def arrives() -> bool:
        await km.signal_kernel(signal.SIGUSR1)
        return await asyncio.to_thread(file.exists)

    await eventually(arrives)
