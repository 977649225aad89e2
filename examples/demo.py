"""The whole story in a terminal: a notebook on 2% of a GPU, fifty kernels on one, and a warm one.

Run it with ``make demo``. It uses a simulated V100, and a store, kernelspecs
and settings of its own in a temporary folder, also on a machine with GPUs: so
it can fill the pool without being in anybody's way, and leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import os
import resource
import signal
import sys
import tempfile
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import nbformat
import psutil
from jupyter_client.multikernelmanager import AsyncMultiKernelManager
from jupyter_core.paths import jupyter_runtime_dir
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from gpu_pool_client import GpuPoolError, PoolStatus, connect, format_share, parse_request
from gpu_pool_kernels.installer import install
from gpu_pool_provisioner.templates import templates

NOTEBOOK = Path(__file__).with_name("first_slice.ipynb")
DEVICE = "V100-SXM2-32GB:1"
SLICE = "2%"
KERNELS = 50
#: Seconds in which a kernel must answer; fifty start at once, perhaps on two cores.
READY_WITHIN = 300


class DemoFailed(Exception):
    """Something is not as it should be. The text says what."""


def main() -> int:
    """Run the demo and return its exit status: 0 if all was as it should be."""
    say("This demo uses one simulated V100 and a store of its own, even where there are GPUs.")
    try:
        allow_many_files()
        with tempfile.TemporaryDirectory(prefix="gpu-pool-demo-") as folder:
            use_only(Path(folder))
            try:
                asyncio.run(tell())
            finally:
                end_what_still_runs()
        check(not Path(folder).exists(), f"{folder} is still there")
    except (DemoFailed, GpuPoolError, CellExecutionError) as error:
        print(f"\nThe demo failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nInterrupted; everything was put back.", file=sys.stderr)
        return 130
    say("\nNothing is left: no process, no file.")
    return 0


def allow_many_files() -> None:
    """Raise the limit of open files: the clients of fifty kernels need more than the usual 1,024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 8192 if hard == resource.RLIM_INFINITY else min(hard, 8192)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def use_only(folder: Path) -> None:
    """Let this process and the kernels it starts read and write nothing but ``folder``."""
    os.environ |= {
        "GPU_POOL_DEVICES": DEVICE,
        "GPU_POOL_URL": f"embedded:{folder}/store.db",
        "JUPYTER_PATH": f"{folder}/share/jupyter",
        "JUPYTER_DATA_DIR": f"{folder}/data",
        "JUPYTER_CONFIG_DIR": f"{folder}/config",
        "JUPYTER_RUNTIME_DIR": f"{folder}/runtime",
        "IPYTHONDIR": f"{folder}/ipython",
        # Silences a warning that Python's debugger prints in every kernel.
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",
    }
    (folder / "runtime").mkdir()
    profile = folder / "ipython" / "profile_default"
    profile.mkdir(parents=True)
    # ipykernel warns of unencrypted connections, which here stay on this machine.
    (profile / "ipython_kernel_config.py").write_text("c.IPKernelApp.log_level = 'ERROR'\n")


