"""Packing: every rollout once, within the budget, values at their own tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.packing import filler_micro_batch, pack_prompts, pack_rollouts
from streamrl.records import Rollout


def rollout(prompt: list[int], response: list[int], *, version: int = 0, member: int = 0) -> Rollout:
    return Rollout(
        uid="0-000000",
        member=member,
        attempt=0,
        prompt_ids=np.array(prompt, dtype=np.int32),
        response_ids=np.array(response, dtype=np.int32),
        old_log_probs=-np.array(response, dtype=np.float32),
        versions=np.full(len(response), version, dtype=np.int32),
    )


def test_the_example_of_the_docstring() -> None:
    (batch,) = pack_rollouts(
        [rollout([5, 9], [7], version=3), rollout([2], [8, 1], version=4)], torch.tensor([0.5, -2.0]), max_tokens=6
    )
    tokens = batch.tokens
    assert batch.lengths == (3, 3) and batch.num_tokens == 6
    assert tokens["input_ids"].tolist() == [5, 9, 7, 2, 8, 1]
    assert tokens["position_ids"].tolist() == [0, 1, 2, 0, 1, 2]
    assert tokens["response_mask"].tolist() == [0, 0, 1, 0, 1, 1]
    assert tokens["sequence_index"].tolist() == [0, 0, 0, 1, 1, 1]
    assert tokens["old_log_probs"].tolist() == [0, 0, -7, 0, -8, -1]
    assert tokens["versions"].tolist() == [0, 0, 3, 0, 4, 4]
    assert tokens["advantages"].tolist() == [0.5, 0.5, 0.5, -2.0, -2.0, -2.0]


@settings(max_examples=60, deadline=None)
@given(shapes=st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), max_size=20), max_tokens=st.integers(18, 60))
def test_every_rollout_is_packed_once_within_the_budget(shapes: list[tuple[int, int]], max_tokens: int) -> None:
    rollouts = [rollout([i] * p, [i] * r) for i, (p, r) in enumerate(shapes)]
    batches = pack_rollouts(rollouts, torch.arange(len(shapes)).float(), max_tokens=max_tokens)
    seen = []
    for batch in batches:
        assert 0 < batch.num_tokens <= max_tokens
        start = 0
        for number, length in enumerate(batch.lengths):
            part = batch.tokens[start : start + length]
            i = int(part["input_ids"][0])
            seen.append(i)
            assert length == sum(shapes[i])
            assert int(part["response_mask"].sum()) == shapes[i][1]
            assert part["position_ids"].tolist() == list(range(length))
            assert (part["sequence_index"] == number).all() and (part["advantages"] == float(i)).all()
            start += length
        assert start == batch.num_tokens
    assert sorted(seen) == list(range(len(shapes)))
    total = sum(map(sum, shapes))
    assert len(batches) <= 2 * -(-total // max_tokens)  # next-fit: no two neighbours would fit in one


def test_sequences_of_one_micro_batch_are_alike_in_length() -> None:
    rollouts = [rollout([1], [1] * n) for n in (30, 3, 30, 3, 30, 3)]
    batches = pack_rollouts(rollouts, torch.zeros(6), max_tokens=93)
    assert [batch.lengths for batch in batches] == [(31, 31, 31), (4, 4, 4)]


def test_a_rollout_larger_than_the_budget_is_refused_with_the_remedy() -> None:
    with pytest.raises(ValueError, match="learner.micro_batch_tokens>=7"):
        pack_rollouts([rollout([1, 2, 3], [1, 2, 3, 4])], torch.zeros(1), max_tokens=6)


def test_a_rollout_without_prompt_or_response_is_refused() -> None:
    for broken in (rollout([], [1]), rollout([1], [])):
        with pytest.raises(ValueError, match="at least one token each"):
            pack_rollouts([broken], torch.zeros(1), max_tokens=6)


def test_no_rollouts_give_no_micro_batch() -> None:
    assert pack_rollouts([], torch.zeros(0), max_tokens=10) == []


def test_a_filler_has_tokens_but_no_response_token() -> None:
    filler = filler_micro_batch()
    assert filler.num_tokens > 1 and not filler.tokens["response_mask"].any()


def test_probe_sequences_are_scored_from_their_second_token_on() -> None:
    batch = pack_prompts([[4, 5, 6], [7, 8]])
    assert batch.tokens["response_mask"].tolist() == [0, 1, 1, 0, 1]


def test_values_go_from_rollouts_to_their_tokens_and_back() -> None:
    rollouts = [rollout([1], [2] * n) for n in (3, 1, 7, 5)]
    batches = [*pack_rollouts(rollouts, torch.zeros(4), max_tokens=9), filler_micro_batch()]
    assert sorted(i for batch in batches for i in batch.rollouts) == [0, 1, 2, 3]
    sums = torch.zeros(4, dtype=torch.float64)
    for batch in batches:
        batch.set_advantages(batch.spread(torch.tensor([0.5, 1.5, 2.5, 3.5])))
        batch.sum_over_rollouts(batch.tokens["advantages"] * batch.tokens["response_mask"], sums)
    assert sums.tolist() == [0.5 * 3, 1.5 * 1, 2.5 * 7, 3.5 * 5]
