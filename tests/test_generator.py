"""The generator around a real engine; only the buffer's client and the rewards are stand-ins."""

from __future__ import annotations

import asyncio
import copy
import pathlib
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch.distributed as dist
from tiny_llama import EOS, Reference, make_tiny_llama
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import actors.generator
from actors.engine import Completion, Engine, engine_arguments, engine_environment
from actors.generator import Generator
from actors.plan import gpus_wanted
from actors.version_gate import VersionGate
from streamrl.config import Config, check_config, config_from_tree
from streamrl.errors import ClosedError, ConfigError, ProcessDiedError, RewardError, WeightSyncError
from streamrl.packing import pack_rollouts
from streamrl.policy import Policy
from streamrl.records import Failure, IntArray, Lease, Rollout, WeightAck
from streamrl.weight_sync.channel import ProbeSet, WeightPublisher

EXACT = 1e-4
GROUP_SIZE = 4
CONCURRENCY = 16
PROBE = ProbeSet([[1, 40, 41, 42, 43], [1, *range(10, 40)]])


# -- stand-ins -------------------------------------------------------------------------------------------------------


class FakeBufferClient:
    """Leases whole groups as soon as there is credit for one; remembers everything in order."""

    def __init__(self, address: str, *, name: str, curve: Any = None) -> None:
        self.credit = 0
        self.most_credit = 0
        self.log: list[tuple[str, Any]] = []
        self.unacknowledged = 0
        self.leasing = True
        self.num_leased = 0
        self.changed = asyncio.Event()
        self._leases: asyncio.Queue[tuple[Lease, IntArray]] = asyncio.Queue()
        self._cancels: asyncio.Queue[str] = asyncio.Queue()

    async def connect(self, *, timeout_s: float) -> None:
        pass

    async def report_version(self, *, incarnation: int, policy_version: int) -> None:
        self._note("version", (incarnation, policy_version))

    async def request(self, num_members: int) -> None:
        self.credit += num_members
        self.most_credit = max(self.most_credit, self.credit)
        while self.leasing and self.credit >= GROUP_SIZE:
            self.lease()
        self.changed.set()

    def lease(self, *, task: dict[str, Any] | None = None, attempt: int = 0) -> str:
        index = self.num_leased
        self.num_leased += 1
        self.credit -= GROUP_SIZE
        uid = f"0-{index:06d}"
        members = tuple(range(GROUP_SIZE))
        lease = Lease(uid=uid, members=members, attempts=(attempt,) * GROUP_SIZE, task=task or {"answer": "x"})
        self._leases.put_nowait((lease, prompt_of(index)))
        return uid

    def cancel(self, uid: str) -> None:
        self._cancels.put_nowait(uid)

    async def next_lease(self) -> tuple[Lease, IntArray]:
        return await self._leases.get()

    async def next_cancel(self) -> str:
        return await self._cancels.get()

    async def send(self, rollout: Rollout) -> None:
        self._note("rollout", rollout)

    async def fail(self, failure: Failure) -> None:
        self._note("failure", failure)

    async def close(self, *, timeout_s: float) -> None:
        self._note("closed", None)

    def all(self, kind: str) -> list[Any]:
        return [item for what, item in self.log if what == kind]

    async def until(self, condition: Callable[[], bool]) -> None:
        """Waits for something to be noted that makes `condition` true, half a minute at most."""
        async with asyncio.timeout(30):
            while not condition():
                self.changed.clear()
                await self.changed.wait()

    def _note(self, kind: str, item: Any) -> None:
        self.log.append((kind, item))
        self.changed.set()


class FakeRewards:
    """1.0 for everything, unless the task says how to fail."""

    def __init__(self, config: Config) -> None:
        pass

    async def start(self) -> None:
        pass

    async def score(self, task: dict[str, Any], text: str) -> tuple[float, dict[str, float]]:
        if "fail" in task:
            raise RewardError("planted", reason=task["fail"])
        await asyncio.sleep(task.get("seconds", 0))
        return 1.0, {"length": float(len(text))}

    async def close(self) -> None:
        pass


class SharedEngine:
    """A real engine that outlives the generator it is lent to."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        await self.engine.abort_all()


class FirstLoadWrong(SharedEngine):
    """The first load after `plant` says that it was done, and leaves the engine's weights as they were."""

    planted = False

    def plant(self) -> None:
        self.planted = True

    async def load(self, payload: dict[str, Any], *, label: str) -> None:
        if not self.planted:
            await self.engine.load(payload, label=label)
            return
        self.planted = False
        await self.engine._llm.update_weight_version(label)


