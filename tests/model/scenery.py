"""What the pools that are tried are made of: devices, wishes, courses and their files."""

from __future__ import annotations

from dataclasses import replace

from support.pools import device

_TWINS = [device(index, numa_node=0, nvlink=(f"SIM-V100-SXM2-32GB-{1 - index}",)) for index in (0, 1)]
#: Two that are linked, one whose contexts are counted and whose slices are of one size, and a MIG
#: instance. To the pool they are real: simulated ones are never lost.
DEVICES = [
    replace(each, simulated=False)
    for each in (
        *_TWINS,
        device(2, "T4", 16384, contexts=7, one_size=True),
        device(3, "A100", 4864, milli=142, mig_profile="1g.5gb"),
    )
]
REQUESTS = [
    "2%", "10%", "30%", "50%", "75%", "1", "2", "2x50%", "8GiB", "20GiB", "8GiB index=2", "25% model=t4",
    "2%..10%", "30%..75%", "10%..30%", "8GiB..20GiB",
    "50% model=t4", "10% model=a100", "1 index=0", "2x30% index=0,1", "0.5%", "5", "33GiB", "2% driver>=900",
]  # fmt: skip
#: Those that fit some pool or other.
SENSIBLE = REQUESTS[:16]
LARGE = ["50%", "75%", "1", "2", "2x50%", "20GiB"]
COURSES = [None, "cs101", "thesis", "grading", "lab", "nonsense"]
_LAB = """
title: Laboratory
slices: [{{name: Small, request: 2%}}, {{name: Half, request: 50%}}, {{name: Whole, request: 1}}]
any_up_to: 30%
weight: {weight}
priority: {priority}
per_user: {{slices: {slices}}}
"""
#: What is in the file of the course ``lab``, at one time or another.
FILES = [
    None,
    _LAB.format(weight=1, priority=0, slices=3),
    _LAB.format(weight=5, priority=0, slices=1),
    _LAB.format(weight=0, priority=2, slices=8) + "longest_lease: 5min\n",
    "title: Laboratory\nslices: [",
]
#: One that cannot be read.
BAD_FILE = FILES[-1]
