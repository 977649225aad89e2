"""What a JupyterHub's users see of the service: API, pages and login. Loaded last, see ``hub_site``."""

from __future__ import annotations

import re
import secrets
from pathlib import Path
from typing import Any, Final

from tornado.httputil import HTTPServerRequest
from tornado.routing import PathMatches
from tornado.web import Application

from gpu_pool.courses import Courses
from gpu_pool.service.api import ApiOptions, api
from gpu_pool.service.browsers import BrowserPage, Callback, Files, PageContext, hub_login
from gpu_pool.service.course_editor import CourseEditor
from gpu_pool.service.dashboard.edit_page import EditPage
from gpu_pool.service.dashboard.live_pages import Dashboard
from gpu_pool.service.dashboard.pages import (
    AdminPage,
    CoursePage,
    CoursesPage,
    DrainForm,
    GiveBack,
    HistoryPage,
    LeasePage,
    NothingPage,
    OtherWaysPage,
    PoolPage,
    Revoke,
)
from gpu_pool.service.hub import HubIdentity, HubPlace

_LEASE: Final = r"leases/([^/]{1,64})"

#: All pages, by their address below the service's prefix.
ROUTES: Final[list[tuple[str, type[BrowserPage]]]] = [
    (r"", PoolPage),
    (r"history", HistoryPage),
    (r"courses", CoursesPage),
    (r"courses/([^/]{1,200})", CoursePage),
    (r"courses/([^/]{1,200})/edit", EditPage),
    (r"admin", AdminPage),
    (r"admin/other-ways", OtherWaysPage),
    (_LEASE, LeasePage),
    (rf"{_LEASE}/release", GiveBack),
    (rf"{_LEASE}/revoke", Revoke),
    (r"devices/([^/]{1,400})/(drain|undrain)", DrainForm),
    (r".*", NothingPage),
]


class Address(PathMatches):
    """The address of a page, below a prefix. To some pages more may be sent than elsewhere."""

    def __init__(self, prefix: str, path: str, page: type[BrowserPage]) -> None:
        super().__init__(re.escape(prefix) + path)
        self._most_body = page.most_body

    def match(self, request: HTTPServerRequest) -> dict[str, Any] | None:
        """Return what the path says, if it is this one. Called by tornado before a body is read."""
        found = super().match(request)
        if found is not None and self._most_body:
            request.connection.set_max_body_size(self._most_body)  # type: ignore[union-attr]
        return found


_DASHBOARD: Final = Path(__file__).with_name("dashboard")


def site(options: ApiOptions, place: HubPlace, identity: HubIdentity) -> Application:
    """Return the application for the Hub's users, all of it below the prefix of the place."""
    login = hub_login(place)
    shared = PageContext(
        options.served,
        options.changes,
        identity,
        options.in_flight,
        options.log,
        login,
        place.prefix,
    )
    dashboard = _dashboard(options)
    prefix = re.escape(place.prefix)
    pages = [(Address(place.prefix, path, page), page, {"shared": shared}) for path, page in ROUTES]
    return api(
        options,
        identity,
        place.prefix,
        [(f"{prefix}oauth_callback", Callback, {"shared": shared}), *pages],
        template_path=str(_DASHBOARD / "templates"),
        static_path=str(_DASHBOARD / "static"),
        static_url_prefix=f"{place.prefix}static/",
        static_handler_class=Files,
        # Logins end with the service; a browser gets a new one without a question.
        cookie_secret=secrets.token_bytes(32),
        xsrf_cookies=True,
        dashboard=dashboard,
    )


def _dashboard(options: ApiOptions) -> Dashboard:
    async def courses() -> Courses:
        return Courses() if options.folder is None else await options.folder.current_in_thread()

    editor = None

    if options.folder is not None:
        editor = CourseEditor(
            options.pool, options.folder, options.settings.rules, options.served.guard.decisions
        )
    return Dashboard(options.streams, courses, options.settings.sharing, editor)
