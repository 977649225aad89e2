"""The driver, or a device, fails under a running pool: nothing new is granted, and it is said why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from support import nvml_stub

GOOD = "driver 550.54.14\n{library}" + "".join(
    f"gpu GPU-{n} NVIDIA A100-SXM4-40GB\nmemory 40960 500\ncores 6912 8 0\n{{gpu{n}}}" for n in range(2)
)

#: Opens a pool, takes a part of GPU 0, lets something happen, asks for more, and lets it be over.
LIFE = """
import asyncio, json, os, sys
from pathlib import Path
from gpu_pool.embedded.pool import local_pool
from gpu_pool_client import Holder, LeaseState, parse_request

good, bad, owner = json.loads(sys.argv[1])
file = Path(os.environ["NVML_STUB_SCENARIO"])

def show(scenario):
    file.with_suffix(".draft").write_text(scenario)
    file.with_suffix(".draft").replace(file)

async def main():
    pool = local_pool(Path(os.environ["STORE"]), owner=owner)
    told = {}
    async with pool:
        ask = lambda size, key: pool.request(parse_request(size), Holder("ada"), key)
        held = await ask("40% index=0", "held")
        show(bad)
        waiting = await ask("40% index=0", "waiting")
        told["granted"] = waiting.state is not LeaseState.WAITING
        told["why"] = (await pool.explain(waiting.id)).why if not told["granted"] else ""
        told["elsewhere"] = [part.device.index for part in (await ask("10%", "elsewhere")).slices]
        status = await pool.status()
        told["note"] = status.note
        told["still held"] = any(lease.id == held.id for lease in status.leases)
        told["fault"] = await pool.core.device_fault()
        await pool.park(held.id)
        told["resumed"] = (await pool.resume(held.id)).state is LeaseState.HELD
        show(good)
        told["in the end"] = (await asyncio.wait_for(pool.wait(waiting.id), 120)).slices[0].device.index
        told["back"] = (await asyncio.wait_for(pool.wait(held.id), 120)).slices[0].device.index
        told["note after"] = (await pool.status()).note
    return told

print(json.dumps(asyncio.run(main())))
"""

#: Opens one pool on which nothing is asked of the driver after its first request until its second, which is
#: told of; between the two another process of this machine sees something bad, and does one thing.
TWO = """
import asyncio, json, os, sys
from pathlib import Path
from gpu_pool.embedded.pool import local_pool
from gpu_pool.settings import PoolSettings
from gpu_pool.tuning import Tuning
from gpu_pool_client import GpuPoolError, Holder, parse_request

good, bad, does = json.loads(sys.argv[1])
file = Path(os.environ["NVML_STUB_SCENARIO"])

def show(scenario):
    file.with_suffix(".draft").write_text(scenario)
    file.with_suffix(".draft").replace(file)

def opened():
    return local_pool(Path(os.environ["STORE"]), PoolSettings(tuning=Tuning(passes_every=None)))

async def ask(pool, key):
    return (await pool.request(parse_request("10% index=0"), Holder("ada"), key)).state.value

async def main():
    told = {}
    async with opened() as well, opened() as other:
        told["before"] = await ask(well, "before")
        if does == "ask":
            await other.status()  # it has found its GPUs while all was well
        show(bad)
        told["note"] = (await other.status()).note
        if does == "ask":
            told["other"] = await ask(other, "other")
        show(good)
        told["after"] = await ask(well, "after")
        told["note after"] = (await well.status()).note
    return told

