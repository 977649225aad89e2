"""The kernel proxy: what answers for a kernel that does not run yet, and relays to it once it does.

::

    frontend ── front (the kernel's five ports) ── PendingKernel   while the kernel waits
                                               └── Relay ── back ── the real kernel

``kernel_proxy`` puts the others together. ``front`` listens, and lets nothing pass that is
not ``signed``; ``lease_client`` waits in the queue; ``pending`` answers for the kernel
meanwhile, with ``messages``, and holds what is submitted; ``runs`` and ``pod_runs`` launch
the real kernel; ``backend`` is where that listens, and asks ``peers`` who does; ``relay``
passes frames on over ``channels``. ``supervisor`` holds the kernel to the terms of its lease, which
``expiry_policy`` judges, and lends its slice by ``parking``. ``loops`` are the threads
on which the proxies of a server live; ``wrap`` is a proxy in a process of its own.
"""
