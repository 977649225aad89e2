"""nvidia-ml-py's module ``pynvml``, to be imported from here alone.

Other packages bring a module of that name. Where one of them is found in its place, importing this
module raises :class:`gpu_pool.nvml.shadowed.NvmlShadowed`, which says so.
"""

from __future__ import annotations

from typing import Final

__all__ = ["pynvml"]

#: A name that no other package's module has, nor that of nvidia-ml-py in versions that are too old.
_MARK: Final = "NVMLLibraryMismatchError"

try:
    import pynvml
except ImportError as error:
    # Imported here, as below, because it costs some 50 ms, which programs that start often need not pay.
    from gpu_pool.nvml.shadowed import missing

    raise missing() from error
if not hasattr(pynvml, _MARK):
    from gpu_pool.nvml.shadowed import shadowed

    raise shadowed(pynvml.__file__)
