"""What a course's file says of where its kernels are, kept by the pool whoever asks it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from gpu_pool.courses import CourseFile, Courses, parse_course
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import Holder, LeaseState, NotAllowed, parse_request
from support.fake_kubernetes import FakeKubernetes
from support.kernel_pods import cluster_pool
from support.pools import key

HUB = "hub"
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
