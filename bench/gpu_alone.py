"""Each side of a run by itself: generation, learning, and whether their log-probs agree. Commands of bench/gpu_run.py.

Waits: for a child's line, within a limit, after which the child is killed; for engine steps.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import pathlib
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from bench.gpu_meter import GpuMeter, config_arguments, say

ROOT = pathlib.Path(__file__).resolve().parent.parent


# -- generate --


def generate(arguments: argparse.Namespace) -> dict[str, Any]:
    """For each number of engines: start them, begin together, count what ends between two moments."""
    results = []
    for count in arguments.engines:
        children = [
            subprocess.Popen(
                [sys.executable, "-m", "bench.gpu_run", "engine", "--seconds", str(arguments.seconds)]
                + ["--index", str(index), *config_arguments(arguments)],
                cwd=ROOT,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=(arguments.out / f"engine-{count}-{index}.log").open("wb"),
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            for index in range(count)
        ]
        began = time.time()
        try:
            with GpuMeter() as meter:
                for child in children:
                    answer(child, "ready", limit_s=arguments.limit_s)
                ready = time.time()
                say(f"{count} engines ready after {ready - began:.0f} s")
                for child in children:
                    assert child.stdin is not None
                    print("go", file=child.stdin, flush=True)
                parts = [json.loads(answer(child, "{", limit_s=arguments.seconds + 120)) for child in children]
                gpus = meter.summary(ready)
        finally:
            for child in children:
                child.kill()
                child.wait()
        tokens, rollouts = (sum(p[key] for p in parts) for key in ("tokens", "rollouts"))
        results.append(
            {
                "engines": count,
                "tokens_per_s": tokens / arguments.seconds,
                "rollouts_per_s": rollouts / arguments.seconds,
                "response_length": tokens / max(1, rollouts),
                "start_s": round(ready - began, 1),
                "gpus": gpus,
            }
        )
        say(json.dumps(results[-1]))
    return {"generation_alone": results}


def answer(child: subprocess.Popen[str], start: str, *, limit_s: float) -> str:
    """The child's next line that begins so; it is killed, and an empty answer raises, after `limit_s`."""
    assert child.stdout is not None
    timer = threading.Timer(limit_s, child.kill)
    timer.start()
    try:
        for line in child.stdout:
            if line.startswith(start):
                return line
    finally:
        timer.cancel()
    raise RuntimeError(f"the child ended, or said nothing for {limit_s} s: {child.args}")


def engine(arguments: argparse.Namespace) -> dict[str, Any]:
    """One engine, in a process of its own: a child of `generate`."""
    from actors.engine import Engine

    config, model_path, prompts = workload(arguments)
    stop_ids = stop_tokens(model_path)
    finished: list[tuple[float, int]] = []

    async def serve(slot: int) -> None:
        number = slot
        while True:
            prompt = prompts[(arguments.index * 9973 + number) % len(prompts)]
            completion = await one(number, prompt)
            finished.append((time.monotonic(), len(completion.token_ids)))
            number += config.generator.concurrency

    async def one(number: int, prompt: list[int]) -> Any:
        return await machine.generate(
            prompt,
            request_id=f"r{number}",
            temperature=config.generator.temperature,
            max_tokens=config.generator.max_new_tokens,
            stop_ids=stop_ids,
            seed=arguments.index << 40 | number,
            salt="0",
        )

    async def work() -> dict[str, Any]:
        await machine.start()
        print("ready", flush=True)
        await asyncio.to_thread(sys.stdin.readline)
        slots = [asyncio.create_task(serve(slot)) for slot in range(config.generator.concurrency)]
        await asyncio.sleep(arguments.seconds / 4)  # until the slots have drifted apart
        begin = time.monotonic()
        await asyncio.sleep(arguments.seconds)
        counted = [tokens for moment, tokens in finished if begin <= moment < begin + arguments.seconds]
        for slot in slots:
            slot.cancel()
        await asyncio.gather(*slots, return_exceptions=True)
        await machine.stop()
        return {"tokens": sum(counted), "rollouts": len(counted)}

    machine = Engine(config, model_path=model_path)
    return asyncio.run(work())


