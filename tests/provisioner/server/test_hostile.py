"""Pages of others, without a token, or with nonsense; and servers of others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tornado.httpclient import AsyncHTTPClient, HTTPClientError, HTTPRequest

from support.jupyter_env import JupyterEnv, eventually
from support.server import TOKEN
from support.slice_pages import PagesServer, serving_pages

pytestmark = pytest.mark.long

_ADDRESSES = ["slices", "offers", "slices/none/memory"]


async def _ask(pages: PagesServer, method: str, path: str, **headers: str) -> tuple[int, dict[str, Any]]:
    body = None if method == "GET" else "{}"
    request = HTTPRequest(f"{pages.url}gpu-pool/api/{path}", method=method, headers=headers, body=body)
    answer = await AsyncHTTPClient().fetch(request, raise_error=False)
    return answer.code, json.loads(answer.body)


async def test_who_is_not_logged_in_or_comes_from_elsewhere_is_told_nothing(
    jupyter_env: JupyterEnv, pages: PagesServer
) -> None:
    kernel_id = await pages.start("one.ipynb", jupyter_env.install("two"))
    for address in _ADDRESSES:
        code, said = await _ask(pages, "GET", address)
        assert (code, sorted(said)) == (403, ["advice", "message"])
    code, _ = await _ask(pages, "POST", f"slices/{kernel_id}/give-back")
    assert code == 403
    # A page of the server's own, whose login is a cookie, has to show that it is one.
    cookies = await _logged_in(pages)
    code, _ = await _ask(pages, "GET", "slices", Cookie=cookies)
    assert code == 200
    elsewhere = {"Cookie": cookies, "Origin": "https://evil.example"}
    for headers in ({"Accept": "*/*"}, {"Authorization": "token wrong"}, elsewhere):
        with pytest.raises(HTTPClientError) as refused:
            await pages.connect(**headers)
        assert refused.value.code == 403
    code, _ = await _ask(pages, "GET", "slices", **elsewhere)
    assert code in (403, 404)
    code, said = await _ask(pages, "POST", f"slices/{kernel_id}/give-back", Cookie=cookies)
    assert code == 403
    assert "_xsrf" in said["message"]
    assert (await jupyter_env.only_lease()).slices


async def test_a_server_that_demands_a_login_everywhere_has_nothing_to_complain_of(
    jupyter_env: JupyterEnv,
) -> None:
    jupyter_env.install("two")
    enabled = {**PagesServer.ENABLED, "allow_unauthenticated_access": False}
    async with serving_pages(jupyter_env, ServerApp=enabled) as pages, pages.page() as page:
        await page.sees(lambda state: "slices" in state and page.states)
        assert "gpu_pool_provisioner" in pages.log
        assert "EventsHandler" not in pages.log


async def _logged_in(pages: PagesServer) -> str:
    """Return the cookies of a browser that has logged in by the token in its address."""
    request = HTTPRequest(f"{pages.url}api/me?token={TOKEN.replace(' ', '%20')}", follow_redirects=False)
    answer = await AsyncHTTPClient().fetch(request, raise_error=False)
    found = [each.partition(";")[0] for each in answer.headers.get_list("Set-Cookie")]
    assert found, (answer.code, answer.body)
    return "; ".join(found)


NONSENSE: list[tuple[str, Any, str]] = [
    ("keep", {}, "seconds: Field required"),
    ("keep", {"seconds": "3600"}, "seconds"),
    ("keep", {"seconds": 0}, "greater than or equal to 1"),
    ("keep", {"seconds": 10**30}, "less than or equal to"),
    ("keep", {"seconds": 1, "more": 1}, "more: Extra inputs"),
    ("keep", [], "the body"),
    ("resize", {"size": 10}, "size: Input should be a valid string"),
    ("resize", {"size": "%" * 201}, "at most 200"),
    ("resize", {"size": "lots"}, "lots"),
    ("resize", {"size": "10%", "at_restart": "yes"}, "at_restart"),
    ("give-back", {"all": True}, "all: Extra inputs"),
    ("leave-queue", "x", "the body"),
]


async def test_nonsense_is_refused_in_words(jupyter_env: JupyterEnv, pages: PagesServer) -> None:
    kernel_id = await pages.start("one.ipynb", jupyter_env.install("two"))
    for action, body, said in NONSENSE:
        answer = await pages.ask("POST", f"gpu-pool/api/slices/{kernel_id}/{action}", body, strict=False)
        found = json.loads(answer.body)
        assert answer.code == 400, (action, body, found)
        assert said in found["message"]
        assert found["advice"]
    huge = await pages.post(kernel_id, "resize", size="9" * 20_000)
    assert huge.code == 413
    for strange in ("none", "..%2f..", "%00", kernel_id[:-1] + "x"):
        answer = await pages.ask("POST", f"gpu-pool/api/slices/{strange}/keep", {"seconds": 1}, strict=False)
        assert answer.code == 404
        assert json.loads(answer.body)["message"]
    assert "Traceback" not in pages.log


async def test_no_more_pages_listen_than_may(jupyter_env: JupyterEnv) -> None:
    jupyter_env.install("two")
    async with serving_pages(jupyter_env, GPUPoolServer={"max_streams": 3}) as pages:
        open_ = [await pages.connect() for _ in range(3)]
        for each in open_:
            assert await each.read_message() is not None
        over = await pages.connect()
        assert await over.read_message() is None
        assert over.close_code == 1013
        assert "max_streams" in str(over.close_reason)
        over.close()
        open_.pop().close()

        async def is_told() -> bool:
            again = await pages.connect()
            told = await again.read_message() is not None
            again.close()
            return told

        await eventually(is_told)  # once the server has seen that one is closed
        for each in open_:
            each.close()
            while await each.read_message() is not None:
                pass
