"""What the learner's parts cost: packing against padding, chunked log-probs against all logits, each loss, and what a
step that begins before its batch is complete saves.

    packed, padded   tokens per second, forward and backward, of rollouts of long-tailed lengths in micro-batches of
                     `--budget` tokens: packed as the learner does it, and padded to the longest of as many rollouts in
                     the order in which they come; real tokens count, not padding
    logits           peak memory above the start of log-probs, forward and backward, with a vocabulary of 49,152:
                     chunked as the learner does it, and through all logits at once
    losses           time of each loss with its gradient, relative to forward and backward of the same tokens
    streaming        seconds from the arrival of a step's last group to the step's end, of 16 groups that arrive one by
                     one over 1.5 times the duration of a whole step: in chunks of four as they come
                     (`learner.stream_groups`), and all at once when the last is there. On a clock of CPU seconds, so
                     that neighbours on the machine do not count

One CPU thread. Prints one JSON line; times are medians, the ways taking turns.

    python -m bench.bench_learner [--rounds 5] [--budget 4096]
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from buffers.shards import StepCut
from streamrl.config import AlgorithmConfig, config_from_tree
from streamrl.losses import LOSSES, policy_loss
from streamrl.packing import MicroBatch, pack_prompts, pack_rollouts
from streamrl.policy import Policy
from streamrl.records import Rollout, RolloutGroup
from streamrl.trainer import Trainer

SHAPE = {
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": True,
}
LONGEST = 512


def save_model(folder: pathlib.Path, **shape: int) -> pathlib.Path:
    LlamaForCausalLM(LlamaConfig(**SHAPE, **shape)).save_pretrained(folder)
    return folder


def long_tailed(count: int) -> list[Rollout]:
    """Responses with a median of 40 tokens, one in twenty above 200."""
    numbers = np.random.default_rng(0)
    rollouts = []
    for i in range(count):
        length = int(np.clip(numbers.lognormal(np.log(40), 1.0), 1, LONGEST - 10))
        rollouts.append(
            Rollout(
                uid=str(i),
                member=0,
                attempt=0,
                prompt_ids=numbers.integers(0, 100, 10).astype(np.int32),
                response_ids=numbers.integers(0, 100, length).astype(np.int32),
                old_log_probs=numbers.normal(-4.6, 0.1, length).astype(np.float32),
                versions=np.zeros(length, dtype=np.int32),
            )
        )
    return rollouts


def seconds(work: Callable[[], Any]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def packed_against_padded(folder: pathlib.Path, mesh: DeviceMesh, *, rounds: int, budget: int) -> dict[str, float]:
    policy = Policy(folder, mesh=mesh, temperature=1.0)
    plain = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa").eval()
    rollouts = long_tailed(400)
    packed = pack_rollouts(rollouts, torch.zeros(len(rollouts)), max_tokens=budget)
    each = len(rollouts) // len(packed)  # as many micro-batches

    def run_packed() -> None:
        for batch in packed:
            policy.token_log_probs(batch)[0].sum().backward()

    def run_padded() -> None:
        for start in range(0, len(rollouts), each):
            rows = [np.concatenate([r.prompt_ids, r.response_ids]) for r in rollouts[start : start + each]]
            longest = max(map(len, rows))
            ids = torch.tensor(np.array([np.pad(row, (0, longest - len(row))) for row in rows])).long()
            mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
            log_probs = plain(input_ids=ids, attention_mask=mask, use_cache=False).logits[:, :-1].log_softmax(-1)
            (log_probs.gather(2, ids[:, 1:, None])[..., 0] * mask[:, 1:]).sum().backward()

    times = [(seconds(run_packed), seconds(run_padded)) for _ in range(rounds + 1)][1:]
    tokens = sum(r.num_tokens for r in rollouts)
    ours, theirs = (tokens / statistics.median(column) for column in zip(*times, strict=True))
    return {"packed_tokens_per_s": round(ours), "padded_tokens_per_s": round(theirs), "ratio": round(ours / theirs, 2)}


def peak_megabytes(work: Callable[[], Any]) -> float:
    """Above the start, by the kernel's high-water mark of the resident set."""
    pathlib.Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
    before = psutil.Process().memory_info().rss
    work()
    (peak,) = re.findall(r"VmHWM:\s+(\d+) kB", pathlib.Path("/proc/self/status").read_text(encoding="ascii"))
    return round((int(peak) * 1024 - before) / 1e6)


