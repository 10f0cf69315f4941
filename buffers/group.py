"""One uid inside the buffer: its members, its state and its uses."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from buffers.ledger import State
from buffers.outcomes import OpenGroup
from streamrl.records import Rollout, RolloutGroup


@dataclass(slots=True, kw_only=True)
class Group:
    """Mutable; owned by the shelf and covered by the buffer's lock.

    Example: Group(uid="0-000017", index=17, issued_at=3.2, members=[Rollout(...), None], attempts=[0, 1],
    lengths=[2, 0], ...): member 1 failed once and is being generated again.
    """

    uid: str
    index: int  # order of issue
    issued_at: float  # the buffer's clock
    members: list[Rollout | None]  # [n], a greedy one last; all None while only the journal holds them
    attempts: list[int]  # [n] newest attempt known of each member
    lengths: list[int]  # [n] response tokens; 0 while missing
    state: State = "in_flight"
    has_baseline: bool = False  # the last member is greedy: its reward is what the others' are compared with
    note: bytes = b""  # the issuer's own, e.g. the prompt
    given_up: set[int] = field(default_factory=set)  # failed members that are not generated again
    unused: list[tuple[int, int]] = field(
        default_factory=list
    )  # (member, response tokens) that arrived and was not taken
    num_bytes: int = 0
    min_version: int = -1  # oldest token version; -1 before the first member
    order: int = -1  # order of completion
    uses: list[int] = field(default_factory=list)  # policy versions that sampled it, ascending
    places: list[int] = field(default_factory=list)  # of each use, among the groups of its step in order of sampling
    probability: float = 1.0  # of the last draw
    share: float = 0.0  # what the limiter was given back when it left before its uses were up

    arrived: int = 0  # bit m is set if member m arrived, whether it was taken or not

    @property
    def present(self) -> list[int]:
        """Response tokens of the members that are there."""
        return [length for length in self.lengths if length]

    @property
    def open(self) -> tuple[int, ...]:
        """Members that may still come."""
        return tuple(m for m, length in enumerate(self.lengths) if not length and m not in self.given_up)

    @property
    def rollouts(self) -> tuple[Rollout, ...]:
        return tuple(r for r in self.members if r is not None)

    @property
    def rewards(self) -> npt.NDArray[np.float64]:
        return np.array([r.reward for r in self.rollouts], dtype=np.float64)

    @property
    def has_gradient(self) -> bool:
        """Whether any advantage differs from 0: with a greedy member also where only its reward differs."""
        return bool(np.ptp(self.rewards) != 0)

    @property
    def spread(self) -> float:
        """Root mean square of the rewards about their baseline: about their mean, so a standard deviation, or, with a
        greedy member, of the others about its reward."""
        rewards = self.rewards
        if self.has_baseline:
            return float(np.sqrt(np.mean((rewards[:-1] - rewards[-1]) ** 2)))
        return float(rewards.std())

    def waits_for(self, member: int, attempt: int) -> bool:
        """Whether a failure of this attempt is news: the member may still come, and no newer attempt is under way."""
        return member in self.open and attempt >= self.attempts[member]

    def as_open(self) -> OpenGroup:
        return OpenGroup(
            uid=self.uid, members=self.open, attempts=tuple(self.attempts[m] for m in self.open), note=self.note
        )

    def as_sample(self, *, use: int) -> RolloutGroup:
        """What the learner gets for its `use`-th use, counted from 1."""
        rollouts, baseline = self.rollouts, None
        if self.has_baseline:
            *sampled, baseline = rollouts
            rollouts = tuple(sampled)
        return RolloutGroup(
            uid=self.uid, rollouts=rollouts, baseline=baseline, times_sampled=use, probability=self.probability
        )


def arrived_bits(lengths: list[int], unused: list[tuple[int, int]]) -> int:
    """`Group.arrived`, from what is kept of the members."""
    taken = sum(1 << m for m, length in enumerate(lengths) if length)
    return taken | sum(1 << m for m in {m for m, _ in unused})


def is_well_formed(rollout: Rollout) -> bool:
    """Whether a rollout can be a member of some group: right types and shapes, finite numbers.

    What passes can also be written to the journal and read again: streamrl/wire.py has the same limits, so what came
    over the wire passes.
    """
    length = len(rollout.response_ids)
    ids = (rollout.prompt_ids, rollout.response_ids, rollout.versions)
    return (
        0 < len(rollout.uid) <= 256
        and rollout.member >= 0
        and rollout.attempt >= 0
        and length > 0
        and all(a.dtype == np.int32 and a.ndim == 1 and (len(a) == 0 or int(a.min()) >= 0) for a in ids)
        and rollout.old_log_probs.dtype == np.float32
        and rollout.old_log_probs.shape == rollout.versions.shape == (length,)
        and bool(np.isfinite(rollout.old_log_probs).all())
        and all(_is_finite(value) for value in (rollout.reward, *rollout.reward_parts.values()))
    )


def _is_finite(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)
