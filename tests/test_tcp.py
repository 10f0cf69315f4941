"""Backend `tcp`: what is published arrives, whatever happens on the way, and nobody waits for the slow one."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import pathlib
import signal
from collections.abc import Callable, Coroutine, Iterator
from multiprocessing.connection import Connection as Channel
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch.distributed as dist
from test_segment import sharded_parameters, sharded_tensors, some_parameters

from streamrl.errors import ClosedError, WeightSyncError
from streamrl.records import WeightUpdate
from streamrl.sockets import CurveKeys
from streamrl.weight_sync import tcp
from streamrl.weight_sync.backend import InletSettings, OutletSettings
from streamrl.weight_sync.segment import SegmentReader
from streamrl.weight_sync.tcp import TcpInlet, TcpOutlet
from streamrl.wire import Codec

T = TypeVar("T")

SPAWN = multiprocessing.get_context("spawn")
NUM_CHUNKS = 40


def outlet_of(parameters: dict[str, torch.Tensor], **changes: Any) -> TcpOutlet:
    settings = {"rank": 0, "world_size": 1, "dtype": None, "bind": "tcp://127.0.0.1:0", "curve": None}
    outlet = TcpOutlet(OutletSettings(run_name="test_tcp", parameters=parameters, **(settings | changes)))
    outlet.start(lambda: None)
    return outlet


def inlet_of(name: str = "generator-0", *, curve: CurveKeys | None = None, timeout_s: float = 30) -> TcpInlet:
    return TcpInlet(InletSettings(name=name, curve=curve, timeout_s=timeout_s))


def update_of(payload: dict[str, Any]) -> WeightUpdate:
    version = payload["sequence"]
    fields: dict[str, Any] = {"incarnation": 0, "backend": "tcp", "probe_log_probs": [], "published_at": 0.0}
    return WeightUpdate(policy_version=version, payload=payload, **fields)


def contents(place: dict[str, Any] | None) -> dict[str, torch.Tensor]:
    """What an engine would load."""
    assert place is not None, "the version was gone"
    reader = SegmentReader.open(place["segment"], writable=True)
    return {name: tensor.clone() for name, tensor in reader.view(place["sequence"])}


class Learner:
    """One rank whose only parameter is filled with the number of the version; `NUM_CHUNKS` chunks long."""

    def __init__(self) -> None:
        self.weight = torch.empty(NUM_CHUNKS * tcp.CHUNK_BYTES // 4)
        self.outlet = outlet_of({"weight": self.weight})
        self.sequence = 0
        self.requests: list[tuple[str, int]] = []  # (generator, chunk), as they come
        self.at_request: Callable[[str, int], None] = lambda peer, index: None
        answer = self.outlet._answer
        codec = Codec(tcp.ChunkRequest)

        def watched(message: Any) -> Any:
            request, _ = codec.unpack(message.frames)
            self.requests.append((message.peer, request.index))
            self.at_request(message.peer, request.index)
            return answer(message)

        self.outlet._answer = watched  # type: ignore[method-assign]

    def publish(self) -> WeightUpdate:
        self.sequence += 1
        self.weight.fill_(self.sequence)
        self.outlet.write(self.sequence)
        return update_of(self.outlet.payload(self.sequence))


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch) -> Iterator[Learner]:
    monkeypatch.setattr(tcp, "CHUNK_BYTES", 4096)
    learner = Learner()
    yield learner
    learner.outlet.close()


def play(scenario: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(scenario, 60))


def value_of(place: dict[str, Any] | None) -> float:
    weight = contents(place)["weight"]
    assert weight.min() == weight.max(), "two versions were mixed"
    return float(weight[0])


@pytest.mark.parametrize("chunk_bytes", [100, 1 << 20])
def test_what_is_published_arrives_bit_for_bit(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tcp, "CHUNK_BYTES", chunk_bytes)
    parameters = some_parameters()
    outlet, inlet = outlet_of(parameters), inlet_of()

    async def scenario() -> None:
        for version in range(1, 4):
            parameters["odd.weight"].add_(1)
            assert outlet.write(version) == sum(t.numel() * t.element_size() for t in parameters.values())
            read = contents(await inlet.fetch(update_of(outlet.payload(version))))
            assert list(read) == list(parameters)
            for name, tensor in parameters.items():
                assert read[name].dtype == tensor.dtype and torch.equal(read[name], tensor), name
        await inlet.close()

    play(scenario())
    outlet.close()


def test_the_payload_can_have_a_dtype_of_its_own() -> None:
    weight = torch.randn(16, 4)
    outlet, inlet = outlet_of({"weight": weight}, dtype=torch.bfloat16), inlet_of()

    async def scenario() -> None:
        outlet.write(1)
        read = contents(await inlet.fetch(update_of(outlet.payload(1))))
        assert torch.equal(read["weight"], weight.bfloat16())
        await inlet.close()

    play(scenario())
    outlet.close()


def test_after_a_broken_link_the_transfer_goes_on_where_it_broke(learner: Learner) -> None:
    inlet = inlet_of()
    broken = asyncio.Event()

    async def scenario() -> None:
        loop = asyncio.get_running_loop()

        def break_link() -> None:
            session = inlet._links[0]._connection._session
            assert session is not None
            session.lost.set_result("planted")
            broken.set()

        def at_request(peer: str, index: int) -> None:
            if index == NUM_CHUNKS // 2 and not broken.is_set():
                loop.call_soon_threadsafe(break_link)

        learner.at_request = at_request
        assert value_of(await inlet.fetch(learner.publish())) == 1
        assert broken.is_set()
        assert len(learner.requests) <= NUM_CHUNKS + 2 * tcp.WINDOW, "chunks that had arrived were sent again"
        await inlet.close()

    play(scenario())


def test_no_more_than_a_window_of_chunks_is_on_the_way(learner: Learner) -> None:
    inlet, most = inlet_of(), []

    async def scenario() -> None:
        learner.at_request = lambda peer, index: most.append(len(inlet._links[0]._asked))
        await inlet.fetch(learner.publish())
        assert 0 < max(most) <= tcp.WINDOW
        await inlet.close()

    play(scenario())


@pytest.mark.parametrize("times", [1, 3])
def test_a_damaged_chunk_is_asked_for_again_and_never_laid_down(times: int, learner: Learner) -> None:
    inlet, damaged = inlet_of(), []
    answer = learner.outlet._answer

    def lie(message: Any) -> Any:
        frames = answer(message)
        assert frames is not None
        if learner.requests[-1][1] == 7 and len(damaged) < times:
            damaged.append(True)
            spoiled = bytearray(frames[1])
            spoiled[5] ^= 1
            frames[1] = bytes(spoiled)
        return frames

    learner.outlet._answer = lie  # type: ignore[method-assign]

    async def scenario() -> None:
        update = learner.publish()
        if times == 1:
            assert value_of(await inlet.fetch(update)) == 1
        else:
            with pytest.raises(WeightSyncError, match="generator-0: chunk 7 of rank 0 came damaged 3 times"):
                await inlet.fetch(update)
            assert value_of(await inlet.fetch(update)) == 1, "and a later fetch works"
        await inlet.close()

    play(scenario())
    assert len(damaged) == times


def test_a_link_slower_than_the_learner_is_late_and_never_starved(learner: Learner) -> None:
    """Two generators are reading when the learner publishes three times: the one who began first gets to the end."""
    first, second = inlet_of("generator-0"), inlet_of("generator-1")

    async def scenario() -> None:
        one = learner.publish()
        behind = asyncio.Event()
        loop = asyncio.get_running_loop()

        def at_request(peer: str, index: int) -> None:
            if peer == "generator-0" and index == 5:
                loop.call_soon_threadsafe(behind.set)
            if peer == "generator-1" and index == 5:
                for _ in range(3):
                    learner.publish()

        learner.at_request = at_request
        slow = asyncio.create_task(first.fetch(one))
        await behind.wait()
        overtaken = asyncio.create_task(second.fetch(learner.publish()))
        assert value_of(await slow) == 1
        assert await overtaken is None, "its slot was the newer one of two that were read"
        learner.at_request = lambda peer, index: None
        newest = update_of(learner.outlet.payload(learner.sequence))
        assert value_of(await second.fetch(newest)) == learner.sequence == 5
        await asyncio.gather(first.close(), second.close())

    play(scenario())


def test_a_version_that_was_replaced_is_given_up_in_the_middle(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tcp, "PIN_S", 0.0)  # as for a generator that has not asked for a while
    inlet = inlet_of()

    async def scenario() -> None:
        def at_request(peer: str, index: int) -> None:
            if index == 5 and learner.sequence == 1:
                learner.publish()
                learner.publish()

        learner.at_request = at_request
        assert await inlet.fetch(learner.publish()) is None
        assert len(learner.requests) < NUM_CHUNKS
        newest = update_of(learner.outlet.payload(learner.sequence))
        assert value_of(await inlet.fetch(newest)) == learner.sequence == 3
        await inlet.close()

    play(scenario())


def test_a_silent_learner_costs_a_fetch_its_time_limit_and_the_error_says_how_far_it_was(learner: Learner) -> None:
    inlet = inlet_of(timeout_s=0.5)
    answer = learner.outlet._answer
    learner.outlet._answer = lambda m: answer(m) if len(learner.requests) < 9 else None  # type: ignore[method-assign]

    async def scenario() -> None:
        sentence = r"generator-0: version 1 did not arrive within .*\(0.5 s\): 9 of 40 chunks from rank 0"
        with pytest.raises(WeightSyncError, match=sentence):
            await inlet.fetch(learner.publish())
        await inlet.close()

    play(scenario())


def test_weights_are_for_peers_with_the_runs_keys_only() -> None:
    names = {"listeners": ["learner-0"], "others": ["generator-0", "generator-1"]}
    keys = CurveKeys.make(**names)
    outlet = outlet_of({"weight": torch.ones(8)}, curve=keys["learner-0"])
    outlet.write(1)

    async def scenario() -> None:
        update = update_of(outlet.payload(1))
        for stranger in (None, CurveKeys.make(**names)["generator-0"]):
            inlet = inlet_of(curve=stranger, timeout_s=0.7)
            with pytest.raises(WeightSyncError, match="did not arrive"):
                await inlet.fetch(update)
            await inlet.close()
        impostor = inlet_of(curve=keys["generator-1"])
        with pytest.raises(ClosedError, match="the CURVE keys of this peer are not those of that name"):
            await impostor.fetch(update)
        await impostor.close()
        friend = inlet_of(curve=keys["generator-0"])
        assert contents(await friend.fetch(update))["weight"].tolist() == [1.0] * 8
        await friend.close()

    play(scenario())
    outlet.close()


# -- several processes -----------------------------------------------------------------------------------------------


def _serve_rank(rank: int, world_size: int, rendezvous: str, pipe: Channel) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world_size)
    outlet = outlet_of(sharded_tensors(rank, world_size), rank=rank, world_size=world_size)
    written = outlet.write(1)
    dist.barrier()
    held = sum(slot.bytes.nbytes for slot in outlet._slots)
    pipe.send((written, held, outlet.payload(1) if rank == 0 else None))
    pipe.recv()
    outlet.close()
    dist.destroy_process_group()


def test_T16_T17_three_ranks_serve_their_own_shards_and_rank_0_holds_no_more_than_the_others(
    tmp_path: pathlib.Path,
) -> None:
    pipes = [SPAWN.Pipe() for _ in range(3)]
    ranks = [
        SPAWN.Process(target=_serve_rank, args=(rank, 3, str(tmp_path / "rendezvous"), theirs))
        for rank, (_, theirs) in enumerate(pipes)
    ]
    for process in ranks:
        process.start()

    async def scenario() -> None:
        answers = await asyncio.gather(*(asyncio.to_thread(ours.recv) for ours, _ in pipes))
        inlet = inlet_of()
        read = contents(await inlet.fetch(update_of(answers[0][2])))
        full = sharded_parameters()
        for name, tensor in full.items():
            assert torch.equal(read[name], tensor), name
        for name in ("columns", "replicated", "plain"):
            assert torch.equal(read[name], full["rows7"]), name
        payload = sum(t.numel() * t.element_size() for t in read.values())
        assert sum(written for written, _, _ in answers) == payload, "a byte was served by no rank, or by two"
        for written, held, _ in answers:
            assert held <= 2 * (written + 64 * len(read)), "more than two versions of the rank's own part"
        await inlet.close()

    try:
        play(scenario())
    finally:
        for ours, _ in pipes:
            ours.send("end")
        for process in ranks:
            process.join(20)
            process.kill()
    assert [process.exitcode for process in ranks] == [0, 0, 0]


def _fetch_for_ever(pipe: Channel) -> None:
    """A generator that fetches what the pipe tells it to, and says what it got."""

    async def main() -> None:
        inlet = inlet_of("generator-1")
        while True:
            pipe.send("ready")
            place = await inlet.fetch(await asyncio.to_thread(pipe.recv))
            pipe.send(None if place is None else value_of(place))

    asyncio.run(main())


def test_a_generator_that_stops_or_dies_in_the_middle_costs_the_others_nothing(
    learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGSTOP in the middle of a transfer, forty more versions for everybody else, SIGCONT; then SIGKILL."""
    monkeypatch.setattr(tcp, "PIN_S", 0.2)
    ours, theirs = SPAWN.Pipe()
    process = SPAWN.Process(target=_fetch_for_ever, args=(theirs,), daemon=True)
    process.start()
    assert process.pid is not None
    pid = process.pid
    signal_to_send = signal.SIGSTOP
    hit = 0

    def at_request(peer: str, index: int) -> None:
        nonlocal hit
        if peer == "generator-1" and index == 5 and hit < 2:
            hit += 1
            os.kill(pid, signal_to_send)

    learner.at_request = at_request

    async def others(versions: int) -> None:
        inlet = inlet_of("generator-0")
        for _ in range(versions):
            update = learner.publish()
            assert value_of(await inlet.fetch(update)) == learner.sequence
        await inlet.close()

    async def scenario() -> None:
        nonlocal signal_to_send
        assert await asyncio.to_thread(ours.recv) == "ready"
        ours.send(learner.publish())
        while hit < 1:
            await asyncio.sleep(0.01)
        await others(40)
        os.kill(pid, signal.SIGCONT)
        assert await asyncio.to_thread(ours.recv) is None, "its version is long gone"
        assert await asyncio.to_thread(ours.recv) == "ready"
        signal_to_send = signal.SIGKILL
        ours.send(learner.publish())
        while hit < 2:
            await asyncio.sleep(0.01)
        await others(5)

    try:
        play(scenario())
    finally:
        process.kill()
        process.join()


def test_a_chunk_is_as_short_as_what_is_left(learner: Learner) -> None:
    """A chunk of another length than agreed is damage too, even with a checksum of its own."""
    inlet = inlet_of()

    async def scenario() -> None:
        await inlet.fetch(learner.publish())
        link = inlet._links[0]
        short = np.zeros(10, dtype=np.uint8)
        crc = tcp.zlib.crc32(short.data)
        payload = np.empty(NUM_CHUNKS * 4096, dtype=np.uint8)
        assert not link._lay(tcp.Chunk(1, 3, crc), short, payload)
        assert not link._lay(tcp.Chunk(1, NUM_CHUNKS, crc), short, payload)
        await inlet.close()

    play(scenario())
