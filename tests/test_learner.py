"""One learner rank in this process, with a fake buffer client and a fake publisher at its two ends."""

from __future__ import annotations

import asyncio
import pathlib
import socket
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
import pytest
from test_trainer import VOCAB, batch_of, save_model, shard_of

import actors.learner
from actors.learner import Learner
from buffers.shards import Shard, StepCut
from streamrl.config import config_from_tree
from streamrl.errors import DeadlineExceededError, StaleRolloutError
from streamrl.records import RolloutGroup


class FakeBufferClient:
    """Gives one shard a step, made by the test, and notes what it was told."""

    batches: Callable[[int], list[RolloutGroup] | None]  # version -> groups; None: end of the data; empty: not yet
    chunks: Callable[[int, int], Shard | None] | None = None  # version, chunk -> shard, instead of batches

    def __init__(self, address: str, *, rank: int, world_size: int, curve: Any = None) -> None:
        self.advanced: list[tuple[int, bool]] = []
        self.connected = self.closed = False
        FakeBufferClient.last = self

    last: FakeBufferClient

    def connect(self, *, timeout_s: float) -> None:
        self.connected = True

    def sample(self, *, policy_version: int, chunk: int, timeout_s: float) -> Shard | None:
        if FakeBufferClient.chunks is not None:
            return FakeBufferClient.chunks(policy_version, chunk)
        groups = FakeBufferClient.batches(policy_version)
        if groups is None:
            return None
        if not groups:
            time.sleep(timeout_s)
            raise DeadlineExceededError("no batch yet")
        return shard_of(groups, groups)

    def advance(self, policy_version: int, *, commit: bool) -> None:
        self.advanced.append((policy_version, commit))

    def close(self) -> None:
        self.closed = True


class FakePublisher:
    """Notes which versions were published with which probe log-probs."""

    num_refused = 0
    last: FakePublisher

    def __init__(self, config: Any, *, named_parameters: Any, probe: Any, **_: Any) -> None:
        self.names = list(named_parameters)
        self.probe = probe
        self.published: list[tuple[int, list[float]]] = []
        self.closed = False
        FakePublisher.last = self

    def start(self) -> str:
        return "tcp://127.0.0.1:1"

    def publish(self, policy_version: int, probe_log_probs: list[float]) -> dict[str, float]:
        self.published.append((policy_version, probe_log_probs))
        return {}

    def close(self) -> None:
        self.closed = True


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    return save_model(tmp_path_factory.mktemp("learner") / "model")


