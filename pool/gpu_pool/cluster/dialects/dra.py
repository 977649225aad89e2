"""NVIDIA's driver for dynamic resource allocation: claims instead of counted resources.

The rules, from https://github.com/kubernetes-sigs/dra-driver-nvidia-gpu (2026-08)
and the API ``resource.k8s.io/v1``:

- a ResourceClaimTemplate asks one device class for devices: ``gpu.nvidia.com``
  for GPUs, ``mig.nvidia.com`` for MIG instances, told apart by CEL selectors;
- ``--consumable-shares`` lets claims share a GPU, and shows in ResourceSlices
  as ``allowMultipleAllocations``: with ``memory`` a claim takes what it asks
  for, in steps of 1 MiB, and everything if it asks for nothing; with a number
  each GPU has that many ``shares``; with ``unlimited`` only what is asked for
  is counted (``cmd/gpu-kubelet-plugin/consumable_shares.go``). Each mode only
  counts; none limits a process;
- without it a GPU goes to one claim, and parts are MIG instances.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Final

from gpu_pool.cluster.dialects.amounts import (
    Cut,
    cut,
    refuse_index,
    refuse_several,
    rounded_share,
    runtime_class,
    tolerations,
)
from gpu_pool.cluster.dialects.base import (
    Dialect,
    DialectTable,
    Gpu,
    Hold,
    PodBans,
    PodParts,
    SliceStatement,
    Translation,
)
from gpu_pool.cluster.dialects.dra_claims import (
    GPU_CLASS,
    MIG_CLASS,
    ListedDevice,
    claim_holds,
    claim_template,
    listed_devices,
    selector,
)
from gpu_pool.cluster.dialects.fixed_sizes import ENFORCED, FixedOffer, closest, statement
from gpu_pool.cluster.dialects.objects import Pod
from gpu_pool.policy.placement import accepts
from gpu_pool_client import WHOLE, Enforcement, Limit, NeverFits, SliceRequest, Strength

_COUNTED: Final = Enforcement(
    Limit(Strength.NONE, "DRA only counts it"), Limit(Strength.NONE, "time-slicing limits nothing")
)


class Dra(Dialect):
    """NVIDIA's DRA driver, through claim templates."""

    table = DialectTable(
        name="dra",
        title="NVIDIA DRA",
        memory="none; hard with MIG",
        compute="none; hard with MIG",
        smallest="what CUDA itself takes, 1/N of a GPU in N shares, or one MIG instance",
        rounding="memory to 1 MiB; up to a share, or to a MIG instance at most 1.5 times what was asked for",
        quota=(f"{GPU_CLASS}.deviceclass.resource.k8s.io/devices",),
        bans=PodBans(environment=frozenset({"NVIDIA_VISIBLE_DEVICES"})),
        source="dra-driver-nvidia-gpu, 2026-08",
        seen="without GPUs: the driver of 2026-08, sharing by memory, on Kubernetes 1.36.2",
    )

    def sighted(self) -> str:
        """Look for its device class, and for GPUs in its slices."""
        found = GPU_CLASS in self.cluster.device_classes and self.gpus()
        return (
            f"there is the device class {GPU_CLASS}, and {len(found)} of its devices are listed"
            if found
            else ""
        )

    @property
    def shares(self) -> bool:
        """Whether claims can have parts of a GPU (consumable capacity, KEP-5075)."""
        return any(each.shared for each in self._listed if not each.profile)

    def gpus(self) -> tuple[Gpu, ...]:
        """Return the listed GPUs and MIG instances."""
        return tuple(each.gpu for each in self._listed)

    def translate(self, request: SliceRequest) -> Translation:
        """Ask for whole GPUs, for memory or shares of shared ones, or for the closest MIG instance."""
        refuse_index(request, self.table.title)
        gpus = [each for each in self._listed if not each.profile]
        shared = [each for each in gpus if each.shared]
        if request.whole_devices:
            return self._whole(request, gpus)
        if shared:
            return self._part(request, shared)
        refuse_several(request, self.table.title, "MIG instances can be of the same GPU")
        return self._mig(request)

    def holds(self, pod: Pod) -> tuple[Hold, ...]:
        """Read the claims that are reserved for the pod."""
        return self._held.get((pod.namespace, pod.name), ())

    @cached_property
    def _listed(self) -> tuple[ListedDevice, ...]:
        return listed_devices(self.cluster)

    @cached_property
    def _held(self) -> dict[tuple[str, str], tuple[Hold, ...]]:
        return claim_holds(self.cluster, self._listed)

    def _whole(self, request: SliceRequest, gpus: list[ListedDevice]) -> Translation:
        alone = [each for each in gpus if not each.unlimited]
        if gpus and not alone:
            raise NeverFits(
                f"You asked for {request.named}; GPUs are shared without limit here, none can be had alone.",
                "Ask for a part of a GPU, or ask the administrator.",
            )
        size = cut(request, [each.gpu for each in alone], self.options, self.table.title)
        shares = max(_shares(alone, size), default=0)
        capacity = {"shares": str(shares)} if shares else {}
        truth = SliceStatement(request.count, WHOLE, size.memory_mib, ENFORCED["whole"], notes=size.notes)
        return self._answer(request, size, GPU_CLASS, capacity, truth)

    def _part(self, request: SliceRequest, shared: list[ListedDevice]) -> Translation:
        size = cut(request, [each.gpu for each in shared], self.options, self.table.title)
        capacity = {"memory": f"{size.memory_mib}Mi"} if size.memory_mib else {}
        asked = size.milli or request.milli or 0
        shares = min(_shares(shared, size), default=0)
        milli = asked
        if shares:
            number = max(1, -(-asked * shares // WHOLE))
            capacity["shares"] = str(number)
            milli = -(-number * WHOLE // shares)
        rounded = rounded_share("compute", asked, milli, f"a GPU has {shares} shares")
        notes = (*size.notes, "Nothing stops a neighbour on the same GPU from taking more than its part.")
        truth = SliceStatement(request.count, milli or None, size.memory_mib, _COUNTED, rounded, notes)
        return self._answer(request, size, GPU_CLASS, capacity, truth)

    def _mig(self, request: SliceRequest) -> Translation:
        instances = [
            each for each in self._listed if each.profile and accepts(request.filters, each.gpu.device)
        ]
        offers = [
            FixedOffer(
                each.profile,
                "mig",
                device.milli,
                device.memory_mib,
                f"a MIG instance {each.profile}",
                (each.gpu,),
            )
            for each in instances
            for device in (each.gpu.device,)
        ]
        if not offers:
            cut(request, self.gpus(), self.options, self.table.title)
        taken = closest(request, offers, self.options)
        gpus = tuple(gpu for each in taken for gpu in each.gpus)
        size = Cut(gpus, taken[0].milli, taken[0].memory_mib, taken[0].memory_mib)
        return self._answer(request, size, MIG_CLASS, {}, statement(request, taken), taken[0].resource)

    def _answer(
        self,
        request: SliceRequest,
        size: Cut,
        device_class: str,
        capacity: dict[str, str],
        truth: SliceStatement,
        profile: str = "",
    ) -> Translation:
        gpus = (each.gpu.device for each in self._listed if not each.profile)
        smaller = any(gpu.memory_mib < size.smallest_mib for gpu in gpus)
        cel = selector(request.filters, size.smallest_mib if smaller and not profile else 0, profile)
        template = claim_template(device_class, request.count, capacity, cel)
        name = template["metadata"]["name"]
        pod = PodParts(
            claims=({"name": "gpu", "resourceClaimTemplateName": name},),
            claim_templates=(template,),
            runtime_class=runtime_class(self.cluster, self.options),
            tolerations=tolerations(map(self.cluster.node, size.nodes)),
        )
        return Translation(self.table.name, pod, truth)


def _shares(devices: Sequence[ListedDevice], size: Cut) -> list[int]:
    """Return how many shares each of the devices has that the slice may be on."""
    wanted = {gpu.device.uuid for gpu in size.gpus}
    return [each.shares for each in devices if each.gpu.device.uuid in wanted]
