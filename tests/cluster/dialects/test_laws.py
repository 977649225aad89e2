"""What holds of every dialect, whatever is asked for: nothing unsaid, nothing invalid, nothing by chance."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_pool.cluster.dialects import (
    Cluster,
    Dialect,
    DialectOptions,
    Pod,
    PodParts,
    Translation,
    choose,
    installed_dialects,
    usage,
)
from gpu_pool.cluster.dialects.objects import quantity
from gpu_pool_client import WHOLE, BadRequest, Filters, GpuPoolError, SliceRequest, parse_request
from support.clusters import everything
from support.examples import examples

_NAME = re.compile(r"[A-Za-z0-9]([A-Za-z0-9_.-]{0,61}[A-Za-z0-9])?")
_DOMAIN = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")

_FILTERS = st.builds(
    Filters,
    model=st.sampled_from([None, "V100", "H100", "a"]),
    memory_mib=st.sampled_from([None, 1024, 16384, 10**6]),
    driver=st.sampled_from([None, (550,), (550, 54), (999,)]),
    index=st.sampled_from([(), (0,), (0, 1)]),
)
REQUESTS = st.one_of(
    st.builds(SliceRequest, st.integers(1, 4), st.integers(1, WHOLE), st.none(), _FILTERS),
    st.builds(SliceRequest, st.integers(1, 4), st.none(), st.integers(1, 200_000), _FILTERS),
    st.builds(SliceRequest, st.integers(1, 4), st.sampled_from([20, 100, 140, 500, WHOLE])),
)


def dialect_of(name: str) -> Dialect:
    found = choose(*everything()[name]).dialect
    assert found is not None
    return found


def translated(dialect: Dialect, request: SliceRequest) -> Translation | None:
    """Return the translation, or None for a refusal, which must say what to do."""
    try:
        return dialect.translate(request)
    except GpuPoolError as error:
        refusal = error
    assert refusal.message
    assert refusal.remedy
    return None


few = settings(max_examples=examples(30))
every_cluster = pytest.mark.parametrize("name", list(everything()))


@every_cluster
@few
@given(request=REQUESTS)
def test_more_than_was_asked_for_is_always_said_and_bounded(name: str, request: SliceRequest) -> None:
    dialect = dialect_of(name)
    translation = translated(dialect, request)
    if translation is None:
        return
    statement = translation.statement
    words = " ".join(rounding.what for rounding in statement.rounded)
    assert statement.count == request.count
    if request.milli is not None and statement.milli is not None:
        assert statement.milli >= request.milli
        assert statement.milli == request.milli or "compute" in words or name == "bitfusion"
        assert statement.milli <= max(request.milli + 10, request.milli * 3 // 2)
    if request.memory_mib is not None and statement.memory_mib is not None:
        assert statement.memory_mib == request.memory_mib or "memory" in words
        assert statement.memory_mib <= max(request.memory_mib + 328, request.memory_mib * 3 // 2)


@every_cluster
@few
@given(request=REQUESTS)
def test_memory_of_a_share_is_not_more_than_the_share_of_a_gpu_or_said(
    name: str, request: SliceRequest
) -> None:
    dialect = dialect_of(name)
    translation = translated(dialect, request)
    if translation is None or request.milli is None or translation.statement.memory_mib is None:
        return
    largest = max(gpu.device.memory_mib for gpu in dialect.gpus())
    share = largest * request.milli // WHOLE
    assert translation.statement.memory_mib <= share or translation.statement.rounded


@every_cluster
@few
@given(request=REQUESTS, more=st.integers(1, WHOLE))
def test_a_limit_reaches_the_pod_or_is_refused_and_the_guarantee_is_as_without(
    name: str, request: SliceRequest, more: int
) -> None:
    dialect = dialect_of(name)
    if request.milli is not None and request.milli + more <= WHOLE:
        limited = replace(request, limit_milli=request.milli + more)
    else:
        limited = replace(request, milli=None, memory_mib=1024, limit_mib=1024 + more)
    found, alone = translated(dialect, limited), translated(dialect, limited.guarantee)
    if found is None:
        assert name != "kai-nvfractions" or alone is None
        return
    assert alone is not None
    assert (found.statement.milli, found.statement.memory_mib) == (
        alone.statement.milli,
        alone.statement.memory_mib,
    )
    assert found.pod != alone.pod or found.statement.milli == WHOLE
    assert [fault for fault in faults(found.pod) if fault] == []


@every_cluster
@pytest.mark.parametrize("text", ["2%..10%", "1GiB..4GiB", "50%..100%"])
def test_where_there_is_no_limit_it_is_said_what_can_be_had(name: str, text: str) -> None:
    dialect, request = dialect_of(name), parse_request(text)
    if name == "kai-nvfractions":
        assert any(key.endswith(".limit") for key in dialect.translate(request).pod.annotations)
        return
    with pytest.raises(BadRequest) as refused:
        dialect.translate(request)
    assert str(refused.value).startswith(f"You asked for {text}; ")
    assert refused.value.remedy == f"Ask for {request.guarantee}: the guarantee alone can be had here."


@every_cluster
@few
@given(request=REQUESTS)
def test_what_is_added_to_a_pod_is_valid(name: str, request: SliceRequest) -> None:
    translation = translated(dialect_of(name), request)
    if translation is not None:
        assert [fault for fault in faults(translation.pod) if fault] == []


@every_cluster
@few
@given(request=REQUESTS)
def test_the_same_question_has_the_same_answer(name: str, request: SliceRequest) -> None:
    first, second = (translated(dialect_of(name), request) for _ in range(2))
    assert first == second


def faults(parts: PodParts) -> Iterator[str]:
    """Yield what the API server would not take."""
    for key, value in parts.labels.items():
        yield "" if valid_key(key) and (not value or _NAME.fullmatch(value)) else f"label {key}={value}"
    for key, value in parts.annotations.items():
        yield "" if valid_key(key) and isinstance(value, str) else f"annotation {key}"
    for key, value in parts.limits.items():
        yield "" if valid_key(key) and "/" in key and quantity(value) > 0 else f"limit {key}={value}"
    for requirement in parts.node_affinity:
        yield (
            "" if valid_key(requirement["key"]) and all(requirement["values"]) else f"affinity {requirement}"
        )
    for template in parts.claim_templates:
        yield "" if _DOMAIN.fullmatch(template["metadata"]["name"]) else f"template {template['metadata']}"


def valid_key(key: str) -> bool:
    domain, slash, name = key.rpartition("/")
    return bool(_NAME.fullmatch(name)) and (not slash or bool(_DOMAIN.fullmatch(domain)))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_KEYS = st.sampled_from(
    [
        "nvidia.com/gpu.memory", "nvidia.com/gpu.replicas", "nvidia.com/gpu.product", "nvidia.com/gpu",
        "hami.io/node-nvidia-register", "volcano.sh/node-vgpu-register", "cloud.google.com/gke-accelerator",
        "nvidia.com/mig-1g.5gb", "koordinator.sh/gpu-core", "aliyun.com/gpu-mem", "bitfusion.io/gpu",
        "hami.io/vgpu-devices-allocated", "gpu-fraction", "gpu-memory", "volcano.sh/vgpu-ids-new",
        "scheduling.koordinator.sh/device-allocated", "ALIYUN_COM_GPU_MEM_IDX",
    ]
)  # fmt: skip
_WORDS = st.dictionaries(_KEYS, st.text(max_size=12) | st.integers(0, 10**9).map(str), max_size=6)


@given(labels=_WORDS, annotations=_WORDS, amounts=_WORDS, junk=_JSON, request=REQUESTS)
def test_nothing_that_nodes_and_pods_say_breaks_a_dialect(
    labels: dict[str, str],
    annotations: dict[str, str],
    amounts: dict[str, str],
    junk: Any,
    request: SliceRequest,
) -> None:
    metadata = {"name": "n", "labels": labels, "annotations": annotations}
    node = {"metadata": metadata, "spec": junk, "status": {"allocatable": amounts, "conditions": junk}}
    running = {"metadata": metadata, "spec": {"nodeName": "n", "containers": junk}, "status": junk}
    cluster = Cluster.read([node], resource_slices=[{"spec": junk}], resource_claims=[{"status": junk}])
    for kind in installed_dialects()[0]:
        dialect = kind(cluster, DialectOptions(queue="q"))
        dialect.evidence()
        usage(dialect, [Pod.read(running)])
        translated(dialect, request)
