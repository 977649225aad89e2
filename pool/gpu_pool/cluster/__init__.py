"""A cluster as a pool: its GPUs in the store, and each kernel with a slice in a pod.

::

    settings        what an administrator sets about it, and for how long a cluster is waited for
    dialects/       how each GPU-sharing system is asked for a slice, and what is held of GPUs
    api             the Kubernetes API in JSON: requests, watches, writes that are retried, errors
    snapshot        a cluster, read by listing what it has; what is read at all
    informer        one kind of object, kept up to date: one list, then a watch
    kept_objects    objects reduced to what is asked of them; which pods each lease has
    view            what the cluster shows, by watches: its GPUs, what others have of them, pods by lease
    notebooks       which pod is somebody's notebook server, as whom it runs, and how it mounts the home
    manifests       the pod and the Secret of a kernel, by its course
    pod_builder     the pod of one kernel, made of these, and how many are placed on one node at a time
    kernel_pods     starting and ending pods
    pod_starts      what keeps pods from starting, and for how long that may be
    pod_states      how a kernel's pod is, in a student's words
    kueue           what Kueue says, where the cluster's queue is Kueue's
    node_use        what the agents of nodes say that pods use, and whose their tokens are
    suspension      what kernels keep on devices, moved away and back by the agents of their nodes
    node_agent/     the agent: on each node with GPUs, a program of its own
    export          courses as objects of Kubernetes: quotas, and Kueue's queues
    nodes           which nodes take no kernels, and groups of nodes that an autoscaler makes grow
    scale_up        which nodes those who wait need, the pod that asks for one, what is said of it
    scale_up_controller  asking for them
    device_claims   the claims by which the pool has whole devices, and what keeps them
    device_claim_controller  making them, and giving devices back
    backend         the backend over all of it

``device_claims``, ``dialects``, ``export``, ``kept_objects``, ``kueue``, ``manifests``, ``notebooks``,
``pod_states`` and ``scale_up`` are pure: values in, values out. Nothing but ``api`` knows the client library.
"""
