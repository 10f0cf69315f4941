"""The weight channel, and what a real engine computes after a version came through it."""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import pathlib
import threading
import time
import uuid
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, TypeVar

import numpy as np
import psutil
import pytest
import torch
from tiny_llama import EOS, Reference, make_tiny_model

from actors.engine import Completion, Engine
from streamrl.config import Config, WeightSyncConfig, config_from_tree
from streamrl.errors import ClosedError, WeightSyncError
from streamrl.records import WeightAck, WeightUpdate
from streamrl.transport import Message
from streamrl.weight_sync.backend import InletSettings, OutletSettings, make_inlet, make_outlet
from streamrl.weight_sync.channel import ProbeSet, WeightPublisher, WeightSubscriber
from streamrl.weight_sync.layout import Layout
from streamrl.weight_sync.segment import SegmentReader, Shadow, segment_path

T = TypeVar("T")

PROBE = ProbeSet([[1, 40, 41, 42, 43], [1, *range(10, 60)]])
EXACT = 1e-4
RUN_NAME = f"test_weight_sync {uuid.uuid4()}"


@pytest.fixture(scope="module")
def run() -> Iterator[Callable[[Coroutine[Any, Any, T]], T]]:
    """Run a coroutine in the one event loop of this file, within the time that an engine may take to start."""
    loop = asyncio.new_event_loop()

    def within_limit(work: Coroutine[Any, Any, T]) -> T:
        return loop.run_until_complete(asyncio.wait_for(work, 180))

    yield within_limit
    loop.run_until_complete(loop.shutdown_default_executor())
    loop.close()


# -- the channel, without an engine ----------------------------------------------------------------------------------


@pytest.fixture(params=["shm", "tcp"])
def publisher(request: pytest.FixtureRequest) -> Iterator[WeightPublisher]:
    publisher = WeightPublisher(
        WeightSyncConfig(backend=request.param),
        run_name=RUN_NAME,
        rank=0,
        world_size=1,
        incarnation=3,
        named_parameters={"weight": torch.ones(1 << 16)},
        probe=ProbeSet([[1, 2, 3]]),
    )
    yield publisher
    publisher.close()


def publish(publisher: WeightPublisher, version: int) -> None:
    publisher.publish(version, [-0.1, -0.2])


async def subscribed(address: str, name: str = "generator-0") -> WeightSubscriber:
    subscriber = WeightSubscriber(address, name=name)
    assert await subscriber.connect(timeout_s=10) == ProbeSet([[1, 2, 3]])
    return subscriber


def test_a_generator_that_joins_late_gets_the_current_version(run: Any, publisher: WeightPublisher) -> None:
    async def scenario() -> None:
        address = publisher.start()
        publish(publisher, 0)
        publish(publisher, 1)
        subscriber = await subscribed(address)
        update = await subscriber.next()
        assert (update.incarnation, update.policy_version, update.probe_log_probs) == (3, 1, [-0.1, -0.2])
        assert await subscriber.fetch(update) is not None
        await subscriber.close()

    run(scenario())


def test_a_slow_generator_skips_to_the_newest_version(run: Any, publisher: WeightPublisher) -> None:
    async def scenario() -> None:
        subscriber = await subscribed(publisher.start())
        publish(publisher, 0)
        first = await subscriber.next()
        for version in range(1, 6):
            publish(publisher, version)
        await asyncio.sleep(0.2)
        assert await subscriber.fetch(first) is None, "two versions later its slot is used again"
        newest = await subscriber.next()
        assert newest.policy_version == 5 and await subscriber.fetch(newest) is not None
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(subscriber.next(), 0.2)
        await subscriber.close()

    run(scenario())


def test_the_learner_waits_for_no_generator(run: Any, publisher: WeightPublisher) -> None:
    async def scenario() -> None:
        subscriber = await subscribed(publisher.start())
        begun = time.perf_counter()
        for version in range(200):  # this loop does not run meanwhile, so the subscriber reads nothing
            publish(publisher, version)
        assert time.perf_counter() - begun < 2
        assert (await subscriber.next()).policy_version >= 0
        await subscriber.close()

    run(scenario())


