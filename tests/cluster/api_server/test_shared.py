"""Whole GPUs that the pool claims and divides, over a real API server whose scheduler assigns them.

Claims of structured parameters need no driver to be assigned: the test lists the devices.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from gpu_pool.cluster.api import ApiWriter
from gpu_pool.cluster.device_claims import COMPONENT, HolderShape, holder
from gpu_pool.cluster.dialects.shared import claim_name
from gpu_pool.cluster.settings import ClusterTimes
from gpu_pool.courses import Courses, parse_course
from gpu_pool.pool.pool import GpuPool
from gpu_pool_client import EndReason, Holder, LeaseGone, LeaseState, parse_request
from support.clusters import listed, node, resource_slice
from support.control_plane import Cluster
from support.kernel_pods import (
    backend_of,
    cluster_pool,
    command,
    held,
    notebook,
    running,
    until_free,
    until_pod,
    volume,
)
from support.kube_examples import CLUSTER_WIDE, copied, kubeconfig_of, rendered
from support.node_agent import NodeAgent
from support.pools import eventually, take
from support.whole_devices import DEVICE_CLASS

NODE, UUID = "shared-1", "GPU-gpu-0"
CLAIM = claim_name("gpu-pool", UUID)


@pytest.fixture(scope="module")
def cluster(kubeconfig: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A node with one GPU, listed as NVIDIA's DRA driver does. What its pods run does not matter here."""
    with NodeAgent(kubeconfig, tmp_path_factory.mktemp("nodes"), hollow=True) as agent:
        cluster = Cluster(kubeconfig, agent)
        cluster.add(node(NODE))
        about = {"apiVersion": "resource.k8s.io/v1", "kind": "ResourceSlice"}
        cluster.apply(DEVICE_CLASS, {**about, **resource_slice(listed("gpu-0"), name=NODE)})
        yield cluster
        cluster.kubectl("delete", "resourceslice/shared-1-gpus-1-1", "deviceclass/gpu.nvidia.com")


@pytest.fixture
async def pools(cluster: Cluster, namespace: str, tmp_path: Path) -> AsyncIterator[Pools]:
    cluster.apply(
        *volume("claim-ada", namespace, "ReadWriteMany"), notebook("ada", namespace), namespace=namespace
    )
    async with AsyncExitStack() as stack:
        yield Pools(cluster, namespace, tmp_path, stack)


class Pools:
    """Opens pools over the cluster, which end with the test."""

    def __init__(self, cluster: Cluster, namespace: str, folder: Path, stack: AsyncExitStack) -> None:
        self.cluster, self.namespace, self._folder, self._stack = cluster, namespace, folder, stack

    async def open(self, kubeconfig: Path | None = None, **settings: Any) -> GpuPool:
        config = kubeconfig or self.cluster.kubeconfig
        settings = {"dialect": "shared", **settings}
        opened = cluster_pool(self._folder / "store.db", config, self.namespace, **settings)
        pool = await self._stack.enter_async_context(opened)
        await eventually(lambda: backend_of(pool).view.notebook("ada", ""))
        return pool

    def claim(self) -> Any:
        return self.cluster.get("resourceclaim", "-n", self.namespace, CLAIM)

    def claims(self) -> list[str]:
        found = self.cluster.get("resourceclaims", "-n", self.namespace)["items"]
        return [each["metadata"]["name"] for each in found]

    def users(self) -> list[str]:
        """Return the names of the pods for which the claim is reserved."""
        return sorted(each["name"] for each in self.claim().get("status", {}).get("reservedFor", []))

    def holders(self) -> list[Any]:
        component = f"app.kubernetes.io/component={COMPONENT}"
        found: list[Any] = self.cluster.get("pods", "-n", self.namespace, "-l", component)["items"]
        return found

    def names_of_holders(self) -> list[str]:
        return [each["metadata"]["name"] for each in self.holders()]

    def rival(self, name: str = "rival") -> None:
        """Let somebody else ask for any GPU, with a claim and a pod of their own."""
        requests = [{"name": "gpu", "exactly": {"deviceClassName": "gpu.nvidia.com"}}]
        claim = {
            "apiVersion": "resource.k8s.io/v1",
            "kind": "ResourceClaim",
            "metadata": {"name": name},
            "spec": {"devices": {"requests": requests}},
        }
        self.cluster.apply(claim, using(name, name), namespace=self.namespace)

    def has_gpu(self, name: str = "rival") -> bool:
        """Whether the claim of somebody else was given a GPU."""
        found = self.cluster.get("resourceclaim", "-n", self.namespace, name)
        return "allocation" in found.get("status", {})

    def is_refused_a_gpu(self, name: str = "rival") -> bool:
        """Whether the scheduler has found none for the pod of somebody else."""
        conditions = self.cluster.get("pod", "-n", self.namespace, name)["status"].get("conditions", [])
        return any(each.get("reason") == "Unschedulable" for each in conditions)


