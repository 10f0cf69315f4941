"""`max_staleness = 0` is the synchronous loop: a run of the real processes against a loop written here by hand.

The run is the quickstart: real vLLM engine, rewards, buffer server, sockets, learner and weight channel, in one process
so that its batches and weights can be looked at. The loop is generate-then-train in plain Transformers and PyTorch: one
prompt at a time, no KV cache, no packing, no importance weight, no trainer. It shares with the run the data, the base
model, the verifier, the seed of each response, and the kernel that turns a seed and logits into a token (vLLM's own
noise). Everything else is written a second time.
"""

from __future__ import annotations

import asyncio
import hashlib
import pathlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from conftest import QUICKSTART
from transformers import AutoModelForCausalLM

from actors.generator import Generator
from actors.learner import Learner
from actors.preparation import prepare
from actors.prompts import make_prompt_source
from buffers.server import BufferServer
from buffers.shards import Shard
from streamrl.base_model import load_tokenizer
from streamrl.config import Config, load_config
from streamrl.examples import load_examples, open_task, restore
from streamrl.records import BufferStats

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600)]

STEPS = 5
Weights = dict[str, torch.Tensor]
Batch = list[tuple[str, int, list[int], float]]  # uid, member, response, reward


# -- the run ---------------------------------------------------------------------------------------------------------


class WatchedLearner(Learner):
    """The learner itself; it keeps what it trained on and what it published."""

    def __init__(self, config: Config, **settings: Any) -> None:
        super().__init__(config, **settings)
        self.shards: list[Shard] = []
        self.weights: list[Weights] = []

    def _next_shard(self, chunk: int) -> Shard | None:
        shard = super()._next_shard(chunk)
        if shard is not None:
            self.shards.append(shard)
        return shard

    def _publish(self) -> None:
        super()._publish()
        self.weights.append({n: w.full_tensor().detach().clone() for n, w in self._policy.state_dict().items()})


@dataclass
class Run:
    records: list[dict[str, float]]
    batches: list[Batch]
    weights: list[Weights]  # of every version, 0 first
    ledger: BufferStats


async def play(config: Config, model_path: str) -> Run:
    """One run, from the first handshake to the last ledger."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        master = f"127.0.0.1:{probe.getsockname()[1]}"
    server = BufferServer(config, make_prompt_source(config, load_tokenizer(model_path)))
    learner = WatchedLearner(
        config, rank=0, world_size=1, incarnation=0, model_path=model_path, master=master, run_name="synchronous"
    )
    generators = [Generator(config, index=i, model_path=model_path) for i in range(config.generator.count)]
    serving: list[asyncio.Task[Any]] = []
    ledger = None
    try:
        address = await server.start()
        started, *_ = await asyncio.gather(learner.start(address), *(g.start() for g in generators))
        for generator in generators:
            await generator.connect(buffer_address=address, weight_address=started["weight_address"], incarnation=0)
        serving = [asyncio.create_task(server.run()), *(asyncio.create_task(g.run()) for g in generators)]
        training = asyncio.create_task(learner.run())
        await asyncio.wait([*serving, training], return_when=asyncio.FIRST_COMPLETED)
        for broken in serving:
            if broken.done():
                broken.result()
        version = await training
        ledger = await server.stop(reason="end_of_run", final_version=version)
        await asyncio.gather(*serving)
    finally:
        await asyncio.gather(*(g.stop() for g in generators))
        await learner.close()
        if ledger is None:
            await server.stop(reason="broken", final_version=0)
    records = []
    while (record := await learner.next_record()) is not None:
        records.append(record)
    batches = [
        [(r.uid, r.member, r.response_ids.tolist(), r.reward) for g in shard.groups for r in g.rollouts]
        for shard in learner.shards
    ]
    return Run(records=records, batches=batches, weights=learner.weights, ledger=ledger)


# -- the loop --------------------------------------------------------------------------------------------------------


def seed_of(run_seed: int, uid: str, member: int) -> int:
    digest = hashlib.blake2b(f"{run_seed}/{uid}/{member}/0".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") // 2


@torch.no_grad()
def respond(model: Any, prompt: list[int], seeds: list[int], *, limit: int, eos: int) -> list[list[int]]:
    """One response for each seed, sampled at temperature 1."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    noise = [torch.Generator().manual_seed(seed) for seed in seeds]
    sequences = torch.tensor([prompt] * len(seeds))
    for _ in range(limit):
        logits = model(sequences).logits[:, -1].float().contiguous()
        draws = torch.tensor([int(torch.randint(0, 2**31, (1,), generator=g)) for g in noise])
        sequences = torch.cat([sequences, torch.ops._C.fused_gumbel_argmax(logits, draws)[:, None]], dim=1)
    responses = [row[len(prompt) :] for row in sequences.tolist()]
    return [r[: r.index(eos) + 1] if eos in r else r for r in responses]


def loss_of(
    model: Any, group: list[tuple[list[int], list[int], float]], num_tokens: int, entropy_coef: float
) -> torch.Tensor:
    """The part of one group in -1/N sum (A exp(p - p') + c H): p' is p without gradient, A = (r - mean) / (std + 1e-6),
    H the entropy of the token's distribution, N the tokens of the batch."""
    rewards = np.array([reward for *_, reward in group])
    advantages = (rewards - rewards.mean()) / (rewards.std(ddof=1) + 1e-6)
    loss = torch.zeros(())
    for (prompt, response, _), advantage in zip(group, advantages, strict=True):
        logits = model(torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].float()
        distribution = torch.log_softmax(logits, -1)
        log_probs = distribution[range(len(response)), response]
        entropy = -(distribution.exp() * distribution).sum(-1)
        gain = float(advantage) * (log_probs - log_probs.detach()).exp() + entropy_coef * entropy
        loss = loss - gain.sum() / num_tokens
    return loss


