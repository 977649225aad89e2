"""A kernel that was asked to outlive the process that started it, and is managed by another one then."""

from __future__ import annotations

import asyncio
import json
import os
import sys

from jupyter_client.manager import AsyncKernelManager

from gpu_pool_provisioner.provisioner import GPUPoolProvisioner
from support.jupyter_env import JupyterEnv, Managers, answer, eventually, is_running

#: Starts a kernel, says how to go on with it, and ends as with kill -9.
STARTER = """
import asyncio, json, os, sys
from jupyter_client.manager import AsyncKernelManager

async def main():
    km = AsyncKernelManager(kernel_name=sys.argv[1])
    await km.start_kernel(independent=True)
    client = km.client()
    client.start_channels()
    await client.wait_for_ready(timeout=120)
    await client.execute("kept = 42", reply=True, timeout=120)
    info = await km.provisioner.get_provisioner_info()
    with open(sys.argv[2], "w") as file:
        json.dump([km.connection_file, info], file, default=bytes.decode)
    os._exit(0)

asyncio.run(main())
"""


async def continued(jupyter_env: JupyterEnv, manager: Managers) -> tuple[AsyncKernelManager, int]:
    """Return the manager of a kernel that another process has started, and the kernel's pid."""
    kernel, said = jupyter_env.install("two"), jupyter_env.folder / "said.json"
    starter = await asyncio.create_subprocess_exec(sys.executable, "-c", STARTER, kernel, str(said))
    assert await starter.wait() == 0
    connection_file, info = json.loads(said.read_text())
    km = manager(kernel, connection_file=connection_file)
    km.load_connection_file()
    km.provisioner = GPUPoolProvisioner(kernel_spec=km.kernel_spec, parent=km, slice="2%")
    await km.provisioner.load_provisioner_info(info)
    return km, info["pid"]


async def test_it_is_relayed_to_again_and_keeps_its_variables_and_its_slice(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    km, pid = await continued(jupyter_env, manager)
    lease = await jupyter_env.only_lease()
    assert await answer(km, "import os; print(kept, os.getpid())") == f"42 {pid}\n"
    assert await km.is_alive()
    assert (await jupyter_env.only_lease()).id == lease.id
    assert km.provisioner.session.lease.id == lease.id
    await km.provisioner.kill()
    await km.provisioner.wait()
    await km.provisioner.cleanup(restart=False)
    assert not is_running(pid)
    await eventually(jupyter_env.is_empty)


async def test_one_that_has_ended_meanwhile_leaves_its_slice(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    km, pid = await continued(jupyter_env, manager)
    os.killpg(pid, 9)
    await km.provisioner.wait()
    await km.provisioner.cleanup(restart=False)
    await eventually(jupyter_env.is_empty)
