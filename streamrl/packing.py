"""Rollouts -> micro-batches of packed, padding-free tokens under a token budget.

The sequences of a micro-batch stand one after the other on one token axis; `position_ids` begin at 0 in each.
A micro-batch may hold any rollouts: they are sorted by length, which keeps the sequences of one micro-batch alike (the
CPU attention pads to the longest of them). The only file that uses
TensorDict.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from tensordict import TensorDict
from torch import Tensor

from streamrl.records import Rollout


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """Packed sequences for one forward and backward.

    Example: prompts [5, 9] and [2], responses [7] and [8, 1]: input_ids [5, 9, 7, 2, 8, 1], position_ids [0, 1, 2, 0,
    1, 2], response_mask [0, 0, 1, 0, 1, 1], sequence_index [0, 0, 0, 1, 1, 1], lengths (3, 3). The values of a
    response token stand at that token's own place.
    """

    tokens: TensorDict  # [T]: input_ids, position_ids, sequence_index, versions int64; response_mask, old_log_probs,
    # advantages float32
    lengths: tuple[int, ...]  # tokens of each sequence, prompt and response
    rollouts: tuple[int, ...] = ()  # which of `pack_rollouts`'s rollouts each sequence is

    @property
    def num_tokens(self) -> int:
        return sum(self.lengths)

    def to(self, device: torch.device) -> MicroBatch:
        return MicroBatch(tokens=self.tokens.to(device), lengths=self.lengths, rollouts=self.rollouts)

    def set_advantages(self, advantages: Tensor) -> None:
        """Replace the advantages by [T]."""
        self.tokens["advantages"] = advantages.float()

    def spread(self, values: Tensor) -> Tensor:
        """[R] -> [T]: the value of each token's rollout, in the order of `pack_rollouts`'s rollouts; 0 in a filler."""
        if not self.rollouts:
            return values.new_zeros(self.num_tokens)
        return values[list(self.rollouts)][self.tokens["sequence_index"]]

    def sum_over_rollouts(self, values: Tensor, into: Tensor) -> None:
        """Add [T] values to [R] `into`, each to its token's rollout."""
        if self.rollouts:
            of_token = torch.tensor(self.rollouts)[self.tokens["sequence_index"]]
            into.index_add_(0, of_token, values.to(into.dtype))


def pack_rollouts(rollouts: Sequence[Rollout], advantages: Tensor, *, max_tokens: int) -> list[MicroBatch]:
    """Micro-batches that hold every rollout once and at most `max_tokens` tokens each.

    Args:
        rollouts: R rollouts with at least one prompt and one response token each.
        advantages: [R].
        max_tokens: the budget.

    Raises:
        ValueError: a rollout alone is larger than the budget, or has an empty prompt or response.
    """
    assert len(rollouts) == len(advantages)
    for rollout in rollouts:
        if rollout.num_tokens > max_tokens:
            raise ValueError(
                f"rollout {rollout.key}: {rollout.num_tokens} tokens do not fit in max_tokens ({max_tokens}). "
                f"Set learner.micro_batch_tokens>={rollout.num_tokens}."
            )
        if len(rollout.prompt_ids) == 0 or len(rollout.response_ids) == 0:
            raise ValueError(f"rollout {rollout.key}: prompt and response must have at least one token each.")
    bins: list[list[int]] = []
    room = 0
    for i in sorted(range(len(rollouts)), key=lambda i: rollouts[i].num_tokens, reverse=True):
        if rollouts[i].num_tokens > room:
            bins.append([])
            room = max_tokens
        bins[-1].append(i)
        room -= rollouts[i].num_tokens
    numbers = advantages.float().numpy()
    return [_pack([rollouts[i] for i in chosen], numbers[chosen], positions=chosen) for chosen in bins]


def pack_prompts(sequences: Sequence[Sequence[int]]) -> MicroBatch:
    """One micro-batch in which every token but the first of each sequence counts as a response token."""
    return _pack(
        [
            Rollout(
                uid="",
                member=0,
                attempt=0,
                prompt_ids=np.array(ids[:1], dtype=np.int32),
                response_ids=np.array(ids[1:], dtype=np.int32),
                old_log_probs=np.zeros(len(ids) - 1, dtype=np.float32),
                versions=np.zeros(len(ids) - 1, dtype=np.int32),
            )
            for ids in sequences
        ],
        np.zeros(len(sequences), dtype=np.float32),
    )


def filler_micro_batch() -> MicroBatch:
    """The smallest micro-batch that runs through the whole model; without a response token it has no gradient."""
    batch = pack_prompts([[0, 0]])
    batch.tokens["response_mask"].zero_()
    return batch


def _pack(rollouts: Sequence[Rollout], advantages: np.ndarray, *, positions: Sequence[int] = ()) -> MicroBatch:
    lengths = [r.num_tokens for r in rollouts]
    total = sum(lengths)
    columns = {
        "input_ids": np.empty(total, dtype=np.int64),
        "position_ids": np.empty(total, dtype=np.int64),
        "sequence_index": np.repeat(np.arange(len(rollouts)), lengths),
        "versions": np.zeros(total, dtype=np.int64),
        "response_mask": np.zeros(total, dtype=np.float32),
        "old_log_probs": np.zeros(total, dtype=np.float32),
        "advantages": np.repeat(advantages.astype(np.float32), lengths),
    }
    start = 0
    for rollout, length in zip(rollouts, lengths, strict=True):
        middle, end = start + len(rollout.prompt_ids), start + length
        columns["input_ids"][start:middle] = rollout.prompt_ids
        columns["input_ids"][middle:end] = rollout.response_ids
        columns["position_ids"][start:end] = np.arange(length)
        columns["versions"][middle:end] = rollout.versions
        columns["response_mask"][middle:end] = 1.0
        columns["old_log_probs"][middle:end] = rollout.old_log_probs
        start = end
    tensors = {name: torch.from_numpy(column) for name, column in columns.items()}
    return MicroBatch(tokens=TensorDict(tensors, batch_size=[total]), lengths=tuple(lengths), rollouts=tuple(positions))
