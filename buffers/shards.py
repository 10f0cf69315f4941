"""One optimizer step's groups, cut into one shard per learner rank.

Groups stay whole, because an advantage needs its whole group. The cut is greedy: the longest group first, to the rank
with the fewest tokens so far (Graham 1969: the fullest rank has at most 4/3 of the best possible). It depends on
nothing but the groups, so every rank gets the same cut, whoever asks first.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

from streamrl.records import RolloutGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What one rank trains on in one step, and the totals of the whole global batch to normalise by.

    Example: Shard(groups=[...8 groups], num_groups=16, num_rollouts=128, num_tokens=5120, num_response_tokens=1890).
    """

    groups: list[RolloutGroup]  # of this rank, in order of issue; may be empty
    num_groups: int  # of all ranks, like the rest
    num_rollouts: int
    num_tokens: int
    num_response_tokens: int


def cut(groups: list[RolloutGroup], world_size: int) -> list[Shard]:
    """One shard per rank; every group is in exactly one of them."""
    ranks: list[list[int]] = [[] for _ in range(world_size)]
    load = [(0, rank) for rank in range(world_size)]
    for index in sorted(range(len(groups)), key=lambda i: (-groups[i].num_tokens, i)):
        tokens, rank = heapq.heappop(load)
        ranks[rank].append(index)
        heapq.heappush(load, (tokens + groups[index].num_tokens, rank))
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    return [
        Shard(
            groups=[groups[i] for i in sorted(indices)],
            num_groups=len(groups),
            num_rollouts=len(rollouts),
            num_tokens=sum(r.num_tokens for r in rollouts),
            num_response_tokens=sum(len(r.response_ids) for r in rollouts),
        )
        for indices in ranks
    ]
