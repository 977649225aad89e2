"""One look at a node's devices, with the real nvidia-ml-py over a stand-in for the driver's library.

And whose container a process is in: the names that kubelets and container runtimes give their cgroups.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gpu_pool.cluster.node_agent.sampling import Container, container_of
from support import nvml_stub

#: Looks once. The driver's pids are those of the machine, wherever the test runs.
LOOK = """
import dataclasses, json
from gpu_pool.cluster.node_agent.sampling import Container, sample_node
from gpu_pool.devices import discover, sampling
sampling.FIRST_NAMESPACE = sampling.pid_namespace()
sampler = sampling.ProcessSampler()
found = sample_node(sampler, discover().devices, %s.get)
sampler.close()
print(json.dumps(dataclasses.asdict(found)))
"""
CONTAINERS = (
    "{100: Container('a', '1'), 101: Container('a', '1'), 102: Container('a', '2'), 103: Container('b', '3'),"
    " 104: Container('', '4')}"
)
TWO = """
gpu GPU-1 Tesla V100-SXM2-32GB
memory 32768 0
{one}
gpu GPU-2 Tesla V100-SXM2-32GB
memory 32768 0
{two}
"""


def sampled(tmp_path: Path, one: str = "", two: str = "") -> dict[str, Any]:
    code = LOOK.replace("%s", CONTAINERS)
    printed = nvml_stub.run(
        nvml_stub.build(tmp_path),
        f"driver 550.54.14\n{TWO.format(one=one, two=two)}",
        code,
        GPU_POOL_DEVICES="",
    )
    found: dict[str, Any] = json.loads(printed)
    return found


def uses(found: dict[str, Any]) -> list[tuple[Any, ...]]:
    return [tuple(each.values()) for each in found["uses"]]


def test_what_a_pod_uses_of_each_device(tmp_path: Path) -> None:
    found = sampled(
        tmp_path,
        "process 100 300\nprocess 101 112\nprocess 102 50\nworks 101 87\nworks 100 3",
        "process 100 20 mps\nprocess 103 200\nprocess 104 7",
    )
    assert (found["devices"], found["complete"], found["problems"]) == (["GPU-1", "GPU-2"], True, [])
    assert uses(found) == [
        ("a", "", "GPU-1", 462, 3, 0.87),
        # The driver of this one does not say whether processes work.
        ("", "4", "GPU-2", 7, 1, None),
        ("a", "", "GPU-2", 20, 1, None),
        ("b", "", "GPU-2", 200, 1, None),
    ]


def test_what_is_the_node_s_own_is_nobody_s_use(tmp_path: Path) -> None:
    assert sampled(tmp_path, "process 999 300\nworks 999 50")["uses"] == []


def test_memory_that_the_driver_does_not_say_is_unknown_and_not_0(tmp_path: Path) -> None:
    assert uses(sampled(tmp_path, "process 100 300\nprocess 101 -")) == [("a", "", "GPU-1", None, 2, None)]


def test_a_device_that_cannot_be_looked_at_is_left_out_and_said(tmp_path: Path) -> None:
    found = sampled(
        tmp_path, "fail nvmlDeviceGetComputeRunningProcesses_v3 15\nprocess 100 300", "process 100 20"
    )
    assert (found["devices"], found["complete"]) == (["GPU-2"], False)
    assert uses(found) == [("a", "", "GPU-2", 20, 1, None)]
    assert len(found["problems"]) == 1


def test_without_devices_nothing_is_known(tmp_path: Path) -> None:
    code = LOOK.replace("%s", CONTAINERS)
    found = json.loads(
        nvml_stub.run(nvml_stub.build(tmp_path), "driver 550.54.14\n", code, GPU_POOL_DEVICES="")
    )
    assert (found["devices"], found["uses"], found["complete"]) == ([], [], False)


def test_simulated_devices_are_not_looked_at(tmp_path: Path) -> None:
    code = LOOK.replace("%s", CONTAINERS)
    devices = {"GPU_POOL_DEVICES": "V100-SXM2-32GB:1"}
    found = json.loads(nvml_stub.run(nvml_stub.build(tmp_path), "driver 550.54.14\n", code, **devices))
    assert (found["devices"], found["complete"]) == ([], False)


UID = "2c48913c-b29f-11e7-9350-020968147796"
FLAT = UID.replace("-", "_")
STATIC = "99dcb84d2a34f7e338778606703258c4"
OTHER = "11111111-2222-3333-4444-555555555555"
ID = "d4e8e05a546c86b6443f101966c618e47753ed01fa9929cae00d3b692f7a9f80"
HERE = Container(UID, ID)
SLICES = "/kubepods.slice/kubepods-burstable.slice"

PATHS = {
    # containerd, cgroupfs: guaranteed, burstable, best effort
    f"/kubepods/pod{UID}/{ID}": HERE,
    f"/kubepods/burstable/pod{UID}/{ID}": HERE,
    f"/kubepods/besteffort/pod{UID}/{ID}": HERE,
    # containerd, systemd
    f"/kubepods.slice/kubepods-pod{FLAT}.slice/cri-containerd-{ID}.scope": HERE,
    f"{SLICES}/kubepods-burstable-pod{FLAT}.slice/cri-containerd-{ID}.scope": HERE,
    # a kubelet with systemd over a containerd without
    f"/system.slice/containerd.service/kubepods-burstable-pod{FLAT}.slice:cri-containerd:{ID}": HERE,
    f"/system.slice/containerd.service/kubepods-burstable-pod{UID}.slice:cri-containerd:{ID}": HERE,
    f"/kubepods-besteffort-pod{FLAT}.slice:cri-containerd:{ID}": HERE,
    # CRI-O, both drivers, with runc and with crun
    f"/kubepods/burstable/pod{UID}/crio-{ID}": HERE,
    f"{SLICES}/kubepods-burstable-pod{FLAT}.slice/crio-{ID}.scope": HERE,
    f"{SLICES}/kubepods-burstable-pod{FLAT}.slice/crio-{ID}.scope/container": HERE,
    f"{SLICES}/kubepods-burstable-pod{FLAT}.slice/crio-conmon-{ID}.scope": Container(UID, ""),
    # cri-dockerd
    f"{SLICES}/kubepods-burstable-pod{FLAT}.slice/docker-{ID}.scope": HERE,
    f"/kubepods/burstable/pod{UID}/{ID}/init.scope": HERE,
    # a root of the kubelet's own, as kind has it
    f"/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod{FLAT}.slice/cri-containerd-{ID}.scope": HERE,
    f"/kubelet/kubepods/burstable/pod{UID}/{ID}": HERE,
    # a static pod
    f"/kubepods/burstable/pod{STATIC}/{ID}": Container(STATIC, ID),
    f"{SLICES}/kubepods-burstable-pod{STATIC}.slice/cri-containerd-{ID}.scope": Container(STATIC, ID),
    # seen from within another cgroup namespace
    f"/../../../kubepods-burstable.slice/kubepods-burstable-pod{FLAT}.slice/cri-containerd-{ID}.scope": HERE,
    f"/../../pod{UID}/{ID}": HERE,
    f"/../cri-containerd-{ID}.scope": Container("", ID),
    # pods without cgroups
    f"/k8s.io/{ID}": Container("", ID),
    # whatever a container makes below its own
    f"/kubepods/burstable/pod{UID}/{ID}/kubepods/pod{OTHER}/{'0' * 64}": HERE,
    f"/k8s.io/{ID}/kubepods/pod{OTHER}/{'0' * 64}": Container("", ID),
    # no container of a pod
    "/": None,
    "/../..": None,
    "/system.slice/nvidia-persistenced.service": None,
    "/user.slice/user-1000.slice/session-3.scope": None,
    "/kubepods.slice/kubepods-burstable.slice": None,
    "/kubepods/burstable/podNOTAUID/x": None,
    f"/machine.slice/libpod-{ID}.scope": None,
}


@pytest.mark.parametrize("path", PATHS)
def test_whose_container_a_cgroup_is(path: str) -> None:
    assert container_of(f"0::{path}\n".encode()) == PATHS[path]


def test_with_the_first_version_of_cgroups_every_controller_has_a_name() -> None:
    path = f"/kubepods/burstable/pod{UID}/{ID}"
    lines = f"12:pids:{path}\n11:cpu,cpuacct:/\n3:memory:{path}\n1:name=systemd:{path}\n0::/\n"
    assert container_of(lines.encode()) == HERE


def test_a_name_may_have_any_byte_but_a_newline() -> None:
    assert container_of(b"0::/a\x85b\xff:\x0b/x\n") is None
    assert container_of(f"0::/a\x85:b/kubepods/pod{UID}/{ID}\n".encode()) == HERE
