"""One optimizer step over a global batch: advantages, micro-batches, backward, clipping, AdamW, and the step's
metrics.

A step is `begin`, any number of `add`s with the chunks of its batch as they come, and `finish`; `step` is all three
over a batch that is there. All ranks make the same calls, each with its own part of the same chunk; each call is a
chain of collectives. Gradients are summed undivided over micro-batches, chunks and ranks and scaled once, in `finish`,
by the inverse of a count of the whole batch, in which every loss is linear. So the number of ranks, the token budget
and the cut into chunks change nothing but rounding. A rank with fewer micro-batches than another runs fillers, which
have no response token and so no gradient, so that every rank makes the same collective calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from streamrl.advantages import compute_advantages, normalised
from streamrl.config import Config
from streamrl.config_rules import TOKEN_ADVANTAGES
from streamrl.correction import off_policy_metrics, second_moment_cutoff
from streamrl.critic import Critic
from streamrl.losses import divergence_estimate, policy_loss, policy_metrics
from streamrl.optimizer import warmed_up_adamw
from streamrl.packing import MicroBatch, filler_micro_batch, pack_rollouts
from streamrl.policy import Policy
from streamrl.records import Rollout, RolloutGroup
from streamrl.step import Step, all_reduce, moments
from streamrl.token_advantages import ResponseRows, gae, returns_to_go, vtrace


class Totals(Protocol):
    """Counts of a whole global batch."""

    @property
    def num_rollouts(self) -> int: ...
    @property
    def num_response_tokens(self) -> int: ...


class Batch(Totals, Protocol):
    """This rank's whole groups of a global batch, and totals of all of it."""

    @property
    def groups(self) -> Sequence[RolloutGroup]: ...


