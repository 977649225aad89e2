"""API servers whose certificates are good, and not of the form that Python 3.13 wants."""

from __future__ import annotations

import logging
import ssl
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from gpu_pool.cluster.api import ApiAway, connect
from gpu_pool.cluster.backend import open_cluster
from gpu_pool.cluster.settings import ClusterTimes, KubernetesSettings
from gpu_pool.cluster.snapshot import take_snapshot
from gpu_pool.courses import Courses
from gpu_pool.settings import PoolSettings
from gpu_pool_client import PoolUnreachable
from support.certificates import server_certificate
from support.control_plane import write_kubeconfig


@pytest.fixture(autouse=True)
def strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Verify as Python 3.13 does by itself."""
    made = ssl.create_default_context

    def strictly(*arguments: str, **more: str) -> ssl.SSLContext:
        context = made(*arguments, **more)
        context.verify_flags |= ssl.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr("ssl.create_default_context", strictly)


async def serving(folder: Path, certified: str, *, lax: bool) -> tuple[web.AppRunner, Path]:
    """Serve empty lists as an API server does; return how it is reached."""
    pair = server_certificate(folder, [certified], lax=lax)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)

    async def empty(_: web.Request) -> web.Response:
        return web.json_response({"items": [], "metadata": {"resourceVersion": "1"}})

    app = web.Application()
    app.router.add_get("/{path:.*}", empty)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    port = runner.addresses[0][1]
    url = f"https://127.0.0.1:{port}"
    return runner, write_kubeconfig(folder / "kubeconfig", url, "token", pair.authority)


@pytest.fixture
async def lax_server(tmp_path: Path) -> AsyncIterator[Path]:
    runner, kubeconfig = await serving(tmp_path, "127.0.0.1", lax=True)
    yield kubeconfig
    await runner.cleanup()


async def test_a_certificate_of_the_right_form_is_accepted(tmp_path: Path) -> None:
    runner, kubeconfig = await serving(tmp_path, "127.0.0.1", lax=False)
    assert (await take_snapshot(str(kubeconfig))).problems == ()
    await runner.cleanup()


async def test_whoever_looks_is_told_which_setting_the_service_needs(lax_server: Path) -> None:
    (problem,) = (await take_snapshot(str(lax_server))).problems
    assert "Missing Authority Key Identifier" in problem or "key usage" in problem
    assert "c.KubernetesSettings.lax_certificates = True" in problem


async def test_a_service_says_which_setting_it_needs(lax_server: Path, tmp_path: Path) -> None:
    settings = KubernetesSettings(kubeconfig=str(lax_server), times=ClusterTimes(listed_within=5.0))
    log = logging.getLogger("gpu_pool.tests")
    pool = await open_cluster(tmp_path / "store.db", PoolSettings(), settings, Courses, log)
    with pytest.raises(
        PoolUnreachable, match="lax_certificates = True they are accepted, and still verified"
    ):
        async with pool:
            pass


async def test_with_the_setting_they_are_accepted(lax_server: Path) -> None:
    api = await connect(str(lax_server), lax=True)
    assert await api.list("/api/v1/nodes", {}) == {"items": [], "metadata": {"resourceVersion": "1"}}
    await api.close()


async def test_whose_they_are_is_verified_all_the_same(tmp_path: Path) -> None:
    runner, kubeconfig = await serving(tmp_path, "10.0.0.7", lax=True)
    api = await connect(str(kubeconfig), lax=True)
    with pytest.raises(ApiAway, match="IP address mismatch") as caught:
        await api.list("/api/v1/nodes", {})
    assert not caught.value.too_lax
    await api.close()
    await runner.cleanup()
