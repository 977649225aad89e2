"""The pods of this pool's leases, as a watch tells of them."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from gpu_pool.cluster.dialects import Manifest, Pod
from gpu_pool.cluster.informer import Key
from gpu_pool.cluster.lean_objects import is_ending


class LeasePods:
    """Which pods each lease has. Used in one event loop."""

    def __init__(self) -> None:
        self._pods: dict[str, dict[Key, Manifest]] = {}
        self._leases: dict[str, str] = {}

    def of(self, lease_id: str) -> list[Manifest]:
        """Return the pods of a lease."""
        return list(self._pods.get(lease_id, {}).values())

    def leases(self) -> set[str]:
        """Return the ids of all leases that have pods."""
        return set(self._pods)

    def lease_of(self, uid: str) -> str | None:
        """Return the id of the lease that has a pod, by the pod's uid."""
        return self._leases.get(uid)

    def ending(self, live: Collection[str]) -> Iterator[Pod]:
        """Yield the pods that are about to end, and of none of the ``live`` leases."""
        for lease_id, pods in self._pods.items():
            if lease_id not in live:
                yield from filter(None, (Pod.read(pod) for pod in pods.values() if is_ending(pod)))

    def change(self, lease_id: str, key: Key, now: Manifest | None) -> None:
        """Take note of a pod as it is now; None if it has gone."""
        pods = self._pods.setdefault(lease_id, {})
        before = pods.pop(key, None)
        if before is not None:
            self._leases.pop(str(before["metadata"].get("uid")), None)
        if now is not None:
            pods[key] = now
            self._leases[str(now["metadata"].get("uid"))] = lease_id
        elif not pods:
            del self._pods[lease_id]