def using(name: str, claim: str) -> dict[str, Any]:
    """Return a pod that names a claim."""
    container = {"name": "c", "image": "example.org/notebook:1", "resources": {"claims": [{"name": "gpu"}]}}
    spec = {
        "containers": [container],
        "resourceClaims": [{"name": "gpu", "resourceClaimName": claim}],
        "tolerations": [{"operator": "Exists"}],
        "terminationGracePeriodSeconds": 0,
    }
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": name}, "spec": spec}


async def started(pool: GpuPool, text: str = "2%") -> str:
    lease = await held(pool, text)
    await pool.launch(lease.id, command())
    await running(pool, lease.id)
    return lease.id


async def test_slices_of_a_gpu_are_on_one_claim_that_the_scheduler_assigns(pools: Pools) -> None:
    pool = await pools.open()
    ids = [await started(pool, text) for text in ("2%", "0.5GiB", "30%")]
    await eventually(lambda: len(pools.users()) == 4)
    (result,) = pools.claim()["status"]["allocation"]["devices"]["results"]
    assert (result["pool"], result["device"]) == (NODE, "gpu-0")
    kernels = {f"gpu-pool-{lease_id}-1" for lease_id in ids}
    (keeper,) = set(pools.users()) - kernels
    assert pools.names_of_holders() == [keeper]
    free = (await pool.status()).devices[0].free_milli
    assert 600 < free < 670


async def test_between_two_slices_nobody_else_gets_the_gpu_and_afterwards_they_do(pools: Pools) -> None:
    pool = await pools.open(shared_empty_for=600)
    await pool.release(await started(pool))
    # Of a kernel this short nobody may have begun to keep the GPU yet.
    await eventually(lambda: pools.users() and pools.users() == pools.names_of_holders(), within=60)
    pools.rival()
    await eventually(pools.is_refused_a_gpu, within=60)
    assert not pools.has_gpu()
    second = await started(pool)
    assert not pools.has_gpu()
    await pool.release(second)


async def test_an_empty_gpu_is_given_back_and_waited_for(pools: Pools) -> None:
    pool = await pools.open(shared_empty_for=0)
    first = await started(pool)
    pools.rival()
    await eventually(pools.is_refused_a_gpu, within=60)
    await pool.release(first)
    await eventually(pools.has_gpu)
    await eventually(lambda: CLAIM not in pools.claims() and not pools.holders())
    await until_free(pool, 0)
    waiting = await take(pool, "2%", "waits")
    assert (await pool.get_lease(waiting)).state is LeaseState.WAITING
    pools.cluster.kubectl("delete", "pod,resourceclaim", "rival", "-n", pools.namespace)
    lease = await pool.wait(waiting, 120)
    await pool.launch(lease.id, command())
    await running(pool, lease.id)


async def test_a_claim_that_is_deleted_ends_its_slices_and_the_next_one_gets_a_new_one(pools: Pools) -> None:
    pool = await pools.open()
    lease_id = await started(pool)
    before = pools.claim()["metadata"]["uid"]
    pools.cluster.kubectl("delete", "resourceclaim", CLAIM, "-n", pools.namespace, "--wait=false")
    with pytest.raises(LeaseGone, match="deleted the claim by which this pool had the GPU"):
        await until_pod(pool, lease_id, lambda _: False)
    assert (await pool.get_lease(lease_id)).end_reason is EndReason.TAKEN
    again = await asyncio.wait_for(started(pool), 180)
    assert again != lease_id
    assert pools.claim()["metadata"]["uid"] != before


async def test_a_service_that_starts_anew_goes_on_with_the_claim(pools: Pools, tmp_path: Path) -> None:
    async with cluster_pool(
        tmp_path / "first.db", pools.cluster.kubeconfig, pools.namespace, dialect="shared"
    ) as first:
        await eventually(lambda: backend_of(first).view.notebook("ada", ""))
        lease_id = await started(first)
        await eventually(lambda: len(pools.users()) == 2)
        before = pools.claim()["metadata"]["uid"]
    async with cluster_pool(
        tmp_path / "first.db", pools.cluster.kubeconfig, pools.namespace, dialect="shared"
    ) as second:
        await eventually(lambda: backend_of(second).view.notebook("ada", ""))
        assert (await second.get_lease(lease_id)).state is LeaseState.HELD
        await started(second)
        assert pools.claim()["metadata"]["uid"] == before
        assert len(pools.holders()) == 1


# -- Prepared pods -------------------------------------------------------------

COURSE = b"""
title: ML
slices: [{name: S, request: 2%}]
preload: [numpy]
kubernetes: {prepared_pods: 3, memory: 64MiB}
"""


