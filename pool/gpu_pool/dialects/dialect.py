"""The interface of a dialect, and what a node's GPUs and a pod's holdings are to all of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from gpu_pool.dialects.cluster import Cluster, Pod
from gpu_pool.dialects.values import DEFAULTS, Options, Table, Translation
from gpu_pool_client import Device, SliceRequest


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU, or MIG instance, of a node.

    ``device.contexts`` is how many pods may share it, None where nothing says;
    ``device.memory_mib`` is 0 where the node does not show it. A uuid that the
    node does not show is made from the node's name and the GPU's number.
    """

    node: str
    device: Device
    #: Whether nothing more is to be placed on it.
    drained: bool = False
    #: The system's own word for how it is shared, such as HAMi's ``mig``.
    mode: str = ""


@dataclass(frozen=True, slots=True)
class Hold:
    """What a pod holds of one GPU."""

    milli: int
    memory_mib: int
    #: The GPU's uuid; empty where the cluster does not say which GPU of the node it is.
    uuid: str = ""


class Dialect(ABC):
    """How one system is asked for a slice, and what it shows of those that are held.

    A dialect is one file with one class and one table. It is pure: it looks at
    the cluster and the options that it is given, and at nothing else.
    """

    table: ClassVar[Table]
    #: Names of dialects that are always seen beside it, because it works over them.
    builds_on: ClassVar[tuple[str, ...]] = ()

    def __init__(self, cluster: Cluster, options: Options = DEFAULTS) -> None:
        self.cluster = cluster
        self.options = options

    @abstractmethod
    def sighted(self) -> str:
        """Say in words by what this system is seen in the cluster; empty if it is not."""

    @abstractmethod
    def gpus(self) -> tuple[Gpu, ...]:
        """Return the GPUs that this system shares, by node and number."""

    @abstractmethod
    def translate(self, request: SliceRequest) -> Translation:
        """Return what a pod needs for this slice, and the truth about it.

        Raises NeverFits if no node could ever hold it, BadRequest if this
        system cannot be asked for it, NotAllowed if the administrator must
        set something first.
        """

    @abstractmethod
    def holds(self, pod: Pod) -> tuple[Hold, ...]:
        """Return what a pod that is on a node holds there, one entry per GPU."""
