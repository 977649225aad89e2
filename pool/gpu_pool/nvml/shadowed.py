"""What stands in the place of nvidia-ml-py's module, and how it is put right.

The packages pynvml (before version 12) and nvidia-ml-py3 are copies of nvidia-ml-py that are no longer
looked after. Their modules have the same name, so that Python imports the one that was installed last,
or is found first.
"""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, distributions
from pathlib import Path
from typing import Final

from gpu_pool_client import PoolUnreachable

_OURS: Final = "nvidia-ml-py"
_NEEDED: Final = "what the NVIDIA driver is asked with, so no GPU can be found"


class NvmlShadowed(PoolUnreachable, ImportError):
    """The module ``pynvml`` is missing, or is not that of nvidia-ml-py, or of a version that is too old."""


def missing() -> NvmlShadowed:
    """Return the error for a module that cannot be imported."""
    return NvmlShadowed(f"{_OURS} is not installed, or not wholly: that is {_NEEDED}.", f"{_install()}")


def shadowed(file: str | None) -> NvmlShadowed:
    """Return the error for a module of that file that lacks what we need."""
    owners = [each for each in distributions() if file and _has(each, Path(file))]
    others = [each for each in owners if each.metadata["Name"] != _OURS]
    if others:
        name = f"{others[0].metadata['Name']}"
        return NvmlShadowed(
            f"The package {name} {others[0].version} takes the place of {_OURS}, whose module has the same "
            f"name, and lacks {_NEEDED} ({file}).",
            f"Remove the one, then install the other again: {_pip()} uninstall -y {name}; {_install()}",
        )
    if owners:
        return NvmlShadowed(f"{_OURS} {owners[0].version} is too old: it lacks {_NEEDED}.", _install())
    return NvmlShadowed(
        f"{file or 'A folder named pynvml'} takes the place of {_OURS}, whose module has the same name, and "
        f"lacks {_NEEDED}.",
        f"Move it away, then install {_OURS} again: {_install()}",
    )


def _has(distribution: Distribution, file: Path) -> bool:
    found = (Path(str(distribution.locate_file(each))) for each in distribution.files or ())
    return any(each.resolve() == file.resolve() for each in found if each.name == file.name)


def _pip() -> str:
    return f"{sys.executable} -m pip"


def _install() -> str:
    return f"{_pip()} install --upgrade --force-reinstall --no-deps {_OURS}"
