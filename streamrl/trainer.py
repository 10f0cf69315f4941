"""One optimizer step over a global batch: advantages, micro-batches, backward, clipping, AdamW, and the step's
metrics.

All ranks call `Trainer.step` with their shards of the same batch; each call is a chain of collectives. The loss is
divided by counts of the whole batch, and gradients are summed over ranks and micro-batches, so that the number of
ranks and the token budget change nothing but rounding. A rank with fewer micro-batches than another runs fillers,
which have no response token and so no gradient, so that every rank makes the same collective calls.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor

from streamrl.advantages import compute_advantages
from streamrl.config import Config
from streamrl.correction import off_policy_metrics, second_moment_cutoff
from streamrl.losses import divergence_estimate, policy_loss, policy_metrics
from streamrl.packing import MicroBatch, filler_micro_batch, pack_rollouts
from streamrl.policy import Policy
from streamrl.records import Rollout, RolloutGroup


class Batch(Protocol):
    """This rank's whole groups of a global batch, and totals of all of it."""

    @property
    def groups(self) -> Sequence[RolloutGroup]: ...
    @property
    def num_rollouts(self) -> int: ...
    @property
    def num_response_tokens(self) -> int: ...


class Trainer:
    """The optimizer of a policy."""

    def __init__(self, policy: Policy, config: Config, *, reference: Policy | None = None) -> None:
        """`reference`: the policy to stay near, for `algorithm.kl_coef` > 0; it is not trained."""
        self._policy = policy
        self._reference = reference
        self._config = config
        learner = config.learner
        self.optimizer = torch.optim.AdamW(
            policy.parameters(), lr=learner.lr, betas=learner.betas, weight_decay=learner.weight_decay, fused=True
        )
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(
            self.optimizer, lambda step: min(1.0, (step + 1) / max(1, learner.warmup_steps))
        )

    def step(self, batch: Batch, *, policy_version: int) -> dict[str, float]:
        """Train on one batch.

        Args:
            batch: this rank's shard; it may have no group.
            policy_version: of the weights before the step.

        Returns:
            The metrics of the step, the same on every rank.

        Raises:
            RuntimeError: the gradient is not finite; the weights are unchanged.
        """
        algorithm = self._config.algorithm
        rollouts = [rollout for group in batch.groups for rollout in group.rollouts]
        of_rollouts = _rollout_sums(rollouts, batch.groups, policy_version)
        reward_moments = _moments(_all_reduce(of_rollouts), "reward")

        micro_batches = self._micro_batches(rollouts)
        if self._reference is not None:
            self._add_reference(micro_batches)
        group_index = torch.tensor([i for i, g in enumerate(batch.groups) for _ in g.rollouts], dtype=torch.int64)
        rewards = torch.tensor([r.reward for r in rollouts], dtype=torch.float64)
        if algorithm.kl_coef > 0 and algorithm.kl_in == "reward":
            divergence = self._divergence(micro_batches, len(rollouts))
            rewards = rewards - algorithm.kl_coef * divergence
            of_rollouts["kl_ref"] = float(divergence.sum())
        advantages = compute_advantages(rewards, group_index, algorithm, batch_moments=self._batch_moments(rewards))
        for micro_batch in micro_batches:
            micro_batch.set_advantages(advantages)
        count = batch.num_response_tokens if algorithm.aggregation == "token_mean" else batch.num_rollouts

        self.optimizer.zero_grad(set_to_none=True)
        sums: dict[str, Tensor] = {}
        mismatch = -1.0
        m2_cutoff = self._m2_cutoff(micro_batches) if algorithm.loss == "m2po" else None
        for micro_batch in micro_batches:
            part, largest = self._backward(micro_batch, float(count), policy_version, m2_cutoff)
            sums = {name: value + sums.get(name, 0.0) for name, value in part.items()}
            mismatch = max(mismatch, largest)

        totals = _all_reduce({**of_rollouts, **{name: float(value) for name, value in sums.items()}})
        staleness = max((policy_version - group.min_version for group in batch.groups), default=0)
        maxima = _all_reduce({"mismatch": mismatch, "staleness": float(staleness)}, op=dist.ReduceOp.MAX)

        if algorithm.masked_denominator == "kept":
            # The kept count of the batch is known only now; the loss is linear in its inverse.
            factor = count / max(totals["kept_denominator"], 1.0)
            totals["loss"] *= factor
            for parameter in self._policy.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(factor)
        grad_norm = self._policy.clip_grad_norm(self._config.learner.max_grad_norm)
        if not math.isfinite(grad_norm):
            raise RuntimeError(
                f"the gradient at policy_version {policy_version} is not finite (norm {grad_norm}, loss "
                f"{totals['loss']}); the step was not taken"
            )
        lr = self.scheduler.get_last_lr()[0]
        self.optimizer.step()
        self.scheduler.step()
        metrics = {
            "learner/loss": totals["loss"],
            "learner/grad_norm": grad_norm,
            "learner/lr": float(lr),
            "rollout/reward/mean": reward_moments[0],
            "rollout/reward/std": reward_moments[1],
            "rollout/length/mean": totals["length"] / totals["rollouts"],
            "rollout/truncated_fraction": totals["truncated"] / totals["rollouts"],
            "rollout/latency_s": totals["latency_s"] / totals["rollouts"],
            "offpolicy/staleness/mean": totals["staleness"] / totals["groups"],
            "offpolicy/staleness/max": maxima["staleness"],
            **policy_metrics(totals),
            **off_policy_metrics(totals),
        }
        if maxima["mismatch"] >= 0:  # else no rollout was sampled whole with the current weights
            metrics["offpolicy/logprob_mismatch"] = maxima["mismatch"]
        return metrics

    def _micro_batches(self, rollouts: Sequence[Rollout]) -> list[MicroBatch]:
        """The rank's micro-batches, still without advantages, and as many fillers as it takes to have the count of the
        rank that has most."""
        packed = pack_rollouts(rollouts, torch.zeros(len(rollouts)), max_tokens=self._config.learner.micro_batch_tokens)
        most = _all_reduce({"count": float(len(packed))}, op=dist.ReduceOp.MAX)["count"]
        return packed + [filler_micro_batch()] * (int(most) - len(packed))

    @torch.no_grad()
    def _add_reference(self, micro_batches: Sequence[MicroBatch]) -> None:
        """The log-probs of the frozen reference, as column `ref_log_probs`."""
        assert self._reference is not None
        for micro_batch in micro_batches:
            log_probs, _ = self._reference.token_log_probs(micro_batch)
            micro_batch.tokens["ref_log_probs"] = log_probs.cpu()

    def _divergence(self, micro_batches: Sequence[MicroBatch], num_rollouts: int) -> Tensor:
        """[R] float64: KL(mu || reference) of every rollout, estimated token by token and summed."""
        divergence = torch.zeros(num_rollouts, dtype=torch.float64)
        for micro_batch in micro_batches:
            tokens = micro_batch.tokens
            log_ratio = (tokens["ref_log_probs"] - tokens["old_log_probs"]) * tokens["response_mask"]
            micro_batch.sum_over_rollouts(divergence_estimate(log_ratio.double(), self._config.algorithm), divergence)
        return divergence

    def _batch_moments(self, rewards: Tensor) -> tuple[float, float] | None:
        """Mean and standard deviation over the global batch, for the estimator that needs them."""
        if self._config.algorithm.advantage != "reinforce_pp":
            return None
        sums = {
            "rollouts": float(len(rewards)),
            "reward": float(rewards.sum()),
            "reward_squared": float((rewards**2).sum()),
        }
        return _moments(_all_reduce(sums), "reward")

    @torch.no_grad()
    def _m2_cutoff(self, micro_batches: Sequence[MicroBatch]) -> float:
        """`second_moment_cutoff` of the global batch, by a forward pass over all of it."""
        parts = []
        for micro_batch in micro_batches:
            log_probs, _ = self._policy.token_log_probs(micro_batch)
            chosen = micro_batch.tokens["response_mask"].bool()
            parts.append((log_probs.cpu() - micro_batch.tokens["old_log_probs"])[chosen])
        mine = torch.cat(parts)
        most = int(_all_reduce({"count": float(len(mine))}, op=dist.ReduceOp.MAX)["count"])
        padded = torch.full((most,), math.nan)
        padded[: len(mine)] = mine
        gathered = [torch.empty_like(padded) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, padded)
        log_ratios = torch.cat(gathered)
        return second_moment_cutoff(log_ratios[~log_ratios.isnan()], self._config.algorithm.m2_threshold)

    def _backward(
        self, micro_batch: MicroBatch, denominator: float, policy_version: int, m2_cutoff: float | None
    ) -> tuple[dict[str, Tensor], float]:
        """Add to the gradients. Returns sums for the metrics, and the largest |p - mu| over rollouts that the current
        weights sampled whole, -1 without any."""
        algorithm = self._config.algorithm
        micro_batch = micro_batch.to(self._policy.device)
        tokens = micro_batch.tokens
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
            policy_version=policy_version,
            m2_cutoff=m2_cutoff,
            denominator=denominator,
        )
        # The loss is divided by global counts, so gradients are to be summed over ranks, where FSDP averages them.
        (loss * dist.get_world_size()).backward()  # type: ignore[no-untyped-call]
        sums["loss"] = loss.detach().double()
        differences = (log_probs.detach() - tokens["old_log_probs"])[_fresh(tokens, policy_version)].abs()
        return sums, float(differences.max()) if len(differences) else -1.0


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


