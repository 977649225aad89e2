"""Fixtures of the tests that start kernels, and of those that suspend what uses a GPU."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import zmq.asyncio
from jupyter_client.manager import AsyncKernelManager

from gpu_pool_provisioner import pools
from gpu_pool_provisioner import templates as templates_module
from gpu_pool_provisioner.settings import DEFAULT_SLICE_VARIABLE
from gpu_pool_provisioner.templates import templates
from support import cuda_stub
from support.cuda_stub import Driver
from support.jupyter_env import JupyterEnv, Managers
from support.warm_kernels import Spec


@pytest.fixture
async def jupyter_env(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[JupyterEnv]:
    url = f"embedded:{tmp_path}/pool/store.db"
    variables = {
        "GPU_POOL_DEVICES": "V100-SXM2-32GB:1",
        "GPU_POOL_URL": url,
        "JUPYTER_DATA_DIR": str(tmp_path / "data"),
        "JUPYTER_RUNTIME_DIR": str(tmp_path / "runtime"),
        "JUPYTER_CONFIG_DIR": str(tmp_path / "config"),
        "IPYTHONDIR": str(tmp_path / "ipython"),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv(DEFAULT_SLICE_VARIABLE, raising=False)
    environment = JupyterEnv(tmp_path, url)
    yield environment
    await environment.close()
    pools.open_pools.clear()


@pytest.fixture
async def manager(jupyter_env: JupyterEnv) -> AsyncIterator[Managers]:
    """Make kernel managers whose kernels end with the test."""
    context = zmq.asyncio.Context()
    made: list[AsyncKernelManager] = []

    def make(
        kernel: str, kind: type[AsyncKernelManager] = AsyncKernelManager, **traits: Any
    ) -> AsyncKernelManager:
        made.append(kind(kernel_name=kernel, context=context, **traits))
        return made[-1]

    yield make
    for each in made:
        each.stop_restarter()
        if each.has_kernel:
            await each._async_kill_kernel()
        await each.cleanup_resources()
    context.destroy(linger=0)


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Let templates start at once, have their time on a busy machine, and end with the test."""
    monkeypatch.setattr(templates_module, "STARTS_AFTER", 0.0)
    monkeypatch.setattr(templates_module, "PAUSES_WITHIN", 0.0)
    answers_within(monkeypatch, 20.0)
    yield
    templates().end()


def answers_within(monkeypatch: pytest.MonkeyPatch, seconds: float, *others: str) -> None:
    """Set how long a template may take to answer, and other limits of it.

    They are the process's own and nobody's setting: what a template is asked is asked by Jupyter's server.
    """
    for limit in ("_ANSWERS_WITHIN", *others):
        monkeypatch.setattr(templates_module, limit, seconds)


@pytest.fixture
def spec(jupyter_env: JupyterEnv, soon: None, monkeypatch: pytest.MonkeyPatch) -> Spec:
    """Return what installs a kernelspec with modules to preload."""
    modules = jupyter_env.folder / "modules"
    modules.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(modules))

    def install(*preload: str, name: str = "warm", **sources: Any) -> str:
        for module, source in sources.items():
            (modules / f"{module}.py").write_text(source)
        return jupyter_env.install(name, preload=list(preload))

    return install


@pytest.fixture(scope="session")
def cuda_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build a stand-in for the driver; give its folder."""
    return cuda_stub.build(tmp_path_factory.mktemp("libraries"))


@pytest.fixture
def driver(cuda_libraries: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Driver:
    """Install the stand-in for the driver."""
    folder = tmp_path / "driver"
    folder.mkdir()
    monkeypatch.setenv("LD_LIBRARY_PATH", str(cuda_libraries))
    monkeypatch.setenv("DRIVER_STUB", str(folder))
    return Driver(folder)
