"""What survives the death of the buffer process: real processes, real SIGKILL, the real file."""

from __future__ import annotations

import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import lmdb
import numpy as np
import pytest
from stand_ins import make_rollout

from buffers.journal import Changes, Journal, StateRow
from buffers.replay import ReplayBuffer
from streamrl.config import BufferConfig
from streamrl.errors import ClosedError
from streamrl.records import BufferStats, Failure, Rollout, RolloutTimings

TESTS = pathlib.Path(__file__).parent


def open_buffer(path: pathlib.Path, *, group_size: int = 2, journal: str = "async", **settings: Any) -> ReplayBuffer:
    config = BufferConfig(journal=journal, **settings)  # type: ignore[arg-type]
    return ReplayBuffer(config, group_size=group_size, journal_path=path)


def reopened(buffer: ReplayBuffer, path: pathlib.Path, **settings: Any) -> ReplayBuffer:
    buffer.close()
    return open_buffer(path, **settings)


def insert_group(buffer: ReplayBuffer, uid: str, *, version: int = 0, group_size: int = 2) -> None:
    for member in range(group_size):
        assert buffer.insert(make_rollout(uid, member, version=version)).status == "accepted"


def lasting(stats: BufferStats) -> dict[str, Any]:
    """What a restart must not change."""
    names = ["issued", "in_flight", "buffered", "trained", "discarded", "inserted_rollouts", "duplicate_rollouts"]
    names += ["rejected_rollouts", "failed_members", "num_bytes", "policy_version", "capacity"]
    counts = {name: getattr(stats, name) for name in names}
    for name in ("generated_tokens", "generated_rollouts"):
        counts[name] = {fate: n for fate, n in getattr(stats, name).items() if n}
    counts["response_lengths"] = {f: {k: n for k, n in h.items() if n} for f, h in stats.response_lengths.items()}
    return counts


def assert_same(ours: Rollout, theirs: Rollout) -> None:
    for name in ("prompt_ids", "response_ids", "old_log_probs", "versions"):
        left, right = getattr(ours, name), getattr(theirs, name)
        assert left.dtype == right.dtype
        np.testing.assert_array_equal(left, right)
    for name in ("uid", "member", "attempt", "incarnation", "reward", "reward_parts", "finish_reason", "generator"):
        assert getattr(ours, name) == getattr(theirs, name)
    assert ours.timings == theirs.timings


def test_a_rollout_is_the_same_after_a_restart_to_the_last_bit(tmp_path: pathlib.Path) -> None:
    rollout = make_rollout(
        "0-000017",
        old_log_probs=np.array([-0.1, -1e-30, -3.4e38, 0.0, -7.25], dtype=np.float32),
        versions=np.array([4, 4, 5, 5, 5], dtype=np.int32),
        reward=1 / 3,
        reward_parts={"format": 0.25},
        finish_reason="length",
        generator="generator-1",
        incarnation=2,
        timings=RolloutTimings(queue_s=0.1, generate_s=0.2, reward_s=0.3, finished_at=1e9),
    )
    buffer = open_buffer(tmp_path, group_size=1)
    buffer.insert(rollout)
    buffer = reopened(buffer, tmp_path, group_size=1)
    (group,) = buffer.sample(1, policy_version=5, timeout_s=0)
    assert_same(group.rollouts[0], rollout)


@pytest.mark.parametrize("journal", ["async", "sync"])
def test_every_state_of_a_group_survives_a_restart(tmp_path: pathlib.Path, journal: str) -> None:
    settings: dict[str, Any] = {"journal": journal, "max_staleness": 2, "max_times_sampled": 2}
    buffer = open_buffer(tmp_path, **settings)
    buffer.advance(3)
    for uid in ("final", "trained", "buffered"):
        insert_group(buffer, uid, version=3)
    buffer.issue("in flight", note=b"prompt")
    buffer.insert(make_rollout("in flight", 1, version=3))
    buffer.fail(Failure(uid="in flight", member=0, attempt=0, reason="reward_timeout"))
    buffer.insert(make_rollout("in flight", 1, version=3))
    buffer.insert(make_rollout("stale", 0, version=0))
    buffer.insert(make_rollout("stale", 1, version=0, length=9))
    buffer.insert(make_rollout("malformed", 7))
    for version, num_groups in ((3, 1), (4, 2), (5, 1)):
        buffer.sample(num_groups, policy_version=version, timeout_s=0)
    buffer.commit(4)
    before = lasting(buffer.stats())
    assert before["trained"] == 2
    buffer = reopened(buffer, tmp_path, **settings)
    assert lasting(buffer.stats()) == before
    (open_group,) = buffer.open_groups()
    assert (open_group.uid, open_group.members, open_group.attempts) == ("in flight", (0,), (1,))
    assert open_group.note == b"prompt"
    assert buffer.insert(make_rollout("in flight", 0, 1, version=4)).status == "accepted"
    assert [g.uid for g in buffer.sample(2, policy_version=5, timeout_s=0)] == ["buffered", "in flight"]


