"""NVIDIA's devices as ResourceSlices list them: nothing twice, nothing closed, nothing of a moment."""

from __future__ import annotations

from typing import Any

import pytest

from gpu_pool.cluster.dialects import Cluster, DialectOptions, counted_as, usage
from gpu_pool.cluster.dialects.choosing import choose_with_memory
from gpu_pool.cluster.dialects.dra import Dra
from gpu_pool.policy import placement
from gpu_pool.policy.queue_state import Rules
from gpu_pool_client import WHOLE, NeverFits, SliceRequest, parse_request
from support.clusters import counters, dividable, dra, listed, named, node, pod, resource_slice

MEMORY = {"default": "32768Mi"}


def exactly(cluster: Cluster, text: str) -> dict[str, Any]:
    """Return what the claim of a slice asks for."""
    (template,) = Dra(cluster).translate(parse_request(text)).pod.claim_templates
    found: dict[str, Any] = template["spec"]["spec"]["devices"]["requests"][0]["exactly"]
    return found


def expression(cluster: Cluster, text: str) -> str:
    return "".join(each["cel"]["expression"] for each in exactly(cluster, text).get("selectors", ()))


def granted(cluster: Cluster, *texts: str) -> list[str]:
    """Return which of these slices the pool grants, one after the other, on an empty cluster."""
    dialect = Dra(cluster)
    (use,) = usage(dialect, ())
    statuses, found = list(use.gpus), []
    for text in texts:
        request = counted_as(parse_request(text), dialect)
        parts = placement.place(request, statuses, Rules())
        if parts is not None:
            statuses = placement.deduct(statuses, parts)
            found.append(text)
    return found


def claim(*devices: str, user: str = "p", name: str = "", **result: Any) -> dict[str, Any]:
    results = [{"driver": "gpu.nvidia.com", "pool": "n1", "device": each, **result} for each in devices]
    return {
        "metadata": {"namespace": "default", "name": name or f"claim-{user}"},
        "status": {
            "reservedFor": [{"resource": "pods", "name": each, "uid": "1"} for each in user.split()],
            "allocation": {"devices": {"results": results}},
        },
    }


# -- Cards that can be divided ---------------------------------------------


@pytest.mark.parametrize("whole", [True, False])
def test_a_card_that_is_listed_at_every_place_is_one_device_with_its_own_memory(whole: bool) -> None:
    found = Dra(dra(slices=[resource_slice(*dividable(whole=whole), sharedCounters=[counters()])])).gpus()
    assert [(each.device.uuid, each.device.memory_mib, each.device.milli) for each in found] == [
        ("GPU-gpu-0", 40960, WHOLE)
    ]


def test_where_no_counters_are_listed_a_card_has_what_its_parts_have_together() -> None:
    (gpu,) = Dra(dra(*dividable(whole=False))).gpus()
    assert gpu.device.memory_mib == 7 * 4864


@pytest.mark.parametrize(
    ("asked", "fit"),
    [
        (["14%"] * 9, 7),
        (["28%"] * 5, 3),
        (["40%"] * 3, 2),  # three sevenths of the compute each, and half of the memory
        (["40%", "40%", "14%"], 2),
        (["40%", "14%", "14%", "14%", "14%", "14%"], 4),  # there would be a fifth: a card is one number here
        (["50%", "50%"], 1),
        (["19GiB"] * 3, 2),
        (["1", "14%"], 1),
        (["14%", "1"], 1),
    ],
)
def test_no_part_of_a_card_is_granted_twice(asked: list[str], fit: int) -> None:
    assert len(granted(dra(*dividable()), *asked)) == fit


@pytest.mark.parametrize("text", ["1%", "10%", "14%", "28%", "40%", "50%", "4GiB", "8GiB", "19GiB", "20GiB"])
def test_a_part_of_a_card_is_asked_for_in_the_same_way_by_what_it_is_counted_as(text: str) -> None:
    cluster = dra(*dividable())
    try:
        counted = counted_as(parse_request(text), Dra(cluster))
    except NeverFits:
        return
    first, second = (Dra(cluster).translate(each) for each in (parse_request(text), counted))
    assert first.pod == second.pod
    assert counted_as(counted, Dra(cluster)) == counted


