"""A state machine drives the replay buffer against a simple model: any order of calls, the guarantees after each step.

The model keeps, for every uid, its members and its state in plain dictionaries and decides everything by looking at all
of them. It is told which groups a sample returned and checks that they were allowed; everything else it predicts.
"""

from __future__ import annotations

import pathlib
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from stand_ins import make_rollout

from buffers.replay import ReplayBuffer
from streamrl.config import BufferConfig
from streamrl.errors import DeadlineExceededError
from streamrl.records import Failure, Rollout

UIDS = [f"uid-{i}" for i in range(20)]


@dataclass
class ModelGroup:
    issued_at: float
    members: dict[int, Rollout] = field(default_factory=dict)
    turned_away: set[int] = field(default_factory=set)
    attempts: dict[int, int] = field(default_factory=dict)
    given_up: set[int] = field(default_factory=set)
    state: str = "in_flight"  # buffered, trained, final, or a discard reason
    order: int = -1
    uses: list[int] = field(default_factory=list)

    @property
    def oldest(self) -> int:
        return min(int(r.versions.min()) for r in self.members.values())

    @property
    def is_live(self) -> bool:
        return self.state in ("in_flight", "buffered")


class ReplayMachine(RuleBasedStateMachine):
    @initialize(
        group_size=st.integers(1, 3),
        max_staleness=st.sampled_from([0, 1, 2, 3, 3]),
        mode=st.sampled_from(["refill", "wait", "min_members"]),
        max_attempts=st.integers(1, 3),
        max_times_sampled=st.integers(1, 3),
        drop_zero_variance=st.booleans(),
        selector=st.sampled_from(["fifo", "freshest", "uniform", "prioritized"]),
        journal=st.sampled_from(["off", "async"]),
    )
    def start(self, group_size: int, mode: str, journal: str, **choices: Any) -> None:
        self.n = group_size
        self.folder = tempfile.TemporaryDirectory()
        self.config = BufferConfig(
            incomplete_groups=mode,  # type: ignore[arg-type]
            min_members=min(2, group_size),
            group_deadline_s=10,
            journal=journal,  # type: ignore[arg-type]
            **choices,
        )
        self.now = 0.0
        self.version = 0
        self.committed = 0
        self.incarnation = 0
        self.undone: list[tuple[int, int]] = []
        self.groups: dict[str, ModelGroup] = {}
        self.steps: dict[int, list[str]] = {}  # version -> uids in order of sampling
        self.order = 0
        self.counts: Counter[str] = Counter()
        self.buffer = self.open()

    def open(self) -> ReplayBuffer:
        path = pathlib.Path(self.folder.name) / "journal"
        return ReplayBuffer(self.config, group_size=self.n, journal_path=path, clock=lambda: self.now)

    def teardown(self) -> None:
        if hasattr(self, "buffer"):
            self.buffer.close()
            self.folder.cleanup()

    # -- the model --

    def is_dead(self, rollout: Rollout) -> bool:
        newest = int(rollout.versions.max())
        return any(rollout.incarnation < began and newest > version for began, version in self.undone)

    def settle(self, group: ModelGroup, reason: str) -> None:
        """A live group leaves; one that was used before is trained."""
        if group.uses:
            group.state = "final" if max(group.uses) < self.committed else "trained"
        else:
            group.state = reason

    def complete(self, group: ModelGroup) -> None:
        if self.config.drop_zero_variance and len({r.reward for r in group.members.values()}) == 1:
            group.state = "zero_variance"
            return
        group.state = "buffered"
        group.order = self.order
        self.order += 1

    def complete_if_nothing_is_open(self, group: ModelGroup) -> None:
        if len(set(group.members) | group.given_up) == self.n:
            self.complete(group)

    def sweep(self) -> set[str]:
        limit = self.version - self.config.max_staleness
        gone = {u for u, g in self.groups.items() if g.is_live and g.members and g.oldest < limit}
        for uid in gone:
            self.settle(self.groups[uid], "stale")
        return gone

    # -- any order of calls --

    @rule(uid=st.sampled_from(UIDS))
    def issue(self, uid: str) -> None:
        if uid in self.groups:
            with pytest.raises(ValueError, match="issued before"):
                self.buffer.issue(uid)
        else:
            self.buffer.issue(uid)
            self.groups[uid] = ModelGroup(issued_at=self.now)

    @rule(
        uid=st.sampled_from(UIDS),
        member=st.integers(-1, 3),
        attempt=st.integers(0, 3),
        ages=st.lists(st.integers(-1, 4), min_size=1, max_size=3),
        past_lives=st.sampled_from([0, 0, 0, 1, 2]),
        reward=st.sampled_from([0.0, 1.0]),
    )
    def insert(self, uid: str, member: int, attempt: int, ages: list[int], past_lives: int, reward: float) -> None:
        versions = np.array([max(0, self.version - age) for age in ages], dtype=np.int32)
        incarnation = max(0, self.incarnation - past_lives)
        self.insert_and_check(
            make_rollout(
                uid, member, attempt, length=len(ages), versions=versions, incarnation=incarnation, reward=reward
            )
        )

    @rule(uid=st.sampled_from(UIDS), age=st.integers(0, 1), flat=st.sampled_from([False, False, False, True]))
    def insert_what_is_missing(self, uid: str, age: int, flat: bool) -> None:
        """Random members alone would complete few groups."""
        group = self.groups.get(uid, ModelGroup(issued_at=self.now))
        for member in range(self.n):
            if group.state == "in_flight" and member not in group.members:
                version, reward = max(0, self.version - age), 0.0 if flat else float(member)
                attempt = group.attempts.get(member, 0)
                life = {"version": version, "incarnation": self.incarnation}
                self.insert_and_check(make_rollout(uid, member, attempt, reward=reward, **life))

    def insert_and_check(self, rollout: Rollout) -> None:
        outcome = self.buffer.insert(rollout)
        assert (outcome.status, outcome.reason) == self.predict_insert(rollout)
        assert outcome.group_discarded == (outcome.status == "stale" or outcome.reason == "zero_variance")

    def predict_insert(self, rollout: Rollout) -> tuple[str, str]:
        if not 0 <= rollout.member < self.n:
            self.counts["malformed"] += 1
            return "rejected", "malformed"
        group = self.groups.setdefault(rollout.uid, ModelGroup(issued_at=self.now))
        if rollout.member in group.members or rollout.member in group.turned_away:
            self.counts["duplicate"] += 1
            return "duplicate", ""
        if group.state != "in_flight":
            group.turned_away.add(rollout.member)
            self.counts["late"] += 1
            return "rejected", "late"
        if self.version - int(rollout.versions.min()) > self.config.max_staleness or self.is_dead(rollout):
            too_old = self.version - int(rollout.versions.min()) > self.config.max_staleness
            group.state = "stale" if too_old else "rolled_back"
            group.turned_away.add(rollout.member)
            return "stale", group.state
        group.members[rollout.member] = rollout
        group.given_up.discard(rollout.member)
        group.attempts[rollout.member] = max(rollout.attempt, group.attempts.get(rollout.member, 0))
        self.complete_if_nothing_is_open(group)
        return "accepted", "zero_variance" if group.state == "zero_variance" else ""

    @rule(uid=st.sampled_from(UIDS), member=st.integers(0, 3), attempt=st.integers(0, 3))
    def fail(self, uid: str, member: int, attempt: int) -> None:
        decision = self.buffer.fail(Failure(uid=uid, member=member, attempt=attempt, reason="engine_error"))
        assert (decision.action, decision.attempt) == self.predict_fail(uid, member, attempt)

    def predict_fail(self, uid: str, member: int, attempt: int) -> tuple[str, int]:
        group = self.groups.get(uid)
        if group is None or group.state != "in_flight" or member >= self.n:
            return "ignored", attempt
        if member in group.members or member in group.given_up or attempt < group.attempts.get(member, 0):
            return "ignored", attempt
        self.counts["failed"] += 1
        if self.config.incomplete_groups == "wait":
            return "wait", attempt
        if self.config.incomplete_groups == "min_members" and self.n - len(group.given_up) > self.config.min_members:
            group.given_up.add(member)
            self.complete_if_nothing_is_open(group)
            return "given_up", attempt
        if attempt + 1 >= self.config.max_attempts:
            group.state = "failed"
            return "discarded", attempt
        group.attempts[member] = attempt + 1
        return "refill", attempt + 1

    @rule(num_groups=st.sampled_from([1, 1, 2, 3]), jump=st.sampled_from([0, 0, 0, 1]))
    def sample(self, num_groups: int, jump: int) -> None:
        self.version += jump
        self.sweep()
        held = {uid: g for uid, g in self.groups.items() if g.state == "buffered"}
        if len(held) < num_groups:
            with pytest.raises(DeadlineExceededError):
                self.buffer.sample(num_groups, policy_version=self.version, timeout_s=0)
            return
        samples = self.buffer.sample(num_groups, policy_version=self.version, timeout_s=0)
        uids = [s.uid for s in samples]
        assert len(set(uids)) == num_groups and set(uids) <= set(held)
        if self.config.selector == "fifo":
            assert set(uids) == set(sorted(held, key=lambda uid: held[uid].order)[:num_groups])
        if self.config.selector == "freshest":
            best = sorted(held, key=lambda uid: (-held[uid].oldest, held[uid].order))
            assert set(uids) == set(best[:num_groups])
        for group in samples:
            self.check_sample(group.uid, group.rollouts)
            model = held[group.uid]
            model.uses.append(self.version)
            step = self.steps.setdefault(self.version, [])
            step += [group.uid] if group.uid not in step else []
            assert group.times_sampled == len(model.uses)
            assert 0 < group.probability <= 1
            if len(model.uses) >= self.config.max_times_sampled:
                self.settle(model, "")

    def check_sample(self, uid: str, rollouts: tuple[Rollout, ...]) -> None:
        model = self.groups[uid]
        assert self.version - min(int(r.versions.min()) for r in rollouts) <= self.config.max_staleness
        assert [r.member for r in rollouts] == sorted(model.members)
        assert len(rollouts) == self.n or self.config.incomplete_groups == "min_members"
        assert len(rollouts) >= self.config.min_members or self.config.incomplete_groups != "min_members"
        for ours in rollouts:
            theirs = model.members[ours.member]
            assert ours.uid == uid and ours.attempt == theirs.attempt and ours.reward == theirs.reward
            np.testing.assert_array_equal(ours.versions, theirs.versions)
            assert not self.is_dead(ours)

    @rule(steps=st.sampled_from([0, 1, 1, 2]))
    def advance(self, steps: int) -> None:
        self.version += steps
        expected = self.sweep()
        assert set(self.buffer.advance(self.version)) == expected

    @precondition(lambda self: self.version > 0)
    @rule()
    def an_older_version_is_refused(self) -> None:
        with pytest.raises(ValueError, match="rollback"):
            self.buffer.advance(self.version - 1)

    @rule(back=st.sampled_from([0, 1, 2, 2]))
    def commit(self, back: int) -> None:
        version = max(0, self.version - back)
        self.buffer.commit(version)
        self.committed = max(self.committed, version)
        for group in self.groups.values():
            if group.state == "trained" and max(group.uses) < self.committed:
                group.state = "final"

    @rule(back=st.integers(0, 3))
    def rollback(self, back: int) -> None:
        version = self.version - back
        if version < self.committed:
            with pytest.raises(ValueError, match="final"):
                self.buffer.rollback(version)
            return
        gone = self.buffer.rollback(version)
        self.version = version
        self.incarnation += 1
        self.undone.append((self.incarnation, version))
        self.steps = {v: uids for v, uids in self.steps.items() if v < version}
        for group in self.groups.values():
            if any(use >= version for use in group.uses):
                group.uses = [use for use in group.uses if use < version]
                group.state = "buffered"
        expected = set()
        for uid, group in self.groups.items():
            if group.is_live and any(map(self.is_dead, group.members.values())):
                expected.add(uid)
                self.settle(group, "rolled_back")
        assert set(gone) == expected

    @rule(seconds=st.sampled_from([0.0, 1.0, 4.0]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        expected = set()
        for uid, group in self.groups.items():
            if group.state == "in_flight" and group.issued_at + self.config.group_deadline_s <= self.now:
                expected.add(uid)
        settled = self.buffer.expire()
        assert set(settled) == expected
        for uid in settled:
            group = self.groups[uid]
            if self.config.incomplete_groups == "min_members" and len(group.members) >= self.config.min_members:
                self.complete(group)
            else:
                group.state = "straggler"

    @rule(chance=st.integers(0, 5))
    def discard_in_flight(self, chance: int) -> None:
        if chance:
            return
        expected = {uid for uid, g in self.groups.items() if g.state == "in_flight"}
        assert set(self.buffer.discard_in_flight("the end")) == expected
        for uid in expected:
            self.groups[uid].state = "the end"

    @rule(max_staleness=st.sampled_from([0, 1, 2, 3, 3, 3]))
    def change_the_bound(self, max_staleness: int) -> None:
        self.config = msgspec.structs.replace(self.config, max_staleness=max_staleness)
        assert set(self.buffer.reconfigure(self.config)) == self.sweep()

    @precondition(lambda self: self.config.journal != "off")
    @rule()
    def crash_and_reload(self) -> None:
        """Nothing is flushed at close that a SIGKILL would lose (tests/test_journal.py kills real processes)."""
        self.buffer.close()
        self.buffer = self.open()
        for group in self.groups.values():
            group.issued_at = self.now

    # -- after each step --

    @invariant()
    def the_ledger_adds_up(self) -> None:
        if not hasattr(self, "buffer"):
            return
        stats = self.buffer.stats()
        states = Counter(g.state for g in self.groups.values())
        assert stats.issued == len(self.groups)
        assert stats.issued == stats.in_flight + stats.buffered + stats.trained + sum(stats.discarded.values())
        assert stats.in_flight == states.pop("in_flight", 0)
        assert stats.buffered == states.pop("buffered", 0)
        assert stats.trained == states.pop("trained", 0) + states.pop("final", 0)
        assert stats.discarded == states
        assert stats.duplicate_rollouts == self.counts["duplicate"]
        assert sum(stats.rejected_rollouts.values()) == self.counts["malformed"] + self.counts["late"]
        assert sum(stats.failed_members.values()) == self.counts["failed"]
        assert stats.policy_version == self.version

    @invariant()
    def every_rollout_has_one_fate(self) -> None:
        if not hasattr(self, "buffer"):
            return
        fates: Counter[str] = Counter()
        for group in self.groups.values():
            fate = {"in_flight": "buffered", "buffered": "buffered", "trained": "trained", "final": "trained"}
            fates[fate.get(group.state, "discarded")] += len(group.members)
            fates["discarded"] += len(group.turned_away)
        stats = self.buffer.stats()
        assert +Counter(stats.generated_rollouts) == +fates
        assert stats.inserted_rollouts == sum(len(g.members) for g in self.groups.values())
        for fate, lengths in stats.response_lengths.items():
            assert sum(lengths.values()) == fates[fate]

    @invariant()
    def bytes_are_those_of_what_is_held(self) -> None:
        if not hasattr(self, "buffer"):
            return
        held = {"in_flight", "buffered"} | ({"trained"} if self.config.journal == "off" else set())
        groups = [g for g in self.groups.values() if g.state in held]
        assert self.buffer.stats().num_bytes == sum(r.num_bytes for g in groups for r in g.members.values())

    @invariant()
    def what_a_step_got_can_be_read_again(self) -> None:
        if not hasattr(self, "buffer"):
            return
        for version in range(self.committed, self.version + 1):
            assert [g.uid for g in self.buffer.sampled_at(version)] == self.steps.get(version, [])


TestReplayMachine = ReplayMachine.TestCase
TestReplayMachine.settings = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
