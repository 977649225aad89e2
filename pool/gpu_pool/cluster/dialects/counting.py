"""What a request is counted as, where a cluster grants more than was asked for.

A dialect rounds: to whole percents, to units of memory, to replicas of a fixed
size. What is counted, and asked for in the pod, is then the larger slice, so that
room, quotas and GPU-hours are those of what is there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

from gpu_pool.cluster.dialects.amounts import cut
from gpu_pool.cluster.dialects.base import Dialect, SliceStatement
from gpu_pool_client import WHOLE, GpuPoolError, SliceRequest, Strength


def counted_as(request: SliceRequest, dialect: Dialect) -> SliceRequest:
    """Return the request that is granted exactly for this one: itself, mostly.

    A share stays a share and memory stays memory. A MIG instance is counted as a
    whole anyway. Raises what ``Dialect.translate`` raises.
    """
    statement = dialect.translate(request).statement
    is_mig = statement.enforcement.memory.strength is Strength.HARD and statement.milli != WHOLE
    if request.whole_devices or is_mig:
        return request
    total = _smallest(request, dialect)
    larger = _by_share if request.milli is not None else _by_memory
    for each in larger(request, statement, total):
        if each == request or _grants(each, dialect) <= max(
            _memory_of(each, total), statement.memory_mib or 0
        ):
            return each
    return request


def _smallest(request: SliceRequest, dialect: Dialect) -> int:
    """Return the MiB of the smallest GPU that could hold the request; 0 if they are unknown."""
    try:
        return cut(request, dialect.gpus(), dialect.options, dialect.table.title).smallest_mib
    except GpuPoolError:
        return 0


def _by_share(request: SliceRequest, statement: SliceStatement, total: int) -> Iterator[SliceRequest]:
    asked, memory = request.milli or 0, statement.memory_mib or 0
    share = max(asked, statement.milli or 0)
    if memory > _memory(share, total):
        yield replace(request, milli=min(WHOLE, max(share, _share(memory, total))))
    yield replace(request, milli=share)


def _by_memory(request: SliceRequest, statement: SliceStatement, total: int) -> Iterator[SliceRequest]:
    memory = max(request.memory_mib or 0, statement.memory_mib or 0)
    if (statement.milli or 0) > _share(memory, total):
        yield replace(request, memory_mib=max(memory, _memory(statement.milli or 0, total)))
    yield replace(request, memory_mib=memory)


def _grants(request: SliceRequest, dialect: Dialect) -> float:
    """Return the MiB that the cluster would grant: more than any if it refuses the request."""
    try:
        return dialect.translate(request).statement.memory_mib or 0
    except GpuPoolError:
        return math.inf


def _memory_of(request: SliceRequest, total: int) -> int:
    return request.memory_mib or 0 if request.milli is None else _memory(request.milli, total)


def _share(memory_mib: int, total: int) -> int:
    """Return the thousandths that the pool counts for memory."""
    return -(-memory_mib * WHOLE // total) if total else 0


def _memory(milli: int, total: int) -> int:
    """Return the MiB that the pool counts for a share."""
    return total * milli // WHOLE if total else 0
