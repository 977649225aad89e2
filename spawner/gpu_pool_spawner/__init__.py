"""What JupyterHub calls: a course for every server, whatever spawner starts it.

::

    mixin      what makes any spawner class a spawner for courses
    spawners   the ready classes
    choices    which courses somebody may use now, and what they chose
    page       the spawn page, as HTML
    free       how many slices of a size are free
    handover   what a started server is told
    catalogue  the courses, read again when their files change
    supply     the pool, asked what it has

and for Kubernetes::

    kube           the spawner
    kube_choices   which slice of a course was chosen
    kube_profiles  what a server gets: settings and a pod
    kube_room      how many there is room for, and when
    kube_offers    what the form offers
    kube_words     what happens to a pod, in its user's words
    kube_sight     the cluster, asked what it has

The room imports ``gpu_pool_client`` and, of the pool, courses and dialects
alone. Only ``catalogue`` touches files, only ``supply`` asks the pool, only
``kube_sight`` and ``kube`` ask a cluster, and only ``spawners`` and ``kube``
need JupyterHub; what decides is pure.
"""

from gpu_pool_spawner.mixin import GPUPoolSpawnerMixin

__all__ = ["GPUPoolSpawnerMixin"]
