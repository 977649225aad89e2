"""What the running transaction decides, told to the audit log once it is in the store."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from gpu_pool.audit import Actor, AuditLog, asks
from gpu_pool.store.records import Row
from gpu_pool_client import Slice


class _Decided(NamedTuple):
    event: str
    #: Unix seconds.
    at: float
    #: In whose name it was done, and whether they asked for it, or it followed.
    actor: Actor | None
    asked: bool
    fields: Mapping[str, object]


class AuditBuffer:
    """Decisions about leases, in their order. Used by the store's thread alone."""

    def __init__(self) -> None:
        #: None where nothing is written down.
        self.log: AuditLog | None = None
        self._decided: list[_Decided] = []

    def __len__(self) -> int:
        """Return how many decisions there are that were not told yet."""
        return len(self._decided)

    def decided(
        self,
        event: str,
        row: Row,
        parts: Sequence[Slice] = (),
        more: Mapping[str, object] = MappingProxyType({}),
        *,
        asked: bool = True,
    ) -> None:
        """Take note of a decision about the lease of this row; ``asked`` if somebody asked for it."""
        if self.log is None:
            return
        slices = [
            {"device": part.device.uuid, "milli": part.milli, "memory_mib": part.memory_mib} for part in parts
        ]
        fields = {
            "lease": row["id"],
            "user": row["user"],
            "course": row["course"] or None,
            "request": row["request"],
            "slices": slices or None,
            **more,
        }
        self.noted(event, fields, asked=asked)

    def noted(self, event: str, fields: Mapping[str, object], *, asked: bool = True) -> None:
        """Take note of a decision about something else."""
        if self.log is not None:
            self._decided.append(_Decided(event, time.time(), asks(), asked, fields))

    def courses_changed(
        self, before: Mapping[str, object], now: Mapping[str, object], *, asked: bool
    ) -> None:
        """Write down which course files are new, have changed or have gone."""
        if self.log is not None:
            for name in sorted(before.keys() | now.keys()):
                if before.get(name) != now.get(name):
                    what = "added" if name not in before else "changed" if name in now else "removed"
                    self.log.write("course", {"course": name, "change": what}, asks(), asked=asked)

    def forget(self, after: int = 0) -> None:
        """Forget what was not kept in the store: all ``after`` the first so many."""
        del self._decided[after:]

    def tell(self) -> None:
        """Write down what was decided: it is in the store now."""
        for each in self._decided:
            assert self.log is not None
            self.log.write(each.event, each.fields, each.actor, asked=each.asked, at=each.at)
        self._decided.clear()
