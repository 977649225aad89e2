"""Every address with what no browser sends: it is answered, without an error of ours and a traceback."""

from __future__ import annotations

import asyncio
import itertools
import logging
import re
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

import pytest

from gpu_pool.service.api import ROUTES
from gpu_pool.service.site import ROUTES as PAGES
from gpu_pool_client._remote.exchange import ask
from support.dashboard import ADMIN, Site, courses_of, showing
from support.hub import PREFIX
from support.service import ForkServer, serving
from support.stand_in_hub import Outcome, behind_stand_in, read_answer
from support.streams import closing

#: What is put in place of each parameter, and behind each address.
HOSTILE: Final = (
    "%00",
    "x%00.css",
    "%2e%2e",
    "%2e%2e%2f%2e%2e%2fetc%2fpasswd",
    "..%5c..",
    "%ff%fe",
    "%c0%af",
    "%ed%a0%80",
    "%F0%9F%92%A9",
    "%e2%80%ae",
    "%0d%0aX-Header:%20yes",
    "%",
    "%zz",
    "a" * 400,
    "a" * 5000,
    "%41" * 3000,
    "'%22%3Cscript%3E",
    "{{1}}",
    "-1",
    "9" * 400,
    "nan",
    "%D9%A1%D9%A2",
)
#: Those of which each stands for several, for tests that are to be fast.
FEW: Final = ("x%00.css", "%2e%2e%2f%2e%2e%2fetc%2fpasswd", "%ff%fe", "a" * 5000)
#: Bytes that are no text, in headers that are read somewhere.
HEADERS: Final = (
    b"Authorization: Bearer \xff\xfe",
    b"Authorization: Bearer \x00",
    b"Authorization: \xf0\x9f\x92\xa9",
    b"Authorization: Bearer " + b"a" * 9000,
    b"Cookie: service-gpu-pool=\xff\xfe; _xsrf=\x00",
    b'Cookie: service-gpu-pool="\\377\\000"; _xsrf="2|\\377|"',
    b"Cookie: service-gpu-pool=2|1:0|10:9|16:service-gpu-pool|8:////|" + b"0" * 64,
    b"Cookie: _xsrf=2|zz|zz|zz; _xsrf=2|a|%00|99999999999999999999999",
    b"Cookie: service-gpu-pool-oauth-state=%ff%00; ;;;=;",
    b"Cookie: " + b"a=b; " * 2000,
    b"Last-Event-ID: \xff\xfe\x00",
    b"If-None-Match: \xff",
    b"If-Modified-Since: \xff\xfe",
    b"If-Modified-Since: Thu, 99 Xxx 99999 99:99:99 GMT",
    b"If-Modified-Since: Fri, 31 Dec 9999 23:59:59 -9999",
    b"Range: bytes=-99999999999999999999",
    b"Range: bytes=\xff-",
    b"Accept-Language: \xff;q=x",
    b"X-Forwarded-For: \xff, ::%00",
    b"X-Forwarded-Proto: \xff",
    b"X-Gpu-Pool-Client: \xff\x00",
    b"Sec-Fetch-Mode: \xff",
    b"Content-Type: multipart/form-data",
    b"Content-Type: multipart/form-data; boundary=\xff",
    b"Content-Type: application/x-www-form-urlencoded; charset=\xff",
    b"Content-Encoding: gzip",
    b"Host: \xff\x00",
    b"Host: [::",
)
METHODS: Final = ("GET", "POST", "DELETE", "HEAD", "PUT", "OPTIONS")


def filled(pattern: str, text: str) -> str:
    return re.sub(r"{\w+}|\([^()]*\)", lambda _: text, pattern)


def addresses_of_the_api(texts: Sequence[str]) -> Iterator[str]:
    """Yield each address with each of the hostile texts: as a parameter, in the query, and behind it."""
    for route in ROUTES:
        plain = f"api/v1{filled(route.path, '1-0')}"
        names = {name for exchange in route.exchanges.values() for name in exchange.query} | {"any"}
        for text in texts:
            if "{" in route.path:
                yield f"api/v1{filled(route.path, text)}"
            yield f"{plain}/{text}"
            for name in sorted(names):
                yield f"{plain}?{name}={text}"
            yield f"{plain}?{text}={text}&&=&;"


def addresses_of_pages(texts: Sequence[str]) -> Iterator[str]:
    for path, _ in PAGES:
        for text in texts:
            if "(" in path:
                yield filled(path, text)
                yield filled(path, f"ml{text}")
            if path != r".*":
                yield f"{filled(path, 'ml')}?said={text}&days={text}&version={text}&live={text}&{text}"
    for text in texts:
        yield text


