"""For how long a cluster is waited for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ClusterTimes:
    """What ``KubernetesSettings.times`` carries, all in seconds; no administrator needs to set them."""

    #: Everything has been listed in it when the service starts.
    listed_within: float = 60.0
    #: For this long a creation is tried again while the API server does not answer.
    retried_for: float = 20.0
    #: A pod that is not placed after it keeps others of its node back no longer.
    placed_within: float = 30.0
    #: To be placed is waited for so long, less than clients wait; whoever asked is told, and asks again.
    slot_within: float = 80.0
