"""Version arithmetic: staleness, the admission rule and its proof by simulation, incarnations."""

from __future__ import annotations

import random
from collections import deque

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from stand_ins import make_rollout

from streamrl.staleness import Lineage, admission_capacity, group_staleness


def test_staleness_counts_optimizer_steps_between_the_oldest_token_and_the_step_that_consumes_it() -> None:
    assert group_staleness(7, 4) == 3
    assert group_staleness(4, 4) == 0


def test_a_group_of_weights_that_are_newer_than_the_learners_last_report_has_negative_staleness() -> None:
    assert group_staleness(4, 5) == -1


@pytest.mark.parametrize(
    ("max_staleness", "version", "accepted", "running", "expected"),
    [(0, 0, 0, 0, 16), (0, 0, 16, 0, 0), (4, 0, 0, 0, 80), (4, 10, 160, 20, 60), (0, 3, 48, 20, 0)],
)
def test_admission_leaves_s_plus_v_plus_one_batches(
    max_staleness: int, version: int, accepted: int, running: int, expected: int
) -> None:
    capacity = admission_capacity(
        max_staleness=max_staleness, policy_version=version, groups_per_step=16, accepted=accepted, running=running
    )
    assert capacity == expected


def test_T11_admission_never_divides_the_capacity_away_for_small_batches_and_many_generators() -> None:
    """areal-project/AReaL#1396: capacity divided by the number of workers became 0, and rollouts waited for ever."""
    for groups_per_step in (1, 2, 3):
        for max_staleness in range(4):
            for version in range(5):
                consumed = version * groups_per_step
                capacity = admission_capacity(
                    max_staleness=max_staleness,
                    policy_version=version,
                    groups_per_step=groups_per_step,
                    accepted=consumed,
                    running=0,
                )
                assert capacity >= groups_per_step


@given(
    max_staleness=st.integers(0, 4),
    groups_per_step=st.integers(1, 5),
    seed=st.integers(0, 2**32 - 1),
    discard=st.booleans(),
)
def test_groups_that_admission_started_are_never_stale_when_they_are_consumed_in_order(
    max_staleness: int, groups_per_step: int, seed: int, discard: bool
) -> None:
    """The proof in the docstring, played: whatever finishes or fails when, groups consumed in order meet the bound."""
    rng = random.Random(seed)
    version = trained = 0
    started: deque[list[int]] = deque()  # [version at start, 1 if complete], oldest first
    for _ in range(200):
        running = sum(1 - complete for _, complete in started)
        accepted = trained + len(started) - running
        room = admission_capacity(
            max_staleness=max_staleness,
            policy_version=version,
            groups_per_step=groups_per_step,
            accepted=accepted,
            running=running,
        )
        assert room + running + len(started) > 0, "nothing can move any more"
        for _ in range(rng.randint(0, room)):
            started.append([version, 0])
        for group in list(started):
            if not group[1] and rng.random() < 0.5:
                if discard and rng.random() < 0.3:
                    started.remove(group)
                else:
                    group[1] = 1
        if sum(complete for _, complete in list(started)[:groups_per_step]) == groups_per_step:
            for _ in range(groups_per_step):
                born, _ = started.popleft()
                assert group_staleness(version, born) <= max_staleness
                trained += 1
            version += 1


def test_tokens_of_weights_that_a_rollback_undid_are_dead() -> None:
    lineage = Lineage()
    assert not lineage.is_dead(make_rollout(version=8))
    lineage.rollback(7)
    assert lineage.incarnation == 1
    assert lineage.is_dead(make_rollout(version=8, incarnation=0))
    assert not lineage.is_dead(make_rollout(version=7, incarnation=0))
    assert not lineage.is_dead(make_rollout(version=8, incarnation=1))


def test_one_token_of_undone_weights_makes_the_whole_rollout_dead() -> None:
    lineage = Lineage()
    lineage.rollback(7)
    versions = np.array([6, 7, 8], dtype=np.int32)
    assert lineage.is_dead(make_rollout(length=3, versions=versions))


def test_a_second_rollback_undoes_more_of_both_earlier_incarnations() -> None:
    lineage = Lineage()
    lineage.rollback(7)
    lineage.rollback(5)
    assert lineage.is_dead(make_rollout(version=6, incarnation=0))
    assert lineage.is_dead(make_rollout(version=6, incarnation=1))
    assert not lineage.is_dead(make_rollout(version=6, incarnation=2))


def test_a_restarted_controller_can_name_the_incarnation_itself() -> None:
    lineage = Lineage(incarnation=2, rollbacks=[(2, 3)])
    lineage.rollback(4, incarnation=5)
    assert lineage.incarnation == 5
    assert lineage.is_dead(make_rollout(version=5, incarnation=3))
