"""Stand-ins for the processes around the buffer: they run the real clients and servers, only the model is missing."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import signal
import sys
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from buffers.client import GeneratorClient, LearnerClient
from buffers.server import BufferServer
from streamrl.config import Config, config_from_tree
from streamrl.errors import ClosedError
from streamrl.records import Lease, Prompt, Rollout


class CountingSource:
    """Prompts "0-000000", "0-000001", ...; `size` of them."""

    def __init__(self, size: int = 1_000_000) -> None:
        self.size = size
        self.position = 0

    @property
    def exhausted(self) -> bool:
        return self.position >= self.size

    def next(self) -> Prompt | None:
        if self.exhausted:
            return None
        index = self.position
        self.position += 1
        prompt_ids = np.arange(1 + index % 5, dtype=np.int32)
        return Prompt(uid=f"0-{index:06d}", index=index, prompt_ids=prompt_ids, task={"index": index})

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position = state["position"]


def small_config(**sections: dict[str, Any]) -> Config:
    """Groups of 4, 4 groups a step, S = 2, unless `sections` say otherwise."""
    tree: dict[str, dict[str, Any]] = {
        "algorithm": {"group_size": 4},
        "learner": {"groups_per_step": 4},
        "buffer": {"max_staleness": 2},
        "weight_sync": {"backend": "shm"},
    }
    for name, section in sections.items():
        tree.setdefault(name, {}).update(section)
    return config_from_tree(tree)


def make_rollout(
    uid: str = "0-000000", member: int = 0, attempt: int = 0, *, version: int = 0, length: int = 5, **changes: Any
) -> Rollout:
    """A well-formed rollout whose reward is its member index."""
    fields: dict[str, Any] = {
        "uid": uid,
        "member": member,
        "attempt": attempt,
        "prompt_ids": np.arange(3, dtype=np.int32),
        "response_ids": np.arange(length, dtype=np.int32),
        "old_log_probs": np.full(length, -0.5, dtype=np.float32),
        "versions": np.full(length, version, dtype=np.int32),
        "reward": float(member),
    }
    return Rollout(**(fields | changes))


class StandInGenerator:
    """Answers every leased member at once with a rollout of its current version."""

    def __init__(
        self,
        client: GeneratorClient,
        *,
        concurrency: int = 16,
        make: Callable[..., Rollout] = make_rollout,
        delay_s: float = 0.0,
    ) -> None:
        self.client = client
        self.concurrency = concurrency
        self.make = make
        self.delay_s = delay_s
        self.version = 0
        self.sent: list[tuple[str, int, int]] = []

    async def report(self, version: int) -> None:
        self.version = version
        await self.client.report_version(incarnation=0, policy_version=version)

    async def run(self) -> None:
        """Until the run ends."""
        await self.report(self.version)
        await self.client.request(self.concurrency)
        with contextlib.suppress(ClosedError):
            while True:
                lease, prompt_ids = await self.client.next_lease()
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                await self.answer(lease, prompt_ids)

    async def answer(self, lease: Lease, prompt_ids: np.ndarray) -> None:
        for member, attempt in zip(lease.members, lease.attempts, strict=True):
            rollout = self.make(lease.uid, member, attempt, version=self.version, prompt_ids=prompt_ids)
            self.sent.append(rollout.key)
            await self.client.send(rollout)
            await self.client.request(1)


async def _run_mute_generator(address: str, name: str) -> None:
    """Takes members and never answers; says the first uid on stdout."""
    client = GeneratorClient(address, name=name, heartbeat_s=0.1, peer_timeout_s=1.0)
    await client.connect(timeout_s=10)
    await client.report_version(incarnation=0, policy_version=0)
    await client.request(8)
    lease, _ = await client.next_lease()
    print(lease.uid, flush=True)
    await asyncio.sleep(3600)


async def _run_generator(address: str, name: str, checkpoint: str) -> None:
    """Answers until the run ends; its weights are those of the learner's checkpoint."""
    client = GeneratorClient(address, name=name, heartbeat_s=0.1, peer_timeout_s=1.0)
    await client.connect(timeout_s=30)
    generator = StandInGenerator(client, concurrency=12, delay_s=0.003)

    async def follow() -> None:
        while True:
            await asyncio.sleep(0.01)
            version = _read(checkpoint)["version"]
            if version > generator.version:
                await generator.report(version)

    generator.version = _read(checkpoint)["version"]
    following = asyncio.create_task(follow())
    await generator.run()
    following.cancel()
    await client.close(timeout_s=1)


async def _run_server(bind: str, journal: str, checkpoint: str) -> None:
    """Serves with a journal until SIGTERM, then prints its ledger."""
    config = small_config(
        learner={"ranks": 2},
        buffer={"max_staleness": 3, "journal": "async", "max_attempts": 10, "group_deadline_s": 5},
    )
    server = BufferServer(
        config, CountingSource(), bind=bind, journal_path=journal, heartbeat_s=0.1, peer_timeout_s=1.0
    )
    await server.start()
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    serving = asyncio.create_task(server.run())
    waiting = asyncio.create_task(ended.wait())
    await asyncio.wait([serving, waiting], return_when=asyncio.FIRST_COMPLETED)
    if serving.done():
        serving.result()
    stats = await server.stop(reason="end_of_run", final_version=_read(checkpoint)["version"])
    await serving
    print(msgspec.json.encode(stats).decode(), flush=True)


def _run_learner(address: str, checkpoint: str) -> None:
    """Two ranks in one process, until a file says stop. A step is in the checkpoint, which is replaced at once, or it
    never happened."""
    ranks = [LearnerClient(address, rank=r, world_size=2, heartbeat_s=0.1, peer_timeout_s=1.0) for r in range(2)]
    for rank in ranks:
        rank.connect(timeout_s=30)
    state = _read(checkpoint)
    while not pathlib.Path(checkpoint + ".stop").exists():
        version = state["version"]
        shards = [rank.sample(policy_version=version, timeout_s=60) for rank in ranks]
        groups = [group for shard in shards if shard is not None for group in shard.groups]
        assert all(version - group.min_version <= 3 for group in groups)
        state["trained"][str(version)] = sorted(group.uid for group in groups)
        state["version"] = version + 1
        pathlib.Path(checkpoint + ".new").write_text(json.dumps(state))
        os.replace(checkpoint + ".new", checkpoint)
        ranks[0].advance(version + 1, commit=True)
    for rank in ranks:
        rank.close()


def _read(checkpoint: str) -> dict[str, Any]:
    return json.loads(pathlib.Path(checkpoint).read_text())


if __name__ == "__main__":
    role, *arguments = sys.argv[1:]
    if role == "learner":
        _run_learner(*arguments)
    else:
        roles = {"mute_generator": _run_mute_generator, "generator": _run_generator, "server": _run_server}
        asyncio.run(roles[role](*arguments))
