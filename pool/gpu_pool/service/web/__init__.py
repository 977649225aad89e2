"""The dashboard: pages for browsers, rendered here, live with a little JavaScript, whole without it.

::

    viewer      who looks, and what of the pool they may see
    words       states, reasons and times, as people read them
    marks       a colour and a pattern for every course
    pool_view   the GPUs as bars, the line, and the viewer's own leases
    past_view   what has ended: a plot over time, sums and rows
    course_view what a course offers, who holds what, and what its file says
    admin_view  everybody's leases, and the quotas
    snapshots   one look at the pool for all who watch
    site        what all pages ask
    screens     what all pages have in common, and the events that keep them live
    pages       the pages
    acts        what forms ask for

The views are pure: values of the pool in, values for the templates out. What a
viewer may not see does not reach them (``viewer``), so no template can show it.
"""

from typing import Final

from gpu_pool.service.browsers import Page
from gpu_pool.service.web.acts import Drain, GiveBack, Revoke
from gpu_pool.service.web.pages import (
    AdminPage,
    CoursePage,
    CoursesPage,
    HistoryPage,
    LeasePage,
    NothingPage,
    PoolPage,
)

_LEASE: Final = r"leases/([^/]{1,64})"

#: All pages, by their address below the service's prefix.
ROUTES: Final[list[tuple[str, type[Page]]]] = [
    (r"", PoolPage),
    (r"history", HistoryPage),
    (r"courses", CoursesPage),
    (r"courses/([^/]{1,200})", CoursePage),
    (r"admin", AdminPage),
    (_LEASE, LeasePage),
    (rf"{_LEASE}/release", GiveBack),
    (rf"{_LEASE}/revoke", Revoke),
    (r"devices/([^/]{1,400})/(drain|undrain)", Drain),
    (r".*", NothingPage),
]