def test_acknowledgements_reach_the_learner_once(run: Any, publisher: WeightPublisher) -> None:
    async def scenario() -> None:
        subscriber = await subscribed(publisher.start())
        ack = WeightAck(generator="generator-0", incarnation=3, policy_version=1, ok=False, reason="planted")
        await subscriber.acknowledge(ack)
        for _ in range(100):
            if acks := publisher.acks():
                break
            await asyncio.sleep(0.02)
        assert acks == [ack] and publisher.acks() == []
        await subscriber.close()

    run(scenario())


def test_the_end_of_the_learner_ends_the_wait_for_the_next_version(run: Any, publisher: WeightPublisher) -> None:
    async def scenario() -> None:
        subscriber = await subscribed(publisher.start())
        waiting = asyncio.create_task(subscriber.next())
        await asyncio.sleep(0.1)
        await asyncio.to_thread(publisher.close)
        with pytest.raises(ClosedError, match="the learner has ended"):
            await asyncio.wait_for(waiting, 5)
        await subscriber.close()

    run(scenario())


def test_after_a_broken_link_the_current_version_is_not_loaded_twice(run: Any, publisher: WeightPublisher) -> None:
    async def scenario() -> None:
        subscriber = await subscribed(publisher.start())
        publish(publisher, 0)
        assert (await subscriber.next()).policy_version == 0
        announcer = publisher._announcer
        assert announcer is not None
        joined_again = announcer._take(Message("generator-0", "joined", [b""]))
        await asyncio.to_thread(announcer._loop.call, joined_again)
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(subscriber.next(), 0.3)
        publish(publisher, 1)
        assert (await subscriber.next()).policy_version == 1
        await subscriber.close()

    run(scenario())


def update_of_life(incarnation: int, version: int) -> WeightUpdate:
    return WeightUpdate(
        incarnation=incarnation,
        policy_version=version,
        backend="shm",
        payload={},
        probe_log_probs=[],
        published_at=0.0,
    )