def end_what_still_runs() -> None:
    """End all kernels at once, of a demo that failed or was interrupted, perhaps twice."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    running = psutil.Process().children(recursive=True)
    for process in running:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(running)


async def tell() -> None:
    """Tell the story in its parts: with one kernel, with many, and with a warm one."""
    prefix = Path(os.environ["GPU_POOL_URL"].removeprefix("embedded:")).parent
    (kernel,) = install([parse_request(SLICE)], prefix=prefix)
    (warm,) = install([parse_request("3%")], prefix=prefix, preload=[])
    say(f"\n1. {NOTEBOOK.name} on the kernel “{kernel.display_name}”")
    await run_notebook(kernel.name)
    say(f"\n2. {KERNELS} kernels on one GPU")
    async with kernels() as manager:
        await fill(manager, kernel.name)
        await one_more(manager, kernel.name)
    await show_pool("all have ended", leases=0)
    say("\n3. A warm kernel, forked from a process that has imported what it needs")
    async with kernels() as manager:
        await restart(manager, warm.name)
    templates().end()
    check(not psutil.Process().children(), "a process that the demo started still runs")


async def run_notebook(kernel_name: str) -> None:
    """Run the notebook, showing its output, and the pool before, during and after."""
    notebook = nbformat.read(NOTEBOOK, as_version=4)  # type: ignore[no-untyped-call]
    client = NotebookClient(notebook, kernel_name=kernel_name, startup_timeout=READY_WITHIN)
    await show_pool("before", leases=0)
    async with client.async_setup_kernel():
        for index, cell in enumerate(notebook.cells):
            await client.async_execute_cell(cell, index)
            for output in cell.get("outputs", []):
                say(textwrap.indent(text_of(output).rstrip(), "   │ "))
        await show_pool("during", leases=1)
    await show_pool("after", leases=0)


async def fill(manager: AsyncMultiKernelManager, kernel_name: str) -> None:
    """Start as many kernels as fit, all at once, and wait until each has answered."""
    say(f"   Starting {KERNELS} kernels at once, which takes some seconds …")
    started = await asyncio.gather(*(manager.start_kernel(kernel_name=kernel_name) for _ in range(KERNELS)))
    await asyncio.gather(*(answers(manager, kernel_id) for kernel_id in started))
    await show_pool(f"{KERNELS} kernels, and each has answered", leases=KERNELS)


async def one_more(manager: AsyncMultiKernelManager, kernel_name: str) -> None:
    """Show that the next one waits, what its cell shows, and that it runs when a slice is there."""
    waiting = await manager.start_kernel(kernel_name=kernel_name)
    client: Any = manager.get_kernel(waiting).client()  # typed as its blocking twin
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=READY_WITHIN)
        client.execute("print('It is my turn.')")
        say(f"\n   Number {KERNELS + 1} starts, too, and its first cell waits:")
        say(textwrap.fill(await shown(client), 88, initial_indent="   │ ", subsequent_indent="   │ "))
        first = manager.list_kernel_ids()[0]
        say("   One of the fifty ends:")
        await manager.shutdown_kernel(first)
        while "turn" not in (text := await shown(client)):
            pass
        say(f"   │ {text.rstrip()}")
    finally:
        client.stop_channels()
    await show_pool("the next has its place", leases=KERNELS)


async def restart(manager: AsyncMultiKernelManager, kernel_name: str) -> None:
    """Show how long a kernel takes to start, and to restart once it is warm."""
    before = time.monotonic()
    kernel = await manager.start_kernel(kernel_name=kernel_name)
    await answers(manager, kernel)
    cold = time.monotonic() - before
    while not (found := templates().all()) or found[0].is_importing:  # noqa: ASYNC110 - a process gets ready
        await asyncio.sleep(0.1)
    check(found[0].is_ready, found[0].refusal)
    before = time.monotonic()
    await manager.restart_kernel(kernel)
    await answers(manager, kernel)
    say(f"   Started in {cold:.2f} s; restarted, warm, in {time.monotonic() - before:.2f} s.")


async def shown(client: Any) -> str:
    """Return the next text that a cell shows."""
    while True:
        message = await client.get_iopub_msg(timeout=READY_WITHIN)
        if message["msg_type"] in ("stream", "display_data", "update_display_data"):
            return text_of(nbformat.from_dict({"output_type": message["msg_type"], **message["content"]}))  # type: ignore[no-untyped-call]
        if message["msg_type"] == "error":
            raise DemoFailed(f"the cell failed: {message['content']['evalue']}")


@asynccontextmanager
async def kernels() -> AsyncIterator[AsyncMultiKernelManager]:
    """Offer a manager, and shut down all its kernels in the end, however that comes."""
    manager = AsyncMultiKernelManager(connection_dir=jupyter_runtime_dir())
    try:
        yield manager
    finally:
        await manager.shutdown_all(now=True)


async def answers(manager: AsyncMultiKernelManager, kernel_id: str) -> None:
    """Wait until the kernel has replied."""
    client = manager.get_kernel(kernel_id).client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=READY_WITHIN)  # type: ignore[misc]  # typed as its blocking twin
    except RuntimeError as error:
        raise DemoFailed(f"a kernel did not answer: {error}") from error
    finally:
        client.stop_channels()


async def show_pool(when: str, *, leases: int) -> None:
    """Print one line about the pool, and insist on the number of leases."""
    async with connect() as pool:
        status = await pool.status()
    say(f"   {when + ':':<36}{in_words(status)}")
    check(len(status.leases) == leases, f"the pool has {len(status.leases)} leases, not {leases}")


def in_words(status: PoolStatus) -> str:
    """Say what is held of the pool's one device."""
    (device,) = status.devices
    held = f"{format_share(device.held_milli)}, {device.held_memory_mib} of {device.device.memory_mib} MiB"
    return f"{held} held of {device.device.label}"


def text_of(output: nbformat.NotebookNode) -> str:
    """Return what a cell's output says in plain text."""
    return str(output["text"] if output["output_type"] == "stream" else output["data"]["text/plain"])


def check(is_so: bool, otherwise: str) -> None:
    """Go on only if all is as it should be."""
    if not is_so:
        raise DemoFailed(otherwise)


def say(text: str) -> None:
    """Print at once, also into a pipe."""
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
