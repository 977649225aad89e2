"""The pauses between attempts."""

from __future__ import annotations

from gpu_pool_client._retries import Backoff


def test_each_pause_is_twice_as_long_up_to_the_longest() -> None:
    backoff = Backoff(1.0, 5.0)
    assert [backoff.pause() for _ in range(5)] == [1.0, 2.0, 4.0, 5.0, 5.0]


def test_after_a_success_it_begins_again() -> None:
    backoff = Backoff(1.0, 5.0)
    assert backoff.is_fresh
    backoff.pause()
    assert not backoff.is_fresh
    backoff.reset()
    assert (backoff.is_fresh, backoff.pause()) == (True, 1.0)


def test_pauses_that_are_spread_are_shorter_and_never_longer() -> None:
    backoff = Backoff(8.0, 8.0, spread=0.5)
    pauses = [backoff.pause() for _ in range(100)] + [backoff.shortened(8.0) for _ in range(100)]
    assert min(pauses) >= 4.0
    assert max(pauses) <= 8.0
    assert len(set(pauses)) > 100