def test_T22_a_restarted_learners_older_version_replaces_a_newer_one_knowingly(
    run: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def scenario() -> None:
        subscriber = WeightSubscriber("tcp://127.0.0.1:1", name="generator-0")
        for incarnation, version in [(3, 7), (3, 9), (3, 8), (4, 2), (3, 10), (4, 2), (4, 3)]:
            subscriber._take(update_of_life(incarnation, version))
            newest = await asyncio.wait_for(subscriber.next(), 1) if subscriber._newest else None
            taken.append(None if newest is None else (newest.incarnation, newest.policy_version))

    taken: list[tuple[int, int] | None] = []
    run(scenario())
    assert taken == [(3, 7), (3, 9), None, (4, 2), None, None, (4, 3)]
    assert "version 9 of its life 3 is replaced by version 2 of its life 4" in caplog.text


@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_T20_a_generator_gets_the_version_of_a_resumed_learner_without_another_publication(
    run: Any, backend: str
) -> None:
    """Whether it joins before or after: nobody waits for a broadcast that was sent already."""

    def life(incarnation: int) -> WeightPublisher:
        return WeightPublisher(
            WeightSyncConfig(backend=backend),
            run_name=RUN_NAME,
            rank=0,
            world_size=1,
            incarnation=incarnation,
            named_parameters={"weight": torch.full((8,), float(incarnation))},
            probe=ProbeSet([[1, 2, 3]]),
        )

    async def scenario() -> None:
        first, second = life(1), life(2)
        address = first.start()
        publish(first, 5)
        early = await subscribed(address)
        assert await early.fetch(await early.next()) is not None
        resumed = second.start()
        publish(second, 3)
        for name in ("generator-1", "generator-2"):
            late = await subscribed(resumed, name)
            update = await late.next()
            assert (update.incarnation, update.policy_version) == (2, 3)
            place = await late.fetch(update)
            assert place is not None
            assert SegmentReader.open(place["segment"], writable=True).view(1)[0][1].tolist() == [2.0] * 8
            await late.close()
        early._take(update)  # as its new link to the resumed learner would
        assert await early.fetch(await early.next()) is not None
        await early.close()
        await asyncio.to_thread(second.close)
        await asyncio.to_thread(first.close)

    run(scenario())


def test_T18_generators_that_come_and_go_while_versions_are_published_get_whole_ones(
    run: Any, publisher: WeightPublisher
) -> None:
    """The training thread publishes as fast as it can; nothing that happens on the sockets comes between its writes."""

    async def scenario() -> None:
        address = publisher.start()
        ended = threading.Event()
        weight = publisher._outlet._settings.parameters["weight"]  # type: ignore[attr-defined]

        def train() -> int:
            version = 0
            while not ended.is_set():
                version += 1
                weight.fill_(version)
                publish(publisher, version)
            return version

        training = asyncio.create_task(asyncio.to_thread(train))
        whole = 0
        for number in range(12):
            subscriber = await subscribed(address, f"generator-{number % 3}")
            for _ in range(4):
                update = await subscriber.next()
                place = await subscriber.fetch(update)
                if place is not None:
                    read = SegmentReader.open(place["segment"], writable=True).view(place["sequence"])[0][1]
                    assert read.min() == read.max() == update.policy_version
                    whole += 1
            await subscriber.close()
        ended.set()
        published = await training
        print(f"{whole} of 48 fetches were of a version that was still there; {published} published")
        assert whole > 0 and published >= 12

    run(scenario())


def test_T16_a_learner_that_dies_in_the_middle_costs_a_fetch_its_time_limit_at_most(run: Any) -> None:
    async def scenario() -> None:
        publisher = WeightPublisher(
            WeightSyncConfig(backend="tcp"),
            run_name=RUN_NAME,
            rank=0,
            world_size=1,
            incarnation=0,
            named_parameters={"weight": torch.ones(8)},
            probe=ProbeSet([[1, 2, 3]]),
        )
        subscriber = WeightSubscriber(publisher.start(), name="generator-0", timeout_s=0.5)
        await subscriber.connect(timeout_s=10)
        publish(publisher, 1)
        publisher._outlet._answer = lambda message: None  # type: ignore[attr-defined]
        with pytest.raises(WeightSyncError, match="version 1 did not arrive within weight_sync.timeout_s"):
            await subscriber.fetch(await subscriber.next())
        publish(publisher, 2)
        fetching = asyncio.create_task(subscriber.fetch(await subscriber.next()))
        await asyncio.sleep(0.1)
        await asyncio.to_thread(publisher.close)
        with pytest.raises(ClosedError, match="the learner has ended"):
            await fetching
        await subscriber.close()

    run(scenario())


@pytest.mark.parametrize("publisher", ["shm"], indirect=True)
def test_nothing_is_left_in_shared_memory(publisher: WeightPublisher) -> None:
    publisher.start()
    path = segment_path(RUN_NAME)
    assert path.exists()
    publisher.close()
    publisher.close()
    assert not path.exists()


# -- a real engine ---------------------------------------------------------------------------------------------------


class Bench:
    """One engine and the Transformers model it must follow."""

    def __init__(self, folder: pathlib.Path, run: Callable[[Coroutine[Any, Any, Any]], Any]) -> None:
        self.config: Config = config_from_tree(
            {
                "model": {"max_length": 128},
                "generator": {"concurrency": 16, "kv_cache_bytes": 64 << 20},
                "weight_sync": {"backend": "shm"},
            }
        )
        self.run = run
        self.reference = Reference(folder)
        self.engine = Engine(self.config, model_path=str(folder))
        self.outlets, self.inlets = {}, {}
        for backend in ("shm", "tcp"):  # the same engine can load from both
            self.outlets[backend] = make_outlet(
                backend,
                OutletSettings(
                    run_name=f"test_weight_sync {uuid.uuid4()}",
                    rank=0,
                    world_size=1,
                    parameters=self.reference.parameters,
                    dtype=None,
                    bind="tcp://127.0.0.1:0",
                    curve=None,
                ),
            )
            self.outlets[backend].start(lambda: None)
            self.inlets[backend] = make_inlet(backend, InletSettings(name="generator-0", curve=None, timeout_s=20))
        self.version = 0
        self.requests = 0
        run(self.engine.start())

    def close(self) -> None:
        self.run(self.engine.stop())
        for backend in self.outlets:
            self.run(self.inlets[backend].close())
            self.outlets[backend].close()

    @property
    def label(self) -> str:
        return f"v{self.version}"

    async def next_payload(self, backend: str = "shm") -> dict[str, Any]:
        """The reference moves, and its weights are published and fetched as the next version."""
        self.version += 1
        self.reference.step(seed=self.version)
        self.outlets[backend].write(self.version)
        update = WeightUpdate(
            incarnation=0,
            policy_version=self.version,
            backend=backend,
            payload=self.outlets[backend].payload(self.version),
            probe_log_probs=[],
            published_at=0.0,
        )
        payload = await self.inlets[backend].fetch(update)
        assert payload is not None
        return payload

    async def load(self, payload: dict[str, Any]) -> None:
        await self.engine.pause()
        try:
            await self.engine.load(payload, label=self.label)
        finally:
            await self.engine.resume()

    async def sample(
        self, prompt: Sequence[int], *, tokens: int, salt: str, temperature: float = 1.0, seed: int = 0
    ) -> Completion:
        self.requests += 1
        return await self.engine.generate(
            prompt,
            request_id=f"request-{self.requests}",
            temperature=temperature,
            max_tokens=tokens,
            stop_ids=[EOS],
            seed=seed,
            salt=salt,
        )

    async def probe_difference(self) -> float:
        self.requests += 1
        scores = await self.engine.score(PROBE.sequences, request_id=f"probe-{self.requests}")
        return float(np.abs(np.array(scores) - np.array(self.reference.probe(PROBE.sequences))).max())


@pytest.fixture(scope="module", params=["llama, tied", "qwen3, untied"])
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, run: Any) -> Iterator[Bench]:
    family, head = request.param.split(", ")
    folder = make_tiny_model(tmp_path_factory.mktemp(family), family=family, tied=head == "tied")
    bench = Bench(folder, run)
    yield bench
    bench.close()


