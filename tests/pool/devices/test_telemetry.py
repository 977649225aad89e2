"""What devices do, as NVML tells it: the real nvidia-ml-py against the stub."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpu_pool.devices.inventory import Reading
from support import nvml_stub

MIB = 1024**2
CARD = "gpu GPU-{0} Tesla V100-SXM2-32GB\nmemory 32768 258\nbus {0}\n"
DOES = "used 4096\nbusy 87\nheat 61\npower 231500\n"
ALL = Reading(4096 * MIB, 0.87, 61, 231.5)
#: The codes of NVML: unknown, and the card has fallen off the bus.
UNKNOWN, LOST = 999, 15

READ = """
import dataclasses, json, os
from gpu_pool.devices.problems import NvmlSession
from gpu_pool.devices.sampling import Telemetry
from gpu_pool_client import Device

devices = [Device(f"GPU-{n}", n, "V100", 1) for n in (1, 2)] + [Device("SIM", 3, "V100", 1, simulated=True)]
now = [0.0]
telemetry = Telemetry(NvmlSession(clock=lambda: now[0]))
def read():
    found = telemetry.read(devices)
    return {uuid: each and dataclasses.asdict(each) for uuid, each in found.items()}
def scene(text):
    path = os.environ["NVML_STUB_SCENARIO"]
    with open(path + ".draft", "w") as draft:
        draft.write("driver 550.54.14\\n" + text)
    os.replace(path + ".draft", path)
"""


def read(library: Path, scenario: str, code: str = "told = read()") -> Any:
    text = f"{READ}\n{code}\ntelemetry.close()\nprint(json.dumps(told))"
    return json.loads(nvml_stub.run(library, f"driver 550.54.14\n{scenario}", text))


def readings(told: dict[str, Any]) -> dict[str, Reading | None]:
    return {uuid: each and Reading(**each) for uuid, each in told.items()}


def test_what_a_card_does_is_read(nvml: Path) -> None:
    told = read(nvml, CARD.format(1) + DOES + CARD.format(2) + "used 0\nbusy 0\nheat 30\npower 0\n")
    assert readings(told) == {"GPU-1": ALL, "GPU-2": Reading(0, 0.0, 30, 0.0)}


def test_what_it_does_not_tell_is_unknown_and_not_nought(nvml: Path) -> None:
    flaky = f"{DOES}fail nvmlDeviceGetPowerUsage {UNKNOWN}\n"
    told = read(nvml, CARD.format(1) + "memory 0 0\nheat 61\n" + CARD.format(2) + flaky)
    assert readings(told) == {"GPU-1": Reading(temperature=61), "GPU-2": Reading(4096 * MIB, 0.87, 61, None)}


def test_an_older_driver_tells_what_it_has(tmp_path: Path) -> None:
    old = nvml_stub.build(tmp_path, "nvmlDeviceGetMemoryInfo_v2", "nvmlDeviceGetTemperature")
    told = read(old, CARD.format(1) + DOES + CARD.format(2))
    # It counts what the driver keeps as used.
    assert readings(told)["GPU-1"] == Reading((4096 + 258) * MIB, 0.87, None, 231.5)


def test_a_card_that_falls_off_the_bus_is_silent_and_the_others_are_read(nvml: Path) -> None:
    lost = CARD.format(1) + DOES + CARD.format(2) + f"{DOES}fail * {LOST}\n"
    steps = f"told = [read(), scene({lost!r}), read(), read()]"
    fine, _, *after = read(nvml, CARD.format(1) + DOES + CARD.format(2) + DOES, steps)
    assert readings(fine) == {"GPU-1": ALL, "GPU-2": ALL}
    assert [readings(each) for each in after] == [{"GPU-1": ALL, "GPU-2": None}] * 2


def test_a_card_that_comes_back_is_read_again_after_a_while(nvml: Path) -> None:
    lost, back = (CARD.format(1) + CARD.format(2) + DOES + more for more in (f"fail * {LOST}\n", ""))
    steps = f"told = [read()]; scene({back!r}); now[0] += 31; told.append(read())"
    before, after = (readings(each)["GPU-2"] for each in read(nvml, lost, steps))
    assert (before, after) == (None, ALL)


def test_without_a_driver_all_are_silent(nvml: Path) -> None:
    assert read(nvml, "fail nvmlInitWithFlags 9\n") == {"GPU-1": None, "GPU-2": None}


def test_simulated_devices_are_not_looked_for(nvml: Path) -> None:
    told = read(nvml, "fail nvmlInitWithFlags 9\n", "devices = devices[2:]; told = read()")
    assert told == {}


HANGS = """
import asyncio, json, threading, time
from gpu_pool.devices.driver_check import DevicePoller
from gpu_pool_client import Device

