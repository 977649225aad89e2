"""The privileged program of hibernation: what of it is installed as one file, and how that is written."""

from typing import Final

#: From here root runs it, by ``__main__.py``.
FOLDER: Final = __path__[0]
#: What writes it and installs it, but for the path where.
INSTALL: Final = (
    "python -m gpu_pool_provisioner.hibernation.program.archive gpu-pool-hibernation && "
    "sudo install -D -o root -g root -m 0755 gpu-pool-hibernation"
)
