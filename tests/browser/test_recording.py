"""The recording on the documentation's first page: a wait that becomes a run, in a real JupyterLab."""

from __future__ import annotations

import asyncio
import io
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from playwright.async_api import Page, expect

from gpu_pool_client import Holder, connect, parse_request
from support.lab import Lab
from support.notebook import NAMES, card, run_cell, start_notebook

FOLDER = os.environ.get("GPU_POOL_SCREENSHOTS")
#: Where it is written to, below that folder.
NAME = "wait.webp"
SIZE = {"width": 860, "height": 450}
#: Pixels below each picture, for a line that says what happens.
CAPTION = 44
HALF = NAMES[2]

pytestmark = [
    pytest.mark.browser,
    pytest.mark.long,
    pytest.mark.skipif(not FOLDER, reason="makes a picture: GPU_POOL_SCREENSHOTS names its folder"),
]


class Recording:
    """Pictures of a page, each shown for some seconds with a caption."""

    def __init__(self, page: Page) -> None:
        self._page = page
        self._frames: list[Any] = []
        self._times: list[int] = []

    async def show(self, caption: str, seconds: float) -> None:
        """Add what the page shows now."""
        taken = await self._page.screenshot(animations="disabled", caret="hide")
        self._frames.append(_captioned(taken, caption))
        self._times.append(round(1000 * seconds))

    def write(self, path: Path) -> int:
        """Join all pictures into one file, which is played again and again; return its size in bytes."""
        first, *others = self._frames
        first.save(
            path, save_all=True, append_images=others, duration=self._times, loop=0, lossless=True, method=6
        )
        return path.stat().st_size


def _captioned(taken: bytes, caption: str) -> Any:
    why = "pictures are joined by Pillow: pip install '.[docs]'"
    image, draw, font = (
        pytest.importorskip(f"PIL.{name}", reason=why) for name in ("Image", "ImageDraw", "ImageFont")
    )
    picture = image.open(io.BytesIO(taken)).convert("RGB")
    scale = picture.width / SIZE["width"]
    frame = image.new("RGB", (picture.width, picture.height + round(CAPTION * scale)), "#1a1a2e")
    frame.paste(picture, (0, 0))
    where = (picture.width / 2, picture.height + CAPTION * scale / 2)
    draw.Draw(frame).text(where, caption, "white", font.load_default(17 * scale), anchor="mm")
    return frame


@pytest.fixture
async def others(lab: Lab) -> AsyncIterator[list[Callable[[], Awaitable[None]]]]:
    """Give two others half of the GPU each, and let a third one wait, before the launcher is opened.

    What is returned gives up the place in the queue first, and then half of the GPU.
    """
    async with connect() as pool:
        half = parse_request("50%")
        names = ("first", "second", "third")
        leases = [(await pool.request(half, Holder(name), key=name)).id for name in names]
        yield [partial(pool.release, lease) for lease in reversed(leases)]


async def test_a_wait_becomes_a_run(
    others: list[Callable[[], Awaitable[None]]], page: Page, lab: Lab
) -> None:
    give_up, give_back, _ = others
    await page.set_viewport_size(SIZE)  # type: ignore[arg-type]
    recording = Recording(page)
    await page.keyboard.press("Control+b")  # hides the files
    await expect(card(page, HALF)).not_to_contain_text("free now")
    await card(page, HALF).scroll_into_view_if_needed()
    await recording.show("The GPU is full: two others have half of it each. Take a half all the same …", 4)
    await start_notebook(page, HALF)
    await run_cell(page, "import platform; print('It runs on', platform.machine())", HALF)
    output = page.locator(".jp-OutputArea-output").first
    await expect(output).to_contain_text("You are number 2 in the queue")
    await recording.show("… the notebook opens, and its first cell waits. It says where you stand.", 4)
    await give_up()
    await expect(output).to_contain_text("You are next in the queue")
    await recording.show("Somebody before you gave up. You are next.", 3)
    await give_back()
    await expect(output).to_contain_text("It runs on")
    await recording.show("Half of the GPU is free: the cell has run, by itself.", 4)
    await run_cell(page, "%gpu", HALF)
    await expect(page.locator(".jp-OutputArea-output").last).to_contain_text("Enforced")
    await recording.show("It is yours until you shut the kernel down.", 5)
    assert FOLDER
    size = await asyncio.to_thread(recording.write, Path(FOLDER, NAME))
    assert size < 400 * 1024
