"""What runs inside a kernel: it starts as always, ``%gpu``, and a word on exhausted memory."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpu_pool_client import parse_request
from gpu_pool_kernels import installer
from gpu_pool_kernels.inkernel import slice_info, slice_requests
from gpu_pool_kernels.launching import LAUNCHER
from support.other_environment import without_our_packages

from .conftest import IPYKERNEL, SLICE, Start

STATE = """
import sys, json
path = [each for each in sys.path if not each.startswith("/tmp/tmp")]  # a new one of each old ipykernel's
print(json.dumps({"path": path, "argv": sys.argv[:-1], "main": __name__,
                  "ours": [name for name in sys.modules if "gpu_pool" in name]}))
"""
OOM = """
class OutOfMemoryError(RuntimeError):
    __module__ = "torch"
raise OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
"""


async def test_the_magic_shows_the_slice(start: Start) -> None:
    kernel = await start()
    shown = (await kernel.run("%gpu")).result
    text = shown["text/plain"]
    for fact in (
        "2%",
        "V100-SXM2-32GB (simulated)",
        "655 MiB granted",
        "simulated device",
        "none (accounting",
    ):
        assert fact in text
    assert "<td" in shown["text/html"]
    assert "655 MiB granted" in shown["text/html"]


@pytest.mark.parametrize(
    ("size", "said"), [("2%", "2%"), ("1.5GiB", "1.5GiB"), ("1", "whole GPU"), ("4", "4 whole GPUs")]
)
def test_the_magic_says_what_a_bare_number_counts(
    size: str, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GPU_POOL_SLICE", size)
    monkeypatch.setenv("GPU_POOL_SIMULATED", "1")
    assert dict(slice_info.SliceInfo().rows())["Slice"] == said


async def test_outside_a_slice_the_magic_says_how_to_get_one(start: Start) -> None:
    kernel = await start(environment={})
    outputs = await kernel.run("%gpu")
    assert "gpu-pool kernels install 2%" in outputs.stdout
    assert outputs.result == {}


async def test_the_kernel_is_as_python_m_would_have_started_it(start: Start) -> None:
    ours = json.loads((await (await start()).run(STATE)).stdout)
    stock = json.loads((await (await start([sys.executable, *IPYKERNEL])).run(STATE)).stdout)
    assert ours.pop("ours") == ["_gpu_pool_inkernel", "_gpu_pool_inkernel.extension"]
    assert stock.pop("ours") == []
    assert ours == stock


@pytest.mark.parametrize("broken", ["__init__.py", "extension.py"])
async def test_a_broken_extension_costs_one_line_and_no_kernel(
    start: Start, tmp_path: Path, broken: str
) -> None:
    shutil.copytree(LAUNCHER.parent, tmp_path / "inkernel")
    (tmp_path / "inkernel" / broken).write_text("def (")
    kernel = await start([sys.executable, str(tmp_path / "inkernel/launch.py"), *IPYKERNEL])
    assert (await kernel.run("print(6 * 7)")).stdout == "42\n"
    (line,) = [line for line in kernel.log.splitlines() if "gpu" in line]
    assert line.startswith("gpu-pool: no %gpu in this kernel: SyntaxError")


async def test_a_kernelspec_may_load_an_extension_of_its_own(start: Start) -> None:
    argv = [sys.executable, str(LAUNCHER), *IPYKERNEL, "--ext", "autoreload"]
    kernel = await start(argv)
    assert (await kernel.run("%autoreload 1")).error is None
    assert "2%" in (await kernel.run("%gpu")).result["text/plain"]


async def test_a_kernel_of_an_environment_without_our_packages(start: Start, tmp_path: Path) -> None:
    kernel = await start(python=without_our_packages(tmp_path / "env"))
    assert (await kernel.run("import sys, gpu_pool_kernels")).error == "ModuleNotFoundError"
    assert str(tmp_path) in (await kernel.run("import sys; print(sys.prefix)")).stdout
    assert "2%" in (await kernel.run("%gpu")).result["text/plain"]


@pytest.fixture
def kernel_dirs(tmp_path: Path) -> str:
    """Install GPU kernels of several sizes, among them one that is broken."""
    sizes = [parse_request(size) for size in ("50%", "2%", "10%", "1.5GiB", "1")]
    installer.install(sizes, prefix=tmp_path)
    kernels = tmp_path / "share/jupyter/kernels"
    (kernels / "broken").mkdir()
    (kernels / "broken/kernel.json").write_text('{"metadata": {"gpu_pool": 3}}')
    return str(kernels)


async def test_exhausted_memory_adds_one_line_under_the_traceback(start: Start, kernel_dirs: str) -> None:
    kernel = await start(environment={**SLICE, "GPU_POOL_KERNEL_DIRS": kernel_dirs})
    outputs = await kernel.run(OOM)
    assert outputs.order == ["status", "execute_input", "error", "stderr", "status"]
    assert outputs.stderr == (
        "GPU memory ran out: this kernel's slice is 2%, with 655 MiB of memory. "
        'The next larger kernel is "Python 3 (GPU 1.5 GiB)".\n'
    )
    assert (await kernel.run("1 / 0")).stderr == ""
    assert (await kernel.run("6 * 7")).result["text/plain"] == "42"


def failure(name: str, module: str, text: str, base: type[Exception] = RuntimeError) -> Exception:
    return type(name, (base,), {"__module__": module})(text)


EXHAUSTED = [
    failure("OutOfMemoryError", "torch.cuda", "CUDA out of memory."),
    failure("OutOfMemoryError", "torch", ""),
    failure("ResourceExhaustedError", "tensorflow.python.framework.errors_impl", "OOM when allocating"),
    failure("XlaRuntimeError", "jaxlib.xla_extension", "RESOURCE_EXHAUSTED: Out of memory"),
    failure("JaxRuntimeError", "jax.errors", "RESOURCE_EXHAUSTED: Out of memory"),
    failure("OutOfMemoryError", "cupy.cuda.memory", "Out of memory allocating", MemoryError),
    failure("Derived", "mine", "", type(failure("OutOfMemoryError", "torch", ""))),
    RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"),
]


@pytest.fixture
def on_a_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in SLICE.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("on_a_slice")
@pytest.mark.parametrize("error", EXHAUSTED, ids=lambda error: type(error).__module__)
def test_each_frameworks_error_is_recognised(error: Exception) -> None:
    assert "slice is 2%, with 655 MiB" in (slice_info.explanation(error) or "")


@pytest.mark.usefixtures("on_a_slice")
def test_it_is_recognised_behind_other_errors_unless_these_hide_it() -> None:
    behind = ValueError("while training")
    behind.__context__ = EXHAUSTED[0]
    assert slice_info.explanation(behind)
    caused = ValueError("in the end")
    caused.__cause__ = behind
    assert slice_info.explanation(caused)
    behind.__suppress_context__ = True
    assert slice_info.explanation(caused) is None


@pytest.mark.usefixtures("on_a_slice")
def test_errors_that_cause_each_other_are_each_seen_once() -> None:
    one, other = ValueError("one"), ValueError("other")
    one.__cause__, other.__cause__ = other, one
    assert slice_info.chain(one) == [one, other]


@pytest.mark.usefixtures("on_a_slice")
@pytest.mark.parametrize(
    "error",
    [
        MemoryError("host"),
        RuntimeError("CUDA error: device-side assert"),
        failure("OutOfMemoryError", "mine", ""),
        failure("XlaRuntimeError", "jaxlib.xla_extension", "INVALID_ARGUMENT"),
    ],
)
def test_other_errors_add_nothing(error: Exception) -> None:
    assert slice_info.explanation(error) is None


def test_without_a_slice_nothing_is_added(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GPU_POOL_SLICE", raising=False)
    assert slice_info.explanation(EXHAUSTED[0]) is None


@pytest.mark.usefixtures("on_a_slice")
@pytest.mark.parametrize(
    ("granted", "base", "expected"),
    [
        ("655", "python3", "Python 3 (GPU 1.5 GiB)"),
        ("1536", "python3", "Python 3 (GPU 10%)"),
        ("16384", "python3", "Python 3 (whole GPU)"),
        ("32768", "python3", None),
        ("655", "ir", None),
        ("nonsense", "python3", None),
    ],
)
def test_the_next_larger_kernel_is_over_the_same_base(
    monkeypatch: pytest.MonkeyPatch, kernel_dirs: str, granted: str, base: str, expected: str | None
) -> None:
    monkeypatch.setenv("GPU_POOL_MEMORY_MIB", granted)
    monkeypatch.setenv("GPU_POOL_KERNEL_BASE", base)
    monkeypatch.setenv("GPU_POOL_KERNEL_DIRS", os.pathsep.join(["/nowhere", kernel_dirs]))
    line = slice_info.explanation(EXHAUSTED[0]) or ""
    assert line.endswith(
        f'The next larger kernel is "{expected}".' if expected else "Ask for a larger slice."
    )


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Put a program of that name on the PATH that prints the file returned."""
    listing = tmp_path / "listing"
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\nexec cat {listing}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-a,GPU-b")
    monkeypatch.setattr(slice_info, "FIRST_NAMESPACE", os.readlink("/proc/self/ns/pid"))
    return listing


