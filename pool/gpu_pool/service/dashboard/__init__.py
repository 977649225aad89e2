"""The dashboard: pages for browsers, rendered here, live with a little JavaScript, whole without it.

::

    live_pages   what all pages have in common, and the events that keep them live
    pages        the pages
    edit_page    the page on which a course file is edited
    lease_page   the page of one lease, on which it is given back or revoked
    pool_view    who looks and what they may see: GPUs, the queue, leases, quotas
    history_view what has ended: a plot over time, sums and rows
    course_view  what a course offers, who holds what, and what its file says
    labels       states, reasons, times and amounts as people read them; a colour for every course

The views are pure: values of the pool in, values for the templates out. What a viewer may not see does
not reach them, so no template can show it. ``gpu_pool.service.site`` has the pages' routes.
"""
