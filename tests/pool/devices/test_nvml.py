"""Real nvidia-ml-py, in a process of its own, against the NVML stub."""

import os
import pickle
from pathlib import Path

import pytest

from gpu_pool.devices import TRY_SIMULATED, Inventory
from gpu_pool_client._devices import CONTEXT_MIB
from support import nvml_stub

V100 = "gpu GPU-{0} Tesla V100-SXM2-32GB\nmemory 32768 258\nbus {0}\n"
H100 = "gpu GPU-{0} NVIDIA H100 80GB HBM3\nmemory 81559 551\nbus {0}\nmig 0\n"
A100 = "gpu GPU-a NVIDIA A100-SXM4-40GB\nmemory 40960 571\nbus a\nmig 7\n"
INSTANCE = "instance MIG-{0} NVIDIA A100-SXM4-40GB MIG {1}\nmemory {2} 0\n"

DISCOVER = """
import pickle, sys
from gpu_pool.devices import discover
pickle.dump(discover(), sys.stdout.buffer)
"""


def discover(library: Path, *scenario: str, **environ: str) -> Inventory:
    text = "driver 550.54.14\n" + "".join(scenario)
    found = pickle.loads(nvml_stub.run(library, text, DISCOVER, **environ))
    assert isinstance(found, Inventory)
    return found


def neighbours(found: Inventory) -> dict[str, set[str]]:
    return {device.uuid: set(device.nvlink) for device in found.devices}


def test_a_gpu_is_found_with_the_memory_that_cuda_offers(nvml: Path) -> None:
    found = discover(nvml, V100.format(1), "nodes 1\n")
    (device,) = found.devices
    assert (device.uuid, device.index, device.model) == ("GPU-1", 0, "Tesla V100-SXM2-32GB")
    assert device.memory_mib == 32768 - 258
    assert (device.driver, device.numa_node, device.nvlink) == ("550.54.14", 0, ())
    assert (device.contexts, device.mig_profile, device.simulated) == (None, None, False)
    assert found.source == "NVML, driver 550.54.14"
    assert found.problems == ()


@pytest.mark.parametrize(
    ("cores", "context"),
    [("16896 9 0", 519), ("5120 7 0", 328), ("6912 8 0", 431), ("16384 8 9", 505)],
    ids=["H100", "V100", "A100", "RTX 4090"],
)
def test_the_size_of_the_card_tells_what_a_context_takes(nvml: Path, cores: str, context: int) -> None:
    (device,) = discover(nvml, V100.format(1), f"cores {cores}\n").devices
    assert device.context_mib == context


def test_what_a_context_takes_is_assumed_where_the_driver_does_not_tell(nvml: Path) -> None:
    (device,) = discover(nvml, V100.format(1), "cores 5120 7 0\nfail nvmlDeviceGetNumGpuCores 3\n").devices
    assert device.context_mib == CONTEXT_MIB


def test_simulated_devices_take_the_place_of_real_ones(nvml: Path) -> None:
    found = discover(nvml, V100.format(1), GPU_POOL_DEVICES="T4@16GiB:1")
    assert [device.label for device in found.devices] == ["T4 (simulated)"]


def test_mig_instances_stand_in_the_place_of_their_gpu(nvml: Path) -> None:
    seven = [INSTANCE.format(number, "1g.5gb", 4864) for number in range(7)]
    found = discover(nvml, V100.format(1), A100, "nodes 2\n", *seven)
    whole, *instances = found.devices
    assert whole.uuid == "GPU-1"
    assert [device.uuid for device in instances] == [f"MIG-{number}" for number in range(7)]
    assert {device.label for device in instances} == {"NVIDIA A100-SXM4-40GB MIG 1g.5gb"}
    assert {(device.index, device.memory_mib, device.numa_node) for device in instances} == {(1, 4864, 1)}
    assert (whole.milli, {device.milli for device in instances}) == (1000, {142})
    assert found.problems == ()