@pytest.mark.engine
@pytest.mark.parametrize("backend", ["shm", "tcp"])
def test_after_each_update_the_engine_computes_the_learners_log_probs(bench: Bench, backend: str) -> None:
    bench.run(_follow_the_learner(bench, backend))


@pytest.mark.engine
def test_biases_of_a_tied_qwen2_follow_too(tmp_path: pathlib.Path, run: Any) -> None:
    bench = Bench(make_tiny_model(tmp_path, family="qwen2", tied=True), run)
    try:
        assert any(name.endswith("q_proj.bias") for name in bench.reference.parameters)
        bench.run(_follow_the_learner(bench, "tcp"))
    finally:
        bench.close()


async def _follow_the_learner(bench: Bench, backend: str) -> None:
    if bench.version == 0:
        assert await bench.probe_difference() < EXACT
    for _ in range(3):
        payload = await bench.next_payload(backend)
        before = await bench.probe_difference()
        await bench.load(payload)
        after = await bench.probe_difference()
        print(f"off by {before:.3g} before the update, by {after:.2g} after it")
        assert before > 0.01, "the update is too small to test anything"
        assert after < EXACT


@pytest.mark.engine
def test_T34_two_hundred_updates_in_a_row_neither_drift_nor_leak(bench: Bench) -> None:
    """One engine, no restart; a request runs through all of it, and prompts are read from the cache in between."""
    family = [psutil.Process(), *(psutil.Process(pid) for pid in bench.engine.pids)]
    prompt = [1, *(10 + i % 80 for i in range(79))]

    def in_use() -> list[tuple[int, int]]:
        return [(process.memory_info().rss, process.num_fds()) for process in family]

    async def scenario() -> None:
        for number in range(200):
            await bench.load(await bench.next_payload("tcp" if number % 2 else "shm"))
            if number % 20 == 19:
                assert await bench.probe_difference() < EXACT
                for _ in range(2):
                    answer = await bench.sample(prompt, tokens=2, salt=bench.label)
                    truth = bench.reference.log_probs([*prompt, *answer.token_ids])[len(prompt) - 1 :].numpy()
                    assert np.abs(truth - answer.log_probs).max() < EXACT
            if number == 39:
                before = in_use()
        for (rss_before, fds_before), (rss, fds) in zip(before, in_use(), strict=True):
            print(f"grown by {(rss - rss_before) / 1e6:.1f} MB and {fds - fds_before} descriptors in 160 updates")
            assert rss - rss_before < 40e6, "less than a fifth of the weights of 160 updates"
            assert fds - fds_before <= 2

    bench.run(scenario())


