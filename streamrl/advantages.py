"""Advantage estimators over the rewards of a group: one number per rollout, no gradient. Those that give one number
per token are in token_advantages.py.

Everything is computed in float64, because a group of equal rewards must give exactly zero and not rounding noise
divided by a tiny standard deviation.
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.config import AlgorithmConfig
from streamrl.custom import custom_function
from streamrl.errors import ConfigError

EPSILON = 1e-6  # added to the denominator of normalised estimators, as verl does


def compute_advantages(
    rewards: Tensor, group_index: Tensor, config: AlgorithmConfig, *, baselines: Tensor | None = None
) -> Tensor:
    """The advantage of every rollout.

    - `grpo`: (r - mean) / (std + 1e-6) over the group, sample std (Shao et al. 2024, arXiv 2402.03300, section
      4.1.2).
    - `dr_grpo`: r - mean, so that easy and hard prompts weigh the same (Liu et al. 2025, arXiv 2503.20783).
    - `rloo`: r minus the mean of the other members (Ahmadian et al. 2024, arXiv 2402.14740).
    - `reinforce_pp`: (r - mean) / (std + 1e-6) over all rewards (Hu et al. 2025, arXiv 2501.03262). The learner
      normalises over tokens, not over rollouts (token_advantages.py); this is that for responses of one token.
    - `maxrl`: (r - mean) / mean over the group, 0 where the mean is 0 (Tajwar et al. 2026, maximum likelihood RL). It
      is meant for rewards in [0, 1].
    - `remax`: r minus the reward of the greedy response to the same prompt (Li et al. 2024, arXiv 2310.10505, eq. 7).
      That response is of the same policy, so the baseline needs no critic and no other member; it is independent of
      what was sampled, so the gradient stays unbiased.
    - `python:module:function`: the user's function(rewards [R] float64, group_index [R] int64, config) -> [R]. It sees
      one rank's whole groups, not the global batch.

    A group of one member has no baseline of its own: its advantage is 0 for the group estimators.

    Args:
        rewards: [R] float.
        group_index: [R] int64; equal numbers are one group. The numbers need not be dense or sorted.
        config: names the estimator.
        baselines: [R], for `remax`: the greedy response's reward, the same number for all members of a group.

    Returns:
        [R], the dtype of `rewards`.
    """
    assert rewards.ndim == 1 and rewards.shape == group_index.shape
    exact = rewards.double()
    if len(rewards) == 0:  # a rank without data
        return rewards.clone()
    if config.advantage.startswith("python:"):
        return _custom_advantages(exact, group_index, config).to(rewards.dtype)
    if config.advantage == "remax":
        if baselines is None:
            raise ValueError("baselines (None): algorithm.advantage=remax needs the rewards of the greedy responses")
        return (exact - baselines).to(rewards.dtype)
    if config.advantage == "reinforce_pp":
        return normalised(exact, *sample_moments(exact)).to(rewards.dtype)
    _, group = torch.unique(group_index, return_inverse=True)
    count = torch.bincount(group).double()
    group_mean = torch.zeros_like(count).index_add_(0, group, exact) / count
    centred = exact - group_mean[group]
    if config.advantage == "dr_grpo":
        advantages = centred
    elif config.advantage == "rloo":
        # r - (sum - r) / (n - 1) == (r - mean) * n / (n - 1)
        advantages = centred * (count / (count - 1).clamp(min=1))[group]
    elif config.advantage == "maxrl":
        positive = group_mean[group] > EPSILON
        advantages = torch.where(positive, centred / group_mean[group].clamp(min=EPSILON), torch.zeros_like(centred))
    else:
        squares = torch.zeros_like(count).index_add_(0, group, centred**2)
        std_per_group = (squares / (count - 1).clamp(min=1)).sqrt()
        advantages = centred / (std_per_group[group] + EPSILON)
    return advantages.to(rewards.dtype)


def _custom_advantages(rewards: Tensor, group_index: Tensor, config: AlgorithmConfig) -> Tensor:
    advantages = custom_function(config.advantage, setting="algorithm.advantage")(rewards, group_index, config)
    if not isinstance(advantages, Tensor) or advantages.shape != rewards.shape:
        got = list(advantages.shape) if isinstance(advantages, Tensor) else type(advantages).__name__
        raise ConfigError(
            f"algorithm.advantage ({config.advantage}): must return one number per rollout, a tensor "
            f"{list(rewards.shape)}; it returned {got}."
        )
    return advantages


def normalised(values: Tensor, mean: float, std: float) -> Tensor:
    """(x - mean) / (std + 1e-6)."""
    return (values - mean) / (std + EPSILON)


def sample_moments(rewards: Tensor) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for fewer than two numbers) of [R] rewards."""
    exact = rewards.double()
    if len(exact) < 2:
        return float(exact.sum()), 0.0
    return float(exact.mean()), float(exact.std())
