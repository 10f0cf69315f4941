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
MAX_MASKED_FRACTION = 0.5
WEIGHT_MEAN_RANGE = (0.5, 2.0)
REJECTION_CAPS = {"geometric": 1.01, "k2": 2.0, "k3": 0.01}  # for rejection_cap=0


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


def kept_rollouts(log_ratio: Tensor, response_mask: Tensor, sequences: Sequences, config: AlgorithmConfig) -> Tensor:
    """Which tokens stay when whole rollouts are rejected for being too far from the policy.

    With x = log_ratio of a token and means over the response tokens of a rollout, a rollout stays if

    - `rejection=geometric`: exp(mean x) is in [`rejection_floor`, cap] (geometric-mean rejection, Liu et al. 2025,
      "When speed kills stability"; [0.99, 1.01] by default);
    - `rejection=k2`: mean x^2 / 2 <= cap (2.0 by default); `rejection=k3`: mean (exp x - 1 - x) <= cap (0.01 by
      default): the estimators of KL(mu || p) of Schulman 2020, "Approximating KL divergence";
    - and no token of it has exp x below `veto_floor` or above `veto_cap`, where those are not 0.

    Args:
        log_ratio: [T]; tokens outside the mask are ignored.
        response_mask: [T].
        sequences: the rollout of each token.
        config: names the rejection.

    Returns:
        [T], 1 for tokens of rollouts that stay, 0 for the others.
    """
    log_ratio = log_ratio.detach() * response_mask
    stays = log_ratio.new_ones(sequences.count, dtype=torch.bool)
    cap = config.rejection_cap or REJECTION_CAPS.get(config.rejection, 0.0)
    if config.rejection == "geometric":
        mean = bounded_exp(sequences.mean(log_ratio, response_mask))
        stays = (mean >= config.rejection_floor) & (mean <= cap)
    elif config.rejection == "k2":
        stays = sequences.mean(log_ratio**2 / 2, response_mask) <= cap
    elif config.rejection == "k3":
        stays = sequences.mean(bounded_exp(log_ratio) - 1 - log_ratio, response_mask) <= cap
    ratio = bounded_exp(log_ratio)  # 1 outside the mask
    vetoed = torch.zeros_like(ratio)
    if config.veto_floor > 0:
        vetoed = vetoed + (ratio < config.veto_floor)
    if config.veto_cap > 0:
        vetoed = vetoed + (ratio > config.veto_cap)
    stays = stays & (sequences.sum(vetoed) == 0)
    return sequences.spread(stays.to(log_ratio.dtype))


def interpolated_proximal(log_probs: Tensor, old_log_probs: Tensor, versions: Tensor, policy_version: int) -> Tensor:
    """The proximal log-probs of `proximal: interpolate`: o = mu + a (p - mu), a = clamp((v - 1 - u) / (v - u), 0, 1).

    u is the version that sampled the token, v that of the policy that is trained, so o stands for the policy of
    version v - 1 on the straight line between the two in log space, without a forward pass (A-3PO, 2025, "Approximated
    proximal policy optimization"; AReaL's `loglinear`). A token of version v or v - 1 has o = mu.

    Args:
        log_probs, old_log_probs: [T].
        versions: [T] int64.
        policy_version: v.

    Returns:
        [T] without gradient.
    """
    lag = policy_version - versions
    share = ((lag - 1).to(log_probs.dtype) / lag.clamp(min=1)).clamp(0.0, 1.0)
    return (old_log_probs + share * (log_probs - old_log_probs)).detach()


def second_moment_cutoff(log_ratio: Tensor, threshold: float) -> float:
    """Where M2PO cuts: it keeps the smallest squared log-ratios, as many as have a mean of at most `threshold`.

    Equal values stay or go together, so that the order of the tokens does not matter. The cut is half-way to the first
    value that goes, so that another rounding of the same numbers drops the same tokens.

    Args:
        log_ratio: [K] p - mu of all response tokens of the global batch.
        threshold: `m2_threshold`.

    Returns:
        Tokens with a squared log-ratio up to this stay; inf if all do, -1 if none does.
    """
    squares = (log_ratio.detach().double() ** 2).sort().values
    if len(squares) == 0:
        return -1.0
    means = squares.cumsum(0) / torch.arange(1, len(squares) + 1, dtype=torch.float64, device=squares.device)
    last_of_equals = torch.ones_like(means, dtype=torch.bool)
    last_of_equals[:-1] = squares[1:] > squares[:-1]
    fits = (last_of_equals & (means <= threshold)).nonzero().flatten().tolist()
    if not fits:
        return -1.0
    last = fits[-1]
    return math.inf if last == len(squares) - 1 else float(squares[last] + squares[last + 1]) / 2


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
    """What is wrong with the data of a step by its `offpolicy/...` metrics, and what to do; empty if nothing is."""
    ess, mean = metrics["offpolicy/ess"], metrics["offpolicy/weight_mean"]
    low, high = WEIGHT_MEAN_RANGE
    complaints = []
    if ess < MIN_ESS:
        complaints.append(f"offpolicy/ess is {ess:.2f}, below {MIN_ESS}: few tokens carry most of the weight")
    if not low <= mean <= high:
        complaints.append(f"offpolicy/weight_mean is {mean:.2f}, outside [{low}, {high}], where 1 is expected")
    masked = metrics["offpolicy/masked_fraction"]
    if masked > MAX_MASKED_FRACTION:
        complaints.append(
            f"offpolicy/masked_fraction is {masked:.2f}, above {MAX_MASKED_FRACTION}: most tokens are dropped by the "
            "masks, the rejection or the veto of algorithm"
        )
    if not complaints:
        return ""
    return "; ".join(complaints) + ". The data is far from the policy: lower buffer.max_staleness or learner.lr."
