"""A pytest plugin that gives suites of others warm kernels: ``pytest -p support.warm_suite``.

Their tests know of no template, and each may have an environment of its own. So whoever starts a
kernel here waits for its template. At the end the file that ``$GPU_POOL_TEST_WARM_KERNELS``
names has the commands of the kernels that were warm, of those that were not, and what was said of these.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import pytest

from gpu_pool_provisioner import templates as templates_module
from gpu_pool_provisioner.forked import ForkedProcess
from gpu_pool_provisioner.provisioner import GPUPoolProvisioner
from gpu_pool_provisioner.templates import Templates, TemplateSettings, templates

REPORT: Final = "GPU_POOL_TEST_WARM_KERNELS"

#: A template may end as it is asked, since the suite has changed a folder of modules: the next is another.
_TRIES: Final = 3
#: The commands of all kernels so far, and the log's lines.
_seen: dict[str, list[Any]] = {"warm": [], "cold": [], "said": []}
_start_kernel = Templates.start_kernel
_init = GPUPoolProvisioner.__init__


class _Keep(logging.Handler):
    def emit(self, record: logging.LogRecord) -> None:
        _seen["said"].append(record.getMessage())


def pytest_configure(config: pytest.Config) -> None:
    templates_module.STARTS_AFTER = templates_module.PAUSES_WITHIN = 0.0
    # Of a machine that is busy with other tests.
    templates_module._ANSWERS_WITHIN = 20.0
    GPUPoolProvisioner.__init__ = _init_with_templates
    Templates.start_kernel = _start_warm
    templates_module.get_logger = _logger


def pytest_unconfigure(config: pytest.Config) -> None:
    templates().end()
    Path(os.environ[REPORT]).write_text(json.dumps(_seen))


def _logger() -> Any:
    """Return the logger of the templates, heard also where a test of the suite listens to all others."""
    log = logging.getLogger("support.warm_suite")
    log.setLevel(logging.INFO)
    log.propagate = False
    if not log.handlers:
        log.addHandler(_Keep())
    return log


def _init_with_templates(self: GPUPoolProvisioner, **kwargs: Any) -> None:
    _init(self, **kwargs)
    self.preload = []


async def _start_warm(
    self: Templates, argv: list[str], kwargs: Mapping[str, Any], settings: TemplateSettings
) -> ForkedProcess | None:
    process = await _start_kernel(self, argv, kwargs, settings)
    for _ in range(_TRIES):
        if process is None:
            await _until_prepared(self)
            process = await _start_kernel(self, argv, kwargs, settings)
    _seen["cold" if process is None else "warm"].append(argv)
    return process


async def _until_prepared(self: Templates) -> None:
    # Not in a thread: loops are inherited by processes that tests fork, and the threads of loops are not.
    while self._starting or any(template.is_importing for template in self.all()):  # noqa: ASYNC110
        await asyncio.sleep(0.01)