class WatchedLoads(SharedEngine):
    """Remembers which requests had tokens when weights were loaded, and how every request ended."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.had_tokens: set[str] = set()
        self.ended: dict[str, str] = {}

    async def generate(self, prompt_ids: Any, *, request_id: str, **settings: Any) -> Any:
        completion = await self.engine.generate(prompt_ids, request_id=request_id, **settings)
        self.ended[request_id] = completion.finish_reason
        return completion

    async def load(self, payload: dict[str, Any], *, label: str) -> None:
        self.had_tokens |= {name for name, started in self.engine._requests.items() if started}
        await self.engine.load(payload, label=label)


def prompt_of(index: int) -> IntArray:
    return np.array([1, *(10 + (7 * index + i) % 80 for i in range(12))], dtype=np.int32)


# -- the setting -----------------------------------------------------------------------------------------------------


class Setting:
    """The event loop, the model and the engine that the tests share."""

    def __init__(self, folder: pathlib.Path) -> None:
        self.loop = asyncio.new_event_loop()
        self.folder = folder
        self.config = self.config_with()
        self._engine: Engine | None = None

    @staticmethod
    def config_with(**sections: dict[str, Any]) -> Config:
        tree: dict[str, dict[str, Any]] = {
            "model": {"max_length": 96},
            "generator": {"concurrency": CONCURRENCY, "max_new_tokens": 24, "kv_cache_bytes": 64 << 20},
            "algorithm": {"group_size": GROUP_SIZE},
            "weight_sync": {"backend": "shm"},
        }
        return config_from_tree({name: section | sections.get(name, {}) for name, section in tree.items()})

    def run(self, work: Coroutine[Any, Any, Any], *, limit_s: float = 60) -> Any:
        return self.loop.run_until_complete(asyncio.wait_for(work, limit_s))

    def engine(self) -> Engine:
        """The shared one; a new one if a test has killed it."""
        if self._engine is None or not all(psutil.pid_exists(pid) for pid in self._engine.pids):
            self.close_engine()
            self._engine = Engine(self.config, model_path=str(self.folder))
            self.run(self._engine.start(), limit_s=200)  # much of it is imports, beside whatever else runs
        return self._engine

    def close_engine(self) -> None:
        if self._engine is not None:
            self.run(self._engine.stop())


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    setting = Setting(make_tiny_llama(tmp_path_factory.mktemp("untied"), tied=False))
    yield setting
    setting.close_engine()
    setting.loop.run_until_complete(setting.loop.shutdown_default_executor())
    setting.loop.close()


class Scene:
    """One generator with its learner, connected and at version 0."""

    def __init__(self, setting: Setting, engine: SharedEngine, config: Config) -> None:
        self.engine = engine
        self.reference = Reference(setting.folder)
        self.publisher = WeightPublisher(
            config.weight_sync,
            run_name=f"test_generator {uuid.uuid4()}",
            rank=0,
            world_size=1,
            incarnation=2,
            named_parameters=self.reference.parameters,
            probe=PROBE,
        )
        self.version = 0
        self.generator = Generator(config, index=5, model_path=str(setting.folder))
        self.acks: list[WeightAck] = []

    @property
    def client(self) -> FakeBufferClient:
        assert isinstance(self.generator._client, FakeBufferClient)
        return self.generator._client

    @property
    def rollouts(self) -> list[Rollout]:
        return self.client.all("rollout")

    @property
    def failures(self) -> list[Failure]:
        return self.client.all("failure")

    def publish(self, *, lie: float = 0.0) -> int:
        """The learner takes a step and publishes; with a lie, its weights are not the ones its numbers are of."""
        if self.version:
            self.reference.step(seed=self.version)
        numbers = [value + lie for value in self.reference.probe(PROBE.sequences)]
        self.publisher.publish(self.version, numbers)
        self.version += 1
        return self.version - 1

    async def until_reported(self, version: int) -> None:
        await self.client.until(lambda: (2, version) in self.client.all("version"))

    async def until_rollouts(self, more: int) -> None:
        wanted = len(self.rollouts) + more
        await self.client.until(lambda: len(self.rollouts) >= wanted)

    async def ack(self, version: int) -> WeightAck:
        async with asyncio.timeout(10):
            while not any(ack.policy_version == version for ack in self.acks):
                self.acks += self.publisher.acks()
                await asyncio.sleep(0.01)
        return next(ack for ack in self.acks if ack.policy_version == version)


SceneMaker = Callable[..., Any]


@pytest.fixture
def scene(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> SceneMaker:
    """`async with scene() as s`: a generator that serves; `scene(serve=False)`: one that is only connected. Further
    arguments are sections of its config."""
    engine = setting.engine()

    @asynccontextmanager
    async def make(
        *, serve: bool = True, kind: type[SharedEngine] = SharedEngine, **sections: dict[str, Any]
    ) -> AsyncIterator[Scene]:
        shared = kind(engine)
        monkeypatch.setattr(actors.generator, "Engine", lambda config, model_path: shared)
        monkeypatch.setattr(actors.generator, "RewardWorker", FakeRewards)
        monkeypatch.setattr(actors.generator, "GeneratorClient", FakeBufferClient)
        made = Scene(setting, shared, setting.config_with(**sections))
        address = made.publisher.start()
        made.publish()
        await made.generator.start()
        await made.generator.connect(buffer_address="", weight_address=address, incarnation=2)
        serving = asyncio.create_task(made.generator.run()) if serve else None
        try:
            yield made
        finally:
            await made.generator.stop()
            await asyncio.to_thread(made.publisher.close)
        if serving is not None:
            await serving

    return make


pytestmark = [pytest.mark.engine]


# -- rollouts --------------------------------------------------------------------------------------------------------


def test_a_rollout_says_what_was_sampled_and_by_what(setting: Setting, scene: SceneMaker) -> None:
    async def scenario() -> None:
        async with scene() as s:
            await s.until_rollouts(40)
            for rollout in s.rollouts:
                index = int(rollout.uid.split("-")[1])
                assert rollout.prompt_ids.tolist() == prompt_of(index).tolist()
                assert rollout.generator == "generator-5" and rollout.incarnation == 2
                assert rollout.versions.tolist() == [0] * len(rollout.response_ids)
                assert rollout.reward == 1.0 and set(rollout.reward_parts) == {"length"}
                stopped = rollout.response_ids[-1] == EOS
                assert rollout.finish_reason == ("stop" if stopped else "length")
                assert stopped or len(rollout.response_ids) == 24
                assert rollout.timings.queue_s > 0 and rollout.timings.generate_s >= 0
                truth = s.reference.log_probs([*rollout.prompt_ids, *rollout.response_ids])
                difference = np.abs(truth[len(rollout.prompt_ids) - 1 :].numpy() - rollout.old_log_probs).max()
                assert difference < EXACT
            assert len({r.key for r in s.rollouts}) == len(s.rollouts)

    setting.run(scenario())


@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_old_log_probs_are_the_learners_log_probs_at_any_temperature(
    temperature: float, setting: Setting, scene: SceneMaker, mesh: DeviceMesh
) -> None:
    """Those of the learner's own policy, for packed rollouts that weights of a second version sampled."""

    async def rollouts() -> list[Rollout]:
        async with scene(generator={"temperature": temperature}) as s:
            await s.until_reported(s.publish())
            s.reference.model.save_pretrained(setting.folder / "published")
            await s.client.until(lambda: sum(r.min_version == 1 for r in s.rollouts) >= 30)
            return [r for r in s.rollouts if r.min_version == 1]

    sampled = setting.run(rollouts())
    policy = Policy(setting.folder / "published", mesh=mesh, temperature=temperature)
    (batch,) = pack_rollouts(sampled, torch.zeros(len(sampled)), max_tokens=100_000)
    with torch.no_grad():
        log_probs, _ = policy.token_log_probs(batch)
    response = batch.tokens["response_mask"].bool()
    difference = float((log_probs - batch.tokens["old_log_probs"])[response].abs().max())
    print(f"temperature {temperature}: {int(response.sum())} tokens, largest difference {difference:.1e}")
    assert difference < EXACT
    if temperature != 1.0:
        other = Policy(setting.folder / "published", mesh=mesh, temperature=1.0)
        with torch.no_grad():
            log_probs, _ = other.token_log_probs(batch)
        assert float((log_probs - batch.tokens["old_log_probs"])[response].abs().max()) > 0.1, "it makes a difference"


