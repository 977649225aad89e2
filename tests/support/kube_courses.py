"""Courses of a Hub on Kubernetes, and who is in them."""

from __future__ import annotations

COURSES = {
    "intro": """\
title: Introduction
who: {groups: [intro]}
slices:
  - {name: Small, request: 2%}
  - {name: Large, request: 90%}
longest_lease: 2h
kubernetes: {kernels: server, cpu: 1, memory: 1GiB, start_within: 90s}
""",
    "fetched": """\
title: Large software
who: {groups: [intro]}
slices: [{name: Small, request: 2%}]
kubernetes: {kernels: server, image: "example.org/large:1", start_within: 20s}
""",
    "huge": """\
title: Too many cores
who: {groups: [intro]}
slices: [{name: Small, request: 2%}]
kubernetes: {kernels: server, cpu: 500}
""",
    "pods": """\
title: Kernels in pods
who: {groups: [intro]}
slices: [{name: Small, request: 2%}]
preload: [numpy]
preload_with_server: true
""",
    "brief": """\
title: Nothing kept
who: {groups: [intro]}
slices: [{name: Small, request: 2%}]
kubernetes: {home: none}
""",
    "later": """\
title: Next century
who: {groups: [intro]}
slices: [{name: Small, request: 2%}]
weeks: {from: 2101-01-03, to: 2101-02-01}
hours: Mon 10:00-12:00
time_zone: UTC
kubernetes: {kernels: server}
""",
    "research": """\
title: Research
who: {groups: [research]}
slices:
  - {name: One GPU, request: 1}
  - {name: Two GPUs, request: 2}
  - {name: Three GPUs, request: 3}
longest_lease: 3h
kubernetes: {kernels: server, cpu: 2, memory: 4GiB, prefer: nvlink}
""",
}
GROUPS = {
    "intro": ["ada", "grace", "alan", "karen"],
    "homed": ["karen"],
    "research": ["edsger", "barbara", "hedy"],
    "claims": ["hedy"],
}
