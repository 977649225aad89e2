"""Notebook servers, and so their kernels, in several namespaces, over a served fake of the API."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from traitlets import TraitError

from gpu_pool.cluster.notebooks import in_any
from gpu_pool.cluster.settings import KubernetesSettings
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import LeaseGone, NotAllowed
from support.clusters import hami
from support.fake_kubernetes import FakeKubernetes, fake_kubernetes
from support.kernel_pods import backend_of, claim, cluster_pool, command, held, notebook, running, until_pod
from support.pools import eventually


@pytest.fixture
async def fake() -> AsyncIterator[FakeKubernetes]:
    async with fake_kubernetes() as fake:
        fake.put("nodes", hami("n1"))
        for user, namespace in (("ada", "hub"), ("bob", "course-ml"), ("eve", "elsewhere")):
            fake.put("pods", notebook(user, namespace, node="n1"))
            fake.put("persistentvolumeclaims", claim(user, namespace))
        yield fake


@pytest.fixture
async def pool(fake: FakeKubernetes, tmp_path: Path) -> AsyncIterator[GpuPool]:
    config = fake.kubeconfig(tmp_path / "kubeconfig")
    more = ["course-{course}"]
    async with cluster_pool(tmp_path / "store.db", config, "hub", more_namespaces=more) as pool:
        yield pool


async def test_a_kernel_is_in_the_namespace_of_its_notebook(pool: GpuPool, fake: FakeKubernetes) -> None:
    for user, namespace in (("ada", "hub"), ("bob", "course-ml")):
        lease = await held(pool, user=user)
        await pool.launch(lease.id, command())
        name = f"gpu-pool-{lease.id}-1"
        assert fake.get("pods", name)["metadata"]["namespace"] == namespace
        assert fake.get("secrets", name)["metadata"]["namespace"] == namespace
        fake.run(name)
        await running(pool, lease.id)
        await pool.release(lease.id)
        await eventually(lambda name=name: name not in fake.named("pods"))  # type: ignore[arg-type, misc]


async def test_a_kernel_elsewhere_ends_with_its_notebook(pool: GpuPool, fake: FakeKubernetes) -> None:
    lease = await held(pool, user="bob")
    await pool.launch(lease.id, command())
    fake.remove("pods", "jupyter-bob")
    with pytest.raises(LeaseGone, match="Your notebook server was stopped"):
        await until_pod(pool, lease.id, lambda _: False)
    await eventually(lambda: fake.named("pods") == ["jupyter-ada", "jupyter-eve"])


async def test_a_pod_of_another_namespace_is_nobodys_notebook(pool: GpuPool) -> None:
    lease = await held(pool, user="eve")
    with pytest.raises(NotAllowed, match=r"does not run in hub or course-\{course\}"):
        await pool.launch(lease.id, command())


async def test_the_server_that_was_started_elsewhere_meanwhile_is_the_one(
    pool: GpuPool, fake: FakeKubernetes
) -> None:
    fake.put("pods", notebook("bob", "hub", node="n1"))
    ending = notebook("bob", "course-ml", node="n1")
    ending["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    fake.put("pods", ending)
    await eventually(
        lambda: (found := backend_of(pool).view.notebook("bob", "")) and found.namespace == "hub"
    )
    fake.remove("pods", "jupyter-ada")  # what comes after it has been seen shows that it was, too
    await eventually(lambda: backend_of(pool).view.notebook("ada", "") is None)
    found = backend_of(pool).view.notebook("bob", "")
    assert found is not None
    assert found.namespace == "hub"


@pytest.mark.parametrize(
    ("name", "is_one"),
    [
        ("hub", True),
        ("hubs", False),
        ("course-ml", True),
        ("course-", False),
        ("a-course-ml", False),
        ("hub-ada", True),
        ("hub.ada", False),
    ],
)
def test_names_of_namespaces_are_matched_as_a_whole(name: str, is_one: bool) -> None:
    assert in_any(("hub", "course-{course}", "hub-{user}"))(name) is is_one


@pytest.mark.parametrize(
    "wrong", ["", "*", "{course}", "{user}", "course-{cours}", "Course", "a{course}{user}"]
)
def test_a_name_that_could_mean_any_namespace_is_refused_in_words(wrong: str) -> None:
    with pytest.raises(TraitError, match="Accepted: the name of a namespace"):
        KubernetesSettings(more_namespaces=[wrong])
    assert KubernetesSettings(more_namespaces=["{user}-hub", "a"]).more_namespaces == ["{user}-hub", "a"]