def test_mig_instances_of_several_sizes_need_not_fill_the_gpu(nvml: Path) -> None:
    removed = INSTANCE.format(1, "1g.5gb", 4864) + "fail nvmlDeviceGetMigDeviceHandleByIndex 6\n"
    mixed = INSTANCE.format(0, "3g.20gb", 19968), removed, INSTANCE.format(2, "1g.5gb", 4864)
    found = discover(nvml, A100, *mixed)
    assert [(device.mig_profile, device.memory_mib) for device in found.devices] == [
        ("3g.20gb", 19968),
        ("1g.5gb", 4864),
    ]
    assert found.problems == ()


def test_parts_of_one_mig_instance_share_its_memory(nvml: Path) -> None:
    parts = INSTANCE.format(0, "1c.3g.20gb", 19968), INSTANCE.format(1, "2c.3g.20gb", 19968)
    found = [(device.memory_mib, device.milli) for device in discover(nvml, A100, *parts).devices]
    assert found == [(6656, 142), (13312, 285)]


def test_a_gpu_in_mig_mode_without_instances_is_a_problem(nvml: Path) -> None:
    found = discover(nvml, V100.format(1), A100)
    assert [device.uuid for device in found.devices] == ["GPU-1"]
    (problem,) = found.problems
    assert problem.startswith("GPU 1 is in MIG mode and has no MIG instance")


def test_an_unreadable_mig_instance_does_not_hide_its_neighbours(nvml: Path) -> None:
    broken = INSTANCE.format(0, "1g.5gb", 4864) + "fail * 4\n"
    found = discover(nvml, A100, broken, INSTANCE.format(1, "1g.5gb", 4864))
    assert [device.uuid for device in found.devices] == ["MIG-1"]
    (problem,) = found.problems
    assert problem.startswith("MIG instance 0 of GPU 0 is left out: this user may not use it.")


def test_pairs_with_nvlink_bridges_on_two_numa_nodes(nvml: Path) -> None:
    cards = []
    for number in range(8):
        links = "".join(f"link {link} gpu {number ^ 1}\n" for link in range(12))
        cards.append(H100.format(number) + f"nodes {1 + number // 4}\n" + links)
    found = discover(nvml, *cards)
    assert [device.numa_node for device in found.devices] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert neighbours(found) == {f"GPU-{number}": {f"GPU-{number ^ 1}"} for number in range(8)}


def test_gpus_on_one_nvlink_switch_are_neighbours(nvml: Path) -> None:
    switched = [H100.format(number) + "link 0 switch c4\nlink 1 switch c5\n" for number in range(3)]
    found = discover(nvml, *switched, H100.format(9))
    everyone = {"GPU-0", "GPU-1", "GPU-2"}
    assert neighbours(found) == {uuid: everyone - {uuid} for uuid in everyone} | {"GPU-9": set()}


def test_two_gpus_linked_to_the_same_third_are_not_neighbours(nvml: Path) -> None:
    middle = V100.format(2) + "link 0 gpu 1\nlink 1 gpu 3\n"
    found = discover(nvml, V100.format(1), "link 0 gpu 2\n", middle, V100.format(3), "link 0 gpu 2\n")
    assert neighbours(found) == {"GPU-1": {"GPU-2"}, "GPU-2": {"GPU-1", "GPU-3"}, "GPU-3": {"GPU-2"}}


def test_cards_that_do_not_tell_where_their_links_end_have_no_neighbours(nvml: Path) -> None:
    failing = "fail nvmlDeviceGetNvLinkRemotePciInfo_v2 3\nfail nvmlDeviceGetPciInfo_v3 3\n"
    silent = "link 0 switch c4\nlink 1 gpu 2\n" + failing
    found = discover(nvml, V100.format(1), silent, V100.format(2), silent)
    assert neighbours(found) == {"GPU-1": set(), "GPU-2": set()}


def test_a_lost_card_becomes_a_problem_and_the_others_stay(nvml: Path) -> None:
    found = discover(nvml, V100.format(1), V100.format(2), "fail * 15\n", V100.format(3))
    assert [(device.index, device.uuid) for device in found.devices] == [(0, "GPU-1"), (2, "GPU-3")]
    (problem,) = found.problems
    assert problem.startswith("GPU 1 is left out: it does not answer any more")


