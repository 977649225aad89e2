"""The kernel proxy: what answers for a kernel that does not run yet, and relays to it once it does.

::

    frontend ── front (the kernel's five ports) ── PendingKernel   while the kernel waits
                                               └── Relay ── back ── the real kernel

It moves frames, and decides nothing: the session does (``gpu_pool_provisioner.session``), and its driver
puts these together. ``front`` listens, and lets nothing pass that is not ``signed``; ``pending`` answers
for the kernel meanwhile, with ``messages``, and holds what is submitted; ``backend`` is where the real
kernel listens, and asks ``peers`` who does; ``relay`` passes frames on over ``channels``; ``hold_back``
holds what would make a kernel work that has no slice just now. ``wrap`` is a proxy in a process of its own.
"""
