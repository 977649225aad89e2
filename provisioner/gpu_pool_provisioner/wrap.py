"""The kernel proxy as a process of its own, for frontends that ignore provisioners.

::

    python -m gpu_pool_provisioner.wrap --slice 2% -f {connection_file} -- KERNEL'S ARGV

The kernel's argv names the same connection file, as ``@connection_file@``, and is given another one. For
its frontend this process is the kernel: it takes its signals, ends when it
ends, and dies with its parent, unless it is to be independent of it, as a kernel that a manager starts with
``independent=True``. SIGTERM and SIGHUP ask the kernel to end, SIGQUIT ends it at once.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

from jupyter_client.launcher import launch_kernel
from jupyter_core.paths import jupyter_path, secure_write

from gpu_pool_client import Holder, KernelCommand, Lease, Process, parse_request
from gpu_pool_client._home import home_folder
from gpu_pool_client._pool import (
    BATCH_VARIABLE,
    CONNECTION_FILE,
    COURSE_VARIABLE,
    DEFAULT_URL,
    URL_VARIABLE,
    WRAPPED_CONNECTION_FILE,
    is_yes,
)
from gpu_pool_client._processes import account_of
from gpu_pool_client._retries import Backoff
from gpu_pool_provisioner.driver import SessionDriver
from gpu_pool_provisioner.environment import SliceEnvironment, command_here, command_in_pod, folder_in_pod
from gpu_pool_provisioner.launchers.base import LaunchPlan, ProxiedKernel
from gpu_pool_provisioner.launchers.process import die_with_parent, ended
from gpu_pool_provisioner.ports import PortReservation
from gpu_pool_provisioner.proxy.backend import BackendConnection
from gpu_pool_provisioner.proxy.channels import send_last
from gpu_pool_provisioner.proxy.front import PortTakenError, bind_front
from gpu_pool_provisioner.proxy.messages import introduction, session_of
from gpu_pool_provisioner.resize_pipe import ResizeRequests, accept_resize_requests
from gpu_pool_provisioner.session import Session, events, texts
from gpu_pool_provisioner.settings import default_outage_timeout, notebook_of, purpose

_READY_TIMEOUT: Final = 120.0
#: Seconds for which its death is forgiven, so that it can be launched again where its ports were taken.
_GRACE: Final = 1.0
#: Seconds that a kernel has to end by itself when this process is told to end.
_END_WITHIN: Final = 2.0
#: Seconds until a connection file is written again that could not be.
_WRITTEN_AGAIN: Final = 1.0


class WrappedKernel:
    """The real kernel's process, launched when its slice has come."""

    def __init__(
        self,
        command: list[str],
        connection_file: str,
        driver: SessionDriver,
        resize_requests: ResizeRequests | None,
    ) -> None:
        self._command = command
        self._connection_file = connection_file
        self._driver = driver
        self._resize_requests = resize_requests
        self.process: subprocess.Popen[bytes] | None = None

    async def here(self, lease: Lease, backend: BackendConnection) -> tuple[int, events.Launched]:
        """Launch it with its slice's environment; see ``LaunchPlan``."""
        if lease.terms.hibernate_after:
            print(texts.STAY_AWAKE % texts.AWAKE_WITH_PROXY, file=sys.stderr)
        on_slice = self._driver.on_slice = SliceEnvironment(self._command, os.environ, lease)
        self._driver.resize_requests = self._resize_requests
        if self._resize_requests is not None:
            if lease.limit_mib and on_slice.takes_changes:
                self._resize_requests.open_changes()
            answer = self._driver.pool_work.answer
            self._resize_requests.grant = partial(answer, on_slice=on_slice, can_restart=False)
        environment = {
            **os.environ,
            **on_slice.variables,
            **(self._resize_requests.variables if self._resize_requests else {}),
            URL_VARIABLE: self._driver.pool_work.pool.url,
            "GPU_POOL_KERNEL_DIRS": os.pathsep.join(_kernel_folders()),
        }
        command = backend.command(on_slice.command)
        # A kernel that does not look after its parent itself must not outlive this process.
        self.process = launch_kernel(command, env=environment, preexec_fn=die_with_parent())
        return self.process.pid, events.Launched()

    def in_pod(self, connection: Mapping[str, Any]) -> KernelCommand:
        """Return what to launch in a pod; see ``LaunchPlan``."""
        argv = command_in_pod(self._command, self._connection_file)
        folder = folder_in_pod(str(Path.cwd()), home_folder())
        here = command_here(self._command, self._connection_file), str(Path.cwd())
        return KernelCommand(argv, connection, {}, folder, (), True, *here)

    def signal(self, number: int) -> None:
        """Pass a signal on to the kernel and what it has started."""
        if self.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, number)

    def exit_code(self) -> int:
        """Return what this process exits with: the kernel's exit code, as a shell would."""
        code = self.process.wait() if self.process else 0
        return code if code >= 0 else 128 - code


def main(arguments: list[str] | None = None) -> int:
    """Be the kernel until it ends; return its exit code."""
    options = _parser().parse_args(arguments)
    options.argv = [_naming(options.f, word) for word in options.argv]
    exit_code = asyncio.run(_serve(options))
    send_last()
    return exit_code


def _naming(connection_file: str, word: str) -> str:
    """Return a word of the kernel's command with the frontends' file, whichever way it stands there.

    Kernelspecs of before name the placeholder itself, which some frontends leave as it is.
    """
    for placeholder in (WRAPPED_CONNECTION_FILE, CONNECTION_FILE):
        word = word.replace(placeholder, connection_file)
    return word


