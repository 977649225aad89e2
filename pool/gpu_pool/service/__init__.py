"""The pool as a service: one process owns the ledger and the devices, for everybody on the machine.

::

    app        the program: its settings, its start and its end
    server     tornado's HTTP server on a Unix socket, within limits
    listening  the socket's file: where it may be, and whether somebody serves there
    callers    who asks: identity from the connection, never from what is said
    claims     which process somebody means who is perhaps in a container
    desk       what each caller may do, over the pool that does it
    changes    wakes those who wait when something happens to their leases
    answering  JSON in and out, and errors as problem documents
    handlers   the addresses
    hidepid    whether other users' processes are seen at all

Who asks is found out in one place (``callers.Identify``), so that another way
to know it can stand beside the socket's credentials. What everybody may do is
decided in one place, too: no handler knows any rule.
"""