print(json.dumps(asyncio.run(main())))
"""


@pytest.fixture(scope="module")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml_stub.build(tmp_path_factory.mktemp("nvml"))


def scenario(library: str = "", gpu0: str = "", gpu1: str = "") -> str:
    return GOOD.format(library=library, gpu0=gpu0, gpu1=gpu1)


def live(nvml: Path, folder: Path, bad: str, *, owner: bool = False) -> dict[str, Any]:
    return told_by(nvml, folder, LIFE, bad, owner)


def told_by(nvml: Path, folder: Path, program: str, bad: str, how: object) -> dict[str, Any]:
    arguments = json.dumps([scenario(), bad, how])
    code = f"import sys; sys.argv = ['', {arguments!r}]\n{program}"
    told: dict[str, Any] = json.loads(
        nvml_stub.run(nvml, scenario(), code, STORE=str(folder / "store.db"), XDG_RUNTIME_DIR=str(folder))
    )
    return told


@pytest.mark.long
@pytest.mark.parametrize(
    ("code", "why", "owner"),
    [
        (18, "have different versions, as happens when the driver was updated", False),
        (18, "have different versions, as happens when the driver was updated", True),
        (999, "as happens after systemctl daemon-reload: start the container anew", True),
        (9, "is installed, but not loaded", False),
        (4, "This user may not use the NVIDIA driver", False),
    ],
)
def test_nothing_new_is_granted_while_no_new_program_could_use_the_driver(
    nvml: Path, tmp_path: Path, code: int, why: str, owner: bool
) -> None:
    told = live(nvml, tmp_path, scenario(f"fail nvmlInitWithFlags {code}\n"), owner=owner)
    assert not told["granted"]
    assert told["elsewhere"] == []
    assert why in told["why"]
    assert why in told["note"]
    assert why in told["fault"]
    assert told["still held"]
    assert not told["resumed"], "a parked kernel could not use it either"
    assert (told["in the end"], told["back"], told["note after"]) == (0, 0, "")


@pytest.mark.long
@pytest.mark.parametrize(
    ("bad", "why"),
    [
        ("fail * 15\n", "fallen off the bus"),
        ("fail nvmlDeviceGetMemoryInfo 16\n", "it needs a reset"),
        ("fail nvmlDeviceGetHandleByUUID 6\n", "it is not there any more"),
        ("fail nvmlDeviceGetMemoryInfo 999\n", "Unknown Error"),
        ("mode 2\n", "sudo nvidia-smi -i GPU-0 -c DEFAULT"),
    ],
    ids=["lost", "needs a reset", "gone", "unknown", "prohibited"],
)
def test_nothing_new_is_granted_on_a_gpu_that_fails_and_the_others_go_on(
    nvml: Path, tmp_path: Path, bad: str, why: str
) -> None:
    told = live(nvml, tmp_path, scenario(gpu0=bad))
    assert not told["granted"]
    assert told["elsewhere"] == [1]
    for text in (told["why"], told["note"]):
        assert "Nothing new is granted on GPU 0 (NVIDIA A100-SXM4-40GB): " in text
        assert why in text
    assert told["fault"] == ""
    assert not told["resumed"]
    assert (told["in the end"], told["back"], told["note after"]) == (0, 0, "")


@pytest.mark.parametrize("harmless", ["fail nvmlDeviceGetMemoryInfo 3\n", "mode 3\n"])
def test_what_says_nothing_of_a_gpu_changes_nothing(nvml: Path, tmp_path: Path, harmless: str) -> None:
    told = live(nvml, tmp_path, scenario(gpu0=harmless))
    assert (told["granted"], told["elsewhere"], told["note"]) == (True, [0], "")


@pytest.mark.parametrize("code", [9, 10, 18, 999], ids=["not loaded", "timeout", "versions", "unknown"])
def test_one_that_only_looks_and_whose_driver_fails_stops_no_other(
    nvml: Path, tmp_path: Path, code: int
) -> None:
    told = told_by(nvml, tmp_path, TWO, scenario(f"fail nvmlInitWithFlags {code}\n"), "look")
    assert told["note"], "it is told why there is nothing for it"
    assert (told["before"], told["after"], told["note after"]) == ("held", "held", "")


def test_what_one_process_found_to_fail_another_one_takes_back_that_sees_it_work(
    nvml: Path, tmp_path: Path
) -> None:
    told = told_by(nvml, tmp_path, TWO, scenario(gpu0="fail nvmlDeviceGetMemoryInfo 999\n"), "ask")
    assert told["other"] == "waiting"
    assert (told["before"], told["after"], told["note after"]) == ("held", "held", "")
