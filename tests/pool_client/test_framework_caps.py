"""Which frameworks an environment has, and which caps they get."""

from __future__ import annotations

import os
import sys
import venv
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_pool_client import (
    Device,
    Enforcement,
    Holder,
    Lease,
    LeaseState,
    Limit,
    Slice,
    Strength,
    parse_request,
)
from gpu_pool_client._framework_caps import (
    installed_frameworks,
    limit_words,
    slice_caps,
    slice_environment,
    usable_mib,
)

SMALL = Device("GPU-0", 0, "V100-16", 16384)
LARGE = Device("GPU-1", 1, "V100-32", 32768)
#: 2% of a GPU with 32 GiB, less the context and a quarter of the rest: 229 of 32768 MiB.
SLICE = [Slice(LARGE, 20, 655)]
FRACTION = "0.00698"
TORCH = "PYTORCH_CUDA_ALLOC_CONF"
#: Nothing of the tester's own environment.
BARE = {"PATH": os.environ["PATH"], "PYTHONNOUSERSITE": "1"}


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """Create a virtual environment; its site-packages are at ``site(environment)``."""
    venv.create(tmp_path / "env", symlinks=True)
    return tmp_path / "env"


def site(prefix: Path) -> Path:
    return prefix / f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"


def python(prefix: Path) -> str:
    return str(prefix / "bin/python")


def put(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).mkdir(parents=True)


def test_the_frameworks_of_another_environment_are_found_by_their_folders(environment: Path) -> None:
    put(
        site(environment),
        "torch-2.10.0+cu128.dist-info",
        "jaxlib-0.4.30.dist-info",
        "jax-0.4.31.dist-info",
        "cupy_cuda12x-13.3.0.dist-info",
        "tensorflow-2.17.0-py3.11.egg-info",
        "torchvision-0.25.0.dist-info",
    )
    assert installed_frameworks(python(environment), BARE) == {
        "torch": "2.10.0+cu128",
        "jax": "0.4.30",
        "cupy": "13.3.0",
        "tensorflow": "2.17.0",
    }


def test_an_upgrade_is_seen(environment: Path) -> None:
    put(site(environment), "torch-2.9.1.dist-info")
    assert installed_frameworks(python(environment), BARE) == {"torch": "2.9.1"}
    (site(environment) / "torch-2.9.1.dist-info").rmdir()
    put(site(environment), "torch-2.10.0.dist-info")
    assert installed_frameworks(python(environment), BARE) == {"torch": "2.10.0"}


def test_a_conda_like_environment_is_read_through_links(tmp_path: Path) -> None:
    prefix = tmp_path / "conda"
    put(prefix, "bin", "lib/python3.9/site-packages/torch-2.1.0.dist-info")
    (prefix / "bin/python3.9").touch(0o755)
    (prefix / "bin/python").symlink_to("python3.9")
    (tmp_path / "python").symlink_to(prefix / "bin/python")
    assert installed_frameworks(str(tmp_path / "python"), BARE) == {"torch": "2.1.0"}
    assert installed_frameworks("python", BARE | {"PATH": str(tmp_path)}) == {"torch": "2.1.0"}


def test_a_python_of_unknown_version_among_several_is_not_guessed(tmp_path: Path) -> None:
    put(tmp_path, "bin", *(f"lib/python3.{minor}/site-packages/torch-2.1.0.dist-info" for minor in (9, 12)))
    (tmp_path / "bin/python").touch(0o755)
    assert installed_frameworks(python(tmp_path), BARE) == {}


@pytest.mark.parametrize("shared", [True, False])
def test_system_packages_count_only_where_the_environment_sees_them(tmp_path: Path, shared: bool) -> None:
    base = tmp_path / "base"
    put(base, "bin", "lib/python3.12/site-packages/torch-2.10.0.dist-info")
    put(base / "lib/python3.12/site-packages", "jaxlib-0.4.30.dist-info")
    (base / "bin/python3.12").touch(0o755)
    env = tmp_path / "env"
    put(env, "bin", "lib/python3.12/site-packages/torch-2.9.0.dist-info")
    (env / "bin/python").symlink_to(base / "bin/python3.12")
    (env / "pyvenv.cfg").write_text(
        f"home = {base}/bin\ninclude-system-site-packages = {str(shared).lower()}\n"
    )
    expected = {"torch": "2.9.0", "jax": "0.4.30"} if shared else {"torch": "2.9.0"}
    assert installed_frameworks(python(env), BARE) == expected


