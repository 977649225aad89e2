"""Kernels and commands through the service: nothing but the pool's URL is different."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from gpu_pool_client import LeaseState, Process
from support.jupyter_env import JupyterEnv, Managers, answer, eventually, started_kernel
from support.service import Service


async def test_a_kernel_has_its_slice_over_a_restart_until_it_is_shut_down(
    served: JupyterEnv, manager: Managers
) -> None:
    km = await started_kernel(manager(served.install("half", "50%")))
    assert await answer(km, "import os; print(os.environ['GPU_POOL_URL'])") == f"{served.url}\n"
    lease = await served.only_lease()
    assert (lease.process, lease.holder.process) == (Process.of(km.provisioner.pid), Process.current())
    await km.restart_kernel()
    assert await answer(km, "import os; print(os.environ['GPU_POOL_LEASE'])") == f"{lease.id}\n"
    assert (await served.only_lease()).id == lease.id
    assert (await served.only_lease()).process == Process.of(km.provisioner.pid)
    await km.shutdown_kernel()
    assert await served.is_empty()
    assert (await served.pool.get_lease(lease.id)).end_reason == "released"


async def test_a_kernel_that_waits_and_one_that_works_outlive_the_service(
    served: JupyterEnv, service: Service, manager: Managers
) -> None:
    works = await started_kernel(manager(served.install("half", "50%")))
    assert await answer(works, "print(1)") == "1\n"
    waits = await started_kernel(manager(served.install("whole", "1")))
    await eventually(served.has_queue)
    await service.end(signal.SIGKILL)
    assert await answer(works, "print(2)") == "2\n"
    await service.start()
    status = await served.pool.status()
    assert [lease.process for lease in status.leases] == [Process.of(works.provisioner.pid)]
    assert [lease.state for lease in status.queue] == [LeaseState.WAITING]
    await works.shutdown_kernel()
    assert await answer(waits, "print(3)") == "3\n"
    await waits.shutdown_kernel()
    assert await served.is_empty()


async def test_a_killed_kernel_gives_its_slice_back(served: JupyterEnv, manager: Managers) -> None:
    km = await started_kernel(manager(served.install("half", "50%")))
    await answer(km)
    os.kill(km.provisioner.pid, signal.SIGKILL)
    await eventually(served.is_empty)


def gpu_pool(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "gpu_pool.cli", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.long
async def test_the_command_line_works_unchanged(served: JupyterEnv, service: Service) -> None:
    done = gpu_pool("run", "2%", "--", "printenv", "GPU_POOL_SLICE", "GPU_POOL_URL")
    assert done.stdout == f"2%\n{served.url}\n", done.stderr
    lease = json.loads(gpu_pool("request", "50%", "--json").stdout)
    status = json.loads(gpu_pool("status", "--json").stdout)
    assert (status["url"], [each["id"] for each in status["leases"]]) == (served.url, [lease["id"]])
    assert gpu_pool("run", "--no-wait", "1", "--", "true").returncode == 6
    assert gpu_pool("run", "33GiB", "--", "true").returncode == 3
    assert gpu_pool("release", lease["id"]).returncode == 0
    ended = [json.loads(line)["reason"] for line in gpu_pool("history", "--json").stdout.splitlines()]
    # Of a command that has ended the service may hear from the system first: it looks whenever it is asked.
    assert ended[0] in ("released", "process-gone")
    assert ended[1:] == ["withdrawn", "released"]
    assert gpu_pool("health").returncode == 0
