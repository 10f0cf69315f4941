"""Samples responses from any snapshot of the trained weights, without an engine: plain Transformers, batched, with a
key-value cache. For studies on small models, where what matters is which weights sampled and not how fast.

`mu` is the log-softmax of the snapshot itself at the sampling temperature, and rewards come from the run's own
verifier, so a rollout of the newest snapshot is what a generator would have sent (the study checks |p - mu| on it).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, DynamicCache

from actors.reward_process import RewardRequest, RewardSetup, make_scorer, score
from streamrl.base_model import load_tokenizer
from streamrl.config import Config
from streamrl.records import Prompt, Rollout

Snapshot = Mapping[str, Tensor]


class SnapshotSampler:
    """Example: `sampler.sample(prompts, snapshot, version=3, seed=17)` gives group_size rollouts of each prompt."""

    def __init__(self, model_path: str, config: Config) -> None:
        self._config = config
        self._tokenizer = load_tokenizer(model_path)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
        setup = RewardSetup(
            kind=config.reward.kind,
            function=config.reward.function,
            task=config.data.task,
            task_args=config.data.task_args,
            parent=0,
        )
        self._scorer = make_scorer(setup)

    def sample(self, prompts: Sequence[Prompt], snapshot: Snapshot, *, version: int, seed: int) -> list[Rollout]:
        """`group_size` scored rollouts of every prompt, all of their tokens of `version`."""
        size = self._config.algorithm.group_size
        rows = [prompt for prompt in prompts for _ in range(size)]
        temperature = self._config.generator.temperature
        ids, log_probs, lengths = self._generate(rows, snapshot, temperature=temperature, seed=seed)
        rollouts = []
        for row, prompt in enumerate(rows):
            response = ids[row, : lengths[row]]
            stopped = int(response[-1]) == self._tokenizer.eos_token_id
            rollouts.append(
                Rollout(
                    uid=prompt.uid,
                    member=row % size,
                    attempt=0,
                    prompt_ids=prompt.prompt_ids,
                    response_ids=response.numpy().astype(np.int32),
                    old_log_probs=log_probs[row, : lengths[row]].numpy().astype(np.float32),
                    versions=np.full(lengths[row], version, dtype=np.int32),
                    reward=self._reward(prompt, response),
                    finish_reason="stop" if stopped else "length",
                    generator="snapshot",
                )
            )
        return rollouts

    def held_out_reward(self, prompts: Sequence[Prompt], snapshot: Snapshot) -> float:
        """Mean reward of the greedy responses."""
        ids, _, lengths = self._generate(prompts, snapshot, temperature=0.0, seed=0)
        rewards = [self._reward(prompt, ids[row, : lengths[row]]) for row, prompt in enumerate(prompts)]
        return sum(rewards) / len(rewards)

    def _reward(self, prompt: Prompt, response: Tensor) -> float:
        text = self._tokenizer.decode(response.tolist(), skip_special_tokens=True)
        answer = score(self._scorer, RewardRequest(prompt.task, text))
        if answer.reason:
            raise RuntimeError(f"no reward for {text!r}: {answer.reason}, {answer.detail}")
        return answer.reward

    @torch.no_grad()
    def _generate(
        self, prompts: Sequence[Prompt], snapshot: Snapshot, *, temperature: float, seed: int
    ) -> tuple[Tensor, Tensor, list[int]]:
        """Responses and their log-probs, [N, longest], and the length of each, the end-of-sequence token included."""
        for name, parameter in self._model.named_parameters():
            parameter.copy_(snapshot[name])
        dice = torch.Generator().manual_seed(seed)
        longest = max(len(prompt.prompt_ids) for prompt in prompts)
        count, limit = len(prompts), self._config.generator.max_new_tokens
        tokens = torch.zeros(count, longest, dtype=torch.int64)
        mask = torch.zeros(count, longest + limit, dtype=torch.int64)
        mask[:, longest:] = 1
        for row, prompt in enumerate(prompts):  # padding on the left, so that every row's next token is in one column
            begin = longest - len(prompt.prompt_ids)
            tokens[row, begin:] = torch.from_numpy(prompt.prompt_ids.astype(np.int64))
            mask[row, begin:] = 1
        positions = (mask.cumsum(1) - 1).clamp(min=0)

        cache = DynamicCache(config=self._model.config)
        responses, log_probs = torch.zeros(count, limit, dtype=torch.int64), torch.zeros(count, limit)
        running = torch.ones(count, dtype=torch.bool)
        lengths = torch.zeros(count, dtype=torch.int64)
        for step in range(limit):
            seen = longest + step
            output = self._model(
                input_ids=tokens,
                attention_mask=mask[:, :seen],
                position_ids=positions[:, seen - tokens.shape[1] : seen],
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
            logits = output.logits[:, -1].float()
            all_log_probs = torch.log_softmax(logits / temperature if temperature > 0 else logits, dim=-1)
            if temperature > 0:
                chosen = torch.multinomial(all_log_probs.exp(), 1, generator=dice)
            else:
                chosen = all_log_probs.argmax(-1, keepdim=True)
            responses[:, step] = chosen[:, 0]
            log_probs[:, step] = all_log_probs.gather(1, chosen)[:, 0]
            lengths += running
            running &= chosen[:, 0] != self._tokenizer.eos_token_id
            if not running.any():
                break
            tokens = chosen
        return responses, log_probs, lengths.tolist()