def test_the_users_own_packages_and_pythonpath_come_first(tmp_path: Path) -> None:
    put(tmp_path, "bin", "lib/python3.12/site-packages/torch-2.10.0.dist-info")
    (tmp_path / "bin/python3.12").touch(0o755)
    put(tmp_path / "home", ".local/lib/python3.12/site-packages/torch-2.8.0.dist-info")
    put(tmp_path / "extra", "torch-2.7.0.dist-info")
    interpreter = str(tmp_path / "bin/python3.12")
    with_home = {"PATH": "", "HOME": str(tmp_path / "home")}
    assert installed_frameworks(interpreter, with_home) == {"torch": "2.8.0"}
    assert installed_frameworks(interpreter, with_home | {"PYTHONNOUSERSITE": "1"}) == {"torch": "2.10.0"}
    with_path = with_home | {"PYTHONPATH": str(tmp_path / "extra")}
    assert installed_frameworks(interpreter, with_path) == {"torch": "2.7.0"}


def test_no_such_interpreter_has_no_frameworks() -> None:
    assert installed_frameworks("no-such-python", BARE) == {}


def test_other_programs_have_no_frameworks_of_their_own(tmp_path: Path) -> None:
    put(tmp_path, "bin", "lib/python3.12/site-packages/torch-2.10.0.dist-info")
    (tmp_path / "bin/R").touch(0o755)
    assert installed_frameworks(str(tmp_path / "bin/R"), BARE) == {}


@pytest.mark.parametrize("version", ["2.10.0", "2.10.0+cu128", "2.15.1", "3.0"])
def test_a_torch_that_knows_the_fraction_gets_it(version: str) -> None:
    found = slice_caps({"torch": version}, SLICE, {})
    assert found == {TORCH: f"per_process_memory_fraction:{FRACTION}"}


@pytest.mark.parametrize(
    "version", ["1.13.1", "2.9.1", "2.10.0a0+git1", "2.10.0.dev20250801", "2.13.0+cpu", "?"]
)
def test_a_torch_that_would_reject_the_fraction_gets_nothing(version: str) -> None:
    assert slice_caps({"torch": version}, SLICE, {}) == {}


@pytest.mark.parametrize("name", [TORCH, "PYTORCH_ALLOC_CONF"])
def test_the_users_torch_settings_are_kept(name: str) -> None:
    found = slice_caps({"torch": "2.10.0"}, SLICE, {name: "expandable_segments:True"})
    assert found == {name: f"expandable_segments:True,per_process_memory_fraction:{FRACTION}"}


@pytest.mark.parametrize("name", [TORCH, "PYTORCH_ALLOC_CONF"])
def test_the_users_own_fraction_is_not_overridden(name: str) -> None:
    theirs = {name: "per_process_memory_fraction:0.5"}
    assert slice_caps({"torch": "2.10.0"}, SLICE, theirs) == {}


def test_jax_is_capped_and_does_not_preallocate() -> None:
    assert slice_caps({"jax": "0.10.2"}, SLICE, {}) == {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "XLA_PYTHON_CLIENT_MEM_FRACTION": FRACTION,
    }


@pytest.mark.parametrize("name", ["XLA_CLIENT_MEM_FRACTION", "XLA_PYTHON_CLIENT_MEM_FRACTION"])
def test_jax_never_gets_both_fractions(name: str) -> None:
    found = slice_caps({"jax": "0.10.2"}, SLICE, {name: ".5"})
    assert found == {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}


def test_tensorflow_grows_and_cupy_counts_bytes() -> None:
    assert slice_caps({"tensorflow": "2.17.0", "cupy": "13.3.0"}, SLICE, {}) == {
        "TF_FORCE_GPU_ALLOW_GROWTH": "true",
        "CUPY_GPU_MEMORY_LIMIT": str(229 * 2**20),
    }


