"""How far sampling and inserting may drift apart: Reverb's rate limiter, mended for rollouts that are discarded.

The items are complete groups. With spi = samples per insert, two running sums are kept:

    error      = sum over inserts of spi - number of samples
    given_back = sum over discarded items of max(0, spi - times it was sampled)

    can sample n:  size >= max(min_size, n)  and  error - n >= min_diff
    can insert n:  size + n <= min_size  or  error - given_back + n * spi <= max_diff

Reverb has no `given_back`: an item discarded before it was sampled leaves `error` high for ever, and a queue loses one
slot per drop until it runs in lock-step. Here a discard gives its share back to the insert side. It takes nothing from
the sample side: for spi below the number of times an item may be used, discards are the surplus the ratio asks for,
and counting them there too would make `error` fall without end and block sampling for good.

Never both blocked, for samples of n = batch_size: if inserts are blocked then size >= min_size >= n, and error >=
error - given_back > max_diff - spi >= min_diff + n, so sampling is allowed. The constructors see to these inequalities.

The sums, not the counters behind them, are the state: a ratio changed while it runs holds from then on and does not
reinterpret the past. No lock: the buffer's lock covers it. Nothing here blocks; the buffer waits on its condition.
"""

from __future__ import annotations

import math

import msgspec

from streamrl.config import BufferConfig

_ROUNDING = 1e-6  # ten inserts at 0.1 samples each must count as one


class LimiterSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The four numbers of a rate limiter. `groups` are complete groups.

    Example: LimiterSettings.queue(9) == LimiterSettings(samples_per_insert=1.0, min_size=1, min_diff=0, max_diff=9).
    """

    samples_per_insert: float = 1.0
    min_size: int = 1
    min_diff: float = -math.inf
    max_diff: float = math.inf

    @classmethod
    def at_least(cls, min_size: int) -> LimiterSettings:
        """Sample whenever `min_size` groups are held; inserts are not limited."""
        return cls(min_size=min_size)

    @classmethod
    def ratio(
        cls, samples_per_insert: float, *, min_size: int, error_buffer: float, batch_size: int = 1
    ) -> LimiterSettings:
        """Keep samples within `error_buffer` of `samples_per_insert` times the inserts.

        A `min_size` below `batch_size` counts as that: no batch is there before.

        Raises:
            ValueError: if the buffer is so small that sampling and inserting could block each other.
        """
        if samples_per_insert <= 0:
            raise ValueError(f"samples_per_insert ({samples_per_insert}) must be above 0, or nothing is ever sampled")
        if 2 * error_buffer < batch_size + samples_per_insert:
            raise ValueError(
                f"error_buffer ({error_buffer}) must be at least {(batch_size + samples_per_insert) / 2} for batches "
                f"of {batch_size} at samples_per_insert={samples_per_insert}: smaller values could block samples and "
                "inserts alike"
            )
        min_size = max(min_size, batch_size)
        middle = min_size * samples_per_insert
        return cls(
            samples_per_insert=samples_per_insert,
            min_size=min_size,
            min_diff=middle - error_buffer,
            max_diff=middle + error_buffer,
        )

    @classmethod
    def queue(cls, size: int, *, batch_size: int = 1) -> LimiterSettings:
        """At most `size` groups that were never sampled; each is sampled once.

        Raises:
            ValueError: if a batch does not fit.
        """
        if size < batch_size:
            raise ValueError(
                f"queue size ({size}) must be at least the batch size ({batch_size}), or no batch ever fits"
            )
        return cls(min_size=1, min_diff=0.0, max_diff=float(size))

    @classmethod
    def of(cls, config: BufferConfig, *, batch_size: int) -> LimiterSettings:
        """What the config's `limiter` says."""
        if config.limiter == "queue":
            return cls.queue(config.queue_size, batch_size=batch_size)
        if config.limiter == "ratio":
            return cls.ratio(
                config.samples_per_insert,
                min_size=config.min_size,
                error_buffer=config.error_buffer,
                batch_size=batch_size,
            )
        return cls.at_least(config.min_size)


class RateLimiter:
    """See the module docstring. Attribute `settings` may be replaced at any time."""

    def __init__(self, settings: LimiterSettings) -> None:
        self.settings = settings
        self.error = 0.0
        self.given_back = 0.0

    def can_sample(self, num_groups: int, *, size: int) -> bool:
        s = self.settings
        return size >= max(s.min_size, num_groups) and self.error - num_groups >= s.min_diff - _ROUNDING

    def insert_room(self, *, size: int) -> float:
        """How many more groups may be inserted; inf when there is no limit."""
        s = self.settings
        by_ratio = (s.max_diff - self.error + self.given_back) / s.samples_per_insert
        return max(
            float(s.min_size - size), math.floor(by_ratio + _ROUNDING) if math.isfinite(by_ratio) else by_ratio, 0.0
        )

    def inserts_needed(self, num_groups: int, *, size: int) -> int:
        """How many more groups must be inserted before `num_groups` can be sampled."""
        s = self.settings
        by_size = max(s.min_size, num_groups) - size
        missing = s.min_diff - self.error + num_groups
        by_ratio = math.ceil(missing / s.samples_per_insert - _ROUNDING) if math.isfinite(missing) else 0
        return max(0, by_size, by_ratio)

    def insert(self) -> None:
        self.error += self.settings.samples_per_insert

    def sample(self, num_groups: int) -> None:
        self.error -= num_groups

    def undo_sample(self, num_groups: int) -> None:
        """The learner was rolled back: the groups were not sampled after all."""
        self.error += num_groups

    def discard(self, times_sampled: int) -> float:
        """A group left before its uses were up. Returns the share that was given back, for `undo_discard`."""
        share = max(0.0, self.settings.samples_per_insert - times_sampled)
        self.given_back += share
        return share

    def undo_discard(self, share: float) -> None:
        self.given_back -= share
