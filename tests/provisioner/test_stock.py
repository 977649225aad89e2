"""No slice, no difference: the stock provisioner."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from jupyter_client.manager import AsyncKernelManager
from jupyter_client.provisioning.factory import KernelProvisionerFactory

from gpu_pool_client._pool import COURSE_VARIABLE, URL_VARIABLE
from gpu_pool_provisioner.settings import DEFAULT_SLICE_VARIABLE
from support.jupyter_env import JupyterEnv, Managers, answer, started_kernel

WITHOUT_A_SLICE = """
import os, sys
from jupyter_client.manager import start_new_kernel
os.environ["JUPYTER_DEFAULT_PROVISIONER_NAME"] = "gpu-pool"
km, client = start_new_kernel(kernel_name=sys.argv[1])
assert type(km.provisioner).__name__ == "GPUPoolProvisioner"
km.restart_kernel()
client.wait_for_ready(60)
code = "import os; assert not [name for name in os.environ if name in ('GPU_POOL_LEASE', 'GPU_POOL_SLICE')]"
assert client.execute_interactive(code, timeout=120)["content"]["status"] == "ok"
client.stop_channels()
km.shutdown_kernel()
assert km.provisioner._ports is None and km.provisioner.session is None
print(sorted(name for name in sys.modules if name == "gpu_pool" or name.startswith("gpu_pool.")))
"""


def test_without_a_slice_the_pool_is_never_even_imported(jupyter_env: JupyterEnv) -> None:
    kernel = jupyter_env.install("plain", "")
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_A_SLICE, kernel], capture_output=True, text=True, check=False
    )
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr
    assert not (jupyter_env.folder / "pool").exists()


async def test_the_default_slice_comes_from_the_environment(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEFAULT_SLICE_VARIABLE, "10%")
    monkeypatch.setattr(KernelProvisionerFactory.instance(), "default_provisioner_name", "gpu-pool")
    await started_kernel(manager("python3"))
    assert str((await jupyter_env.only_lease()).request) == "10%"


async def test_a_kernelspec_without_slice_wins_over_the_default(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DEFAULT_SLICE_VARIABLE, "10%")
    km: AsyncKernelManager = manager(jupyter_env.install("plain", ""))
    await km.start_kernel()
    assert await jupyter_env.is_empty()


def courses(jupyter_env: JupyterEnv, *names: str) -> None:
    """Let the pool know courses of these names."""
    file = jupyter_env.folder / "config/gpu_pool_config.py"
    file.parent.mkdir(exist_ok=True)
    file.write_text(f"c.PoolSettings.courses = { {name: {} for name in names}!r}\n")


async def test_what_a_kernelspec_says_in_its_environment_counts_before_the_servers_own(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    courses(jupyter_env, "physics-autumn", "the-servers")
    monkeypatch.setenv(COURSE_VARIABLE, "the-servers")
    monkeypatch.setenv(DEFAULT_SLICE_VARIABLE, "10%")
    monkeypatch.setenv(URL_VARIABLE, f"embedded:{jupyter_env.folder}/nobodys/store.db")
    monkeypatch.setenv("TERM_NAME", "autumn")
    stated = {
        COURSE_VARIABLE: "physics-${TERM_NAME}",
        DEFAULT_SLICE_VARIABLE: "5%",
        URL_VARIABLE: jupyter_env.url,
    }
    name = jupyter_env.install("own", env=stated)
    # The slice is left for the environment to say.
    file = jupyter_env.folder / "data/kernels" / name / "kernel.json"
    spec = json.loads(file.read_text())
    del spec["metadata"]["kernel_provisioner"]["config"]["slice"]
    file.write_text(json.dumps(spec))
    km = await started_kernel(manager(name))
    lease = await jupyter_env.only_lease()
    assert (lease.holder.course, str(lease.request)) == ("physics-autumn", "5%")
    shown = await answer(km, "import os; print(os.environ['GPU_POOL_COURSE'], os.environ['GPU_POOL_URL'])")
    assert shown == f"physics-autumn {jupyter_env.url}\n"
    assert not (jupyter_env.folder / "nobodys").exists()


async def test_a_setting_of_the_kernelspec_counts_before_its_environment(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    courses(jupyter_env, "maths", "physics")
    km = manager(jupyter_env.install("own", course="maths", env={COURSE_VARIABLE: "physics"}))
    await km.start_kernel()
    assert (await jupyter_env.only_lease()).holder.course == "maths"
