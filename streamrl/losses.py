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
"""

from __future__ import annotations

import torch
from torch import Tensor

from streamrl.config import AlgorithmConfig
from streamrl.correction import Sequences, bounded_exp, importance_weights, off_policy_sums


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
    denominator: float | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """The policy loss of a packed batch.

    - `ppo_clip`: w * max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)), r = exp(p - o) (Schulman et al. 2017, arXiv
      1707.06347; clip-higher: DAPO, arXiv 2503.14476; w = exp(o - mu): decoupled PPO, Hilton et al. 2021, arXiv
      2110.00641). `dual_clip` c bounds the loss of A < 0 by -A c (Ye et al. 2019, arXiv 1912.09729).
    - `gspo`: the same with the rollout's ratio exp(mean(p - o)) for each of its tokens (Zheng et al. 2025, arXiv
      2507.18071); its clip range is in the order of 3e-4, and the paper aggregates by `sequence_mean_token_mean`.
    - `reinforce_is`: -w p A with w from exp(p - mu); there is no proximal policy.
    - `cispo`: -clip(exp(p - mu), 1 - clip_low, 1 + clip_high) p A, the clipped weight without gradient (MiniMax-M1
      2025, arXiv 2506.13585), anchored on mu because the data is off-policy; there is no further weight.

    w is `importance_weights`. `entropy_coef` times the entropy is subtracted, `kl_coef` times the divergence from the
    reference added, token by token, without a weight. Tokens with a mask of 0 have no effect whatever their other
    values.

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
        denominator: tokens (`token_mean`) or rollouts (the other aggregations) of the global batch, masked ones
            included; by default the count in this batch that `masked_denominator` names.

    Returns:
        The scalar loss, and sums over this batch that add up over micro-batches and ranks: those of
        `off_policy_sums`, and `clipped_tokens`, `masked_tokens`, `truncated_tokens`, `entropy`, `kl_ref` (of
        `kl_coef` > 0), `kept_denominator`.
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
    elif prox_log_probs is None:
        proximal = current.detach()
    else:
        proximal = torch.where(chosen, prox_log_probs, 0.0).detach()

    if config.loss == "cispo":
        ratio = bounded_exp(current.detach() - behaviour)
        clipped_ratio = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
        weight = torch.ones_like(ratio)
        token_loss = -clipped_ratio * current * advantages
        clipped = clipped_ratio != ratio
    elif config.loss == "reinforce_is":
        weight = importance_weights(current - behaviour, mask, sequences, config)
        token_loss = -weight * current * advantages
        clipped = torch.zeros_like(chosen)
    else:
        weight = importance_weights(proximal - behaviour, mask, sequences, config)
        log_ratio = current - proximal
        if config.loss == "gspo":
            of_sequence = sequences.spread(sequences.mean(log_ratio, mask)).detach()
            log_ratio = of_sequence + current - current.detach()
        surrogate, clipped = _clipped_surrogate(bounded_exp(log_ratio), advantages, config)
        token_loss = weight * surrogate

    kept = mask * (weight > 0)
    if config.entropy_coef > 0:
        if entropy is None:
            raise ValueError(f"entropy (None): algorithm.entropy_coef ({config.entropy_coef}) needs it")
        token_loss = token_loss - config.entropy_coef * torch.where(chosen, entropy, 0.0)
    divergence = None
    if config.kl_coef > 0:
        if ref_log_probs is None:
            raise ValueError(f"ref_log_probs (None): algorithm.kl_coef ({config.kl_coef}) needs them")
        divergence = _divergence(torch.where(chosen, ref_log_probs, 0.0).detach() - current, config)
        token_loss = token_loss + config.kl_coef * divergence
    counted = kept if config.masked_denominator == "kept" else mask
    loss, own_denominator = _aggregate(token_loss * kept, counted, sequences, config)
    loss = loss / (own_denominator.clamp(min=1) if denominator is None else denominator)

    sums = off_policy_sums(current, behaviour, mask)
    sums["clipped_tokens"] = (clipped & kept.bool()).sum().double()
    sums["masked_tokens"] = (mask - kept).sum().double()
    truncates = config.correction.endswith("truncate")
    sums["truncated_tokens"] = (chosen & truncates & (weight == config.correction_cap)).sum().double()
    sums["kept_denominator"] = own_denominator.double()
    sums["entropy"] = torch.zeros_like(sums["k1"]) if entropy is None else entropy.detach()[chosen].double().sum()
    if divergence is not None:
        sums["kl_ref"] = divergence.detach().double().sum()
    return loss, sums


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


def _divergence(log_ratio: Tensor, config: AlgorithmConfig) -> Tensor:
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
    """`policy/...`, and the masked and truncated share of tokens, from totals over the global batch."""
    count = max(sums["num_tokens"], 1.0)
    metrics = {
        "policy/entropy": sums["entropy"] / count,
        "policy/clip_fraction": sums["clipped_tokens"] / count,
        "offpolicy/masked_fraction": sums["masked_tokens"] / count,
        "offpolicy/truncated_fraction": sums["truncated_tokens"] / count,
    }
    if "kl_ref" in sums:
        metrics["policy/kl_ref"] = sums["kl_ref"] / count
    return metrics
