"""Cutting a batch into shards."""

from __future__ import annotations

import numpy as np
import pytest
from stand_ins import make_rollout

from buffers.shards import StepCut, cut
from streamrl.records import RolloutGroup


def groups_of(lengths: list[int]) -> list[RolloutGroup]:
    return [
        RolloutGroup(uid=f"0-{i:06d}", rollouts=tuple(make_rollout(f"0-{i:06d}", m, length=n) for m in range(2)))
        for i, n in enumerate(lengths)
    ]


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_every_group_is_in_exactly_one_shard_and_totals_are_of_the_whole_batch(world_size: int) -> None:
    rng = np.random.default_rng(world_size)
    groups = groups_of([int(n) for n in rng.integers(1, 200, 16)])
    shards = cut(groups, world_size)
    assert len(shards) == world_size
    assert sorted(g.uid for shard in shards for g in shard.groups) == [g.uid for g in groups]
    tokens = sum(g.num_tokens for g in groups)
    for shard in shards:
        assert (shard.num_groups, shard.num_rollouts, shard.num_tokens) == (16, 32, tokens)
        assert shard.num_response_tokens == tokens - 16 * 2 * 3
        assert [g.uid for g in shard.groups] == sorted(g.uid for g in shard.groups)


def test_shards_are_balanced_by_tokens_not_by_groups() -> None:
    shards = cut(groups_of([1000, 10, 10, 10, 480, 480]), 2)
    loads = [sum(g.num_tokens for g in shard.groups) for shard in shards]
    assert max(loads) <= 1.05 * min(loads)


def test_equal_groups_are_dealt_evenly_and_always_the_same_way() -> None:
    groups = groups_of([10] * 8)
    assert [[g.uid for g in shard.groups] for shard in cut(groups, 4)] == [
        [g.uid for g in shard.groups] for shard in cut(groups, 4)
    ]
    assert [len(shard.groups) for shard in cut(groups, 4)] == [2, 2, 2, 2]


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("chunk_size", [1, 3, 4, 16, 17])
def test_chunks_are_the_batch_in_order_and_the_last_one_has_its_totals(chunk_size: int, world_size: int) -> None:
    groups = groups_of([int(n) for n in np.random.default_rng(chunk_size).integers(1, 200, 17)])
    step = StepCut(size=17, chunk_size=chunk_size, world_size=world_size)
    for start in range(0, 17, 2):  # whatever comes at a time
        step.extend(groups[start : start + 2])
    assert step.missing == step.missing_in_step == 0
    seen = 0
    for chunk in range(step.num_chunks):
        shards = [step.shard(chunk, rank) for rank in range(world_size)]
        expected = groups[chunk * chunk_size : (chunk + 1) * chunk_size]
        assert sorted(g.uid for shard in shards for g in shard.groups) == [g.uid for g in expected]
        seen += len(expected)
        assert {shard.num_groups for shard in shards} == {seen}
        assert {shard.is_last for shard in shards} == {seen == 17}
    assert shards[0].num_tokens == sum(g.num_tokens for g in groups)


def test_chunks_of_one_group_are_balanced_over_the_step_not_each_for_itself() -> None:
    groups = groups_of([100, 10, 10, 10, 40, 30])
    step = StepCut(size=6, chunk_size=1, world_size=2)
    step.extend(groups)
    loads = [sum(g.num_tokens for k in range(6) for g in step.shard(k, rank).groups) for rank in range(2)]
    assert loads[0] == groups[0].num_tokens and max(loads) <= 1.25 * min(loads)
    assert step.shard(1, 0).groups == []


def test_a_chunk_that_is_not_complete_is_not_cut() -> None:
    step = StepCut(size=5, chunk_size=2, world_size=1)
    step.extend(groups_of([1, 1, 1]))
    assert (step.num_chunks, step.missing, step.missing_in_step) == (1, 1, 2)
    assert not step.shard(0, 0).is_last
