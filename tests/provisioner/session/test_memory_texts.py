"""What a kernel in a pod reads of the memory that it uses. Pure."""

from __future__ import annotations

from gpu_pool_provisioner.session import texts


def test_what_is_used_is_said_of_what_may_be() -> None:
    assert texts.memory_in_use(412, 655) == (
        "This kernel uses 412 MiB of the 655 MiB that it may use, as its node sees it."
    )
    assert texts.memory_in_use(0, 0) == "This kernel uses 0 MiB, as its node sees it."


def test_what_nobody_has_seen_is_not_known_and_never_nothing() -> None:
    told = texts.memory_in_use(None, 655)
    assert "is not known" in told
    assert "0 MiB" not in told