@pytest.fixture(autouse=True)
def fakes(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(FakeBufferClient, "chunks", None)
    monkeypatch.setattr(actors.learner, "LearnerClient", FakeBufferClient)
    monkeypatch.setattr(actors.learner, "WeightPublisher", FakePublisher)
    monkeypatch.setattr(actors.learner, "SAMPLE_SLICE_S", 0.05)
    yield


def with_learner(
    folder: pathlib.Path,
    scenario: Callable[[Learner], Awaitable[None]],
    batches: Callable[[int], list[RolloutGroup] | None],
    **sections: dict[str, Any],
) -> None:
    """Start a learner on the fakes, play the scenario, close."""
    FakeBufferClient.batches = staticmethod(batches)  # type: ignore[assignment]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    config = config_from_tree({"learner": {"groups_per_step": 5}, "algorithm": {"group_size": 4}, **sections})

    async def main() -> None:
        learner = Learner(
            config,
            rank=0,
            world_size=1,
            incarnation=3,
            model_path=str(folder),
            master=f"127.0.0.1:{port}",
            run_name="test",
        )
        try:
            assert await learner.start("tcp://127.0.0.1:2") == {"weight_address": "tcp://127.0.0.1:1"}
            await scenario(learner)
        finally:
            await learner.close()
        assert FakeBufferClient.last.closed and FakePublisher.last.closed

    asyncio.run(asyncio.wait_for(main(), 60))


async def all_records(learner: Learner) -> list[dict[str, float]]:
    records = []
    while (record := await learner.next_record()) is not None:
        records.append(record)
    return records


def test_it_trains_to_the_last_step_and_tells_everyone(folder: pathlib.Path) -> None:
    async def scenario(learner: Learner) -> None:
        assert (await learner.status()).phase == "starting"
        assert FakePublisher.last.published[0][0] == 0
        version, records = await asyncio.gather(learner.run(), all_records(learner))
        assert version == 4
        assert [r["step"] for r in records] == [1, 2, 3, 4]
        assert FakeBufferClient.last.advanced == [(1, True), (2, True), (3, True), (4, True)]
        assert [v for v, _ in FakePublisher.last.published] == [0, 1, 2, 3, 4]
        for record in records:
            assert record["learner/step_time_s"] >= record["time/train"] > 0
            assert record["time/wait_for_batch"] >= 0 and record["time/publish"] > 0
            assert record["learner/tokens_per_s"] > 0
        status = await learner.status()
        assert (status.phase, status.policy_version, status.incarnation, status.wait) == ("done", 4, 3, None)
        assert status.trained_tokens == sum(g.num_tokens for step in range(4) for g in batch_of(step))
        assert 0 < status.busy_s <= status.uptime_s
        assert await learner.next_record() is None

    with_learner(folder, scenario, batch_of, run={"max_steps": 4})


def test_the_probe_numbers_follow_the_weights(folder: pathlib.Path) -> None:
    async def scenario(learner: Learner) -> None:
        await learner.run()
        probe = FakePublisher.last.probe
        assert len(probe.sequences) == 4 and all(0 <= t < VOCAB for s in probe.sequences for t in s)
        numbers = [values for _, values in FakePublisher.last.published]
        assert all(len(values) == probe.num_scored for values in numbers)
        assert numbers[0] != numbers[1] != numbers[2]
        assert "model.embed_tokens.weight" in FakePublisher.last.names

    with_learner(folder, scenario, batch_of, run={"max_steps": 2})


def test_weights_are_published_every_interval_and_at_the_end(folder: pathlib.Path) -> None:
    async def scenario(learner: Learner) -> None:
        await learner.run()
        assert [v for v, _ in FakePublisher.last.published] == [0, 2, 4, 5]

    with_learner(folder, scenario, batch_of, run={"max_steps": 5}, learner={"publish_interval": 2})


def test_the_end_of_the_data_ends_it(folder: pathlib.Path) -> None:
    async def scenario(learner: Learner) -> None:
        version, records = await asyncio.gather(learner.run(), all_records(learner))
        assert version == 2 and len(records) == 2

    with_learner(folder, scenario, lambda v: batch_of(v) if v < 2 else None, run={"max_steps": 9})


def test_stop_interrupts_a_wait_at_once_and_the_wait_has_an_owner(folder: pathlib.Path) -> None:
    async def scenario(learner: Learner) -> None:
        running = asyncio.create_task(learner.run())
        while (await learner.status()).phase != "wait_for_batch":
            await asyncio.sleep(0.01)
        wait = (await learner.status()).wait
        assert wait is not None
        assert (wait.waiter, wait.waiting_for, wait.owner) == ("learner-0", "5 groups for step 1", "buffer")
        began = time.monotonic()
        await learner.stop()
        assert await running == 0
        assert time.monotonic() - began < 1.0
        assert [v for v, _ in FakePublisher.last.published] == [0]

    with_learner(folder, scenario, lambda v: [])


def test_stop_lets_the_step_in_work_finish(folder: pathlib.Path) -> None:
    asked = threading.Event()

    def batches(version: int) -> list[RolloutGroup]:
        asked.set()
        return batch_of(version)

    async def scenario(learner: Learner) -> None:
        running = asyncio.create_task(learner.run())
        await asyncio.to_thread(asked.wait, 10)
        await learner.stop()
        version = await running
        assert (await learner.status()).policy_version == version
        assert FakeBufferClient.last.advanced == [(v, True) for v in range(1, version + 1)]

    with_learner(folder, scenario, batches, run={"max_steps": 100000})


def test_it_answers_while_it_trains(folder: pathlib.Path) -> None:
    async def scenario(learner: Learner) -> None:
        running = asyncio.create_task(learner.run())
        worst = 0.0
        while not running.done():
            began = time.monotonic()
            await learner.status()
            worst = max(worst, time.monotonic() - began)
            await asyncio.sleep(0.001)
        assert worst < 0.5

    with_learner(folder, scenario, batch_of, run={"max_steps": 5})


def test_a_stale_group_is_refused_before_training(folder: pathlib.Path) -> None:
    async def scenario(learner: Learner) -> None:
        with pytest.raises(StaleRolloutError, match="max_staleness is 1"):
            await learner.run()
        assert FakeBufferClient.last.advanced == [(1, True), (2, True)]
        assert await learner.next_record() is not None  # what was trained is still told
        assert await learner.next_record() is not None
        assert await learner.next_record() is None

    with_learner(folder, scenario, lambda v: batch_of(min(v, 1)), buffer={"max_staleness": 1})


def test_a_group_from_the_future_is_refused(folder: pathlib.Path) -> None:
    async def scenario(learner: Learner) -> None:
        with pytest.raises(StaleRolloutError):
            await learner.run()

    with_learner(folder, scenario, lambda v: batch_of(v + 2))


def test_without_a_batch_it_ends_at_the_stall_limit_with_the_reason(folder: pathlib.Path) -> None:
    async def scenario(learner: Learner) -> None:
        with pytest.raises(DeadlineExceededError, match=r"run.stall_limit_s.*buffer for 5 groups for step 1"):
            await learner.run()

    with_learner(folder, scenario, lambda v: [], run={"stall_limit_s": 0.3})


def test_the_same_seed_gives_the_same_losses(folder: pathlib.Path) -> None:
    losses: list[list[float]] = []

    async def scenario(learner: Learner) -> None:
        _, records = await asyncio.gather(learner.run(), all_records(learner))
        losses.append([r["learner/loss"] for r in records])

    for _ in range(2):
        with_learner(folder, scenario, batch_of, run={"max_steps": 3})
    assert losses[0] == losses[1] and np.isfinite(losses[0]).all()


def test_data_far_from_the_policy_is_warned_of_once(folder: pathlib.Path, caplog: pytest.LogCaptureFixture) -> None:
    def batches(version: int) -> list[RolloutGroup]:
        groups = batch_of(version)
        for group in groups:
            for r in group.rollouts:
                r.old_log_probs[:] = -9.0  # the policy's own are about -3: ratios of 400
        return groups

    async def scenario(learner: Learner) -> None:
        await learner.run()

    with_learner(folder, scenario, batches, run={"max_steps": 3})
    assert sum("offpolicy/weight_mean" in message for message in caplog.messages) == 1


def streamed(version: int, chunk: int) -> Shard:
    """Chunks of 2, 2 and 1 of the five groups."""
    cut = StepCut(size=5, chunk_size=2, world_size=1)
    cut.extend(batch_of(version))
    return cut.shard(chunk, 0)


def test_a_streamed_batch_trains_as_the_whole_one_and_waiting_is_not_work(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded: list[list[dict[str, float]]] = []

    def slow(version: int, chunk: int) -> Shard:
        time.sleep(0.1)
        return streamed(version, chunk)

    async def scenario(learner: Learner) -> None:
        version, records = await asyncio.gather(learner.run(), all_records(learner))
        assert version == 3
        recorded.append(records)
        status = await learner.status()
        assert status.trained_tokens == sum(g.num_tokens for step in range(3) for g in batch_of(step))
        waited = sum(r["time/wait_for_batch"] for r in records)
        worked = sum(r["time/train"] + r["time/publish"] for r in records)
        assert status.busy_s == pytest.approx(worked, abs=1e-6)
        assert status.busy_s + waited <= status.uptime_s

    with_learner(folder, scenario, batch_of, run={"max_steps": 3})
    monkeypatch.setattr(FakeBufferClient, "chunks", staticmethod(slow))
    with_learner(folder, scenario, batch_of, run={"max_steps": 3}, learner={"groups_per_step": 5, "stream_groups": 2})
    whole, in_chunks = recorded
    for one, other in zip(in_chunks, whole, strict=True):
        timeless = [name for name in one if not name.startswith("time/") and not name.endswith(("_s", "mismatch"))]
        assert [one[name] for name in timeless] == pytest.approx([other[name] for name in timeless], rel=1e-4, abs=1e-5)
        assert one["time/wait_for_batch"] >= 0.3  # three chunks that came after 0.1 s each
        assert one["learner/step_time_s"] >= one["time/wait_for_batch"] + one["time/train"]


@pytest.mark.parametrize("ending", ["end of data", "stop"])
def test_a_step_that_ends_between_two_chunks_leaves_the_weights_as_they_were(
    ending: str, folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = threading.Event()

    def chunks(version: int, chunk: int) -> Shard | None:
        if (version, chunk) < (1, 2):
            return streamed(version, chunk)
        if ending == "end of data":
            return None
        asked.set()
        time.sleep(0.02)
        raise DeadlineExceededError("no chunk yet")

    async def scenario(learner: Learner) -> None:
        running = asyncio.create_task(learner.run())
        if ending == "stop":
            await asyncio.to_thread(asked.wait, 10)
            wait = (await learner.status()).wait
            assert wait is not None and wait.waiting_for == "1 groups for step 2"
            await learner.stop()
        assert await running == 1
        assert FakeBufferClient.last.advanced == [(1, True)]
        published = FakePublisher.last.published
        assert [v for v, _ in published] == [0, 1]
        assert learner._policy.probe_log_probs(FakePublisher.last.probe.sequences) == published[1][1]

    monkeypatch.setattr(FakeBufferClient, "chunks", staticmethod(chunks))
    with_learner(folder, scenario, batch_of, learner={"groups_per_step": 5, "stream_groups": 2})


def test_a_stale_group_in_a_later_chunk_is_refused_before_the_step(
    folder: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(learner: Learner) -> None:
        with pytest.raises(StaleRolloutError, match="max_staleness is 1"):
            await learner.run()
        assert FakeBufferClient.last.advanced == [(v, True) for v in range(1, 3)]

    monkeypatch.setattr(
        FakeBufferClient,
        "chunks",
        staticmethod(lambda version, chunk: streamed(version if version < 2 or chunk < 2 else 0, chunk)),
    )
    with_learner(
        folder,
        scenario,
        batch_of,
        buffer={"max_staleness": 1},
        learner={"groups_per_step": 5, "stream_groups": 2},
    )