def test_the_baseline_member_of_remax_is_the_greedy_response(setting: Setting, scene: SceneMaker) -> None:
    """Member number group_size, of the version that its tokens say; the others are sampled."""

    async def scenario() -> None:
        async with scene(algorithm={"advantage": "remax", "group_size": GROUP_SIZE - 1}) as s:
            version = s.publish()
            await s.until_reported(version)
            newest: list[Rollout] = []
            while sum(r.member == GROUP_SIZE - 1 for r in newest) < 8:
                await s.until_rollouts(8)
                newest = [r for r in s.rollouts if r.min_version == version]
            sampled_greedily = 0
            for rollout in newest:
                truth = s.reference.greedy(rollout.prompt_ids.tolist(), 24)
                if rollout.member == GROUP_SIZE - 1:
                    assert rollout.response_ids.tolist() == truth
                    assert rollout.reward == 1.0 and np.isfinite(rollout.old_log_probs).all()
                else:
                    sampled_greedily += rollout.response_ids.tolist() == truth
            assert sampled_greedily == 0

    setting.run(scenario())


def test_the_engine_is_kept_full_and_never_fuller(setting: Setting, scene: SceneMaker) -> None:
    async def scenario() -> None:
        async with scene() as s:
            fullest = 0
            for _ in range(20):
                await s.until_rollouts(8)
                status = await s.generator.status()
                fullest = max(fullest, status.running)
                assert status.running + s.client.credit <= CONCURRENCY
            assert fullest > CONCURRENCY - GROUP_SIZE
            status = await s.generator.status()
            assert status.finished_rollouts == len(s.rollouts) and status.policy_version == 0
            assert status.generated_tokens == sum(len(r.response_ids) for r in s.rollouts)
            assert 0.5 < status.busy_s / status.uptime_s <= 1
            assert 0 < status.kv_usage < 1

    setting.run(scenario())


