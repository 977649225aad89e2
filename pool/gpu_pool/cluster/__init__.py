"""A cluster as a pool: its GPUs in the store, and each kernel with a slice in a pod.

::

    settings   what an administrator sets about it
    api        the Kubernetes API in JSON, and its errors
    watching   one kind of object, kept up to date: one list, then a watch
    lean       objects reduced to what is asked of them
    view       what the cluster shows: its GPUs, what others have of them, and pods by lease
    notebooks  which pod is somebody's notebook server, which volume its home, and as whom it runs
    mounts     how a home is mounted, so that a kernel mounts it in the same way
    choosing   a kernel's image, memory and home, by its course
    manifests  the pod and the Secret of a kernel
    kueue      what Kueue says, where the cluster's queue is Kueue's
    places     who is where in that queue
    states     how a kernel's pod is, in a student's words
    tier       what is enforced: what the cluster's dialect says
    homes      where somebody's home, and so their kernels, can be
    pacing     how many pods are placed on one node at a time
    node_groups  groups of nodes that an autoscaler makes grow
    growing    which nodes those who wait need, the pod that asks for one, what is said of it
    growth     asking for them
    writing    writes that are tried until there is an answer
    kernels    starting and ending pods
    starting   what keeps pods from starting, and for how long that may be
    pool       the pool over all of it
    looking    one look at a cluster, for its administrator

``lean``, ``notebooks``, ``mounts``, ``choosing``, ``manifests``, ``growing`` and ``states`` are pure:
values in, values out.
Nothing but ``api`` knows the client library.
"""
