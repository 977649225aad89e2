"""Whole devices that the pool divides itself: which it has, what pods name, what others take."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_pool.cluster.dialects import Cluster, DialectOptions, Pod, choose, usage
from gpu_pool.cluster.dialects.shared import MOST_PODS, SLICES, Shared, claim_name
from gpu_pool_client import BadRequest, Device, NeverFits, Slice, Strength, parse_request
from support.clusters import claim_of, dra, listed, named, node, resource_slice

HUB = "hub"
NAME = claim_name("gpu-pool", "GPU-gpu-0")


def shared(*devices: dict[str, Any], claims: list[dict[str, Any]] | None = None, **options: Any) -> Shared:
    cluster = dra(*(devices or (listed("gpu-0"), listed("gpu-1"))), resource_claims=claims or [])
    return Shared(cluster, DialectOptions(pool="gpu-pool", namespace=HUB, **options))


def ours(device: str = "gpu-0", **more: Any) -> dict[str, Any]:
    """Return the pool's own claim of a device, allocated."""
    made = shared().claim(f"GPU-{device}")
    assert made is not None
    given = claim_of(device, name=made["metadata"]["name"], namespace=HUB)
    return {**made, "metadata": {**made["metadata"], **more}, "status": given["status"]}


def test_it_is_used_only_where_it_is_set() -> None:
    cluster = dra(listed("gpu-0"))
    assert choose(cluster).seen == ("dra",)
    choice = choose(cluster, name="shared")
    assert isinstance(choice.dialect, Shared)
    assert "claims can have 1 devices whole" in str(choice)


def test_a_slice_of_any_size_is_granted_exactly_and_says_what_holds_it() -> None:
    for text in ("2%", "0.7GiB", "2x50%"):
        translation = shared().translate(parse_request(text))
        assert translation.statement.counted == parse_request(text)
        assert translation.statement.rounded == ()
        assert translation.statement.enforcement.memory.strength is Strength.COOPERATIVE
        assert translation.statement.enforcement.compute.strength is Strength.NONE
    assert shared().translate(parse_request("1")).statement.enforcement.memory.strength is Strength.HARD


def test_a_limit_above_the_guarantee_is_counted_as_it_is() -> None:
    translation = shared().translate(parse_request("2%..10%"))
    assert str(translation.statement.counted) == "2%..10%"
    assert (translation.statement.milli, translation.statement.memory_mib) == (20, 655)


def test_the_pod_names_the_claim_of_each_of_its_devices_and_says_what_it_has_of_it() -> None:
    device = Device("GPU-gpu-0", 0, "V100", 32768, node="n1")
    other = Device("GPU-gpu-1", 1, "V100", 32768, node="n1")
    parts = shared().parts((Slice(device, 20, 655), Slice(other, 20, 655)))
    assert [each["resourceClaimName"] for each in parts.claims] == [
        NAME,
        claim_name("gpu-pool", "GPU-gpu-1"),
    ]
    assert parts.claim_templates == ()
    assert parts.annotations == {SLICES: "GPU-gpu-0=20/655 GPU-gpu-1=20/655"}
    assert [each["key"] for each in parts.tolerations] == ["nvidia.com/gpu"]


def test_a_claim_is_for_one_device_alone() -> None:
    made = shared().claim("GPU-gpu-0")
    assert made is not None
    (request,) = made["spec"]["devices"]["requests"]
    assert request["exactly"]["deviceClassName"] == "gpu.nvidia.com"
    assert request["exactly"]["selectors"][0]["cel"]["expression"] == (
        "'uuid' in device.attributes['gpu.nvidia.com'] && "
        "device.attributes['gpu.nvidia.com'].uuid == 'GPU-gpu-0'"
    )
    assert "capacity" not in request["exactly"]
    assert shared().claim("GPU-another") is None


def test_of_a_device_that_claims_share_it_takes_all_or_leaves_it_out() -> None:
    made = shared(listed("gpu-0", default="0", shares=50)).claim("GPU-gpu-0")
    assert made is not None
    assert made["spec"]["devices"]["requests"][0]["exactly"]["capacity"] == {"requests": {"shares": "50"}}
    assert shared(listed("gpu-0", default="0")).gpus() == ()


def test_a_mig_instance_is_a_device_of_its_own_class() -> None:
    instance = listed("gpu-0-mig-0", 4864, kind="mig", profile="1g.5gb", model="A100")
    made = shared(instance).claim("GPU-gpu-0-mig-0")
    assert made is not None
    assert made["spec"]["devices"]["requests"][0]["exactly"]["deviceClassName"] == "mig.nvidia.com"


def test_a_device_without_a_uuid_cannot_be_claimed() -> None:
    bare = listed("gpu-0")
    del bare["attributes"]["uuid"]
    assert shared(bare).gpus() == ()


