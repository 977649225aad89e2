"""Says for as long as this process lives which leases it still wants.

A service on TCP cannot see that a process has ended, so it takes back what it
does not hear of. One thread does it for the whole process, whichever pool
object asked and whether or not that is open still: closing a pool ends no lease.
"""

from __future__ import annotations

import asyncio
import os
import threading
import time
from http import HTTPStatus
from typing import Final

from pydantic import ValidationError

from gpu_pool_client._remote import bodies
from gpu_pool_client._remote.endpoints import Endpoint

#: How often a lease is renewed within its time-to-live, and how soon after one that failed.
_TIMES: Final = 3.0
_AGAIN: Final = 1.0
_ANSWER_WITHIN: Final = 10.0
#: Leases that are named at once: the service reads no more than ``bodies.MOST_BODY``.
_AT_ONCE: Final = 1_000


class LeaseHeartbeat:
    """The leases of this process that have to be renewed. Used by any thread."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._kept: dict[Endpoint, set[str]] = {}
        self._every = _AGAIN
        self._runs = False

    def keep(self, endpoint: Endpoint, lease_id: str, ttl: float) -> None:
        """Renew a lease that ends without it after ``ttl`` seconds."""
        with self._changed:
            self._every = ttl / _TIMES
            self._kept.setdefault(endpoint, set()).add(lease_id)
            if not self._runs:
                self._runs = True
                threading.Thread(target=self._run, name="gpu-pool-heartbeat", daemon=True).start()
            self._changed.notify()

    def drop(self, endpoint: Endpoint, lease_ids: set[str]) -> None:
        """Renew these leases no more."""
        with self._changed:
            left = self._kept.get(endpoint, set()) - lease_ids
            if left:
                self._kept[endpoint] = left
            else:
                self._kept.pop(endpoint, None)

    def keeps(self, endpoint: Endpoint, lease_id: str) -> bool:
        """Whether a lease is renewed."""
        with self._changed:
            return lease_id in self._kept.get(endpoint, ())

    def _run(self) -> None:
        due = time.monotonic() + self._every
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._kept))
                # What is shorter than what was known before counts at once.
                while (left := min(due, time.monotonic() + self._every) - time.monotonic()) > 0:
                    self._changed.wait(left)
                    due = min(due, time.monotonic() + self._every)
                kept = [(endpoint, sorted(ids)) for endpoint, ids in self._kept.items()]
            answered = [
                self._beat(endpoint, ids[first : first + _AT_ONCE])
                for endpoint, ids in kept
                for first in range(0, len(ids), _AT_ONCE)
            ]
            due = time.monotonic() + (self._every if all(answered) else min(self._every, _AGAIN))

    def _beat(self, endpoint: Endpoint, lease_ids: list[str]) -> bool:
        body = bodies.HeartbeatBody(leases=lease_ids).model_dump_json().encode()
        try:
            answer = asyncio.run(endpoint.ask("POST", "heartbeat", body, _ANSWER_WITHIN))
            if answer.status == HTTPStatus.OK:
                self.drop(endpoint, set(bodies.HeartbeatAnswer.model_validate_json(answer.body).unknown))
        # Nobody answers, or not the service; or this program is about to end, when nothing can be begun.
        except (OSError, ValidationError, RuntimeError):
            return False
        return True


class _HeartbeatProcess:
    heartbeat = LeaseHeartbeat()

    @classmethod
    def forget(cls) -> None:
        """Begin without leases: those that there are belong to the parent, which renews them."""
        cls.heartbeat = LeaseHeartbeat()


os.register_at_fork(after_in_child=_HeartbeatProcess.forget)


def lease_heartbeat() -> LeaseHeartbeat:
    """Return the one of this process."""
    return _HeartbeatProcess.heartbeat