class Trainer:
    """The optimizer of a policy."""

    def __init__(
        self, policy: Policy, config: Config, *, reference: Policy | None = None, critic: Critic | None = None
    ) -> None:
        """`reference`: the policy to stay near, for `algorithm.kl_coef` > 0; it is not trained. `critic`: for an
        `algorithm.advantage` that needs one; it is trained with the policy."""
        assert (critic is not None) == config.algorithm.has_critic
        self._policy = policy
        self._reference = reference
        self._critic = critic
        self._for_critic: list[MicroBatch] = []  # of the step that is being made
        self._config = config
        self._step: Step  # the one that is being made
        self.optimizer, self.scheduler = warmed_up_adamw(policy.parameters(), config.learner, lr=config.learner.lr)

    def step(self, batch: Batch, *, policy_version: int) -> dict[str, float]:
        """Train on one batch that is there: `begin`, `add`, `finish`."""
        self.begin(policy_version)
        self.add(batch.groups)
        return self.finish(batch)

    def begin(self, policy_version: int) -> None:
        """Begin a step with the weights of `policy_version`. A step that was begun and not finished is forgotten."""
        self._step = Step(policy_version)
        self._for_critic = []
        self.optimizer.zero_grad(set_to_none=True)

    def add(self, groups: Sequence[RolloutGroup]) -> None:
        """Forward and backward of one chunk of the step's batch.

        Args:
            groups: this rank's whole groups of the chunk; there may be none.
        """
        step = self._step
        step.add_groups(groups)
        micro_batches = self._micro_batches([rollout for group in groups for rollout in group.rollouts])
        if self._reference is not None:
            self._add_reference(micro_batches)
        self._set_advantages(groups, micro_batches)
        m2_cutoff = self._m2_cutoff(micro_batches) if self._config.algorithm.loss == "m2po" else None
        for micro_batch in micro_batches:
            self._backward(micro_batch, m2_cutoff)

    def finish(self, batch: Totals) -> dict[str, float]:
        """Take the optimizer step on everything that was added.

        Args:
            batch: the counts of the whole batch, of all ranks and chunks.

        Returns:
            The metrics of the step, the same on every rank.

        Raises:
            RuntimeError: the gradient is not finite, or what was added is not the batch; the weights are unchanged.
        """
        step, algorithm = self._step, self._config.algorithm
        totals, maxima = step.totals(), step.highest()
        if (totals["rollouts"], totals["length"]) != (batch.num_rollouts, batch.num_response_tokens):
            raise RuntimeError(
                f"the ranks had {totals['rollouts']:.0f} rollouts with {totals['length']:.0f} response tokens at "
                f"policy_version {step.policy_version}, of a batch of {batch.num_rollouts} with "
                f"{batch.num_response_tokens}; the step was not taken"
            )
        if algorithm.masked_denominator == "kept":
            count = max(totals["kept_denominator"], 1.0)
        else:
            count = totals["length"] if algorithm.aggregation == "token_mean" else totals["rollouts"]
        totals["loss"] /= count
        grad_norm = self._scaled_grad_norm(count) if self._policy_trains else 0.0
        if not math.isfinite(grad_norm):
            raise RuntimeError(
                f"the gradient at policy_version {step.policy_version} is not finite (norm {grad_norm}, loss "
                f"{totals['loss']}); the step was not taken"
            )
        of_critic = {} if self._critic is None else self._critic.fit(self._for_critic)
        lr = 0.0
        if self._policy_trains:
            lr = float(self.scheduler.get_last_lr()[0])
            self.optimizer.step()
            self.scheduler.step()
        reward_mean, reward_std = moments(totals, "reward")
        metrics = {
            "learner/loss": totals["loss"],
            "learner/grad_norm": grad_norm,
            "learner/lr": lr,
            "rollout/reward/mean": reward_mean,
            "rollout/reward/std": reward_std,
            "rollout/length/mean": totals["length"] / totals["rollouts"],
            "rollout/truncated_fraction": totals["truncated"] / totals["rollouts"],
            "rollout/latency_s": totals["latency_s"] / totals["rollouts"],
            "offpolicy/staleness/mean": totals["staleness"] / totals["groups"],
            "offpolicy/staleness/max": maxima["staleness"],
            **of_critic,
            **policy_metrics(totals),
            **off_policy_metrics(totals),
        }
        if maxima["mismatch"] >= 0:  # else no rollout was sampled whole with the current weights
            metrics["offpolicy/logprob_mismatch"] = maxima["mismatch"]
        return metrics

    @property
    def _policy_trains(self) -> bool:
        """False in the steps of `critic.warmup_steps`, which leave the policy as it is."""
        return self._critic is None or self._step.policy_version >= self._config.critic.warmup_steps

    def _scaled_grad_norm(self, count: float) -> float:
        """Divide the summed gradients by `count` and clip them; their norm before clipping."""
        factor = dist.get_world_size() / count  # FSDP averages gradients over ranks, where they are to be summed
        for parameter in self._policy.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(factor)
        return self._policy.clip_grad_norm(self._config.learner.max_grad_norm)

    def _set_advantages(self, groups: Sequence[RolloutGroup], micro_batches: Sequence[MicroBatch]) -> None:
        """The advantages of a chunk, from its groups, into its micro-batches."""
        algorithm = self._config.algorithm
        rewards = torch.tensor([r.reward for group in groups for r in group.rollouts], dtype=torch.float64)
        penalties = [self._penalty(micro_batch) for micro_batch in micro_batches]
        if algorithm.advantage in TOKEN_ADVANTAGES:
            self._set_token_advantages(rewards, penalties, micro_batches)
            return
        for micro_batch, penalty in zip(micro_batches, penalties, strict=True):
            micro_batch.sum_over_rollouts(-penalty, rewards)
        group_index = torch.tensor([i for i, g in enumerate(groups) for _ in g.rollouts], dtype=torch.int64)
        baselines = _baselines(groups) if algorithm.has_baseline else None
        advantages = compute_advantages(rewards, group_index, algorithm, baselines=baselines)
        for micro_batch in micro_batches:
            micro_batch.set_advantages(micro_batch.spread(advantages))

    def _penalty(self, micro_batch: MicroBatch) -> Tensor:
        """[T] float64: kl_coef * KL(mu || reference) of each token, where it counts in the reward; else 0."""
        algorithm, tokens = self._config.algorithm, micro_batch.tokens
        if algorithm.kl_coef == 0 or algorithm.kl_in == "loss":
            return torch.zeros(micro_batch.num_tokens, dtype=torch.float64)
        log_ratio = (tokens["ref_log_probs"] - tokens["old_log_probs"]) * tokens["response_mask"]
        divergence = divergence_estimate(log_ratio.double(), algorithm)
        self._step.add({"kl_ref": divergence.sum()})
        return algorithm.kl_coef * divergence

    @torch.no_grad()
    def _set_token_advantages(
        self, rewards: Tensor, penalties: Sequence[Tensor], micro_batches: Sequence[MicroBatch]
    ) -> None:
        """Those of single tokens: the reward of a rollout is at its last token, the penalty at each. With a critic the
        columns `values` and `returns` too, from which it is trained in `finish`."""
        algorithm, critic = self._config.algorithm, self._config.critic
        of_tokens = []
        for micro_batch, penalty in zip(micro_batches, penalties, strict=True):
            tokens = micro_batch.tokens
            responses = ResponseRows(tokens["response_mask"], tokens["sequence_index"])
            token_rewards = responses.last(micro_batch.spread(rewards)) - penalty
            if self._critic is None:
                of_tokens.append(returns_to_go(token_rewards, responses))
                continue
            values = self._critic.values(micro_batch)
            if algorithm.advantage == "gae":
                advantages, returns = gae(token_rewards, values, responses, gamma=critic.gamma, lam=critic.lam)
            else:
                log_probs, _ = self._policy.token_log_probs(micro_batch)
                advantages, returns = vtrace(
                    token_rewards,
                    values,
                    log_probs.cpu() - tokens["old_log_probs"],
                    responses,
                    gamma=critic.gamma,
                    lam=critic.lam,
                    rho_bar=critic.rho_bar,
                    c_bar=critic.c_bar,
                )
            of_tokens.append(advantages)
            tokens["values"], tokens["returns"] = values, returns.float()
            self._for_critic.append(micro_batch)
        if algorithm.advantage != "vtrace":
            sums = {
                "tokens": sum(float(m.tokens["response_mask"].sum()) for m in micro_batches),
                "advantage": sum(float(a.sum()) for a in of_tokens),
                "advantage_squared": sum(float((a**2).sum()) for a in of_tokens),
            }
            mean, std = moments(all_reduce(sums), "advantage", of="tokens")
            of_tokens = [normalised(advantages, mean, std) for advantages in of_tokens]
        for micro_batch, advantages in zip(micro_batches, of_tokens, strict=True):
            micro_batch.set_advantages(advantages)

    def _micro_batches(self, rollouts: Sequence[Rollout]) -> list[MicroBatch]:
        """The rank's micro-batches, still without advantages, and as many fillers as it takes to have the count of the
        rank that has most."""
        packed = pack_rollouts(rollouts, torch.zeros(len(rollouts)), max_tokens=self._config.learner.micro_batch_tokens)
        most = all_reduce({"count": float(len(packed))}, op=dist.ReduceOp.MAX)["count"]
        return packed + [filler_micro_batch()] * (int(most) - len(packed))

    @torch.no_grad()
    def _add_reference(self, micro_batches: Sequence[MicroBatch]) -> None:
        """The log-probs of the frozen reference, as column `ref_log_probs`."""
        assert self._reference is not None
        for micro_batch in micro_batches:
            log_probs, _ = self._reference.token_log_probs(micro_batch)
            micro_batch.tokens["ref_log_probs"] = log_probs.cpu()

    @torch.no_grad()
    def _m2_cutoff(self, micro_batches: Sequence[MicroBatch]) -> float:
        """`second_moment_cutoff` of the global batch, by a forward pass over all of it."""
        parts = []
        for micro_batch in micro_batches:
            log_probs, _ = self._policy.token_log_probs(micro_batch)
            chosen = micro_batch.tokens["response_mask"].bool()
            parts.append((log_probs.cpu() - micro_batch.tokens["old_log_probs"])[chosen])
        mine = torch.cat(parts)
        most = int(all_reduce({"count": float(len(mine))}, op=dist.ReduceOp.MAX)["count"])
        padded = torch.full((most,), math.nan)
        padded[: len(mine)] = mine
        gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, padded)
        log_ratios = torch.cat(gathered)
        return second_moment_cutoff(log_ratios[~log_ratios.isnan()], self._config.algorithm.m2_threshold)

    def _backward(self, micro_batch: MicroBatch, m2_cutoff: float | None) -> None:
        """Add one micro-batch to the gradients, undivided, and its sums to the step."""
        algorithm, step = self._config.algorithm, self._step
        micro_batch = micro_batch.to(self._policy.device)
        tokens = micro_batch.tokens
        with torch.set_grad_enabled(self._policy_trains):
            log_probs, entropy = self._policy.token_log_probs(micro_batch, entropy_grad=algorithm.entropy_coef > 0)
        loss, sums = policy_loss(
            log_probs,
            tokens["old_log_probs"],
            tokens["advantages"],
            tokens["response_mask"],
            tokens["sequence_index"],
            algorithm,
            ref_log_probs=tokens.get("ref_log_probs", None),
            entropy=entropy,
            versions=tokens["versions"],
            policy_version=step.policy_version,
            m2_cutoff=m2_cutoff,
            denominator=1.0,
        )
        if self._policy_trains:
            loss.backward()  # type: ignore[no-untyped-call]
        step.add({**sums, "loss": loss.detach().double()})
        differences = (log_probs.detach() - tokens["old_log_probs"])[_fresh(tokens, step.policy_version)].abs()
        step.raise_to("mismatch", float(differences.max()) if len(differences) else -1.0)


def _baselines(groups: Sequence[RolloutGroup]) -> Tensor:
    """[R] float64: the reward of the greedy response to the prompt of every rollout."""
    baselines: list[float] = []
    for group in groups:
        if group.baseline is None:
            raise RuntimeError(f"group {group.uid} came without the greedy response that algorithm.advantage needs")
        baselines += [group.baseline.reward] * len(group.rollouts)
    return torch.tensor(baselines, dtype=torch.float64)


def _fresh(tokens: TensorDict, policy_version: int) -> Tensor:
    """[T] bool: response tokens of rollouts that the weights of `policy_version` sampled whole.

    A rollout that was running when new weights came keeps the attention cache of the old ones, so `mu` of its later
    tokens is the policy it was sampled from, and yet not what these weights give for the whole sequence.
    """
    response: Tensor = tokens["response_mask"].bool()
    index: Tensor = tokens["sequence_index"]
    older = response & (tokens["versions"] != policy_version)
    mixed = torch.zeros(int(index.max()) + 1, dtype=torch.bool, device=index.device)
    mixed[index[older]] = True
    return response & ~mixed[index]
