"""NVIDIA DRA: claims for whole GPUs, parts of shared ones, and MIG instances."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_pool.cluster.dialects import PodParts, usage
from gpu_pool.cluster.dialects.dra import Dra
from gpu_pool_client import BadRequest, Filters, NeverFits, SliceRequest, Strength, parse_request
from support.clusters import dra, listed, pod

MEMORY = {"default": "32768Mi"}


def asked(parts: PodParts) -> dict[str, Any]:
    """Return the single device request of a pod's single claim."""
    (template,) = parts.claim_templates
    (claim,) = parts.claims
    assert claim["resourceClaimTemplateName"] == template["metadata"]["name"]
    (request,) = template["spec"]["spec"]["devices"]["requests"]
    found: dict[str, Any] = request["exactly"]
    return found


def test_whole_gpus() -> None:
    translation = Dra(dra(listed("gpu-0"), listed("gpu-1"))).translate(parse_request("2"))
    assert asked(translation.pod) == {
        "deviceClassName": "gpu.nvidia.com",
        "allocationMode": "ExactCount",
        "count": 2,
    }
    assert translation.pod.limits == {}
    assert translation.statement.enforcement.memory.strength is Strength.HARD


@pytest.mark.parametrize(
    ("shared", "text", "capacity"),
    [
        (MEMORY, "2%", {"memory": "655Mi"}),
        (MEMORY, "1", None),
        ({"default": "0"}, "2%", {"memory": "655Mi"}),
        ({"default": "0", "shares": 50}, "2%", {"memory": "655Mi", "shares": "1"}),
        ({"default": "0", "shares": 4}, "30%", {"memory": "9830Mi", "shares": "2"}),
        ({"default": "0", "shares": 4}, "1", {"shares": "4"}),
    ],
)
def test_each_way_of_sharing_is_asked_in_its_units(
    shared: dict[str, Any], text: str, capacity: dict[str, str] | None
) -> None:
    found = asked(Dra(dra(listed("gpu-0", **shared))).translate(parse_request(text)).pod)
    assert found.get("capacity", {}).get("requests") == capacity


def test_parts_are_only_counted() -> None:
    statement = Dra(dra(listed("gpu-0", **MEMORY))).translate(parse_request("2%")).statement
    assert statement.nominal == ("memory", "compute")
    assert "Nothing stops a neighbour" in str(statement)


def test_shares_are_rounded_up_and_said() -> None:
    statement = Dra(dra(listed("gpu-0", default="0", shares=4))).translate(parse_request("30%")).statement
    assert "asked for 30%, granted 50% (a GPU has 4 shares)" in str(statement)


def test_no_gpu_can_be_had_alone_where_they_are_shared_without_limit() -> None:
    with pytest.raises(NeverFits, match="shared without limit"):
        Dra(dra(listed("gpu-0", default="0"))).translate(parse_request("1"))


def test_parts_of_two_gpus_are_kept_apart() -> None:
    parts = (
        Dra(dra(listed("gpu-0", **MEMORY), listed("gpu-1", **MEMORY))).translate(parse_request("2x50%")).pod
    )
    (template,) = parts.claim_templates
    assert template["spec"]["spec"]["devices"]["constraints"] == [
        {"requests": ["gpu"], "distinctAttribute": "gpu.nvidia.com/uuid"}
    ]


def test_filters_become_an_expression() -> None:
    cluster = dra(listed("gpu-0"), listed("gpu-1", model="Tesla T4", memory=15360))
    parts = Dra(cluster).translate(parse_request("1 model=Tesla-V100 memory>=16GiB driver>=550")).pod
    assert asked(parts)["selectors"] == [
        {
            "cel": {
                "expression": "device.attributes['gpu.nvidia.com'].productName.lowerAscii().replace(' ', '-')"
                ".contains('tesla-v100') && "
                "device.capacity['gpu.nvidia.com'].memory.compareTo(quantity('32768Mi')) >= 0 && "
                "device.attributes['gpu.nvidia.com'].driverVersion.compareTo(semver('550.0.0')) >= 0"
            }
        }
    ]


def test_smaller_gpus_are_kept_out_where_the_share_would_be_more_on_them() -> None:
    cluster = dra(listed("gpu-0", **MEMORY), listed("gpu-1", 15360, default="15360Mi"))
    parts = Dra(cluster).translate(parse_request("2%")).pod
    assert asked(parts)["capacity"] == {"requests": {"memory": "655Mi"}}
    assert "quantity('32768Mi')" in asked(parts)["selectors"][0]["cel"]["expression"]


def test_a_mig_instance_is_a_part() -> None:
    cluster = dra(listed("gpu-0-mig-0", 4864, kind="mig", profile="1g.5gb", model="A100"))
    translation = Dra(cluster).translate(parse_request("14%"))
    assert asked(translation.pod)["deviceClassName"] == "mig.nvidia.com"
    assert asked(translation.pod)["selectors"] == [
        {"cel": {"expression": "device.attributes['gpu.nvidia.com'].profile == '1g.5gb'"}}
    ]
    assert translation.statement.enforcement.memory.strength is Strength.HARD


def test_a_profile_that_could_end_the_expression_is_not_listed() -> None:
    assert Dra(dra(listed("m", 4864, kind="mig", profile="1g' || true || '"))).gpus() == ()


def test_a_model_that_could_end_the_expression_is_refused() -> None:
    devices = listed("gpu-0", model="x') || true || ('")
    with pytest.raises(BadRequest, match="is not a part of a GPU's name"):
        Dra(dra(devices)).translate(SliceRequest(milli=1000, filters=Filters(model="x')-||-true-||-('")))


def test_devices_for_virtual_machines_are_not_ours() -> None:
    assert Dra(dra(listed("v", kind="vfio"))).evidence() == ""


def test_the_same_slice_has_the_same_template_and_another_has_another() -> None:
    dialect = Dra(dra(listed("gpu-0", **MEMORY)))
    names = [
        dialect.translate(parse_request(text)).pod.claim_templates[0]["metadata"]["name"]
        for text in ("2%", "0.02", "3%")
    ]
    assert names[0] == names[1] != names[2]


def claim(device: str, consumed: dict[str, str], user: str = "p") -> dict[str, Any]:
    result = {"driver": "gpu.nvidia.com", "pool": "n1", "device": device, "consumedCapacity": consumed}
    return {
        "metadata": {"namespace": "default", "name": f"claim-{user}"},
        "status": {
            "reservedFor": [{"resource": "pods", "name": user, "uid": "1"}],
            "allocation": {"devices": {"results": [result]}},
        },
    }


@pytest.mark.parametrize(
    ("shared", "consumed", "held"),
    [
        (MEMORY, {"memory": "8Gi"}, (250, 8192)),
        ({"default": "0", "shares": 4}, {"memory": "0", "shares": "1"}, (250, 0)),
        ({}, {}, (1000, 32768)),
    ],
)
def test_what_claims_hold_is_read_per_gpu(
    shared: dict[str, Any], consumed: dict[str, str], held: tuple[int, int]
) -> None:
    cluster = dra(
        listed("gpu-0", **shared),
        listed("gpu-1", **shared),
        resource_claims=[claim("gpu-1", consumed), claim("gpu-0", {"memory": "1Gi"}, user="somebody")],
    )
    (use,) = usage(Dra(cluster), [pod()])
    assert use.exact
    assert [(each.held_milli, each.held_memory_mib) for each in use.gpus] == [(0, 0), held]
