"""What an optimizer step has gathered so far on this rank, and its reduction over all ranks.

A step takes its batch in chunks. Everything that is told about the whole batch at its end, denominators and metrics, is
a sum or a maximum over chunks, micro-batches and ranks, so that it does not depend on how the batch was divided.
Blocking: `totals` and `highest` are collectives, which all ranks call in the same order.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from streamrl.records import RolloutGroup


@dataclass(slots=True)
class Step:
    """One step in the making.

    Example: Step(7, sums={"rollouts": 32.0, "loss": tensor(-1.25), ...}, maxima={"staleness": 2.0}).
    """

    policy_version: int  # of the weights before the step
    sums: dict[str, float | Tensor] = field(default_factory=dict)  # tensors stay on their device until `totals`
    maxima: dict[str, float] = field(default_factory=dict)

    def add(self, sums: Mapping[str, float | Tensor]) -> None:
        """All ranks add the same names."""
        for name, value in sums.items():
            self.sums[name] = value + self.sums.get(name, 0.0)

    def raise_to(self, name: str, value: float) -> None:
        """Keep the largest."""
        self.maxima[name] = max(value, self.maxima.get(name, value))

    def add_groups(self, groups: Sequence[RolloutGroup]) -> None:
        """What the metrics say about rollouts, whatever the loss makes of them."""
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        staleness = [self.policy_version - group.min_version for group in groups]
        self.add(
            {
                "rollouts": float(len(rollouts)),
                "groups": float(len(groups)),
                "reward": sum(r.reward for r in rollouts),
                "reward_squared": sum(r.reward**2 for r in rollouts),
                "length": float(sum(len(r.response_ids) for r in rollouts)),
                "truncated": float(sum(r.finish_reason == "length" for r in rollouts)),
                "latency_s": sum(r.timings.queue_s + r.timings.generate_s + r.timings.reward_s for r in rollouts),
                "staleness": float(sum(staleness)),
            }
        )
        self.raise_to("staleness", float(max(staleness, default=0)))

    def totals(self) -> dict[str, float]:
        """The sums over all ranks."""
        return all_reduce({name: float(value) for name, value in self.sums.items()})

    def highest(self) -> dict[str, float]:
        """The maxima over all ranks."""
        return all_reduce(self.maxima, op=dist.ReduceOp.MAX)


def moments(totals: Mapping[str, float], name: str, *, of: str = "rollouts") -> tuple[float, float]:
    """Mean and sample standard deviation over as many as `of` counts, from the sums `name` and `name_squared`."""
    count = totals[of]
    mean = totals[name] / count
    squares = totals[f"{name}_squared"] - count * mean**2
    return mean, math.sqrt(max(squares, 0.0) / max(count - 1, 1))


def all_reduce(values: Mapping[str, float], *, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> dict[str, float]:
    """Reduce numbers of the same names over all ranks, in float64."""
    names = sorted(values)
    vector = torch.tensor([values[name] for name in names], dtype=torch.float64)
    dist.all_reduce(vector, op=op)
    return dict(zip(names, vector.tolist(), strict=True))
