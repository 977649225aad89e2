"""Templates that start with the server: a real Jupyter server, whose first kernel is warm."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
from tornado.httpclient import HTTPResponse

from support.jupyter_env import TINY, JupyterEnv, eventually, printed_by
from support.server import Server

#: Whether a module that this test has made was imported before the first cell.
IS_WARM = "import sys; print('large' in sys.modules)"
Install = Callable[..., str]


@pytest.fixture
def install(jupyter_env: JupyterEnv, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Switch the extension on; return what installs kernels whose template is to start with the server."""
    modules = jupyter_env.folder / "modules"
    modules.mkdir()
    (modules / "large.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(modules))
    config = jupyter_env.folder / "config"
    config.mkdir(exist_ok=True)
    enabled = {"ServerApp": {"jpserver_extensions": {"gpu_pool_provisioner": True}}}
    (config / "jupyter_server_config.json").write_text(json.dumps(enabled))

    def install(name: str, size: str = "2%", **settings: Any) -> str:
        settings = {"preload": ["large"], "preload_with_server": True, **settings}
        return jupyter_env.install(name, size, **settings)

    return install


@pytest.fixture
async def start_server(jupyter_env: JupyterEnv) -> AsyncIterator[Callable[[], Any]]:
    """Return what starts the server, once the kernels are installed."""
    started: list[Server] = []

    async def start() -> Server:
        started.append(Server(jupyter_env))
        await eventually(started[0].started)
        return started[0]

    yield start
    for server in started:
        server.process.kill()
        server.process.wait()


async def says(server: Server, *words: str) -> None:
    """Wait until all of this is in the server's log."""

    async def is_said() -> bool:
        assert server.process.poll() is None, server.log
        return all(each in server.log for each in words)

    try:
        await eventually(is_said)
    except AssertionError:
        raise AssertionError(server.log) from None


async def printed(server: Server, session: HTTPResponse, code: str = IS_WARM) -> str:
    return await printed_by(server.client_of(session), code)


async def test_the_first_kernel_of_a_server_is_warm(install: Install, start_server: Any) -> None:
    name = install("two")
    server = await start_server()
    await says(server, "The template of the kernel two is ready")
    first = await server.open_notebook("one.ipynb", name)
    assert await printed(server, first) == "True\n"


@pytest.mark.long
async def test_the_servers_configuration_may_ask_for_all_kernels(
    jupyter_env: JupyterEnv, install: Install, start_server: Any
) -> None:
    jupyter_env.install("two")
    config = jupyter_env.folder / "config/jupyter_server_config.json"
    asked = {"preload": ["large"], "preload_with_server": True}
    config.write_text(json.dumps({**json.loads(config.read_text()), "GPUPoolProvisioner": asked}))
    server = await start_server()
    await says(server, "The template of the kernel two is ready")
    assert await printed(server, await server.open_notebook("one.ipynb", "two")) == "True\n"


@pytest.mark.long
async def test_the_caps_of_its_slice_are_known_beforehand(
    jupyter_env: JupyterEnv, install: Install, start_server: Any
) -> None:
    (jupyter_env.folder / "modules" / "jaxlib-0.6.0.dist-info").mkdir()
    name = install("memory", "4GiB")
    server = await start_server()
    await says(server, "The template of the kernel memory is ready")
    first = await server.open_notebook("one.ipynb", name)
    code = f"{IS_WARM}; import os; print(os.environ['XLA_PYTHON_CLIENT_MEM_FRACTION'])"
    assert await printed(server, first, code) == "True\n0.10943\n"


@pytest.mark.long
async def test_where_the_guess_is_wrong_the_first_kernel_is_cold_and_the_next_is_not(
    jupyter_env: JupyterEnv, install: Install, start_server: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (jupyter_env.folder / "modules" / "jaxlib-0.6.0.dist-info").mkdir()
    monkeypatch.setenv("GPU_POOL_DEVICES", "V100-SXM2-32GB:1,T4@16GiB:1")
    await jupyter_env.fill("1 model=V100")
    name = install("two", "20%")
    server = await start_server()
    await says(server, "The template of the kernel two is ready")
    answers = []

    async def is_warm() -> bool:
        session = await server.open_notebook(f"{len(answers)}.ipynb", name)
        answers.append(await printed(server, session))
        await server.ask("DELETE", f"api/sessions/{json.loads(session.body)['id']}")
        return answers[-1] == "True\n"

    await eventually(is_warm)
    assert answers[0] == "False\n"


@pytest.mark.long
async def test_what_cannot_start_is_told_and_keeps_nothing_else_from_starting(
    install: Install, start_server: Any
) -> None:
    install("a-lot", "lots")
    install("b-tiny", argv=TINY, language="tiny")
    install("c-missing", preload=["no_such_module"])
    good = install("d-good")
    install("e-same")
    server = await start_server()
    await says(
        server,
        "The template of the kernel a-lot does not start with the server: ",
        "No template starts with the server: its command is not one of an IPython kernel.",
        "No module named 'no_such_module'",
        "The template of the kernel d-good is ready",
    )
    assert await printed(server, await server.open_notebook("one.ipynb", good)) == "True\n"
    assert await printed(server, await server.open_notebook("two.ipynb", "e-same")) == "True\n"
    assert "e-same" not in server.log.partition("Kernel started")[0]
    assert await printed(server, await server.open_notebook("three.ipynb", "c-missing")) == "False\n"


@pytest.mark.long
async def test_there_are_no_more_than_allowed(install: Install, start_server: Any) -> None:
    first = install("a-one", max_templates=1)
    install("b-two", preload=["large", "json"], max_templates=1)
    server = await start_server()
    await says(server, "The template of the kernel a-one is ready")
    assert await printed(server, await server.open_notebook("one.ipynb", first)) == "True\n"
    assert await printed(server, await server.open_notebook("two.ipynb", "b-two")) == "False\n"


@pytest.mark.parametrize(
    ("config", "loaded"), [({"preload": ["json"]}, False), ({"preload_with_server": True}, True)]
)
def test_where_nobody_asks_nothing_is_loaded(
    jupyter_env: JupyterEnv, config: dict[str, Any], loaded: bool
) -> None:
    jupyter_env.install("two", **config)
    program = (
        "import asyncio, logging, sys\n"
        "from types import SimpleNamespace\n"
        "from jupyter_client.kernelspec import KernelSpecManager\n"
        "from jupyter_client.multikernelmanager import AsyncMultiKernelManager\n"
        "from gpu_pool_provisioner.server.extension import start_templates\n"
        "kernels = AsyncMultiKernelManager(kernel_spec_manager=KernelSpecManager())\n"
        "server = SimpleNamespace(config={}, log=logging.getLogger(), kernel_manager=kernels,\n"
        "    kernel_spec_manager=kernels.kernel_spec_manager)\n"
        "asyncio.run(start_templates(server))\n"
        "print(*[name for name in sys.modules if name.startswith('gpu_pool')])\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ("gpu_pool_client" in done.stdout.split()) == loaded, done.stderr
    if not loaded:
        parts = ("", ".server", ".jupyter_files", ".server.extension")
        assert done.stdout.split() == [f"gpu_pool_provisioner{part}" for part in parts]
