"""The kernel proxy: what answers for a kernel that does not run yet, and relays to it once it does.

::

    frontend ── front (the kernel's five ports) ── PendingKernel   while the kernel waits
                                               └── Relay ── back ── the real kernel

It moves frames, and decides nothing: the session does (``gpu_pool_provisioner.session``), and its driver
puts these together. ``front`` listens, and lets nothing pass that is not signed; ``pending`` answers for the
kernel meanwhile, holds what is submitted, and of a kernel that has no slice just now what would make it work;
``backend`` is where the real kernel listens, and looks who does there; ``relay`` passes frames on over
``channels``; ``messages`` reads and makes them. ``wrap`` is a proxy in a process of its own.
"""
