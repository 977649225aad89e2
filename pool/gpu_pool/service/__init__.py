"""The pool as a service: one process owns the store and the devices, for everybody on the machine.

::

    app             the program: its start and its end
    settings        its settings
    http_server     tornado's HTTP server, within limits; on a Unix socket it knows its peers
    connections     which connections there are, whose they are, and which end where there are too many
    callers         who asks over the socket, by the connection; which process they mean
    hub             who asks over TCP: the Hub says it, of the token that comes with the request
    tokens          what is known of tokens, and in which order the Hub is asked about others
    served_pool     the pool as it is served: who waits for its changes
    decisions       what callers ask costs them, how much each may ask, and the log of what is decided
    heartbeats      leases of callers over TCP, which live while they are renewed
    lease_changes   wakes those who wait when something happens to their leases
    event_streams   pages that stay live by server-sent events
    health          whether the pool works
    background      what goes on beside answering, and is begun again where it fails
    handler         what all handlers do alike: JSON in and out, errors as problem documents, the audit log
    handlers        what answers at each route
    api             the routes, their OpenAPI description and the application
    metrics         the numbers for Prometheus
    course_editor   the course files, for those who teach the courses
    class_simulations  classes that come all at once, simulated for those who edit
    browsers        what pages have in common (needs jupyterhub, as site and dashboard do)
    site            the application for the Hub's users: API, login and pages
    dashboard       the pages

Who asks is found out by one of two implementations of ``callers.Identify``: a ``Caller`` (``gpu_pool.audit``)
for whom ``GpuPool.for_caller`` returns the pool in their hands. What everybody may do stands in the rows of
the contract (``gpu_pool_client._operations``), and is decided in ``pool.for_caller``: no handler knows
a rule.
"""
