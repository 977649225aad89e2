"""The kernel proxy: what answers for a kernel that does not run yet, and relays to it once it does.

::

    frontend ── front (the kernel's five ports) ── Reception   while the kernel waits
                                               └── Relay ── back ── the real kernel

``wires`` moves frames, ``notice`` words them, ``reception`` answers and holds,
``turn`` waits in the queue, ``room`` puts them together, ``thread`` is where the
proxies of a server live, ``wrap`` is a proxy in a process of its own.
"""
