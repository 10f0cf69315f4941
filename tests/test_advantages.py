"""Advantages against references written from the papers, one group at a time in plain Python."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamrl.advantages import compute_advantages
from streamrl.config import AlgorithmConfig

ESTIMATORS = ("grpo", "dr_grpo", "rloo", "reinforce_pp", "maxrl")


def reference(rewards: list[float], groups: list[int], estimator: str) -> list[float]:
    """float64, rollout by rollout."""
    advantages = []
    for reward, group in zip(rewards, groups, strict=True):
        mine = (
            rewards if estimator == "reinforce_pp" else [r for r, g in zip(rewards, groups, strict=True) if g == group]
        )
        n = len(mine)
        mean = math.fsum(mine) / n
        std = math.sqrt(math.fsum((r - mean) ** 2 for r in mine) / (n - 1)) if n > 1 else 0.0
        if estimator in ("grpo", "reinforce_pp"):
            advantages.append((reward - mean) / (std + 1e-6))
        elif estimator == "dr_grpo":
            advantages.append(reward - mean)
        elif estimator == "rloo":
            others = (math.fsum(mine) - reward) / (n - 1) if n > 1 else reward
            advantages.append(reward - others)
        else:
            advantages.append((reward - mean) / mean if mean > 1e-6 else 0.0)
    return advantages


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6), seed=st.integers(0, 1 << 16))
def test_remax_compares_with_the_greedy_response_to_the_same_prompt(sizes: list[int], seed: int) -> None:
    """Li et al. 2024, arXiv 2310.10505: the weight of grad log pi(y | x) is r(x, y) - r(x, greedy(x))."""
    numbers = random.Random(seed)
    prompts = [(7 * i + 3, numbers.random()) for i, size in enumerate(sizes) for _ in range(size)]
    numbers.shuffle(prompts)
    greedy = {prompt: numbers.random() for prompt, _ in prompts}
    samples = [(prompt, numbers.random()) for prompt, _ in prompts]
    ours = compute_advantages(
        torch.tensor([reward for _, reward in samples], dtype=torch.float64),
        torch.tensor([prompt for prompt, _ in samples]),
        AlgorithmConfig(advantage="remax"),
        baselines=torch.tensor([greedy[prompt] for prompt, _ in samples], dtype=torch.float64),
    )
    assert ours.tolist() == pytest.approx([reward - greedy[prompt] for prompt, reward in samples], rel=1e-12)


def test_the_gradient_of_remax_is_the_policy_gradient() -> None:
    """Over all responses of a softmax policy, in float64: E[(r - r(greedy)) grad log pi] = grad E[r]."""
    logits = torch.tensor([0.3, -1.2, 0.9, 0.1], dtype=torch.float64, requires_grad=True)
    rewards = torch.tensor([1.0, 0.0, 0.25, 0.5], dtype=torch.float64)
    log_probs = torch.log_softmax(logits, 0)
    advantages = compute_advantages(
        rewards,
        torch.zeros(4, dtype=torch.int64),
        AlgorithmConfig(advantage="remax"),
        baselines=rewards[logits.argmax()].expand(4),
    )
    (ours,) = torch.autograd.grad((log_probs.detach().exp() * advantages * log_probs).sum(), logits, retain_graph=True)
    (truth,) = torch.autograd.grad((log_probs.exp() * rewards).sum(), logits)
    assert ours.tolist() == pytest.approx(truth.tolist(), abs=1e-12)


def test_remax_without_greedy_rewards_is_an_error() -> None:
    with pytest.raises(ValueError, match="rewards of the greedy responses"):
        compute_advantages(torch.ones(2), torch.zeros(2, dtype=torch.int64), AlgorithmConfig(advantage="remax"))


@pytest.mark.parametrize("estimator", ESTIMATORS)
@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=6),
    rewards=st.data(),
    seed=st.integers(0, 1 << 16),
)
def test_every_estimator_equals_its_reference(
    estimator: str, sizes: list[int], rewards: st.DataObject, seed: int
) -> None:
    groups = [7 * i + 3 for i, size in enumerate(sizes) for _ in range(size)]
    random.Random(seed).shuffle(groups)
    values = rewards.draw(st.lists(st.floats(0, 1, width=16), min_size=len(groups), max_size=len(groups)))
    ours = compute_advantages(
        torch.tensor(values, dtype=torch.float64), torch.tensor(groups), AlgorithmConfig(advantage=estimator)
    )
    assert ours.tolist() == pytest.approx(reference(values, groups, estimator), rel=1e-6, abs=1e-6)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_equal_rewards_give_exactly_no_advantage(estimator: str) -> None:
    rewards = torch.full((8,), 0.1)  # not representable: the mean of eight of them is rounded in float32
    advantages = compute_advantages(rewards, torch.zeros(8, dtype=torch.int64), AlgorithmConfig(advantage=estimator))
    assert advantages.dtype == torch.float32
    assert advantages.abs().max() < 1e-8


def test_no_rollouts_give_no_advantages() -> None:
    nothing = compute_advantages(torch.zeros(0), torch.zeros(0, dtype=torch.int64), AlgorithmConfig())
    assert nothing.shape == (0,)