@pytest.fixture
def servers(pools: Pools) -> None:
    """Start bob's server beside ada's, both of the course; before the namespace has rules for pods."""
    pools.cluster.apply(
        *volume("claim-bob", pools.namespace, "ReadWriteMany"),
        notebook("bob", pools.namespace),
        namespace=pools.namespace,
    )
    words = ("label", "pod", "jupyter-ada", "jupyter-bob", "jupyter-gpu-pool/course=ml")
    pools.cluster.kubectl("-n", pools.namespace, *words)


def prepared(pools: Pools) -> list[Any]:
    """Return the pods that wait for a kernel."""
    words = "jupyter-gpu-pool/prepared,!jupyter-gpu-pool/lease"
    found: list[Any] = pools.cluster.get("pods", "-n", pools.namespace, "-l", words)["items"]
    return found


def runs(pod: Any) -> bool:
    return bool(pod["status"].get("podIP")) and pod["status"]["phase"] == "Running"


async def of_course(pool: GpuPool, user: str) -> str:
    lease = await pool.acquire(parse_request("2%"), Holder(user, "ml"), uuid4().hex, timeout=120)
    return lease.id


def with_course(**settings: Any) -> dict[str, Any]:
    courses = Courses({"ml": parse_course("ml.yaml", COURSE)})
    return {"courses": courses, "named": {"ml": {}}, "supervisor": {"launch.py": "pass"}, **settings}


async def test_a_pod_is_prepared_taken_and_ended_within_the_services_rights_and_policies(
    pools: Pools, servers: None, installed: Path
) -> None:
    pool = await pools.open(installed, **with_course())
    first = await of_course(pool, "bob")
    await pool.launch(first, command())
    await running(pool, first)
    await eventually(lambda: [pod for pod in prepared(pools) if runs(pod)], within=60)
    (pod,) = prepared(pools)
    name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
    assert pod["metadata"]["ownerReferences"][0]["name"] == "jupyter-ada"
    await eventually(lambda: name in pools.users(), within=60)
    view = backend_of(pool).view
    await eventually(lambda: any(runs(each) for each in view.prepared.values()))
    lease_id = await of_course(pool, "ada")
    begun = await pool.launch(lease_id, command(can_begin=True))
    assert begun.beginning is not None
    assert begun.address == pod["status"]["podIP"]
    taken = pools.cluster.get("pod", "-n", pools.namespace, name)
    assert taken["metadata"]["uid"] == uid
    assert taken["metadata"]["labels"]["jupyter-gpu-pool/lease"] == lease_id
    assert UUID in taken["metadata"]["annotations"]["jupyter-gpu-pool/slices"]
    await pool.release(lease_id)
    await eventually(lambda: name not in pools.users(), within=60)
    await eventually(lambda: prepared(pools), within=60)  # the next one
    # Its server goes, and so does it.
    pools.cluster.kubectl("delete", "pod", "jupyter-ada", "-n", pools.namespace, "--wait=false")
    await eventually(lambda: not prepared(pools))
    await pool.release(first)


async def test_the_service_changes_no_pod_but_its_own(pools: Pools, installed: Path) -> None:
    assert installed.name
    changes = '{"metadata": {"labels": {"jupyter-gpu-pool/lease": "1-0123abcd"}}}'
    words = ("patch", "pod", "jupyter-ada", "-n", pools.namespace, "-p", changes, "--dry-run=server")

    def refusal() -> str:
        try:
            pools.cluster.kubectl(*words, f"--as=system:serviceaccount:{pools.namespace}:gpu-pool")
        except AssertionError as error:
            return str(error)
        return ""

    await eventually(lambda: "The pod is not as jupyter-gpu-pool makes it" in refusal(), within=60)


async def test_what_is_changed_of_a_pod_is_what_is_named(pools: Pools) -> None:
    pool = await pools.open(**with_course())
    writer = ApiWriter(backend_of(pool).api, ClusterTimes(), logging.getLogger("gpu_pool.tests"))
    path = f"/api/v1/namespaces/{pools.namespace}/pods"
    changes = {"metadata": {"labels": {"mark": "1"}}, "spec": {"activeDeadlineSeconds": 600}}
    assert await writer.change(f"{path}/nobodys", changes) is None
    changed = await writer.change(f"{path}/jupyter-ada", changes)
    assert changed["spec"]["activeDeadlineSeconds"] == 600
    assert changed["metadata"]["labels"]["mark"] == "1"
    assert changed["metadata"]["annotations"]["hub.jupyter.org/username"] == "ada"


# -- With the rights and policies of the examples ------------------------------


