"""Real kernels, started through our launcher as the provisioner starts them."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.kernelspec import KernelSpecManager
from jupyter_client.manager import AsyncKernelManager

from gpu_pool_kernels.launching import wrap_argv

#: What a kernel on 2% of a simulated V100 finds in its environment.
SLICE = {
    "CUDA_VISIBLE_DEVICES": "GPU-5111a7ed-0000-0000-0000-000000000000",
    "GPU_POOL_SLICE": "2%",
    "GPU_POOL_DEVICE_NAMES": "Tesla V100-SXM2-32GB (simulated)",
    "GPU_POOL_MILLI": "20",
    "GPU_POOL_MEMORY_MIB": "655",
    "GPU_POOL_DEVICE_MEMORY_MIB": "32768",
    "GPU_POOL_HELD_SINCE": "1700000000",
    "GPU_POOL_ENFORCED": "memory: 655 MiB, none (accounting only)",
    "GPU_POOL_SIMULATED": "1",
    "GPU_POOL_KERNEL_BASE": "python3",
}
IPYKERNEL = ["-m", "ipykernel_launcher", "-f", "{connection_file}"]


class Outputs:
    """What one cell gave: its streams, the error's name, and its result by MIME type."""

    def __init__(self) -> None:
        self.stdout = ""
        self.stderr = ""
        self.error: str | None = None
        self.result: dict[str, str] = {}
        #: The kinds of messages in the order in which they came.
        self.order: list[str] = []

    def add(self, message: dict[str, Any]) -> None:
        kind, content = message["msg_type"], message["content"]
        if kind == "stream":
            kind = content["name"]
            setattr(self, kind, getattr(self, kind) + content["text"])
        elif kind == "error":
            self.error = content["ename"]
        elif kind == "execute_result":
            self.result = content["data"]
        self.order.append(kind)


class Kernel:
    """A running kernel and the file that its own stderr goes to."""

    def __init__(self, client: Any, log: Path) -> None:
        self._client = client
        self._log = log

    async def run(self, code: str) -> Outputs:
        outputs = Outputs()
        await self._client.execute_interactive(code, output_hook=outputs.add, timeout=120)
        return outputs

    @property
    def log(self) -> str:
        return self._log.read_text()


Start = Callable[..., Awaitable[Kernel]]


@asynccontextmanager
async def running(argv: list[str], environment: Mapping[str, str], folder: Path) -> AsyncIterator[Kernel]:
    spec = folder / "kernels/tested"
    spec.mkdir(parents=True)
    content = {"argv": argv, "display_name": "tested", "language": "python"}
    (spec / "kernel.json").write_text(json.dumps(content))
    manager = AsyncKernelManager(
        kernel_name="tested",
        kernel_spec_manager=KernelSpecManager(kernel_dirs=[str(folder / "kernels")]),
        transport="ipc",
        ip=str(folder / "ipc"),
        connection_file=str(folder / "connection.json"),
    )
    with (folder / "stderr").open("wb") as log:
        await manager.start_kernel(env={**os.environ, **environment}, cwd=str(folder), stderr=log)
    client = manager.client()
    client.start_channels()
    try:
        await client.wait_for_ready(timeout=120)
        yield Kernel(client, folder / "stderr")
    finally:
        client.stop_channels()
        await manager.shutdown_kernel(now=True)


@pytest.fixture
async def start() -> AsyncIterator[Start]:
    """Start kernels that end with the test; by default on a slice, with this interpreter."""
    async with AsyncExitStack() as stack:

        async def start(
            argv: list[str] | None = None,
            environment: Mapping[str, str] = SLICE,
            python: str = sys.executable,
        ) -> Kernel:
            # Not tmp_path: a Unix socket's path may have 107 characters.
            folder = Path(tempfile.mkdtemp())
            stack.callback(shutil.rmtree, folder)
            isolated = {"IPYTHONDIR": str(folder / "ipython"), **environment}
            return await stack.enter_async_context(
                running(argv or wrap_argv([python, *IPYKERNEL]), isolated, folder)
            )

        yield start
