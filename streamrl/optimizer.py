"""The optimizer of policy and critic: AdamW with a linear warm-up."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

from streamrl.config import LearnerConfig


def warmed_up_adamw(
    parameters: Iterable[nn.Parameter], config: LearnerConfig, *, lr: float
) -> tuple[torch.optim.AdamW, LambdaLR]:
    """The optimizer, and the schedule that leads it to `lr` over `learner.warmup_steps`."""
    optimizer = torch.optim.AdamW(parameters, lr=lr, betas=config.betas, weight_decay=config.weight_decay, fused=True)
    return optimizer, LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / max(1, config.warmup_steps)))