@pytest.fixture
def installed(cluster: Cluster, namespace: str, tmp_path: Path) -> Iterator[Path]:
    """Apply the service's rights and policies; return how to reach the cluster as the service does."""
    cluster.kubectl("wait", "--for=create", "clusterrolebinding/system:basic-user", "--timeout=60s")
    folder = copied(tmp_path, namespace)
    chosen = folder / "kustomization.yaml"
    chosen.write_text(chosen.read_text().replace("components: []", "components: [service/shared]"))
    kinds = {"ServiceAccount", "Role", "RoleBinding", *CLUSTER_WIDE}
    found = [each for each in rendered(folder) if each["kind"] in kinds]
    cluster.apply(*found, flags=["--validate=strict"])
    restricted = "pod-security.kubernetes.io/enforce=restricted"
    cluster.kubectl("label", "namespace", namespace, restricted)
    yield kubeconfig_of(cluster, "gpu-pool", namespace, tmp_path / "config")
    names = [f"{each['kind']}/{each['metadata']['name']}" for each in found if each["kind"] in CLUSTER_WIDE]
    cluster.kubectl("delete", *names)


def refusal(cluster: Cluster, namespace: str, made: dict[str, Any], account: str = "") -> str:
    """Return what an account, or the administrator, is told who creates an object; empty if it is created."""
    words = ["-n", namespace, "--dry-run=server", "-f", "-"]
    words += [f"--as=system:serviceaccount:{namespace}:{account}"] if account else []
    try:
        cluster.kubectl("create", *words, stdin=json.dumps(made))
    except AssertionError as error:
        return str(error)
    return ""


async def test_the_service_lives_under_restricted_security_and_its_policies_and_all_goes_with_it(
    pools: Pools, installed: Path, tmp_path: Path
) -> None:
    pod = using("mine", CLAIM)
    security = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    pod["spec"]["containers"][0]["securityContext"] = security
    profile = {"type": "RuntimeDefault"}
    pod["spec"]["securityContext"] = {"runAsNonRoot": True, "runAsUser": 1, "seccompProfile": profile}
    words = "names a claim of jupyter-gpu-pool, which has a whole GPU"
    await eventually(lambda: words in refusal(pools.cluster, pools.namespace, pod), within=60)
    pod["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": "of-my-own"}]
    assert refusal(pools.cluster, pools.namespace, pod) == "", "nobody else's claims are looked at"
    pod["spec"]["resourceClaims"] = [{"name": "gpu", "resourceClaimName": CLAIM}]
    assert refusal(pools.cluster, "default", pod) == "", "nor other namespaces: another pool's are there"

    async with cluster_pool(tmp_path / "own.db", installed, pools.namespace, dialect="shared") as pool:
        await eventually(lambda: backend_of(pool).view.notebook("ada", ""))
        await started(pool)
        await eventually(pools.holders)
        (keeper,) = pools.holders()
        (owner,) = keeper["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["name"]) == ("ServiceAccount", "gpu-pool")
        assert pools.claim()["metadata"]["ownerReferences"] == [owner]
    pools.cluster.kubectl("delete", "serviceaccount", "gpu-pool", "-n", pools.namespace)
    pools.cluster.kubectl("delete", "pod", "jupyter-ada", "-n", pools.namespace, "--wait=false")
    await eventually(lambda: not pools.claims() and not pools.holders())


@pytest.mark.parametrize(
    "change",
    [
        lambda made: made["metadata"].update(name="another"),
        lambda made: made["metadata"].pop("labels"),
        lambda made: made["spec"]["devices"]["requests"][0]["exactly"].update(count=2),
        lambda made: made["spec"]["devices"]["requests"][0]["exactly"].update(allocationMode="All", count=0),
        lambda made: made["spec"]["devices"]["requests"].append(
            {"name": "more", "exactly": {"deviceClassName": "gpu.nvidia.com"}}
        ),
    ],
)
async def test_the_service_may_make_no_other_claims(pools: Pools, installed: Path, change: Any) -> None:
    pool = await pools.open(installed)
    shared = backend_of(pool).view.shared
    assert shared is not None
    made = shared.claim(UUID)
    assert made is not None
    change(made)
    words = "The ResourceClaim is not as jupyter-gpu-pool makes it"
    await eventually(lambda: words in refusal(pools.cluster, pools.namespace, made, "gpu-pool"), within=60)


async def test_a_holder_that_is_more_than_one_is_refused(pools: Pools, installed: Path) -> None:
    assert installed.name
    shape = HolderShape("gpu-pool", pools.namespace, "registry.k8s.io/pause:3.10")
    made = holder(shape, UUID, NODE, (), ())
    await eventually(lambda: refusal(pools.cluster, pools.namespace, made, "gpu-pool") == "", within=60)
    made["spec"]["volumes"] = [{"name": "v", "secret": {"secretName": "hub"}}]
    words = "it has the volumes v"
    await eventually(lambda: words in refusal(pools.cluster, pools.namespace, made, "gpu-pool"), within=60)
