"""What is decided for whom: counted, logged, and told to those who wait for news."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from gpu_pool.service.callers import Caller
from gpu_pool.service.lease_changes import LeaseChanges
from gpu_pool.service.rate_limits import DecisionRate


class DecisionLog:
    """Goes with everything that changes the pool. Administrators may decide as often as they like."""

    def __init__(self, changes: LeaseChanges, log: logging.Logger, pace: DecisionRate | None) -> None:
        self._changes = changes
        self._log = log
        self._pace = pace

    @contextmanager
    def making(self, caller: Caller, what: str) -> Iterator[list[str]]:
        """Log what is decided, or why not, and let those look who wait for news.

        What is put into the list that this yields is logged as the outcome. Raises ``OverQuota``.
        """
        if self._pace is not None and not caller.is_admin:
            self._pace.count(caller.user)
        told: list[str] = []
        try:
            yield told
        except Exception as error:
            told.append(type(error).__name__)
            raise
        finally:
            words = what if what.isprintable() else ascii(what)
            self._log.info("%s: %s: %s", _who(caller), words, *told or ("done",))
            self._changes.decided(caller.user)


def _who(caller: Caller) -> str:
    user = caller.user if caller.user.isprintable() else ascii(caller.user)
    return f"{user}[{caller.process.pid}]" if caller.peer else f"{user}[hub:{caller.server or ''}]"
