"""Two learner ranks in processes of their own, with the real buffer server, clients, sockets and weight channel."""

from __future__ import annotations

import asyncio
import multiprocessing
import pathlib
import socket
from multiprocessing.connection import Connection
from typing import Any

import pytest
from stand_ins import CountingSource, StandInGenerator, small_config
from test_trainer import save_model

from buffers.client import GeneratorClient
from buffers.server import BufferServer
from streamrl.config import Config
from streamrl.errors import ClosedError
from streamrl.weight_sync.channel import WeightSubscriber

RUN_NAME = "test-learner-ranks"


def serve_rank(pipe: Connection, config: Config, rank: int, folder: str, master: str, address: str) -> None:
    """A learner rank that does what it is told over the pipe, as Ray would tell it."""
    from actors.learner import Learner

    async def main() -> None:
        learner = Learner(
            config, rank=rank, world_size=2, incarnation=0, model_path=folder, master=master, run_name=RUN_NAME
        )
        running: asyncio.Task[int] | None = None
        pipe.send(await learner.start(address))
        while True:
            order = await asyncio.to_thread(pipe.recv)
            if order == "run":
                running = asyncio.create_task(learner.run())
            elif order == "stop":
                await learner.stop()
            elif order == "result":
                assert running is not None
                version = await running
                records = []
                while rank == 0 and (record := await learner.next_record()) is not None:
                    records.append(record)
                pipe.send((version, records))
            else:
                await learner.close()
                pipe.send("closed")
                return

    asyncio.run(main())


class TwoRanks:
    """Both processes, and the pipes to them."""

    def __init__(self, config: Config, folder: pathlib.Path, address: str) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            master = f"127.0.0.1:{probe.getsockname()[1]}"
        context = multiprocessing.get_context("spawn")
        self.pipes, self.processes = [], []
        for rank in range(2):
            ours, theirs = context.Pipe()
            process = context.Process(target=serve_rank, args=(theirs, config, rank, str(folder), master, address))
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def tell(self, order: str) -> None:
        for pipe in self.pipes:
            pipe.send(order)

    async def answers(self) -> list[Any]:
        return await asyncio.gather(*(asyncio.to_thread(pipe.recv) for pipe in self.pipes))

    def end(self) -> None:
        for process in self.processes:
            process.join(10)
            process.kill()
            process.join()


@pytest.mark.parametrize(("ending", "stream_groups"), [("end of data", 0), ("stop", 0), ("stop", 1)])
def test_two_ranks_train_together_and_end_together(ending: str, stream_groups: int, tmp_path: pathlib.Path) -> None:
    """With one group at a time one of the ranks has none of it and still joins."""
    folder = save_model(tmp_path / "model")
    config = small_config(run={"max_steps": 1000}, learner={"ranks": 2, "stream_groups": stream_groups})
    source = CountingSource(12 if ending == "end of data" else 100_000)

    async def main() -> None:
        server = BufferServer(config, source)
        address = await server.start()
        serving = asyncio.create_task(server.run())
        ranks = TwoRanks(config, folder, address)
        try:
            started = await ranks.answers()
            assert started[1] == {}
            subscriber = WeightSubscriber(started[0]["weight_address"], name="generator-0")
            await subscriber.connect(timeout_s=10)
            client = GeneratorClient(address, name="generator-0")
            await client.connect(timeout_s=10)
            generator = StandInGenerator(client)
            seen: list[int] = []

            async def follow() -> None:
                while True:
                    seen.append((await subscriber.next()).policy_version)
                    await generator.report(seen[-1])

            tasks = [asyncio.create_task(generator.run()), asyncio.create_task(follow())]
            ranks.tell("run")
            if ending == "stop":
                while not seen or seen[-1] < 2:
                    await asyncio.sleep(0.02)
                ranks.tell("stop")
            ranks.tell("result")
            (version, records), (other_version, _) = await ranks.answers()
            assert version == other_version
            assert version >= 2 if ending == "stop" else version == 3
            assert [r["step"] for r in records] == list(range(1, version + 1))
            assert all(r["offpolicy/staleness/max"] <= config.buffer.max_staleness for r in records)
            stats = await server.stop(reason="run_ended", final_version=version)
            assert stats.trained == version * config.learner.groups_per_step
            assert stats.issued == stats.in_flight + stats.buffered + stats.trained + sum(stats.discarded.values())
            ranks.tell("close")
            assert await ranks.answers() == ["closed", "closed"]
            with pytest.raises(ClosedError):
                await asyncio.wait_for(tasks[1], 10)
            assert seen[0] == 0 and seen == sorted(set(seen))
            tasks[0].cancel()
            await client.close(timeout_s=2)
            await subscriber.close()
            await asyncio.wait_for(serving, 10)
        finally:
            ranks.end()
        assert not list(pathlib.Path("/dev/shm").glob(f"*{RUN_NAME}*"))

    asyncio.run(asyncio.wait_for(main(), 120))
