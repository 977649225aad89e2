"""A real JupyterLab with GPU kernels on one simulated V100, in folders of its own."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

from gpu_pool_client import parse_request
from gpu_pool_kernels.installer import install
from support.jupyter_env import eventually

SIZES = ("2%", "10%", "50%", "1")
#: Seconds for a server to end its kernels and itself.
_ENDS_WITHIN = 300.0
#: JupyterLab asks about news at its first start; nobody is there to answer.
SETTINGS = {"@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False}}


@dataclass(frozen=True)
class Lab:
    """A running JupyterLab; ``url`` opens it."""

    url: str

    async def status(self) -> Any:
        """Return what ``gpu-pool status --json`` says of the pool that its kernels use."""
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "gpu_pool.cli", "status", "--json"), stdout=asyncio.subprocess.PIPE
        )
        output, _ = await process.communicate()
        assert process.returncode == 0
        return json.loads(output)

    async def is_empty(self) -> bool:
        status = await self.status()
        return not status["leases"] and not status["queue"]


def environment(folder: Path, gpus: int = 1) -> Mapping[str, str]:
    """Return the variables by which Jupyter and the pool use nothing but ``folder``."""
    return {
        "GPU_POOL_DEVICES": f"V100-SXM2-32GB:{gpus}",
        "GPU_POOL_URL": f"embedded:{folder}/store.db",
        "JUPYTER_PATH": f"{folder}/share/jupyter",
        "JUPYTER_CONFIG_DIR": f"{folder}/config",
        "JUPYTER_DATA_DIR": f"{folder}/data",
        "JUPYTER_RUNTIME_DIR": f"{folder}/runtime",
        "JUPYTERLAB_SETTINGS_DIR": f"{folder}/settings",
        "JUPYTERLAB_WORKSPACES_DIR": f"{folder}/workspaces",
        "IPYTHONDIR": f"{folder}/ipython",
    }


@asynccontextmanager
async def running_lab(folder: Path, sizes: Iterable[str] = SIZES) -> AsyncIterator[Lab]:
    """Start JupyterLab with kernels of these sizes in ``folder``, empty or a lab's before; end it in the end.

    This process's own environment must be :func:`environment`.
    """
    _prepare(folder, sizes)
    with _new_log(folder) as log:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-X", "faulthandler", "-m", "jupyterlab", "--no-browser", "--allow-root"),
            *("--ServerApp.port=0", f"--ServerApp.root_dir={folder}/notebooks"),
            stdout=log,
            stderr=log,
            cwd=folder,
        )
    try:
        yield Lab(await _address(process, folder))
    finally:
        await _end(process, folder)


async def _end(process: asyncio.subprocess.Process, folder: Path) -> None:
    """End the server; one that hangs must do so for the one known reason that is not ours.

    A Jupyter server that stops its loop while it reads or writes a file waits for AnyIO's thread for
    ever: https://github.com/jupyterlab/jupyterlab/issues/10442.
    """
    if process.returncode is None:
        process.terminate()
    try:
        await asyncio.wait_for(process.wait(), _ENDS_WITHIN)
    except asyncio.TimeoutError:
        process.send_signal(signal.SIGABRT)  # faulthandler writes all stacks into the log
        await process.wait()
        stacks = (folder / "log").read_text(errors="replace").rpartition("Fatal Python error")[2]
        is_known = "in _shutdown" in stacks and "anyio" in stacks
        assert is_known, f"JupyterLab does not end: {stacks}"


def _prepare(folder: Path, sizes: Iterable[str]) -> None:
    (folder / "notebooks").mkdir(exist_ok=True)
    settings = folder / "config" / "labconfig" / "default_setting_overrides.json"
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps(SETTINGS))
    install([parse_request(size) for size in sizes], prefix=folder)


def _new_log(folder: Path) -> BinaryIO:
    return open(folder / "log", "wb")


async def _address(process: asyncio.subprocess.Process, folder: Path) -> str:
    """Return the URL, with its token, that the server writes down once it listens."""
    written = folder / "runtime" / f"jpserver-{process.pid}.json"

    async def listens() -> bool:
        assert process.returncode is None, (folder / "log").read_text()
        if not written.exists() or not written.read_text().endswith("}"):
            return False
        try:  # it is written before somebody listens
            _, connection = await asyncio.open_connection(
                "localhost", json.loads(written.read_text())["port"]
            )
        except OSError:
            return False
        connection.close()
        return True

    await eventually(listens)
    server = json.loads(written.read_text())
    return f"{server['url']}lab?token={server['token']}"
