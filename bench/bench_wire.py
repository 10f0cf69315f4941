"""How fast one generator's rollouts reach the buffer process, against five other ways to send them.

    ours          GeneratorClient -> Listener: laid out, sent, decoded and checked into Rollouts, acknowledged, with
                  credit; not inserted into a buffer (bench_buffer does that)
    copy          the same bytes, one message a rollout, over a bare PUSH/PULL pair, not looked at: what a bare
                  transport of rollouts is, and the aim's yardstick
    copy_batched  the very frames that ours sends, which are of many rollouts each, over the same pair
    pickle        pickled Rollout objects over the same pair
    lists         msgspec with lists of numbers over the same pair, decoded
    ray           ray.util.queue.Queue, put and get of Rollout objects

Two processes each, over loopback; every way starts from what it sends (arrays, or lists for `lists`; the copies from
frames that were made before the clock starts) and ends with what it would train on. All but ours and `copy_batched`
send one message a rollout. Prints one JSON line: rollouts per second (median of the rounds, the ways taking turns),
the ratios, and the CPU time per rollout of the busier of the two processes: on an idle machine the rate is near its
inverse, on a busy one (see `load`) it says more than the rate. `sent_cpu_us` and `received_cpu_us` are ours on each
side.

    python -m bench.bench_wire [--rounds 5] [--lengths 128 1024 8192] [--no-ray]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from multiprocessing.connection import Connection as Pipe
from typing import Any

import msgspec
import numpy as np
import zmq

from buffers.client import GeneratorClient, portions_of
from buffers.server import WINDOW_BYTES, WINDOW_ROLLOUTS
from streamrl import wire
from streamrl.errors import ClosedError
from streamrl.records import Rollout
from streamrl.transport import Listener

SHARE = {"lists": 0.2, "ray": 0.03}  # of the rollouts; these ways are slow


class ListRollout(msgspec.Struct, array_like=True):
    """A rollout as the systems send it that put lists on the wire."""

    uid: str
    member: int
    attempt: int
    prompt_ids: list[int]
    response_ids: list[int]
    old_log_probs: list[float]
    versions: list[int]
    reward: float
    finish_reason: str
    generator: str


def make_rollouts(length: int, count: int) -> list[Rollout]:
    rng = np.random.default_rng(0)
    return [
        Rollout(
            uid=f"0-{i // 8:06d}",
            member=i % 8,
            attempt=0,
            prompt_ids=rng.integers(0, 50_000, 64, dtype=np.int32),
            response_ids=rng.integers(0, 50_000, length, dtype=np.int32),
            old_log_probs=-rng.random(length, dtype=np.float32),
            versions=np.full(length, 7, dtype=np.int32),
            reward=1.0,
            generator="generator-0",
        )
        for i in range(count)
    ]


# -- receivers: report the address, take `count` messages, report the seconds from the first to the last, CPU seconds -


def receive_ours(pipe: Pipe, count: int) -> None:
    async def main() -> None:
        welcome = bytes(wire.pack(wire.GeneratorWelcome(window_rollouts=WINDOW_ROLLOUTS, window_bytes=WINDOW_BYTES))[0])
        listener = Listener(welcome=lambda name, payload: welcome)
        pipe.send(await listener.start())
        received, start = 0, 0.0
        while received < count:
            for message in await listener.receive_all():
                if message.kind != "data":
                    continue
                body, arrays = wire.TO_BUFFER.unpack(message.frames)
                rollouts = wire.rollouts_from(body, arrays)
                start = start or time.perf_counter()
                received += len(rollouts)
                await listener.send("generator-0", wire.pack(wire.Acks(number=body.number, others=[])))
        pipe.send((time.perf_counter() - start, time.process_time()))
        try:
            while (await listener.receive()).kind != "left":
                pass
        except ClosedError:
            pass
        await listener.close()

    asyncio.run(main())


def receive_plain(pipe: Pipe, count: int, take: Callable[[zmq.Socket[bytes]], Any]) -> None:
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        pipe.send(f"tcp://127.0.0.1:{socket.bind_to_random_port('tcp://127.0.0.1')}")
        take(socket)
        start = time.perf_counter()
        for _ in range(count - 1):
            take(socket)
        pipe.send((time.perf_counter() - start, time.process_time()))


def receive_copy(pipe: Pipe, count: int) -> None:
    receive_plain(pipe, count, lambda socket: socket.recv_multipart())


def receive_pickle(pipe: Pipe, count: int) -> None:
    receive_plain(pipe, count, lambda socket: socket.recv_pyobj())


def receive_lists(pipe: Pipe, count: int) -> None:
    decoder = msgspec.msgpack.Decoder(ListRollout)
    receive_plain(pipe, count, lambda socket: decoder.decode(socket.recv()))


# -- senders ----------------------------------------------------------------------------------------------------------


def send_ours(address: str, rollouts: list[Rollout]) -> None:
    async def main() -> None:
        client = GeneratorClient(address, name="generator-0")
        await client.connect(timeout_s=10)
        for rollout in rollouts:
            await client.send(rollout)
        await client.close(timeout_s=60)

    asyncio.run(main())


def send_plain(address: str, rollouts: list[Any], send: Callable[[zmq.Socket[bytes], Any], Any]) -> None:
    with zmq.Context() as context, context.socket(zmq.PUSH) as socket:
        socket.connect(address)
        for rollout in rollouts:
            send(socket, rollout)


def send_copy(address: str, rollouts: list[list[wire.Frame]]) -> None:
    send_plain(address, rollouts, lambda socket, r: socket.send_multipart(r))


def send_pickle(address: str, rollouts: list[Rollout]) -> None:
    send_plain(address, rollouts, lambda socket, r: socket.send_pyobj(r))


def as_lists(rollouts: list[Rollout]) -> list[ListRollout]:
    return [
        ListRollout(
            r.uid,
            r.member,
            r.attempt,
            r.prompt_ids.tolist(),
            r.response_ids.tolist(),
            r.old_log_probs.tolist(),
            r.versions.tolist(),
            r.reward,
            r.finish_reason,
            r.generator,
        )
        for r in rollouts
    ]


def send_lists(address: str, rollouts: list[ListRollout]) -> None:
    encoder = msgspec.msgpack.Encoder()
    send_plain(address, rollouts, lambda socket, r: socket.send(encoder.encode(r)))


def as_frames(rollouts: list[Rollout]) -> list[list[wire.Frame]]:
    """A message each."""
    return [wire.encode_rollout(rollout) for rollout in rollouts]


def as_deliveries(rollouts: list[Rollout]) -> list[list[wire.Frame]]:
    """The messages that ours makes of them."""
    portions = portions_of([wire.Parcel.of(rollout) for rollout in rollouts])
    return [wire.encode_delivery(portion, number=i) for i, portion in enumerate(portions)]


# what is not part of the way: the rollouts in the form it sends them
PREPARE: dict[str, Callable[[list[Rollout]], list[Any]]] = {
    "ours": list,
    "copy": as_frames,
    "copy_batched": as_deliveries,
    "pickle": list,
    "lists": as_lists,
}
WAYS: dict[str, tuple[Callable[[str, list[Any]], None], Callable[[Pipe, int], None]]] = {
    "ours": (send_ours, receive_ours),
    "copy": (send_copy, receive_copy),
    "copy_batched": (send_copy, receive_copy),
    "pickle": (send_pickle, receive_pickle),
    "lists": (send_lists, receive_lists),
}


def measure(way: str, rollouts: list[Rollout]) -> tuple[float, float, float]:
    """Rollouts per second, and CPU microseconds per rollout of the sender and of the receiver."""
    prepared = PREPARE[way](rollouts)
    # not a child of this process: after a fork, each page of the rollouts that either side touches is copied
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["buffers.client", "buffers.server"])
    ours, theirs = context.Pipe()
    process = context.Process(target=WAYS[way][1], args=(theirs, len(prepared)))
    process.start()
    try:
        address = ours.recv()
        start = time.process_time()
        WAYS[way][0](address, prepared)
        send_s = time.process_time() - start
        seconds, receive_s = ours.recv()
        scale = 1e6 / len(rollouts)
        return len(rollouts) * (1 - 1 / len(prepared)) / seconds, scale * send_s, scale * receive_s
    finally:
        process.join(30)
        process.kill()


def measure_ray(rollouts: list[Rollout]) -> float:
    import ray
    from ray.util.queue import Queue

    @ray.remote
    def take(queue: Queue, count: int) -> float:
        queue.get()
        start = time.perf_counter()
        for _ in range(count - 1):
            queue.get()
        return time.perf_counter() - start

    queue = Queue(maxsize=1024)
    taken = take.remote(queue, len(rollouts))
    for rollout in rollouts:
        queue.put(rollout)
    seconds = float(ray.get(taken))
    queue.shutdown()
    return (len(rollouts) - 1) / seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--lengths", type=int, nargs="+", default=[128, 1024, 8192])
    parser.add_argument("--no-ray", action="store_true", help="leave out Ray, which takes long to start")
    options = parser.parse_args()
    if not options.no_ray:
        import ray

        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    numbers: dict[str, dict[str, float | list[int]]] = {}
    for length in options.lengths:
        num_rollouts = min(20_000, 20_000_000 // length)
        rollouts = make_rollouts(length, num_rollouts)
        rates: dict[str, list[float]] = {}
        costs: dict[str, list[tuple[float, float]]] = {}  # of the sender and of the receiver
        for _ in range(options.rounds):
            for way in WAYS:
                count = max(100, int(num_rollouts * SHARE.get(way, 1.0)))
                rate, *cost = measure(way, rollouts[:count])
                rates.setdefault(way, []).append(rate)
                costs.setdefault(way, []).append((cost[0], cost[1]))
            if not options.no_ray:
                count = max(100, int(num_rollouts * SHARE["ray"]))
                rates.setdefault("ray", []).append(measure_ray(rollouts[:count]))
        medians = {way: statistics.median(values) for way, values in rates.items()}
        numbers[str(length)] = {f"{way}_per_s": round(rate) for way, rate in medians.items()} | {
            f"ours_over_{way}": round(medians["ours"] / rate, 2) for way, rate in medians.items() if way != "ours"
        }
        numbers[str(length)]["ours_spread_per_s"] = [round(min(rates["ours"])), round(max(rates["ours"]))]
        cpu_us = {way: statistics.median(map(max, values)) for way, values in costs.items()}
        numbers[str(length)] |= {f"{way}_cpu_us": round(cost, 1) for way, cost in cpu_us.items()}
        numbers[str(length)] |= {
            f"{way}_cpu_over_ours": round(cost / cpu_us["ours"], 2) for way, cost in cpu_us.items() if way != "ours"
        }
        for side, values in zip(("sent", "received"), zip(*costs["ours"], strict=True), strict=True):
            numbers[str(length)][f"{side}_cpu_us"] = round(statistics.median(values), 1)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(
        json.dumps(
            {
                "bench": "wire",
                "commit": commit.stdout.strip(),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "rounds": options.rounds,
                "load": round(os.getloadavg()[0], 1),
                "rollouts_by_length": numbers,
            }
        )
    )


if __name__ == "__main__":
    main()
