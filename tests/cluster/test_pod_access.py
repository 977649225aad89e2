"""A service in a pod asks the API server as the account that its kubelet has put there."""

from __future__ import annotations

import ssl
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from aiohttp import web

from gpu_pool.cluster.api import Api, connect
from gpu_pool.cluster.api_access import PodAccess
from gpu_pool_client import PoolUnreachable
from support.certificates import server_certificate


@dataclass
class Account:
    """A service account's files, the API server that they are for, and in whose name it was asked last."""

    folder: Path
    environment: dict[str, str]
    asked_by: str = ""
    #: Seconds by which the account's holder goes.
    now: float = 1000.0

    def access(self, **more: bool) -> PodAccess:
        return PodAccess(self.folder, self.environment, lambda: self.now, **more)


@pytest.fixture
async def account(tmp_path: Path) -> AsyncIterator[Account]:
    pair = server_certificate(tmp_path, ["127.0.0.1"])
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair.certificate, pair.key)
    folder = tmp_path / "account"
    folder.mkdir()
    (folder / "ca.crt").write_bytes(pair.authority.read_bytes())
    (folder / "namespace").write_text("jupyterhub\n")
    (folder / "token").write_text("first\n")
    account = Account(folder, {"KUBERNETES_SERVICE_HOST": "127.0.0.1"})

    async def answered(request: web.Request) -> web.Response:
        account.asked_by = request.headers["Authorization"]
        return web.json_response({"items": []})

    app = web.Application()
    app.router.add_get("/{path:.*}", answered)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0, ssl_context=context).start()
    account.environment["KUBERNETES_SERVICE_PORT"] = str(runner.addresses[0][1])
    yield account
    await runner.cleanup()


async def test_it_asks_by_its_token_which_is_another_one_in_time(account: Account) -> None:
    access = account.access()
    api = Api(access, access.namespace)
    assert api.namespace == "jupyterhub"
    await api.list("/api/v1/nodes", {})
    assert account.asked_by == "Bearer first"
    (account.folder / "token").write_text("second")
    account.now += 61
    await api.list("/api/v1/nodes", {})
    assert account.asked_by == "Bearer second"
    # What cannot be read now is kept: it was good a minute ago.
    (account.folder / "token").unlink()
    account.now += 61
    await api.list("/api/v1/nodes", {})
    assert account.asked_by == "Bearer second"
    await api.close()


@pytest.mark.parametrize("missing", ["token", "namespace", "ca.crt"])
async def test_an_account_that_is_not_complete_is_none(account: Account, missing: str) -> None:
    (account.folder / missing).unlink()
    with pytest.raises(FileNotFoundError):
        account.access()


async def test_an_empty_token_and_no_address_are_told(account: Account) -> None:
    (account.folder / "token").write_text("\n")
    with pytest.raises(ValueError, match="token is empty"):
        account.access()
    account.environment.clear()
    with pytest.raises(ValueError, match="KUBERNETES_SERVICE_HOST"):
        account.access()


async def test_an_address_of_ipv6_stands_in_brackets(account: Account) -> None:
    account.environment["KUBERNETES_SERVICE_HOST"] = "fd00::1"
    access = account.access()
    assert access.url.startswith("https://[fd00::1]:")
    await access.close()


async def test_what_is_no_pod_is_told_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("KUBECONFIG", "KUBERNETES_SERVICE_HOST"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(PoolUnreachable, match="There is no cluster to serve: KUBERNETES_SERVICE_HOST"):
        await connect()


def test_a_service_starts_without_what_takes_long_to_import() -> None:
    # Nor without JupyterHub's login: both take as long to import as all the rest.
    code = "import sys, gpu_pool.service.app, gpu_pool.cluster.backend\n"
    code += "print({'kubernetes_asyncio', 'jupyterhub', 'sqlalchemy'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
