"""Warm kernels in tests: starting them, and waiting for their templates."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

from jupyter_client.manager import AsyncKernelManager

from gpu_pool_provisioner.forked import ForkedProcess
from gpu_pool_provisioner.templates import TemplateProcess, templates
from support.jupyter_env import Managers, eventually

#: Installs a kernelspec with modules to preload: ``spec(*modules, **sources)``.
Spec = Callable[..., str]


async def start(manager: AsyncKernelManager, **kwargs: Any) -> bool:
    """Start a kernel; return whether it is warm."""
    await manager.start_kernel(**kwargs)
    return is_warm(manager)


def is_warm(manager: AsyncKernelManager) -> bool:
    return isinstance(manager.provisioner.process, ForkedProcess)


async def the_template() -> TemplateProcess:
    """Return the only template once it is there and has imported everything, or has failed to."""
    await eventually(lambda: templates().all())
    (template,) = templates().all()
    await asyncio.to_thread(template.wait_until_ready, 120)
    return template


async def until_ready(manager: AsyncKernelManager) -> TemplateProcess:
    """Start a kernel, which is cold, and return its template when it is ready."""
    assert not await start(manager)
    template = await the_template()
    assert template.is_ready, template.refusal
    return template


async def started_warm(spec: Spec, manager: Managers) -> AsyncKernelManager:
    """Return a warm kernel with nothing preloaded but its own modules."""
    name = spec()
    await until_ready(manager(name))
    km = manager(name)
    assert await start(km)
    return km
