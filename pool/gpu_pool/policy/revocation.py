"""What becomes of a kernel when its slice is taken back. Pure."""

from __future__ import annotations

from gpu_pool_client import Activity, Lease, LeaseState, TakingEffect


def effect_of(lease: Lease, activity: Activity, *, is_kernel: bool) -> TakingEffect:
    """Say what taking a living lease's slices back would do now.

    ``is_kernel`` is whether a kernel manager looks after its process, which can hold back cells.
    """
    if not (is_kernel or lease.terms.in_pod):
        return TakingEffect.LEAVES_QUEUE if lease.state is LeaseState.WAITING else TakingEffect.FREES_SLICE
    if lease.state is LeaseState.WAITING and lease.process is None:
        return TakingEffect.LEAVES_QUEUE
    # What is parked, or waits to come back, has no slice that could go without its kernel.
    is_free_to_go = lease.state is LeaseState.HELD and activity.initialised is False
    is_kept = is_free_to_go and lease.terms.can_be_parked
    return TakingEffect.KEEPS_KERNEL if is_kept else TakingEffect.ENDS_KERNEL