async def look():
    looker = DevicePoller(within=0.2)
    card = [Device("GPU-1", 1, "V100", 1)]
    began = time.monotonic()
    told = await asyncio.gather(*(looker.readings(card) for _ in range(5)))
    told.append(await looker.readings(card))
    meanwhile = time.monotonic() - began
    looker._worker.stop()
    for thread in threading.enumerate():
        if thread.name == "gpu-pool-telemetry":
            await asyncio.to_thread(thread.join)
    looker._telemetry.close()
    print(json.dumps([told, meanwhile]))

asyncio.run(look())
"""


@pytest.mark.long
def test_nobody_waits_for_a_card_that_hangs(nvml: Path) -> None:
    scenario = f"driver 550.54.14\n{CARD.format(1)}{DOES}slow 5\n"
    told, meanwhile = json.loads(nvml_stub.run(nvml, scenario, HANGS))
    assert told == [{"GPU-1": None}] * 6
    assert meanwhile < 5


METRICS = """
import asyncio, sys
from pathlib import Path
from gpu_pool.embedded.pool import local_pool
from gpu_pool.service.metrics import Metrics
from gpu_pool.settings import PoolSettings

async def show():
    async with local_pool(Path({store!r}), PoolSettings(tier="accounting")) as pool:
        page, _ = await Metrics(pool, lambda: ()).page()
        sys.stdout.write(page.decode())

asyncio.run(show())
"""


def numbers(library: Path, store: Path, scenario: str, **environ: str) -> dict[tuple[str, str], float]:
    code = METRICS.format(store=str(store))
    page = nvml_stub.run(library, f"driver 550.54.14\n{scenario}", code, **environ).decode()
    samples = [each for family in text_string_to_metric_families(page) for each in family.samples]
    return {(each.name, each.labels["device"]): each.value for each in samples if "device" in each.labels}


def test_the_metrics_tell_it_and_leave_out_what_is_not_known(nvml: Path, tmp_path: Path) -> None:
    lost = f"{DOES}fail nvmlDeviceGetPowerUsage {LOST}\n"
    scenario = f"{CARD.format(1)}{DOES}{CARD.format(2)}heat 40\n{CARD.format(3)}{lost}"
    found = numbers(nvml, tmp_path / "store.db", scenario)
    told = ("memory_used_bytes", "utilisation_ratio", "temperature_celsius", "power_watts", "answers")
    by_card = {
        card: {name: found.get((f"gpu_pool_device_{name}", card)) for name in told}
        for card in ("GPU-1", "GPU-2", "GPU-3")
    }
    assert [*by_card["GPU-1"].values()] == [4096 * MIB, 0.87, 61, 231.5, 1]
    assert [*by_card["GPU-2"].values()] == [0, None, 40, None, 1]
    assert [*by_card["GPU-3"].values()] == [None, None, None, None, 0]
    assert found["gpu_pool_device_memory_bytes", "GPU-3"] == (32768 - 258) * MIB


@pytest.mark.long
def test_of_simulated_devices_nothing_is_told_that_nobody_measured(nvml: Path, tmp_path: Path) -> None:
    found = numbers(nvml, tmp_path / "store.db", CARD.format(1), GPU_POOL_DEVICES="T4@16GiB:1")
    names = {name for name, _ in found}
    assert "gpu_pool_device_memory_bytes" in names
    assert not names & {"gpu_pool_device_memory_used_bytes", "gpu_pool_device_answers"}