async def _serve(options: argparse.Namespace) -> int:
    kernel = _kernel(options)
    # First: frontends take a kernel whose heart does not beat for dead, and what follows may take seconds.
    connection = kernel.connection()
    reserved = PortReservation.inherited(options.listening) if options.listening else None
    try:
        front = bind_front(connection, session_of(connection), reserved)
    except PortTakenError as error:  # whoever chose them has to choose others
        print(f"{error.strerror}.", file=sys.stderr)
        return 1
    finally:
        if reserved is not None:
            reserved.close()
    course = os.environ.get(COURSE_VARIABLE)
    batch = is_yes(os.environ.get(BATCH_VARIABLE, ""))
    holder = Holder(account_of(os.getuid()), course, _name(options), Process.current(), batch, yields=True)
    session = Session(parse_request(options.slice), _GRACE, default_outage_timeout())
    driver = SessionDriver(session, os.environ.get(URL_VARIABLE) or DEFAULT_URL, lambda: holder)
    resize_requests = accept_resize_requests(options.f, asyncio.get_running_loop())
    wrapped = WrappedKernel(options.argv, options.f, driver, resize_requests)
    await driver.open(kernel, front)
    stopping = asyncio.Event()
    _take_signals(driver, wrapped, stopping)
    driver.post(events.StartRequested())  # a refusal is what the first cell reads
    await driver.start(LaunchPlan(options.argv, wrapped.here, wrapped.in_pod))
    try:
        parent = _outlive_parent(options.f, connection) if options.independent else ended(os.getppid())
        await _first_of(driver.ended(), stopping.wait(), parent)
        wrapped.signal(signal.SIGTERM)
        if driver.session.stands_in:
            driver.post(events.StopRequested())
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(driver.ended(), _END_WITHIN)
    finally:
        if resize_requests is not None:
            resize_requests.close()
        driver.post(events.CloseRequested())
        if driver.session.lease_id is not None:
            await driver.pool_work.pool.give_back(driver.session.lease_id)
    return await asyncio.to_thread(wrapped.exit_code)


async def _first_of(*events: Coroutine[Any, Any, object]) -> None:
    """Return when the first of several coroutines has returned; cancel the others."""
    tasks = [asyncio.create_task(event) for event in events]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()


async def _outlive_parent(connection_file: str, connection: Mapping[str, Any]) -> None:
    """Keep the kernel's connection file: a manager that ends without a shutdown removes it. Never returns."""
    await ended(os.getppid())
    if os.path.exists(connection_file):  # noqa: ASYNC240, PTH110 - one look
        await asyncio.Event().wait()
    backoff = Backoff(_WRITTEN_AGAIN, 30 * _WRITTEN_AGAIN)
    while (error := _failure_to_write(connection_file, connection)) is not None:
        if backoff.is_fresh:
            print(f"The connection file {connection_file} is written later: {error}", file=sys.stderr)
        await backoff.wait()
    try:
        await asyncio.Event().wait()
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(connection_file)  # noqa: PTH107 - as above


def _failure_to_write(connection_file: str, connection: Mapping[str, Any]) -> OSError | None:
    """Write a kernel's connection file; return why that failed, as on a full disk, or None."""
    new = f"{connection_file}.new"
    try:
        with secure_write(new) as file:
            json.dump(connection, file)
        os.replace(new, connection_file)  # noqa: PTH105 - whoever reads it finds it whole, or not yet
    except OSError as error:
        return error
    return None


def _take_signals(driver: SessionDriver, wrapped: WrappedKernel, stopping: asyncio.Event) -> None:
    background_tasks: set[asyncio.Task[None]] = set()

    def interrupt() -> None:
        if not driver.takes_interrupts:
            wrapped.signal(signal.SIGINT)
            return
        background_task = asyncio.create_task(driver.interrupt())
        background_tasks.add(background_task)
        background_task.add_done_callback(background_tasks.discard)

    loop = asyncio.get_running_loop()
    loop.add_signal_handler(signal.SIGINT, interrupt)
    for number in (signal.SIGTERM, signal.SIGHUP):
        loop.add_signal_handler(number, stopping.set)

    def kill() -> None:
        wrapped.signal(signal.SIGKILL)
        stopping.set()

    loop.add_signal_handler(signal.SIGQUIT, kill)


def _kernel(options: argparse.Namespace) -> ProxiedKernel:
    return ProxiedKernel(
        connection_file=options.f,
        introduction=introduction(options.language, options.argv, debugger=options.debugger),
        ready_timeout=_READY_TIMEOUT,
        grace=_GRACE,
    )


def _name(options: argparse.Namespace) -> str:
    return purpose(notebook_of(os.environ), options.name, Path(options.f).stem.removeprefix("kernel-"))


def _kernel_folders() -> list[str]:
    """Return where Jupyter looks for kernelspecs; nothing for who has no home, where it cannot look."""
    try:
        return jupyter_path("kernels")
    except RuntimeError:
        return []


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m gpu_pool_provisioner.wrap", description="Run a kernel on a slice of a GPU."
    )
    parser.add_argument("--slice", required=True, help="the slice it gets: 2%%, 1.5GiB, 2x50%%, 4")
    parser.add_argument("--name", default="kernel", help="the name that people see")
    parser.add_argument("--language", default="python", help="the language of its kernelspec")
    parser.add_argument("--debugger", action="store_true", help="whether the kernel has a debugger")
    parser.add_argument("--independent", action="store_true", help="whether it outlives who starts it")
    parser.add_argument(
        "--listening",
        type=int,
        action="append",
        default=[],
        metavar="FD",
        help="an inherited socket that listens on a port of the connection file; may be repeated",
    )
    parser.add_argument("-f", required=True, metavar="FILE", help="the connection file of its frontends")
    parser.add_argument(
        "argv", nargs="+", help="after --, the kernel's own command, with @connection_file@ for the same file"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
