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

The room imports ``gpu_pool_client`` and, of the pool, courses and dialects
alone. Only ``catalogue`` touches files, only ``supply`` asks the pool, and only
``spawners`` needs JupyterHub; what decides is pure.
"""

from gpu_pool_spawner.mixin import GPUPoolSpawnerMixin

__all__ = ["GPUPoolSpawnerMixin"]