@pytest.mark.parametrize(
    ("versions", "hooked"),
    [
        ({"torch": "1.8.0"}, {"GPU_POOL_TORCH_FRACTION": FRACTION}),
        ({"torch": "2.9.1+cu128"}, {"GPU_POOL_TORCH_FRACTION": FRACTION}),
        ({"torch": "2.10.0a0+git1"}, {"GPU_POOL_TORCH_FRACTION": FRACTION}),
        ({"tensorflow": "2.4.0"}, {"GPU_POOL_TENSORFLOW_MIB": "229"}),
        ({"tensorflow": "2.21.0.dev20260101"}, {"GPU_POOL_TENSORFLOW_MIB": "229"}),
        ({"torch": "1.7.1", "tensorflow": "2.3.0"}, {}),  # there is nothing to call
        ({"torch": "2.13.0+cpu"}, {}),
        ({"torch": "?", "tensorflow": "?", "jax": "0.10.2", "cupy": "13.3.0"}, {}),
    ],
)
def test_what_has_no_variable_is_left_to_a_kernels_hook(
    versions: dict[str, str], hooked: dict[str, str]
) -> None:
    without = slice_caps(versions, SLICE, {})
    assert not hooked.keys() & without.keys()
    assert slice_caps(versions, SLICE, {}, hook=True) == without | hooked
    whole = [Slice(LARGE, 1000, 32768)]
    assert slice_caps(versions, whole, {}, hook=True) == {}


def test_a_torch_that_reads_the_variable_is_not_limited_twice() -> None:
    found = slice_caps({"torch": "2.10.0"}, SLICE, {}, hook=True)
    assert found == {TORCH: f"per_process_memory_fraction:{FRACTION}"}
    theirs = {TORCH: "per_process_memory_fraction:0.5"}
    assert slice_caps({"torch": "2.10.0a0+git1"}, SLICE, theirs, hook=True) == {}


def test_a_whole_device_and_an_empty_environment_get_no_caps() -> None:
    whole = [Slice(SMALL, 1000, 16384), Slice(LARGE, 1000, 32768)]
    assert slice_caps({"torch": "2.10.0", "jax": "0.4.30"}, whole, {}) == {}
    assert slice_caps({}, SLICE, {}) == {}


@pytest.mark.parametrize(
    ("memory", "fraction", "bytes_on_each"),
    [
        ((3276, 6553), "0.16882", 2766),  # 2x20%: the context weighs most on the small device
        ((4096, 4096), "0.10943", 3586),  # 2x4GiB: the same memory is the smallest share of the large one
        ((16384, 16384), "0.48443", 15874),  # 2x16GiB: one device is whole, the other is not
    ],
)
def test_no_cap_exceeds_the_slice_on_any_of_unequal_devices(
    memory: tuple[int, int], fraction: str, bytes_on_each: int
) -> None:
    parts = [Slice(device, 1, mib) for device, mib in zip((SMALL, LARGE), memory, strict=True)]
    for order in (parts, parts[::-1]):
        found = slice_caps({"jax": "0.4.30", "cupy": "13.3.0"}, order, {})
        assert found["XLA_PYTHON_CLIENT_MEM_FRACTION"] == fraction
        assert found["CUPY_GPU_MEMORY_LIMIT"] == str(bytes_on_each * 2**20)


def test_fifty_caps_and_their_contexts_fit_the_device() -> None:
    found = slice_caps({"torch": "2.10.0"}, SLICE, {})[TORCH]
    usable = float(found.rpartition(":")[2]) * 32768
    assert 200 < usable <= usable_mib(SLICE[0])
    assert 50 * (usable_mib(SLICE[0]) + SLICE[0].device.context_mib) <= 32768


@pytest.mark.parametrize(
    ("memory_mib", "usable"), [(81079, 81079 - 518 - 160), (1621, 943), (655, 103), (518, 20), (100, 20)]
)
def test_caps_leave_out_what_cuda_and_its_libraries_take(memory_mib: int, usable: int) -> None:
    h100 = Device("GPU-1", 0, "NVIDIA H100 80GB HBM3", 81079, context_mib=518)
    assert usable_mib(Slice(h100, 20, memory_mib)) == usable


