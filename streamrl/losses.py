"""Policy losses: pure functions on packed tokens.

`p` = log_probs (with gradient), `o` = prox_log_probs, `mu` = old_log_probs, `A` = advantages. A token's loss is
averaged over the *global* batch: the caller passes the global count as `denominator`, and then losses and gradients
of micro-batches and ranks simply add up.

Which policy anchors the ratio. One optimizer step is taken per batch, so at that step the proximal policy of
`recompute` is the current one, `o == p.detach()`: the PPO ratio is 1, its clip never acts, and the weight exp(o - mu)
carries the whole off-policy correction. No second forward is needed for it. With `bypass`, `o := mu`: the clip itself
limits the step away from the behaviour policy, and there is no weight. `recompute` with truncated weights is the
default because it keeps a gradient for every token, however far its policy has moved since, where the clip of
`bypass` discards those that have moved already; `recompute` without any correction would train on stale data as if it
were fresh, and `check_config` refuses it.

Adding a loss. A loss is a function `(inputs: LossInputs, config: AlgorithmConfig)` that gives the loss of every token;
`LOSSES` lists those that are here, and `algorithm.loss: python:my_module:my_loss` names one of yours. Masks, rejection,
entropy, KL and aggregation are applied to what it returns, so it needs to know nothing of them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from streamrl.config import AlgorithmConfig
from streamrl.correction import (
    Sequences,
    bounded_exp,
    importance_weights,
    interpolated_proximal,
    kept_rollouts,
    off_policy_sums,
    second_moment_cutoff,
)
from streamrl.custom import custom_function
from streamrl.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """What a loss is made of: every tensor [T], 0 outside the response mask. Only `log_probs` has a gradient."""

    log_probs: Tensor  # p, of the policy that is trained
    old_log_probs: Tensor  # mu, of the policy that sampled
    prox_log_probs: Tensor  # o: mu for bypass, p without gradient for recompute, between them for interpolate
    advantages: Tensor
    response_mask: Tensor  # 1 where a token was sampled by the policy
    weights: Tensor  # importance weights of `algorithm.correction`; 0 where a token is dropped
    sequences: Sequences  # sums and means over the tokens of each rollout


LossFunction = Callable[[LossInputs, AlgorithmConfig], tuple[Tensor, Tensor] | Tensor]


def policy_loss(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    sequence_index: Tensor,
    config: AlgorithmConfig,
    *,
    prox_log_probs: Tensor | None = None,
    ref_log_probs: Tensor | None = None,
    entropy: Tensor | None = None,
    versions: Tensor | None = None,
    policy_version: int | None = None,
    m2_cutoff: float | None = None,
    denominator: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy loss of a packed batch: the function that `algorithm.loss` names, token by token, then aggregated.

    `entropy_coef` times the entropy is subtracted, `kl_coef` times the divergence from the reference added, token by
    token, without a weight. Tokens with a mask of 0 have no effect whatever their other values. A token that the
    correction or the rejection drops has no loss at all.

    Args:
        log_probs: [T] current log-probs, with gradient.
        old_log_probs: [T] behaviour log-probs.
        advantages: [T].
        response_mask: [T], 1 where a token was sampled by the policy.
        sequence_index: [T] int64, the rollout of each token.
        config: names loss, correction and aggregation.
        prox_log_probs: [T] proximal log-probs for `proximal: recompute`; by default those of the current policy.
        ref_log_probs: [T] reference log-probs, needed for `kl_coef` > 0.
        entropy: [T], with gradient, needed for `entropy_coef` > 0; else only for the metrics.
        versions: [T] int64, the version that sampled each token, and
        policy_version: the version of the current policy; both needed for `proximal: interpolate`.
        m2_cutoff: for `m2po`, `second_moment_cutoff` of the global batch; by default that of this batch.
        denominator: tokens (`token_mean`) or rollouts (the other aggregations) of the global batch, masked ones
            included; by default the count in this batch that `masked_denominator` names.

    Returns:
        The scalar loss, and sums over this batch that add up over micro-batches and ranks: those of
        `off_policy_sums`, and `clipped_tokens`, `masked_tokens`, `rejected_tokens`, `truncated_tokens`, `entropy`,
        `kl_ref` (of a KL in the loss), `kept_denominator`.
    """
    mask = response_mask.to(log_probs.dtype)
    chosen = mask.bool()
    # Outside the mask anything may stand, infinities too: 0 * inf would poison the sum, so it is replaced, not
    # multiplied.
    current = torch.where(chosen, log_probs, 0.0)
    behaviour = torch.where(chosen, old_log_probs, 0.0)
    advantages = torch.where(chosen, advantages, 0.0)
    sequences = Sequences(sequence_index)
    if config.proximal == "bypass":
        proximal = behaviour
    elif config.proximal == "interpolate":
        if versions is None or policy_version is None:
            raise ValueError("versions, policy_version (None): algorithm.proximal=interpolate needs them")
        proximal = interpolated_proximal(current, behaviour, versions, policy_version)
    elif prox_log_probs is None:
        proximal = current.detach()
    else:
        proximal = torch.where(chosen, prox_log_probs, 0.0).detach()

    # How far the data is: of these losses there is no proximal policy, of bypass it is the behaviour policy itself.
    from_current = config.proximal == "bypass" or config.loss in _WITHOUT_PROXIMAL
    drift = (current if from_current else proximal).detach() - behaviour
    stays = kept_rollouts(drift, mask, sequences, config)
    if config.loss == "m2po":
        cutoff = second_moment_cutoff(drift[chosen], config.m2_threshold) if m2_cutoff is None else m2_cutoff
        weights = (drift**2 <= cutoff).to(drift.dtype)
    elif config.loss in ("cispo", "topr"):
        weights = torch.ones_like(drift)  # their own ratio is the weight
    elif config.loss == "reinforce_is":
        weights = importance_weights(drift, mask, sequences, config)
    else:
        weights = importance_weights(proximal - behaviour, mask, sequences, config)
    weights = weights * stays
    inputs = LossInputs(
        log_probs=current,
        old_log_probs=behaviour,
        prox_log_probs=proximal,
        advantages=advantages,
        response_mask=mask,
        weights=weights,
        sequences=sequences,
    )
    token_loss, clipped = _token_loss(inputs, config)

    kept = mask * (weights > 0)
    if config.entropy_coef > 0:
        if entropy is None:
            raise ValueError(f"entropy (None): algorithm.entropy_coef ({config.entropy_coef}) needs it")
        token_loss = token_loss - config.entropy_coef * torch.where(chosen, entropy, 0.0)
    divergence = None
    if config.kl_coef > 0 and config.kl_in == "loss":
        if ref_log_probs is None:
            raise ValueError(f"ref_log_probs (None): algorithm.kl_coef ({config.kl_coef}) needs them")
        divergence = divergence_estimate(torch.where(chosen, ref_log_probs, 0.0).detach() - current, config)
        token_loss = token_loss + config.kl_coef * divergence
    counted = kept if config.masked_denominator == "kept" else mask
    loss, own_denominator = _aggregate(token_loss * kept, counted, sequences, config)
    loss = loss / (own_denominator.clamp(min=1) if denominator is None else denominator)

    sums = off_policy_sums(current, behaviour, mask)
    sums["clipped_tokens"] = (clipped & kept.bool()).sum().double()
    sums["masked_tokens"] = (mask - kept).sum().double()
    sums["rejected_tokens"] = (mask * (1 - stays)).sum().double()
    truncates = config.correction.endswith("truncate")
    sums["truncated_tokens"] = (chosen & truncates & (weights == config.correction_cap)).sum().double()
    sums["kept_denominator"] = own_denominator.double()
    sums["entropy"] = torch.zeros_like(sums["k1"]) if entropy is None else entropy.detach()[chosen].double().sum()
    if divergence is not None:
        sums["kl_ref"] = divergence.detach().double().sum()
    return loss, sums


