"""A driver that takes long to answer, and a card that does not."""

from __future__ import annotations

import logging
import threading
from pathlib import Path

import pytest

from gpu_pool.devices import Inventory
from gpu_pool.devices.nvml import read_all
from gpu_pool.embedded.backend import DeviceFinder
from gpu_pool.embedded.pool import local_pool
from gpu_pool_client import PoolUnreachable
from support.pools import V100


class SlowDriver:
    """Answers when it is let."""

    def __init__(self) -> None:
        self.answers = threading.Event()
        self.asked = 0

    def __call__(self) -> Inventory:
        self.asked += 1
        assert self.answers.wait(120)
        return Inventory((V100,), "test")


async def test_a_driver_that_does_not_answer_is_named_with_what_helps_and_waited_for(
    caplog: pytest.LogCaptureFixture,
) -> None:
    driver = SlowDriver()
    finder = DeviceFinder(driver, slow=0.01, patience=0.02)
    with caplog.at_level(logging.WARNING), pytest.raises(PoolUnreachable) as raised:
        await finder.found()
    assert "The NVIDIA driver has not answered for 0.02 seconds" in raised.value.message
    assert "sudo nvidia-smi -pm 1" in raised.value.remedy
    assert "locked" not in str(raised.value)
    assert "has not answered for 0.01 seconds. Without persistence mode" in caplog.text
    driver.answers.set()
    assert (await finder.found()).devices == finder.wait().devices == (V100,)
    assert driver.asked == 1
    finder.close()


async def test_what_cannot_be_found_is_looked_for_again() -> None:
    found = iter([OSError("once"), Inventory((V100,), "test")])

    def find() -> Inventory:
        outcome = next(found)
        if isinstance(outcome, OSError):
            raise outcome
        return outcome

    finder = DeviceFinder(find)
    with pytest.raises(OSError, match="once"):
        await finder.found()
    assert (await finder.found()).devices == (V100,)
    finder.close()


async def test_a_pool_opens_however_long_the_driver_takes(tmp_path: Path) -> None:
    driver = SlowDriver()
    threading.Timer(0.3, driver.answers.set).start()
    async with local_pool(tmp_path / "store.db", find_devices=driver) as pool:
        assert [each.device for each in (await pool.status()).devices] == [V100]


def test_a_card_that_hangs_holds_up_no_other() -> None:
    never = threading.Event()

    def read(index: int) -> int:
        if index == 1:
            never.wait()
        return index

    assert read_all(4, read, least=0.05) == [0, None, 2, 3]
    never.set()


def test_what_reading_a_card_raises_is_raised() -> None:
    def read(index: int) -> int:
        raise OSError(index)

    with pytest.raises(OSError, match="0"):
        read_all(1, read)
    assert read_all(0, read) == []
