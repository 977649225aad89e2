"""The node agent: on each node with GPUs, what the processes of pods use of these. It tells the service.

::

    cgroups         whose container a process is in, by the names of its cgroups
    looking         one look at the devices: what each pod uses of each of them
    program         looks and reports, again and again

It asks the service, and nobody connects to it. It changes nothing on its node, and needs no right there but
to see it: the host's pid namespace, whose ids the driver names, and the driver's library (NVML). ``cgroups``
is pure.
"""