def test_the_same_lease_gives_the_same_rollout_on_any_generator(setting: Setting, scene: SceneMaker) -> None:
    async def responses() -> dict[tuple[str, int, int], list[int]]:
        async with scene() as s:
            await s.until_rollouts(60)
            return {r.key: r.response_ids.tolist() for r in s.rollouts}

    first, second = setting.run(responses()), setting.run(responses())
    common = set(first) & set(second)
    assert len(common) > 30
    assert all(first[key] == second[key] for key in common)
    assert len({tuple(first[key]) for key in first}) > len(first) * 0.9, "members of a group must differ"


def test_another_attempt_is_another_sample(setting: Setting, scene: SceneMaker) -> None:
    async def scenario() -> None:
        async with scene(serve=False) as s:
            completions = [
                await s.generator._complete([1, 20, 30], key=f"k{a}", temperature=1.0, seed=seed_of(attempt=a))
                for a in (0, 0, 1)
            ]
            assert completions[0].token_ids == completions[1].token_ids != completions[2].token_ids

    setting.run(scenario())


def seed_of(*, attempt: int) -> int:
    return actors.generator._seed(0, "0-000000", 0, attempt)


def test_a_failed_reward_is_a_failed_member_with_its_reason(setting: Setting, scene: SceneMaker) -> None:
    async def scenario() -> None:
        async with scene() as s:
            s.client.leasing = False
            await asyncio.sleep(0.5)
            uid = s.client.lease(task={"fail": "reward_timeout"}, attempt=1)
            await s.client.until(lambda: len(s.failures) == GROUP_SIZE)
            assert {(f.uid, f.member, f.attempt, f.reason) for f in s.failures} == {
                (uid, member, 1, "reward_timeout") for member in range(GROUP_SIZE)
            }
            assert not any(r.uid == uid for r in s.rollouts)
            assert (await s.generator.status()).failed_members == GROUP_SIZE

    setting.run(scenario())


def test_a_cancelled_uid_leaves_no_trace_and_its_room_is_used(setting: Setting, scene: SceneMaker) -> None:
    async def scenario() -> None:
        async with scene() as s:
            s.client.leasing = False
            await s.client.until(lambda: s.client.credit == CONCURRENCY)
            uid = s.client.lease(task={"seconds": 30})
            await asyncio.sleep(0.3)
            s.client.cancel(uid)
            early = s.client.lease()
            await asyncio.sleep(0.01)
            s.client.cancel(early)
            await s.client.until(lambda: s.client.credit == CONCURRENCY)
            status = await s.generator.status()
            assert (status.running, status.scoring) == (0, 0)
            assert status.wait is not None and status.wait.owner == "buffer"
            assert not any(r.uid in (uid, early) for r in s.rollouts) and not s.failures

    setting.run(scenario())


