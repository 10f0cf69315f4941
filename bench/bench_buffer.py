"""The replay buffer: latency, scaling, cost of the journal, memory. One JSON line; all ratios are of one run.

python bench/bench_buffer.py                     # about two minutes on 2 cores
insert_to_sample_ms    from the insert that completes a group to the return of a `sample` that waits for it in
                       another thread, 100,000 groups held
sample_cost_ratio      cost of one sample(16) with 100,000 groups held over that with 1,000, by selector
journal_core           rollouts of 1k tokens decoded from frames, inserted in batches, sampled, committed: throughput
                       with the journal over that without it
journal_server         the same through a real BufferServer in a process of its own and a GeneratorClient on ZeroMQ
bytes_ratio            growth of resident memory per byte of raw arrays held (ids, log-probs, versions), 1k tokens
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import os
import pathlib
import platform
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from typing import Any, Literal

import msgspec
import numpy as np
import psutil

from buffers.client import GeneratorClient
from buffers.replay import ReplayBuffer
from buffers.server import BufferServer
from streamrl import wire
from streamrl.config import BufferConfig, Config
from streamrl.records import Prompt, Rollout

GROUP_SIZE = 8
BATCH = 16
TOKENS = 1000
Mode = Literal["off", "async", "sync"]
MODES: tuple[Mode, ...] = ("off", "async", "sync")


def make_rollout(uid: str, member: int, *, tokens: int = TOKENS, version: int = 0) -> Rollout:
    rng = np.random.default_rng(member)
    return Rollout(
        uid=uid,
        member=member,
        attempt=0,
        prompt_ids=np.arange(32, dtype=np.int32),
        response_ids=rng.integers(0, 32000, tokens, dtype=np.int32),
        old_log_probs=-rng.random(tokens, dtype=np.float32),
        versions=np.full(tokens, version, dtype=np.int32),
        reward=float(member % 2),
        generator="generator-0",
    )


def make_buffer(*, group_size: int = GROUP_SIZE, path: pathlib.Path | None = None, **settings: Any) -> ReplayBuffer:
    config = BufferConfig(**({"max_staleness": 10**6, "max_groups": 10**6, "max_bytes": 1 << 36} | settings))
    return ReplayBuffer(config, group_size=group_size, journal_path=path)


def fill(buffer: ReplayBuffer, num_groups: int, *, first: int = 0, group_size: int = 1, tokens: int = 8) -> None:
    for i in range(first, first + num_groups):
        for member in range(group_size):
            buffer.insert(make_rollout(f"uid-{i}", member, tokens=tokens))


def insert_to_sample_ms(num_held: int, *, rounds: int = 2000) -> dict[str, float]:
    """`num_held` groups stay held because the minimum size is one more: each sample waits for the next insert."""
    buffer = make_buffer(group_size=1, min_size=num_held + 1)
    fill(buffer, num_held)
    sampled_at = 0.0
    done = threading.Semaphore(0)

    def consume() -> None:
        nonlocal sampled_at
        for version in range(rounds):
            buffer.sample(1, policy_version=version, timeout_s=60)
            sampled_at = time.perf_counter()
            done.release()

    consumer = threading.Thread(target=consume, daemon=True)
    consumer.start()
    latencies = []
    for i in range(rounds):
        rollout = make_rollout(f"late-{i}", 0, tokens=8)
        while not buffer.stats().waits:  # until the consumer waits again
            time.sleep(0.0001)
        inserted_at = time.perf_counter()
        buffer.insert(rollout)
        done.acquire()
        latencies.append((sampled_at - inserted_at) * 1e3)
        buffer.commit(i)
    consumer.join(60)
    return {"median": statistics.median(latencies), "p99": float(np.percentile(latencies, 99))}


def sample_cost_ratio(selector: str, *, small: int = 1_000, large: int = 100_000, rounds: int = 40) -> float:
    """Median time of sample(16), both sizes measured in turn; what was sampled is given back by a rollback."""
    buffers = {n: make_buffer(group_size=1, selector=selector) for n in (small, large)}
    for num_groups, buffer in buffers.items():
        fill(buffer, num_groups)
    gc.collect()
    times: dict[int, list[float]] = {small: [], large: []}
    for version in range(rounds):
        for num_groups, buffer in buffers.items():
            began = time.perf_counter()
            buffer.sample(BATCH, policy_version=version, timeout_s=0)
            times[num_groups].append(time.perf_counter() - began)
            fill(buffer, BATCH, first=num_groups + version * BATCH)
    return statistics.median(times[large]) / statistics.median(times[small])


def core_throughput(mode: Mode, *, num_rollouts: int = 4096, together: int = 64) -> float:
    """Rollouts per second of the buffer's own work: decode, insert, sample, commit."""
    frames = [wire.encode_rollout(make_rollout("uid", m)) for m in range(GROUP_SIZE)]
    heads = [
        [wire.encode_rollout(make_rollout(f"uid-{i}", m))[0] for m in range(GROUP_SIZE)]
        for i in range(num_rollouts // GROUP_SIZE)
    ]
    messages = [[head, bytes(frames[m][1])] for group in heads for m, head in enumerate(group)]
    with tempfile.TemporaryDirectory(dir=".") as folder:
        buffer = make_buffer(path=pathlib.Path(folder), journal=mode)
        version = 0
        began = time.perf_counter()
        for start in range(0, num_rollouts, together):
            buffer.insert_many([wire.decode_rollout(m) for m in messages[start : start + together]])
            while buffer.stats().buffered >= BATCH:
                buffer.sample(BATCH, policy_version=version, timeout_s=0)
                version += 1
                buffer.advance(version)
                buffer.commit(version)
        rate = num_rollouts / (time.perf_counter() - began)
        buffer.close()
    return rate


class EndlessSource:
    """Prompts without end."""

    exhausted = False

    def __init__(self) -> None:
        self.position = 0

    def next(self) -> Prompt | None:
        self.position += 1
        return Prompt(uid=f"uid-{self.position}", index=self.position, prompt_ids=np.arange(32, dtype=np.int32))

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


async def serve(mode: Mode, folder: str) -> None:
    """A buffer process: its address on stdout, then batches are sampled and committed as they become complete."""
    config = msgspec.structs.replace(Config(), buffer=BufferConfig(max_staleness=64, max_bytes=1 << 34, journal=mode))
    server = BufferServer(config, EndlessSource(), journal_path=folder)
    buffer = server.buffer
    print(await server.start(), flush=True)
    serving = asyncio.create_task(server.run())
    version = 0
    while True:
        await asyncio.sleep(0.005)
        while buffer.stats().buffered >= BATCH:
            buffer.sample(BATCH, policy_version=version, timeout_s=0)
            version += 1
            buffer.advance(version)
            buffer.commit(version)
        if serving.done():
            return


async def server_throughput(mode: Mode, *, seconds: float = 4.0) -> float:
    """Acknowledged rollouts per second of one generator that always has the next rollout ready."""
    with tempfile.TemporaryDirectory(dir=".") as folder:
        command = [sys.executable, __file__, "--serve", mode, folder]
        child = subprocess.Popen(command, stdout=subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"})
        assert child.stdout is not None
        try:
            client = GeneratorClient(child.stdout.readline().decode().strip(), name="generator-0")
            await client.connect(timeout_s=30)
            await client.report_version(incarnation=0, policy_version=0)
            await client.request(512)
            ready = [make_rollout("uid", m, version=10**6) for m in range(GROUP_SIZE)]

            async def generate() -> None:
                while True:
                    lease, _ = await client.next_lease()
                    for member, attempt in zip(lease.members, lease.attempts, strict=True):
                        r = ready[member]
                        await client.send(
                            Rollout(
                                uid=lease.uid,
                                member=member,
                                attempt=attempt,
                                prompt_ids=r.prompt_ids,
                                response_ids=r.response_ids,
                                old_log_probs=r.old_log_probs,
                                versions=r.versions,
                                reward=r.reward,
                            )
                        )
                    await client.request(len(lease.members))

            async def follow() -> None:  # the weights are always the newest
                for version in range(10**9):
                    await client.report_version(incarnation=0, policy_version=version)
                    await asyncio.sleep(0.02)

            tasks = [asyncio.create_task(generate()), asyncio.create_task(follow())]
            await asyncio.sleep(1.0)
            before, began = client.outcomes["accepted"], time.perf_counter()
            await asyncio.sleep(seconds)
            rate = (client.outcomes["accepted"] - before) / (time.perf_counter() - began)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        finally:
            child.kill()
            child.wait(10)
            child.stdout.close()
        await client.close(timeout_s=0.1)
    return rate


def relative(rates: dict[str, list[float]]) -> dict[str, float]:
    """Best of the repetitions (the machine is shared), absolute without a journal and relative with one."""
    best = {mode: max(values) for mode, values in rates.items()}
    return {
        "off_per_s": round(best["off"]),
        "async": round(best["async"] / best["off"], 3),
        "sync": round(best["sync"] / best["off"], 3),
    }


def bytes_ratio(*, num_groups: int = 1000) -> float:
    """In a process whose memory has not been used before, from frames as they come from a socket."""
    process = psutil.Process()
    make_buffer().insert(wire.decode_rollout([bytes(f) for f in wire.encode_rollout(make_rollout("warm-up", 0))]))
    gc.collect()
    before = process.memory_info().rss
    buffer = make_buffer()
    for i in range(num_groups):
        for member in range(GROUP_SIZE):
            frames = wire.encode_rollout(make_rollout(f"uid-{i}", member))
            buffer.insert(wire.decode_rollout([bytes(frame) for frame in frames]))
    gc.collect()
    return float(process.memory_info().rss - before) / buffer.stats().num_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="repetitions of each throughput; the best counts")
    parser.add_argument("--serve", nargs=2, metavar=("MODE", "FOLDER"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        asyncio.run(serve(*arguments.serve))
        return
    memory = bytes_ratio()
    core: dict[str, list[float]] = {mode: [] for mode in MODES}
    server: dict[str, list[float]] = {mode: [] for mode in MODES}
    for _ in range(arguments.repeat):
        for mode in MODES:
            core[mode].append(core_throughput(mode))
            server[mode].append(asyncio.run(server_throughput(mode)))
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    result = {
        "bench": "buffer",
        "commit": commit.stdout.strip(),
        "load": round(os.getloadavg()[0], 1),
        "machine": f"{platform.machine()} {os.cpu_count()} cores",
        "insert_to_sample_ms": {k: round(v, 3) for k, v in insert_to_sample_ms(100_000).items()},
        "sample_cost_ratio": {
            selector: round(sample_cost_ratio(selector), 2)
            for selector in ("fifo", "freshest", "uniform", "prioritized")
        },
        "journal_core": relative(core),
        "journal_server": relative(server),
        "bytes_ratio": round(memory, 3),
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
