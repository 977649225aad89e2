"""Kernels in tests that may sleep on disk and have imported what they need before they are started."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jupyter_client.manager import AsyncKernelManager

from gpu_pool_provisioner.hibernation.calling import why_not
from gpu_pool_provisioner.templates import TemplateProcess
from support.jupyter_env import JupyterEnv, answer
from support.warm_kernels import the_template

#: Says so of itself, and of this machine, and puts no kernel to disk.
_CRIU = "#!/bin/sh\n[ $1 = check ] || echo Version: 4.2\n"
_WHY = why_not("criu-of-nobody") if os.geteuid() == 0 else "only root starts such kernels without sudo."
#: Why no kernel that may sleep can be started here, even without CRIU; empty where one can.
WHY_NONE = "" if "criu-of-nobody" in _WHY else _WHY

#: Installs a kernelspec of such kernels with modules to preload: ``sleepers(*modules, **config)``.
Sleepers = Callable[..., str]
IS_PREPARED = "import sys; print('heavy' in sys.modules)"


def criu_of_nobody(folder: Path) -> str:
    """Write a program for which kernels are started that may sleep, and never do."""
    file = folder / "criu"
    file.write_text(_CRIU)
    file.chmod(0o755)
    return str(file)


def install(env: JupyterEnv, criu: str, *preload: str, name: str = "sleeper", **config: Any) -> str:
    """Write the kernelspec, and the module ``heavy`` unless it is there."""
    folder = modules(env)
    if not (folder / "heavy.py").exists():
        (folder / "heavy.py").touch()
    asleep = str(env.folder / "asleep")
    config = {"criu": criu, "hibernation_folder": asleep, "hibernate_after": 600.0, **config}
    return env.install(name, "20%", **{"preload": list(preload or ("heavy",)), **config})


def modules(env: JupyterEnv) -> Path:
    """Return the folder of the modules that kernels find."""
    folder = env.folder / "modules"
    folder.mkdir(exist_ok=True)
    return folder


async def is_prepared(manager: AsyncKernelManager) -> bool:
    """Start a kernel; return whether it had imported what is preloaded."""
    await manager.start_kernel()
    return await was_prepared(manager)


async def was_prepared(manager: AsyncKernelManager) -> bool:
    """Return whether a kernel that runs had imported what is preloaded."""
    return await answer(manager, IS_PREPARED) == "True\n"


async def until_prepared(manager: AsyncKernelManager) -> TemplateProcess:
    """Start a kernel, which is cold, and return what was prepared then."""
    assert not await is_prepared(manager)
    found = await the_template()
    assert found.is_ready, found.refusal
    return found
