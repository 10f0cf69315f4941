"""The groups of one optimizer step, cut into one shard per learner rank, chunk by chunk as they are handed out.

Groups stay whole, because an advantage needs its whole group. The cut is greedy: the longest group of a chunk first, to
the rank that has had the fewest tokens of the step so far (Graham 1969: with one chunk the fullest rank has at most 4/3
of the best possible). It depends on nothing but the groups in order, so every rank gets the same cut, whoever asks
first.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass

from streamrl.records import RolloutGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """What one rank trains on of one chunk, and the totals of the step so far, over all ranks and this chunk included:
    with the last chunk those of the whole global batch, to normalise by.

    Example: Shard(groups=[...8 groups], num_groups=16, num_rollouts=128, num_tokens=5120, num_response_tokens=1890).
    """

    groups: list[RolloutGroup]  # of this rank, in order of issue; may be empty
    num_groups: int  # of all ranks and chunks so far, like the rest
    num_rollouts: int
    num_tokens: int
    num_response_tokens: int
    is_last: bool = True  # chunk of the step; a batch that is not streamed is one chunk


class StepCut:
    """One step's groups, as far as they were sampled, and their cut.

    Args:
        size: B, groups of the whole step.
        chunk_size: groups of a chunk; the last one may be smaller.
        world_size: number of ranks.
    """

    def __init__(self, *, size: int, chunk_size: int, world_size: int) -> None:
        self._size = size
        self._chunk_size = chunk_size
        self._groups: list[RolloutGroup] = []
        self._load = [0] * world_size
        self._chunks: list[list[Shard]] = []  # of each chunk that is complete, the shard of every rank

    @property
    def num_chunks(self) -> int:
        """Chunks that are complete."""
        return len(self._chunks)

    @property
    def missing(self) -> int:
        """Groups that the next chunk still needs; 0 if all chunks are complete."""
        return min((self.num_chunks + 1) * self._chunk_size, self._size) - len(self._groups)

    @property
    def missing_in_step(self) -> int:
        return self._size - len(self._groups)

    def extend(self, groups: Sequence[RolloutGroup]) -> None:
        """The next groups in order of sampling; every chunk that they complete is cut."""
        for group in groups:
            self._groups.append(group)
            if self.missing == 0:
                self._chunks.append(self._cut(self._groups[self.num_chunks * self._chunk_size :]))

    def shard(self, chunk: int, rank: int) -> Shard:
        return self._chunks[chunk][rank]

    def _cut(self, groups: Sequence[RolloutGroup]) -> list[Shard]:
        shares: list[list[int]] = [[] for _ in self._load]
        heap = [(tokens, rank) for rank, tokens in enumerate(self._load)]
        heapq.heapify(heap)
        for index in sorted(range(len(groups)), key=lambda i: (-groups[i].num_tokens, i)):
            tokens, rank = heapq.heappop(heap)
            shares[rank].append(index)
            heapq.heappush(heap, (tokens + groups[index].num_tokens, rank))
        self._load = [tokens for tokens, _ in sorted(heap, key=lambda entry: entry[1])]
        rollouts = [rollout for group in self._groups for rollout in group.rollouts]
        return [
            Shard(
                groups=[groups[i] for i in sorted(indices)],
                num_groups=len(self._groups),
                num_rollouts=len(rollouts),
                num_tokens=sum(r.num_tokens for r in rollouts),
                num_response_tokens=sum(len(r.response_ids) for r in rollouts),
                is_last=self.missing_in_step == 0,
            )
            for indices in shares
        ]


def cut(groups: Sequence[RolloutGroup], world_size: int) -> list[Shard]:
    """One shard per rank of a batch that is there; every group is in exactly one of them."""
    step = StepCut(size=len(groups), chunk_size=len(groups), world_size=world_size)
    step.extend(groups)
    return [step.shard(0, rank) for rank in range(world_size)]
