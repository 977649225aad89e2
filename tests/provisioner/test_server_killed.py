"""A server that is killed takes its kernels with it, whatever language they are of."""

from __future__ import annotations

import asyncio
import sys

import pytest

from support.jupyter_env import IPYKERNEL, TINY, JupyterEnv, eventually, is_running

#: Starts a kernel, says its process, and ends as with kill -9.
STARTER = """
import asyncio, os, signal, sys
from jupyter_client.manager import AsyncKernelManager

async def main():
    km = AsyncKernelManager(kernel_name=sys.argv[1])
    await km.start_kernel()
    print(km.provisioner.pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

asyncio.run(main())
"""
SHELL_SCRIPT = ("/bin/sh", "-c", "while true; do sleep 1; done", "{connection_file}")


@pytest.mark.parametrize("argv", [TINY, SHELL_SCRIPT, IPYKERNEL], ids=["tiny", "script", "ipykernel"])
async def test_a_kernel_ends_with_its_server(jupyter_env: JupyterEnv, argv: tuple[str, ...]) -> None:
    kernel = jupyter_env.install("two", argv=argv, language="python" if argv is IPYKERNEL else "shout")
    starter = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", STARTER, kernel), stdout=asyncio.subprocess.PIPE
    )
    output, _ = await starter.communicate()
    pid = int(output)
    await eventually(lambda: not is_running(pid))
    await eventually(jupyter_env.is_empty)
