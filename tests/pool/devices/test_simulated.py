import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_pool.devices import discover
from gpu_pool.devices.inventory import ACCEPTED, MAX_DEVICES, parse_devices
from gpu_pool_client import BadRequest


def test_one_v100_has_32_gib_and_says_that_it_is_simulated() -> None:
    found = discover({"GPU_POOL_DEVICES": "V100-SXM2-32GB:1"})
    (device,) = found.devices
    assert (device.index, device.model, device.memory_mib) == (0, "V100-SXM2-32GB", 32768)
    assert device.label == "V100-SXM2-32GB (simulated)"
    assert found.source == "simulated (GPU_POOL_DEVICES)"
    assert found.problems == ()


def test_indexes_count_over_all_models_and_every_uuid_is_its_own() -> None:
    devices = parse_devices("V100-SXM2-32GB:2, A100-SXM4-40GB:1,V100-SXM2-32GB:1")
    assert [device.index for device in devices] == [0, 1, 2, 3]
    assert [device.memory_mib for device in devices] == [32768, 32768, 40960, 32768]
    assert len({device.uuid for device in devices}) == 4


@pytest.mark.parametrize(
    ("text", "model", "memory_mib"),
    [
        ("NVIDIA H100 80GB HBM3:1", "NVIDIA H100 80GB HBM3", 81920),
        ("T4@16GiB:1", "T4", 16384),
        ("K80@11441MiB:1", "K80", 11441),
        ("V100-SXM2-32GB@16gib:1", "V100-SXM2-32GB", 16384),
        ("v100-32gb:1", "v100-32gb", 32768),
        ("  V100-32GB:01  ", "V100-32GB", 32768),
    ],
)
def test_memory_is_the_one_given_or_the_one_in_the_name(text: str, model: str, memory_mib: int) -> None:
    (device,) = parse_devices(text.strip())
    assert (device.model, device.memory_mib) == (model, memory_mib)


@pytest.mark.parametrize(
    "text",
    [
        "V100-SXM2-32GB",
        "V100-SXM2-32GB:0",
        "V100-SXM2-32GB:-1",
        "V100-SXM2-32GB:1.5",
        "V100-SXM2-32GB:\u0661",
        "V100-SXM2-32GB:1,",
        ",",
        ":",
        ":1",
        "T4:1",
        "T4-2.5GB:1",
        "T4@16:1",
        "T4@16GB:1",
        "T4@0GiB:1",
        "T4-0GB:1",
        "T4@-1GiB:1",
        "T4@1e3GiB:1",
        "T4\n@16GiB:1",
        "V100-32GB:1;T4@16GiB:1",
        f"V100-32GB:{MAX_DEVICES + 1}",
        f"V100-32GB:{MAX_DEVICES},V100-32GB:1",
        "\u212a80@11441MiB:1",  # the sign for kelvin, which is a k without its case
        pytest.param("V100-32GB:" + "1" * 10_000_000, id="ten megabytes"),
        pytest.param(",".join(["V100-32GB:1"] * 200), id="longer than is read"),
    ],
)
def test_nonsense_is_refused_with_the_accepted_forms(text: str) -> None:
    with pytest.raises(BadRequest) as refused:
        discover({"GPU_POOL_DEVICES": text})
    assert refused.value.remedy == ACCEPTED
    assert "GPU_POOL_DEVICES" in refused.value.message
    assert len(refused.value.message) < 300


@given(st.text(alphabet="VTa4 0123GBgiMiB@:,.-\n\u0661\x00") | st.text())
def test_any_text_gives_devices_or_is_refused(text: str) -> None:
    try:
        devices = parse_devices(text)
    except BadRequest:
        return
    assert [device.index for device in devices] == list(range(len(devices)))
    assert len({device.uuid for device in devices}) == len(devices) > 0
    assert all(device.memory_mib > 0 and device.simulated for device in devices)


_MODELS = st.from_regex(r"[A-Za-z][A-Za-z0-9-]{0,20}[A-Za-z]", fullmatch=True)
_ENTRIES = st.tuples(_MODELS, st.integers(1, 9_999_999), st.integers(1, 20))


@given(st.lists(_ENTRIES, min_size=1, max_size=20))
def test_what_is_written_is_what_is_simulated(entries: list[tuple[str, int, int]]) -> None:
    text = ",".join(f"{model}@{mib}MiB:{count}" for model, mib, count in entries)
    written = [(model, mib) for model, mib, count in entries for _ in range(count)]
    assert [(device.model, device.memory_mib) for device in parse_devices(text)] == written


def test_another_process_finds_the_same_devices() -> None:
    code = "from gpu_pool.devices import discover; print(discover().devices)"
    environ = {"GPU_POOL_DEVICES": "V100-SXM2-32GB:2"}
    there = subprocess.check_output([sys.executable, "-c", code], env=environ, text=True)
    assert there.strip() == repr(discover(environ).devices)


def test_simulated_devices_do_not_load_nvml() -> None:
    code = "import sys; from gpu_pool.devices import discover; discover(); sys.exit('pynvml' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], env={"GPU_POOL_DEVICES": "V100-32GB:1"}, check=True)
