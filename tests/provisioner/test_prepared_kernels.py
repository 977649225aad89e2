"""Kernels that may sleep on disk and have imported what they need before they are started, by a real CRIU."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from jupyter_client.manager import AsyncKernelManager

from gpu_pool_provisioner.hibernation.kept import why_not
from gpu_pool_provisioner.session import State
from gpu_pool_provisioner.templates import TemplateProcess
from support.frontend import frontend
from support.jupyter_env import JupyterEnv, Managers, answer, eventually, is_running
from support.warm_kernels import the_template

CRIU = os.environ.get("CRIU", "criu")
_WHY = why_not(CRIU)
pytestmark = [
    pytest.mark.hibernation,
    pytest.mark.skipif(bool(_WHY), reason=f"kernels cannot sleep here: {_WHY} CRIU names the program."),
    pytest.mark.usefixtures("soon"),
]

Sleeper = Callable[..., str]
IS_PREPARED = "import sys; print('heavy' in sys.modules)"


@pytest.fixture
def sleeper(jupyter_env: JupyterEnv, monkeypatch: pytest.MonkeyPatch) -> Sleeper:
    """Return what installs a kernelspec of kernels that may sleep, with modules to preload."""
    modules = jupyter_env.folder / "modules"
    modules.mkdir()
    monkeypatch.setenv("PYTHONPATH", str(modules))

    def install(
        *preload: str, name: str = "sleeper", after: float = 600.0, heavy: str = "", **config: Any
    ) -> str:
        (modules / "heavy.py").write_text(heavy)
        folder = str(jupyter_env.folder / "asleep")
        config = {"criu": CRIU, "hibernation_folder": folder, "hibernate_after": after, **config}
        return jupyter_env.install(name, "20%", preload=list(preload or ("heavy",)), **config)

    return install


async def prepared(manager: AsyncKernelManager) -> TemplateProcess:
    """Start a kernel, which is cold, and return what was prepared then."""
    await manager.start_kernel()
    assert await answer(manager, IS_PREPARED) == "False\n"
    found = await the_template()
    assert found.is_ready, found.refusal
    return found


async def test_the_second_kernel_is_one_that_was_prepared_and_another_takes_its_place(
    sleeper: Sleeper, manager: Managers
) -> None:
    name = sleeper()
    first = await prepared(manager(name))
    km = manager(name)
    await km.start_kernel()
    assert km.provisioner.pid == first.pid
    assert await answer(km, IS_PREPARED) == "True\n"
    second = await the_template()
    assert second.pid != first.pid
    await km.shutdown_kernel(now=True)
    assert not is_running(first.pid)
    assert is_running(second.pid)


async def test_it_sleeps_and_wakes(sleeper: Sleeper, manager: Managers) -> None:
    name = sleeper(after=0.5)
    await prepared(manager(name))
    km = manager(name)
    await km.start_kernel()
    async with frontend(km) as page:
        await page.run("import os, sys; kept, pid = 'heavy' in sys.modules, os.getpid()").done()

        async def is_asleep() -> bool:
            return km.provisioner.session.state is State.HIBERNATED

        await eventually(is_asleep)
        assert (await page.run("print(kept, pid == os.getpid() == 3)").done()).outputs == ["True True\n"]
