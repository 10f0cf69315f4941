"""The replay buffer: groups by uid, the staleness bound, the order of operations.

The in-process core: thread-safe (one lock, one condition), event-driven, no sockets, no asyncio; `buffers/server.py`
only wraps it. What is due is decided here; `buffers/shelf.py` knows where every group is.

    issue -> in_flight --last member inserted--> buffered --last use--> trained --commit--> final
                 |                                  |  ^                   |
                 |                                  |  +---- rollback -----+
                 +--> discarded <-------------------+
                      counted by reason: stale, failed, straggler, zero_variance, rolled_back, or the caller's

Invariants, after every call:
- no group with `group_staleness(v, min_version) > S` can be sampled, and `sample` checks again what it hands out;
- a uid is in exactly one state: issued == in_flight + buffered + trained + sum(discarded);
- a trained group keeps its payload until `commit` makes it final, so that `rollback` can bring it back;
- with a journal, what a call did is written before it returns; with journal=sync that holds for `insert`, `sample` and
  `rollback`, and the other calls, which acknowledge nothing, are written with the next of these or at `close`.

Blocking: only `sample`. It waits for complete groups and for the rate limiter; `insert` and `fail` (generators) end
the wait, `close` ends it with ClosedError, its own deadline with DeadlineExceededError.
"""

from __future__ import annotations

import pathlib
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import msgspec

from buffers.admission import Pace, groups_admitted
from buffers.group import Group, is_well_formed
from buffers.journal import StateRow, open_journal
from buffers.outcomes import InsertOutcome, OpenGroup, RefillAction, RefillDecision
from buffers.rate_limiter import LimiterSettings, RateLimiter
from buffers.selectors import Selector, make_selector
from buffers.shelf import Shelf
from streamrl.config import BufferConfig
from streamrl.errors import ClosedError, DeadlineExceededError, StaleRolloutError
from streamrl.records import BufferStats, Failure, Rollout, RolloutGroup, Wait
from streamrl.staleness import Lineage, group_staleness