def test_the_words_name_what_is_limited() -> None:
    versions = {"torch": "2.10.0", "jax": "0.4.30", "tensorflow": "2.17.0"}
    assert limit_words(slice_caps(versions, SLICE, {})) == "framework caps: torch, jax"
    assert limit_words(slice_caps({"tensorflow": "2.17.0"}, SLICE, {})) == ""


def test_the_words_tell_what_only_the_hook_limits() -> None:
    versions = {"torch": "2.9.1", "jax": "0.4.30", "tensorflow": "2.17.0"}
    words = "framework caps: jax; torch, tensorflow only in the kernel itself"
    assert limit_words(slice_caps(versions, SLICE, {}, hook=True)) == words
    del versions["jax"], versions["torch"]
    words = "framework caps: tensorflow only in the kernel itself"
    assert limit_words(slice_caps(versions, SLICE, {}, hook=True)) == words


#: The same slice with a limit of 10%, and half of what that is on top now.
BURST = [replace(SLICE[0], limit_mib=3276, burst_mib=1310)]


@pytest.mark.parametrize("torch", ["2.10.0", "2.9.1"])
def test_a_burst_is_for_torch_alone_and_only_where_the_kernel_follows(torch: str) -> None:
    versions = {"torch": torch, "jax": "0.4.30", "tensorflow": "2.17.0", "cupy": "13.3.0"}
    without = slice_caps(versions, SLICE, {}, hook=True)
    burst = slice_caps(versions, BURST, {}, hook=True)
    usable = 1965 - 350 - 160
    assert burst["GPU_POOL_TORCH_FRACTION"] == f"0.{usable * 100_000 // 32768:05d}"
    hook = {"GPU_POOL_TORCH_FRACTION": ""}
    assert {**burst, **hook} == {**without, **hook}, "processes that do not follow have what is granted"
    assert slice_caps(versions, BURST, {}) == slice_caps(versions, SLICE, {})


def test_what_its_user_says_of_torch_stands_whatever_is_on_top() -> None:
    theirs = {TORCH: "per_process_memory_fraction:0.5"}
    assert slice_caps({"torch": "2.10.0"}, BURST, theirs, hook=True) == {}


def test_a_burst_may_be_all_of_a_device() -> None:
    (found,) = [Slice(LARGE, 20, 655, limit_mib=32768, burst_mib=32768 - 655)]
    fraction = float(slice_caps({"torch": "2.9.1"}, [found], {}, hook=True)["GPU_POOL_TORCH_FRACTION"])
    assert 0.98 < fraction < 1


def test_the_words_tell_who_may_burst() -> None:
    versions = {"torch": "2.10.0", "jax": "0.4.30"}
    alone = "framework caps: torch, jax; memory on top is for torch in the kernel itself alone"
    assert limit_words(slice_caps(versions, BURST, {}, hook=True), may_burst=True) == alone
    nobody = "framework caps: torch, jax; memory on top is for none of them"
    assert limit_words(slice_caps(versions, BURST, {}), may_burst=True) == nobody


@pytest.mark.parametrize("strength", [Strength.HARD, Strength.COOPERATIVE])
@pytest.mark.parametrize("torch", ["2.10.0", "2.9.1"])
def test_no_fraction_is_set_where_a_tier_holds_the_memory(
    environment: Path, strength: Strength, torch: str
) -> None:
    put(site(environment), f"torch-{torch}.dist-info", "jaxlib-0.4.30.dist-info", "cupy-13.3.0.dist-info")
    held = Enforcement(memory=Limit(strength, "MPS, each process"))
    request = parse_request("2%")
    lease = Lease(
        "1", "key", request, Holder("ada"), LeaseState.HELD, 0.0, slices=tuple(SLICE), enforcement=held
    )
    found = slice_environment(lease, python(environment), BARE, hook=True)
    assert found == {**lease.environment, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    counted = replace(lease, enforcement=Enforcement())
    assert "CUPY_GPU_MEMORY_LIMIT" in slice_environment(counted, python(environment), BARE)
