"""Prepared kernels sleep on disk as those that started cold, by a real CRIU."""

from __future__ import annotations

from functools import partial

import pytest

from gpu_pool_provisioner.templates import templates
from support.frontend import frontend
from support.jupyter_env import IPYKERNEL, JupyterEnv, Managers, answer, eventually, started_kernel
from support.kernels_on_disk import CRIU, NEEDS_CRIU, asleep
from support.libraries import kernels_python
from support.prepared_kernels import Sleepers, install, modules
from support.warm_kernels import the_template

pytestmark = [
    *NEEDS_CRIU,
    pytest.mark.usefixtures("soon"),
]


@pytest.fixture
def sleepers(jupyter_env: JupyterEnv, monkeypatch: pytest.MonkeyPatch) -> Sleepers:
    monkeypatch.setenv("PYTHONPATH", str(modules(jupyter_env)))
    return partial(install, jupyter_env, CRIU, hibernate_after=0.5)


@pytest.mark.parametrize("library", ["heavy", "numpy", "pandas"])
async def test_it_sleeps_and_wakes(sleepers: Sleepers, manager: Managers, library: str) -> None:
    python = kernels_python("ipykernel", *([] if library == "heavy" else [library]))
    name = sleepers(library, argv=(python, *IPYKERNEL[1:]))
    first = await started_kernel(manager(name))
    await answer(first)
    prepared = await the_template()
    assert prepared.is_ready, prepared.refusal
    km = await started_kernel(manager(name))
    assert km.provisioner.pid == prepared.pid
    async with frontend(km) as page:
        begins = f"import os, sys; kept, pid = {library!r} in sys.modules, os.getpid(); import {library}"
        await page.run(begins).done()
        for _ in range(2):
            await asleep(km)
            assert (await page.run("print(kept, pid == os.getpid() == 3)").done()).outputs == ["True True\n"]
            assert (await page.run(f"print({library}.__name__)").done()).outputs == [f"{library}\n"]
    await km.shutdown_kernel(now=True)


async def test_none_is_left_on_disk_or_taken_for_a_kernel(
    sleepers: Sleepers, manager: Managers, jupyter_env: JupyterEnv
) -> None:
    """What was prepared holds no slice, has no image, and is not listed among what sleeps."""
    first = await started_kernel(manager(sleepers(hibernate_after=600.0)))
    await answer(first)
    assert (await the_template()).is_ready
    assert len(await jupyter_env.leases()) == 1
    assert not list((jupyter_env.folder / "asleep").glob("*/image*"))
    assert not list((jupyter_env.folder / "data" / "gpu-pool" / "held").glob("*"))[1:]
    await first.shutdown_kernel(now=True)
    await eventually(jupyter_env.is_empty)
    templates().end()
    await eventually(lambda: not list((jupyter_env.folder / "asleep").iterdir()))