def test_a_part_of_a_card_is_a_mig_instance_and_says_how_much_memory_that_has() -> None:
    cluster = dra(*dividable())
    assert exactly(cluster, "14%")["deviceClassName"] == "mig.nvidia.com"
    assert expression(cluster, "14%").endswith(".profile == '1g.5gb'")
    statement = Dra(cluster).translate(parse_request("14%")).statement
    assert statement.memory_mib == 4864
    assert "hard (a MIG instance 1g.5gb with 4.75GiB)" in str(statement)
    assert exactly(cluster, "1")["deviceClassName"] == "gpu.nvidia.com"


def test_a_card_in_mig_mode_cannot_be_had_whole() -> None:
    with pytest.raises(NeverFits, match="no node of this cluster offers GPUs"):
        Dra(dra(*dividable(whole=False))).translate(parse_request("1"))


def test_what_others_have_of_a_card_is_counted_on_it() -> None:
    claims = [claim("gpu-0-1g5gb-3", user="a"), claim("gpu-0-3g20gb-4", user="b"), claim("gpu-1", user="c")]
    cluster = dra(*dividable("gpu-0"), *dividable("gpu-1"), resource_claims=claims)
    (use,) = usage(Dra(cluster), [pod("a"), pod("b"), pod("c")])
    assert [(each.held_milli, each.held_memory_mib) for each in use.gpus] == [
        (142 + 488, 4864 + 19968),
        (1000, 40960),
    ]


def test_a_card_that_claims_share_is_closed_while_a_mig_instance_of_it_is_in_use() -> None:
    devices = dividable(default="40960Mi")
    assert exactly(dra(*devices), "10%")["capacity"]["requests"]["memory"]
    (gpu,) = Dra(dra(*devices)).gpus()
    assert not gpu.drained
    (gpu,) = Dra(dra(*devices, resource_claims=[claim("gpu-0-1g5gb-0")])).gpus()
    assert gpu.drained


def test_a_gpu_that_is_listed_beside_its_mig_instances_is_not_asked_for() -> None:
    mig = [
        listed(f"gpu-0-mig-{n}", 4864, kind="mig", profile="1g.5gb", parent="GPU-gpu-0", model="A100")
        for n in (0, 1)
    ]
    cluster = dra(listed("gpu-0", 40960, model="A100"), *mig, listed("gpu-1", 40960, model="A100"))
    found = [(each.device.uuid, each.device.memory_mib) for each in Dra(cluster).gpus()]
    assert found == [("GPU-gpu-0-mig-0", 4864), ("GPU-gpu-0-mig-1", 4864), ("GPU-gpu-1", 40960)]
    assert "uuid in ['GPU-gpu-0'])" in expression(cluster, "1")
    with pytest.raises(NeverFits):
        Dra(cluster).translate(parse_request("2"))


@pytest.mark.parametrize(
    ("sharing", "strength"), [({"default": "0"}, "none"), ({"default": "4864Mi"}, "hard")]
)
def test_a_mig_instance_that_claims_share_is_not_called_hard(sharing: dict[str, Any], strength: str) -> None:
    mig = listed("gpu-0-mig-0", 4864, kind="mig", profile="1g.5gb", model="A100", **sharing)
    statement = Dra(dra(mig)).translate(parse_request("14%")).statement
    assert statement.enforcement.memory.strength.value == strength


# -- Pools -----------------------------------------------------------------


def test_of_a_pool_the_highest_generation_counts() -> None:
    slices = [
        resource_slice(listed("gpu-0", **MEMORY), listed("gpu-1", **MEMORY), generation=9),
        resource_slice(listed("gpu-0", **MEMORY), generation=10),
    ]
    for order in (slices, slices[::-1]):
        assert [each.device.uuid for each in Dra(dra(slices=order)).gpus()] == ["GPU-gpu-0"]


def test_a_gpu_that_is_listed_twice_is_one() -> None:
    twice = [listed("gpu-0"), listed("gpu-0"), {**listed("gpu-1"), "name": "gpu-9"}, listed("gpu-1")]
    assert [each.device.uuid for each in Dra(dra(*twice)).gpus()] == ["GPU-gpu-0", "GPU-gpu-1"]


def test_nothing_is_granted_of_a_pool_of_which_slices_are_missing() -> None:
    (gpu,) = Dra(dra(slices=[resource_slice(listed("gpu-0", **MEMORY), of=2)])).gpus()
    assert gpu.drained
    assert gpu.notes == ("its ResourceSlices are not all there",)
    both = [resource_slice(listed("gpu-0", **MEMORY), of=2), resource_slice(number=2, of=2)]
    (gpu,) = Dra(dra(slices=both)).gpus()
    assert not gpu.drained


