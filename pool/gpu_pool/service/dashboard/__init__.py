"""The dashboard: pages for browsers, rendered here, live with a little JavaScript, whole without it.

::

    viewer      who looks, and what of the pool they may see
    words       states, reasons and times, as people read them
    marks       a colour and a pattern for every course
    pool_view   the GPUs as bars, the line, and the viewer's own leases
    past_view   what has ended: a plot over time, sums and rows
    course_view what a course offers, who holds what, and what its file says
    edit_view   what a checked course file comes to, and its history
    admin_view  everybody's leases, and the quotas
    lease_view  what can be done about one lease, and what that does to its kernel
    site        what all pages ask
    screens     what all pages have in common, and the events that keep them live
    pages       the pages
    edit_page   the page on which a course file is edited
    lease_page  the page of one lease, on which it is given back or revoked
    acts        what other forms ask for

The views are pure: values of the pool in, values for the templates out. What a
viewer may not see does not reach them (``viewer``), so no template can show it.
"""

import re
from typing import Any, Final

from tornado.httputil import HTTPServerRequest
from tornado.routing import PathMatches

from gpu_pool.service.browsers import BrowserPage
from gpu_pool.service.dashboard.edit_page import EditPage
from gpu_pool.service.dashboard.lease_page import DrainForm, GiveBack, LeasePage, Revoke
from gpu_pool.service.dashboard.pages import (
    AdminPage,
    CoursePage,
    CoursesPage,
    HistoryPage,
    NothingPage,
    PoolPage,
)

_LEASE: Final = r"leases/([^/]{1,64})"

#: All pages, by their address below the service's prefix.
ROUTES: Final[list[tuple[str, type[BrowserPage]]]] = [
    (r"", PoolPage),
    (r"history", HistoryPage),
    (r"courses", CoursesPage),
    (r"courses/([^/]{1,200})", CoursePage),
    (r"courses/([^/]{1,200})/edit", EditPage),
    (r"admin", AdminPage),
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
