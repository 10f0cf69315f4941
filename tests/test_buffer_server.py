"""The buffer server with its real clients over real sockets; only the model is missing."""

from __future__ import annotations

import asyncio
import collections
import pathlib
import random
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import psutil
import pytest
import stand_ins
from conftest import own_address
from mutations import mutated
from stand_ins import CountingSource, StandInGenerator, make_rollout, small_config

from buffers import client as client_module
from buffers import server as server_module
from buffers.client import GeneratorClient, LearnerClient
from buffers.server import BufferServer
from buffers.shards import Shard
from streamrl import transport, wire
from streamrl.config import BufferConfig, Config
from streamrl.errors import ClosedError, ConfigError, DeadlineExceededError
from streamrl.records import BufferStats, Failure
from streamrl.transport import Connection, CurveKeys

FAST: dict[str, float] = {"heartbeat_s": 0.05, "peer_timeout_s": 1.0}


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 30))


@asynccontextmanager
async def serving(
    config: Config, source: CountingSource | None = None, **options: Any
) -> AsyncIterator[tuple[BufferServer, str]]:
    server = BufferServer(config, source or CountingSource(), **(FAST | options))
    address = await server.start()
    task = asyncio.create_task(server.run())
    try:
        yield server, address
    finally:
        await server.stop(reason="end_of_run", final_version=server.buffer.stats().policy_version)
        await task


@asynccontextmanager
async def generator(address: str, name: str = "generator-0", **options: Any) -> AsyncIterator[GeneratorClient]:
    client = GeneratorClient(address, name=name, **(FAST | options))
    await client.connect(timeout_s=5)
    try:
        yield client
    finally:
        await client.close(timeout_s=0)


@asynccontextmanager
async def learner(address: str, rank: int = 0, world_size: int = 1, **options: Any) -> AsyncIterator[LearnerClient]:
    client = LearnerClient(address, rank=rank, world_size=world_size, **(FAST | options))
    await asyncio.to_thread(client.connect, timeout_s=5)
    try:
        yield client
    finally:
        await asyncio.to_thread(client.close)


def sample(client: LearnerClient, version: int, timeout_s: float = 10, *, chunk: int = 0) -> asyncio.Task[Shard | None]:
    work = asyncio.to_thread(client.sample, policy_version=version, chunk=chunk, timeout_s=timeout_s)
    return asyncio.create_task(work)


async def until(condition: Callable[[], bool], *, limit_s: float = 5) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        await asyncio.sleep(0.005)


async def kill(server: BufferServer, task: asyncio.Task[None]) -> None:
    """As the death of its process: the socket is gone and nobody was told."""
    await transport._cancel([task, *server._listener._tasks])
    await server._listener._free()
    server.buffer.close()  # its journal has everything that a call returned for


def received(frames: list[wire.Frame]) -> list[wire.Frame]:
    """As they come out of a socket."""
    return [bytes(frame) for frame in frames]


def balanced(stats: BufferStats) -> bool:
    return stats.issued == stats.in_flight + stats.buffered + stats.trained + sum(stats.discarded.values())


def test_the_rollouts_of_many_generators_arrive_exactly_once() -> None:
    async def main() -> None:
        config = small_config(learner={"groups_per_step": 8})
        async with serving(config, CountingSource(40)) as (server, address), learner(address) as client:
            clients = [GeneratorClient(address, name=f"generator-{i}", **FAST) for i in range(10)]
            await asyncio.gather(*(c.connect(timeout_s=5) for c in clients))
            generators = [StandInGenerator(c) for c in clients]
            tasks = [asyncio.create_task(g.run()) for g in generators]
            trained: list[str] = []
            for version in range(5):
                shard = await sample(client, version)
                assert shard is not None and shard.num_groups == 8
                for group in shard.groups:
                    assert sorted(r.member for r in group.rollouts) == [0, 1, 2, 3]
                    assert version - group.min_version <= 2
                trained += [group.uid for group in shard.groups]
                await asyncio.to_thread(client.advance, version + 1, commit=True)
                await asyncio.gather(*(g.report(version + 1) for g in generators))
            assert await sample(client, 5) is None
            stats = await server.stop(reason="end_of_data", final_version=5)
            await asyncio.gather(*tasks, *(c.close(timeout_s=1) for c in clients))
            sent = [key for g in generators for key in g.sent]
            assert len(set(sent)) == len(sent)
            assert len(trained) == len(set(trained)) == stats.trained
            assert balanced(stats) and stats.issued == 40 and stats.in_flight == 0
            assert stats.duplicate_rollouts == 0
            assert sum(sum(c.outcomes.values()) for c in clients) == len(sent)

    run(main())


def test_a_killed_server_gets_everything_again_from_its_successor_and_keeps_one_of_each(tmp_path: pathlib.Path) -> None:
    """What was not acknowledged is sent again, what was acknowledged is not, what was leased is not leased twice."""

    async def main() -> None:
        config = small_config(buffer={"max_staleness": 4, "journal": "async"})
        first = BufferServer(config, CountingSource(), journal_path=tmp_path, **FAST)
        address = await first.start()
        task = asyncio.create_task(first.run())
        async with generator(address) as client:
            await client.report_version(incarnation=0, policy_version=0)
            await client.request(16)
            leases = [await client.next_lease() for _ in range(4)]
            for lease, prompt_ids in leases[:2]:
                for member in lease.members:
                    await client.send(make_rollout(lease.uid, member, prompt_ids=prompt_ids))
            await until(lambda: client.unacknowledged == 0)
            await kill(first, task)
            for lease, prompt_ids in leases[2:]:  # the link is down; nobody takes them
                for member in lease.members:
                    await client.send(make_rollout(lease.uid, member, prompt_ids=prompt_ids))
            await client.request(4)
            assert client.unacknowledged == 8
            again = {"journal_path": tmp_path, "bind": address}
            async with serving(config, **again) as (second, _):
                await until(lambda: client.unacknowledged == 0)
                assert client.outcomes == {"accepted": 16}
                stats = await second.stats()
                assert stats.buffered == 4 and stats.duplicate_rollouts == 0
                lease, _ = await client.next_lease()  # the credit granted while the link was down counts
                assert lease.uid == "0-000004" and len(lease.members) == 4

    run(main())