def by_hand(config: Config, model_path: str) -> Run:
    """Generate, then train, `run.max_steps` times."""
    model = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.float32).eval()
    tokenizer = load_tokenizer(model_path)
    learner, algorithm, generator = config.learner, config.algorithm, config.generator
    verifier = open_task(config.data.task, config.data.task_args, seed=0, size=1)
    examples = load_examples(config).train
    order = np.random.default_rng((config.run.seed, 0)).permutation(len(examples))
    optimizer = torch.optim.AdamW(model.parameters(), lr=learner.lr, betas=learner.betas, weight_decay=0.0)
    run = Run(records=[], batches=[], weights=[], ledger=BufferStats())
    for step in range(config.run.max_steps):
        run.weights.append({n: p.detach().clone() for n, p in model.named_parameters()})
        batch: Batch = []
        groups = []
        for position in range(step * learner.groups_per_step, (step + 1) * learner.groups_per_step):
            example, uid = examples[order[position]], f"0-{position:06d}"
            prompt = tokenizer(example.text)["input_ids"]
            seeds = [seed_of(config.run.seed, uid, member) for member in range(algorithm.group_size)]
            responses = respond(model, prompt, seeds, limit=generator.max_new_tokens, eos=tokenizer.eos_token_id)
            texts = [tokenizer.decode(r, skip_special_tokens=True).strip() for r in responses]
            rewards = [float(verifier.score_answer(text, restore(example.task["entry"]))) for text in texts]
            batch += [(uid, m, r, reward) for m, (r, reward) in enumerate(zip(responses, rewards, strict=True))]
            groups.append([(prompt, r, reward) for r, reward in zip(responses, rewards, strict=True)])
        num_tokens = sum(len(response) for _, _, response, _ in batch)
        optimizer.zero_grad()
        loss = 0.0
        for group in groups:
            part = loss_of(model, group, num_tokens, algorithm.entropy_coef)
            part.backward()
            loss += part.item()
        norm = torch.cat([p.grad.flatten() for p in model.parameters()]).double().norm()
        for parameter in model.parameters():
            parameter.grad *= min(1.0, learner.max_grad_norm / float(norm))
        for settings in optimizer.param_groups:
            settings["lr"] = learner.lr * min(1.0, (step + 1) / learner.warmup_steps)
        optimizer.step()
        run.records.append({"learner/loss": loss, "learner/grad_norm": float(norm)})
        run.batches.append(batch)
    run.weights.append({n: p.detach().clone() for n, p in model.named_parameters()})
    return run


# -- both ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def config(model_cache: pathlib.Path) -> Config:
    """The quickstart with small batches, and an entropy bonus: without it the loss is nearly 0 before every step."""
    overrides = f"""buffer.max_staleness=0 generator.count=1 run.max_steps={STEPS} eval.num_prompts=0
        learner.groups_per_step=8 algorithm.group_size=4 algorithm.entropy_coef=0.02
        weight_sync.backend=shm model.cache_dir={model_cache}"""
    return load_config(QUICKSTART, overrides.split())


@pytest.fixture(scope="module")
def runs(config: Config) -> Iterator[tuple[Run, Run]]:
    model_path = prepare(config).model_path
    real = asyncio.run(asyncio.wait_for(play(config, model_path), 300))
    yield real, by_hand(config, model_path)


def test_the_same_batches(runs: tuple[Run, Run]) -> None:
    real, hand = runs
    assert len(real.batches) == STEPS
    assert real.batches == hand.batches, "uid, member, response and reward of every rollout, in order"


def test_the_same_losses(runs: tuple[Run, Run]) -> None:
    real, hand = runs
    for name in ("learner/loss", "learner/grad_norm"):
        ours, theirs = ([record[name] for record in run.records] for run in runs)
        difference = np.abs(np.subtract(ours, theirs)).max()
        print(f"{name}: largest difference {difference:.1e} of {np.abs(theirs).max():.2g}")
        assert len(ours) == STEPS and difference < 1e-5


def test_the_same_weights_after_every_step(runs: tuple[Run, Run]) -> None:
    real, hand = runs
    assert len(real.weights) == len(hand.weights) == STEPS + 1
    for version, (ours, theirs) in enumerate(zip(real.weights, hand.weights, strict=True)):
        assert set(ours) >= set(theirs)
        difference = max(float((ours[name] - theirs[name]).abs().max()) for name in theirs)
        moved = max(float((theirs[name] - hand.weights[0][name]).abs().max()) for name in theirs)
        print(f"version {version}: largest difference {difference:.1e}, after a move of {moved:.1e}")
        assert difference < 1e-5
        assert moved >= 1e-5 * version, "the steps are far larger than the tolerance"


def test_nothing_was_generated_that_was_not_trained(runs: tuple[Run, Run], config: Config) -> None:
    real, _ = runs
    assert all(record["offpolicy/staleness/max"] == 0 for record in real.records)
    assert real.ledger.trained == STEPS * config.learner.groups_per_step
    assert sum(real.ledger.discarded.values()) <= config.learner.groups_per_step, "the batch after the last step"