def test_slow_rewards_hold_new_members_back(setting: Setting, scene: SceneMaker) -> None:
    async def scenario() -> None:
        async with scene() as s:
            s.client.leasing = False
            await s.client.until(lambda: s.client.credit == CONCURRENCY)
            granted = 0
            for _ in range(12):
                while s.client.credit >= GROUP_SIZE:
                    s.client.lease(task={"seconds": 30})
                    granted += GROUP_SIZE
                await asyncio.sleep(0.25)
            assert granted <= 2 * CONCURRENCY + GROUP_SIZE

    setting.run(scenario())


# -- versions --------------------------------------------------------------------------------------------------------


def test_T30_a_version_that_moves_under_requests_counts_only_when_proven(setting: Setting, scene: SceneMaker) -> None:
    async def scenario() -> None:
        async with scene() as s:
            for _ in range(5):
                await s.until_rollouts(10)
                version = s.publish()
                await s.until_reported(version)
                ack = await s.ack(version)
                assert ack.ok and ack.generator == "generator-5" and ack.incarnation == 2
                assert ack.probe_difference < EXACT and ack.num_bytes > 500_000
                assert 0 < ack.load_s < ack.pause_s and ack.transfer_s > 0 and ack.probe_s > 0 and ack.drain_s < 0.01
                assert ack.transfer_s + ack.pause_s + ack.probe_s < ack.total_s
                assert (await s.generator.status()).policy_version == version
            await s.until_rollouts(40)
            known = -1
            for kind, item in s.client.log:
                if kind == "version":
                    known = item[1]
                elif kind == "rollout":
                    assert item.versions.max() <= known, "a rollout left before its version was proven"
                    assert (np.diff(item.versions) >= 0).all()
            mixed = [r for r in s.rollouts if r.versions.min() < r.versions.max()]
            assert len(mixed) >= 5, "no rollout was in flight during an update"
            newest = [r for r in s.rollouts if r.min_version == 5]
            assert len(newest) >= 10
            for rollout in newest:
                truth = s.reference.log_probs([*rollout.prompt_ids, *rollout.response_ids])
                difference = np.abs(truth[len(rollout.prompt_ids) - 1 :].numpy() - rollout.old_log_probs).max()
                assert difference < EXACT, "a prompt was read by old weights"
            assert not s.failures

    setting.run(scenario())


def test_T36_a_new_version_ends_no_request_that_has_tokens(setting: Setting, scene: SceneMaker) -> None:
    """Not while it is loaded, and not when its label is published either."""

    async def scenario() -> None:
        async with scene(kind=WatchedLoads) as s:
            for _ in range(5):
                await s.until_rollouts(8)
                await s.until_reported(s.publish())
            s.client.leasing = False
            await s.client.until(lambda: s.client.credit == CONCURRENCY)
            assert len(s.engine.had_tokens) >= 20
            assert {s.engine.ended[name] for name in s.engine.had_tokens} <= {"stop", "length"}
            assert not s.failures

    setting.run(scenario())


def test_a_request_that_waited_through_an_update_reads_its_prompt_anew(setting: Setting, scene: SceneMaker) -> None:
    async def scenario() -> None:
        async with scene() as s:
            s.client.leasing = False
            await s.client.until(lambda: s.client.credit == CONCURRENCY)
            prompt = prompt_of(7).tolist() * 4  # more than one block, cached for version 0 from here on
            await s.generator._complete(prompt, key="first", temperature=1.0, seed=1)
            await s.engine.pause()
            waiting = asyncio.create_task(s.generator._complete(prompt, key="second", temperature=1.0, seed=1))
            await asyncio.sleep(0.1)
            version = s.publish()
            await s.until_reported(version)
            answer = await waiting
            assert [s.generator._gate.version_of(label).policy_version for label in answer.labels] == [version]
            truth = s.reference.log_probs([*prompt, *answer.token_ids])[len(prompt) - 1 :].numpy()
            assert np.abs(truth - answer.log_probs).max() < EXACT

    setting.run(scenario())


def test_T21_wrong_weights_are_never_served(setting: Setting, scene: SceneMaker) -> None:
    async def scenario() -> None:
        async with scene(serve=False) as s:
            serving = asyncio.create_task(s.generator.run())
            await s.until_rollouts(20)
            version = s.publish(lie=0.01)
            with pytest.raises(WeightSyncError, match=rf"version {version} was loaded 2 times, .* off by 0\.01"):
                await asyncio.wait_for(serving, 20)
            assert all(r.versions.max() < version for r in s.rollouts)
            assert (2, version) not in s.client.all("version")
            assert s.failures and {f.reason for f in s.failures} == {"unproven_weights"}
            ended = {(r.uid, r.member) for r in s.rollouts} | {(f.uid, f.member) for f in s.failures}
            leased = {(f"0-{i:06d}", member) for i in range(s.client.num_leased) for member in range(GROUP_SIZE)}
            assert ended == leased, "every member ends, so that it can be generated again elsewhere"
            ack = await s.ack(version)
            assert not ack.ok and "off by 0.01" in ack.reason
            assert (await s.generator.status()).policy_version == version - 1

    setting.run(scenario())