def test_no_more_kernels_share_a_device_than_a_claim_serves() -> None:
    assert [each.device.contexts for each in shared().gpus()] == [MOST_PODS, MOST_PODS]
    assert MOST_PODS < 256


def test_what_others_have_claimed_is_closed_and_what_the_pool_has_is_not() -> None:
    claims = [ours("gpu-0"), claim_of("gpu-1", name="research")]
    first, second = shared(claims=claims).gpus()
    assert (first.drained, second.drained) == (False, True)
    assert second.notes == ("another claim of the cluster has it",)
    assert shared(claims=claims).taken("GPU-gpu-1")
    assert not shared(claims=claims).taken("GPU-gpu-0")


@pytest.mark.parametrize(
    "change",
    [
        {"namespace": "another"},
        {"name": "gpu-pool-device-0123456789abcdef"},
        {"labels": {"jupyter-gpu-pool/pool": "another"}},
        {"annotations": {}},
    ],
)
def test_a_claim_that_only_looks_like_the_pools_is_somebody_elses(change: dict[str, Any]) -> None:
    (gpu, _) = shared(claims=[ours("gpu-0", **change)]).gpus()
    assert gpu.drained


def test_nothing_is_granted_on_a_device_whose_claim_is_being_deleted() -> None:
    (gpu, _) = shared(claims=[ours("gpu-0", deletionTimestamp="2026-11-27T12:00:00Z")]).gpus()
    assert gpu.drained
    assert gpu.notes == ("the pool's claim of it is being deleted",)


def running(namespace: str, **labels: str) -> Pod:
    annotations = {SLICES: "GPU-gpu-0=20/655 nonsense GPU-gpu-1=100/3276"}
    about = {"namespace": namespace, "name": "k", "annotations": annotations, "labels": labels}
    found = Pod.read({"metadata": about, "spec": {"nodeName": "n1", "containers": []}, "status": {}})
    assert found is not None
    return found


def test_a_kernel_holds_its_slices_and_nobody_else_by_saying_so() -> None:
    label = {"jupyter-gpu-pool/pool": "gpu-pool"}
    mine = running(HUB, **label)
    (use,) = usage(shared(), [mine])
    assert [(gpu.held_milli, gpu.held_memory_mib) for gpu in use.gpus] == [(20, 655), (100, 3276)]
    for other in (running(HUB), running("another", **label)):
        assert usage(shared(), [other])[0].milli[0] == 0


def test_somebody_elses_pod_holds_the_devices_of_its_claim_whole() -> None:
    research = Pod("default", "p", "n1")
    (use,) = usage(shared(claims=[claim_of("gpu-1", name="research", pods=("p",))]), [research])
    assert use.milli[0] == 1000


@pytest.mark.parametrize(
    ("options", "uuids"),
    [
        ({}, ["GPU-a", "GPU-b", "GPU-c"]),
        ({"shared_most": 2}, ["GPU-a", "GPU-b"]),
        ({"shared_most": 0}, []),
        ({"shared_nodes": "for=notebooks"}, ["GPU-c"]),
        ({"shared_nodes": "for"}, ["GPU-c"]),
        ({"shared_nodes": "for=research"}, []),
        ({"shared_nodes": "for, kubernetes.io/hostname=n2"}, ["GPU-c"]),
    ],
)
def test_an_administrator_says_which_nodes_and_how_many(options: dict[str, Any], uuids: list[str]) -> None:
    cluster = Cluster.read(
        [node("n1"), node("n2", labels={"for": "notebooks"})],
        device_classes=named("gpu.nvidia.com"),
        resource_slices=[
            resource_slice(listed("a"), listed("b"), name="n1"),
            resource_slice(listed("c"), name="n2"),
        ],
    )
    assert [each.device.uuid for each in Shared(cluster, DialectOptions(**options)).gpus()] == uuids


def test_options_that_cannot_be_read_are_refused_in_words() -> None:
    with pytest.raises(BadRequest, match=r"shared_nodes is 'a b'.*jupyter-gpu-pool/shared=true"):
        DialectOptions(shared_nodes="a b")
    with pytest.raises(BadRequest, match="shared_most is '4'"):
        DialectOptions(shared_most="4")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("cluster", "options", "words"),
    [
        (Cluster.read([node()]), {}, "does not serve resource.k8s.io/v1"),
        (dra(), {}, "No ResourceSlice of the driver gpu.nvidia.com"),
        (dra(listed("a")), {"shared_nodes": "x"}, "None of 1 devices is set aside"),
    ],
)
def test_what_the_cluster_lacks_is_said_to_whoever_asks(
    cluster: Cluster, options: dict[str, Any], words: str
) -> None:
    dialect = Shared(cluster, DialectOptions(**options))
    assert dialect.evidence() == ""
    with pytest.raises(NeverFits, match=words):
        dialect.translate(parse_request("2%"))
