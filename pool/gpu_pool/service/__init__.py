"""The pool as a service: one process owns the store and the devices, for everybody on the machine.

::

    app        the program: its settings, its start and its end
    server     tornado's HTTP server, within limits; on a Unix socket it knows its peers
    connections which connections there are, whose they are, and which end where there are too many
    addresses  of which network a client is, and which proxy is believed about it
    listening  the socket's file: where it may be, and whether somebody serves there
    callers    who asks over the socket: identity from the connection, never from what is said
    subordinate whose the uids without a name are
    claims     which process somebody means who is perhaps in a container
    hidepid    whether other users' processes are seen at all
    hubbed     what the service is to a JupyterHub: its address, and the users it shares
    hub        who asks over TCP: the Hub says it, of the token that comes with the request
    tokens     what is known of tokens, and in which order the Hub is asked about others
    heartbeats leases of callers over TCP, which live while they are renewed
    desk       what each caller may do, over the pool that does it
    editing    the course files, for those who teach the courses
    pace       how often each user may have something decided
    health     whether the pool works
    changes    wakes those who wait when something happens to their leases
    snapshots  one look at the pool for all who watch
    streams    those who watch by server-sent events, and what each may see
    events     what sends them
    audited    requests as the audit log tells of them
    answering  JSON in and out, and errors as problem documents
    handlers   what answers at each address
    routes     the addresses, with what is understood and answered there
    openapi    the description that is made of them
    rooms      the application with the API, for whoever identifies callers
    site       the one for the Hub's users: API, login and pages
    browsers   what all pages have in common (needs jupyterhub, as site does)
    web        the pages

Who asks is found out by one of two implementations of ``callers.Identify``. What everybody may do is
decided in one place, too: no handler knows any rule.
"""