def _token_loss(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """[T] and [T] bool, of a loss here or of the user's, which may leave out the second."""
    if config.loss in LOSSES:
        function = LOSSES[config.loss]
    else:
        function = custom_function(config.loss, setting="algorithm.loss")
    result = function(inputs, config)
    loss, clipped = (result, torch.zeros_like(result).bool()) if isinstance(result, Tensor) else result
    if loss.shape != inputs.log_probs.shape:
        raise ConfigError(
            f"algorithm.loss ({config.loss}): must return the loss of every token, {list(inputs.log_probs.shape)}; it "
            f"returned {list(loss.shape)}. Do not sum or average: algorithm.aggregation does."
        )
    return loss, clipped


def ppo_clip(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """w * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(p - o), w = the weight.

    Schulman et al. 2017, arXiv 1707.06347; clip-higher: DAPO, arXiv 2503.14476; w = exp(o - mu): decoupled PPO, Hilton
    et al. 2021, arXiv 2110.00641. `dual_clip` c bounds the loss of A < 0 by -A c (Ye et al. 2019, arXiv 1912.09729).

    Returns:
        [T] the loss, and [T] bool, where a clip took the gradient away. So do all losses here.
    """
    ratio = bounded_exp(inputs.log_probs - inputs.prox_log_probs)
    surrogate, clipped = _clipped_surrogate(ratio, inputs.advantages, config)
    return inputs.weights * surrogate, clipped


def gspo(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """`ppo_clip` with the rollout's ratio exp(mean(p - o)) for each of its tokens (Zheng et al. 2025, arXiv
    2507.18071, eq. 14). Its clip range is in the order of 3e-4; the paper aggregates by `sequence_mean_token_mean`.
    """
    current = inputs.log_probs
    mean = inputs.sequences.mean(current - inputs.prox_log_probs, inputs.response_mask).detach()
    ratio = bounded_exp(inputs.sequences.spread(mean) + current - current.detach())
    surrogate, clipped = _clipped_surrogate(ratio, inputs.advantages, config)
    return inputs.weights * surrogate, clipped


def reinforce_is(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """-w p A, w the weight of exp(p - mu): the policy gradient with importance sampling."""
    return -inputs.weights * inputs.log_probs * inputs.advantages, torch.zeros_like(inputs.log_probs).bool()


def cispo(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """-clip(exp(p - mu), 1 - clip_low, 1 + clip_high) p A, the clipped ratio without gradient (MiniMax-M1 2025, arXiv
    2506.13585), anchored on mu because the data is off-policy. Clipped tokens keep a gradient.
    """
    ratio = bounded_exp(inputs.log_probs.detach() - inputs.old_log_probs)
    clipped_ratio = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -clipped_ratio * inputs.log_probs * inputs.advantages, clipped_ratio != ratio


def topr(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """-p A for A >= 0, -min(R, 1) p A for A < 0, R = exp(sum(p - mu)) of the rollout without gradient: tapered
    off-policy REINFORCE (Le Roux et al. 2025, arXiv 2503.14286). Good responses are learned however unlikely they have
    become, bad ones are left alone once they are unlikely.
    """
    log_ratio = (inputs.log_probs.detach() - inputs.old_log_probs) * inputs.response_mask
    ratio = bounded_exp(inputs.sequences.spread(inputs.sequences.sum(log_ratio)))
    taper = torch.where(inputs.advantages < 0, ratio.clamp(max=1.0), torch.ones_like(ratio))
    return -taper * inputs.log_probs * inputs.advantages, (inputs.advantages < 0) & (ratio > 1)


def m2po(inputs: LossInputs, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """-M A exp(p - mu), M in {0, 1} without gradient: of the batch, the tokens with the largest (p - mu)^2 are dropped
    until its mean over the others is at most `m2_threshold` (Zheng et al. 2025, "Prosperity before collapse", arXiv
    2510.01161). The weights are M.
    """
    ratio = bounded_exp(inputs.log_probs - inputs.old_log_probs)
    return -inputs.weights * ratio * inputs.advantages, torch.zeros_like(ratio).bool()


LOSSES: dict[str, LossFunction] = {
    "ppo_clip": ppo_clip,
    "reinforce_is": reinforce_is,
    "cispo": cispo,
    "gspo": gspo,
    "topr": topr,
    "m2po": m2po,
}
_WITHOUT_PROXIMAL = ("reinforce_is", "cispo", "topr", "m2po")


def _clipped_surrogate(ratio: Tensor, advantages: Tensor, config: AlgorithmConfig) -> tuple[Tensor, Tensor]:
    """The PPO loss of each token, and where the clip took its gradient away."""
    plain = -advantages * ratio
    bounded = -advantages * ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    loss = torch.maximum(plain, bounded)
    clipped = bounded > plain
    if config.dual_clip > 0:
        ceiling = -advantages * config.dual_clip
        beyond = (advantages < 0) & (loss > ceiling)
        loss = torch.where(beyond, ceiling, loss)
        clipped = clipped | beyond
    return loss, clipped


def divergence_estimate(log_ratio: Tensor, config: AlgorithmConfig) -> Tensor:
    """KL(p || q) of each token by the estimators of Schulman 2020, from log_ratio = q - p."""
    if config.kl_estimator == "k1":
        return -log_ratio
    if config.kl_estimator == "k2":
        return log_ratio**2 / 2
    return bounded_exp(log_ratio) - 1 - log_ratio


def _aggregate(
    token_loss: Tensor, counted: Tensor, sequences: Sequences, config: AlgorithmConfig
) -> tuple[Tensor, Tensor]:
    """The sum of the losses as the aggregation weighs them, and the count that it is to be divided by."""
    if config.aggregation == "token_mean":
        return token_loss.sum(), counted.sum()
    tokens = sequences.sum(counted)
    num_sequences = (tokens > 0).sum()
    per_sequence = sequences.sum(token_loss)
    if config.aggregation == "sequence_mean_token_mean":
        return (per_sequence / tokens.clamp(min=1)).sum(), num_sequences
    return per_sequence.sum() / config.length_divisor, num_sequences


def policy_metrics(sums: dict[str, float]) -> dict[str, float]:
    """`policy/...`, and the masked, rejected and truncated shares of tokens, from totals over the global batch."""
    count = max(sums["num_tokens"], 1.0)
    metrics = {
        "policy/entropy": sums["entropy"] / count,
        "policy/clip_fraction": sums["clipped_tokens"] / count,
        "offpolicy/masked_fraction": sums["masked_tokens"] / count,
        "offpolicy/rejected_fraction": sums["rejected_tokens"] / count,
        "offpolicy/truncated_fraction": sums["truncated_tokens"] / count,
    }
    if "kl_ref" in sums:
        metrics["policy/kl_ref"] = sums["kl_ref"] / count
    return metrics