def test_weights_that_are_not_numbers_are_never_served(setting: Setting, scene: SceneMaker) -> None:
    async def scenario() -> None:
        async with scene(serve=False) as s:
            serving = asyncio.create_task(s.generator.run())
            await s.until_rollouts(4)
            s.reference.model.lm_head.weight.data[:] = float("nan")
            version = s.publish()
            with pytest.raises(WeightSyncError, match="off by inf"):
                await asyncio.wait_for(serving, 20)
            assert all(r.versions.max() < version for r in s.rollouts)

    setting.run(scenario())


def test_T23_a_slow_transfer_is_not_a_pause(setting: Setting, scene: SceneMaker) -> None:
    """Half a second on the way: the engine goes on meanwhile, and the two times are told apart."""

    async def scenario() -> None:
        async with scene() as s:
            await s.until_rollouts(10)
            inlet = s.generator._weights._subscriber._inlet
            fetch, generated = inlet.fetch, []

            async def slow_fetch(update: Any) -> Any:
                before = (await s.generator.status()).generated_tokens
                await asyncio.sleep(0.5)
                generated.append((await s.generator.status()).generated_tokens - before)
                return await fetch(update)

            inlet.fetch = slow_fetch
            version = s.publish()
            await s.until_reported(version)
            ack = await s.ack(version)
            assert generated[0] > 0, "generation stood still during the transfer"
            assert ack.transfer_s >= 0.5 and ack.total_s > ack.transfer_s and ack.pause_s < ack.transfer_s

    setting.run(scenario())


def test_a_drained_generator_samples_no_response_from_two_versions(setting: Setting, scene: SceneMaker) -> None:
    async def scenario() -> None:
        async with scene(weight_sync={"in_flight": "drain"}) as s:
            for _ in range(4):
                await s.until_rollouts(8)
                version = s.publish()
                await s.until_reported(version)
                assert (await s.ack(version)).drain_s > 0
            await s.until_rollouts(40)
            assert len({r.min_version for r in s.rollouts}) == 5
            assert all(r.versions.min() == r.versions.max() for r in s.rollouts)
            assert not s.failures

    setting.run(scenario())


def test_a_drain_ends_at_its_deadline_and_what_runs_on_is_kept(setting: Setting, scene: SceneMaker) -> None:
    async def scenario() -> None:
        async with scene(weight_sync={"in_flight": "drain", "drain_s": 0.001}) as s:
            for _ in range(5):
                await s.until_rollouts(8)
                await s.until_reported(s.publish())
            await s.until_rollouts(40)
            assert [r for r in s.rollouts if r.versions.min() < r.versions.max()]
            assert not s.failures

    setting.run(scenario())


def test_recompute_reads_every_running_response_again(setting: Setting, scene: SceneMaker) -> None:
    """A response that spans an update has the log-probs of the new weights alone after it, not of an old cache."""

    async def scenario() -> None:
        async with scene(weight_sync={"in_flight": "recompute"}) as s:
            learners = [copy.deepcopy(s.reference)]
            for _ in range(8):
                await s.until_rollouts(8)
                version = s.publish()
                learners.append(copy.deepcopy(s.reference))
                await s.until_reported(version)
            await s.until_rollouts(40)
            mixed = [r for r in s.rollouts if r.versions.min() < r.versions.max()]
            assert len(mixed) >= 3, "no rollout was in flight during an update"
            for rollout in mixed:
                newest = rollout.versions.max()
                truth = learners[newest].log_probs([*rollout.prompt_ids, *rollout.response_ids])
                after = rollout.versions == newest
                difference = np.abs(truth[len(rollout.prompt_ids) - 1 :].numpy() - rollout.old_log_probs)
                assert difference[after].max() < EXACT
                assert difference[~after].max() > EXACT, "the two versions are too near to tell apart"
            assert not s.failures

    setting.run(scenario())