def test_members_of_settled_uids_are_known_again_after_a_restart(tmp_path: pathlib.Path) -> None:
    buffer = open_buffer(tmp_path, max_staleness=0)
    insert_group(buffer, "trained")
    buffer.sample(1, policy_version=0, timeout_s=0)
    buffer.commit(1)
    buffer.advance(1)
    buffer.insert(make_rollout("stale", 0, version=0))
    buffer.insert(make_rollout("stale", 1, version=0))
    buffer = reopened(buffer, tmp_path, max_staleness=0)
    for uid in ("trained", "stale"):
        for member in range(2):
            assert buffer.insert(make_rollout(uid, member)).status == "duplicate"
    with pytest.raises(ValueError, match="issued before"):
        buffer.issue("trained")


def test_groups_trained_since_the_checkpoint_come_back_from_the_journal(tmp_path: pathlib.Path) -> None:
    buffer = open_buffer(tmp_path)
    for uid in "abc":
        insert_group(buffer, uid)
    buffer.sample(1, policy_version=0, timeout_s=0)
    buffer.commit(1)
    sampled = buffer.sample(2, policy_version=1, timeout_s=0)
    buffer = reopened(buffer, tmp_path)
    again = buffer.sampled_at(1)
    assert [g.uid for g in again] == [g.uid for g in sampled] == ["b", "c"]
    assert_same(again[1].rollouts[1], sampled[1].rollouts[1])
    buffer.rollback(1)
    assert [g.uid for g in buffer.sample(2, policy_version=1, timeout_s=0)] == ["b", "c"]
    assert buffer.stats().trained == 3


def test_every_use_of_a_group_survives_a_restart(tmp_path: pathlib.Path) -> None:
    settings: dict[str, Any] = {"max_times_sampled": 3}
    buffer = open_buffer(tmp_path, **settings)
    insert_group(buffer, "a")
    for version in range(3):
        buffer.sample(1, policy_version=version, timeout_s=0)
    buffer = reopened(buffer, tmp_path, **settings)
    assert [buffer.sampled_at(version)[0].times_sampled for version in range(3)] == [1, 2, 3]
    buffer.rollback(1)
    assert buffer.sample(1, policy_version=1, timeout_s=0)[0].times_sampled == 2


def test_members_that_were_given_up_are_not_waited_for_after_a_restart(tmp_path: pathlib.Path) -> None:
    settings: dict[str, Any] = {"group_size": 3, "incomplete_groups": "min_members", "min_members": 2}
    buffer = open_buffer(tmp_path, **settings)
    buffer.insert(make_rollout("a", 0))
    buffer.fail(Failure(uid="a", member=1, attempt=0, reason="engine_error"))
    buffer = reopened(buffer, tmp_path, **settings)
    assert buffer.open_groups()[0].members == (2,)
    buffer.insert(make_rollout("a", 2))
    assert [r.member for r in buffer.sample(1, policy_version=0, timeout_s=0)[0].rollouts] == [0, 2]


def test_trained_groups_take_no_memory_when_there_is_a_journal(tmp_path: pathlib.Path) -> None:
    buffer = open_buffer(tmp_path)
    insert_group(buffer, "a")
    buffer.sample(1, policy_version=0, timeout_s=0)
    assert buffer.stats().num_bytes == 0
    buffer.rollback(0)
    assert buffer.stats().num_bytes > 0
    assert len(buffer.sample(1, policy_version=0, timeout_s=0)[0].rollouts) == 2


def test_undone_weights_are_still_undone_after_a_restart(tmp_path: pathlib.Path) -> None:
    buffer = open_buffer(tmp_path, max_staleness=8)
    buffer.advance(5)
    buffer.rollback(3)
    buffer = reopened(buffer, tmp_path, max_staleness=8)
    outcome = buffer.insert(make_rollout("a", 0, version=4))
    assert (outcome.status, outcome.reason) == ("stale", "rolled_back")
    assert buffer.insert(make_rollout("b", 0, version=4, incarnation=1)).status == "accepted"


