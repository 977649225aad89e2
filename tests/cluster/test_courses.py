"""What a course's file says of where its kernels are, kept by the pool whoever asks it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpu_pool.courses import CourseFile, Courses, parse_course
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import Holder, LeaseState, NotAllowed, parse_request
from support.fake_kubernetes import FakeKubernetes
from support.kernel_pods import cluster_pool, command
from support.pools import key

HUB = "hub"
#: Of a site that has a Slurm cluster, too; tests of that read the same file.
BOTH_CLUSTERS = Path(__file__).parents[2] / "examples/slurm-and-kubernetes/deep-learning.yaml"
SMALL = parse_request("2%")


def course(kernels: str) -> CourseFile:
    text = f"title: Vision\nslices: [{{name: S, request: 2%}}]\nkubernetes: {{kernels: {kernels}}}\n"
    return parse_course("vision.yaml", text.encode())


@pytest.fixture
async def pool(fake: FakeKubernetes, tmp_path: Path) -> AsyncIterator[GpuPool]:
    courses = Courses({"vision": course("server"), "ml": course("pods")})
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    async with cluster_pool(tmp_path / "store.db", config, HUB, courses=courses) as pool:
        yield pool


async def test_a_course_whose_servers_have_the_slice_gets_no_other(pool: GpuPool) -> None:
    with pytest.raises(NotAllowed, match="Kernels of course vision use the slice of their notebook server"):
        await pool.request(SMALL, Holder("ada", "vision"), key())
    with pytest.raises(NotAllowed, match="as ordinary kernels"):
        await pool.forecast(SMALL, Holder("ada", "vision"))
    assert not (await pool.status()).leases


@pytest.mark.parametrize("name", ["ml", None])
async def test_every_other_gets_what_it_asks_for(pool: GpuPool, name: str | None) -> None:
    assert (await pool.request(SMALL, Holder("ada", name), key())).state is LeaseState.HELD


async def test_of_a_file_for_slurm_as_well_a_pod_has_the_slice_and_its_own_section(
    fake: FakeKubernetes, tmp_path: Path
) -> None:
    both = parse_course(BOTH_CLUSTERS.name, BOTH_CLUSTERS.read_bytes())
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    courses = Courses({"deep-learning": both})
    named = {"deep-learning": {}}
    async with cluster_pool(tmp_path / "store.db", config, HUB, courses=courses, named=named) as pool:
        lease = await pool.acquire(parse_request("40%"), Holder("ada", "deep-learning"), key(), timeout=120)
        await pool.launch(lease.id, command())
        pod = fake.get("pods", f"gpu-pool-{lease.id}-1")
    [container] = pod["spec"]["containers"]
    assert both.kubernetes is not None
    assert container["image"] == both.kubernetes.kernel_image
    limits = container["resources"]["limits"]
    assert (limits["nvidia.com/gpucores"], limits["memory"], limits["cpu"]) == ("40", "8192Mi", "2000m")
    assert not [word for word in ("COURSE_DATA", "1024M", "partition") if word in str(pod)]