def test_a_load_that_went_wrong_once_is_repeated_in_full(setting: Setting, scene: SceneMaker) -> None:
    async def scenario() -> None:
        async with scene(kind=FirstLoadWrong) as s:
            await s.until_rollouts(10)
            s.engine.plant()
            version = s.publish()
            await s.until_reported(version)
            assert (await s.ack(version)).ok
            await s.until_rollouts(20)
            touched = [f for f in s.failures if f.reason == "unproven_weights"]
            assert touched, "members sampled by the wrong weights must fail, although the version was proven later"
            for rollout in (r for r in s.rollouts if r.min_version == version):
                truth = s.reference.log_probs([*rollout.prompt_ids, *rollout.response_ids])
                difference = np.abs(truth[len(rollout.prompt_ids) - 1 :].numpy() - rollout.old_log_probs).max()
                assert difference < EXACT

    setting.run(scenario())


def test_a_generator_that_is_behind_jumps_to_the_newest_version(setting: Setting, scene: SceneMaker) -> None:
    async def scenario() -> None:
        async with scene() as s:
            for _ in range(6):
                newest = s.publish()  # the generator's loop does not run in between
            await s.until_reported(newest)
            reported = [version for _, version in s.client.all("version")]
            assert reported == sorted(reported) and len(reported) <= 4, reported

    setting.run(scenario())


def test_weights_of_an_earlier_life_of_the_learner_are_not_taken(setting: Setting, scene: SceneMaker) -> None:
    async def scenario() -> None:
        async with scene(serve=False) as s:
            stale = Generator(setting.config, index=6, model_path=str(setting.folder))
            await stale.start()
            connecting = asyncio.create_task(
                stale.connect(buffer_address="", weight_address=s.publisher._announcer.address, incarnation=3)
            )
            await asyncio.sleep(0.5)
            assert not connecting.done() and (await stale.status()).policy_version == -1
            connecting.cancel()
            await asyncio.gather(connecting, return_exceptions=True)
            await stale.stop()

    setting.run(scenario())


# -- evaluation ------------------------------------------------------------------------------------------------------


def test_evaluation_is_greedy_decoding_beside_generation(setting: Setting, scene: SceneMaker) -> None:
    async def scenario() -> None:
        async with scene() as s:
            version = s.publish()
            await s.until_reported(version)
            prompts = [prompt_of(1000 + i).tolist() for i in range(20)]
            results = await s.generator.evaluate([(p, {}) for p in prompts], temperature=0.0, seed=1)
            for prompt, result in zip(prompts, results, strict=True):
                truth = s.reference.greedy(prompt, 24)
                text = s.generator._tokenizer.decode(truth, skip_special_tokens=True)
                assert (result["text"], result["length"]) == (text, len(truth))
                assert (result["min_version"], result["max_version"], result["reward"]) == (version, version, 1.0)
            assert (await s.generator.status()).running > 0

    setting.run(scenario())


def test_evaluation_works_before_the_run_and_reports_rewards_that_failed(setting: Setting, scene: SceneMaker) -> None:
    async def scenario() -> None:
        async with scene(serve=False) as s:
            tasks = [{}, {"fail": "reward_error"}]
            prompts = [(prompt_of(i).tolist(), task) for i, task in enumerate(tasks)]
            good, bad = await s.generator.evaluate(prompts, temperature=1.0, seed=1)
            assert good["reward"] == 1.0 and "error" not in good
            assert bad["reward"] == 0.0 and bad["error"].startswith("reward_error")

    setting.run(scenario())


# -- the end ---------------------------------------------------------------------------------------------------------


def test_stop_drops_what_is_unfinished_and_can_be_called_twice(setting: Setting, scene: SceneMaker) -> None:
    async def scenario() -> None:
        async with scene(serve=False) as s:
            serving = asyncio.create_task(s.generator.run())
            await s.until_rollouts(10)
            begun = time.perf_counter()
            await s.generator.stop()
            await asyncio.wait_for(serving, 5)
            await s.generator.stop()
            assert time.perf_counter() - begun < 3
            assert s.client.all("closed") and not s.failures
            assert (await s.generator.status()).running == 0

    setting.run(scenario())


def test_the_death_of_the_engine_ends_the_run_with_its_name(setting: Setting, scene: SceneMaker) -> None:
    async def scenario() -> None:
        async with scene(serve=False, kind=SharedEngine) as s:
            serving = asyncio.create_task(s.generator.run())
            await s.until_rollouts(10)
            psutil.Process(s.engine.pids[0]).kill()
            with pytest.raises(ProcessDiedError, match=r"generator-5: the engine core \(pid \d+\) died"):
                await asyncio.wait_for(serving, 10)
            s.engine.stop = lambda: asyncio.sleep(0)  # nothing is left to abort

    setting.run(scenario())