@pytest.mark.engine
def test_T19_pausing_or_resuming_twice_is_pausing_or_resuming_once(bench: Bench) -> None:
    async def scenario() -> None:
        requests = [asyncio.create_task(bench.sample([1, 20 + i], tokens=60, salt="p", seed=i)) for i in range(14)]
        await asyncio.sleep(0.05)
        await asyncio.gather(bench.engine.pause(), bench.engine.pause())
        frozen = [request.done() for request in requests]
        await asyncio.sleep(0.2)
        assert [request.done() for request in requests] == frozen
        await asyncio.gather(bench.engine.resume(), bench.engine.resume())
        await asyncio.gather(*requests)
        await bench.load(await bench.next_payload())
        assert await bench.probe_difference() < EXACT

    bench.run(scenario())


@pytest.mark.engine
@pytest.mark.parametrize("temperature", [0.7, 1.0, 1.3])
def test_behaviour_log_probs_are_the_models_at_the_sampling_temperature(bench: Bench, temperature: float) -> None:
    async def scenario() -> None:
        prompt = [1, 30, 31, 32]
        for seed in range(4):
            answer = await bench.sample(prompt, tokens=24, salt="t", temperature=temperature, seed=seed)
            truth = bench.reference.log_probs([*prompt, *answer.token_ids], temperature=temperature)
            difference = np.abs(np.array(answer.log_probs) - truth[len(prompt) - 1 :].numpy()).max()
            assert len(answer.log_probs) == len(answer.token_ids) and difference < EXACT

    bench.run(scenario())


@pytest.mark.engine
def test_in_flight_requests_carry_two_versions_with_exact_spans(bench: Bench) -> None:
    async def scenario() -> tuple[str, str, Reference, list[tuple[list[int], Completion]]]:
        await bench.load(await bench.next_payload())
        old_label, old = bench.label, copy.deepcopy(bench.reference)
        prompts = [[1, 20 + i, 50, 60 - i] for i in range(8)]
        requests = [asyncio.create_task(bench.sample(p, tokens=100, salt="s", seed=9)) for p in prompts]
        await asyncio.sleep(0.15)
        await bench.load(await bench.next_payload())
        answers = await asyncio.gather(*requests)
        return old_label, bench.label, old, list(zip(prompts, answers, strict=True))

    old_label, new_label, old, answers = bench.run(scenario())
    mixed = [(p, a) for p, a in answers if a.labels == [old_label, new_label]]
    assert len(mixed) >= 2, [a.spans for _, a in answers]
    for prompt, answer in mixed:
        (_, begin, switch), (_, middle, end) = answer.spans
        assert begin == 0 and switch == middle and end == len(answer.token_ids)
        truth = _log_probs_across_update(old, bench.reference, prompt, answer.token_ids, switch)
        assert np.abs(np.array(answer.log_probs) - truth).max() < EXACT
        off_by_one = _log_probs_across_update(old, bench.reference, prompt, answer.token_ids, switch - 1)
        assert np.abs(np.array(answer.log_probs) - off_by_one).max() > EXACT, "the test could not tell the difference"


@torch.no_grad()
def _log_probs_across_update(
    old: Reference, new: Reference, prompt: list[int], response: list[int], switch: int
) -> np.ndarray[Any, Any]:
    """Response [:switch] sampled by the old weights, the rest by the new ones on top of the old weights' KV cache."""
    tokens = torch.tensor([prompt + response])
    boundary = len(prompt) + switch - 1  # tokens before it were read by the old weights
    first = old.model(tokens[:, :boundary], use_cache=True)
    second = new.model(tokens[:, boundary:-1], past_key_values=first.past_key_values)
    logits = torch.cat([first.logits, second.logits], dim=1)[0].float()
    scored = torch.log_softmax(logits, -1).gather(-1, tokens[0, 1:, None])[:, 0]
    return np.asarray(scored[len(prompt) - 1 :].numpy())