def _rollout_sums(rollouts: Sequence[Rollout], groups: Sequence[RolloutGroup], policy_version: int) -> dict[str, float]:
    return {
        "rollouts": float(len(rollouts)),
        "groups": float(len(groups)),
        "reward": sum(r.reward for r in rollouts),
        "reward_squared": sum(r.reward**2 for r in rollouts),
        "length": float(sum(len(r.response_ids) for r in rollouts)),
        "truncated": float(sum(r.finish_reason == "length" for r in rollouts)),
        "latency_s": sum(r.timings.queue_s + r.timings.generate_s + r.timings.reward_s for r in rollouts),
        "staleness": float(sum(policy_version - group.min_version for group in groups)),
    }


def _moments(totals: dict[str, float], name: str) -> tuple[float, float]:
    """Mean and sample standard deviation over the global batch."""
    count = totals["rollouts"]
    mean = totals[name] / count
    squares = totals[f"{name}_squared"] - count * mean**2
    return mean, math.sqrt(max(squares, 0.0) / max(count - 1, 1))


def _all_reduce(values: dict[str, float], *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> dict[str, float]:
    """Reduce numbers of the same names over all ranks, in float64."""
    names = sorted(values)
    vector = torch.tensor([values[name] for name in names], dtype=torch.float64)
    dist.all_reduce(vector, op=op)
    return dict(zip(names, vector.tolist(), strict=True))
