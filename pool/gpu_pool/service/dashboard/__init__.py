"""The dashboard: pages for browsers, rendered here, live with a little JavaScript, whole without it.

::

    live_pages   what all pages have in common, and the events that keep them live
    pages        the pages, with the forms by which a lease is given back or revoked
    edit_page    the page on which a course file is edited
    pool_view    who looks and what they may see: GPUs, the queue, leases, quotas; states, times and
                 amounts in words; a colour for every course
    history_view what has ended: a plot over time, sums and rows
    course_view  what a course offers, who holds what, and what its file says

The views are pure: values of the pool in, values for the templates out. What a viewer may not see does
not reach them, so no template can show it. ``gpu_pool.service.site`` has the pages' routes.
"""
