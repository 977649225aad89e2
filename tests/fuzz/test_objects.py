"""Kubernetes objects that say nonsense of themselves: every dialect reads on, and refuses in words."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuzz.corpus import kept
from gpu_pool.cluster.dialects import (
    Cluster,
    Dialect,
    DialectOptions,
    Pod,
    choose,
    installed_dialects,
    usage,
)
from gpu_pool_client import GpuPoolError, SliceRequest, parse_request
from support.clusters import everything
from support.examples import examples

_REQUESTS = [
    parse_request(text) for text in ("2%", "50%", "1", "2", "8GiB", "2x30% model=v100 memory>=4GiB", "7%")
]
_NONSENSE = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=10),
        st.sampled_from([
            "", "-1", "1e99", "NaN", "Infinity", "99999999999999999999", "1Gi", "1,2,3", ":", "{}", "[]",
            "[{}]", "{",
            '{"a":', "[[[[", '[{"id":1,"devmem":"x","count":-1}]', '{"GPU-1":null}', "a,b,c:d;e", ";:,",
            '"' * 50, "0.5", "0x10", "\u0664", "\0", "true", "null", "GPU-0,1,1,1,1,true,0,hami-core:" * 3,
        ]),
        st.just("[" * 50_000),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.dictionaries(
            st.sampled_from(["id", "devmem", "count", "type", "name", "memory", "x"]), inner, max_size=4
        ),
    ),
    max_leaves=6,
)  # fmt: skip


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Return the paths of everything within an object."""
    found = [path] if path else []
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += _places(inner, (*path, key))
    return found


def _put(value: Any, path: tuple[Any, ...], nonsense: object) -> Any:
    changed = copy.deepcopy(value)
    inner = changed
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = nonsense
    return changed


def _whole(cluster: Cluster) -> dict[str, Any]:
    """Return what a cluster was read from, as far as it is kept."""
    nodes = [
        {
            "metadata": {
                "name": node.name,
                "labels": dict(node.labels),
                "annotations": dict(node.annotations),
            },
            "spec": {"taints": [dict(taint) for taint in node.taints]},
            "status": {
                "allocatable": dict(node.allocatable),
                "conditions": [{"type": each, "status": "True"} for each in sorted(node.conditions)],
            },
        }
        for node in cluster.nodes
    ]
    named = {
        name: [{"metadata": {"name": each}} for each in sorted(getattr(cluster, name))]
        for name in ("crds", "runtime_classes", "device_classes")
    }
    claims = {name: [json.loads(json.dumps(each)) for each in getattr(cluster, name)] for name in _LISTS}
    return {"nodes": nodes, **named, **claims}


_LISTS = ("resource_slices", "resource_claims")
CLUSTERS = {name: (_whole(cluster), options) for name, (cluster, options) in everything().items()}


@st.composite
def spoilt(draw: st.DrawFn) -> tuple[str, dict[str, Any]]:
    """Return a cluster that speaks a dialect, some of what it says replaced by nonsense."""
    name = draw(st.sampled_from(sorted(CLUSTERS)))
    objects, _ = CLUSTERS[name]
    for _ in range(draw(st.integers(1, 3))):
        places = [path for path in _places(objects) if len(path) > 2]
        objects = _put(objects, draw(st.sampled_from(places)), draw(_NONSENSE))
    return name, objects


def _use(dialect: Dialect) -> None:
    """Ask a dialect all it can be asked; its refusals are to be read by people."""
    dialect.gpus()
    for request in _REQUESTS:
        refusal = _translate(dialect, request)
        assert refusal is None or refusal.message


def _translate(dialect: Dialect, request: SliceRequest) -> GpuPoolError | None:
    try:
        dialect.translate(request)
    except GpuPoolError as error:
        return error
    return None


@kept("objects", lambda content: tuple(json.loads(content)))
@given(spoilt())
def test_no_cluster_makes_a_dialect_stumble(cluster: tuple[str, dict[str, Any]]) -> None:
    name, objects = cluster
    found = Cluster.read(**objects)
    options = CLUSTERS[name][1] if name in CLUSTERS else DialectOptions()
    chosen = choose(found, options)
    assert str(chosen)
    for kind in installed_dialects()[0]:
        _use(kind(found, options))


_PODS = st.fixed_dictionaries(
    {},
    optional={
        "metadata": st.one_of(
            _NONSENSE,
            st.fixed_dictionaries({}, optional={
                "name": _NONSENSE, "namespace": _NONSENSE, "labels": _NONSENSE,
                "annotations": st.one_of(
                    _NONSENSE,
                    st.dictionaries(
                        st.sampled_from([
                            "hami.io/vgpu-devices-allocated", "volcano.sh/gpu-index",
                            "volcano.sh/vgpu-ids-new",
                            "scheduling.koordinator.sh/device-allocated", "gpu-fraction", "gpu-memory",
                            "ALIYUN_COM_GPU_MEM_IDX", "ALIYUN_COM_GPU_MEM_POD", "received-resource-type",
                            "gpu-fraction-num-devices", "runai-gpu-group", "hami.io/bind-phase",
                        ]),
                        _NONSENSE,
                        max_size=4,
                    ),
                ),
            }),
        ),
        "spec": st.one_of(
            _NONSENSE,
            st.fixed_dictionaries({}, optional={
                "nodeName": st.one_of(st.just("n1"), _NONSENSE),
                "containers": st.lists(
                    st.one_of(_NONSENSE, st.just({"resources": {"limits": {"nvidia.com/gpu": "NaN"}}})),
                    max_size=3,
                ),
                "resourceClaims": _NONSENSE,
            }),
        ),
        "status": _NONSENSE,
    },
)  # fmt: skip


@pytest.mark.parametrize("name", sorted(CLUSTERS))
@settings(max_examples=examples(15))
@given(pods=st.lists(_PODS, max_size=3))
def test_no_pod_makes_the_count_of_what_is_held_stumble(name: str, pods: list[dict[str, Any]]) -> None:
    cluster, options = everything()[name]
    dialect = choose(cluster, options).dialect
    assert dialect is not None
    for use in usage(dialect, map(Pod.read, pods)):
        assert use is not None