# -- learn --


def learn(arguments: argparse.Namespace) -> dict[str, Any]:
    import torch

    import streamrl.policy
    from buffers.shards import cut
    from streamrl.trainer import Trainer

    config, model_path, prompts = workload(arguments)
    results = []
    for compiled in arguments.compile:
        for max_logits in arguments.max_logits:
            streamrl.policy.MAX_LOGITS = max_logits
            with one_rank(config) as mesh:
                if config.learner.gpus:
                    torch.cuda.reset_peak_memory_stats()
                policy = make_policy(config, model_path, mesh, compiled=bool(compiled))
                trainer = Trainer(policy, config)
                took: list[float] = []
                began = time.perf_counter()
                for step in range(arguments.steps + 3):
                    (shard,) = cut(synthetic_groups(config, prompts, arguments.response_length, seed=step), 1)
                    start = time.perf_counter()
                    trainer.step(shard, policy_version=step)
                    took.append(time.perf_counter() - start)
                median_s = statistics.median(took[3:])
                results.append(
                    {
                        "compile": bool(compiled),
                        "max_logits": max_logits,
                        "step_s": median_s,
                        "tokens_per_s": shard.num_tokens / median_s,
                        "response_tokens_per_s": shard.num_response_tokens / median_s,
                        "tokens": shard.num_tokens,
                        "warm_up_s": round(sum(took[:3]), 1),
                        "all_s": round(time.perf_counter() - began, 1),
                        "peak_memory_mb": torch.cuda.max_memory_allocated() / 1e6 if config.learner.gpus else None,
                    }
                )
                say(json.dumps(results[-1]))
                del policy, trainer
    return {"learning_alone": results}


def synthetic_groups(config: Any, prompts: list[list[int]], length: float, *, seed: int) -> list[Any]:
    """Groups of the run's shape: its prompts, and random responses whose mean length is `length`."""
    from streamrl.records import Rollout, RolloutGroup

    numbers = np.random.default_rng(seed)
    longest = config.generator.max_new_tokens

    def rollout(uid: str, member: int, prompt: list[int]) -> Rollout:
        count = int(np.clip(numbers.normal(length, length / 4), 1, longest))
        return Rollout(
            uid=uid,
            member=member,
            attempt=0,
            prompt_ids=np.array(prompt, dtype=np.int32),
            response_ids=numbers.choice(prompt, count).astype(np.int32),
            old_log_probs=np.full(count, -2.0, dtype=np.float32),
            versions=np.full(count, seed, dtype=np.int32),
            reward=float(numbers.integers(0, 2)),
        )

    chosen = numbers.choice(len(prompts), config.learner.groups_per_step)
    return [
        RolloutGroup(
            uid=str(index),
            rollouts=tuple(rollout(str(index), m, prompts[index]) for m in range(config.algorithm.group_size)),
        )
        for index in map(int, chosen)
    ]


# -- parity --


