"""Pages for browsers, whose users log in at the JupyterHub. Needs jupyterhub: imported behind a Hub only."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, ClassVar, Final

from jupyterhub.services.auth import HubOAuth, HubOAuthCallbackHandler, HubOAuthenticated
from tornado.web import HTTPError, RequestHandler, StaticFileHandler

from gpu_pool.audit.callers import Caller
from gpu_pool.pool.for_caller import PoolForCaller
from gpu_pool.service.connections import admit, client_of
from gpu_pool.service.handler import (
    InFlightRequests,
    act_for,
    audit_refusal,
    set_request_id,
    set_retry_and_close,
)
from gpu_pool.service.hub import HubIdentity, HubPlace, UnknownToken
from gpu_pool.service.lease_changes import LeaseChanges
from gpu_pool.service.served_pool import ServedPool
from gpu_pool_client import GpuPoolError
from gpu_pool_client._remote.bodies import ProblemDocument, problem_of

#: Where the Hub did not answer, or does not know the token by which the service completes logins.
_NO_LOGIN_REMEDY: Final = (
    "If that does not help after a minute, tell whoever looks after this JupyterHub: the pool's service must "
    "be restarted if its token at the JupyterHub has been changed."
)


@dataclass(frozen=True, slots=True)
class PageContext:
    """What all pages are given to answer with."""

    served: ServedPool
    changes: LeaseChanges
    identity: HubIdentity
    in_flight: InFlightRequests
    log: logging.Logger
    hub_auth: HubOAuth
    prefix: str


def hub_login(place: HubPlace) -> HubOAuth:
    """Return what knows how browsers log in at the Hub."""
    return HubOAuth(
        base_url=place.prefix,
        api_url=place.api_url,
        api_token=place.token,
        oauth_client_id=place.client_id,
        access_scopes={f"access:services!service={place.hub.service}"},
        # Who a token belongs to, HubIdentity finds out.
        cache_max_age=1,
    )


class _Quiet(HubOAuthenticated, RequestHandler):  # type: ignore[misc] # JupyterHub has no types
    """What keeps the secrets of addresses and cookies out of the log."""

    shared: PageContext

    def initialize(self, shared: PageContext) -> None:
        """Take what all pages are given. Called by tornado."""
        self.shared = shared
        self.hub_auth = shared.hub_auth
        shared.in_flight.begin()

    def on_finish(self) -> None:
        """Take note that all is answered. Called by tornado."""
        self.shared.in_flight.end()

    def set_default_headers(self) -> None:
        """Let nothing be kept, nor shown inside others' pages. Called by tornado."""
        self.clear_header("Server")
        self.set_header("Cache-Control", "no-store")
        self.set_header(
            "Content-Security-Policy", "frame-ancestors 'self'; base-uri 'none'; object-src 'none'"
        )
        self.set_header("X-Content-Type-Options", "nosniff")
        self.set_header("Referrer-Policy", "same-origin")

    def log_exception(self, typ: Any, value: Any, tb: Any) -> None:
        """Log what nobody foresaw, without the query. Called by tornado."""
        if not isinstance(value, (GpuPoolError, HTTPError)):
            words = "%s %s failed"
            self.shared.log.error(words, self.request.method, self.request.path, exc_info=(typ, value, tb))


class Files(StaticFileHandler):
    """The files that pages load."""

    def set_default_headers(self) -> None:
        """Say nothing of the server's kind. Called by tornado."""
        self.clear_header("Server")
        self.set_header("X-Content-Type-Options", "nosniff")

    def validate_absolute_path(self, root: str, absolute_path: str) -> str | None:
        """Refuse what is none of the files, also by a name that none can have. Called by tornado."""
        try:
            return super().validate_absolute_path(root, absolute_path)
        except (OSError, ValueError):
            raise HTTPError(HTTPStatus.NOT_FOUND) from None


class Callback(_Quiet, HubOAuthCallbackHandler):  # type: ignore[misc] # as above
    """Where the Hub sends a browser whose user has logged in."""

    def get_current_user(self) -> None:
        """Return nobody: who has a login already is found out by the page. Called by tornado."""

    def write_error(self, status_code: int, **_: Any) -> None:
        """Say what helps somebody whose login was not completed. Called by tornado."""
        message = "Your login to the GPU pool was not completed. Open its page again."
        if status_code >= HTTPStatus.INTERNAL_SERVER_ERROR:
            message += f" {_NO_LOGIN_REMEDY}"
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(message)


class BrowserPage(_Quiet):
    """A page for somebody who is known: :attr:`caller`.

    Forms need the token that ``xsrf_form_html`` puts into them. Errors of the
    pool are shown by the template ``error.html``.
    """

    caller: Caller
    #: The pool, as whoever looks sees it.
    pool: PoolForCaller
    #: Bytes that may be sent to the page; 0 for as many as to any other address.
    most_body: ClassVar[int] = 0

    def initialize(self, shared: PageContext) -> None:
        """Take what all pages are given. Called by tornado."""
        super().initialize(shared)
        self.changes = shared.changes
        self.prefix = shared.prefix

    def get_current_user(self) -> str | None:
        """Return the user's name, for templates. Called by tornado."""
        return self.caller.user if hasattr(self, "caller") else None

    async def prepare(self) -> None:
        """Find out who asks, or send them to the Hub. Called by tornado before every method."""
        try:
            self.caller = await self.known()
            admit(self.request, self.caller)
            act_for(self, self.caller)
            self.pool = self.shared.served.for_caller(self.caller)
        except UnknownToken:
            # What a script asks for cannot be answered by the Hub's page.
            mode = self.request.headers.get("Sec-Fetch-Mode", "navigate")
            if self.request.method != "GET" or mode != "navigate":
                raise
            self.redirect(self.get_login_url())

    async def known(self) -> Caller:
        """Return who asks, by the login of their browser. Raises ``NotAllowed`` where there is none."""
        cookie = self.get_secure_cookie(self.hub_auth.cookie_name)
        if cookie is None:
            raise UnknownToken("Nobody is logged in.", "Log in, and try again.")
        fresh = self.request.method not in ("GET", "HEAD")
        return await self.shared.identity.caller(
            cookie.decode(), "browser", fresh=fresh, origin=client_of(self.request)
        )

    def write_error(self, status_code: int, **kwargs: Any) -> None:
        """Show the error. Called by tornado."""
        error = kwargs["exc_info"][1] if "exc_info" in kwargs else None
        set_request_id(self)
        audit_refusal(self, error, self.shared.served.audit)
        set_retry_and_close(self, error)
        if isinstance(error, GpuPoolError):
            problem = problem_of(error)
            status_code = problem.status
        else:
            phrase = HTTPStatus(status_code).phrase
            problem = ProblemDocument(
                title=phrase, status=status_code, detail=phrase, code="error", message=phrase
            )
        self.set_status(status_code)
        self.show_error(problem)

    def show_error(self, problem: ProblemDocument) -> None:
        """Write the page of an error."""
        self.set_header("Content-Type", "text/plain; charset=utf-8")
        self.finish(problem.detail)
