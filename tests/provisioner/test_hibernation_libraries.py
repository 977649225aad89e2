"""What real libraries have, and how kernels of real sizes and other languages fare, by a real CRIU."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from jupyter_client.manager import AsyncKernelManager

from gpu_pool_provisioner.session import State
from support.frontend import Frontend, page_of
from support.jupyter_env import IPYKERNEL, JupyterEnv, Managers
from support.kernels_on_disk import CRIU, NEEDS_CRIU, asleep
from support.libraries import kernels_python

pytestmark = NEEDS_CRIU
R_KERNEL = ("R", "--slave", "-e", "IRkernel::main()", "--args", "{connection_file}")
#: Bytes of a large kernel, and of memory and disk that must be free for it.
LARGE = 4 << 30
LARGE_NEEDS = 10 << 30
#: Seconds in which it is written or read, or never is.
LARGE_WITHIN = 600


@asynccontextmanager
async def sleeper(
    env: JupyterEnv, manager: Managers, argv: Sequence[str], **config: Any
) -> AsyncIterator[tuple[AsyncKernelManager, Frontend]]:
    """Start a kernel that may sleep, with a page that shows it."""
    folder = str(env.folder / "asleep")
    config = {"hibernate_after": 0.5, "criu": CRIU, "hibernation_folder": folder, **config}
    async with page_of(manager(env.install("sleeper", "50%", argv=argv, **config))) as (km, page):
        yield km, page


def with_library(*modules: str) -> tuple[str, ...]:
    """Return the command of an IPython kernel that has these modules, or skip the test."""
    return (kernels_python("ipykernel", *modules), *IPYKERNEL[1:])


async def printed(page: Frontend, code: str, within: float = 120) -> str:
    cell = await page.run(code).done(within)
    assert cell.status == "ok", cell.outputs
    return "".join(cell.outputs)


async def test_a_table_that_is_read_in_parts_goes_on_with_the_next_one(
    jupyter_env: JupyterEnv, manager: Managers, tmp_path: Path
) -> None:
    file = tmp_path / "marks.csv"
    file.write_text("student,mark\n" + "".join(f"s{number},{number}\n" for number in range(100_000)))
    async with sleeper(jupyter_env, manager, with_library("pandas")) as (km, page):
        await printed(
            page,
            f"import pandas\nparts = pandas.read_csv({str(file)!r}, chunksize=1000)",
        )
        sums = [int(await printed(page, "print(next(parts)['mark'].sum())"))]
        await asleep(km)
        sums.append(int(await printed(page, "print(next(parts)['mark'].sum())")))
        await asleep(km)
        sums.append(int(await printed(page, "print(sum(part['mark'].sum() for part in parts))")))
    assert sums == [sum(range(1000)), sum(range(1000, 2000)), sum(range(2000, 100_000))]


async def test_a_figure_that_was_drawn_before_is_shown_after(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    async with sleeper(jupyter_env, manager, with_library("matplotlib")) as (km, page):
        drawn = "%matplotlib inline\nimport matplotlib.pyplot as plt\nfigure, axes = plt.subplots()\n"
        await printed(page, f"{drawn}line, = axes.plot([1, 3, 2]); plt.close(figure)")
        await asleep(km)
        cell = await page.run("axes.set_title('after'); figure").done()
        (image,) = [each["content"]["data"]["image/png"] for each in cell.heard if _has_image(each)]
        assert image.startswith("iVBORw0KGgo")
        assert await printed(page, "print(line.get_ydata().tolist())") == "[1, 3, 2]\n"


def _has_image(message: dict[str, Any]) -> bool:
    return "image/png" in message["content"].get("data", {})


#: A model that is trained with what torch keeps beside it: threads, the optimizer's state, random numbers.
TRAINING = """
import torch
def begun():
    torch.manual_seed(1)
    torch.set_num_threads(2)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.Dropout(0.5), torch.nn.Linear(512, 1))
    return model, torch.optim.Adam(model.parameters())
def trained(model, optimizer, steps):
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(torch.randn(512, 256)).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(round(loss.item(), 4))
    return losses
"""


async def test_a_training_goes_on_as_if_it_had_not_slept(jupyter_env: JupyterEnv, manager: Managers) -> None:
    async with sleeper(jupyter_env, manager, with_library("torch")) as (km, page):
        await printed(page, f"{TRAINING}\nwithout = trained(*begun(), 6)\nmodel, optimizer = begun()")
        first = json.loads(await printed(page, "print(trained(model, optimizer, 3))"))
        await asleep(km)
        then = json.loads(await printed(page, "print(trained(model, optimizer, 3))"))
        without = json.loads(await printed(page, "print(without)"))
    assert len({*without}) > 1
    assert first + then == without


@pytest.mark.timeout(3 * LARGE_WITHIN)
async def test_a_kernel_of_4_gb_sleeps_and_wakes(jupyter_env: JupyterEnv, manager: Managers) -> None:
    memory, disk = psutil.virtual_memory().available, shutil.disk_usage(jupyter_env.folder).free
    if min(memory, disk) < LARGE_NEEDS:
        pytest.skip(f"less than {LARGE_NEEDS >> 30} GiB of memory or disk are free")
    async with sleeper(jupyter_env, manager, IPYKERNEL) as (km, page):
        # Each page is another one, and none of them zero.
        await printed(
            page,
            f"kept = bytearray(bytes(range(1, 256)) * ({LARGE} // 255))\n"
            "for page in range(0, len(kept), 4096): kept[page:page + 8] = (page + 1).to_bytes(8, 'little')\n"
            "import zlib; before = zlib.crc32(kept)",
            LARGE_WITHIN,
        )
        await asleep(km, LARGE_WITHIN)
        assert km.provisioner.session.on_disk.image_mib > LARGE >> 20
        assert await printed(page, "print(zlib.crc32(kept) == before)", LARGE_WITHIN) == "True\n"
    await km.shutdown_kernel(now=True)
    assert not list((jupyter_env.folder / "asleep").iterdir())


def _has_r() -> bool:
    asks = ["R", "--slave", "-e", "library(IRkernel)"]
    return bool(shutil.which("R")) and subprocess.run(asks, check=False).returncode == 0


async def test_a_kernel_of_another_language_stays_awake_and_this_is_told(
    jupyter_env: JupyterEnv, manager: Managers
) -> None:
    if not _has_r():
        pytest.skip("there is no R, or it has no IRkernel")
    async with sleeper(jupyter_env, manager, R_KERNEL, language="R") as (km, page):
        await printed(page, "kept <- 41")
        command = sys.executable, "-m", "gpu_pool.cli", "drain", "--hibernate", "--json"
        there = {**os.environ, "GPU_POOL_URL": jupyter_env.url}
        drain = await asyncio.create_subprocess_exec(*command, stdout=PIPE, env=there)
        output, _ = await drain.communicate()
        (told,) = json.loads(output)["kernels"]
        assert (drain.returncode, told["image_mib"]) == (1, None)
        session = km.provisioner.session
        assert (session.to_disk.after, session.hibernates_at) == (None, None)
        assert session.state is State.RUNNING
        assert "42" in await printed(page, "cat(kept + 1)")