@pytest.mark.engine
def test_T34_prefix_blocks_of_an_old_version_are_not_reused(bench: Bench) -> None:
    prompt = [1, *(10 + i % 80 for i in range(79))]  # two whole blocks and a rest

    async def first_token_difference(salt: str) -> float:
        answer = await bench.sample(prompt, tokens=1, salt=salt)
        truth = bench.reference.log_probs([*prompt, *answer.token_ids])
        return abs(answer.log_probs[0] - float(truth[-1]))

    async def scenario() -> None:
        await bench.load(await bench.next_payload())
        assert await first_token_difference("old") < EXACT
        await bench.load(await bench.next_payload())
        assert await first_token_difference("new") < EXACT
        reused = await first_token_difference("old")
        assert reused > 10 * EXACT, "the cache was not read at all, so this test proves nothing"

    bench.run(scenario())


@pytest.mark.engine
def test_the_probe_reads_its_sequences_anew_each_time(bench: Bench) -> None:
    async def scenario() -> None:
        sequences = [[1, *(10 + i % 80 for i in range(99))]]
        for _ in range(2):
            scores = await bench.engine.score(sequences, request_id="the-same-name")
            assert np.abs(np.array(scores) - np.array(bench.reference.probe(sequences))).max() < EXACT
            await bench.load(await bench.next_payload())

    bench.run(scenario())


@pytest.mark.engine
def test_a_shadow_that_holds_another_version_leaves_the_engine_as_it_was(bench: Bench) -> None:
    async def scenario() -> None:
        await bench.load(await bench.next_payload())
        kept = copy.deepcopy(bench.reference)
        outdated = await bench.next_payload()
        newest = await bench.next_payload()
        with pytest.raises(Exception, match="not whole"):
            await bench.load(outdated)
        scores = await bench.engine.score(PROBE.sequences, request_id="after-torn")
        assert np.abs(np.array(scores) - np.array(kept.probe(PROBE.sequences))).max() < EXACT
        await bench.load(newest)
        assert await bench.probe_difference() < EXACT

    bench.run(scenario())


@pytest.mark.engine
def test_the_same_seed_gives_the_same_tokens_whatever_else_is_in_the_engine(bench: Bench) -> None:
    async def scenario() -> None:
        alone = await bench.sample([1, 30, 31], tokens=24, salt="a", seed=5)
        crowd = [asyncio.create_task(bench.sample([1, 40 + i], tokens=30, salt="b", seed=i)) for i in range(12)]
        again = await bench.sample([1, 30, 31], tokens=24, salt="c", seed=5)
        other = await bench.sample([1, 30, 31], tokens=24, salt="c", seed=6)
        await asyncio.gather(*crowd)
        assert alone.token_ids == again.token_ids != other.token_ids

    bench.run(scenario())


@pytest.mark.engine
def test_more_prompts_than_one_step_can_read(bench: Bench) -> None:
    """A seeded request whose prompt is read in two steps would end vLLM's engine core on a CPU."""

    async def scenario() -> None:
        prompts = [[1, *(10 + (i + j) % 80 for j in range(99))] for i in range(36)]
        answers = await asyncio.gather(*(bench.sample(p, tokens=4, salt="m", seed=3) for p in prompts))
        for prompt, answer in zip(prompts[::7], answers[::7], strict=True):
            truth = bench.reference.log_probs([*prompt, *answer.token_ids])[len(prompt) - 1 :].numpy()
            assert np.abs(truth - answer.log_probs).max() < EXACT

    bench.run(scenario())


@pytest.mark.engine
def test_a_stop_token_is_part_of_the_response(bench: Bench) -> None:
    async def scenario() -> None:
        answers = [await bench.sample([1, 30], tokens=100, salt="e", temperature=2.0, seed=s) for s in range(12)]
        stopped = [a for a in answers if a.finish_reason == "stop"]
        assert stopped and all(a.token_ids[-1] == EOS and EOS not in a.token_ids[:-1] for a in stopped)
        assert all(len(a.token_ids) == 100 for a in answers if a.finish_reason == "length")

    bench.run(scenario())


def test_a_shadow_names_everything_the_loader_needs() -> None:
    from streamrl.weight_sync.vllm_plugin import ShadowUpdateInfo

    shadow = Shadow(Layout.of({"weight": torch.ones(1)}))
    shadow.begin(7)
    assert set(shadow.finish(7)) == {field.name for field in dataclasses.fields(ShadowUpdateInfo)}
    shadow.close()
