"""The images: the same from every build, without rights, with a list of what is in them, and at work."""

from __future__ import annotations

import json

import pytest
from packaging.utils import canonicalize_name

from support.images import ImageContainer, layers, script

lock = script("lock")
pytestmark = pytest.mark.timeout(1800)

#: Serves a simulated GPU, asks for its status, grants 2% and ends.
SERVE = """
set -e
export GPU_POOL_DEVICES=V100-SXM2-32GB:1 GPU_POOL_URL=unix:$HOME/run/pool.sock
gpu-pool serve --store "$HOME/store/store.db" --socket "$HOME/run/pool.sock" >"$HOME/log" 2>&1 &
service=$!
until gpu-pool health >/dev/null 2>&1; do kill -0 $service || { cat "$HOME/log"; exit 1; }; done
gpu-pool run 2% -- sh -c 'echo slice $GPU_POOL_SLICE'
gpu-pool status --json
kill $service
wait $service
"""
#: Starts a kernel as a server does, and has it run a cell.
KERNEL = """
import sys
from jupyter_client.manager import start_new_kernel
manager, client = start_new_kernel(kernel_name="python3")
answer = []
def note(message):
    content = message["content"]
    answer.extend(filter(None, (content.get("text"), *content.get("traceback", ()))))
client.execute_interactive(sys.argv[1], output_hook=note)
client.stop_channels()
manager.shutdown_kernel()
print("cell " + "".join(answer), end="")
"""
#: Computes a gradient by PyTorch, to which the kernels' limit of memory has been given, without a GPU.
TORCH = """
from gpu_pool_kernels.inkernel import caps
caps.watch()
import torch
x = torch.tensor([3.0], requires_grad=True)
(x * x).sum().backward()
waiting = [call.__qualname__ for call, _ in torch.cuda._queued_calls]
print(x.grad.item(), torch.version.cuda[:3], torch.cuda.is_available())
print("limit_torch.<locals>.set_fraction" in waiting, caps.failures())
"""


def test_two_builds_have_the_same_layers(image: str, second_image: str) -> None:
    assert layers(image) == layers(second_image)


def test_nothing_in_it_runs_as_root_or_becomes_root(container: ImageContainer) -> None:
    assert container.says("id", "-u") == "1000\n"
    assert container.says("sh", "-c", "find / -xdev -type f -perm /6000 2>/dev/null || true") == ""
    # What is installed is not for its user to change.
    writable = "find /usr /etc /opt -xdev -writable -not -type l 2>/dev/null || true"
    assert container.says("sh", "-c", writable) == ""


def test_it_has_what_its_lock_has_and_nothing_else(container: ImageContainer, target: str) -> None:
    installed = json.loads(container.says("python3", "-m", "pip", "list", "--format=json"))
    found = {canonicalize_name(each["name"]): each["version"] for each in installed}
    ours = {"jupyter-gpu-pool": found["jupyter-gpu-pool"], **lock.versions(target)}
    # The base has pip itself, perhaps with what else makes wheels; PyTorch needs some of that, and locks it.
    of_the_base = {"pip", "setuptools", "wheel"} - ours.keys()
    assert {name: found[name] for name in found.keys() - of_the_base} == ours
    assert "No broken requirements" in container.says("python3", "-m", "pip", "check")


def test_its_bill_of_materials_lists_our_package_and_what_it_needs(
    container: ImageContainer, target: str
) -> None:
    bill = json.loads(container.says("cat", "/opt/gpu-pool/sbom.cdx.json"))
    assert bill["bomFormat"] == "CycloneDX"
    listed = {canonicalize_name(each["name"]): each["version"] for each in bill["components"]}
    assert listed.items() >= lock.versions(target).items()
    assert "jupyter-gpu-pool" in listed
    needs = {each["ref"].partition("==")[0]: each.get("dependsOn", []) for each in bill["dependencies"]}
    assert any(each.startswith("traitlets==") for each in needs["jupyter-gpu-pool"])


def test_a_module_is_not_compiled_anew_at_every_start(container: ImageContainer) -> None:
    """Its times are those of a commit, so a compiled form that goes by its source's time would be stale."""
    program = "import gpu_pool.cli, sys; print(gpu_pool.cli.__cached__)"
    path = container.says("python3", "-c", program).strip()
    header = container.says("python3", "-c", f"print(open({path!r}, 'rb').read(8)[4])")
    # PEP 552: by the source's hash, which is not checked.
    assert header == "1\n"


def test_it_works_without_root(container: ImageContainer, target: str) -> None:
    if target == "service":
        said = container.says("sh", "-c", SERVE)
        assert said.startswith("slice 2%\n")
        (device,) = json.loads(said.partition("\n")[2])["devices"]
        assert device["model"] == "V100-SXM2-32GB"
    else:
        assert container.says("python3", "-c", KERNEL, "print(6 * 7)") == "cell 42\n"
        assert container.says("jupyterhub-singleuser", "--version").startswith("5.")
        assert "python3" in container.says("jupyter", "kernelspec", "list")
    if target == "notebook-pytorch":
        said = container.says("python3", "-c", KERNEL, TORCH)
        assert said == "cell 6.0 13. False\nTrue {}\n"
