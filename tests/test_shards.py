"""Cutting a batch into shards."""

from __future__ import annotations

import numpy as np
import pytest
from stand_ins import make_rollout

from buffers.shards import cut
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
