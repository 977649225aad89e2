"""Where somebody's home folder can be used, and so where their kernels can be."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Sequence
from typing import Final

from gpu_pool.cluster.api import Api, ApiAway, ApiRefused
from gpu_pool.cluster.manifests import ContainerSettings
from gpu_pool.cluster.notebooks import Notebook
from gpu_pool.cluster.pod_choices import chosen_body, refuse_other_nodes
from gpu_pool.cluster.settings import KubernetesSettings
from gpu_pool.courses import Courses
from gpu_pool.policy.queue_state import Rules
from gpu_pool_client import Device, Holder, NotAllowed, PoolUnreachable, SliceRequest

_MANY: Final = frozenset({"ReadWriteMany"})
#: Of a claim with nothing else: several machines can read it, and nobody writes.
_READERS: Final = frozenset({"ReadOnlyMany"})
_ONE_POD: Final = frozenset({"ReadWriteOncePod"})


class VolumeClaims:
    """The homes of one pool's users."""

    def __init__(
        self, api: Api, settings: KubernetesSettings, courses: Callable[[], Courses], log: logging.Logger
    ) -> None:
        self._api, self._settings, self._courses, self._log = api, settings, courses, log
        #: How a claim may be used, by namespace and name. That never changes.
        self._modes: dict[tuple[str, str], frozenset[str]] = {}

    def body(self, holder: Holder, notebook: Notebook) -> ContainerSettings:
        """Return what a kernel gets besides its slice. Raises ``NotAllowed`` where it lacks its home."""
        return chosen_body(self._settings, self._courses().usable.get(holder.course or ""), notebook)

    async def devices_beside(
        self,
        request: SliceRequest,
        holder: Holder,
        notebook: Notebook,
        devices_on: Callable[[str], Sequence[Device]],
        rules: Rules,
    ) -> Collection[str]:
        """Return the uuids of the GPUs that a kernel can have with its home; none mean all.

        Raises ``NotAllowed`` where there will never be one.
        """
        if await self._is_anywhere(holder, notebook):
            return ()
        there = devices_on(notebook.node)
        refuse_other_nodes(request, there, notebook.node, rules)
        return [each.uuid for each in there]

    async def check(self, holder: Holder, notebook: Notebook, node: str) -> None:
        """Refuse a kernel on a node where its home cannot be used."""
        if notebook.node != node and not await self._is_anywhere(holder, notebook):
            raise NotAllowed(
                f"Your home folder can be used on one machine at a time, and is in use on {notebook.node}; "
                f"your slice is on {node}.",
                "Release the slice and ask for it again from this server.",
            )

    async def only_node(self, holder: Holder, notebook: Notebook) -> str:
        """Return the only node on which a kernel has its home; empty if any will do."""
        return "" if await self._is_anywhere(holder, notebook) else notebook.node

    async def _is_anywhere(self, holder: Holder, notebook: Notebook) -> bool:
        home = self.body(holder, notebook).home
        if home is None:
            return True
        modes = await self._modes_of(notebook.namespace, home.claim)
        if modes == _ONE_POD:
            raise NotAllowed(
                "Your home folder can be used by one pod at a time (ReadWriteOncePod), "
                "and your notebook server uses it.",
                "Ask the administrator for home folders that several pods can use (ReadWriteMany), "
                "or for a course with home: none.",
            )
        return bool(modes & _MANY) or modes == _READERS

    async def _modes_of(self, namespace: str, claim: str) -> frozenset[str]:
        known = self._modes.get((namespace, claim))
        if known is None:
            path = f"/api/v1/namespaces/{namespace}/persistentvolumeclaims/{claim}"
            try:
                found = await self._api.ask("GET", path)
            except (ApiAway, ApiRefused) as error:
                self._log.error("The volume claim %s cannot be read: %s", claim, error)
                raise PoolUnreachable(
                    "The cluster does not say at the moment where your home folder can be used.",
                    "Try again in a minute.",
                ) from error
            known = frozenset(map(str, found.get("spec", {}).get("accessModes") or ()))
            self._modes[namespace, claim] = known
        return known