def parity(arguments: argparse.Namespace) -> dict[str, Any]:
    """The engine first, then the learner's policy: they take turns on the memory."""
    import torch

    from actors.engine import Engine
    from actors.parity import log_prob_differences, sample_rollouts

    config, model_path, prompts = workload(arguments)
    stop_ids = stop_tokens(model_path)
    vocabulary = json.loads((pathlib.Path(model_path) / "config.json").read_text())["vocab_size"]
    random_probe = np.random.default_rng(0).integers(0, vocabulary, size=(32, 16)).tolist()

    async def sample() -> tuple[list[Any], list[float], list[float], list[list[int]], float]:
        machine = Engine(config, model_path=model_path)
        began = time.perf_counter()
        await machine.start()
        started = time.perf_counter() - began
        say(f"engine ready after {started:.0f} s")
        try:
            rollouts = await sample_rollouts(
                machine, prompts, config.generator, count=arguments.samples, stop_ids=stop_ids
            )
            real_probe = [[*r.prompt_ids.tolist(), *r.response_ids[:16].tolist()] for r in rollouts[:16]]
            scores = await machine.score(random_probe, request_id="random")
            real_scores = await machine.score(real_probe, request_id="real")
        finally:
            await machine.stop()
        return rollouts, scores, real_scores, real_probe, started

    rollouts, scores, real_scores, real_probe, started = asyncio.run(sample())
    result: dict[str, Any] = {"engine_start_s": round(started, 1), "dtype": config.model.dtype}
    with one_rank(config) as mesh, torch.no_grad():
        policy = make_policy(config, model_path, mesh)
        found = log_prob_differences(policy, rollouts, max_tokens=config.learner.micro_batch_tokens)
        result["sampled_tokens"] = differences(found.double().numpy())
        texts = [decode(model_path, r.response_ids.tolist()) for r in rollouts[:4]]
        result["examples"] = texts
        random_expected, real_expected = policy.probe_log_probs(random_probe), policy.probe_log_probs(real_probe)
        result["probe_random_tokens"] = differences(np.array(scores) - np.array(random_expected))
        result["probe_real_tokens"] = differences(np.array(real_scores) - np.array(real_expected))
        # How loud the probe is about weights that are really wrong: each parameter multiplied by 1 + noise.
        for noise in (0.003, 0.01, 0.03):
            torch.manual_seed(0)
            saved = [p.detach().clone() for p in policy.parameters()]
            for p in policy.parameters():
                p.mul_(1 + noise * torch.randn_like(p))
            result[f"wrong_by_{noise}"] = {
                "random": differences(np.array(scores) - np.array(policy.probe_log_probs(random_probe))),
                "real": differences(np.array(real_scores) - np.array(policy.probe_log_probs(real_probe))),
            }
            for p, old in zip(policy.parameters(), saved, strict=True):
                p.copy_(old)
    return result


def differences(values: np.ndarray) -> dict[str, float]:
    size = np.abs(values)
    return {
        "tokens": len(values),
        "mean": float(size.mean()),
        "bias": float(values.mean()),
        "p99": float(np.quantile(size, 0.99)),
        "max": float(size.max()),
    }


# -- what they share --


def workload(arguments: argparse.Namespace) -> tuple[Any, str, list[list[int]]]:
    """The config, the model's folder and the run's training prompts as token ids."""
    from actors.prompts import make_prompt_source
    from streamrl.base_model import load_tokenizer, prepare_model
    from streamrl.config import load_config

    config = load_config(arguments.config, arguments.settings)
    model_path = prepare_model(config)
    source = make_prompt_source(config, load_tokenizer(model_path))
    return config, model_path, [prompt.prompt_ids.tolist() for _ in range(512) if (prompt := source.next()) is not None]


def stop_tokens(model_path: str) -> list[int]:
    from transformers import AutoTokenizer

    end = AutoTokenizer.from_pretrained(model_path).eos_token_id
    return [] if end is None else [end]


def decode(model_path: str, token_ids: list[int]) -> str:
    from transformers import AutoTokenizer

    return str(AutoTokenizer.from_pretrained(model_path).decode(token_ids))


@contextlib.contextmanager
def one_rank(config: Any) -> Iterator[Any]:
    """A process group of one, as the learner opens it."""
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    on_gpu = config.learner.gpus > 0
    torch.set_num_threads(config.learner.threads)
    backend = "cpu:gloo,cuda:nccl" if on_gpu else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cuda" if on_gpu else "cpu", (1,))
    finally:
        dist.destroy_process_group()


def make_policy(config: Any, model_path: str, mesh: Any, *, compiled: bool | None = None) -> Any:
    from streamrl.policy import Policy

    return Policy(
        model_path,
        mesh=mesh,
        temperature=config.generator.temperature,
        dtype=config.model.dtype,
        compile=config.learner.compile if compiled is None else compiled,
        activation_checkpointing=config.learner.activation_checkpointing,
    )
