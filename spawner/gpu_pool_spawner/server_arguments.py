"""What a started server is told: its course, its pool, and the kernels to show. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Final

from gpu_pool.courses import CourseFile
from gpu_pool_client.pool import COURSE_VARIABLE, URL_VARIABLE

#: Lists, in JSON, the slices that a server offers kernels on; see gpu_pool_kernels.offered, which reads it.
KERNELS_VARIABLE: Final = "GPU_POOL_KERNELS"
#: The class, in the server's environment, that shows these kernels.
_MANAGER: Final = "gpu_pool_kernels.offered.OfferedKernels"


def with_course(
    environment: Mapping[str, str], name: str | None, course: CourseFile | None, url: str
) -> dict[str, str]:
    """Return a server's environment with its course, and with nothing of any other course."""
    slices = [] if course is None else [str(request) for request in course.requests]
    rest = {key: value for key, value in environment.items() if key != COURSE_VARIABLE}
    mine = {COURSE_VARIABLE: name} if name else {}
    return {**rest, **mine, URL_VARIABLE: url, KERNELS_VARIABLE: json.dumps(slices)}


def arguments(*, cpu_kernels: bool) -> list[str]:
    """Return what follows a server's command, so that its launcher shows the kernels of its course."""
    shown = [f"--ServerApp.kernel_spec_manager_class={_MANAGER}"]
    return shown if cpu_kernels else [*shown, "--OfferedKernels.other_kernels=False"]