def test_memory_used_is_the_sum_over_the_process_and_its_descendants(nvidia_smi: Path) -> None:
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:
        nvidia_smi.write_text(
            f"GPU-a, {os.getpid()}, 400\nGPU-b, {child.pid}, 30\nGPU-c, {os.getpid()}, 7000\nGPU-a, 1, 9000\n"
        )
        assert slice_info.memory_used() == (430, "430 MiB")


@pytest.mark.parametrize("answer", ["[N/A]", "[Insufficient Permissions]"])
def test_memory_that_the_driver_does_not_tell_is_not_guessed(nvidia_smi: Path, answer: str) -> None:
    nvidia_smi.write_text(f"GPU-a, {os.getpid()}, {answer}")
    assert slice_info.memory_used() == (None, "use not measured: the driver does not report it")


def test_in_a_pod_its_node_measures_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_POOL_POD", "1")
    assert slice_info.memory_used() == (None, "use is measured on this kernel's node")


def test_in_a_container_memory_is_not_measured(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvidia_smi.write_text(f"GPU-a, {os.getpid()}, 400")
    monkeypatch.setattr(slice_info, "FIRST_NAMESPACE", "another")
    used, words = slice_info.memory_used()
    assert used is None
    assert "container" in words


def test_without_nvidia_smi_memory_is_not_measured(nvidia_smi: Path) -> None:
    (nvidia_smi.parent / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    assert slice_info.memory_used() == (None, "use not measured: nvidia-smi does not answer")
    (nvidia_smi.parent / "nvidia-smi").unlink()
    assert slice_info.memory_used() == (None, "use not measured: nvidia-smi does not answer")


@pytest.mark.parametrize(("device", "used"), [("GPU-a", 0), ("MIG-a", 400)])
def test_a_mig_instance_is_counted_under_its_gpu(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch, device: str, used: int
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", device)
    nvidia_smi.write_text(f"GPU-whole, {os.getpid()}, 400")
    assert slice_info.memory_used() == (used, f"{used} MiB")


@pytest.mark.usefixtures("on_a_slice")
def test_measured_memory_is_shown_of_what_is_granted(
    monkeypatch: pytest.MonkeyPatch, nvidia_smi: Path
) -> None:
    monkeypatch.delenv("GPU_POOL_SIMULATED")
    monkeypatch.setenv("GPU_POOL_DEVICE_NAMES", "A<b>,B")
    nvidia_smi.write_text(f"GPU-a, {os.getpid()}, 400\n")
    shown = slice_info.SliceInfo()
    assert "400 MiB of 2 x 655 MiB granted" in repr(shown)
    assert "A&lt;b&gt;" in shown._repr_html_()


@pytest.mark.parametrize(
    ("seconds", "words"), [(0, "0 s"), (59, "59 s"), (60, "1 min"), (3599, "59 min"), (7500, "2 h 05 min")]
)
def test_durations_are_written_for_people(seconds: int, words: str) -> None:
    assert slice_info.duration(seconds) == words


@pytest.mark.parametrize("path", sorted(LAUNCHER.parent.glob("*.py")), ids=lambda path: path.name)
def test_old_pythons_can_read_what_runs_in_the_kernel(path: Path) -> None:
    ast.parse(path.read_text(), feature_version=(3, 6))


def test_the_oldest_python_found_compiles_what_runs_in_the_kernel(tmp_path: Path) -> None:
    found = [python for python in map(shutil.which, (f"python3.{minor}" for minor in range(6, 10))) if python]
    # What is on the PATH may be a placeholder for a Python that is not installed.
    works = [python for python in found if subprocess.run([python, "-c", ""], check=False).returncode == 0]
    if not works:
        pytest.skip("no Python from 3.6 to 3.9 on the PATH")
    copied = shutil.copytree(LAUNCHER.parent, tmp_path / "inkernel")
    subprocess.run([works[0], "-W", "error", "-m", "compileall", "-q", "-f", copied], check=True)


@pytest.mark.parametrize(
    ("left", "said"),
    [(None, "however long it is idle.\n"), (90.5, "until its lease ends, in 1 min:"), (-5, "in 0 s:")],
)
def test_keeping_a_slice_that_nobody_takes_names_the_end_of_its_lease(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], left: float | None, said: str
) -> None:
    monkeypatch.delenv("GPU_POOL_IDLE_LIMIT", raising=False)
    monkeypatch.delenv("GPU_POOL_YIELD_AFTER", raising=False)
    monkeypatch.delenv("GPU_POOL_ENDS_AT", raising=False)
    if left is not None:
        monkeypatch.setenv("GPU_POOL_ENDS_AT", f"{time.time() + left:.0f}")
    slice_requests.keep("2h")
    assert said in capsys.readouterr().out


def test_the_end_of_a_lease_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GPU_POOL_ENDS_AT", f"{time.time() + 90.5:.0f}")
    assert slice_info.terms()[0] == ("Ends in", "1 min: its course allows no longer lease")
    monkeypatch.setenv("GPU_POOL_ENDS_AS_ASKED", "1")
    assert slice_info.terms()[0] == ("Ends in", "1 min: nothing longer was asked for")


GIVEN = "given after 1 min to somebody who waits, or once they have waited as long"
STAYS = "it has used CUDA and what it keeps there cannot be moved away"


@pytest.mark.parametrize(
    ("limits", "said"),
    [
        ({}, None),
        ({"YIELD_AFTER": "60"}, f"{GIVEN}, unless {STAYS}"),
        ({"IDLE_LIMIT": "900"}, f"lent to others after 15 min, unless {STAYS}"),
        (
            {"YIELD_AFTER": "60", "IDLE_LIMIT": "900"},
            f"{GIVEN}, lent to others after 15 min, unless {STAYS}",
        ),
        ({"YIELD_AFTER": "60", "IDLE_LIMIT": "60"}, f"lent to others after 1 min, unless {STAYS}"),
        (
            {"YIELD_AFTER": "60", "IDLE_LIMIT": "900", "IDLE_ENDS_CUDA": "1"},
            f"{GIVEN}, lent to others after 15 min; if {STAYS}, ended after 15 min, with a warning before",
        ),
        ({"IDLE_LIMIT": "900", "IDLE_ENDS": "1"}, "ended after 15 min, with a warning before"),
    ],
    ids=["stays", "yields", "limit", "both", "at once", "ended after CUDA", "pod"],
)
def test_it_is_told_what_becomes_of_the_slice_of_an_idle_kernel(
    monkeypatch: pytest.MonkeyPatch, limits: dict[str, str], said: str | None
) -> None:
    for name in ("ENDS_AT", "YIELD_AFTER", "IDLE_LIMIT", "IDLE_ENDS", "IDLE_ENDS_CUDA"):
        monkeypatch.delenv(f"GPU_POOL_{name}", raising=False)
    for name, value in limits.items():
        monkeypatch.setenv(f"GPU_POOL_{name}", value)
    assert dict(slice_info.terms()).get("When idle") == said
