"""What a student reads when a kernel cannot have its slice. Pure: values in, text out."""

from __future__ import annotations

import copy
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any, Final, TypeVar

from gpu_pool_client import (
    WHOLE,
    BadRequest,
    GpuPoolError,
    SliceRequest,
    TimedOut,
    parse_request,
)
from gpu_pool_provisioner.jupyter_files import config_of
from gpu_pool_provisioner.settings import kernel_name

E = TypeVar("E", bound=GpuPoolError)

#: Characters in a line of JupyterLab's dialog that fit into a small window.
_DIALOG_COLUMNS: Final = 76


def with_advice(error: TimedOut, names: Sequence[str], contact: str) -> TimedOut:
    """Add to ``error`` the names of kernels that would start now, and who to ask."""
    advice = [error.remedy]
    if names:
        subject = "These kernels" if len(names) > 1 else "This kernel"
        advice.append(f"{subject} would start now: {_choice(names)}.")
    if contact:
        advice.append(f"If you need more, ask {contact}.")
    remedy = " ".join(filter(None, advice))
    return TimedOut(error.message, remedy, largest_now=error.largest_now)


def for_dialog(error: E) -> E:
    """Return ``error`` with its text made for JupyterLab's "Error Starting Kernel" dialog.

    The dialog does not wrap lines, so they are broken here. And Jupyter Server
    answers with tornado's ``HTTPError.log_message``, in which every percent
    sign has been doubled: instead of "2%%" it says "2 percent". Where the text
    tells how a slice is written, it also says what that word stands for.
    """
    plain = copy.copy(error)
    if isinstance(error, BadRequest) and "%" in str(error):
        plain.remedy += " Where this says percent, write the percent sign."
    plain.message, plain.remedy = (text.replace("%", " percent") for text in (plain.message, plain.remedy))
    parts = (textwrap.fill(part, _DIALOG_COLUMNS) for part in (plain.message, plain.remedy) if part)
    plain.args = ("\n".join(parts),)
    return plain


def kernels_that_fit(
    specs: Mapping[str, Mapping[str, Any]], language: str, largest_now: str | None, *, device_mib: int
) -> list[str]:
    """Name the installed kernels of ``language`` whose slice fits in ``largest_now``, largest first.

    ``specs`` is what ``KernelSpecManager.get_all_specs`` returns; ``device_mib``
    is the memory of the pool's smallest device, by which memory and shares are
    compared. Slices with filters are left out: whether they fit is for the
    pool to say.
    """
    if largest_now is None:
        return []
    largest = parse_request(largest_now)
    fitting: list[tuple[int, str]] = []
    for kernel, entry in specs.items():
        spec = entry["spec"]
        request = slice_of(spec)
        if request is None or spec.get("language") != language or str(request.filters):
            continue
        share = _share(request, device_mib)
        if request.count <= largest.count and share <= _share(largest, device_mib):
            fitting.append((-request.count * share, kernel_name(spec.get("display_name") or kernel)))
    return [name for _, name in sorted(fitting)]


def slice_of(spec: Mapping[str, Any]) -> SliceRequest | None:
    """Return the slice that a kernelspec (the content of its kernel.json) asks for, if any."""
    config = config_of(spec)
    try:
        return parse_request(str(config.get("slice"))) if config is not None else None
    except BadRequest:
        return None


def _share(request: SliceRequest, device_mib: int) -> int:
    """Return what a request takes of each device, in thousandths, rounded up."""
    return request.milli or -(-(request.memory_mib or 0) * WHOLE // device_mib)


def _choice(names: Sequence[str]) -> str:
    """Quote at most three names: ``"A", "B" or "C"``."""
    quoted = [f'"{name}"' for name in names[:3]]
    return " or ".join(filter(None, [", ".join(quoted[:-1]), quoted[-1]]))
