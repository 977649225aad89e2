"""``health`` and ``doctor``: what works, what does not, and what mends it."""

from __future__ import annotations

import json

import pytest


def checks(terminal, verb, **environment):
    """Run the verb; return its exit status and its checks by (name, state)."""
    done = terminal.run(verb, "--json", env=environment)
    assert done.stderr == ""
    printed = json.loads(done.stdout)
    assert set(printed) == {"healthy", "checks"}
    assert printed["healthy"] == (done.returncode == 0)
    return done.returncode, {(check["name"], check["state"]): check for check in printed["checks"]}


def test_a_pool_that_works_is_healthy_and_says_that_it_is_simulated(terminal):
    done = terminal.run("health")
    assert (done.returncode, done.stderr) == (0, "")
    assert "ok     devices: 0: V100-SXM2-32GB (simulated)\n" in done.stdout
    assert "note   devices: simulated" in done.stdout


def test_the_doctor_looks_at_everything(terminal):
    status, found = checks(terminal, "doctor")
    assert status == 0
    working = {"python", "jupyter_client", "ipykernel", "provisioner", "gpus", "store", "pool", "devices"}
    assert working | {"leases", "history"} <= {name for name, state in found if state == "ok"}
    assert found["kernels", "note"]["remedy"] == "gpu-pool kernels install 2% 10% 50% 1"
    assert str(terminal.folder) in found["store", "ok"]["text"]
    assert found["history", "ok"]["text"] == "the store takes 1 MiB of disk"


def test_how_leases_are_held_to_their_size_is_said_once_for_all_that_are_alike(terminal):
    terminal.hold("10%")
    terminal.hold("20%")
    limits = "memory: none (accounting only); compute: none (accounting only): 2 leases"
    assert checks(terminal, "doctor")[1]["limits", "ok"]["text"] == limits


@pytest.mark.parametrize("verb", ["health", "doctor"])
def test_a_broken_pool_has_exit_status_1_and_a_remedy(terminal, verb):
    (terminal.folder / "file").write_text("")
    status, found = checks(terminal, verb, GPU_POOL_URL=f"embedded:{terminal.folder}/file/store.db")
    assert status == 1
    assert "GPU_POOL_URL" in found["pool", "broken"]["remedy"]


def test_devices_that_cannot_be_read_are_told(terminal):
    status, found = checks(terminal, "doctor", GPU_POOL_DEVICES="nonsense")
    assert status == 1
    assert "nonsense" in found["gpus", "broken"]["text"]
    assert found["gpus", "broken"]["remedy"].startswith("Accepted:")


def test_a_store_that_others_can_read_is_noted(terminal):
    assert terminal.is_empty()
    store = terminal.folder / "pool/store.db"
    store.chmod(0o644)
    status, found = checks(terminal, "doctor")
    assert (status, found["store", "note"]["remedy"]) == (0, f"chmod 600 {store}")


def test_the_doctor_names_modules_that_a_kernel_cannot_preload(terminal):
    made = terminal.run("kernels", "install", "2%", "--preload", "json, no_such_module.part", "--user")
    assert (made.returncode, made.stderr) == (0, "")
    found = " ".join(terminal.run("doctor").stdout.split())
    assert "python3-gpu-2pct preloads no_such_module.part, which its Python does not have" in found
    assert "preloads json" not in found


def test_the_doctor_names_modules_that_a_course_cannot_preload(terminal):
    courses = terminal.folder / "courses"
    courses.mkdir()
    for name, line in {"ml": "[json, no_such_module.part]", "good": "[json]", "bad": "[a b]"}.items():
        text = f"title: {name}\nslices: [{{name: Small, request: 2%}}]\npreload: {line}\n"
        (courses / f"{name}.yaml").write_text(text)
    config = terminal.folder / "config/gpu_pool_config.py"
    config.parent.mkdir(exist_ok=True)
    config.write_text(f"c.PoolSettings.courses_dir = {str(courses)!r}\n")
    status, found = checks(terminal, "doctor")
    assert status == 1  # for the file that is wrong
    said = found["courses", "note"]
    assert said["text"].startswith(
        "course ml preloads no_such_module.part, which the Python of the kernel python3 does not have"
    )
    assert said["remedy"] == f"Install what is missing there, or leave it out of {courses}/ml.yaml."


#: Asks for the driver as PyTorch does when it is asked for GPUs, if nobody has told it not to.
LOADS_DRIVER = """
import _ctypes, ctypes, os, pathlib, shutil
if os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") != "1" or {always}:
    file = pathlib.Path(__file__).parent / "libcuda.so.1"
    shutil.copy(_ctypes.__file__, file)
    kept = ctypes.CDLL(str(file))
"""


def test_the_doctor_imports_what_is_preloaded_and_names_the_module_that_keeps_kernels_cold(terminal):
    modules = terminal.folder / "modules"
    (modules / "attention").mkdir(parents=True)
    (modules / "attention/__init__.py").write_text("import attention.kernels\nimport json.tool\n")
    (modules / "attention/kernels.py").write_text(LOADS_DRIVER.format(always=True))
    (modules / "asking.py").write_text(LOADS_DRIVER.format(always=False))
    for size, preloaded in {"2%": "json,attention,asking", "10%": "json,asking"}.items():
        assert terminal.run("kernels", "install", size, "--preload", preloaded, "--user").returncode == 0
    found = " ".join(terminal.run("doctor", env={"PYTHONPATH": str(modules)}).stdout.split())
    assert (
        "python3-gpu-2pct preloads json, attention, asking, and yet its kernels start cold: the preloaded "
        "modules have opened the GPU's driver (first seen when attention.kernels was imported)"
    ) in found
    assert "python3-gpu-10pct preloads" not in found
