"""One uid inside the buffer: its members, its state and its uses."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from buffers.ledger import State
from streamrl.records import Rollout, RolloutGroup


@dataclass(slots=True, kw_only=True)
class Group:
    """Mutable; owned by the buffer and covered by its lock.

    Example: Group(uid="0-000017", index=17, issued_at=3.2, members=[Rollout(...), None], attempts=[0, 1], lengths=[2, 0]): member 1
    failed once and is being generated again.
    """

    uid: str
    index: int  # order of issue
    issued_at: float  # the buffer's clock
    members: list[Rollout | None]  # [n]
    attempts: list[int]  # [n] newest attempt known of each member
    lengths: list[int]  # [n] response tokens; 0 while missing
    state: State = "in_flight"
    given_up: set[int] = field(default_factory=set)  # failed members that are not generated again
    num_bytes: int = 0
    min_version: int | None = None  # oldest token version; None before the first member
    order: int = -1  # order of completion
    uses: list[int] = field(default_factory=list)  # policy versions that sampled it, ascending
    late: int = 0  # bit m: member m arrived after the group was complete without it
    share: float = 0.0  # what the limiter was given back when it left before its uses were up

    @property
    def num_members(self) -> int:
        return sum(length > 0 for length in self.lengths)

    @property
    def num_open(self) -> int:
        """Members that may still come."""
        return len(self.lengths) - self.num_members - len(self.given_up)

    @property
    def seen(self) -> int:
        """Bit m is set if member m arrived."""
        return self.late | sum(1 << m for m, length in enumerate(self.lengths) if length)

    @property
    def present_lengths(self) -> list[int]:
        return [length for length in self.lengths if length]

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        return tuple(r for r in self.members if r is not None)

    @property
    def rewards(self) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        return np.array([r.reward for r in self.members if r is not None], dtype=np.float64)

    def add(self, rollout: Rollout) -> None:
        self.members[rollout.member] = rollout
        self.lengths[rollout.member] = len(rollout.response_ids)
        self.attempts[rollout.member] = max(self.attempts[rollout.member], rollout.attempt)
        self.given_up.discard(rollout.member)
        self.num_bytes += rollout.num_bytes
        self.min_version = min(
            rollout.min_version, rollout.min_version if self.min_version is None else self.min_version
        )

    def as_sample(self, *, probability: float) -> RolloutGroup:
        return RolloutGroup(uid=self.uid, rollouts=self.rollouts, times_sampled=len(self.uses), probability=probability)
