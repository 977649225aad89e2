"""The node agent: on each node with GPUs, what the processes of pods use of these. It tells the service.

Where it is told to, it also moves what they keep there to the node's memory, and back.

::

    sampling        one look at the devices: what each pod uses of each of them
    suspending      moves what the service asks to be moved
    program         looks and reports, again and again

It asks the service, and nobody connects to it. Unless it suspends, it changes nothing on its node, and needs
no right there but to see it: the host's pid namespace, whose ids the driver names, and the driver's library
(NVML).
"""
