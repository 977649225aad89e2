"""``%gpu use 10%`` in real kernels that were launched directly."""

from __future__ import annotations

import asyncio
import gc
import os
import stat
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from jupyter_client.ioloop import AsyncIOLoopKernelManager
from jupyter_client.manager import AsyncKernelManager

from gpu_pool_client import Activity, LeaseState, NotAllowed, Pool, SliceRequest, connect
from gpu_pool_client._background import background_loop
from gpu_pool_provisioner.resize_pipe import ResizeRequests, _parse
from support.frameworks import write_tensorflow, write_torch
from support.frontend import Frontend, frontend, page_of, printed
from support.jupyter_env import (
    IPYKERNEL,
    JupyterEnv,
    Managers,
    answer,
    eventually,
    kill,
    restarting_soon,
    started_kernel,
)
from support.pools import take
from support.service import ForkServer, serving

FACTS = "import os; print(*[os.environ.get(n) for n in ('GPU_POOL_SLICE', 'GPU_POOL_MEMORY_MIB')])"


def use_cuda(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the pool see what it would see of a process that has initialised CUDA, until the process ends."""
    resize = pool.resize

    async def activity(lease_id: str) -> Activity:
        process = (await pool.get_lease(lease_id)).process
        return Activity(initialised=process is not None and bool(process.is_alive()))

    async def refuse(lease_id: str, request: SliceRequest) -> object:
        if (await activity(lease_id)).initialised:
            raise NotAllowed("Its process has initialised CUDA.")
        return await resize(lease_id, request)

    monkeypatch.setattr(pool, "activity", activity)
    monkeypatch.setattr(pool, "resize", refuse)


def mode(path: Path) -> int | None:
    return stat.S_IMODE(path.lstat().st_mode) if path.exists() else None


async def test_a_kernel_changes_its_size_and_keeps_it_over_a_restart(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")))
    before = await jupyter_env.only_lease()
    async with frontend(km) as page:
        told = await printed(page, "%gpu use 10%")
        assert told == "This kernel now has 10% of a GPU: 3.2 GiB on V100-SXM2-32GB (simulated).\n"
        assert await printed(page, FACTS) == "10% 3276\n"
        lease = await jupyter_env.only_lease()
        assert (lease.id, lease.slices[0].milli) == (before.id, 100)
        shown = str((await page.run("%gpu").done()).heard)
        assert "10%" in shown
        await km.restart_kernel()
        await page.is_connected()
        assert await printed(page, FACTS) == "10% 3276\n"
    await km.shutdown_kernel()
    assert await jupyter_env.is_empty()


async def test_a_kernel_gets_a_limit_and_gives_it_up(jupyter_env: JupyterEnv, manager: Managers) -> None:
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        told = await printed(page, "%gpu use 2%..10%")
        assert told == "This kernel now has 2% of a GPU, up to 10%: 655 MiB on V100-SXM2-32GB (simulated).\n"
        assert await printed(page, FACTS) == "2%..10% 655\n"
        await km.restart_kernel()
        await page.is_connected()
        assert await printed(page, FACTS) == "2%..10% 655\n"
        assert (await jupyter_env.only_lease()).slices[0].limit_mib == 3276
        assert "now has 2% of a GPU: 655 MiB" in await printed(page, "%gpu use 2%")
        assert (await jupyter_env.only_lease()).slices[0].limit_mib == 0


@pytest.mark.parametrize(
    ("size", "words"),
    [
        ("60%", "cannot become 60% now: not as much is free. It stays as it is."),
        ("lots", "'lots' is not a GPU slice"),
        ("3", "that is 3 GPUs; this pool has one"),
        ("2% model=A100", "no GPU here matches that"),
        ("10% for 20min", "For how long a slice is held is said when it is asked for"),
        ("10% for ever", "'ever' is not a duration"),
    ],
)
async def test_what_cannot_be_is_refused_in_words_and_changes_nothing(
    jupyter_env: JupyterEnv, manager: Managers, size: str, words: str
) -> None:
    await jupyter_env.fill("50%")
    async with page_of(manager(jupyter_env.install("two"))) as (_, page):
        cell = await page.run(f"%gpu use {size}").done()
        assert words in "".join(cell.outputs)
        assert {m["content"]["name"] for m in cell.heard if m["msg_type"] == "stream"} == {"stderr"}
        assert await printed(page, FACTS) == "2% 655\n"


def imitated(folder: Path) -> tuple[str, Path]:
    """Make an environment; return its Python, and its site-packages, which are empty."""
    python, packages = folder / "bin/python", folder / f"lib/python3.{sys.version_info[1]}/site-packages"
    packages.mkdir(parents=True)
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    (folder / "pyvenv.cfg").write_text(f"home = {Path(sys.executable).parent}\n")
    return str(python), packages


#: The environment is an imitation, so its kernels take what they need from this one.
HERE = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


async def test_limits_that_are_set_at_import_follow_until_the_gpu_is_used(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path
) -> None:
    python, packages = imitated(tmp_path / "env")
    write_torch(packages)
    write_tensorflow(packages)
    async with page_of(manager(jupyter_env.install("two", argv=(python, *IPYKERNEL[1:]), env=HERE))) as (
        _,
        page,
    ):
        enforced = "cooperative (framework caps: torch, tensorflow only in the kernel itself)"
        assert enforced in str((await page.run("%gpu").done()).heard)
        assert await printed(page, "import torch, tensorflow") == ""
        assert await printed(page, "%gpu use 50%") == (
            "This kernel now has 50% of a GPU: 16 GiB on V100-SXM2-32GB (simulated).\n"
        )
        used = "torch.cuda.init(); print(torch.cuda.fractions[0])"
        assert await printed(page, used) == "0.48443\n"
        told = await printed(page, "%gpu use 10%")
        assert "torch has begun to use the GPU and keeps its old memory limit" in told
        assert "tensorflow" not in told
        used = "tensorflow.constant(1); print(tensorflow.context.initialised_with['GPU:0'])"
        assert await printed(page, used) == "[2766]\n"


async def test_a_kernel_that_shrinks_from_a_whole_gpu_is_limited_from_then_on(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path
) -> None:
    python, packages = imitated(tmp_path / "env")
    write_torch(packages)
    async with page_of(
        manager(jupyter_env.install("whole", "1", argv=(python, *IPYKERNEL[1:]), env=HERE))
    ) as (_, page):
        assert await printed(page, "import torch") == ""
        await page.run("%gpu use 50%").done()
        used = "torch.cuda.init(); print(torch.cuda.fractions[0])"
        assert await printed(page, used) == "0.48443\n"


async def test_limits_of_frameworks_follow_but_for_those_that_the_user_has_changed(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path
) -> None:
    python, packages = imitated(tmp_path / "env")
    for framework in ("cupy-13.0.0", "jaxlib-0.5.0"):
        (packages / f"{framework}.dist-info").mkdir(parents=True)
    km = await started_kernel(manager(jupyter_env.install("two", argv=(python, *IPYKERNEL[1:]), env=HERE)))
    limits = (
        "print(*[os.environ.get(n) for n in ('CUPY_GPU_MEMORY_LIMIT', 'XLA_PYTHON_CLIENT_MEM_FRACTION')])"
    )
    async with frontend(km) as page:
        page.run("import os, sys; os.environ['CUPY_GPU_MEMORY_LIMIT'] = '1'; sys.modules['jax'] = sys")
        told = await printed(page, "%gpu use 50%")
        assert "jax was imported before the change" in told
        assert "cupy" not in told
        assert await printed(page, limits) == "1 0.48443\n"
        await page.run("%gpu use 1").done()
        assert await printed(page, limits) == "1 None\n"


@pytest.mark.long
async def test_after_cuda_was_used_the_size_changes_at_the_next_restart(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cuda(jupyter_env.pool, monkeypatch)
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        told = await printed(page, "%gpu use 10%")
        assert "it has used the GPU" in told
        assert "Restart the kernel: it then changes to 10%, if that is free." in told
        assert await printed(page, FACTS) == "2% 655\n"
        await km.restart_kernel()
        await page.is_connected()
        assert await printed(page, FACTS) == "10% 3276\n"


@pytest.mark.long
async def test_a_size_that_is_not_free_at_the_restart_is_told_below_the_first_cell(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cuda(jupyter_env.pool, monkeypatch)
    async with page_of(
        manager(jupyter_env.install("two"), AsyncIOLoopKernelManager, config=restarting_soon())
    ) as (km, page):
        await page.run("%gpu use 10%").done()
    await jupyter_env.fill("98%")
    pid = km.provisioner.pid
    kill(pid)
    await eventually(lambda: km.provisioner.pid not in (None, pid))
    async with frontend(km) as page:
        assert (await printed(page, "1")).startswith("You asked for 10%. This kernel still has 2% of a GPU.")
        assert await printed(page, FACTS) == "2% 655\n"


async def test_the_place_for_resize_requests_is_private_and_goes_with_the_kernel(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")))
    folder = Path((await answer(km, "import os; print(os.environ['GPU_POOL_RESIZE_DIR'])")).strip())
    assert folder.parent == Path(km.connection_file).parent
    assert [mode(folder), mode(folder / "requests")] == [0o700, 0o600]
    await km.shutdown_kernel()
    assert mode(folder) is None


def test_a_place_that_nobody_needs_any_more_goes_away(tmp_path: Path) -> None:
    resize_requests = ResizeRequests(str(tmp_path / "kernel.json"), background_loop())
    (folder,) = tmp_path.iterdir()
    assert resize_requests.variables == {"GPU_POOL_RESIZE_DIR": str(folder)}
    del resize_requests
    gc.collect()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "line",
    [
        *(b"", b"\xff", b"[" * 4000, b"null", b"7", b'{"size": "50%"}', b'{"id": 1, "size": "50%"}'),
        *(b'{"id": "1", "size": []}', b'{"id": "../x", "size": "50%"}', b'{"id": "", "size": "50%"}'),
    ],
)
def test_what_is_not_a_request_is_none(line: bytes) -> None:
    assert _parse(line) is None
    assert _parse(b'{"id": "1", "size": "50%"}') == ("1", "50%")


async def test_nonsense_in_the_pipe_is_passed_over(jupyter_env: JupyterEnv, manager: Managers) -> None:
    km = await started_kernel(manager(jupyter_env.install("two")))
    folder = Path((await answer(km, "import os; print(os.environ['GPU_POOL_RESIZE_DIR'])")).strip())
    for nonsense in (b"\n", b"\xff" * 4000, b"[" * 4000 + b"\n", b'{"id": "../x", "size": "50%"}\n'):
        with (folder / "requests").open("wb", buffering=0) as pipe:
            pipe.write(nonsense)
    (folder / "answer").mkdir()
    async with frontend(km) as page:
        page.run("%gpu use 10%")
        (folder / "answer").rmdir()
        assert "now has 20%" in await printed(page, "%gpu use 20%")
    assert (await jupyter_env.only_lease()).state is LeaseState.HELD


class SlowPool:
    """Has a pool take its time for its first change of a size."""

    def __init__(self, pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.is_asked, self.goes_on = threading.Event(), threading.Event()
        resize = pool.resize

        async def slow(*args: Any, **options: Any) -> object:
            self.is_asked.set()
            await asyncio.to_thread(self.goes_on.wait)
            return await resize(*args, **options)

        monkeypatch.setattr(pool, "resize", slow)

    async def asked(self, km: AsyncKernelManager, page: Frontend) -> None:
        """Have a kernel ask for 10%, and be interrupted before there is an answer."""
        cell = page.run("%gpu use 10%")
        await asyncio.to_thread(self.is_asked.wait)
        await km.interrupt_kernel()
        await cell.done()


async def test_an_answer_that_nobody_waits_for_takes_effect_before_the_next_cell(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = SlowPool(jupyter_env.pool, monkeypatch)
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        folder = Path((await printed(page, "import os; print(os.environ['GPU_POOL_RESIZE_DIR'])")).strip())
        await slow.asked(km, page)
        assert await printed(page, FACTS) == "2% 655\n"
        slow.goes_on.set()
        await eventually(lambda: (folder / "answer").exists())
        told = await printed(page, FACTS)
        assert told == "This kernel now has 10% of a GPU: 3.2 GiB on V100-SXM2-32GB (simulated).\n10% 3276\n"
        assert await printed(page, FACTS) == "10% 3276\n"


@pytest.mark.parametrize(
    ("size", "words"), [("10%", "This kernel now has 10% of a GPU"), ("lots", "is not a GPU slice")]
)
async def test_what_a_first_request_was_granted_is_heard_with_the_answer_to_a_second(
    jupyter_env: JupyterEnv, manager: Managers, monkeypatch: pytest.MonkeyPatch, size: str, words: str
) -> None:
    slow = SlowPool(jupyter_env.pool, monkeypatch)
    async with page_of(manager(jupyter_env.install("two"))) as (km, page):
        await slow.asked(km, page)
        again = page.run(f"print('asks'); get_ipython().run_line_magic('gpu', 'use {size}')")
        await again.shows("asks")
        slow.goes_on.set()
        await again.shows(words)
        await again.done()
        assert await printed(page, FACTS) == "10% 3276\n"


@pytest.mark.parametrize("waits", [False, True])
async def test_a_kernel_of_a_service_changes_its_size(
    jupyter_env: JupyterEnv, manager: Managers, children: ForkServer, tmp_path: Path, waits: bool
) -> None:
    async with serving(children, tmp_path / "service", "") as service, connect(service.url) as pool:
        held = await take(pool, "1", "teacher") if waits else ""
        async with page_of(manager(jupyter_env.install("two", pool_url=service.url))) as (km, page):
            cell = page.run("%gpu use 10%")
            if waits:
                await cell.shows("Waiting for a GPU slice of 2%")
                await pool.release(held)
            await cell.shows("This kernel now has 10% of a GPU")
            assert await printed(page, FACTS) == "10% 3276\n"
        await km.shutdown_kernel()
        (row,) = [row for row in await pool.history() if row.request == "10%"]
        assert row.milli == 100


async def test_a_whole_gpu_is_called_so(jupyter_env: JupyterEnv, manager: Managers) -> None:
    async with page_of(manager(jupyter_env.install("two"))) as (_, page):
        told = await printed(page, "%gpu use 1")
        assert told == "This kernel now has a whole GPU: 32 GiB on V100-SXM2-32GB (simulated).\n"