def memory_of_logits(folder: pathlib.Path, mesh: DeviceMesh) -> dict[str, float]:
    policy = Policy(folder, mesh=mesh, temperature=1.0)
    plain = AutoModelForCausalLM.from_pretrained(folder).eval()
    sequences = [[7] * 32] * 128

    def all_at_once() -> None:
        ids = torch.tensor(sequences)
        log_probs = plain(input_ids=ids, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        log_probs.gather(2, ids[:, 1:, None]).sum().backward()

    batch = pack_prompts(sequences)
    return {
        "chunked_mb": peak_megabytes(lambda: policy.token_log_probs(batch)[0].sum().backward()),
        "all_logits_mb": peak_megabytes(all_at_once),
    }


def cost_of_losses(folder: pathlib.Path, mesh: DeviceMesh, *, rounds: int, budget: int) -> dict[str, float]:
    """Per cent of forward and backward."""
    policy = Policy(folder, mesh=mesh, temperature=1.0)
    rollouts = long_tailed(400)
    batch: MicroBatch = pack_rollouts(rollouts, torch.randn(len(rollouts)), max_tokens=budget)[-2]
    tokens = batch.tokens
    log_probs = policy.token_log_probs(batch)[0].detach()

    def run_loss(name: str) -> None:
        current = log_probs.clone().requires_grad_()
        loss, _ = policy_loss(
            current,
            tokens["old_log_probs"],
            tokens["advantages"],
            tokens["response_mask"],
            tokens["sequence_index"],
            AlgorithmConfig(loss=name),
        )
        loss.backward()

    whole, costs = [], {name: [] for name in LOSSES}
    for _ in range(rounds + 1):
        whole.append(seconds(lambda: policy.token_log_probs(batch)[0].sum().backward()))
        for name, times in costs.items():
            times.append(seconds(lambda name=name: run_loss(name)))
    base = statistics.median(whole[1:])
    return {name: round(100 * statistics.median(times[1:]) / base, 2) for name, times in costs.items()}


def streamed_against_whole(folder: pathlib.Path, mesh: DeviceMesh, *, rounds: int) -> dict[str, float]:
    config = config_from_tree({"learner": {"micro_batch_tokens": 1024}})  # several to a chunk, each of like lengths
    trainer = Trainer(Policy(folder, mesh=mesh, temperature=1.0), config)
    size, members = config.learner.groups_per_step, config.algorithm.group_size
    rollouts = [msgspec.structs.replace(r, reward=float(i % 3)) for i, r in enumerate(long_tailed(size * members))]
    groups = [RolloutGroup(uid=str(g), rollouts=tuple(rollouts[g * members : (g + 1) * members])) for g in range(size)]

    def tail(chunk_size: int, interval_s: float) -> float:
        cut = StepCut(size=size, chunk_size=chunk_size, world_size=1)
        cut.extend(groups)
        trainer.begin(0)
        clock = 0.0  # CPU seconds, in which a group arrives every `interval_s`
        for chunk in range(cut.num_chunks):
            shard = cut.shard(chunk, 0)
            began = time.process_time()
            trainer.add(shard.groups)
            clock = max(clock, shard.num_groups * interval_s) + time.process_time() - began
        began = time.process_time()
        trainer.finish(shard)
        return clock + time.process_time() - began - size * interval_s

    tail(size, 0.0)
    interval_s = 1.5 * tail(size, 0.0) / size
    times = [(tail(4, interval_s), tail(size, interval_s)) for _ in range(rounds)]
    streamed, whole = (statistics.median(column) for column in zip(*times, strict=True))
    return {"streamed_s": round(streamed, 3), "whole_s": round(whole, 3), "ratio": round(streamed / whole, 2)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--budget", type=int, default=4096)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh("cpu", (1,))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    with tempfile.TemporaryDirectory() as folder:
        small = save_model(
            pathlib.Path(folder) / "small", vocab_size=100, hidden_size=128, intermediate_size=352, num_hidden_layers=3
        )
        wide = save_model(
            pathlib.Path(folder) / "wide", vocab_size=49152, hidden_size=8, intermediate_size=8, num_hidden_layers=1
        )
        result = {
            "bench": "learner",
            "commit": commit.stdout.strip(),
            "machine": f"{platform.machine()}, {os.cpu_count()} cores, 1 thread",
            "load": round(os.getloadavg()[0], 1),
            "logits": memory_of_logits(wide, mesh),
            "packing": packed_against_padded(small, mesh, rounds=arguments.rounds, budget=arguments.budget),
            "loss_percent": cost_of_losses(small, mesh, rounds=arguments.rounds, budget=arguments.budget),
            "streaming": streamed_against_whole(small, mesh, rounds=arguments.rounds),
        }
    dist.destroy_process_group()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
