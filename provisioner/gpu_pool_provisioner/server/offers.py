"""What is free for the kernels that this server offers, and how long the wait would be; for the launcher."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeAlias

from jupyter_client.kernelspec import KernelSpec
from jupyter_core.utils import ensure_async
from traitlets import TraitError

from gpu_pool_client import (
    GpuPoolError,
    Holder,
    Outlook,
    OverQuota,
    Pool,
    PoolStatus,
    PoolUnreachable,
    SliceRequest,
    parse_request,
)
from gpu_pool_client._background import in_background
from gpu_pool_client._free import cut, free_now
from gpu_pool_provisioner.jupyter_files import config_of
from gpu_pool_provisioner.pools import shared_pool
from gpu_pool_provisioner.provisioner import GPUPoolProvisioner
from gpu_pool_provisioner.server.model import expected_wait

#: Seconds for which an answer is good enough for somebody who chooses.
_FRESH: Final = 5.0
#: Seconds for which the sizes are that a running kernel may change to.
_SIZES_FRESH: Final = 30.0
#: Seconds in which a pool answers, or its kernels are shown without what is free.
_WITHIN: Final = 5.0
_SILENT: Final = PoolUnreachable("The GPU pool does not answer at the moment.", "", may_pass=True)


#: A request, the course in whose name it is made, and whether it is batch work.
Question: TypeAlias = tuple[SliceRequest, str | None, bool]


@dataclass(frozen=True, slots=True)
class OfferedKernel:
    """What starting a kernel would ask for."""

    url: str
    request: SliceRequest
    holder: Holder

    @property
    def question(self) -> Question:
        """What a pool is asked of it; kernels of several languages ask for the same."""
        return self.request, self.holder.course, self.holder.batch


@dataclass(frozen=True, slots=True)
class Forecast:
    """What a request would meet."""

    outlook: Outlook | None = None
    #: Why it would be refused.
    refusal: str = ""


class Offers:
    """What the kernels of this server's kernelspecs would meet now. To be used on the server's event loop."""

    def __init__(self, server: Any) -> None:
        self._server = server
        self._answer: dict[str, Any] = {}
        self._asked_at = 0.0
        self._asking: asyncio.Task[dict[str, Any]] | None = None
        #: The sizes that the kernels of a pool and course may have, and when they were asked for.
        self._sizes: dict[tuple[str, str | None], tuple[float, list[str]]] = {}
        self._looking_up: asyncio.Task[None] | None = None

    async def answer(self) -> dict[str, Any]:
        """Return the answer for the launcher; asked for at once by many, or lately, it is asked for once."""
        if self._asking is None and (not self._answer or time.monotonic() > self._asked_at + _FRESH):
            self._asking = asyncio.create_task(self._ask())
        if self._asking is None:
            return self._answer
        return await asyncio.shield(self._asking)

    async def _ask(self) -> dict[str, Any]:
        try:
            kernels = await self._kernels()
            urls = sorted({each.url for each in kernels.values()})
            found = await asyncio.gather(
                *(_of_pool(url, {n: each for n, each in kernels.items() if each.url == url}) for url in urls)
            )
            offers: dict[str, Any] = {}
            for each, _ in found:
                offers.update(each)
            self._answer = {"kernels": offers, "message": " ".join(filter(None, (said for _, said in found)))}
            self._asked_at = time.monotonic()
            return self._answer
        finally:
            self._asking = None

    async def _kernels(self) -> dict[str, OfferedKernel]:
        specs = await ensure_async(await asyncio.to_thread(self._server.kernel_spec_manager.get_all_specs))
        found = {name: self._kernel(name, entry["spec"]) for name, entry in specs.items()}
        return {name: each for name, each in found.items() if each is not None}

    def _kernel(self, name: str, spec: Mapping[str, Any]) -> OfferedKernel | None:
        config = config_of(spec)
        if config is None:
            return None
        known = ("display_name", "language", "env", "metadata")
        fields = {each: spec[each] for each in known if each in spec}
        try:
            provisioner = GPUPoolProvisioner(
                kernel_id="", kernel_spec=KernelSpec(**fields), config=self._server.config, **config
            )
            return offered_by(provisioner)
        except (GpuPoolError, TraitError, TypeError) as error:
            self._server.log.warning("What is free for the kernel %s is not known: %s", name, error)
            return None

    # -- Sizes -------------------------------------------------------------

    def sizes(self, provisioner: GPUPoolProvisioner) -> list[str]:
        """Return the sizes that a kernel may change to, by what was known last; learn them if need be."""
        key = provisioner.url, provisioner.course_name
        asked_at, known = self._sizes.get(key, (-_SIZES_FRESH, list[str]()))
        if self._looking_up is None and time.monotonic() > asked_at + _SIZES_FRESH:
            self._looking_up = asyncio.create_task(self._learn_sizes(key, provisioner.holder()))
        return known

    async def _learn_sizes(self, key: tuple[str, str | None], holder: Holder) -> None:
        url = key[0]
        known = self._sizes.get(key, (0.0, list[str]()))[1]
        try:
            requests = await in_background(_within(_offers(url, holder)))
            if requests is None:
                kernels = await self._kernels()
                requests = [each.request for each in kernels.values() if each.url == url]
            known = list(dict.fromkeys(each.size for each in sorted(requests, key=_order)))
        except GpuPoolError as error:
            self._server.log.debug("The sizes of %s are not known: %s", url, error)
        finally:
            self._sizes[key] = time.monotonic(), known
            self._looking_up = None


def offered_by(provisioner: GPUPoolProvisioner) -> OfferedKernel | None:
    """Return what starting such a kernel would ask for; None for no slice. Raises ``BadRequest``."""
    if not provisioner.slice:
        return None
    return OfferedKernel(provisioner.url, parse_request(provisioner.slice), provisioner.holder())


async def check_other_size(pool: Pool, request: SliceRequest, holder: Holder) -> Outlook | None:
    """Raise why a kernel could never have another size, before somebody restarts it for that.

    Return what a new request would meet. What the kernel has now is in its own way; so nothing is said of
    quotas. A pool that does not answer is a reason, too: the restart would lose the variables, and
    perhaps the slice.
    """
    try:
        found: Outlook | None = await in_background(_within(pool.forecast(request, holder)))
    except OverQuota:
        return None
    return found


async def _offers(url: str, holder: Holder) -> Sequence[SliceRequest] | None:
    return await shared_pool(url).offers(holder)


async def _within(asking: Any) -> Any:
    """Return what a pool answers. Raises ``PoolUnreachable`` where that takes too long."""
    try:
        return await asyncio.wait_for(asking, _WITHIN)
    except asyncio.TimeoutError:
        raise _SILENT from None


async def _of_pool(url: str, kernels: Mapping[str, OfferedKernel]) -> tuple[dict[str, Any], str]:
    """Return the Offer of each kernel, and why nothing is known of what is free, if nothing is."""
    try:
        status, forecasts = await in_background(_within(_ask_pool(url, kernels)))
    except GpuPoolError as error:
        unknown = Forecast(None, str(error))
        return {name: _offer(each, None, unknown) for name, each in kernels.items()}, str(error)
    return {
        name: _offer(each, status, forecasts[each.question]) for name, each in kernels.items()
    }, status.note


async def _ask_pool(
    url: str, kernels: Mapping[str, OfferedKernel]
) -> tuple[PoolStatus, Mapping[Question, Forecast]]:
    pool = shared_pool(url)
    status = await pool.status()
    asked = {each.question: each for each in kernels.values()}
    forecasts = (partial(pool.forecast, each.request, each.holder) for each in asked.values())
    met = await asyncio.gather(*(_forecast(each) for each in forecasts))
    return status, dict(zip(asked, met, strict=True))


async def _forecast(ask: Any) -> Forecast:
    try:
        return Forecast(await ask())
    except PoolUnreachable:
        raise
    except GpuPoolError as error:
        return Forecast(None, str(error) if isinstance(error, OverQuota) else error.message)


def _offer(kernel: OfferedKernel, status: PoolStatus | None, forecast: Forecast) -> dict[str, Any]:
    request, outlook, free = kernel.request, forecast.outlook, None
    if status is not None and not forecast.refusal:
        # What is free may be kept for those in the queue.
        free = free_now(request, status.devices) if outlook is None else 0
    return {
        "size": request.size,
        "milli": _milli(request, status),
        "memory_mib": request.memory_mib,
        "free_now": free,
        "position": outlook.position if outlook is not None else None,
        "expected_wait": expected_wait(outlook),
        "message": forecast.refusal,
        "simulated": status is not None and status.simulated,
    }


def _milli(request: SliceRequest, status: PoolStatus | None) -> int:
    """Return how much it is of all its devices together, by which kernels are sorted."""
    if request.milli is not None or status is None or not status.devices:
        return request.count * (request.milli or 0)
    return request.count * cut(request, status.devices[0].device).milli


def _order(request: SliceRequest) -> tuple[int, int, int]:
    limit = request.limit_milli or request.limit_mib or 0
    return request.count * (request.milli or 0), request.count * (request.memory_mib or 0), limit
