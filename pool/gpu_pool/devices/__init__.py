"""Which devices this machine has: real ones by NVML, or simulated ones by name.

``discover`` looks once and remembers nothing. What it could not find or read
comes back as sentences, never as an exception: one broken card, or a machine
without any, is something to say, not a reason to stop. Only what no other answer
could be had for is raised: a variable that is not understood, and a module that is
not the one with which the driver is asked.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace

from gpu_pool.devices.inventory import VARIABLE, Inventory, parse_devices

__all__ = ["Inventory", "discover"]

#: What to do on a machine without a usable GPU.
TRY_SIMULATED = f'To try it without a GPU, set {VARIABLE}="V100-SXM2-32GB:1", a simulated device.'


def discover(environ: Mapping[str, str] | None = None) -> Inventory:
    """Look for the devices of this machine.

    Where ``GPU_POOL_DEVICES`` in ``environ`` (by default the process's own)
    names devices, those are simulated and no hardware is looked at. Of real ones
    it has those that ``CUDA_VISIBLE_DEVICES`` there leaves to a process. An
    inventory without devices has at least one problem, the last of which says
    how to go on without a GPU.

    Raises :class:`~gpu_pool_client.BadRequest` if the variable is not understood, and
    :class:`~gpu_pool.nvml.shadowed.NvmlShadowed` if another package stands in the place of nvidia-ml-py.
    """
    environ = os.environ if environ is None else environ
    text = environ.get(VARIABLE, "").strip()
    if text:
        return Inventory(parse_devices(text), f"simulated ({VARIABLE})")
    # Imported here because it costs some 40 ms, which simulated devices need not pay.
    from gpu_pool.devices.nvml import find_devices

    found = find_devices(environ)
    if found.devices:
        return found
    return replace(found, problems=(*found.problems, TRY_SIMULATED))
