"""Browsers log in at a real JupyterHub; what they then ask for, nobody else can ask in their name."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.client import HTTPResponse
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlencode, urljoin
from urllib.request import HTTPCookieProcessor, HTTPRedirectHandler, Request, build_opener

import pytest

from support.hub import ADMIN, PREFIX, SECRET, Hub, HubService, serving_hub
from support.service import ForkServer


class NoRedirects(HTTPRedirectHandler):
    def redirect_request(self, *_: Any) -> None:
        return None


@dataclass
class Browser:
    """Keeps cookies; has no script."""

    cookies: CookieJar = field(default_factory=CookieJar)

    async def open(
        self, url: str, form: Mapping[str, str] | None = None, follow: bool = True, **headers: str
    ) -> tuple[int, str, str]:
        """Return status, final address (or where it leads) and body."""
        data = None if form is None else urlencode(form).encode()
        more = {name.replace("_", "-"): value for name, value in headers.items()}
        request = Request(url, data, {"Sec-Fetch-Mode": "navigate", **more})
        handlers = [HTTPCookieProcessor(self.cookies), *([] if follow else [NoRedirects()])]
        return await asyncio.to_thread(_open, build_opener(*handlers).open, request)

    async def log_in(self, service: HubService, user: str, page: str = "") -> tuple[int, str, str]:
        """Ask for a page of the service, and log in at the Hub, to which that leads."""
        _, login, body = await self.open(f"{service.url}/{page}")
        assert f":{service.hub.port}/hub/login" in login, service.service.log
        (token,) = re.findall(r'name="_xsrf" value="([^"]+)"', body)[:1]
        action = urljoin(login, re.findall(r'action="([^"]*/login[^"]*)"', body)[0].replace("&amp;", "&"))
        return await self.open(action, {"username": user, "password": "any", "_xsrf": token})


def _open(opened: Any, request: Request) -> tuple[int, str, str]:
    try:
        answer: HTTPResponse | HTTPError = opened(request, timeout=120)
    except HTTPError as error:
        answer = error
    with answer:
        where = answer.headers.get("Location") or answer.geturl()
        return answer.status or 0, where, answer.read().decode()


async def test_a_page_leads_to_the_hubs_login_and_back(behind_hub: HubService) -> None:
    browser = Browser()
    status, where, body = await browser.log_in(behind_hub, "ada", "history")
    assert (status, where) == (200, f"{behind_hub.url}/history")
    assert "ada" in body
    status, where, _ = await browser.open(f"{behind_hub.url}/", follow=False)
    assert (status, where) == (200, f"{behind_hub.url}/")


async def test_a_script_that_is_nobody_is_refused_and_not_led_away(behind_hub: HubService) -> None:
    status, where, _ = await Browser().open(f"{behind_hub.url}/", follow=False, Sec_Fetch_Mode="cors")
    assert (status, where) == (403, f"{behind_hub.url}/")


async def test_a_made_up_cookie_is_nobodys(behind_hub: HubService) -> None:
    browser = Browser()
    await browser.log_in(behind_hub, "ada")
    names = {each.name for each in browser.cookies}
    assert "service-gpu-pool" in names
    # One made up, or signed by a service of before, is none.
    for each in browser.cookies:
        if each.name == "service-gpu-pool":
            each.value = "2|1:0|10:1|16:service-gpu-pool|8:eHh4|" + "0" * 64
    status, where, _ = await browser.open(f"{behind_hub.url}/", follow=False)
    assert (status, where.partition("?")[0]) == (302, f"{behind_hub.hub.api}/oauth2/authorize")


async def test_a_form_without_its_token_is_refused(behind_hub: HubService, hub: Hub) -> None:
    browser = Browser()
    _, _, page = await browser.log_in(behind_hub, "ada")
    lease = await behind_hub.take(await hub.token("ada"))
    act = f"{behind_hub.url}/leases/{lease['id']}/release"
    assert (await browser.open(act, {}, follow=False))[0] == 403
    assert (await browser.open(act, {"_xsrf": "2|12345678|0|1"}, follow=False))[0] == 403
    (token,) = re.findall(r'name="form-token" content="([^"]+)"', page)
    # Another's token does not do, either.
    assert (await Browser().open(act, {"_xsrf": token}, follow=False))[0] == 403
    assert (await browser.open(act, {"_xsrf": token}, follow=False))[0] == 303
    assert "released" in str(await behind_hub.ask(await hub.token("ada"), "GET", f"/leases/{lease['id']}"))


async def test_the_api_does_not_know_cookies(behind_hub: HubService) -> None:
    browser = Browser()
    await browser.log_in(behind_hub, ADMIN)
    for path, form in (("status", None), ("devices/0/drain", {"drained": "true"})):
        status, _, body = await browser.open(f"{behind_hub.url}/api/v1/{path}", form, follow=False)
        assert status == 401
        assert "has no token" in body


async def test_host_names_that_a_request_makes_up_lead_nowhere_else(behind_hub: HubService) -> None:
    url = f"{behind_hub.url}/"
    status, where, body = await Browser().open(
        url, follow=False, Host="evil.example", X_Forwarded_Host="evil.example", X_Forwarded_Proto="https"
    )
    assert (status, where.partition("?")[0]) == (302, f"{behind_hub.hub.api}/oauth2/authorize")
    assert "evil" not in where + body


async def test_a_login_that_the_service_did_not_begin_is_refused(behind_hub: HubService) -> None:
    callback = f"{behind_hub.url}/oauth_callback"
    for query in ("", "?error=x", "?code=stolen", "?code=stolen&state=made-up"):
        assert (await Browser().open(callback + query))[0] in (400, 403)
    assert "stolen" not in behind_hub.service.log


async def test_a_login_that_the_hub_does_not_complete_says_what_helps(
    children: ForkServer, hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The Hub has another token for the service, as after a rotation until the service is restarted.
    monkeypatch.setattr("support.hub.SECRET", "0123456789abcdef" * 2)
    async with serving_hub(children, hub, folder / "pool") as service:
        status, where, body = await Browser().log_in(service, "ada")
    assert (status, where.partition("?")[0]) == (500, f"{service.url}/oauth_callback")
    assert "Open its page again." in body
    assert "must be restarted if its token" in body


async def test_logins_leave_no_secret_in_the_log(behind_hub: HubService) -> None:
    browser = Browser()
    await browser.log_in(behind_hub, "ada")
    secrets = [each.value for each in browser.cookies if each.value] + [SECRET]
    assert len(secrets) > 2
    assert not any(each in behind_hub.service.log for each in secrets)
    assert PREFIX in behind_hub.service.log
