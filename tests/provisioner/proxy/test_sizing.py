"""``%gpu use 10%`` in kernels behind a proxy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from support.frontend import frontend
from support.jupyter_env import JupyterEnv, Managers, eventually

FACTS = "import os; print(*[os.environ.get(n) for n in ('GPU_POOL_SLICE', 'GPU_POOL_MEMORY_MIB')])"


@pytest.fixture
def lending(jupyter_env: JupyterEnv, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Park the slices of idle kernels soon."""
    (tmp_path / "settings").mkdir()
    content = {"PoolSettings": {"default_course": {"idle_limit": "1s"}}}
    (tmp_path / "settings" / "gpu_pool_config.json").write_text(json.dumps(content))
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "settings"))


async def test_a_kernel_that_has_waited_changes_its_size_and_is_restarted_with_it(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    held = await jupyter_env.fill("1")
    km = manager(jupyter_env.install("two"))
    await km.start_kernel()
    async with frontend(km) as page:
        cell = page.run("%gpu use 10%")
        await cell.shows("Waiting for a GPU slice of 2%.")
        await jupyter_env.pool.release(held.id)
        await cell.shows("This kernel now has 10% of a GPU")
        assert (await page.run(FACTS).done()).outputs == ["10% 3276\n"]
        await km.restart_kernel()
        assert (await page.run(FACTS).done()).outputs == ["10% 3276\n"]
    assert (await jupyter_env.only_lease()).slices[0].milli == 100


@pytest.mark.usefixtures("lending")
@pytest.mark.long
async def test_a_kernel_that_lends_its_slice_gets_it_back_at_its_new_size(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    km = manager(jupyter_env.install("all", "1"))
    await km.start_kernel()
    async with frontend(km) as page:
        await page.run("%gpu use 10%").done()
        await eventually(jupyter_env.is_parked)
        other = await jupyter_env.fill("1")
        cell = page.run(FACTS)
        await cell.shows("Waiting for a GPU slice of 10%.")
        await jupyter_env.pool.release(other.id)
        assert (await cell.done()).outputs == ["10% 3276\n"]