def test_a_rollout_whose_acknowledgement_was_lost_is_recognised_when_it_comes_again(tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        config = small_config(buffer={"journal": "async"})
        first = BufferServer(config, CountingSource(), journal_path=tmp_path, **FAST)
        address = await first.start()
        task = asyncio.create_task(first.run())
        async with generator(address) as client:
            await client.report_version(incarnation=0, policy_version=0)
            await client.request(4)
            lease, prompt_ids = await client.next_lease()

            async def lose(*arguments: Any) -> None:
                pass

            first._send = lose  # type: ignore[method-assign]
            for member in lease.members:
                await client.send(make_rollout(lease.uid, member, prompt_ids=prompt_ids))
            await until(lambda: first.buffer.stats().buffered == 1)
            assert client.unacknowledged == 4
            await kill(first, task)
            again = {"journal_path": tmp_path, "bind": address}
            async with serving(config, **again) as (second, _):
                await until(lambda: client.unacknowledged == 0)
                assert client.outcomes == {"duplicate": 4}
                stats = await second.stats()
                assert (stats.buffered, stats.duplicate_rollouts) == (1, 4)

    run(main())


def test_members_of_a_generator_that_did_not_come_back_to_a_new_server_are_leased_to_others(
    tmp_path: pathlib.Path,
) -> None:
    async def main() -> None:
        config = small_config(buffer={"journal": "async"})
        first = BufferServer(config, CountingSource(), journal_path=tmp_path, **FAST)
        address = await first.start()
        task = asyncio.create_task(first.run())
        async with generator(address, "lost") as lost:
            await lost.report_version(incarnation=0, policy_version=0)
            await lost.request(4)
            lease, _ = await lost.next_lease()
            await kill(first, task)
        again = {"journal_path": tmp_path, "peer_timeout_s": 0.2}
        async with serving(config, **again) as (_, address), generator(address, "other") as other:
            await other.report_version(incarnation=0, policy_version=0)
            await other.request(64)
            seen = [(await other.next_lease())[0] for _ in range(12)]
            refilled = [leased for leased in seen if leased.uid == lease.uid]
            assert [(r.members, r.attempts) for r in refilled] == [((0, 1, 2, 3), (1, 1, 1, 1))]

    run(main())


def test_the_credit_of_a_server_that_stopped_reading_bounds_the_memory_of_its_clients(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server_module, "WINDOW_ROLLOUTS", 10)

    async def main() -> None:
        server = BufferServer(small_config(), CountingSource(), **FAST)
        address = await server.start()  # and it never runs
        async with generator(address) as client:
            sender = asyncio.create_task(send_all(client, 50))
            await until(lambda: client.unacknowledged == 10)
            await asyncio.sleep(0.1)
            assert client.unacknowledged == 10 and not sender.done()
            task = asyncio.create_task(server.run())
            await sender
            await until(lambda: client.unacknowledged == 0)
            assert client.outcomes == {"rejected": 50}
            await server.stop(reason="end_of_run", final_version=0)
            await task

    async def send_all(client: GeneratorClient, count: int) -> None:
        for i in range(count):
            await client.send(make_rollout(f"unknown-{i}"))

    run(main())


def test_the_window_counts_bytes_too_but_lets_one_rollout_through(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server_module, "WINDOW_BYTES", 1000)

    async def main() -> None:
        server = BufferServer(small_config(), CountingSource(), **FAST)
        address = await server.start()
        async with generator(address) as client:
            await asyncio.wait_for(client.send(make_rollout("big", length=10_000)), 1)
            blocked = asyncio.create_task(client.send(make_rollout("small")))
            await asyncio.sleep(0.05)
            assert not blocked.done()
            await server.stop(reason="end_of_run", final_version=0)
            with pytest.raises(ClosedError):
                await asyncio.wait_for(blocked, 5)

    run(main())


def test_no_more_groups_are_leased_than_admission_allows_and_a_step_makes_room_for_one_more_batch() -> None:
    async def main() -> None:
        async with (
            serving(small_config()) as (server, address),
            generator(address) as client,
            learner(address) as trainer,
        ):
            worker = StandInGenerator(client, concurrency=1000)
            task = asyncio.create_task(worker.run())
            await until(lambda: server.buffer.stats().buffered == 12)  # (S + v + 1) * B = (2 + 0 + 1) * 4
            await asyncio.sleep(0.05)
            assert server.buffer.stats().issued == 12
            assert (await server.stats()).waits[0].waiter == "generator-0"
            assert await sample(trainer, 0) is not None
            await asyncio.to_thread(trainer.advance, 1, commit=True)
            await asyncio.sleep(0.05)
            assert server.buffer.stats().issued == 12  # its weights are still version 0
            await worker.report(1)
            await until(lambda: server.buffer.stats().issued == 16)
            task.cancel()

    run(main())


def test_t11_a_batch_smaller_than_the_number_of_generators_blocks_nobody() -> None:
    async def main() -> None:
        config = small_config(learner={"groups_per_step": 1}, buffer={"max_staleness": 0})
        async with serving(config) as (_, address), learner(address) as trainer:
            clients = [GeneratorClient(address, name=f"generator-{i}", **FAST) for i in range(6)]
            await asyncio.gather(*(c.connect(timeout_s=5) for c in clients))
            workers = [StandInGenerator(c, concurrency=2) for c in clients]  # less than one group each
            tasks = [asyncio.create_task(w.run()) for w in workers]
            for version in range(5):
                assert await sample(trainer, version) is not None
                await asyncio.to_thread(trainer.advance, version + 1, commit=True)
                await asyncio.gather(*(w.report(version + 1) for w in workers))
            for task in tasks:
                task.cancel()
            await asyncio.gather(*(c.close(timeout_s=0) for c in clients))

    run(main())


def test_t10_zero_staleness_makes_progress_and_trains_only_on_its_own_version() -> None:
    async def main() -> None:
        config = small_config(buffer={"max_staleness": 0})
        async with serving(config) as (_, address), generator(address) as client, learner(address) as trainer:
            worker = StandInGenerator(client, concurrency=64)
            task = asyncio.create_task(worker.run())
            for version in range(6):
                shard = await sample(trainer, version)
                assert shard is not None
                assert {int(v) for g in shard.groups for r in g.rollouts for v in r.versions} == {version}
                await asyncio.to_thread(trainer.advance, version + 1, commit=True)
                await worker.report(version + 1)
            task.cancel()

    run(main())


def test_a_generator_without_recent_weights_is_leased_nothing() -> None:
    async def main() -> None:
        async with serving(small_config()) as (server, address), generator(address) as client:
            await client.request(16)
            leasing = asyncio.create_task(client.next_lease())
            await asyncio.sleep(0.05)
            assert not leasing.done()  # it has reported no version at all
            server.buffer.advance(5)
            await client.report_version(incarnation=0, policy_version=2)  # 5 - S = 3
            await asyncio.sleep(0.05)
            assert not leasing.done()
            waits = (await server.stats()).waits
            assert [w.waiting_for for w in waits] == ["weights of version 3 or newer"]
            await client.report_version(incarnation=0, policy_version=3)
            await asyncio.wait_for(leasing, 5)

    run(main())


@pytest.mark.parametrize("first", [0, 1])
def test_two_ranks_get_one_partition_balanced_by_tokens_whichever_asks_first(first: int) -> None:
    lengths = [200, 10, 10, 10, 100, 90, 10, 10]

    def make(uid: str, member: int, attempt: int, **changes: Any) -> Any:
        return make_rollout(uid, member, attempt, length=lengths[int(uid[2:]) % 8], **changes)

    async def main() -> None:
        config = small_config(learner={"groups_per_step": 8, "ranks": 2})
        async with (
            serving(config) as (_, address),
            generator(address) as client,
            learner(address, 0, 2) as rank_0,
            learner(address, 1, 2) as rank_1,
        ):
            task = asyncio.create_task(StandInGenerator(client, concurrency=64, make=make).run())
            ranks = [rank_0, rank_1]
            early = sample(ranks[first], 0)
            await asyncio.sleep(0.05)
            shards = {first: await early, 1 - first: await sample(ranks[1 - first], 0)}
            a, b = shards[0], shards[1]
            assert a is not None and b is not None
            uids = [g.uid for g in a.groups] + [g.uid for g in b.groups]
            assert len(uids) == len(set(uids)) == 8
            loads = [sum(g.num_tokens for g in shard.groups) for shard in (a, b)]
            assert max(loads) <= 1.2 * min(loads)
            assert (a.num_groups, a.num_rollouts, a.num_tokens) == (b.num_groups, b.num_rollouts, sum(loads))
            again = await sample(ranks[first], 0)
            assert again is not None
            assert [g.uid for g in again.groups] == [g.uid for g in shards[first].groups]  # type: ignore[union-attr]
            # Rank 1 may be at version 1 before rank 0 has said so.
            ahead = sample(rank_1, 1)
            await asyncio.to_thread(rank_0.advance, 1, commit=True)
            both = await asyncio.gather(ahead, sample(rank_0, 1))
            assert not {g.uid for shard in both if shard for g in shard.groups} & set(uids)
            task.cancel()

    run(main())


def test_a_learner_whose_link_broke_while_it_waited_asks_again_by_itself(tmp_path: pathlib.Path) -> None:
    async def main() -> None:
        config = small_config(buffer={"journal": "async"})
        first = BufferServer(config, CountingSource(), journal_path=tmp_path, **FAST)
        address = await first.start()
        task = asyncio.create_task(first.run())
        async with learner(address) as trainer:
            waiting = sample(trainer, 0)
            await until(lambda: bool(first._desk._waiting))
            await kill(first, task)
            again = {"journal_path": tmp_path, "bind": address}
            async with serving(config, **again) as _, generator(address) as client:
                worker = asyncio.create_task(StandInGenerator(client, concurrency=16).run())
                shard = await asyncio.wait_for(waiting, 10)
                assert shard is not None and len(shard.groups) == 4
                worker.cancel()

    run(main())


def test_a_server_that_was_killed_between_two_ranks_gives_the_second_one_the_rest_of_the_same_batch(
    tmp_path: pathlib.Path,
) -> None:
    async def main() -> None:
        config = small_config(buffer={"journal": "async"}, learner={"ranks": 2})
        first = BufferServer(config, CountingSource(), journal_path=tmp_path, **FAST)
        address = await first.start()
        task = asyncio.create_task(first.run())
        async with (
            generator(address) as client,
            learner(address, 0, 2) as rank_0,
            learner(address, 1, 2) as rank_1,
        ):
            worker = asyncio.create_task(StandInGenerator(client, concurrency=64).run())
            early = await sample(rank_0, 0)
            await kill(first, task)
            async with serving(config, journal_path=tmp_path, bind=address):
                late = await sample(rank_1, 0)
            assert early is not None and late is not None
            trained = [group.uid for shard in (early, late) for group in shard.groups]
            assert len(trained) == len(set(trained)) == 4
            assert (early.num_tokens, early.num_groups) == (late.num_tokens, late.num_groups)
            worker.cancel()

    run(main())


def test_a_server_that_was_killed_inside_a_streamed_step_goes_on_with_its_chunks(tmp_path: pathlib.Path) -> None:
    """Rank 0 has chunk 0, rank 1 waits for it, and the link of both breaks: the step is the same for both."""

    async def main() -> None:
        config = small_config(
            buffer={"journal": "async", "selector": "uniform"}, learner={"ranks": 2, "stream_groups": 3}
        )
        first = BufferServer(config, CountingSource(), journal_path=tmp_path, **FAST)
        address = await first.start()
        task = asyncio.create_task(first.run())
        async with (
            generator(address) as client,
            learner(address, 0, 2) as rank_0,
            learner(address, 1, 2) as rank_1,
        ):
            worker = asyncio.create_task(StandInGenerator(client, concurrency=64).run())
            early = await sample(rank_0, 0)
            assert early is not None and (early.num_groups, early.is_last) == (3, False)
            await kill(first, task)
            waiting = sample(rank_1, 0)
            async with serving(config, journal_path=tmp_path, bind=address) as (server, _):
                again, late = await sample(rank_0, 0), await waiting
                assert again is not None and late is not None
                assert [g.uid for g in again.groups] == [g.uid for g in early.groups]
                assert (early.num_tokens, early.num_groups) == (late.num_tokens, late.num_groups)
                last = await asyncio.gather(sample(rank_0, 0, chunk=1), sample(rank_1, 0, chunk=1))
                assert [shard and (shard.num_groups, shard.is_last) for shard in last] == [(4, True), (4, True)]
                trained = [g.uid for shard in (early, late, *last) if shard for g in shard.groups]
                assert len(trained) == len(set(trained)) == 4
                assert sorted(trained) == sorted(g.uid for g in server.buffer.sampled_at(0))
            worker.cancel()

    run(main())


def test_a_failed_member_is_generated_again_by_itself() -> None:
    """T41: at n = 4 one failure costs one member, not four."""

    async def main() -> None:
        async with serving(small_config()) as (server, address), generator(address) as client:
            await client.report_version(incarnation=0, policy_version=0)
            await client.request(4)
            lease, prompt_ids = await client.next_lease()
            for member in (0, 1, 3):
                await client.send(make_rollout(lease.uid, member, prompt_ids=prompt_ids))
            await client.fail(Failure(uid=lease.uid, member=2, attempt=0, reason="reward_timeout"))
            await client.request(1)
            refill, _ = await client.next_lease()
            assert (refill.uid, refill.members, refill.attempts) == (lease.uid, (2,), (1,))
            await client.send(make_rollout(lease.uid, 2, 1, prompt_ids=prompt_ids))
            await until(lambda: server.buffer.stats().buffered == 1)
            assert (await server.stats()).failed_members == {"reward_timeout": 1}
            assert client.outcomes == {"accepted": 4, "failed": 1}

    run(main())


def test_a_greedy_member_is_leased_with_the_others_and_reaches_the_learner_beside_them() -> None:
    async def main() -> None:
        config = small_config(algorithm={"advantage": "remax"}, buffer={"max_staleness": 0})
        async with serving(config) as (server, address), generator(address) as client, learner(address) as rank:
            stand_in = StandInGenerator(client)
            running = asyncio.create_task(stand_in.run())
            shard = await sample(rank, 0)
            assert shard is not None and shard.num_rollouts == 16
            assert shard.num_response_tokens == sum(len(r.response_ids) for g in shard.groups for r in g.rollouts)
            for group in shard.groups:
                assert [r.member for r in group.rollouts] == [0, 1, 2, 3]
                assert group.baseline is not None and group.baseline.member == 4
            stats = await server.stats()
            assert stats.generated_rollouts["trained"] == 20 and stats.rejected_rollouts == {}
            running.cancel()

    run(main())


def test_a_group_that_is_given_up_is_cancelled_everywhere_and_its_late_results_are_acknowledged() -> None:
    async def main() -> None:
        config = small_config(buffer={"max_attempts": 1})
        async with (
            serving(config) as (server, address),
            generator(address, "generator-0") as a,
            generator(address, "generator-1") as b,
        ):
            await a.report_version(incarnation=0, policy_version=0)
            await b.report_version(incarnation=0, policy_version=0)
            await a.request(2)  # nothing held and less than a group: it gets a part
            part, prompt_ids = await a.next_lease()
            assert part.members == (0, 1)
            await b.request(2)
            rest, _ = await b.next_lease()
            assert (rest.uid, rest.members) == (part.uid, (2, 3))
            await a.fail(Failure(uid=part.uid, member=0, attempt=0, reason="engine_error"))
            assert await asyncio.wait_for(b.next_cancel(), 5) == part.uid
            assert await asyncio.wait_for(a.next_cancel(), 5) == part.uid
            await b.send(make_rollout(rest.uid, 2, prompt_ids=prompt_ids))
            await until(lambda: b.unacknowledged == 0)
            assert b.outcomes == {"rejected": 1}
            stats = await server.stats()
            assert stats.discarded == {"failed": 1} and balanced(stats)
            assert stats.rejected_rollouts == {"late": 1}

    run(main())


def test_t2_a_straggler_is_cancelled_at_its_deadline_and_its_slot_is_given_back() -> None:
    async def main() -> None:
        config = small_config(buffer={"group_deadline_s": 0.2, "max_staleness": 0}, learner={"groups_per_step": 1})
        async with serving(config) as (server, address), generator(address) as client:
            await client.report_version(incarnation=0, policy_version=0)
            await client.request(8)
            lease, _ = await client.next_lease()  # and it never answers
            assert await asyncio.wait_for(client.next_cancel(), 5) == lease.uid
            following, _ = await client.next_lease()
            assert following.uid != lease.uid
            assert server.buffer.stats().discarded == {"straggler": 1}

    run(main())


def test_groups_that_became_too_stale_in_flight_are_cancelled() -> None:
    async def main() -> None:
        async with serving(small_config()) as (_, address), generator(address) as client, learner(address) as trainer:
            await client.report_version(incarnation=0, policy_version=0)
            await client.request(4)
            lease, prompt_ids = await client.next_lease()
            await client.send(make_rollout(lease.uid, 0, prompt_ids=prompt_ids))
            await until(lambda: client.unacknowledged == 0)
            await asyncio.to_thread(trainer.advance, 3, commit=True)
            assert await asyncio.wait_for(client.next_cancel(), 5) == lease.uid

    run(main())


def test_a_cancelled_lease_that_was_not_taken_yet_is_never_handed_out_and_its_credit_comes_back() -> None:
    async def main() -> None:
        config = small_config(buffer={"group_deadline_s": 0.1, "max_staleness": 0}, learner={"groups_per_step": 1})
        async with serving(config) as (_, address), generator(address) as client:
            await client.report_version(incarnation=0, policy_version=0)
            await client.request(4)
            assert await asyncio.wait_for(client.next_cancel(), 5) == "0-000000"
            lease, _ = await asyncio.wait_for(client.next_lease(), 5)
            assert lease.uid != "0-000000"

    run(main())


def test_a_malformed_rollout_is_counted_and_its_member_generated_again() -> None:
    async def main() -> None:
        async with serving(small_config()) as (server, address), generator(address) as client:
            await client.report_version(incarnation=0, policy_version=0)
            await client.request(4)
            lease, _ = await client.next_lease()
            poison = np.array([np.nan] * 5, dtype=np.float32)
            await client.send(make_rollout(lease.uid, 1, old_log_probs=poison))
            await until(lambda: client.unacknowledged == 0)
            assert client.outcomes == {"rejected": 1}
            await client.request(1)
            refill, _ = await client.next_lease()
            assert (refill.uid, refill.members, refill.attempts) == (lease.uid, (1,), (1,))
            await client._connection.send([b"\xc1 no header at all"])
            await client._connection.send([b"", b"", b""])
            await until(lambda: server._malformed["generator-0"] == 3)
            assert (await server.stats()).rejected_rollouts == {"malformed": 3}

    run(main())


def test_a_malformed_rollout_does_not_take_what_was_sent_with_it() -> None:
    async def main() -> None:
        async with serving(small_config()) as (server, address), generator(address) as client:
            await client.report_version(incarnation=0, policy_version=0)
            await client.request(4)
            lease, prompt_ids = await client.next_lease()
            poison = np.array([np.nan] * 5, dtype=np.float32)
            for member, changes in enumerate([{}, {"old_log_probs": poison}, {}]):
                await client.send(make_rollout(lease.uid, member, prompt_ids=prompt_ids, **changes))
            await client.fail(Failure(uid=lease.uid, member=3, attempt=0, reason="reward_timeout"))
            await client.send(make_rollout(lease.uid, 0, prompt_ids=prompt_ids))
            await until(lambda: client.unacknowledged == 0)
            assert client.outcomes == {"accepted": 2, "rejected": 1, "failed": 1, "duplicate": 1}
            await client.request(2)
            refill, _ = await client.next_lease()
            assert (refill.uid, refill.members, refill.attempts) == (lease.uid, (1, 3), (1, 1))
            stats = await server.stats()
            assert stats.failed_members == {"malformed": 1, "reward_timeout": 1}
            assert stats.rejected_rollouts == {"malformed": 1} and stats.inserted_rollouts == 2

    run(main())


def test_rollouts_that_are_ready_together_are_one_message_and_one_answer() -> None:
    async def main() -> None:
        async with serving(small_config()) as (server, address), generator(address) as client:
            deliveries = []
            insert_many = server.buffer.insert_many
            server.buffer.insert_many = lambda r, **k: deliveries.append(len(r)) or insert_many(r, **k)  # type: ignore[method-assign,func-returns-value]
            for i in range(50):
                await client.send(make_rollout(f"mine-{i}"))
            await until(lambda: client.unacknowledged == 0)
            assert deliveries == [50]
            big = client_module.DELIVERY_BYTES // 16
            for i in range(3):
                await client.send(make_rollout(f"big-{i}", length=big))  # two do not fit into one message
                await client.send(make_rollout(f"small-{i}"))
            assert len(client._sent) == 2, "a full message is under way before the caller waits for anything"
            await until(lambda: client.unacknowledged == 0)
            assert sum(deliveries) == 56 and client.outcomes == {"rejected": 56}

    run(main())


def test_t27_a_flood_of_rollouts_that_nobody_asked_for_is_refused_and_counted() -> None:
    async def main() -> None:
        async with serving(small_config()) as (server, address), generator(address) as client:
            for i in range(3000):
                await client.send(make_rollout(f"mine-{i}"))
            await until(lambda: client.unacknowledged == 0, limit_s=10)
            stats = await server.stats()
            assert stats.rejected_rollouts == {"unknown_uid": 3000} and stats.num_bytes == 0
            assert client.outcomes == {"rejected": 3000}

    run(main())


@pytest.mark.timeout(300)
def test_a_hundred_thousand_mutated_messages_are_each_counted_and_the_server_goes_on_serving(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Mutated, replayed and random messages over a real connection, some of them about a member that is wanted."""
    rng = random.Random(0)
    process = psutil.Process()

    async def main() -> None:
        async with serving(small_config()) as (server, address), generator(address, "mad") as mad:
            await mad.report_version(incarnation=0, policy_version=0)
            await mad.request(4)
            lease, _ = await mad.next_lease()
            wanted = [received(wire.encode_rollout(make_rollout(lease.uid, m, generator="mad"))) for m in range(2)]
            originals = [*wanted, received(wire.encode_rollout(make_rollout("nobody's", reward_parts={"a": 1.0})))]

            async def counted() -> int:
                stats = await server.stats()
                return sum(stats.rejected_rollouts.values()) + stats.duplicate_rollouts + stats.inserted_rollouts

            async def send(count: int) -> None:
                start = await counted()
                for sent in range(count):
                    frames = rng.choice(originals)
                    chance = rng.random()
                    if chance < 0.8:
                        frames = mutated(frames, rng)
                    elif chance < 0.9:
                        frames = [rng.randbytes(rng.randrange(60)) for _ in range(rng.randint(1, 5))]
                    assert await mad._connection.send(frames), "the server cut the link"
                    if sent % 500 == 499:
                        await mad_until(start + sent + 1)
                await mad_until(start + count)

            async def mad_until(count: int) -> None:
                deadline = time.monotonic() + 10
                while await counted() < count:
                    assert time.monotonic() < deadline, (count, await counted())
                    await asyncio.sleep(0.001)
                assert await counted() == count

            await send(5_000)
            before = process.memory_info().rss
            await send(95_000)
            assert process.memory_info().rss - before < 32 << 20
            stats = await server.stats()
            assert set(stats.rejected_rollouts) == {"malformed", "unknown_uid"}
            assert 2 <= stats.inserted_rollouts <= 4  # a flipped bit may name another member that is wanted
            assert stats.rejected_rollouts["malformed"] > 70_000
            assert len([r for r in caplog.records if "dropped" in r.message]) == 1
            async with generator(address) as client, learner(address) as trainer:
                task = asyncio.create_task(StandInGenerator(client).run())
                assert await sample(trainer, 0) is not None
                task.cancel()

    asyncio.run(asyncio.wait_for(main(), 240))


def test_a_server_is_started_once() -> None:
    async def main() -> None:
        async with serving(small_config()) as (server, _):
            with pytest.raises(RuntimeError, match="started before"):
                await server.start()

    run(main())


def test_a_killed_generator_process_has_its_members_leased_to_others() -> None:
    async def main() -> None:
        async with serving(small_config()) as (server, address):
            victim = subprocess.Popen(
                [sys.executable, str(pathlib.Path(stand_ins.__file__)), "mute_generator", address, "generator-0"],
                stdout=subprocess.PIPE,
                text=True,
            )
            try:
                assert victim.stdout is not None
                uid = (await asyncio.to_thread(victim.stdout.readline)).strip()
                assert server.leases.num_held("generator-0") == 8
                victim.send_signal(signal.SIGKILL)
                killed_at = time.monotonic()
                async with generator(address, "generator-1") as client:
                    await client.report_version(incarnation=0, policy_version=0)
                    await client.request(1000)
                    refills = {}
                    while len(refills) < 2:
                        lease, _ = await asyncio.wait_for(client.next_lease(), 5)
                        if set(lease.attempts) == {1}:
                            refills[lease.uid] = lease.members
                    assert time.monotonic() - killed_at < 3
                    assert refills == {uid: (0, 1, 2, 3), "0-000001": (0, 1, 2, 3)}
                    assert (await server.stats()).failed_members == {"generator_lost": 8}
            finally:
                victim.kill()
                victim.wait()
                victim.stdout.close()

    run(main())


def test_the_end_of_the_data_reaches_every_rank_and_what_is_left_stays_buffered() -> None:
    async def main() -> None:
        config = small_config(learner={"ranks": 2})
        async with (
            serving(config, CountingSource(6)) as (server, address),
            generator(address) as client,
            learner(address, 0, 2) as rank_0,
            learner(address, 1, 2) as rank_1,
        ):
            worker = StandInGenerator(client, concurrency=64)
            task = asyncio.create_task(worker.run())
            assert all(await asyncio.gather(sample(rank_0, 0), sample(rank_1, 0)))
            await asyncio.to_thread(rank_0.advance, 1, commit=True)
            assert await asyncio.gather(sample(rank_0, 1), sample(rank_1, 1)) == [None, None]
            stats = await server.stop(reason="end_of_data", final_version=1)
            assert (stats.trained, stats.buffered, stats.in_flight) == (4, 2, 0)
            await task

    run(main())


def test_stop_ends_every_wait_of_every_client_within_a_second() -> None:
    async def main() -> None:
        async with (
            serving(small_config()) as (server, address),
            generator(address) as client,
            learner(address) as trainer,
        ):
            waits = [asyncio.create_task(client.next_lease()), asyncio.create_task(client.next_cancel())]
            waiting = sample(trainer, 0, timeout_s=60)
            await until(lambda: bool(server._desk._waiting))
            start = time.monotonic()
            await server.stop(reason="max_steps", final_version=0)
            for wait in waits:
                with pytest.raises(ClosedError, match="max_steps"):
                    await wait
            with pytest.raises(ClosedError, match="max_steps"):
                await client.send(make_rollout())
            assert await waiting is None
            assert await sample(trainer, 0) is None
            await asyncio.to_thread(trainer.advance, 1, commit=True)
            await client.close(timeout_s=5)
            await asyncio.to_thread(trainer.close)
            assert time.monotonic() - start < 1

    run(main())


def test_stop_takes_back_the_batch_of_an_unfinished_step_and_discards_what_is_in_flight() -> None:
    async def main() -> None:
        async with (
            serving(small_config()) as (server, address),
            generator(address) as client,
            learner(address) as trainer,
        ):
            task = asyncio.create_task(StandInGenerator(client, concurrency=64).run())
            assert await sample(trainer, 0) is not None
            await asyncio.to_thread(trainer.advance, 1, commit=True)
            assert await sample(trainer, 1) is not None
            task.cancel()
            await client.report_version(incarnation=0, policy_version=1)
            await until(lambda: server.buffer.stats().in_flight > 0)
            stats = await server.stop(reason="interrupted", final_version=1)
            assert stats.trained == 4 and balanced(stats)
            assert stats.in_flight == 0 and stats.discarded["interrupted"] > 0

    run(main())


def test_stop_inside_a_streamed_step_gives_its_groups_back() -> None:
    async def main() -> None:
        async with (
            serving(small_config(learner={"stream_groups": 1})) as (server, address),
            generator(address) as client,
            learner(address) as trainer,
        ):
            task = asyncio.create_task(StandInGenerator(client, concurrency=64).run())
            for chunk in range(4):
                assert await sample(trainer, 0, chunk=chunk) is not None
            await asyncio.to_thread(trainer.advance, 1, commit=True)
            for chunk in range(2):
                assert await sample(trainer, 1, chunk=chunk) is not None
            assert server.buffer.stats().trained == 6
            with pytest.raises(RuntimeError, match="chunk 3 of step 1, of which 2 were handed out"):
                await sample(trainer, 1, chunk=3)
            task.cancel()
            stats = await server.stop(reason="interrupted", final_version=1)
            assert stats.trained == 4 and stats.buffered >= 2 and balanced(stats)
            assert await sample(trainer, 1, chunk=2) is None

    run(main())


@pytest.mark.parametrize("stream_groups", [1, 3])
def test_zero_staleness_makes_progress_in_chunks(stream_groups: int) -> None:
    async def main() -> None:
        config = small_config(learner={"stream_groups": stream_groups}, buffer={"max_staleness": 0})
        async with (
            serving(config) as (server, address),
            generator(address) as client,
            learner(address) as trainer,
        ):
            worker = StandInGenerator(client, concurrency=7)
            task = asyncio.create_task(worker.run())
            for version in range(3):
                for chunk in range(-(-4 // stream_groups)):
                    shard = await sample(trainer, version, chunk=chunk)
                    assert shard is not None and all(g.min_version == version for g in shard.groups)
                assert shard.is_last and shard.num_groups == 4
                await asyncio.to_thread(trainer.advance, version + 1, commit=True)
                await worker.report(version + 1)
            assert server.buffer.stats().trained == 12
            task.cancel()

    run(main())


def test_closing_a_learner_client_from_another_thread_ends_its_wait() -> None:
    async def main() -> None:
        async with serving(small_config()) as (server, address), learner(address) as trainer:
            waiting = sample(trainer, 0, timeout_s=60)
            await until(lambda: bool(server._desk._waiting))
            await asyncio.to_thread(trainer.close)
            with pytest.raises(ClosedError):
                await waiting

    run(main())


def test_the_deadline_of_sample_says_who_waited_for_what() -> None:
    async def main() -> None:
        async with serving(small_config()) as (server, address), learner(address) as trainer:
            with pytest.raises(
                DeadlineExceededError, match=r"learner-0 waited 0.1 s for its shard of step 0 .* link is up"
            ):
                await sample(trainer, 0, timeout_s=0.1)
            waits = (await server.stats()).waits
            assert [(w.waiter, w.waiting_for, w.owner) for w in waits] == [("learner-0", "4 more groups", "generators")]

    run(main())


def test_a_version_below_the_buffers_and_a_rank_of_another_run_are_refused_with_a_sentence() -> None:
    async def main() -> None:
        async with serving(small_config()) as (server, address), learner(address) as trainer:
            server.buffer.advance(3)
            with pytest.raises(RuntimeError, match=r"version 2 is below the buffer's \(3\)"):
                await sample(trainer, 2)
            other = LearnerClient(address, rank=1, world_size=2, **FAST)
            with pytest.raises(ClosedError, match=r"rank 1 of 2: this run has learner.ranks=1"):
                await asyncio.to_thread(other.connect, timeout_s=5)

    run(main())


@pytest.mark.parametrize("where", ["loopback", "network"])
def test_the_whole_stream_runs_under_curve_and_a_stranger_gets_nothing(where: str) -> None:
    host = "127.0.0.1" if where == "loopback" else own_address()

    async def main() -> None:
        keys, other_run = (
            CurveKeys.make(listeners=["buffer", "learner-0"], others=["generator-0", "generator-1"]) for _ in range(2)
        )
        config = small_config(network={"host": host})
        async with (
            serving(config, curve=keys["buffer"]) as (server, address),
            generator(address, curve=keys["generator-0"]) as client,
            learner(address, curve=keys["learner-0"]) as trainer,
        ):
            task = asyncio.create_task(StandInGenerator(client).run())
            assert await sample(trainer, 0) is not None
            assert address.startswith(f"tcp://{host}:") and (await server.stats()).refused_peers == 0
            for strange_keys in (other_run["generator-1"], None):
                before = server._listener.num_refused
                stranger = GeneratorClient(address, name="generator-1", curve=strange_keys, **FAST)
                with pytest.raises(DeadlineExceededError, match="CURVE"):
                    await stranger.connect(timeout_s=0.3)
                await until(lambda before=before: server._listener.num_refused > before)
            assert (await server.stats()).refused_peers >= 2 and "generator-1" not in server._generators
            task.cancel()

    run(main())


def test_a_peer_of_the_run_cannot_claim_the_name_or_the_rank_of_another() -> None:
    async def main() -> None:
        keys = CurveKeys.make(listeners=["buffer", "learner-0"], others=["generator-0", "generator-1"])
        async with (
            serving(small_config(), curve=keys["buffer"]) as (server, address),
            generator(address, curve=keys["generator-0"]) as client,
        ):
            await client.request(2)
            await until(lambda: server._generators["generator-0"].credit == 2)
            for name in ("generator-0", "learner-0", "nobody"):
                impostor = GeneratorClient(address, name=name, curve=keys["generator-1"], **FAST)
                with pytest.raises(ClosedError, match=rf"name \({name}\): the CURVE keys of this peer are not those"):
                    await impostor.connect(timeout_s=5)
            rank = Connection(address, name="generator-1", curve=keys["generator-1"], **FAST)
            hello = bytes(wire.pack(wire.LearnerHello(rank=0, world_size=1))[0])
            with pytest.raises(ClosedError, match=r"name \(generator-1\): it is not that of learner rank 0"):
                await rank.connect(hello=hello, timeout_s=5)
            assert (await server.stats()).refused_peers == 4 and server._ranks == {}
            assert server._generators["generator-0"].credit == 2, "the one whose name it is goes on undisturbed"

    run(main())


def test_a_server_for_other_hosts_needs_keys() -> None:
    with pytest.raises(ConfigError, match="needs CURVE keys"):
        BufferServer(small_config(network={"host": "192.0.2.77"}), CountingSource())


# -- settings that change while it runs --


def test_a_setting_that_allows_a_batch_ends_the_wait_for_it() -> None:
    async def main() -> None:
        config = small_config(buffer={"min_size": 8})
        async with serving(config) as (server, address), generator(address) as client, learner(address) as trainer:
            await client.report_version(incarnation=0, policy_version=0)
            await client.request(5 * 4)
            for _ in range(5):
                lease, _ = await client.next_lease()
                for member, attempt in zip(lease.members, lease.attempts, strict=True):
                    await client.send(make_rollout(lease.uid, member, attempt))
            waiting = sample(trainer, 0)
            await until(lambda: server.buffer.stats().buffered == 5)
            await asyncio.sleep(0.1)
            assert not waiting.done()
            await server.reconfigure(BufferConfig(min_size=1))
            shard = await asyncio.wait_for(waiting, 5)
            assert shard is not None and len(shard.groups) == 4

    run(main())


def test_more_staleness_makes_room_at_once() -> None:
    async def main() -> None:
        async with serving(small_config()) as (server, address), generator(address) as client:
            task = asyncio.create_task(StandInGenerator(client).run())
            await until(lambda: server.buffer.stats().buffered == 12)
            await server.reconfigure(BufferConfig(max_staleness=4))
            await until(lambda: server.buffer.stats().buffered == 20)
            task.cancel()

    run(main())


def test_a_nearer_deadline_counts_for_groups_that_are_in_flight_already() -> None:
    async def main() -> None:
        async with serving(small_config()) as (server, address), generator(address) as client:
            await client.report_version(incarnation=0, policy_version=0)
            await client.request(4)
            lease, _ = await client.next_lease()
            await asyncio.sleep(0.05)
            await server.reconfigure(BufferConfig(max_staleness=2, group_deadline_s=0.2))
            await server.reconfigure(BufferConfig(max_staleness=2, group_deadline_s=0.1))
            assert await asyncio.wait_for(client.next_cancel(), 2) == lease.uid
            assert (await server.stats()).discarded == {"straggler": 1}

    run(main())


def test_a_smaller_bound_cancels_what_can_no_longer_meet_it() -> None:
    async def main() -> None:
        async with serving(small_config()) as (server, address), generator(address) as client:
            await client.report_version(incarnation=0, policy_version=0)
            await client.request(4)
            lease, _ = await client.next_lease()
            await client.send(make_rollout(lease.uid, 0, version=0))
            await until(lambda: client.unacknowledged == 0)
            server.buffer.advance(2)
            assert await server.reconfigure(BufferConfig(max_staleness=1)) == [lease.uid]
            assert await asyncio.wait_for(client.next_cancel(), 2) == lease.uid

    run(main())


def test_settings_that_contradict_the_others_change_nothing() -> None:
    async def main() -> None:
        async with serving(small_config()) as (server, _):
            with pytest.raises(ConfigError, match=r"buffer.journal \(async\): cannot be changed"):
                await server.reconfigure(BufferConfig(journal="async"))
            with pytest.raises(ConfigError, match=r"buffer.max_groups \(1\)"):
                await server.reconfigure(BufferConfig(max_groups=1, max_staleness=9))
            assert (await server.stats()).max_staleness == 2

    run(main())


# -- capacity --


def test_the_size_limit_paces_generators_and_drops_nothing() -> None:
    async def main() -> None:
        group_bytes = 4 * make_rollout(length=100).num_bytes
        config = small_config(buffer={"max_bytes": 6 * group_bytes, "max_staleness": 100})
        async with serving(config) as (server, address), generator(address) as client, learner(address) as trainer:
            outcomes: collections.Counter[str] = client.outcomes

            def make(*arguments: Any, **changes: Any) -> Any:
                return make_rollout(
                    *arguments, **(changes | {"length": 100, "prompt_ids": np.arange(3, dtype=np.int32)})
                )

            worker = StandInGenerator(client, concurrency=4, make=make)
            task = asyncio.create_task(worker.run())
            await until(lambda: server.buffer.stats().buffered >= 5)
            await asyncio.sleep(0.1)
            assert server.buffer.stats().num_bytes <= 6 * group_bytes
            assert set(outcomes) == {"accepted"}
            for version in range(3):
                assert await sample(trainer, version) is not None
                await asyncio.to_thread(trainer.advance, version + 1, commit=True)
                await worker.report(version + 1)
            assert set(outcomes) == {"accepted"} and server.buffer.stats().discarded == {}
            task.cancel()

    run(main())
