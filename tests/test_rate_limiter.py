"""How far sampling and inserting may drift apart, and what a discarded group gives back."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from buffers.rate_limiter import LimiterSettings, RateLimiter
from streamrl.config import BufferConfig


def limiter_with(settings: LimiterSettings, *, inserts: int = 0, samples: int = 0) -> RateLimiter:
    limiter = RateLimiter(settings)
    for _ in range(inserts):
        limiter.insert()
    limiter.sample(samples)
    return limiter


def test_nothing_is_sampled_until_the_minimum_size_is_reached() -> None:
    limiter = limiter_with(LimiterSettings.at_least(3), inserts=2)
    assert not limiter.can_sample(1, size=2)
    assert limiter.inserts_needed(1, size=2) == 1
    limiter.insert()
    assert limiter.can_sample(1, size=3)


def test_a_batch_larger_than_what_is_held_is_not_sampled() -> None:
    limiter = limiter_with(LimiterSettings.at_least(1), inserts=3)
    assert not limiter.can_sample(4, size=3)
    assert limiter.inserts_needed(4, size=3) == 1


def test_a_minimum_size_alone_never_limits_inserts() -> None:
    assert limiter_with(LimiterSettings.at_least(1), inserts=1000).insert_room(size=1000) == math.inf


def test_operations_within_the_error_buffer_are_not_blocked() -> None:
    settings = LimiterSettings.ratio(2.0, min_size=4, error_buffer=6.0)
    limiter = limiter_with(settings, inserts=4)
    assert limiter.can_sample(6, size=6)
    assert limiter.insert_room(size=4) == 3


def test_a_ratio_blocks_samples_that_run_ahead_and_inserts_that_run_ahead() -> None:
    settings = LimiterSettings.ratio(1.0, min_size=2, error_buffer=2.0)
    limiter = limiter_with(settings, inserts=4, samples=4)
    assert not limiter.can_sample(1, size=4)
    assert limiter.inserts_needed(1, size=4) == 1
    limiter = limiter_with(settings, inserts=4)
    assert limiter.insert_room(size=4) == 0


def test_inserts_up_to_the_minimum_size_are_never_blocked() -> None:
    settings = LimiterSettings.ratio(4.0, min_size=5, error_buffer=4.0)
    limiter = limiter_with(settings)
    limiter.error = 100.0
    assert limiter.insert_room(size=2) == 3


def test_a_queue_holds_its_size_and_no_more() -> None:
    limiter = limiter_with(LimiterSettings.queue(10), inserts=10)
    assert limiter.insert_room(size=10) == 0
    limiter.sample(4)
    assert limiter.insert_room(size=6) == 4


def test_discards_give_their_share_back_so_a_queue_does_not_run_in_lock_step() -> None:
    """Reverb's own formula accepts 10, 7, 4, 1, 1, 1 here (style.md, section 1)."""
    limiter = limiter_with(LimiterSettings.queue(10))
    accepted = []
    for _ in range(8):
        room = int(limiter.insert_room(size=0))
        accepted.append(room)
        for _ in range(room):
            limiter.insert()
        for _ in range(3):
            limiter.discard(0)
        limiter.sample(room - 3)
    assert accepted == [10] * 8


def test_a_discard_gives_back_only_the_uses_it_did_not_have() -> None:
    limiter = limiter_with(LimiterSettings.ratio(3.0, min_size=1, error_buffer=10.0), inserts=1)
    assert limiter.discard(2) == 1.0
    assert limiter.discard(5) == 0.0
    assert limiter.given_back == 1.0


def test_a_rollback_undoes_samples_and_discards() -> None:
    limiter = limiter_with(LimiterSettings.queue(4), inserts=4, samples=3)
    share = limiter.discard(0)
    limiter.undo_sample(3)
    limiter.undo_discard(share)
    assert (limiter.error, limiter.given_back) == (4.0, 0.0)


def test_a_ratio_changed_while_it_runs_does_not_reinterpret_the_past() -> None:
    limiter = limiter_with(LimiterSettings.ratio(1.0, min_size=1, error_buffer=8.0), inserts=1000, samples=1000)
    limiter.settings = LimiterSettings.ratio(2.0, min_size=1, error_buffer=8.0)
    assert limiter.insert_room(size=0) == 5
    limiter.insert()
    assert limiter.can_sample(2, size=2)


def test_ten_inserts_at_a_tenth_of_a_sample_each_allow_one_sample() -> None:
    settings = LimiterSettings(samples_per_insert=0.1, min_size=1, min_diff=0.0, max_diff=5.0)
    limiter = limiter_with(settings, inserts=9)
    assert not limiter.can_sample(1, size=9)
    limiter.insert()
    assert limiter.can_sample(1, size=10)


@given(
    spi=st.floats(0.1, 8.0),
    batch=st.integers(1, 32),
    min_size=st.integers(1, 16),
    slack=st.floats(0.0, 4.0),
    steps=st.lists(st.sampled_from("isd"), max_size=200),
)
def test_inserts_and_samples_are_never_both_blocked_by_the_ratio(
    spi: float, batch: int, min_size: int, slack: float, steps: list[str]
) -> None:
    settings = LimiterSettings.ratio(spi, min_size=min_size, error_buffer=(batch + spi) / 2 + slack, batch_size=batch)
    limiter = RateLimiter(settings)
    size = 0
    for step in steps:
        if step == "i" and limiter.insert_room(size=size) >= 1:
            limiter.insert()
            size += 1
        elif step == "s" and limiter.can_sample(batch, size=size):
            limiter.sample(batch)  # may be used again: they stay
        elif step == "d" and size:
            limiter.discard(0)
            size -= 1
        assert limiter.insert_room(size=size) >= 1 or limiter.can_sample(batch, size=size)


def test_an_error_buffer_that_could_block_everything_is_refused_with_the_smallest_one_that_works() -> None:
    with pytest.raises(ValueError, match=r"error_buffer \(4\.0\) must be at least 8\.5 for batches of 16"):
        LimiterSettings.ratio(1.0, min_size=1, error_buffer=4.0, batch_size=16)


def test_a_queue_smaller_than_a_batch_is_refused() -> None:
    with pytest.raises(ValueError, match=r"queue size \(8\) must be at least the batch size \(16\)"):
        LimiterSettings.queue(8, batch_size=16)


def test_a_ratio_of_zero_is_refused() -> None:
    with pytest.raises(ValueError, match="samples_per_insert"):
        LimiterSettings.ratio(0.0, min_size=1, error_buffer=10.0)


def test_the_settings_follow_the_config() -> None:
    assert LimiterSettings.of(BufferConfig(min_size=7), batch_size=4) == LimiterSettings.at_least(7)
    assert LimiterSettings.of(BufferConfig(limiter="queue", queue_size=9), batch_size=4) == LimiterSettings.queue(9)
    ratio = BufferConfig(limiter="ratio", samples_per_insert=2.0, min_size=3, error_buffer=5.0)
    assert LimiterSettings.of(ratio, batch_size=4) == LimiterSettings.ratio(2.0, min_size=4, error_buffer=5.0)
