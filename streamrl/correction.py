"""Off-policy correction: importance weights between the policy that sampled a token and the one that is trained.

Vocabulary: `mu` = old_log_probs (behaviour), `o` = prox_log_probs (proximal), `p` = log_probs (current). Every
log-ratio is clamped to [-20, 20] before exp, and no weight carries a gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from streamrl.config import AlgorithmConfig

LOG_RATIO_BOUND = 20.0
MIN_ESS = 0.3
WEIGHT_MEAN_RANGE = (0.5, 2.0)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio clamped to [-20, 20]: finite in float32, squares too."""
    return log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()


class Sequences:
    """Sums over the tokens of each rollout in a packed batch.

    Example: `Sequences(tensor([7, 7, 9]))` has two rollouts; `sum(tensor([1., 2., 4.]))` is `tensor([3., 4.])` and
    `spread` takes it back to `tensor([3., 3., 4.])`.
    """

    def __init__(self, sequence_index: Tensor) -> None:
        names, self.index = torch.unique(sequence_index, return_inverse=True)  # [T], dense
        self.count = len(names)

    def sum(self, values: Tensor) -> Tensor:
        """[T] -> [N]."""
        return values.new_zeros(self.count).index_add(0, self.index, values)

    def mean(self, values: Tensor, mask: Tensor) -> Tensor:
        """[T], [T] -> [N]: mean over the tokens that the mask keeps; 0 for a rollout without any."""
        return self.sum(values * mask) / self.sum(mask).clamp(min=1)

    def spread(self, per_sequence: Tensor) -> Tensor:
        """[N] -> [T]."""
        return per_sequence.index_select(0, self.index)


def importance_weights(
    log_ratio: Tensor, response_mask: Tensor, sequences: Sequences, config: AlgorithmConfig
) -> Tensor:
    """The weight of every token from its log-ratio `o - mu`.

    With r = exp(o - mu) of a token and R = exp(sum of o - mu) of its rollout, C = `correction_cap`, c =
    `correction_floor`:

    - `none`: 1.
    - `token_truncate`: min(r, C); truncated importance sampling (Ionides 2008; Yao et al. 2025, "TIS").
    - `sequence_truncate`: min(R, C) for every token of the rollout.
    - `token_mask`: r inside [c, C], 0 outside (IcePop, Ring-1T 2025).
    - `sequence_mask`: R inside [c, C], 0 outside, for every token of the rollout (masked importance sampling, Liu et
      al. 2025, "When speed kills stability").

    Args:
        log_ratio: [T]; tokens outside the mask are ignored.
        response_mask: [T], 1 where a token was sampled by the policy.
        sequences: the rollout of each token.
        config: names the correction.

    Returns:
        [T] without gradient. 0 means: the token was dropped.
    """
    log_ratio = log_ratio.detach() * response_mask
    if config.correction == "none":
        return torch.ones_like(log_ratio)
    if config.correction.startswith("sequence"):
        log_ratio = sequences.spread(sequences.sum(log_ratio))
    weight = bounded_exp(log_ratio)
    if config.correction.endswith("truncate"):
        return weight.clamp(max=config.correction_cap)
    inside = (weight >= config.correction_floor) & (weight <= config.correction_cap)
    return torch.where(inside, weight, torch.zeros_like(weight))


def off_policy_sums(log_probs: Tensor, old_log_probs: Tensor, response_mask: Tensor) -> dict[str, Tensor]:
    """Sums over response tokens from which `off_policy_metrics` are computed; they add up over micro-batches and ranks.

    They describe the raw token ratio r = exp(p - mu), before any truncation, so that they show how far the data is
    from the policy and not how well the correction hides it.

    Args:
        log_probs, old_log_probs, response_mask: [T].

    Returns:
        Scalars (float64): count, and the sums of r, r^2, mu - p and r - 1 - log r.
    """
    chosen = response_mask.bool()
    log_ratio = (log_probs.detach()[chosen] - old_log_probs[chosen]).double()
    ratio = bounded_exp(log_ratio)
    return {
        "num_tokens": chosen.sum().double(),
        "ratio": ratio.sum(),
        "ratio_squared": (ratio**2).sum(),
        "k1": -log_ratio.sum(),
        "k3": (ratio - 1 - log_ratio).sum(),
    }


def off_policy_metrics(sums: Mapping[str, float]) -> dict[str, float]:
    """The diagnostics of one step, from totals of `off_policy_sums` over the global batch.

    - `ess`: effective sample size (sum r)^2 / (N sum r^2), 1 when nothing is off-policy. Below 0.3 is a warning.
    - `weight_mean`: mean r; its expectation is 1. Outside [0.5, 2] is a warning.
    - `chi2`: mean r^2 - 1. `kl_k1`, `kl_k3`: KL(mu || p) by the k1 = mu - p and k3 = r - 1 - log r estimators
      (Schulman 2020, "Approximating KL divergence").
    """
    count = max(sums["num_tokens"], 1.0)
    return {
        "offpolicy/ess": sums["ratio"] ** 2 / (count * sums["ratio_squared"]) if sums["ratio_squared"] else math.nan,
        "offpolicy/weight_mean": sums["ratio"] / count,
        "offpolicy/chi2": sums["ratio_squared"] / count - 1.0,
        "offpolicy/kl_k1": sums["k1"] / count,
        "offpolicy/kl_k3": sums["k3"] / count,
    }


def off_policy_warning(metrics: Mapping[str, float]) -> str:
    """What is wrong with the data of a step by `off_policy_metrics`, and what to do; empty if nothing is."""
    ess, mean = metrics["offpolicy/ess"], metrics["offpolicy/weight_mean"]
    low, high = WEIGHT_MEAN_RANGE
    complaints = []
    if ess < MIN_ESS:
        complaints.append(f"offpolicy/ess is {ess:.2f}, below {MIN_ESS}: few tokens carry most of the weight")
    if not low <= mean <= high:
        complaints.append(f"offpolicy/weight_mean is {mean:.2f}, outside [{low}, {high}], where 1 is expected")
    if not complaints:
        return ""
    return "; ".join(complaints) + ". The data is far from the policy: lower buffer.max_staleness or learner.lr."