class ReplayBuffer:
    """See the module docstring.

    Args:
        config: the `buffer` section of the run's config; `reconfigure` changes it while it runs.
        group_size: n, members of a group.
        has_baseline: the last of them is greedy, and there for the others to be compared with (`advantage: remax`).
        groups_per_step: B; with it `stats().capacity` follows the admission rule of streamrl/staleness.py, without it
            only the limits of this buffer.
        issued_only: reject rollouts of uids that were never issued. Otherwise the first rollout of a uid issues it,
            for producers in this process that hand out their own uids.
        journal_path: folder of the journal; needed unless config.journal is `off`. A journal that is there already is
            taken up: the buffer goes on where it was.
        clock: seconds, monotonic; for the ages and deadlines of groups.
        seed: of the random selectors.
    """

    def __init__(
        self,
        config: BufferConfig,
        *,
        group_size: int,
        has_baseline: bool = False,
        groups_per_step: int | None = None,
        issued_only: bool = False,
        journal_path: str | pathlib.Path | None = None,
        clock: Callable[[], float] = time.monotonic,
        seed: int = 0,
    ) -> None:
        self._config = config
        self._group_size = group_size
        self._groups_per_step = groups_per_step
        self._issued_only = issued_only
        self._clock = clock
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = False
        self._waits: dict[int, Wait] = {}
        self._policy_version = 0
        self._lineage = Lineage()
        self._next_order = 0
        self._limiter = RateLimiter(LimiterSettings.of(config, batch_size=groups_per_step or 1))
        self._journal = open_journal(config, journal_path, group_size=group_size)
        self._shelf = Shelf(group_size=group_size, has_baseline=has_baseline, journal=self._journal, now=clock())
        if self._journal is not None and (state := self._journal.state()) is not None:
            self._restore(state)
        self._selector = self._new_selector()

    # -- generators' side --

    def issue(self, uid: str, *, note: bytes = b"") -> None:
        """A uid was handed out: from now on it is in the ledger. `note` is kept for `open_groups`.

        Raises:
            ValueError: if it was issued before.
        """
        with self._operation():
            if self._shelf.arrived(uid) is not None:
                raise ValueError(f"uid ({uid}) was issued before; each prompt instance needs its own")
            self._shelf.issue(uid, now=self._clock(), note=note)

    def insert(self, rollout: Rollout) -> InsertOutcome:
        """Take one rollout. Idempotent: the same member again is a `duplicate`, whatever its attempt."""
        return self.insert_many([rollout])[0]

    def insert_many(self, rollouts: Sequence[Rollout], *, from_wire: bool = False) -> list[InsertOutcome]:
        """Like `insert` of each, with one write to the journal. `from_wire`: `wire.rollouts_from` has checked them."""
        with self._operation(acknowledges=True):
            return [self._insert(rollout, from_wire) for rollout in rollouts]

    def fail(self, failure: Failure) -> RefillDecision:
        """A member could not be generated or scored."""
        with self._operation():
            return self._fail(failure)

    def expire(self) -> list[str]:
        """Settle the groups whose deadline has passed: discard them as `straggler`, or, with
        incomplete_groups=min_members, use them as they are. Returns the uids whose open members are no longer wanted.
        """
        with self._operation():
            config, settled = self._config, []
            while (deadline := self._next_deadline()) is not None and deadline <= self._clock():
                group = self._shelf.groups[next(iter(self._shelf.in_flight))]
                settled.append(group.uid)
                if config.incomplete_groups == "min_members" and len(group.present) >= config.min_members:
                    self._complete(group)
                else:
                    self._discard(group, "straggler")
            return settled

    def next_deadline(self) -> float | None:
        """When `expire` will have something to do, by the buffer's clock; None if nothing is in flight."""
        with self._lock:
            return self._next_deadline()

    def discard_in_flight(self, reason: str) -> list[str]:
        """Discard every group in flight, e.g. at the end of the run. Returns their uids."""
        with self._operation():
            return self._discard_all(list(self._shelf.in_flight), reason)

    def open_groups(self) -> list[OpenGroup]:
        """The groups in flight, oldest first, with the members that are missing."""
        with self._lock:
            return [self._shelf.groups[uid].as_open() for uid in self._shelf.in_flight]

    # -- learner's side --

    def sample(self, num_groups: int, *, policy_version: int, timeout_s: float) -> list[RolloutGroup]:
        """Exactly `num_groups` complete, distinct groups for the step at `policy_version`, in order of issue.

        Every group has staleness <= S. The buffer's version becomes `policy_version`. With timeout_s=0 it never waits.

        Raises:
            DeadlineExceededError: not enough groups within `timeout_s`; nothing was taken.
            ClosedError: the buffer is closed or was closed meanwhile.
            ValueError: num_groups < 1, or a version below the buffer's own (call `rollback` first).
            StaleRolloutError: the bound is broken; must not happen, and must end the run.
        """
        if num_groups < 1:
            raise ValueError(f"num_groups ({num_groups}) must be at least 1")
        with self._operation(acknowledges=True):
            self._advance(policy_version)
            self._wait_for(num_groups, timeout_s)
            drawn = [self._selector.pop() for _ in range(num_groups)]
            groups = [(self._shelf.groups[uid], probability) for uid, probability in drawn]
            for group, _ in groups:
                staleness = group_staleness(policy_version, group.min_version)
                if staleness > self._config.max_staleness:
                    raise StaleRolloutError(
                        f"group {group.uid} has staleness {staleness} at policy_version {policy_version}, above "
                        f"buffer.max_staleness ({self._config.max_staleness})"
                    )
            groups.sort(key=lambda pair: pair[0].index)
            self._limiter.sample(num_groups)
            return [self._use(group, policy_version, probability) for group, probability in groups]

    def sampled_at(self, policy_version: int) -> list[RolloutGroup]:
        """The groups that the step at `policy_version` got, in the order in which `sample` returned them.

        For a server that was restarted inside a step. Empty once that version is committed.
        """
        with self._operation():
            return self._shelf.sampled_at(policy_version)

    def advance(self, policy_version: int) -> list[str]:
        """The learner is at `policy_version` now. Returns the uids that can no longer meet the bound and left.

        Raises:
            ValueError: a version below the buffer's own (call `rollback` first).
        """
        with self._operation():
            return self._advance(policy_version)

    def commit(self, policy_version: int) -> None:
        """A checkpoint at `policy_version` is written: groups sampled by earlier versions are final and freed."""
        with self._operation():
            self._shelf.commit(policy_version)

    def rollback(self, policy_version: int, *, incarnation: int | None = None) -> list[str]:
        """The learner goes on from its checkpoint at `policy_version`; every use at that version or later is undone.

        Args:
            policy_version: version of the restored weights; not below the last commit.
            incarnation: the learner's new one; None for the next number.

        Returns the uids discarded as `rolled_back`: they hold tokens of weights that no longer exist.

        Raises:
            ValueError: below the last commit: those groups are final.
        """
        with self._operation(acknowledges=True):
            shelf = self._shelf
            if policy_version < shelf.committed:
                raise ValueError(
                    f"policy_version ({policy_version}) is below the last commit ({shelf.committed}); groups trained "
                    "before that are final. Restore the checkpoint of the last commit or a newer one"
                )
            self._lineage.rollback(policy_version, incarnation=incarnation)
            self._policy_version = policy_version
            for group in shelf.sampled_since(policy_version):
                self._undo(group)
            shelf.undo_uses(policy_version)
            dead = [uid for uid in shelf.live if any(map(self._lineage.is_dead, shelf.groups[uid].rollouts))]
            self._discard_all(dead, "rolled_back")
            self._changed.notify_all()
            return dead

    # -- both --

    def reconfigure(self, config: BufferConfig) -> list[str]:
        """Change settings while it runs, all but `journal`. Returns the uids that a smaller bound discarded."""
        with self._operation():
            self._config = config = msgspec.structs.replace(config, journal=self._config.journal)
            self._limiter.settings = LimiterSettings.of(config, batch_size=self._groups_per_step or 1)
            self._selector = self._new_selector()
            for group in self._shelf.buffered():
                if len(group.uses) >= config.max_times_sampled:
                    self._selector.delete(group.uid)
                    self._shelf.retire(group)
            self._changed.notify_all()
            return self._sweep()

    def stats(self) -> BufferStats:
        """The ledger and the state at this instant; also after `close`."""
        with self._lock:
            shelf = self._shelf
            return msgspec.structs.replace(
                shelf.ledger.counts(),
                num_bytes=shelf.live_bytes + shelf.retained_bytes,
                oldest_group_s=shelf.oldest_group_s(self._clock()),
                policy_version=self._policy_version,
                max_staleness=self._config.max_staleness,
                capacity=self._capacity(),
                waits=list(self._waits.values()),
            )

    def capacity(self, *, policy_version: int) -> int:
        """Groups that may be issued now to a generator that serves `policy_version`, the learner's own or older.

        It counts from the generator's version: a group that an older version starts has to be used sooner.
        """
        with self._lock:
            return self._capacity(policy_version)

    def close(self) -> None:
        """Wake every waiter with ClosedError; later calls raise it too, except look-ups. Idempotent."""
        with self._lock:
            self._persist()
            self._shut()

    # -- order of operations, under the lock --

    @contextmanager
    def _operation(self, *, acknowledges: bool = False) -> Iterator[None]:
        """One call: the lock, and at its end one transaction of the journal with everything it changed.

        Waiting for the disk is left to calls after which somebody forgets a rollout or trains on it. What the others
        did may be lost: a uid is issued again, a failed member leased again, an old group swept again.
        """
        with self._lock:
            if self._closed:
                raise ClosedError("the replay buffer is closed")
            try:
                yield
            finally:
                if acknowledges or self._config.journal != "sync":
                    self._persist()

    def _persist(self) -> None:
        if self._journal is None or self._closed:
            return
        try:
            self._journal.write(self._state(), self._shelf.changes)
        except Exception:
            # What is in memory is ahead of what is on disk: nothing may be acknowledged any more.
            self._shut()
            raise
        self._shelf.changes.clear()

    def _shut(self) -> None:
        if not self._closed and self._journal is not None:
            self._journal.close()
        self._closed = True
        self._changed.notify_all()

    def _wait_for(self, num_groups: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        since, me = time.time(), threading.get_ident()
        try:
            while not self._limiter.can_sample(num_groups, size=len(self._selector)):
                missing = max(1, self._limiter.inserts_needed(num_groups, size=len(self._selector)))
                remaining = deadline - time.monotonic()
                if remaining <= 0:
                    raise DeadlineExceededError(
                        f"sample: waited {timeout_s:g} s for {num_groups} groups at policy_version "
                        f"{self._policy_version}; {missing} more must complete ({len(self._selector)} buffered, "
                        f"{len(self._shelf.in_flight)} in flight); generators could end this wait"
                    )
                self._waits[me] = Wait(
                    waiter="learner", waiting_for=f"{missing} more groups", owner="generators", since=since
                )
                self._changed.wait(remaining)
                if self._closed:
                    raise ClosedError("the replay buffer was closed while sample waited")
        finally:
            self._waits.pop(me, None)

    def _insert(self, rollout: Rollout, from_wire: bool) -> InsertOutcome:
        shelf = self._shelf
        if not (0 <= rollout.member < self._group_size and (from_wire or is_well_formed(rollout))):
            return self._reject("malformed")
        arrived = shelf.arrived(rollout.uid)
        if arrived is None:
            if self._issued_only:
                return self._reject("unknown_uid")
            if self._capacity() < 1:
                return self._reject("full")
            shelf.issue(rollout.uid, now=self._clock(), note=b"")
        elif arrived >> rollout.member & 1:
            shelf.ledger.duplicates += 1
            return InsertOutcome(status="duplicate")
        group = shelf.groups.get(rollout.uid)
        if group is None or group.state != "in_flight":
            shelf.turn_away(rollout.uid, rollout)
            return self._reject("late")
        min_version = rollout.min_version
        too_stale = group_staleness(self._policy_version, min_version) > self._config.max_staleness
        if too_stale or self._lineage.is_dead(rollout):
            reason = "stale" if too_stale else "rolled_back"
            shelf.turn_away(rollout.uid, rollout)
            self._discard(group, reason)
            return InsertOutcome(status="stale", reason=reason, group_discarded=True)
        shelf.add(group, rollout, min_version=min_version)
        if not group.open and not self._complete(group):
            return InsertOutcome(status="accepted", reason="zero_variance", group_discarded=True)
        return InsertOutcome(status="accepted")

    def _fail(self, failure: Failure) -> RefillDecision:
        def decide(action: RefillAction, attempt: int = failure.attempt) -> RefillDecision:
            return RefillDecision(action=action, uid=failure.uid, member=failure.member, attempt=attempt)

        member, config = failure.member, self._config
        group = self._shelf.groups.get(failure.uid)
        if group is None or group.state != "in_flight" or not group.waits_for(member, failure.attempt):
            return decide("ignored")
        self._shelf.ledger.failed[failure.reason] += 1
        self._shelf.touch(group)
        if config.incomplete_groups == "wait":
            return decide("wait")
        if config.incomplete_groups == "min_members" and len(group.present) + len(group.open) > config.min_members:
            group.given_up.add(member)
            if not group.open:
                self._complete(group)
            return decide("given_up")
        if failure.attempt + 1 >= config.max_attempts:
            self._discard(group, "failed")
            return decide("discarded")
        group.attempts[member] = failure.attempt + 1
        return decide("refill", failure.attempt + 1)

    def _advance(self, policy_version: int) -> list[str]:
        if policy_version < self._policy_version:
            raise ValueError(
                f"policy_version ({policy_version}) is below the buffer's ({self._policy_version}); a learner that was "
                f"restored from a checkpoint calls rollback({policy_version}) first"
            )
        self._policy_version = policy_version
        return self._sweep()

    def _sweep(self) -> list[str]:
        """The guarantee's first half: what can no longer meet the bound leaves the selector at once."""
        buckets = self._shelf.by_version
        oldest = self._policy_version - self._config.max_staleness
        uids = [uid for version in sorted(v for v in buckets if v < oldest) for uid in buckets[version]]
        return self._discard_all(uids, "stale")

    def _complete(self, group: Group) -> bool:
        """The last member is there, or will not come. False if the group was discarded for want of variance."""
        if self._config.drop_zero_variance and not group.has_gradient:
            self._discard(group, "zero_variance")
            return False
        self._shelf.complete(group, order=self._next_order)
        self._next_order += 1
        self._offer(self._selector, group)
        self._limiter.insert()
        self._changed.notify_all()
        return True

    def _use(self, group: Group, policy_version: int, probability: float) -> RolloutGroup:
        self._shelf.use(group, policy_version=policy_version, probability=probability)
        sample = group.as_sample(use=len(group.uses))
        if len(group.uses) >= self._config.max_times_sampled:
            self._shelf.retire(group)
        else:
            self._offer(self._selector, group)
        return sample

    def _undo(self, group: Group) -> None:
        """Forget the uses at the current version and later."""
        self._limiter.undo_discard(group.share)
        group.share = 0.0
        if group.state == "buffered":
            self._selector.delete(group.uid)
        self._limiter.undo_sample(self._shelf.restore(group, before=self._policy_version))
        self._offer(self._selector, group)

    def _discard(self, group: Group, reason: str) -> None:
        """A live group leaves; one that was trained on before is trained, with fewer uses than it might have had."""
        if group.state == "buffered":
            self._selector.delete(group.uid)
            group.share = self._limiter.discard(len(group.uses))
            if group.uses:
                self._shelf.retire(group)
                return
        self._shelf.discard(group, reason=reason)

    def _discard_all(self, uids: list[str], reason: str) -> list[str]:
        for uid in uids:
            self._discard(self._shelf.groups[uid], reason)
        return uids

    def _reject(self, reason: str) -> InsertOutcome:
        self._shelf.ledger.rejected[reason] += 1
        return InsertOutcome(status="rejected", reason=reason)

    def _next_deadline(self) -> float | None:
        if not self._shelf.in_flight:
            return None
        return self._shelf.groups[next(iter(self._shelf.in_flight))].issued_at + self._config.group_deadline_s

    def _capacity(self, generator_version: int | None = None) -> int:
        v = self._policy_version
        started_at = v if generator_version is None else min(generator_version, v)
        pace = None if self._groups_per_step is None else Pace(self._groups_per_step, v, started_at)
        return groups_admitted(self._config, self._shelf, self._limiter, pace)

    def _offer(self, selector: Selector, group: Group) -> None:
        priority = group.spread if self._config.selector == "prioritized" else 0.0
        selector.insert(group.uid, order=group.order, version=group.min_version, priority=priority)

    def _new_selector(self) -> Selector:
        config = self._config
        selector = make_selector(config.selector, rng=self._rng, priority_exponent=config.priority_exponent)
        for group in self._shelf.buffered():
            self._offer(selector, group)
        return selector

    def _state(self) -> StateRow:
        ledger = self._shelf.ledger
        return StateRow(
            group_size=self._group_size,
            policy_version=self._policy_version,
            committed=self._shelf.committed,
            incarnation=self._lineage.incarnation,
            rollbacks=self._lineage.rollbacks,
            next_order=self._next_order,
            limiter=(self._limiter.error, self._limiter.given_back),
            duplicates=ledger.duplicates,
            rejected=ledger.rejected,
            failed=ledger.failed,
        )

    def _restore(self, state: StateRow) -> None:
        self._policy_version = state.policy_version
        self._shelf.committed = state.committed
        self._lineage = Lineage(incarnation=state.incarnation, rollbacks=state.rollbacks)
        self._next_order = state.next_order
        self._limiter.error, self._limiter.given_back = state.limiter
        ledger = self._shelf.ledger
        ledger.duplicates = state.duplicates
        ledger.rejected.update(state.rejected)
        ledger.failed.update(state.failed)
