"""What JupyterHub calls: a course for every server, whatever spawner starts it.

::

    mixin      what makes any spawner class a spawner for courses, and what a started server is given
    spawners   the ready classes
    choices    which courses somebody may use now, and what they chose
    page       the spawn page, as HTML
    pool_view  the courses and the pool's answers, shared by all spawners of the Hub

and for Kubernetes::

    kube               the spawner
    kube_choices       what the form offers, and what was chosen
    kube_profile_list  KubeSpawner's own profiles beside courses
    kube_profiles      what can be configured, and what a server gets: settings and a pod
    kube_messages      what happens to a pod, as its user reads it
    kube_cluster       the cluster, asked what it has; how many servers it can still take, and when

This package imports ``gpu_pool_client`` and, of the pool, courses, dialects and
how a cluster is read alone. Only ``pool_view`` touches files and asks the pool, only
``kube_cluster`` and ``kube`` ask a cluster, and only ``spawners`` and ``kube``
need JupyterHub; what decides is pure.
"""

from gpu_pool_spawner.mixin import GPUPoolSpawnerMixin

__all__ = ["GPUPoolSpawnerMixin"]
