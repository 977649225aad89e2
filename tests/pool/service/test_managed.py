"""A JupyterHub starts the service itself, behind its proxy, as its documentation says."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_pool_client import Holder, LeaseState, connect, parse_request
from support.hub import Hub, write_hub
from support.hub_with_proxy import proxy_command
from support.ports import free_port
from support.service import DEVICES

PROXY = os.environ.get("GPU_POOL_PROXY") or " ".join(proxy_command() or ()) or None
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(
        PROXY is None, reason="configurable-http-proxy is not installed (or GPU_POOL_PROXY not set)"
    ),
]

_MANAGED = """
c.JupyterHub.bind_url = "http://127.0.0.1:{public}/"
c.JupyterHub.hub_bind_url = "http://127.0.0.1:{hub}/"
c.JupyterHub.proxy_class = "configurable-http-proxy"
c.ConfigurableHTTPProxy.command = [{proxy!r}]
c.ConfigurableHTTPProxy.api_url = "http://127.0.0.1:{api}"
c.JupyterHub.services[1:] = [
    {{
        "name": "gpu-pool",
        "url": "http://127.0.0.1:{service}",
        "command": [{python!r}, "-m", "gpu_pool.cli", "serve", "--socket", {socket!r},
                    "--store", {store!r}],
        "environment": {{"GPU_POOL_DEVICES": {devices!r}, "JUPYTER_CONFIG_DIR": {folder!r}}},
        "oauth_no_confirm": True,
    }},
]
"""


@pytest.fixture
def public() -> int:
    return free_port()


@pytest.fixture
def managing(folder: Path, public: int) -> Iterator[Hub]:
    hub = Hub(folder, free_port(), free_port())
    values = {"public": public, "hub": hub.port, "service": hub.service_port, "api": free_port()}
    values |= {"proxy": PROXY, "python": sys.executable, "devices": DEVICES, "folder": str(folder)}
    values |= {"socket": str(folder / "pool.sock"), "store": str(folder / "store.db")}
    write_hub(hub, _MANAGED.format(**values))
    hub.start()
    yield hub
    hub.close()


async def test_a_server_gets_a_slice_through_the_proxy(
    managing: Hub, public: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_POOL_TOKEN", await managing.start_server("ada"))
    async with connect(f"http://127.0.0.1:{public}/services/gpu-pool") as pool:
        lease = await pool.request(parse_request("50%"), Holder(""), "key")
        assert (lease.state, lease.holder.user) == (LeaseState.HELD, "ada")
        await pool.release(lease.id)
    async with connect(f"unix:{managing.folder}/pool.sock") as pool:
        assert [row.user for row in await pool.history()] == ["ada"]
