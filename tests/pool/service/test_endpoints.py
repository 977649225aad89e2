"""What a URL of a service means, and how its client makes itself known there."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest
from tornado.httpserver import HTTPServer
from tornado.netutil import bind_sockets
from tornado.web import Application, RequestHandler

from gpu_pool_client import BadRequest, PoolUnreachable, connect
from gpu_pool_client._remote.client import RemotePool, RetryTimes
from gpu_pool_client._remote.endpoints import http_endpoint


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_POOL_TOKEN", "secret-token")


@pytest.mark.parametrize(
    ("url", "full", "host", "root"),
    [
        ("http://hub/services/gpu-pool", "http://hub/services/gpu-pool", "hub", "/services/gpu-pool/api/v1"),
        ("http://hub:81/x/", "http://hub:81/x", "hub:81", "/x/api/v1"),
        ("https://hub", "https://hub", "hub", "/api/v1"),
        ("https://hub:443/a", "https://hub/a", "hub", "/a/api/v1"),
        ("http://[::1]:80/a", "http://[::1]/a", "[::1]", "/a/api/v1"),
    ],
)
def test_a_url_says_where(url: str, full: str, host: str, root: str) -> None:
    found = http_endpoint(url)
    assert (found.url, found.where.name, found.root) == (full, host, root)  # type: ignore[union-attr]
    assert http_endpoint(found.url) == found


@pytest.mark.parametrize(
    "url",
    ["http:", "http://", "http:///a", "http://hub:x", "http://hub:99999", "http://hub/?token=s3cret", "http://h/#a",
     "http://ada:s3cret@hub/", "http://s3cret@hub", "http://hub/a b", "http://hub/\r\nX: y", "http://hüb/", "http://["],
)  # fmt: skip
def test_what_is_no_url_of_a_service_is_refused_without_its_secrets(url: str) -> None:
    with pytest.raises(BadRequest, match="Accepted") as caught:
        connect(url)
    assert "s3cret" not in str(caught.value)


def test_the_token_of_the_environment_is_shown_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUPYTERHUB_API_TOKEN", "of-the-server")
    assert http_endpoint("http://hub").token == "secret-token"
    assert "secret-token" not in repr(http_endpoint("http://hub"))
    monkeypatch.delenv("GPU_POOL_TOKEN")
    assert http_endpoint("http://hub").token == "of-the-server"
    monkeypatch.setenv("GPU_POOL_TOKEN", "two\r\nlines")
    with pytest.raises(BadRequest, match="GPU_POOL_TOKEN"):
        connect("http://hub")


async def test_a_host_that_is_not_there_is_told() -> None:
    async with connect("http://nowhere.invalid/services/gpu-pool") as pool:
        with pytest.raises(PoolUnreachable, match="The host of the GPU pool cannot be found"):
            await pool.status()


async def test_a_certificate_that_nobody_vouches_for_is_refused(tmp_path: Path) -> None:
    asked = []

    class Asked(RequestHandler):
        def prepare(self) -> None:
            asked.append(self.request.headers)

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate(tmp_path))
    server = HTTPServer(Application([(".*", Asked)]), ssl_options=context)
    (socket,) = bind_sockets(0, "127.0.0.1")
    server.add_socket(socket)
    async with connect(f"https://127.0.0.1:{socket.getsockname()[1]}/services/gpu-pool") as pool:
        with pytest.raises(PoolUnreachable, match="could not prove its identity"):
            await pool.status()
    assert asked == []
    server.stop()


def certificate(folder: Path) -> tuple[Path, Path]:
    made = folder / "certificate.pem", folder / "key.pem"
    command = "openssl req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN=127.0.0.1"
    alternative = ["-addext", "subjectAltName=IP:127.0.0.1"]
    subprocess.run(
        [*command.split(), *alternative, "-out", made[0], "-keyout", made[1]], check=True, capture_output=True
    )
    return made


@pytest.mark.parametrize("status", [302, 502, 503, 504])
@pytest.mark.parametrize("asks", ["status", "wait", "watch"])
async def test_a_proxy_before_a_service_that_is_gone_is_not_taken_for_it(status: int, asks: str) -> None:
    """Nor asked without a pause: a JupyterHub's sends whoever asks to the Hub where it has no route."""

    class Gone(RequestHandler):
        def prepare(self) -> None:
            self.set_status(status)
            self.set_header("Location", "/hub/services/gpu-pool/")
            self.finish("<html>Service Unavailable</html>")

    server = HTTPServer(Application([(".*", Gone)]))
    (socket,) = bind_sockets(0, "127.0.0.1")
    server.add_socket(socket)
    endpoint = http_endpoint(f"http://127.0.0.1:{socket.getsockname()[1]}/services/gpu-pool")
    async with RemotePool(endpoint, RetryTimes(0.2, 0.2, 0.2)) as pool:
        ask = {
            "status": pool.status,
            "wait": lambda: pool.wait("1-abcd"),
            "watch": lambda: anext(pool.watch("1-abcd")),
        }[asks]
        with pytest.raises(PoolUnreachable, match="does not answer at the moment"):
            await ask()
    server.stop()