def test_fifo_order_survives_a_restart(tmp_path: pathlib.Path) -> None:
    buffer = open_buffer(tmp_path)
    for uid in "abcd":
        buffer.issue(uid)
    for uid in "cadb":
        insert_group(buffer, uid)
    buffer = reopened(buffer, tmp_path)
    order = [buffer.sample(1, policy_version=0, timeout_s=0)[0].uid for _ in range(4)]
    assert order == ["c", "a", "d", "b"]


def test_a_queue_is_as_full_after_a_restart_as_before(tmp_path: pathlib.Path) -> None:
    settings: dict[str, Any] = {"limiter": "queue", "queue_size": 3}
    buffer = open_buffer(tmp_path, **settings)
    insert_group(buffer, "a")
    insert_group(buffer, "b")
    buffer = reopened(buffer, tmp_path, **settings)
    assert buffer.stats().capacity == 1


def test_the_file_does_not_grow_with_the_length_of_the_run(tmp_path: pathlib.Path) -> None:
    buffer = open_buffer(tmp_path, group_size=1)
    sizes = []
    for i in range(400):
        buffer.insert(make_rollout(f"uid-{i}", length=2000, version=i))
        buffer.sample(1, policy_version=i, timeout_s=0)
        buffer.advance(i + 1)
        buffer.commit(i + 1)
        sizes.append((tmp_path / "data.mdb").stat().st_blocks * 512)
    assert sizes[-1] < 1.5 * sizes[100]
    assert sizes[-1] < 400 * 2000 * 12 / 4


def test_a_journal_that_cannot_be_written_acknowledges_nothing_any_more(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = open_buffer(tmp_path)
    insert_group(buffer, "a")

    def full_disk(self: Journal, state: object, changes: Changes) -> None:
        raise lmdb.DiskError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Journal, "write", full_disk)
        with pytest.raises(lmdb.DiskError):
            buffer.insert(make_rollout("b", 0))
    with pytest.raises(ClosedError):
        buffer.insert(make_rollout("b", 1))
    with pytest.raises(ClosedError):
        buffer.sample(1, policy_version=0, timeout_s=0)
    assert open_buffer(tmp_path).stats().issued == 1


def test_many_rollouts_are_written_at_once_or_not_at_all(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = open_buffer(tmp_path, journal="sync")
    writes = []
    write = Journal.write
    monkeypatch.setattr(Journal, "write", lambda self, state, changes: writes.append(write(self, state, changes)))
    outcomes = buffer.insert_many([make_rollout(uid, member) for uid in "abc" for member in (0, 1, 1)])
    assert [o.status for o in outcomes] == ["accepted", "accepted", "duplicate"] * 3
    assert len(writes) == 1


def test_a_journal_needs_a_folder() -> None:
    with pytest.raises(ValueError, match=r"buffer\.journal=sync needs a folder"):
        ReplayBuffer(BufferConfig(journal="sync"), group_size=2)


def test_a_journal_of_another_group_size_is_refused(tmp_path: pathlib.Path) -> None:
    buffer = open_buffer(tmp_path, group_size=2)
    buffer.issue("a")
    buffer.close()
    with pytest.raises(ValueError, match="group_size 2, not 2 and 4"):
        open_buffer(tmp_path, group_size=4)
    open_buffer(tmp_path, group_size=2)


CHILD = """
import itertools, os, pathlib, random, sys
sys.path.insert(0, {tests!r})
from stand_ins import make_rollout
from buffers.replay import ReplayBuffer
from streamrl.config import BufferConfig
from streamrl.errors import DeadlineExceededError
from streamrl.records import Failure

path, mode, seed, first = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
rng = random.Random(seed)
buffer = ReplayBuffer(BufferConfig(journal=mode, max_staleness=2), group_size=2, journal_path=path)
version = buffer.stats().policy_version

def acknowledge(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())

acknowledge("ready")
for i in itertools.count(first):
    uid = f"uid-{{i}}"
    buffer.issue(uid)
    acknowledge("issued", uid)
    for member in range(2):
        if rng.random() < 0.1:
            buffer.fail(Failure(uid=uid, member=member, attempt=0, reason="engine_error"))
        outcome = buffer.insert(make_rollout(uid, member, version=version, length=rng.randint(1, 3000)))
        acknowledge(outcome.status, uid, member)
    if rng.random() < 0.3:
        try:
            groups = buffer.sample(2, policy_version=version, timeout_s=0)
        except DeadlineExceededError:
            continue
        acknowledge("sampled", version, *(group.uid for group in groups))
        if rng.random() < 0.5:
            version += 1
            buffer.advance(version)
            buffer.commit(version)
            acknowledge("committed", version)
"""


def start_child(path: pathlib.Path, *, journal: str, seed: int, first: int) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD.format(tests=str(TESTS)), str(path), journal, str(seed), str(first)],
        stdout=subprocess.PIPE,
        cwd=TESTS.parent,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    assert child.stdout is not None and child.stdout.readline() == b"ready\n"
    return child


