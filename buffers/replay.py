"""The replay buffer: groups by uid, the staleness bound, the order of operations.

The in-process core: thread-safe (one lock, one condition), event-driven, no sockets, no asyncio; `buffers/server.py` only wraps it.

    issue(uid) -> in_flight --last member inserted--> buffered --sampled for the last time--> trained --commit--> final
                     |                                   |  ^                                   |
                     +---- failed, straggler, stale -----+  +----------- rollback --------------+
                           zero_variance, rolled_back, ... = discarded, counted by reason

Invariants, after every call:
- no group with `group_staleness(v, min_version) > S` is in the selector, and `sample` checks again before it hands a group out;
- a uid is in exactly one state: issued == in_flight + buffered + trained + sum(discarded);
- a trained group keeps its payload until `commit` makes it final, so that `rollback` can bring it back.

Blocking: only `sample`. It waits for complete groups and for the rate limiter; `insert` and `fail` (generators) end the wait, `close`
ends it with ClosedError, its own deadline with DeadlineExceededError.

Incarnations: `rollback(v)` means that a new life of the learner goes on from version v. Weights newer than v of an
earlier life no longer exist; groups that hold tokens of theirs are discarded as `rolled_back`, now or when they arrive.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Literal

import msgspec
import numpy as np

from buffers.group import Group
from buffers.ledger import Ledger
from buffers.rate_limiter import LimiterSettings, RateLimiter
from buffers.selectors import Selector, make_selector
from streamrl.config import BufferConfig
from streamrl.errors import ClosedError, DeadlineExceededError, StaleRolloutError
from streamrl.records import BufferStats, Failure, Rollout, RolloutGroup, Wait
from streamrl.staleness import admission_capacity, group_staleness


class InsertOutcome(msgspec.Struct, frozen=True, kw_only=True):
    """What became of a rollout. Whatever the status, the buffer has settled it: the sender may forget the rollout,
    except after `rejected` with reason `full`.

    Example: InsertOutcome(status="stale", reason="stale", group_discarded=True).
    """

    status: Literal["accepted", "duplicate", "stale", "rejected"]
    reason: str = (
        ""  # stale: stale | rolled_back; rejected: malformed | unknown_uid | late | full; accepted: zero_variance
    )
    group_discarded: bool = False  # by this insert: other members of the uid need not be generated any more


class RefillDecision(msgspec.Struct, frozen=True, kw_only=True):
    """What to do about a failed member.

    `refill`: lease (uid, member) again as `attempt`. `wait`: nobody generates it again, the group waits until its deadline. `given_up`: the group
    goes on without it. `discarded`: the group was discarded. `ignored`: the failure is of no concern any more.
    """

    action: Literal["refill", "wait", "given_up", "discarded", "ignored"]
    uid: str
    member: int
    attempt: int  # of the new lease with `refill`, else of the failure


class ReplayBuffer:
    """See the module docstring.

    Args:
        config: the `buffer` section of the run's config; `reconfigure` changes it while it runs.
        group_size: n, members of a group.
        groups_per_step: B; with it `stats().capacity` follows the admission rule of streamrl/staleness.py, without it only
            the limits of this buffer.
        issued_only: reject rollouts of uids that were never issued. Otherwise the first rollout of a uid issues it,
            for producers in this process that hand out their own uids.
        clock: seconds, monotonic; for the ages and deadlines of groups.
        seed: of the random selectors.
    """

    def __init__(
        self,
        config: BufferConfig,
        *,
        group_size: int,
        groups_per_step: int | None = None,
        issued_only: bool = False,
        clock: Callable[[], float] = time.monotonic,
        seed: int = 0,
    ) -> None:
        if group_size < 1:
            raise ValueError(f"group_size ({group_size}) must be at least 1")
        self._config = config
        self._group_size = group_size
        self._groups_per_step = groups_per_step
        self._issued_only = issued_only
        self._clock = clock
        self._rng = random.Random(seed)
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._closed = False

        self._ledger = Ledger()
        self._groups: dict[str, Group] = {}  # in_flight, buffered, and trained but not final
        self._final: dict[str, tuple[str, int]] = {}  # uid -> (trained | discard reason, members that arrived as bits)
        self._in_flight: OrderedDict[str, None] = OrderedDict()  # by time of issue
        self._live: OrderedDict[str, None] = OrderedDict()  # in flight or buffered, by time of issue
        self._by_version: dict[int, dict[str, None]] = {}  # oldest token version -> uids in flight or buffered
        self._uses: dict[int, dict[str, None]] = {}  # policy version -> uids it sampled, not yet committed
        self._selector: Selector = self._new_selector()
        self._limiter = RateLimiter(self._limiter_settings())
        self._waits: dict[int, Wait] = {}

        self._policy_version = 0
        self._committed = 0
        self._incarnation = 0
        self._rollbacks: list[tuple[int, int]] = []  # (incarnation that began, version it went on from)
        self._next_order = 0
        self._live_bytes = 0  # in flight and buffered
        self._retained_bytes = 0  # trained, not yet committed
        self._largest_rollout = 0
        self._missing_members = 0  # of groups in flight
        self._buffered_uses = 0  # uses so far of buffered groups

    # -- generators' side --

    def issue(self, uid: str) -> None:
        """A uid was handed out: from now on it is in the ledger.

        Raises:
            ValueError: if it was issued before.
        """
        with self._operation():
            if uid in self._groups or uid in self._final:
                raise ValueError(f"uid ({uid}) was issued before; each prompt instance needs its own")
            self._issue(uid)

    def insert(self, rollout: Rollout) -> InsertOutcome:
        """Take one rollout. Idempotent: the same member again is a `duplicate`, whatever its attempt."""
        with self._operation():
            return self._insert(rollout)

    def fail(self, failure: Failure) -> RefillDecision:
        """A member could not be generated or scored."""
        with self._operation():
            return self._fail(failure)

    def expire(self) -> list[str]:
        """Settle the groups whose deadline has passed.

        Returns the uids whose open members are no longer wanted: discarded as `straggler`, or, with
        incomplete_groups=min_members, used without them.
        """
        with self._operation():
            settled = []
            now = self._clock()
            while self._in_flight:
                group = self._groups[next(iter(self._in_flight))]
                if group.issued_at + self._config.group_deadline_s > now:
                    break
                settled.append(group.uid)
                if self._config.incomplete_groups == "min_members" and group.num_members >= self._config.min_members:
                    self._complete(group)
                else:
                    self._discard(group, "straggler")
            return settled

    def next_deadline(self) -> float | None:
        """When, by the buffer's clock, `expire` will have something to do; None if nothing is in flight."""
        with self._lock:
            if not self._in_flight:
                return None
            return self._groups[next(iter(self._in_flight))].issued_at + self._config.group_deadline_s

    def discard_in_flight(self, reason: str) -> list[str]:
        """Discard every group in flight, e.g. at the end of the run. Returns their uids."""
        with self._operation():
            uids = list(self._in_flight)
            for uid in uids:
                self._discard(self._groups[uid], reason)
            return uids

    # -- learner's side --

    def sample(self, num_groups: int, *, policy_version: int, timeout_s: float) -> list[RolloutGroup]:
        """Exactly `num_groups` complete, distinct groups for the step at `policy_version`, in order of issue.

        Every group has staleness <= S. The buffer's version becomes `policy_version`. With timeout_s=0 it does not wait.

        Raises:
            DeadlineExceededError: not enough groups within `timeout_s`; nothing was taken.
            ClosedError: the buffer is closed or was closed meanwhile.
            ValueError: num_groups < 1, or a version below the buffer's own (call `rollback` first).
            StaleRolloutError: the bound is broken; must not happen, and must end the run.
        """
        if num_groups < 1:
            raise ValueError(f"num_groups ({num_groups}) must be at least 1")
        with self._operation():
            self._advance(policy_version)
            self._wait_for(num_groups, timeout_s)
            drawn = [self._selector.pop() for _ in range(num_groups)]
            groups = [(self._groups[uid], probability) for uid, probability in drawn]
            for group, _ in groups:
                assert group.min_version is not None
                staleness = group_staleness(policy_version, group.min_version)
                if staleness > self._config.max_staleness:
                    raise StaleRolloutError(
                        f"group {group.uid} has staleness {staleness} at policy_version {policy_version}, above "
                        f"buffer.max_staleness ({self._config.max_staleness})"
                    )
            groups.sort(key=lambda pair: pair[0].index)
            self._limiter.sample(num_groups)
            return [self._use(group, policy_version, probability) for group, probability in groups]

    def advance(self, policy_version: int) -> list[str]:
        """The learner is at `policy_version` now. Returns the uids discarded because they can no longer meet the bound.

        Raises:
            ValueError: a version below the buffer's own (call `rollback` first).
        """
        with self._operation():
            return self._advance(policy_version)

    def commit(self, policy_version: int) -> None:
        """A checkpoint at `policy_version` is written: groups sampled by earlier versions are final and freed."""
        with self._operation():
            self._committed = max(self._committed, policy_version)
            for version in [v for v in self._uses if v < policy_version]:
                for uid in self._uses.pop(version):
                    group = self._groups.get(uid)
                    if group is not None and group.state == "trained" and group.uses[-1] < self._committed:
                        self._finish(group, "trained")

    def rollback(self, policy_version: int, *, incarnation: int | None = None) -> list[str]:
        """The learner goes on from its checkpoint at `policy_version`; every use at that version or later is undone.

        Args:
            policy_version: version of the restored weights; not below the last commit.
            incarnation: the learner's new one; None for the next number.

        Returns the uids discarded as `rolled_back`: they hold tokens of weights that no longer exist.

        Raises:
            ValueError: below the last commit: those groups are final.
        """
        with self._operation():
            if policy_version < self._committed:
                raise ValueError(
                    f"policy_version ({policy_version}) is below the last commit ({self._committed}); groups trained "
                    "before that are final. Restore the checkpoint of the last commit or a newer one"
                )
            self._incarnation = self._incarnation + 1 if incarnation is None else incarnation
            self._rollbacks.append((self._incarnation, policy_version))
            undone: dict[str, None] = {}
            for version in [v for v in self._uses if v >= policy_version]:
                undone.update(self._uses.pop(version))
            for uid in undone:
                self._undo(self._groups[uid], policy_version)
            self._live = OrderedDict.fromkeys(sorted(self._live, key=lambda uid: self._groups[uid].index))
            self._policy_version = policy_version
            discarded = [uid for uid in self._live if self._is_dead(self._groups[uid].rollouts)]
            for uid in discarded:
                self._discard(self._groups[uid], "rolled_back")
            self._changed.notify_all()
            return discarded

    # -- both --

    def reconfigure(self, config: BufferConfig) -> list[str]:
        """Change settings while it runs; they hold from now on. Returns the uids discarded by a smaller bound.

        Raises:
            ValueError: the journal cannot be changed while it runs.
        """
        with self._operation():
            if config.journal != self._config.journal:
                raise ValueError(f"buffer.journal ({config.journal}) cannot change while the buffer runs")
            old, self._config = self._config, config
            self._limiter.settings = self._limiter_settings()
            if (old.selector, old.priority_exponent) != (config.selector, config.priority_exponent):
                self._selector = self._new_selector()
                for group in self._buffered_groups():
                    self._offer(group)
            for group in self._buffered_groups():
                if len(group.uses) >= config.max_times_sampled:
                    self._selector.delete(group.uid)
                    self._retire(group)
            discarded = self._sweep()
            self._changed.notify_all()
            return discarded

    def stats(self) -> BufferStats:
        """The ledger and the state at this instant; also after `close`."""
        with self._lock:
            ledger = self._ledger
            assert ledger.balanced, f"the ledger does not add up: {ledger.issued} issued, {ledger.groups}"
            oldest = self._groups[next(iter(self._live))].issued_at if self._live else None
            return BufferStats(
                issued=ledger.issued,
                in_flight=ledger.groups["in_flight"],
                buffered=ledger.groups["buffered"],
                trained=ledger.groups["trained"],
                discarded=dict(ledger.discarded),
                inserted_rollouts=ledger.inserted,
                duplicate_rollouts=ledger.duplicates,
                rejected_rollouts=dict(ledger.rejected),
                failed_members=dict(ledger.failed),
                num_bytes=self._live_bytes + self._retained_bytes,
                oldest_group_s=0.0 if oldest is None else max(0.0, self._clock() - oldest),
                policy_version=self._policy_version,
                max_staleness=self._config.max_staleness,
                capacity=self._capacity(),
                generated_tokens=dict(ledger.tokens),
                generated_rollouts=dict(ledger.rollouts),
                waits=list(self._waits.values()),
            )

    def close(self) -> None:
        """Wake every waiter with ClosedError; later calls raise it too, except `stats`. Idempotent."""
        with self._lock:
            self._closed = True
            self._changed.notify_all()

    # -- order of operations, under the lock --

    @contextmanager
    def _operation(self) -> Iterator[None]:
        with self._lock:
            if self._closed:
                raise ClosedError("the replay buffer is closed")
            yield

    def _wait_for(self, num_groups: int, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        token = object()
        while not self._limiter.can_sample(num_groups, size=len(self._selector)):
            missing = max(1, self._limiter.inserts_needed(num_groups, size=len(self._selector)))
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                self._waits.pop(id(token), None)
                raise DeadlineExceededError(
                    f"sample: waited {timeout_s:g} s for {num_groups} groups at policy_version {self._policy_version}; "
                    f"{missing} more must complete ({len(self._selector)} buffered, {len(self._in_flight)} in flight); "
                    "generators could end this wait"
                )
            if id(token) not in self._waits:
                self._waits[id(token)] = Wait(
                    waiter="learner", waiting_for=f"{missing} more groups", owner="generators", since=time.time()
                )
            self._changed.wait(remaining)
            if self._closed:
                self._waits.pop(id(token), None)
                raise ClosedError("the replay buffer was closed while sample waited")
        self._waits.pop(id(token), None)

    def _issue(self, uid: str) -> Group:
        n = self._group_size
        group = Group(
            uid=uid,
            index=self._ledger.issued,
            issued_at=self._clock(),
            members=[None] * n,
            attempts=[0] * n,
            lengths=[0] * n,
        )
        self._groups[uid] = group
        self._in_flight[uid] = None
        self._live[uid] = None
        self._missing_members += n
        self._ledger.issue()
        return group

    def _insert(self, rollout: Rollout) -> InsertOutcome:
        if not self._is_well_formed(rollout):
            return self._reject("malformed")
        length = len(rollout.response_ids)
        bit = 1 << rollout.member
        if rollout.uid in self._final:
            fate, seen = self._final[rollout.uid]
            if seen & bit:
                return self._duplicate()
            self._final[rollout.uid] = (fate, seen | bit)
            self._ledger.add_rollout(length, "discarded")
            return self._reject("late")
        group = self._groups.get(rollout.uid)
        if group is None:
            if self._issued_only:
                return self._reject("unknown_uid")
            if self._capacity() < 1:
                return self._reject("full")
            group = self._issue(rollout.uid)
        if group.seen & bit:
            return self._duplicate()
        if group.state != "in_flight":  # complete without this member
            group.late |= bit
            self._ledger.add_rollout(length, "discarded")
            return self._reject("late")
        if self._is_dead([rollout]):
            return self._too_old(group, rollout, "rolled_back")
        if group_staleness(self._policy_version, rollout.min_version) > self._config.max_staleness:
            return self._too_old(group, rollout, "stale")
        self._add(group, rollout)
        self._ledger.inserted += 1
        self._ledger.add_rollout(length, "buffered")
        if group.num_open == 0:
            self._complete(group)
        if rollout.uid not in self._groups:
            return InsertOutcome(status="accepted", reason="zero_variance", group_discarded=True)
        return InsertOutcome(status="accepted")

    def _fail(self, failure: Failure) -> RefillDecision:
        def decide(
            action: Literal["refill", "wait", "given_up", "discarded", "ignored"], attempt: int
        ) -> RefillDecision:
            return RefillDecision(action=action, uid=failure.uid, member=failure.member, attempt=attempt)

        group = self._groups.get(failure.uid)
        if (
            group is None
            or group.state != "in_flight"
            or not 0 <= failure.member < self._group_size
            or group.lengths[failure.member]
            or failure.member in group.given_up
            or failure.attempt < group.attempts[failure.member]
        ):
            return decide("ignored", failure.attempt)
        self._ledger.failed[failure.reason] += 1
        mode = self._config.incomplete_groups
        if mode == "wait":
            return decide("wait", failure.attempt)
        if mode == "min_members" and group.num_members + group.num_open > self._config.min_members:
            group.given_up.add(failure.member)
            if group.num_open == 0:
                self._complete(group)
            return decide("given_up", failure.attempt)
        if failure.attempt + 1 >= self._config.max_attempts:
            self._discard(group, "failed")
            return decide("discarded", failure.attempt)
        group.attempts[failure.member] = failure.attempt + 1
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
        oldest = self._policy_version - self._config.max_staleness
        uids = [
            uid for version in sorted(v for v in self._by_version if v < oldest) for uid in self._by_version[version]
        ]
        for uid in uids:
            self._discard(self._groups[uid], "stale")
        return uids

    def _add(self, group: Group, rollout: Rollout) -> None:
        self._unindex(group)
        group.add(rollout)
        self._index(group)
        self._live_bytes += rollout.num_bytes
        self._largest_rollout = max(self._largest_rollout, rollout.num_bytes)
        self._missing_members -= 1

    def _complete(self, group: Group) -> None:
        """The last member is there, or will not come."""
        if self._config.drop_zero_variance and float(np.ptp(group.rewards)) == 0.0:
            self._discard(group, "zero_variance")
            return
        self._land(group)
        self._ledger.move(group.present_lengths, "in_flight", "buffered")
        group.state = "buffered"
        group.order = self._next_order
        self._next_order += 1
        self._offer(group)
        self._limiter.insert()
        self._changed.notify_all()

    def _use(self, group: Group, policy_version: int, probability: float) -> RolloutGroup:
        group.uses.append(policy_version)
        self._uses.setdefault(policy_version, {})[group.uid] = None
        self._buffered_uses += 1
        if len(group.uses) >= self._config.max_times_sampled:
            self._retire(group)
        else:
            self._offer(group)
        return group.as_sample(probability=probability)

    def _retire(self, group: Group) -> None:
        """A buffered group, out of the selector, is not sampled any more: it is trained, and kept until it is final."""
        self._unshelve(group)
        self._buffered_uses -= len(group.uses)
        self._live_bytes -= group.num_bytes
        self._retained_bytes += group.num_bytes
        self._ledger.move(group.present_lengths, "buffered", "trained")
        group.state = "trained"
        if group.uses[-1] < self._committed:
            self._finish(group, "trained")

    def _undo(self, group: Group, policy_version: int) -> None:
        """Forget the uses at `policy_version` and later; a trained group is buffered again."""
        kept = [v for v in group.uses if v < policy_version]
        self._limiter.undo_sample(len(group.uses) - len(kept))
        if group.state == "trained":
            self._limiter.undo_discard(group.share)
            group.share = 0.0
            self._retained_bytes -= group.num_bytes
            self._live_bytes += group.num_bytes
            self._ledger.move(group.present_lengths, "trained", "buffered")
            group.state = "buffered"
            self._live[group.uid] = None
            self._index(group)
            self._offer(group)
        else:
            self._buffered_uses -= len(group.uses)
        group.uses = kept
        self._buffered_uses += len(kept)

    def _discard(self, group: Group, reason: str) -> None:
        """A live group leaves for good; one that was trained on before counts as trained, with fewer uses."""
        if group.state == "buffered":
            self._selector.delete(group.uid)
            group.share = self._limiter.discard(len(group.uses))
            if group.uses:
                self._retire(group)
                return
        else:
            self._land(group)
        self._unshelve(group)
        self._live_bytes -= group.num_bytes
        self._ledger.move(group.present_lengths, group.state, "discarded", reason=reason)
        self._finish(group, reason)

    def _finish(self, group: Group, fate: str) -> None:
        if group.state == "trained":
            self._retained_bytes -= group.num_bytes
        group.state = "trained" if fate == "trained" else "discarded"
        self._final[group.uid] = (fate, group.seen)
        del self._groups[group.uid]

    # -- indexes --

    def _land(self, group: Group) -> None:
        del self._in_flight[group.uid]
        self._missing_members -= len(group.lengths) - group.num_members

    def _unshelve(self, group: Group) -> None:
        del self._live[group.uid]
        self._unindex(group)

    def _index(self, group: Group) -> None:
        if group.min_version is not None:
            self._by_version.setdefault(group.min_version, {})[group.uid] = None

    def _unindex(self, group: Group) -> None:
        if group.min_version is not None:
            bucket = self._by_version[group.min_version]
            del bucket[group.uid]
            if not bucket:
                del self._by_version[group.min_version]

    def _offer(self, group: Group) -> None:
        assert group.min_version is not None
        priority = float(group.rewards.std())
        self._selector.insert(group.uid, order=group.order, version=group.min_version, priority=priority)

    def _buffered_groups(self) -> list[Group]:
        return [self._groups[uid] for uid in self._live if self._groups[uid].state == "buffered"]

    # -- rules --

    def _is_well_formed(self, r: Rollout) -> bool:
        length = len(r.response_ids)
        return (
            0 <= r.member < self._group_size
            and r.attempt >= 0
            and length > 0
            and r.response_ids.shape == r.old_log_probs.shape == r.versions.shape == (length,)
            and isinstance(r.reward, (int, float))
            and math.isfinite(r.reward)
            and bool(np.isfinite(r.old_log_probs).all())
            and r.min_version >= 0
        )

    def _is_dead(self, rollouts: Iterable[Rollout]) -> bool:
        """Does any of them hold a token of weights that a rollback undid?"""
        return any(
            r.incarnation < incarnation and int(r.versions.max()) > version
            for incarnation, version in self._rollbacks
            for r in rollouts
        )

    def _too_old(self, group: Group, rollout: Rollout, reason: str) -> InsertOutcome:
        group.late |= 1 << rollout.member
        self._ledger.add_rollout(len(rollout.response_ids), "discarded")
        self._discard(group, reason)
        return InsertOutcome(status="stale", reason=reason, group_discarded=True)

    def _duplicate(self) -> InsertOutcome:
        self._ledger.duplicates += 1
        return InsertOutcome(status="duplicate")

    def _reject(self, reason: str) -> InsertOutcome:
        self._ledger.rejected[reason] += 1
        return InsertOutcome(status="rejected", reason=reason)

    def _capacity(self) -> int:
        """Groups that may still be issued, by the limits of this buffer and by the admission rule."""
        config, n = self._config, self._group_size
        running, size = len(self._in_flight), len(self._selector)
        room = min(config.max_groups - len(self._live), self._limiter.insert_room(size=size) - running)
        if self._largest_rollout:  # every member that may still come is reserved the size of the largest one so far
            reserved = self._live_bytes + self._missing_members * self._largest_rollout
            room = min(room, (config.max_bytes - reserved) // (n * self._largest_rollout))
        if self._groups_per_step is not None:
            room = min(room, self._admission(self._groups_per_step, running=running, size=size))
        return max(0, int(min(room, config.max_groups)))

    def _admission(self, groups_per_step: int, *, running: int, size: int) -> int:
        """`admission_capacity` in uses rather than groups: a group that is sampled k times fills k places in the steps to come.

        Uses at the current version or later are counted; each earlier step counts as the B uses it had, so that the
        rule needs no re-basing after a resume. What the limiter still needs before it lets a step sample is always
        allowed: otherwise limiter and admission could wait for each other.
        """
        per_group = (
            self._config.samples_per_insert
            if self._config.limiter == "ratio"
            else float(self._config.max_times_sampled)
        )
        waiting = math.ceil(max(0.0, size * per_group - self._buffered_uses))
        used = sum(len(uids) for version, uids in self._uses.items() if version >= self._policy_version)
        uses = admission_capacity(
            max_staleness=self._config.max_staleness,
            policy_version=self._policy_version,
            groups_per_step=groups_per_step,
            accepted=self._policy_version * groups_per_step + used + waiting,
            running=math.ceil(running * per_group),
        )
        needed = self._limiter.inserts_needed(groups_per_step, size=size) - running
        return max(int(uses / per_group), needed)

    def _new_selector(self) -> Selector:
        return make_selector(self._config.selector, rng=self._rng, priority_exponent=self._config.priority_exponent)

    def _limiter_settings(self) -> LimiterSettings:
        config, batch = self._config, self._groups_per_step or 1
        if config.limiter == "queue":
            return LimiterSettings.queue(config.queue_size, batch_size=batch)
        if config.limiter == "ratio":
            return LimiterSettings.ratio(
                config.samples_per_insert,
                min_size=config.min_size,
                error_buffer=config.error_buffer,
                batch_size=batch,
            )
        return LimiterSettings.at_least(config.min_size)
