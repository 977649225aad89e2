"""Whose container a process is in: the names that kubelets and container runtimes give their cgroups."""

from __future__ import annotations

import pytest

from gpu_pool.cluster.node_agent.cgroups import Container, container_of

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
