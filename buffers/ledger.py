"""The ledger: for every uid issued one state, for every rollout that arrived one fate, and the counts of both.

Invariant: issued == in_flight + buffered + trained + sum(discarded). Rollouts are counted with their lengths by fate,
so that a length bias (long rollouts discarded more often than short ones) is visible: the counts of `trained` and
`discarded` can be laid side by side, and their sum with `buffered` is everything that was generated. No lock: the
buffer's lock covers it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Literal

from streamrl.records import BufferStats

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

    def counts(self) -> BufferStats:
        """The ledger's part of the statistics."""
        assert self.balanced, f"the ledger does not add up: {self.issued} issued, {self.groups}, {self.discarded}"
        return BufferStats(
            issued=self.issued,
            in_flight=self.groups["in_flight"],
            buffered=self.groups["buffered"],
            trained=self.groups["trained"],
            discarded=dict(self.discarded),
            inserted_rollouts=self.inserted,
            duplicate_rollouts=self.duplicates,
            rejected_rollouts=dict(self.rejected),
            failed_members=dict(self.failed),
            generated_tokens=dict(self.tokens),
            generated_rollouts=dict(self.rollouts),
            response_lengths={fate: dict(counts) for fate, counts in self.lengths.items()},
        )

    def issue(self) -> None:
        self.issued += 1
        self.groups["in_flight"] += 1

    def insert(self, length: int) -> None:
        """A rollout with `length` response tokens became a member of its group."""
        self.inserted += 1
        self.turn(length, "buffered")

    def turn(self, length: int, fate: Fate) -> None:
        """A rollout with `length` response tokens meets this fate."""
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
                self.turn(length, target)

    def count_live(self, state: State, present: Iterable[int], unused: Iterable[int]) -> None:
        """Re-add a group that is not settled, from the lengths of its members and of those that were not taken."""
        self.issued += 1
        self.groups[state] += 1
        self._count(_FATE[state], present, unused)

    def count_final(self, fate: str, present: Iterable[int], unused: Iterable[int]) -> None:
        """Re-add a settled uid; `fate` is `trained` or the reason it was discarded."""
        self.issued += 1
        state: State = "trained" if fate == "trained" else "discarded"
        self.groups[state] += 1
        if state == "discarded":
            self.discarded[fate] += 1
        self._count(_FATE[state], present, unused)

    def _count(self, fate: Fate, present: Iterable[int], unused: Iterable[int]) -> None:
        for length in present:
            self.inserted += 1
            self.turn(length, fate)
        for length in unused:
            self.turn(length, "discarded")

    @property
    def balanced(self) -> bool:
        states = self.groups["in_flight"] + self.groups["buffered"] + self.groups["trained"]
        return self.issued == states + sum(self.discarded.values())