def test_while_a_pool_is_published_anew_what_was_known_of_it_holds() -> None:
    def seen(*slices: dict[str, Any]) -> Cluster:
        return Cluster.read([node()], device_classes=named("gpu.nvidia.com"), resource_slices=slices)

    before = seen(resource_slice(listed("gpu-0"), listed("gpu-1")))
    during = seen(resource_slice(listed("gpu-0"), generation=2, of=2))
    options = DialectOptions()
    known = choose_with_memory({}, before, options, "auto", 0.0, 180.0).known
    choice, _, known = choose_with_memory(known, during, options, "auto", 1.0, 180.0)
    assert choice.dialect is not None
    assert [each.device.uuid for each in choice.dialect.gpus()] == ["GPU-gpu-0", "GPU-gpu-1"]
    assert known["n1"].away_since == 1.0
    after = seen(*(resource_slice(listed(f"gpu-{n}"), generation=2, number=n, of=2) for n in (0, 1)))
    choice, _, known = choose_with_memory(known, after, options, "auto", 2.0, 180.0)
    assert known["n1"].away_since is None


# -- Taints ----------------------------------------------------------------


@pytest.mark.parametrize(
    ("effect", "closed", "said"),
    [
        ("None", False, "for information only"),
        ("SomethingNew", False, "for information only"),
        ("NoSchedule", True, "NoSchedule"),
        ("NoExecute", True, "NoExecute"),
    ],
)
@pytest.mark.parametrize("by_rule", [False, True])
def test_a_taint_closes_a_device_as_kubernetes_does(
    effect: str, closed: bool, said: str, by_rule: bool
) -> None:
    taint = {"key": "gpu.nvidia.com/xid", "value": "43", "effect": effect}
    rule = {
        "spec": {
            "deviceSelector": {"driver": "gpu.nvidia.com", "pool": "n1", "device": "gpu-0"},
            "taint": taint,
        }
    }
    tainted = {} if by_rule else {"taints": [taint]}
    rules = [rule] if by_rule else []
    cluster = dra(listed("gpu-0", **tainted), listed("gpu-1"), device_taint_rules=rules)
    first, second = Dra(cluster).gpus()
    assert (first.drained, second.drained) == (closed, False)
    assert (first.notes, second.notes) == ((f"taint gpu.nvidia.com/xid=43 ({said})",), ())


@pytest.mark.parametrize(
    ("selector", "closed"),
    [
        ({}, True),
        (None, False),
        ({"pool": "n2"}, False),
        ({"driver": "other.example.com"}, False),
        ({"deviceClassName": "gpu.nvidia.com"}, True),
        ({"deviceClassName": "mig.nvidia.com"}, False),
        ({"selectors": [{"cel": {"expression": "false"}}]}, False),
    ],
)
def test_a_rule_taints_what_it_selects(selector: Any, closed: bool) -> None:
    rule = {"spec": {"deviceSelector": selector, "taint": {"key": "k", "effect": "NoSchedule"}}}
    (gpu,) = Dra(dra(listed("gpu-0"), device_taint_rules=[rule])).gpus()
    assert gpu.drained is closed


# -- Claims ----------------------------------------------------------------


def test_monitoring_takes_nothing() -> None:
    by_result = claim("gpu-0", "gpu-1", adminAccess=True)
    by_request = claim("gpu-0", user="q", request="all")
    by_request["spec"] = {"devices": {"requests": [{"name": "all", "exactly": {"adminAccess": True}}]}}
    cluster = dra(listed("gpu-0"), listed("gpu-1"), resource_claims=[by_result, by_request])
    (use,) = usage(Dra(cluster), [pod("p"), pod("q")])
    assert [each.held_milli for each in use.gpus] == [0, 0]


def test_what_pods_have_together_is_counted_once() -> None:
    cluster = dra(listed("gpu-0"), listed("gpu-1"), resource_claims=[claim("gpu-0", user="p q", name="both")])
    (use,) = usage(Dra(cluster), [pod("p"), pod("q")])
    assert use.milli == (1000, 2000)
    assert [each.held_milli for each in use.gpus] == [1000, 0]


def test_a_request_for_whole_gpus_is_counted_as_itself() -> None:
    assert counted_as(parse_request("1"), Dra(dra(*dividable()))) == SliceRequest(milli=WHOLE)