def test_a_killed_generator_takes_its_engine_with_it(setting: Setting) -> None:
    script = textwrap.dedent(f"""
        import asyncio
        from actors.engine import Engine
        from streamrl.config import load_config

        async def main():
            config = load_config(None, ["generator.kv_cache_bytes=67108864", "weight_sync.backend=shm"])
            engine = Engine(config, model_path={str(setting.folder)!r})
            await engine.start()
            print("up", flush=True)
            await asyncio.sleep(600)

        if __name__ == "__main__":
            asyncio.run(main())
        """)
    path = setting.folder / "lonely_generator.py"
    path.write_text(script)
    process = subprocess.Popen([sys.executable, str(path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline().strip() == "up"
    family = psutil.Process(process.pid).children(recursive=True)
    (core,) = [p for p in family if p.name().startswith("VLLM::EngineCore")]
    semaphores = [m.path for m in core.memory_maps() if "/dev/shm/sem." in m.path]
    process.kill()
    process.wait(10)
    _, alive = psutil.wait_procs(family, timeout=10)
    assert not alive
    assert not semaphores, "they stay when their process is killed"


# -- without an engine -----------------------------------------------------------------------------------------------


def test_the_gate_holds_pending_labels_and_never_forgets_a_refuted_one() -> None:
    async def scenario() -> None:
        gate = VersionGate()
        wrong, right = gate.begin(0, 7), gate.begin(0, 7)
        waiting = asyncio.create_task(gate.proven([wrong, right]))
        await asyncio.sleep(0)
        assert not waiting.done() and gate.proven_version is None
        gate.refute(wrong)
        gate.prove(right)
        assert not await waiting
        assert await gate.proven([right]) and not await gate.proven([right, wrong])
        assert gate.version_of(right).policy_version == 7 and gate.proven_version == gate.version_of(right)

    asyncio.run(scenario())


def test_closing_the_gate_ends_every_wait() -> None:
    async def scenario() -> None:
        gate = VersionGate()
        waiting = asyncio.create_task(gate.proven([gate.begin(0, 0)]))
        await asyncio.sleep(0)
        gate.close()
        with pytest.raises(ClosedError):
            await waiting

    asyncio.run(scenario())


def test_a_variable_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "DEBUG")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    environment = engine_environment(config_from_tree({"generator": {"threads": 3}}))
    assert environment["VLLM_LOGGING_LEVEL"] == "DEBUG" and environment["OMP_NUM_THREADS"] == "3"


@pytest.mark.parametrize("generator", [{"gpus": 2}, {"gpus": 0.25}, {"gpus": 0.25, "gpu_memory_utilization": 0.3}])
def test_gpu_shares_that_cannot_work_are_refused(generator: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"generator\.gpu.* Set generator\.gpu"):
        check_config(config_from_tree({"generator": generator}))
    share = {"gpus": 0.25, "gpu_memory_utilization": 0.2}
    with pytest.raises(ConfigError, match=r"generator\.kv_cache_bytes \(0\).* Set generator\.kv_cache_bytes="):
        check_config(config_from_tree({"generator": share}))
    check_config(config_from_tree({"generator": {**share, "kv_cache_bytes": 1 << 30}}))


def test_shares_of_a_gpu_are_added_without_rounding_errors() -> None:
    assert gpus_wanted(config_from_tree({"generator": {"count": 7, "gpus": 0.1}, "learner": {"gpus": 0.3}})) == 1.0


def test_an_engine_that_shares_a_gpu_does_not_measure_its_memory() -> None:
    generator = {"gpus": 0.25, "gpu_memory_utilization": 0.2, "kv_cache_bytes": 1 << 30}
    channel = {"backend": "shm"}
    arguments = engine_arguments(config_from_tree({"generator": generator, "weight_sync": channel}), "m")
    assert arguments["kv_cache_memory_bytes"] == 1 << 30 and arguments["gpu_memory_utilization"] == 0.2
    alone = config_from_tree({"generator": {"gpus": 1}, "weight_sync": channel})
    assert engine_arguments(alone, "m")["kv_cache_memory_bytes"] is None


def test_a_completion_lists_its_labels_in_order() -> None:
    spans = [("0.1.1", 0, 2), ("0.2.2", 2, 3)]
    completion = Completion(
        token_ids=[5, 6, 7], log_probs=[-1.0, -2.0, -3.0], spans=spans, finish_reason="stop", first_token_at=1.0
    )
    assert completion.labels == ["0.1.1", "0.2.2"]
