"""The audit log: one line of JSON for each decision, with who asked for it.

::

    callers  who asks a pool, what they are to it, and that whatever is done for them knows it
    log      what stands in a line, and the file that it is appended to

A line is written once its decision is in the store (see ``store.database.AuditBuffer``), or once
something was refused. It tells of no token and no key.
"""

from gpu_pool.audit.callers import Actor, act, acting, asks, this_process
from gpu_pool.audit.log import AuditLog, audit_log, refusals

__all__ = ["Actor", "AuditLog", "act", "acting", "asks", "audit_log", "refusals", "this_process"]
