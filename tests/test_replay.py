"""The replay buffer core: groups, the bound, the ledger, waiting, commit and rollback, incomplete groups, capacity."""

from __future__ import annotations

import pathlib
import random
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from stand_ins import make_rollout

from buffers.outcomes import InsertOutcome
from buffers.replay import ReplayBuffer
from streamrl.config import BufferConfig
from streamrl.errors import ClosedError, DeadlineExceededError, StaleRolloutError
from streamrl.records import BufferStats, Failure, RolloutGroup

UNBLOCKED_S = 5.0  # far longer than an unblocked call takes
LONG_S = 60.0  # longer still: a call that was not woken is caught
BLOCKED_S = 0.05  # a blocked call is observed for this long


class ManualClock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_buffer(*, group_size: int = 2, clock: Callable[[], float] | None = None, **settings: Any) -> ReplayBuffer:
    options: dict[str, Any] = {"clock": clock} if clock else {}
    for name in ("groups_per_step", "has_baseline", "issued_only", "seed"):
        if name in settings:
            options[name] = settings.pop(name)
    return ReplayBuffer(BufferConfig(**settings), group_size=group_size, **options)


def insert_group(buffer: ReplayBuffer, uid: str, *, version: int = 0, group_size: int = 2, **changes: Any) -> None:
    for member in range(group_size):
        outcome = buffer.insert(make_rollout(uid, member, version=version, **changes))
        assert outcome.status == "accepted", outcome


def sample(buffer: ReplayBuffer, num_groups: int, *, version: int = 0, timeout_s: float = 0.0) -> list[RolloutGroup]:
    return buffer.sample(num_groups, policy_version=version, timeout_s=timeout_s)


def uids(groups: list[RolloutGroup]) -> list[str]:
    return [group.uid for group in groups]


def balance(stats: BufferStats) -> int:
    return stats.issued - stats.in_flight - stats.buffered - stats.trained - sum(stats.discarded.values())


def failure(uid: str, member: int, attempt: int = 0, reason: str = "engine_error") -> Failure:
    return Failure(uid=uid, member=member, attempt=attempt, reason=reason)


class Caller:
    """Runs one call in a thread, to see whether it is blocked."""

    def __init__(self, call: Callable[[], Any]) -> None:
        self.result: Any = None
        self.error: BaseException | None = None
        self.done = threading.Event()
        self._call = call
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        try:
            self.result = self._call()
        except Exception as error:
            self.error = error
        self.done.set()

    def is_blocked(self) -> bool:
        return not self.done.wait(BLOCKED_S)

    def finish(self) -> Any:
        assert self.done.wait(UNBLOCKED_S), "the call is still blocked"
        if self.error is not None:
            raise self.error
        return self.result


# -- groups --


def test_a_group_is_sampled_only_when_its_last_member_is_there() -> None:
    buffer = make_buffer(group_size=3)
    for member in (0, 2):
        buffer.insert(make_rollout("a", member))
    with pytest.raises(DeadlineExceededError):
        sample(buffer, 1)
    buffer.insert(make_rollout("a", 1))
    (group,) = sample(buffer, 1)
    assert [r.member for r in group.rollouts] == [0, 1, 2]
    assert (group.times_sampled, group.probability) == (1, 1.0)


def test_the_learner_gets_the_very_arrays_that_were_inserted() -> None:
    buffer = make_buffer(group_size=1)
    rollout = make_rollout("a", length=7)
    buffer.insert(rollout)
    assert sample(buffer, 1)[0].rollouts[0] is rollout


def test_groups_are_sampled_in_the_order_in_which_they_were_completed() -> None:
    buffer = make_buffer()
    for uid in "abc":
        buffer.issue(uid)
    for uid in "cab":
        insert_group(buffer, uid)
    assert [uids(sample(buffer, 1)) for _ in range(3)] == [["c"], ["a"], ["b"]]


def test_a_batch_is_in_order_of_issue_whoever_finished_first() -> None:
    """With S = 0 the batch is then the same for any number of generators."""
    buffer = make_buffer()
    for uid in "abcd":
        buffer.issue(uid)
    for uid in "dbca":
        insert_group(buffer, uid)
    assert uids(sample(buffer, 4)) == ["a", "b", "c", "d"]


def test_inserting_a_member_twice_is_a_duplicate_whatever_the_attempt() -> None:
    buffer = make_buffer()
    buffer.insert(make_rollout("a", 0))
    assert buffer.insert(make_rollout("a", 0)).status == "duplicate"
    assert buffer.insert(make_rollout("a", 0, 1)).status == "duplicate"
    insert_group(buffer, "b")
    sample(buffer, 1)
    assert buffer.insert(make_rollout("b", 1)).status == "duplicate"
    buffer.commit(1)
    assert buffer.insert(make_rollout("b", 1)).status == "duplicate"
    assert buffer.stats().duplicate_rollouts == 4
    assert buffer.stats().inserted_rollouts == 3


