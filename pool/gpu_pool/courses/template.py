"""A course file to begin with."""

from __future__ import annotations

from typing import Final

_TEMPLATE: Final = """\
# yaml-language-server: $schema=course.schema.json
# The course {name}. Lines that begin with # are not read.
# Check this file after every change:  gpu-pool courses check {name}.yaml

title: {name}

# Who is in the course. Without groups and users: everybody.
who:
  groups: [{name}]
  # users: [ada, grace]

# Who teaches it, by the names they log in with. They may always use it.
# instructors: [turing]

# What students may pick: a share of a GPU (2%), an amount of its memory (2GiB), or whole GPUs (1).
slices:
  - name: Small
    request: 5%
    default: true
  - name: Large
    request: 20%

# How much each student may have at once, and how much all of them together.
per_user:
  slices: 1
# quota:
#   share: 100%
#   gpu_hours_per_week: 100

# A slice is given back after this time at the latest.
longest_lease: 4h

# When nothing has run for this long, the slice is lent to others, where that is possible.
# Where it is not: keep the slice, or end the kernel after a warning.
idle_limit: 30min
when_idle: keep

# When the course runs. Without these lines: always.
# weeks:
#   from: 2026-10-12
#   to: 2026-12-18
# hours:
#   - Mon 10:00-12:00
#   - Wed,Thu 14:00-16:00
# time_zone: Europe/Berlin
"""


def template(name: str) -> str:
    """Return the text of a commented course file for a course of that name."""
    return _TEMPLATE.format(name=name)
