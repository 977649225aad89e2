"""Courses on Kubernetes, and clusters that speak a dialect, without a cluster."""

from __future__ import annotations

from datetime import datetime, timezone
from typing import Any

from gpu_pool.cluster.dialects import Cluster, Dialect, DialectOptions, choose
from gpu_pool.courses import CourseFile, parse_course
from gpu_pool_client import parse_request
from gpu_pool_spawner.kube_profiles import Profile, profile_of
from support.clusters import hami, plain

NOW = datetime(2026, 10, 12, 10, tzinfo=timezone.utc)

TEXT = """\
title: ML
slices: [{{name: Small, request: 2%}}, {{name: Two, request: 2}}]
any_up_to: 10%
longest_lease: 2h
kubernetes: {{{}}}
"""


def course(**kubernetes: object) -> CourseFile:
    text = TEXT.format(", ".join(f"{key}: {value}" for key, value in kubernetes.items()))
    return parse_course("ml.yaml", text.encode())


SERVER = course(
    kernels="server", cpu=2, memory="4GiB", home="10GiB", image="example.org/ml:1", start_within="10min"
)
PODS = course()


def dialect(*nodes: Any, name: str = "auto") -> Dialect:
    found = choose(Cluster.read(nodes), DialectOptions(), name).dialect
    assert found is not None
    return found


HAMI = dialect(hami("n1", count=50), hami("n2", count=50))
WHOLE = dialect(plain("n1", gpus=2))


def profile(text: str, speaks: Dialect = HAMI, of: CourseFile = SERVER) -> Profile:
    return profile_of("ml", of, parse_request(text), speaks)