def test_concurrent_inserts_of_the_same_member_are_accepted_once() -> None:
    buffer = make_buffer(group_size=1)
    start = threading.Barrier(16)
    statuses: list[str] = []

    def insert() -> None:
        start.wait()
        statuses.append(buffer.insert(make_rollout("a", 0)).status)

    threads = [threading.Thread(target=insert) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(UNBLOCKED_S)
    assert sorted(statuses) == ["accepted"] + ["duplicate"] * 15


def test_concurrent_producers_and_consumers_lose_and_double_nothing() -> None:
    buffer = make_buffer(group_size=4, groups_per_step=None)
    members = [(f"uid-{i}", m) for i in range(200) for m in range(4)]
    random.Random(0).shuffle(members)

    def produce(share: list[tuple[str, int]]) -> None:
        for uid, member in share:
            buffer.insert(make_rollout(uid, member))

    producers = [threading.Thread(target=produce, args=(members[i::8],)) for i in range(8)]
    consumers = [Caller(lambda: [sample(buffer, 5, timeout_s=LONG_S) for _ in range(10)]) for _ in range(4)]
    for producer in producers:
        producer.start()
    got = [group.uid for consumer in consumers for batch in consumer.finish() for group in batch]
    for producer in producers:
        producer.join(UNBLOCKED_S)
    assert sorted(got) == sorted({uid for uid, _ in members})
    assert buffer.stats().trained == 200


@pytest.mark.parametrize(
    "changes",
    [
        {"member": 2},
        {"member": -1},
        {"uid": ""},
        {"uid": "u" * 257},
        {"attempt": -1},
        {"length": 0},
        {"reward": float("nan")},
        {"reward": None},
        {"reward_parts": {"format": float("inf")}},
        {"old_log_probs": np.full(5, np.nan, dtype=np.float32)},
        {"old_log_probs": np.zeros(4, dtype=np.float32)},
        {"old_log_probs": np.zeros(5, dtype=np.float64)},
        {"versions": np.zeros(4, dtype=np.int32)},
        {"versions": np.full(5, -1, dtype=np.int32)},
        {"response_ids": np.zeros((5, 1), dtype=np.int32)},
        {"prompt_ids": np.array([-3], dtype=np.int32)},
    ],
)
def test_a_malformed_rollout_is_rejected_and_counted_and_leaves_no_trace(changes: dict[str, Any]) -> None:
    buffer = make_buffer()
    outcome = buffer.insert(make_rollout(**({"uid": "a"} | changes)))
    assert (outcome.status, outcome.reason) == ("rejected", "malformed")
    stats = buffer.stats()
    assert stats.rejected_rollouts == {"malformed": 1}
    assert stats.issued == stats.num_bytes == 0


def test_T42_a_member_without_a_reward_never_enters_a_group_as_an_empty_row() -> None:
    """THUDM/slime#200: an aborted sample had reward None and broke the conversion to tensors."""
    buffer = make_buffer()
    buffer.issue("a")
    buffer.insert(make_rollout("a", 0))
    assert buffer.insert(make_rollout("a", 1, reward=None)).reason == "malformed"
    assert buffer.fail(failure("a", 1, reason="reward_error")).action == "refill"
    buffer.insert(make_rollout("a", 1, 1, reward=0.5))
    (group,) = sample(buffer, 1)
    np.testing.assert_array_equal(group.rewards, np.array([0.0, 0.5], dtype=np.float32))


def test_a_uid_is_issued_once() -> None:
    buffer = make_buffer()
    buffer.issue("a")
    with pytest.raises(ValueError, match=r"uid \(a\) was issued before"):
        buffer.issue("a")


def test_a_rollout_of_a_uid_nobody_issued_is_rejected_if_only_issued_ones_are_wanted() -> None:
    buffer = make_buffer(issued_only=True)
    outcome = buffer.insert(make_rollout("a", 0))
    assert (outcome.status, outcome.reason) == ("rejected", "unknown_uid")
    assert buffer.stats().rejected_rollouts == {"unknown_uid": 1}
    assert buffer.stats().issued == 0


# -- the staleness bound --


def test_a_group_that_is_too_old_for_the_bound_is_discarded_and_counted_not_sampled() -> None:
    buffer = make_buffer(max_staleness=2)
    insert_group(buffer, "old", version=0)
    insert_group(buffer, "new", version=1)
    assert buffer.advance(3) == ["old"]
    assert uids(sample(buffer, 1, version=3)) == ["new"]
    assert buffer.stats().discarded == {"stale": 1}


def test_staleness_is_that_of_the_oldest_token_of_the_oldest_member() -> None:
    buffer = make_buffer(max_staleness=2)
    buffer.insert(make_rollout("a", 0, length=3, versions=np.array([1, 5, 5], dtype=np.int32)))
    buffer.insert(make_rollout("a", 1, version=5))
    assert sample(buffer, 1, version=3)[0].min_version == 1
    buffer.insert(make_rollout("b", 0, version=5))
    buffer.insert(make_rollout("b", 1, length=3, versions=np.array([1, 5, 5], dtype=np.int32)))
    assert buffer.advance(4) == ["b"]


def test_a_rollout_that_arrives_too_old_discards_its_group_and_says_so() -> None:
    buffer = make_buffer(max_staleness=1)
    buffer.insert(make_rollout("a", 0, version=4))
    buffer.advance(5)
    outcome = buffer.insert(make_rollout("a", 1, version=3))
    assert (outcome.status, outcome.reason, outcome.group_discarded) == ("stale", "stale", True)
    assert buffer.insert(make_rollout("a", 1, version=3)).status == "duplicate"
    assert buffer.stats().discarded == {"stale": 1}


def test_a_group_in_flight_that_can_no_longer_meet_the_bound_is_named_so_that_its_members_can_be_cancelled() -> None:
    buffer = make_buffer(max_staleness=1)
    for uid in ("a", "b", "c"):
        buffer.issue(uid)
    buffer.insert(make_rollout("a", 0, version=0))
    buffer.insert(make_rollout("b", 0, version=1))
    assert buffer.advance(2) == ["a"]
    assert buffer.stats().in_flight == 2


def test_a_version_jump_while_sample_waits_discards_before_it_hands_out() -> None:
    buffer = make_buffer(max_staleness=1)
    insert_group(buffer, "a", version=0)
    waiting = Caller(lambda: sample(buffer, 2, version=1, timeout_s=LONG_S))
    assert waiting.is_blocked()
    insert_group(buffer, "b", version=1)
    assert uids(waiting.finish()) == ["a", "b"]
    insert_group(buffer, "c", version=1)
    waiting = Caller(lambda: sample(buffer, 2, version=3, timeout_s=LONG_S))
    assert waiting.is_blocked()
    insert_group(buffer, "d", version=3)
    assert waiting.is_blocked()
    insert_group(buffer, "e", version=2)
    assert uids(waiting.finish()) == ["d", "e"]
    assert buffer.stats().discarded == {"stale": 1}


def test_a_broken_bound_raises_rather_than_trains() -> None:
    buffer = make_buffer(max_staleness=1)
    insert_group(buffer, "a", version=0)
    buffer._shelf.by_version.clear()  # the first line of defence is gone
    with pytest.raises(StaleRolloutError, match="group a has staleness 2 at policy_version 2, above"):
        sample(buffer, 1, version=2)


def test_a_version_below_the_buffers_own_needs_a_rollback_first() -> None:
    buffer = make_buffer()
    buffer.advance(5)
    with pytest.raises(ValueError, match=r"rollback\(4\) first"):
        buffer.advance(4)
    with pytest.raises(ValueError, match=r"rollback\(4\) first"):
        sample(buffer, 1, version=4)


@pytest.mark.parametrize("groups_per_step", [1, 3])
def test_T10_the_synchronous_loop_with_max_staleness_0_makes_progress(groups_per_step: int) -> None:
    """meta-pytorch/torchforge#557: with age 0 every episode was evicted before the weights arrived."""
    buffer = make_buffer(max_staleness=0, groups_per_step=groups_per_step)
    for version in range(10):
        assert buffer.stats().capacity == groups_per_step
        batch = [f"{version}-{i}" for i in range(groups_per_step)]
        for uid in batch:
            buffer.issue(uid)
        assert buffer.stats().capacity == 0
        for uid in reversed(batch):
            insert_group(buffer, uid, version=version)
        assert uids(sample(buffer, groups_per_step, version=version)) == batch
        assert buffer.stats().capacity == 0
        assert buffer.advance(version + 1) == []
        buffer.commit(version + 1)
    assert buffer.stats().trained == 10 * groups_per_step
    assert buffer.stats().discarded == {}


def test_T26_no_token_older_than_the_bound_is_ever_handed_out() -> None:
    """areal-project/AReaL#602: rollouts that were interrupted for long exceeded the bound that admission promised."""
    rng = random.Random(0)
    buffer = make_buffer(max_staleness=3, group_size=2)
    version = 0
    for i in range(400):
        for member in range(2):
            born = max(0, version - rng.randint(0, 6))
            versions = np.sort(np.array([born, *rng.choices(range(born, version + 1), k=4)], dtype=np.int32))
            buffer.insert(make_rollout(f"uid-{i}", member, versions=versions))
        if rng.random() < 0.5:
            try:
                groups = sample(buffer, 1, version=version)
            except DeadlineExceededError:
                continue
            assert all(version - int(r.versions.min()) <= 3 for group in groups for r in group.rollouts)
            version += rng.randint(0, 2)
    stats = buffer.stats()
    assert stats.trained > 30 and stats.discarded["stale"] > 30
    assert balance(stats) == 0


# -- waiting --


def test_sample_waits_for_groups_and_is_woken_by_the_last_insert() -> None:
    buffer = make_buffer()
    waiting = Caller(lambda: sample(buffer, 2, timeout_s=LONG_S))
    insert_group(buffer, "a")
    assert waiting.is_blocked()
    insert_group(buffer, "b")
    assert uids(waiting.finish()) == ["a", "b"]


def test_a_failed_member_that_completes_the_group_wakes_sample() -> None:
    buffer = make_buffer(group_size=3, incomplete_groups="min_members", min_members=2)
    waiting = Caller(lambda: sample(buffer, 1, timeout_s=LONG_S))
    buffer.insert(make_rollout("a", 0))
    buffer.insert(make_rollout("a", 2))
    assert waiting.is_blocked()
    buffer.fail(failure("a", 1))
    assert [r.member for r in waiting.finish()[0].rollouts] == [0, 2]


def test_the_deadline_names_what_was_missing_and_who_could_have_ended_the_wait() -> None:
    buffer = make_buffer()
    insert_group(buffer, "a", version=3)
    buffer.issue("b")
    with pytest.raises(DeadlineExceededError) as caught:
        sample(buffer, 3, version=4, timeout_s=0.01)
    assert str(caught.value) == (
        "sample: waited 0.01 s for 3 groups at policy_version 4; 2 more must complete (1 buffered, 1 in flight); "
        "generators could end this wait"
    )


def test_a_sample_that_ran_into_its_deadline_has_taken_nothing() -> None:
    buffer = make_buffer()
    insert_group(buffer, "a")
    with pytest.raises(DeadlineExceededError):
        sample(buffer, 2)
    assert uids(sample(buffer, 1)) == ["a"]


def test_close_wakes_every_waiter_with_an_error() -> None:
    buffer = make_buffer()
    waiting = [Caller(lambda: sample(buffer, 1, timeout_s=LONG_S)) for _ in range(3)]
    assert waiting[0].is_blocked()
    buffer.close()
    for caller in waiting:
        with pytest.raises(ClosedError):
            caller.finish()


def test_calls_after_close_raise_but_the_ledger_can_still_be_read() -> None:
    buffer = make_buffer()
    insert_group(buffer, "a")
    buffer.close()
    buffer.close()
    with pytest.raises(ClosedError):
        buffer.insert(make_rollout("b", 0))
    with pytest.raises(ClosedError):
        sample(buffer, 1)
    assert buffer.stats().buffered == 1


def test_a_wait_is_visible_while_it_lasts() -> None:
    buffer = make_buffer()
    insert_group(buffer, "a")
    waiting = Caller(lambda: sample(buffer, 4, timeout_s=LONG_S))
    assert waiting.is_blocked()
    (wait,) = buffer.stats().waits
    assert (wait.waiter, wait.waiting_for, wait.owner) == ("learner", "3 more groups", "generators")
    for uid in "bcd":
        insert_group(buffer, uid)
    waiting.finish()
    assert buffer.stats().waits == []


def test_sampling_waits_for_the_minimum_size() -> None:
    buffer = make_buffer(min_size=3)
    waiting = Caller(lambda: sample(buffer, 1, timeout_s=LONG_S))
    insert_group(buffer, "a")
    insert_group(buffer, "b")
    assert waiting.is_blocked()
    insert_group(buffer, "c")
    assert uids(waiting.finish()) == ["a"]


# -- failures, stragglers, incomplete groups --


def test_T41_only_the_missing_members_are_generated_again() -> None:
    """radixark/miles#2800: at 5 % failures and n = 8, dropping whole groups wasted a third of all rollouts."""
    rng = random.Random(1)
    buffer = make_buffer(group_size=8)
    generated = 0
    for i in range(200):
        uid = f"uid-{i}"
        buffer.issue(uid)
        todo = [(member, 0) for member in range(8)]
        while todo:
            member, attempt = todo.pop()
            generated += 1
            if rng.random() < 0.05:
                decision = buffer.fail(failure(uid, member, attempt))
                if decision.action == "refill":
                    assert (decision.uid, decision.member, decision.attempt) == (uid, member, attempt + 1)
                    todo.append((member, decision.attempt))
                else:
                    todo.clear()
            else:
                buffer.insert(make_rollout(uid, member, attempt))
    assert buffer.stats().buffered >= 198
    assert generated < 1.08 * 8 * 200


def test_a_member_that_fails_too_often_discards_its_group_with_a_reason() -> None:
    buffer = make_buffer(max_attempts=2)
    buffer.issue("a")
    buffer.insert(make_rollout("a", 0))
    assert buffer.fail(failure("a", 1, 0)).action == "refill"
    assert buffer.fail(failure("a", 1, 1, "reward_timeout")).action == "discarded"
    stats = buffer.stats()
    assert stats.discarded == {"failed": 1}
    assert stats.failed_members == {"engine_error": 1, "reward_timeout": 1}
    assert stats.generated_rollouts == {"buffered": 0, "discarded": 1}


def test_a_failure_that_is_reported_twice_is_counted_once() -> None:
    buffer = make_buffer()
    buffer.issue("a")
    assert buffer.fail(failure("a", 1)).action == "refill"
    assert buffer.fail(failure("a", 1)).action == "ignored"
    assert buffer.stats().failed_members == {"engine_error": 1}


@pytest.mark.parametrize("uid", ["unknown", "trained", "discarded"])
def test_a_failure_of_a_uid_that_is_not_in_flight_is_ignored(uid: str) -> None:
    buffer = make_buffer()
    insert_group(buffer, "trained")
    sample(buffer, 1)
    buffer.issue("discarded")
    buffer.discard_in_flight("end")
    assert buffer.fail(failure(uid, 0)).action == "ignored"


def test_a_member_declared_lost_that_arrives_after_all_is_taken_and_its_refill_is_the_duplicate() -> None:
    buffer = make_buffer()
    buffer.insert(make_rollout("a", 0))
    assert buffer.fail(failure("a", 1)).attempt == 1
    assert buffer.insert(make_rollout("a", 1, 0)).status == "accepted"
    assert buffer.insert(make_rollout("a", 1, 1)).status == "duplicate"


def test_T39_refill_uses_a_group_only_with_all_its_members() -> None:
    """areal-project/AReaL#1559, NVIDIA-NeMo/labs-molt#48: partial groups shift the baseline; it must be a choice."""
    buffer = make_buffer(group_size=3, incomplete_groups="refill")
    buffer.insert(make_rollout("a", 0))
    buffer.insert(make_rollout("a", 1))
    assert buffer.fail(failure("a", 2)).action == "refill"
    with pytest.raises(DeadlineExceededError):
        sample(buffer, 1)
    buffer.insert(make_rollout("a", 2, 1))
    assert len(sample(buffer, 1)[0].rollouts) == 3


def test_T39_wait_asks_nobody_and_waits_until_the_deadline() -> None:
    clock = ManualClock()
    buffer = make_buffer(clock=clock, incomplete_groups="wait", group_deadline_s=10)
    buffer.insert(make_rollout("a", 0))
    buffer.insert(make_rollout("b", 0))
    assert buffer.fail(failure("a", 1)).action == "wait"
    buffer.insert(make_rollout("a", 1, 1))
    assert uids(sample(buffer, 1)) == ["a"]
    clock.now += 10
    assert buffer.expire() == ["b"]
    assert buffer.stats().discarded == {"straggler": 1}


def test_T39_min_members_goes_on_without_failed_members_down_to_the_minimum() -> None:
    buffer = make_buffer(group_size=4, incomplete_groups="min_members", min_members=2)
    buffer.issue("a")
    assert buffer.fail(failure("a", 0)).action == "given_up"
    assert buffer.fail(failure("a", 0)).action == "ignored"
    assert buffer.fail(failure("a", 1)).action == "given_up"
    assert buffer.fail(failure("a", 2)).action == "refill"
    buffer.insert(make_rollout("a", 3))
    buffer.insert(make_rollout("a", 2, 1))
    (group,) = sample(buffer, 1)
    assert [r.member for r in group.rollouts] == [2, 3]
    outcome = buffer.insert(make_rollout("a", 0, 1))
    assert (outcome.status, outcome.reason) == ("rejected", "late")


def test_a_straggler_group_has_a_deadline_and_frees_its_slot() -> None:
    clock = ManualClock()
    buffer = make_buffer(clock=clock, group_deadline_s=30, groups_per_step=1, max_staleness=0)
    assert buffer.next_deadline() is None
    buffer.issue("a")
    buffer.insert(make_rollout("a", 0))
    assert buffer.next_deadline() == 130.0
    clock.now = 129.9
    assert buffer.expire() == []
    assert buffer.stats().capacity == 0
    clock.now = 130.0
    assert buffer.expire() == ["a"]
    stats = buffer.stats()
    assert stats.discarded == {"straggler": 1}
    assert stats.capacity == 1
    assert buffer.insert(make_rollout("a", 1)).reason == "late"


def test_T3_a_straggler_with_enough_members_is_used_without_the_rest() -> None:
    """NVIDIA-NeMo/RL#3238: one straggler wedged the step, and again on every resume."""
    clock = ManualClock()
    buffer = make_buffer(group_size=3, clock=clock, incomplete_groups="min_members", min_members=2, group_deadline_s=5)
    for member in range(2):
        buffer.insert(make_rollout("enough", member))
    buffer.insert(make_rollout("few", 0))
    clock.now += 5
    assert buffer.expire() == ["enough", "few"]
    assert uids(sample(buffer, 1)) == ["enough"]
    assert buffer.stats().discarded == {"straggler": 1}


def test_T2_groups_whose_members_never_come_do_not_wedge_the_buffer() -> None:
    """NovaSky-AI/SkyRL#1173: stuck at 125 of 128 for 29 hours, because some tasks never returned."""
    clock = ManualClock()
    buffer = make_buffer(clock=clock, groups_per_step=4, max_staleness=0, group_deadline_s=60)
    for uid in "abcd":
        buffer.issue(uid)
    for uid in "abc":
        insert_group(buffer, uid)
    with pytest.raises(DeadlineExceededError):
        sample(buffer, 4)
    clock.now += 60
    assert buffer.expire() == ["d"]
    assert buffer.stats().capacity == 1
    buffer.issue("e")
    insert_group(buffer, "e")
    assert uids(sample(buffer, 4)) == ["a", "b", "c", "e"]


def test_groups_without_reward_variance_can_be_dropped_counted_and_replaced() -> None:
    buffer = make_buffer(drop_zero_variance=True, groups_per_step=1, max_staleness=0)
    buffer.issue("flat")
    buffer.insert(make_rollout("flat", 0, reward=1.0))
    outcome = buffer.insert(make_rollout("flat", 1, reward=1.0))
    assert (outcome.status, outcome.reason, outcome.group_discarded) == ("accepted", "zero_variance", True)
    assert buffer.stats().discarded == {"zero_variance": 1}
    assert buffer.stats().capacity == 1
    insert_group(buffer, "steep")
    assert uids(sample(buffer, 1)) == ["steep"]


# -- a greedy member, which the others are compared with --


def insert_rewards(buffer: ReplayBuffer, uid: str, *rewards: float, **changes: Any) -> InsertOutcome:
    """The last one is of the greedy member."""
    for member, reward in enumerate(rewards):
        outcome = buffer.insert(make_rollout(uid, member, reward=reward, **changes))
    return outcome


def test_a_greedy_member_comes_beside_the_rollouts_and_counts_in_the_ledger() -> None:
    buffer = make_buffer(group_size=3, has_baseline=True)
    insert_group(buffer, "a", length=4)
    assert buffer.stats().in_flight == 1 and buffer.stats().buffered == 0
    buffer.insert(make_rollout("a", 2, length=7))
    (group,) = sample(buffer, 1)
    assert [r.member for r in group.rollouts] == [0, 1] and group.num_tokens == 14
    assert group.baseline is not None and group.baseline.member == 2
    assert buffer.stats().generated_rollouts["trained"] == 3 and buffer.stats().generated_tokens["trained"] == 15
    assert buffer.sampled_at(0)[0].baseline is group.baseline


def test_a_group_is_as_stale_as_its_greedy_member() -> None:
    buffer = make_buffer(group_size=3, has_baseline=True, max_staleness=1)
    insert_group(buffer, "a", version=2)
    buffer.insert(make_rollout("a", 2, version=1))
    insert_group(buffer, "b", group_size=3, version=2)
    assert buffer.advance(2) == []
    assert buffer.advance(3) == ["a"]
    (group,) = sample(buffer, 1, version=3)
    assert group.min_version == 2


def test_equal_rewards_are_dropped_only_where_the_greedy_one_is_equal_too() -> None:
    buffer = make_buffer(group_size=3, has_baseline=True, drop_zero_variance=True)
    assert insert_rewards(buffer, "flat", 1.0, 1.0, 1.0).reason == "zero_variance"
    assert insert_rewards(buffer, "better than greedy", 1.0, 1.0, 0.0).reason == ""
    assert uids(sample(buffer, 1)) == ["better than greedy"]


def test_priority_is_the_distance_from_the_greedy_reward() -> None:
    """All equal and far from the greedy one is worth more than spread around it."""
    buffer = make_buffer(group_size=5, has_baseline=True, selector="prioritized", priority_exponent=100.0)
    insert_rewards(buffer, "spread", 0.0, 1.0, 0.0, 1.0, 0.5)
    insert_rewards(buffer, "far", 1.0, 1.0, 1.0, 1.0, 0.0)
    assert uids(sample(buffer, 1)) == ["far"]


def test_a_greedy_member_survives_the_death_of_the_buffer(tmp_path: pathlib.Path) -> None:
    def open_buffer() -> ReplayBuffer:
        config = BufferConfig(journal="async")
        return ReplayBuffer(config, group_size=3, has_baseline=True, journal_path=tmp_path)

    first = open_buffer()
    insert_rewards(first, "a", 0.25, 0.5, 1.0)
    first.close()
    second = open_buffer()
    (group,) = sample(second, 1)
    second.close()
    assert [r.reward for r in group.rollouts] == [0.25, 0.5]
    assert group.baseline is not None and group.baseline.reward == 1.0


# -- several uses --


def test_a_group_is_sampled_max_times_sampled_times_then_trained() -> None:
    buffer = make_buffer(max_times_sampled=3, max_staleness=4)
    insert_group(buffer, "a")
    insert_group(buffer, "b")
    counts = [(g.uid, g.times_sampled) for v in range(3) for g in sample(buffer, 1, version=v)]
    assert counts == [("a", 1), ("a", 2), ("a", 3)]
    assert uids(sample(buffer, 1, version=3)) == ["b"]
    assert (buffer.stats().trained, buffer.stats().buffered) == (1, 1)


def test_one_batch_never_holds_a_group_twice() -> None:
    buffer = make_buffer(max_times_sampled=3, selector="uniform")
    insert_group(buffer, "a")
    insert_group(buffer, "b")
    assert uids(sample(buffer, 2)) == ["a", "b"]
    with pytest.raises(DeadlineExceededError):
        sample(buffer, 3)


def test_a_later_use_is_under_the_bound_too_and_a_group_that_was_used_counts_as_trained() -> None:
    buffer = make_buffer(max_times_sampled=3, max_staleness=1)
    insert_group(buffer, "a")
    sample(buffer, 1, version=1)
    assert buffer.advance(2) == ["a"]
    stats = buffer.stats()
    assert (stats.trained, stats.buffered, stats.discarded) == (1, 0, {})


def test_admission_counts_uses_so_that_later_epochs_are_not_stale() -> None:
    buffer = make_buffer(max_times_sampled=2, max_staleness=3, groups_per_step=2)
    assert buffer.stats().capacity == 4
    for step in range(30):
        for i in range(buffer.stats().capacity):
            buffer.issue(f"{step}-{i}")
            insert_group(buffer, f"{step}-{i}", version=step)
        sample(buffer, 2, version=step)
        buffer.advance(step + 1)
        buffer.commit(step + 1)
    stats = buffer.stats()
    assert stats.discarded == {}
    assert stats.trained >= 28


# -- commit and rollback --


def test_groups_consumed_after_the_checkpoint_come_back_when_the_learner_rolls_back() -> None:
    buffer = make_buffer()
    for uid in "abcd":
        insert_group(buffer, uid)
    sample(buffer, 1, version=0)
    buffer.commit(1)
    sample(buffer, 1, version=1)
    sample(buffer, 1, version=2)
    assert buffer.rollback(1) == []
    assert (buffer.stats().trained, buffer.stats().buffered, buffer.stats().policy_version) == (1, 3, 1)
    assert [uids(sample(buffer, 1, version=v)) for v in (1, 2, 3)] == [["b"], ["c"], ["d"]]


def test_a_commit_frees_the_payload_of_trained_groups_and_not_before() -> None:
    buffer = make_buffer()
    insert_group(buffer, "a")
    held = buffer.stats().num_bytes
    assert held == sum(make_rollout("a", m).num_bytes for m in range(2))
    sample(buffer, 1, version=0)
    assert buffer.stats().num_bytes == held
    buffer.commit(0)
    assert buffer.stats().num_bytes == held
    buffer.commit(1)
    assert buffer.stats().num_bytes == 0
    assert buffer.stats().trained == 1


def test_a_rollback_below_the_last_commit_is_refused() -> None:
    buffer = make_buffer()
    buffer.advance(5)
    buffer.commit(5)
    with pytest.raises(ValueError, match=r"policy_version \(4\) is below the last commit \(5\)"):
        buffer.rollback(4)


def test_a_rollback_undoes_one_use_of_a_group_and_keeps_the_earlier_ones() -> None:
    buffer = make_buffer(max_times_sampled=2)
    insert_group(buffer, "a")
    sample(buffer, 1, version=0)
    sample(buffer, 1, version=1)
    buffer.rollback(1)
    assert buffer.stats().buffered == 1
    assert sample(buffer, 1, version=1)[0].times_sampled == 2


def test_a_rollback_wakes_a_waiting_sample() -> None:
    buffer = make_buffer()
    insert_group(buffer, "a")
    sample(buffer, 1, version=1)
    waiting = Caller(lambda: sample(buffer, 1, version=1, timeout_s=LONG_S))
    assert waiting.is_blocked()
    buffer.rollback(1)
    assert uids(waiting.finish()) == ["a"]


def test_rollouts_of_weights_that_a_rollback_undid_are_discarded_held_or_late() -> None:
    buffer = make_buffer(max_staleness=8)
    buffer.advance(4)
    insert_group(buffer, "before", version=2)
    insert_group(buffer, "after", version=4)
    buffer.insert(make_rollout("in-flight", 0, version=4))
    buffer.insert(make_rollout("late", 0, version=2))
    assert buffer.rollback(3) == ["after", "in-flight"]
    outcome = buffer.insert(make_rollout("late", 1, version=4))
    assert (outcome.status, outcome.reason) == ("stale", "rolled_back")
    assert uids(sample(buffer, 1, version=3)) == ["before"]
    insert_group(buffer, "reborn", version=4, incarnation=1)
    assert uids(sample(buffer, 1, version=4)) == ["reborn"]
    assert buffer.stats().discarded == {"rolled_back": 3}


def test_the_groups_of_a_step_can_be_read_again_until_it_is_committed() -> None:
    buffer = make_buffer(max_times_sampled=2)
    for uid in "abc":
        insert_group(buffer, uid)
    first = sample(buffer, 2, version=0)
    sample(buffer, 2, version=1)
    assert buffer.sampled_at(0) == first
    buffer.commit(1)
    assert buffer.sampled_at(0) == []
    assert [g.times_sampled for g in buffer.sampled_at(1)] == [2, 2]


# -- capacity --


def test_capacity_follows_the_admission_rule_and_a_discard_gives_its_slot_back() -> None:
    buffer = make_buffer(max_staleness=1, groups_per_step=4)
    for i in range(8):
        assert buffer.stats().capacity == 8 - i
        buffer.issue(f"uid-{i}")
    buffer.discard_in_flight("test")
    assert buffer.stats().capacity == 8


def test_a_generator_that_lags_behind_gets_that_much_less_room() -> None:
    """A group that old weights start has to be used sooner: the rule counts from the generator's version."""
    buffer = make_buffer(max_staleness=2, groups_per_step=4)
    buffer.advance(5)
    assert [buffer.capacity(policy_version=v) for v in (5, 4, 3, 6)] == [12, 8, 4, 12]


def test_admission_needs_no_re_basing_after_a_resume() -> None:
    """areal-project/AReaL#1388 (T25): after a resume the bound burst, because earlier steps counted as nothing."""
    buffer = make_buffer(max_staleness=1, groups_per_step=4)
    buffer.advance(1000)
    assert buffer.stats().capacity == 8


def test_a_full_buffer_paces_by_groups_and_loses_nothing() -> None:
    buffer = make_buffer(max_groups=2)
    buffer.issue("a")
    buffer.issue("b")
    assert buffer.stats().capacity == 0
    for uid in "ab":
        insert_group(buffer, uid)
    sample(buffer, 1)
    assert buffer.stats().capacity == 1


def test_a_full_buffer_paces_by_bytes_with_room_reserved_for_members_that_may_still_come() -> None:
    group_bytes = sum(make_rollout("a", m, length=100).num_bytes for m in range(2))
    buffer = make_buffer(max_bytes=4 * group_bytes)
    insert_group(buffer, "a", length=100)
    assert buffer.stats().capacity == 3
    buffer.issue("b")
    assert buffer.stats().capacity == 2
    insert_group(buffer, "b", length=100)
    assert buffer.stats().capacity == 2
    insert_group(buffer, "c", length=100)
    buffer.issue("d")
    assert buffer.stats().capacity == 0
    insert_group(buffer, "d", length=100)
    assert buffer.stats().num_bytes == 4 * group_bytes


def test_T27_a_flooding_producer_is_told_that_the_buffer_is_full_and_nothing_is_evicted() -> None:
    """areal-project/AReaL#1481: external producers bypassed admission, and a deque evicted the oldest in silence."""
    buffer = make_buffer(group_size=1, max_groups=10)
    outcomes = [buffer.insert(make_rollout(f"uid-{i}")) for i in range(1000)]
    assert [o.status for o in outcomes[:10]] == ["accepted"] * 10
    assert {(o.status, o.reason) for o in outcomes[10:]} == {("rejected", "full")}
    assert buffer.stats().rejected_rollouts == {"full": 990}
    assert uids(sample(buffer, 10)) == [f"uid-{i}" for i in range(10)]
    assert buffer.insert(make_rollout("uid-10")).status == "accepted"


def test_a_queue_of_the_limiter_paces_and_stale_drops_do_not_clog_it() -> None:
    buffer = make_buffer(limiter="queue", queue_size=4, max_staleness=0)
    for version in range(20):
        buffer.advance(version)
        assert buffer.stats().capacity == 4
        for i in range(4):
            insert_group(buffer, f"{version}-{i}", version=version)
        sample(buffer, 1, version=version)
    assert buffer.stats().discarded == {"stale": 57}


def test_a_rollback_fills_the_queue_of_the_limiter_again() -> None:
    buffer = make_buffer(limiter="queue", queue_size=4, max_staleness=1)
    for uid in "abc":
        insert_group(buffer, uid)
    sample(buffer, 2, version=0)
    assert buffer.stats().capacity == 3
    buffer.rollback(0)
    assert buffer.stats().capacity == 1


def test_a_rollback_takes_back_what_an_outdated_group_had_given_back_to_the_limiter() -> None:
    settings = {"limiter": "ratio", "samples_per_insert": 3.0, "error_buffer": 6.0, "max_times_sampled": 3}
    buffer = make_buffer(max_staleness=1, **settings)
    insert_group(buffer, "a")
    insert_group(buffer, "b")
    room = buffer.stats().capacity
    sample(buffer, 2, version=0)
    buffer.advance(2)
    assert buffer.stats().trained == 2
    buffer.rollback(0)
    assert (buffer.stats().buffered, buffer.stats().capacity) == (2, room)


@pytest.mark.parametrize("samples_per_insert", [0.5, 1.5, 2.0])
def test_the_samples_per_insert_ratio_holds_over_a_long_run_without_a_deadlock(samples_per_insert: float) -> None:
    batch, steps = 4, 60
    buffer = make_buffer(
        max_staleness=2,
        groups_per_step=batch,
        max_times_sampled=2,
        limiter="ratio",
        samples_per_insert=samples_per_insert,
        error_buffer=4.0,
        selector="freshest",
    )
    issued = 0
    for step in range(steps):
        while True:
            try:
                sample(buffer, batch, version=step)
                break
            except DeadlineExceededError:
                assert buffer.stats().capacity > 0, f"deadlock at step {step}"
                insert_group(buffer, f"uid-{issued}", version=step)
                issued += 1
        buffer.advance(step + 1)
        buffer.commit(step + 1)
    assert steps * batch / issued == pytest.approx(samples_per_insert, rel=0.1)
    assert balance(buffer.stats()) == 0


# -- settings that change while it runs --


def test_a_smaller_bound_takes_effect_at_once() -> None:
    buffer = make_buffer(max_staleness=4)
    insert_group(buffer, "old", version=0)
    insert_group(buffer, "new", version=3)
    buffer.advance(4)
    assert buffer.reconfigure(BufferConfig(max_staleness=1)) == ["old"]
    assert buffer.stats().max_staleness == 1
    assert uids(sample(buffer, 1, version=4)) == ["new"]


def test_another_selector_takes_over_what_is_held() -> None:
    buffer = make_buffer()
    for version, uid in enumerate("abc"):
        insert_group(buffer, uid, version=version)
    buffer.reconfigure(BufferConfig(selector="freshest"))
    assert [uids(sample(buffer, 1)) for _ in range(3)] == [["c"], ["b"], ["a"]]


def test_a_smaller_minimum_size_wakes_a_waiting_sample() -> None:
    buffer = make_buffer(min_size=10)
    insert_group(buffer, "a")
    waiting = Caller(lambda: sample(buffer, 1, timeout_s=LONG_S))
    assert waiting.is_blocked()
    buffer.reconfigure(BufferConfig(min_size=1))
    assert uids(waiting.finish()) == ["a"]


def test_fewer_uses_retire_what_had_them_already() -> None:
    buffer = make_buffer(max_times_sampled=3)
    insert_group(buffer, "a")
    sample(buffer, 1)
    buffer.reconfigure(BufferConfig(max_times_sampled=1))
    assert (buffer.stats().buffered, buffer.stats().trained) == (0, 1)


# -- selectors and the ledger --


def test_prioritized_sampling_prefers_groups_with_reward_variance_and_returns_the_probability() -> None:
    buffer = make_buffer(selector="prioritized")
    insert_group(buffer, "flat", reward=1.0)
    insert_group(buffer, "steep")
    (group,) = sample(buffer, 1)
    assert (group.uid, group.probability) == ("steep", 1.0)
    assert uids(sample(buffer, 1)) == ["flat"]


def test_lengths_of_trained_and_discarded_rollouts_lie_side_by_side() -> None:
    buffer = make_buffer(max_staleness=0)
    insert_group(buffer, "short", length=3, version=1)
    insert_group(buffer, "long", length=100, version=0)
    buffer.issue("waiting")
    buffer.insert(make_rollout("waiting", 0, length=10, version=1))
    buffer.advance(1)
    sample(buffer, 1, version=1)
    buffer.insert(make_rollout("late", 0, length=50, version=0))
    stats = buffer.stats()
    assert stats.generated_tokens == {"buffered": 10, "trained": 6, "discarded": 250}
    assert stats.generated_rollouts == {"buffered": 1, "trained": 2, "discarded": 3}
    assert stats.response_lengths["trained"] == {4: 2}
    assert {k: v for k, v in stats.response_lengths["discarded"].items() if v} == {128: 2, 64: 1}


def test_the_end_of_the_run_settles_every_uid() -> None:
    buffer = make_buffer()
    insert_group(buffer, "a")
    for uid in "bc":
        buffer.issue(uid)
    buffer.insert(make_rollout("b", 0))
    assert buffer.discard_in_flight("run_ended") == ["b", "c"]
    stats = buffer.stats()
    assert (stats.in_flight, stats.buffered, stats.discarded) == (0, 1, {"run_ended": 2})
    assert balance(stats) == 0


def test_the_age_of_the_oldest_group_is_that_of_the_oldest_live_one() -> None:
    clock = ManualClock()
    buffer = make_buffer(clock=clock)
    insert_group(buffer, "a")
    clock.now += 3
    insert_group(buffer, "b")
    clock.now += 4
    assert buffer.stats().oldest_group_s == 7.0
    sample(buffer, 1, version=1)
    assert buffer.stats().oldest_group_s == 4.0
    buffer.rollback(1)
    assert buffer.stats().oldest_group_s == 7.0