def test_mixed_cards_answer_what_they_can(nvml: Path) -> None:
    desktop = "gpu GPU-7 NVIDIA GeForce GT 1030\nmemory 2048 0\nfail nvmlDeviceGetNvLinkState 3\n"
    shared_memory = "gpu GPU-8 NVIDIA GB10\n"
    strange = "gpu GPU-9 NVIDIA T4\nmemory 15360 0\nnodes 3\nfail nvmlDeviceGetPciInfo_v3 999\n"
    found = discover(
        nvml, V100.format(1), A100, INSTANCE.format(0, "7g.40gb", 40192), desktop, shared_memory, strange
    )
    machine_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") >> 20
    assert [(device.index, device.memory_mib, device.unified) for device in found.devices] == [
        (0, 32510, False),
        (1, 40192, False),
        (2, 2048, False),
        (3, machine_mib, True),
        (4, 15360, False),
    ]
    assert {device.numa_node for device in found.devices} == {None}
    (problem,) = found.problems
    assert problem.startswith(f"GPU 3 has no memory of its own: it shares the machine's {machine_mib} MiB")


def test_an_error_without_words_of_its_own_is_still_told(nvml: Path) -> None:
    (problem,) = discover(nvml, V100.format(1), "fail nvmlDeviceGetUUID 14\n").problems[:-1]
    assert problem == "GPU 0 is left out: Corrupted infoROM. Run nvidia-smi and see what it says."


@pytest.mark.parametrize(
    ("scenario", "start"),
    [
        ("fail nvmlInitWithFlags 9\n", "The NVIDIA driver is installed, but not loaded."),
        (
            "fail nvmlInitWithFlags 18\n",
            "The NVIDIA driver that runs and its library have different versions",
        ),
        ("fail nvmlInitWithFlags 4\n", "This user may not use the NVIDIA driver."),
        ("fail nvmlInitWithFlags 999\n", "The NVIDIA driver does not let anything new use its GPUs"),
        ("fail nvmlInitWithFlags 17\n", "The NVIDIA driver's library failed (The operating system has"),
        ("fail nvmlDeviceGetCount_v2 4\n", "This user may not use the NVIDIA driver."),
        ("", "The NVIDIA driver 550.54.14 works, but it has no GPU."),
    ],
)
def test_a_machine_without_usable_gpus_says_why_and_how_to_go_on(
    nvml: Path, scenario: str, start: str
) -> None:
    found = discover(nvml, scenario)
    assert found.devices == ()
    why, how_to_go_on = found.problems
    assert why.startswith(start)
    assert how_to_go_on == TRY_SIMULATED


def test_a_machine_without_the_drivers_library_says_so(tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").touch()  # not a library, and found before a real one
    found = discover(tmp_path)
    assert found.devices == ()
    assert found.problems[0].startswith("No NVIDIA driver was found here")


OPTIONAL = [
    "nvmlDeviceGetMemoryAffinity",
    "nvmlDeviceGetMemoryInfo_v2",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetNvLinkRemoteDeviceType",
    "nvmlDeviceGetNvLinkRemotePciInfo_v2",
    "nvmlDeviceGetNvLinkState",
    "nvmlDeviceGetPciInfo_v3",
]


def test_an_old_drivers_library_without_the_optional_functions_will_do(tmp_path: Path) -> None:
    library = nvml_stub.build(tmp_path, *OPTIONAL)
    found = discover(library, "gpu GPU-1 Tesla V100-SXM2-32GB\nmemory 32510 0\nlink 0 gpu 2\n")
    (device,) = found.devices
    assert (device.uuid, device.memory_mib, device.nvlink) == ("GPU-1", 32510, ())
    assert found.problems == ()


def test_a_library_without_a_function_that_is_needed_is_a_problem(tmp_path: Path) -> None:
    library = nvml_stub.build(tmp_path, "nvmlDeviceGetCount_v2")
    found = discover(library, V100.format(1))
    assert found.devices == ()
    assert found.problems[0].startswith("The NVIDIA driver's library failed (Function Not Found).")


def test_the_stub_refuses_a_scenario_it_does_not_understand(nvml: Path) -> None:
    with pytest.raises(AssertionError, match="bad line in the scenario: grpu GPU-1"):
        discover(nvml, "grpu GPU-1\n")
