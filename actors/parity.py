"""Whether an engine and the learner's policy compute the same function: sampled tokens, scored by both.

Waits: `sample_rollouts` for engine steps; the caller sets the limit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from actors.engine import Engine
from streamrl.config import GeneratorConfig
from streamrl.packing import pack_rollouts
from streamrl.policy import Policy
from streamrl.records import Rollout


async def sample_rollouts(
    engine: Engine, prompts: Sequence[list[int]], config: GeneratorConfig, *, count: int, stop_ids: list[int]
) -> list[Rollout]:
    """`count` responses to the prompts, in turn, seeded by their number; their log-probs are the engine's."""
    completions = await asyncio.gather(
        *(
            engine.generate(
                prompts[i % len(prompts)],
                request_id=f"parity-{i}",
                temperature=config.temperature,
                max_tokens=config.max_new_tokens,
                stop_ids=stop_ids,
                seed=i,
                salt="parity",
            )
            for i in range(count)
        )
    )
    return [
        Rollout(
            uid=str(i),
            member=0,
            attempt=0,
            prompt_ids=np.array(prompts[i % len(prompts)], dtype=np.int32),
            response_ids=np.array(c.token_ids, dtype=np.int32),
            old_log_probs=np.array(c.log_probs, dtype=np.float32),
            versions=np.zeros(len(c.token_ids), dtype=np.int32),
        )
        for i, c in enumerate(completions)
    ]


@torch.no_grad()
def log_prob_differences(policy: Policy, rollouts: Sequence[Rollout], *, max_tokens: int) -> Tensor:
    """[response tokens] float32: log-prob by the policy minus log-prob by the engine; `max_tokens` a forward pass."""
    parts = []
    for batch in pack_rollouts(rollouts, torch.zeros(len(rollouts)), max_tokens=max_tokens):
        log_probs, _ = policy.token_log_probs(batch)
        parts.append((log_probs.cpu() - batch.tokens["old_log_probs"])[batch.tokens["response_mask"].bool()])
    return torch.cat(parts)
