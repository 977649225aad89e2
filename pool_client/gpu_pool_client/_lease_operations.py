"""The part of a pool's contract that is about one lease."""

from __future__ import annotations

import abc
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Concatenate, Final, ParamSpec, TypeVar

from gpu_pool_client._errors import NotAllowed
from gpu_pool_client._leases import Activity, EndReason, Hibernation, Lease, Outlook, TakingEffect
from gpu_pool_client._operations import (
    ADMINISTRATORS,
    OWNERS,
    READERS,
    Cost,
    Http,
    LongPoll,
    Principal,
    operation,
    operation_of,
)
from gpu_pool_client._pods import KernelCommand, KernelPod
from gpu_pool_client._processes import Process
from gpu_pool_client._requests import SliceRequest
from gpu_pool_client._retries import giving_back

P = ParamSpec("P")
T = TypeVar("T")

LEASE: Final = "/leases/{lease}"
_NO_PODS: Final = "This pool starts no kernels.", "Start the kernel where its slice is."
_ON_PAGES: Final = (
    "A pool's service takes slices back on its web pages alone.",
    "Open the lease's page there, or release the lease.",
)


class LeaseOperations(abc.ABC):
    """What can be done with one lease. See :class:`~gpu_pool_client.Pool`."""

    #: Where the pool is, in full: other processes reach the same pool by it.
    url: str
    #: Seconds after which it is tried again to give a lease back; None for the usual ones.
    _again_after: float | None = None

    async def _perform(
        self,
        verb: Callable[Concatenate[Any, P], Coroutine[Any, Any, T]],
        /,
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> T:
        """Do what a method of the contract says, in a pool that does not implement that method itself.

        Here: refuse. A pool that passes all operations on to another one does it here, once for all of
        them, by their rows.
        """
        del args, kwargs
        raise NotAllowed(*operation_of(verb).missing)

    @operation(Http("GET", LEASE), may=READERS)
    async def get_lease(self, lease_id: str) -> Lease:
        """Return a lease as it is now, even one that has ended.

        Parameters
        ----------
        lease_id
            The lease's id.

        Returns
        -------
        Lease
            Its state, its slices and its terms.
        """
        return await self._perform(LeaseOperations.get_lease, lease_id)

    @operation(Http("GET", f"{LEASE}/wait"), may=OWNERS, poll=LongPoll("last", 204, "It is still waiting."))
    @abc.abstractmethod
    async def wait(self, lease_id: str, timeout: float | None = None) -> Lease:
        """Wait until a lease is HELD, and return it.

        Waiting changes nothing: whoever cancels this call keeps the position in the queue.

        Parameters
        ----------
        lease_id
            The lease's id.
        timeout
            Seconds to wait at most; by default for as long as it takes.

        Returns
        -------
        Lease
            The lease, held.

        Raises
        ------
        TimedOut
            It was not granted within ``timeout``. It keeps its position in the queue.
        """

    @operation(Http("GET", f"{LEASE}/watch"), may=OWNERS, poll=LongPoll("seen", 304, "It has not changed."))
    @abc.abstractmethod
    def watch(self, lease_id: str) -> AsyncIterator[Lease]:
        """Follow a lease: yield it now, and after every change of its state or position, until it has ended.

        Parameters
        ----------
        lease_id
            The lease's id.

        Yields
        ------
        Lease
            The lease after each change; the last one is ENDED, and its ``end_reason`` says why.
        """

    @operation(Http("GET", f"{LEASE}/outlook"), may=READERS, cost=Cost.QUESTION)
    async def explain(self, lease_id: str) -> Outlook:
        """Say why a lease waits, and how long that may take.

        Parameters
        ----------
        lease_id
            The lease's id.

        Returns
        -------
        Outlook
            Its position, the reason, and the expected wait in seconds where one can be guessed.

        Raises
        ------
        BadRequest
            The lease does not wait.
        """
        return await self._perform(LeaseOperations.explain, lease_id)

    @operation(
        Http("POST", f"{LEASE}/attach"),
        may=OWNERS,
        cost=Cost.DECISION,
        decision="attach {process} to {lease_id}",
    )
    async def attach(
        self,
        lease_id: str,
        process: Process,
        *,
        ready_within: float | None = None,
        grace: float = 0.0,
    ) -> Lease:
        """Tie a lease to a process, whose death then ends the lease. Also allowed while the lease waits.

        A later call replaces the process.

        Parameters
        ----------
        lease_id
            The lease's id.
        process
            The process that the lease lives and dies with.
        ready_within
            Seconds within which :meth:`renew` must be called, or the lease ends; by default no such limit.
        grace
            Seconds for which the death of ``process`` is forgiven while the holder's own process lives,
            so that it can be restarted.

        Returns
        -------
        Lease
            The lease with its process.
        """
        return await self._perform(
            LeaseOperations.attach, lease_id, process, ready_within=ready_within, grace=grace
        )

    @operation(Http("POST", f"{LEASE}/renew"), may=OWNERS, cost=Cost.DECISION, decision="renew {lease_id}")
    async def renew(self, lease_id: str, ttl: float | None = None) -> Lease:
        """Say that all is well: lift a lease's deadline, or set it anew.

        While nothing is attached to a held lease, its deadline can only come sooner.

        Parameters
        ----------
        lease_id
            The lease's id.
        ttl
            Seconds from now until the next deadline; by default there is none.

        Returns
        -------
        Lease
            The lease as it is now.
        """
        return await self._perform(LeaseOperations.renew, lease_id, ttl)

    @operation(Http("GET", f"{LEASE}/activity"), may=OWNERS, cost=Cost.QUESTION)
    async def activity(self, lease_id: str) -> Activity:
        """Say what a lease's process does with its devices, as the driver sees it.

        Parameters
        ----------
        lease_id
            The lease's id.

        Returns
        -------
        Activity
            Memory in MiB, whether CUDA was initialised and whether the device works; None for what is
            not known.
        """
        return await self._perform(LeaseOperations.activity, lease_id)

    @operation(
        Http("POST", f"{LEASE}/busy"),
        may=OWNERS,
        cost=Cost.DECISION,
        decision="work of {lease_id}",
    )
    async def report_busy(
        self,
        lease_id: str,
        spans: Sequence[tuple[float, float]],
        *,
        gives_way_since: float | None = None,
    ) -> None:
        """Say when a lease's kernel worked on what was submitted, and whether its slice may go to others.

        Parameters
        ----------
        lease_id
            The lease's id.
        spans
            When it began, in Unix seconds, and for how many seconds it worked.
        gives_way_since
            Since when, in Unix seconds, it has been idle and could have been parked; by default it cannot
            be parked now. Such a lease may be asked back, as YIELDED, once somebody waits.
        """
        await self._perform(LeaseOperations.report_busy, lease_id, spans, gives_way_since=gives_way_since)

    @operation(
        Http("POST", f"{LEASE}/hibernation", required=("hibernation",)),
        may=OWNERS,
        cost=Cost.DECISION,
        decision="hibernation of {lease_id}",
    )
    async def report_hibernation(self, lease_id: str, hibernation: Hibernation) -> None:
        """Say how a lease's kernel that can go to disk stands, whenever that changes.

        Parameters
        ----------
        lease_id
            The lease's id.
        hibernation
            Whether it is on disk, and why not.
        """
        await self._perform(LeaseOperations.report_hibernation, lease_id, hibernation)

    @operation(
        Http("POST", f"{LEASE}/resize"),
        may=(Principal.PROCESS,),
        cost=Cost.DECISION,
        decision="resize {lease_id} to {request}",
    )
    async def resize(self, lease_id: str, request: SliceRequest, *, ahead: bool = False) -> Lease:
        """Change the size of a lease, which keeps its id, its key and its holder.

        A held lease gets other slices at once, on its own devices if possible; its holder must give
        its process the new :attr:`Lease.environment`. A waiting one keeps its position only if it asks
        for no more than before. A parked one asks for the new size when it resumes.

        Whoever is about to end the process for another size asks for it ``ahead``, so that nobody else
        can have it meanwhile: see there.

        Parameters
        ----------
        lease_id
            The lease's id.
        request
            The size it has from now on.
        ahead
            Only take what a held lease needs for the size on top of what it has. Its request and its
            process's part stay as they are, also where the process has initialised CUDA. Once that has
            ended, the same size can be had for certain, without ``ahead``. To ask ahead for the
            size that it has gives back what was taken.

        Returns
        -------
        Lease
            The lease with its new size.

        Raises
        ------
        BadRequest, NeverFits, OverQuota
            As :meth:`request`, also where the lease's process is in the way as well.
        TimedOut
            A held lease cannot have the size now, because it is not free or because others wait for it.
            Nothing has changed.
        NotAllowed
            As :meth:`request`; or the lease's process has initialised CUDA, or may have; or somebody else
            than the process that asked for the lease calls this.
        """
        return await self._perform(LeaseOperations.resize, lease_id, request, ahead=ahead)

    @operation(
        Http("POST", f"{LEASE}/park"),
        may=(Principal.PROCESS,),
        cost=Cost.DECISION,
        decision="park {lease_id}",
    )
    async def park(self, lease_id: str, *, yields: bool = False) -> Lease:
        """Lend the slices of a held lease to others, and keep the lease.

        One that waits in the queue to resume leaves the queue and is parked again.

        Parameters
        ----------
        lease_id
            The lease's id.
        yields
            Only where its slices are still asked back, such as for somebody who waits. Where nobody does any
            more, it stays held, and what was moved off its devices for that is moved back.

        Returns
        -------
        Lease
            The lease, parked; or held, where it ``yields`` and nobody needs what it has.

        Raises
        ------
        NotAllowed
            Its process has initialised CUDA, and what it keeps on the device would be in the next
            holder's way; or its process has ended, or is not ready yet; or somebody else than the process
            that asked for the lease calls this, which cannot keep its process from working meanwhile.
        """
        return await self._perform(LeaseOperations.park, lease_id, yields=yields)

    @operation(Http("POST", f"{LEASE}/resume"), may=OWNERS, cost=Cost.DECISION, decision="resume {lease_id}")
    async def resume(self, lease_id: str) -> Lease:
        """Ask again for the slices of a parked lease, on the same devices as before. It may have to wait.

        Parameters
        ----------
        lease_id
            The lease's id.

        Returns
        -------
        Lease
            The lease, held or in the queue.
        """
        return await self._perform(LeaseOperations.resume, lease_id)

    @operation(
        Http("DELETE", LEASE),
        may=OWNERS,
        cost=Cost.DECISION,
        decision="release {lease_id} as {reason}",
    )
    async def release(self, lease_id: str, reason: EndReason = EndReason.RELEASED) -> None:
        """End a lease. Repeating it, or naming a lease that is gone, does nothing.

        Another's lease is ended for administrators alone. For everybody else it is as if there were none,
        also for an instructor who may read it: :meth:`get_lease` says that it goes on.

        Parameters
        ----------
        lease_id
            The lease's id.
        reason
            Why it ends; the history keeps it.
        """
        await self._perform(LeaseOperations.release, lease_id, reason)

    async def give_back(self, lease_id: str, reason: EndReason = EndReason.RELEASED) -> None:
        """Release a lease; where the pool cannot hear of it now, as soon as it can.

        Returns after a few seconds at most, and goes on for as long as this process lives, also where this
        call is cancelled. What fails is logged.

        Parameters
        ----------
        lease_id
            The lease's id.
        reason
            As for :meth:`release`.
        """
        release = partial(self.release, lease_id, reason)
        name = (self.url, lease_id)
        await giving_back.give_back(name, f"GPU lease {lease_id}", release, again_after=self._again_after)

    # -- Taking slices back -------------------------------------------------

    @operation(None, may=OWNERS, cost=Cost.QUESTION, missing=_ON_PAGES)
    async def effect_of_taking(self, lease_id: str) -> TakingEffect:
        """Say what becomes of a lease's kernel if its slices are taken back now.

        Parameters
        ----------
        lease_id
            The lease's id.

        Returns
        -------
        TakingEffect
            Whether the kernel lives on.
        """
        return await self._perform(LeaseOperations.effect_of_taking, lease_id)

    @operation(
        None,
        may=OWNERS,
        cost=Cost.DECISION,
        decision="withdraw {lease_id}: {message}",
        idempotent=False,
        missing=_ON_PAGES,
    )
    async def withdraw(
        self, lease_id: str, message: str = "", reason: EndReason = EndReason.RELEASED
    ) -> Lease:
        """Take a lease's slices from its kernel, which lives on: the lease is parked.

        Parameters
        ----------
        lease_id
            The lease's id.
        message
            What the lease's user reads, if somebody else takes the slices.
        reason
            By whom: RELEASED by its user, REVOKED by an administrator. A service knows by itself.

        Returns
        -------
        Lease
            The lease, about to be parked.

        Raises
        ------
        NotAllowed
            That would end the kernel, which has used the GPU.
        """
        return await self._perform(LeaseOperations.withdraw, lease_id, message, reason)

    @operation(
        None,
        may=OWNERS,
        cost=Cost.DECISION,
        decision="ask back {lease_id}: {message}",
        idempotent=False,
        missing=_ON_PAGES,
    )
    async def ask_back(
        self, lease_id: str, message: str = "", reason: EndReason = EndReason.RELEASED
    ) -> Lease:
        """Let a kernel's slices go as soon as it is idle.

        Parameters
        ----------
        lease_id, message, reason
            As for :meth:`withdraw`.

        Returns
        -------
        Lease
            The lease, of which the slices are asked back.

        Raises
        ------
        BadRequest
            No kernel has the slices, so nobody knows when they are idle.
        """
        return await self._perform(LeaseOperations.ask_back, lease_id, message, reason)

    @operation(
        None,
        may=ADMINISTRATORS,
        cost=Cost.DECISION,
        decision="revoke {lease_id}: {message}",
        idempotent=False,
        refusal=("Only an administrator can revoke a lease.", "Ask the administrator."),
        missing=_ON_PAGES,
    )
    async def revoke(self, lease_id: str, message: str, reason: EndReason = EndReason.REVOKED) -> None:
        """End a lease, and tell its user why.

        Parameters
        ----------
        lease_id
            The lease's id.
        message
            What its user reads.
        reason
            Why it ends; the history keeps it.
        """
        await self._perform(LeaseOperations.revoke, lease_id, message, reason)

    # -- Kernels in pods -----------------------------------------------------

    @operation(
        Http("POST", f"{LEASE}/pod"),
        may=OWNERS,
        cost=Cost.DECISION,
        decision="launch a kernel on {lease_id}",
        missing=_NO_PODS,
    )
    async def launch(self, lease_id: str, kernel: KernelCommand) -> KernelPod:
        """Start the kernel of a held lease in a pod, in place of one that was started before.

        For leases whose ``terms.in_pod`` says so. Returns at once; see :meth:`pod`. The pod ends with its
        lease. Its own end leaves the lease as it is, so that the kernel can be launched again, unless the
        cluster took it away.

        Parameters
        ----------
        lease_id
            The lease's id.
        kernel
            What to run in the pod.

        Returns
        -------
        KernelPod
            The pod, which is about to start.

        Raises
        ------
        BadRequest
            The lease is not held, or no pod can be made of ``kernel``.
        NotAllowed
            The course or the cluster forbids it, or this pool starts no kernels.
        """
        return await self._perform(LeaseOperations.launch, lease_id, kernel)

    @operation(Http("GET", f"{LEASE}/pod"), may=OWNERS, poll=LongPoll("seen"), missing=_NO_PODS)
    async def pod(self, lease_id: str, seen: str = "") -> KernelPod:
        """Return the state of a lease's pod once it differs from the one seen, or after some seconds.

        Parameters
        ----------
        lease_id
            The lease's id.
        seen
            The ``version`` that the caller has seen; empty for none.

        Returns
        -------
        KernelPod
            The pod as it is now.

        Raises
        ------
        BadRequest
            No pod was launched for this lease.
        """
        return await self._perform(LeaseOperations.pod, lease_id, seen)

    @operation(
        Http("DELETE", f"{LEASE}/pod"),
        may=OWNERS,
        cost=Cost.DECISION,
        decision="end the kernel on {lease_id}",
        missing=_NO_PODS,
    )
    async def end_pod(self, lease_id: str) -> None:
        """End a lease's pod, and keep the lease. Repeating it does nothing.

        Parameters
        ----------
        lease_id
            The lease's id.
        """
        await self._perform(LeaseOperations.end_pod, lease_id)
