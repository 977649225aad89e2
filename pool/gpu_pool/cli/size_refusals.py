"""Which sizes the pool would refuse, whoever asked and whatever were free."""

from __future__ import annotations

import os
from collections.abc import Iterable
from urllib.parse import urlsplit

from gpu_pool.cli.session import CommandSession, complete
from gpu_pool_client import GpuPoolError, Holder, NeverFits, NotAllowed, OverQuota, Pool, SliceRequest
from gpu_pool_client.pool import COURSE_VARIABLE, DEFAULT_URL, URL_VARIABLE
from gpu_pool_client.processes import account_of


def refusals(session: CommandSession, requests: Iterable[SliceRequest]) -> dict[SliceRequest, GpuPoolError]:
    """Return those of the requests that the pool would refuse, with its reasons.

    Nothing is asked for. A pool that cannot be asked now, or has no GPU now, is not
    held to refuse anything. This user's own pool is not opened, since that would
    make one where there is none; its arithmetic is done here.
    """
    url = session.url or os.environ.get(URL_VARIABLE) or DEFAULT_URL
    try:
        if urlsplit(url).scheme == "embedded":
            return _by_rules(requests)
        return complete(_by_service(session, requests))
    except GpuPoolError:
        return {}


def _by_rules(requests: Iterable[SliceRequest]) -> dict[SliceRequest, GpuPoolError]:
    from gpu_pool.devices import discover
    from gpu_pool.policy import admission
    from gpu_pool.settings import load_settings

    rules, devices = load_settings().rules, discover().devices

    def refusal(request: SliceRequest) -> GpuPoolError | None:
        try:
            admission.check_rules(request, rules)
            admission.check(request, devices, rules)
        except (NeverFits, NotAllowed) as error:
            return error
        return None

    found = ((request, refusal(request)) for request in requests) if devices else ()
    return {request: error for request, error in found if error is not None}


async def _by_service(
    session: CommandSession, requests: Iterable[SliceRequest]
) -> dict[SliceRequest, GpuPoolError]:
    async with session.connect() as pool:
        if not (await pool.status()).devices:
            return {}
        found = [(request, await _answer(pool, request)) for request in requests]
    return {request: error for request, error in found if error is not None}


async def _answer(pool: Pool, request: SliceRequest) -> GpuPoolError | None:
    """Return why the pool would refuse this user, and None where it would not, but perhaps let them wait."""
    try:
        await pool.forecast(request, Holder(account_of(os.getuid()), os.environ.get(COURSE_VARIABLE)))
    except (NeverFits, NotAllowed) as error:
        return error
    except OverQuota:  # of what is held now
        pass
    return None
