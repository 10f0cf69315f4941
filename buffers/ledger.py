"""The ledger: for every uid issued one state, for every rollout that arrived one fate, and the counts of both.

Invariant: issued == in_flight + buffered + trained + sum(discarded). Rollouts are counted with their lengths by fate, so that
a length bias (long rollouts discarded more often than short ones) is visible: the counts of `trained` and `discarded` can be laid
side by side, and their sum with `buffered` is everything that was generated. No lock: the buffer's lock covers it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

State = Literal["in_flight", "buffered", "trained", "discarded"]
Fate = Literal["buffered", "trained", "discarded"]

_FATE: dict[State, Fate] = {
    "in_flight": "buffered",  # a member that waits for the rest of its group is held just as a complete group is
    "buffered": "buffered",
    "trained": "trained",
    "discarded": "discarded",
}


def length_bucket(num_tokens: int) -> int:
    """The smallest power of two that is not below `num_tokens`."""
    return 1 << max(0, num_tokens - 1).bit_length()


class Ledger:
    """Counts only; which uid is in which state is the buffer's to know."""

    def __init__(self) -> None:
        self.issued = 0
        self.groups: Counter[State] = Counter()
        self.discarded: Counter[str] = Counter()  # uids by reason
        self.rollouts: Counter[str] = Counter()
        self.tokens: Counter[str] = Counter()  # response tokens by fate
        self.lengths: dict[Fate, Counter[int]] = {"buffered": Counter(), "trained": Counter(), "discarded": Counter()}
        self.inserted = 0
        self.duplicates = 0
        self.rejected: Counter[str] = Counter()  # rollouts by reason
        self.failed: Counter[str] = Counter()  # members by reason

    def issue(self) -> None:
        self.issued += 1
        self.groups["in_flight"] += 1

    def add_rollout(self, length: int, fate: Fate) -> None:
        """A rollout with `length` response tokens arrived and met this fate."""
        self.rollouts[fate] += 1
        self.tokens[fate] += length
        self.lengths[fate][length_bucket(length)] += 1

    def move(self, lengths: Iterable[int], old: State, new: State, *, reason: str = "") -> None:
        """A group whose rollouts have these lengths changed state; `reason` says why it was discarded."""
        self.groups[old] -= 1
        self.groups[new] += 1
        if new == "discarded":
            self.discarded[reason] += 1
        source, target = _FATE[old], _FATE[new]
        if source != target:
            for length in lengths:
                self.rollouts[source] -= 1
                self.tokens[source] -= length
                self.lengths[source][length_bucket(length)] -= 1
                self.add_rollout(length, target)

    @property
    def balanced(self) -> bool:
        states = self.groups["in_flight"] + self.groups["buffered"] + self.groups["trained"]
        return self.issued == states + sum(self.discarded.values())