def kill_at_a_random_instant(child: subprocess.Popen[bytes], rng: random.Random) -> list[list[str]]:
    """What the child had acknowledged when it was killed."""
    assert child.stdout is not None
    head = [child.stdout.readline() for _ in range(rng.randint(1, 150))]
    time.sleep(rng.uniform(0, 0.003))
    child.send_signal(signal.SIGKILL)
    lines = b"".join([*head, child.stdout.read()])
    child.stdout.close()
    assert child.wait(10) == -signal.SIGKILL
    return [line.split() for line in lines.decode().splitlines()]


@pytest.mark.parametrize(("journal", "kills"), [("async", 6), ("sync", 2)])
def test_sigkill_at_any_instant_loses_nothing_that_was_acknowledged(
    tmp_path: pathlib.Path, journal: str, kills: int
) -> None:
    """Each child goes on with the journal that the one before was killed over."""
    rng = random.Random(journal)
    path = tmp_path / "journal"
    issued: set[str] = set()
    accepted: set[tuple[str, int]] = set()
    sampled: dict[str, int] = {}  # uid -> version
    for kill in range(kills):
        child = start_child(path, journal=journal, seed=kill, first=kill * 1_000_000)
        for word, *rest in kill_at_a_random_instant(child, rng):
            if word == "issued":
                issued.add(rest[0])
            elif word == "accepted":
                accepted.add((rest[0], int(rest[1])))
            elif word == "sampled":
                sampled.update(dict.fromkeys(rest[1:], int(rest[0])))

        copy = shutil.copytree(path, tmp_path / f"copy-{kill}")
        buffer = open_buffer(copy, max_staleness=2)
        stats = buffer.stats()
        assert stats.issued == stats.in_flight + stats.buffered + stats.trained + sum(stats.discarded.values())
        assert abs(stats.issued - len(issued)) <= kill + 1, "only what was not acknowledged may differ"
        for uid in issued if journal == "async" else {uid for uid, _ in accepted}:
            with pytest.raises(ValueError, match="issued before"):
                buffer.issue(uid)
        for uid, member in accepted:
            assert buffer.insert(make_rollout(uid, member)).status == "duplicate", f"{uid}/{member} was lost"

        committed = buffer._shelf.committed
        buffer.rollback(committed)
        back = buffer.sample(buffer.stats().buffered, policy_version=committed, timeout_s=0)
        assert all({r.member for r in group.rollouts} == {0, 1} for group in back)
        came_back = {group.uid for group in back}
        for uid, version in sampled.items():
            assert (uid in came_back) == (version >= committed), f"{uid} was sampled at {version}"
        buffer.close()
    assert len(accepted) > 30 * kills and sampled


def test_a_journal_that_another_process_has_open_is_refused_until_that_process_dies(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "journal"
    child = start_child(path, journal="async", seed=0, first=0)
    with pytest.raises(ValueError, match="another process has it open"):
        open_buffer(path)
    kill_at_a_random_instant(child, random.Random(0))
    assert open_buffer(path, max_staleness=2).stats().policy_version >= 0


def test_with_sync_only_calls_that_acknowledge_something_wait_for_the_disk(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    buffer = open_buffer(tmp_path, journal="sync")
    writes = 0
    write = Journal.write

    def count(self: Journal, state: StateRow, changes: Changes) -> None:
        nonlocal writes
        writes += 1
        write(self, state, changes)

    monkeypatch.setattr(Journal, "write", count)
    buffer.issue("a")
    buffer.fail(Failure(uid="a", member=1, attempt=0, reason="engine_error"))
    assert writes == 0
    insert_group(buffer, "a")
    assert writes == 2
    buffer.sample(1, policy_version=0, timeout_s=0)
    assert writes == 3
    buffer.advance(1)
    buffer.commit(1)
    assert writes == 3
    buffer = reopened(buffer, tmp_path, journal="sync")
    assert (buffer.stats().trained, buffer.stats().policy_version) == (1, 1)
    assert buffer.stats().failed_members == {"engine_error": 1}