def addresses_of_files(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        yield f"static/{text}"
        yield f"static/pool.js{text}.css"
        yield f"static/{text}/pool.js"
        yield f"static/pool.js?v={text}"
    yield "static/"
    yield "static"
    yield "static/."
    yield "static//etc/passwd"


def addresses_beside(texts: Sequence[str]) -> Iterator[str]:
    for text in texts:
        yield f"oauth_callback?code={text}&state={text}&error={text}"
        yield f"oauth_callback/{text}"
        yield f"metrics?{text}"
        yield f"api/{text}"


def request_of(method: str, path: str, headers: tuple[bytes, ...] = ()) -> bytes:
    lines = [f"{method} {PREFIX}{path} HTTP/1.1".encode(), b"Host: x", b"Connection: close", *headers]
    if method in ("POST", "PUT"):
        lines.append(b"Content-Length: 2")
    return b"\r\n".join(lines) + b"\r\n\r\n" + (b"{}" if method in ("POST", "PUT") else b"")


async def answer_of(port: int, request: bytes) -> Outcome | None:
    """Return what is answered; None for a connection that is ended without a word."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    async with closing(writer):
        try:
            writer.write(request)
            found = await asyncio.wait_for(reader.read(), 120)
        except ConnectionResetError:
            return None
    return read_answer(found) if found else None


async def walk(port: int, requests: list[bytes]) -> list[str]:
    """Make all requests, some at a time; return those that were answered by an error of ours."""
    wrong: list[str] = []
    left = iter(requests)

    async def some() -> None:
        for request in left:
            found = await answer_of(port, request)
            if found is not None and (found.status >= 500 or b"Traceback" in found.body):
                wrong.append(f"{found.status}: {request[:150]!r}")

    await asyncio.gather(*(some() for _ in range(8)))
    return wrong


@pytest.mark.parametrize("token", ["", "ada", "root"])
@pytest.mark.parametrize("texts", [FEW, pytest.param(HOSTILE, marks=pytest.mark.long)], ids=["few", "all"])
async def test_no_address_makes_an_error_or_a_traceback(
    children: ForkServer, open_folder: Path, texts: Sequence[str], token: str
) -> None:
    settings = "c.ServeApp.max_decisions = c.ServeApp.max_requests = 1_000_000"
    async with behind_stand_in(children, open_folder / "pool", settings) as (hub, service):
        hub.users, hub.admins = {"ada": "ada", "root": "root"}, {"root"}
        headers = (f"Authorization: Bearer {token}".encode(),) if token else ()
        every = [*addresses_of_the_api(texts), *addresses_beside(texts)]
        if not token:
            every += [*addresses_of_pages(texts), *addresses_of_files(texts)]
        requests = [request_of("GET", path, headers) for path in every]
        others = itertools.cycle(METHODS[1:])
        requests += [request_of(next(others), path, headers) for path in every[::7]]
        assert await walk(service.hub.service_port, requests) == []
        assert "Traceback" not in service.service.log
        assert "ERROR" not in service.service.log


@pytest.mark.long
async def test_no_header_makes_an_error_or_a_traceback(children: ForkServer, open_folder: Path) -> None:
    async with behind_stand_in(children, open_folder / "pool") as (hub, service):
        hub.users = {"ada": "ada"}
        paths = [
            "api/v1/status", "api/v1/leases", "api/v1/health", "metrics", "oauth_callback",
            "", "admin", "courses/ml/edit", "leases/1-0/release", "static/pool.js", "static/", "nothing",
        ]  # fmt: skip
        known = b"Authorization: Bearer ada"
        requests = [
            request_of(method, path, (header, *more))
            for path, header, method in itertools.product(paths, HEADERS, ("GET", "POST"))
            for more in ((), (known,))
        ]
        assert await walk(service.hub.service_port, requests) == []
        assert "Traceback" not in service.service.log
        assert "ERROR" not in service.service.log


async def test_a_file_s_name_that_none_can_have_is_not_found(children: ForkServer, open_folder: Path) -> None:
    async with behind_stand_in(children, open_folder / "pool") as (_, service):
        for path in ("static/pool.js%00.css", "static/%00", f"static/{'a' * 5000}", "static/%ff"):
            found = await answer_of(service.hub.service_port, request_of("GET", path))
            assert found is not None
            assert found.status in (400, 404), path
        found = await answer_of(service.hub.service_port, request_of("GET", "static/pool.js"))
        assert found is not None
        assert found.status == 200


@pytest.mark.long
async def test_no_address_of_the_socket_makes_an_error(children: ForkServer, open_folder: Path) -> None:
    async with serving(children, open_folder / "pool") as service:
        for path in addresses_of_the_api(HOSTILE):
            with suppress(ConnectionError):  # what is no HTTP ends without an answer
                answer = await ask(service.socket, "GET", f"/{path}", None, 30)
                assert answer.status < 500, path
        assert "Traceback" not in service.log


# -- Pages of those who are known ---------------------------------------------


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with showing(tmp_path, 1, courses_of({"ml": "Machine Learning"})) as site:
        yield site


@pytest.mark.parametrize("user", ["ada", "turing", ADMIN])
@pytest.mark.parametrize("texts", [FEW, pytest.param(HOSTILE, marks=pytest.mark.long)], ids=["few", "all"])
async def test_no_page_makes_an_error_for_those_who_are_known(
    site: Site, texts: Sequence[str], user: str, caplog: pytest.LogCaptureFixture
) -> None:
    port = int(site.url.split(":")[2].partition("/")[0])
    cookie = f"Cookie: user={user}".encode()
    requests = [request_of("GET", path, (cookie,)) for path in addresses_of_pages(texts)]
    requests += [request_of("POST", path, (cookie,)) for path in addresses_of_pages(texts)]
    assert await walk(port, requests) == []
    assert [each for each in caplog.records if each.levelno >= logging.ERROR] == []
