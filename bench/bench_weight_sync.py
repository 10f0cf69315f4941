"""How long a version takes from the learner's memory into a generator, and what of it generation feels.

    memcpy      one copy of the same bytes inside a process
    zmq         the same bytes over a bare ZeroMQ PUSH/PULL pair between two processes, in chunks, copied into an array
    shm, tcp    the backends between two processes: write (the learner's part) and fetch (the generator's, beside
                generation)
    tcp_curve   tcp with the keys of a run

Then a real engine of about 30 MB loads versions through `shm` and `tcp`: fetch, pause (the only time in which
generation stands still), load (inside the pause) and probe. Prints one JSON line: medians of the rounds, the ways
taking turns, and ratios of the one run. `--no-engine` leaves the engine out.

    python -m bench.bench_weight_sync [--mb 270] [--rounds 5] [--no-engine]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import pathlib
import platform
import statistics
import subprocess
import tempfile
import time
from multiprocessing.connection import Connection as Pipe
from typing import Any

import numpy as np
import torch
import zmq

from streamrl.records import WeightUpdate
from streamrl.sockets import CurveKeys
from streamrl.weight_sync.backend import Inlet, InletSettings, Outlet, OutletSettings, make_inlet, make_outlet
from streamrl.weight_sync.tcp import CHUNK_BYTES

BACKENDS = {"shm": "shm", "tcp": "tcp", "tcp_curve": "tcp"}
PROBE = [[1, *range(10, 40)], [1, *range(40, 70)], [1, *range(20, 50)], [1, *range(30, 60)]]

Times = dict[str, list[float]]


def parameters_of(megabytes: int) -> dict[str, torch.Tensor]:
    """272 tensors, as many as a model of 30 layers has."""
    return {f"layers.{i}.weight": torch.randn(megabytes * 1_000_000 // 4 // 272) for i in range(272)}


def outlet_for(way: str, parameters: dict[str, torch.Tensor], curve: CurveKeys | None) -> Outlet:
    outlet = make_outlet(
        BACKENDS[way],
        OutletSettings(
            run_name=f"bench_weight_sync {os.getpid()} {way}",
            rank=0,
            world_size=1,
            parameters=parameters,
            dtype=None,
            bind="tcp://127.0.0.1:0",
            curve=curve if way == "tcp_curve" else None,
        ),
    )
    outlet.start(lambda: None)
    return outlet


def inlet_for(way: str, curve: CurveKeys | None) -> Inlet:
    keys = curve if way == "tcp_curve" else None
    return make_inlet(BACKENDS[way], InletSettings(name="generator-0", curve=keys, timeout_s=120))


def update_for(way: str, payload: dict[str, Any]) -> WeightUpdate:
    fields: dict[str, Any] = {"incarnation": 0, "probe_log_probs": [], "published_at": time.time()}
    return WeightUpdate(policy_version=payload["sequence"], backend=BACKENDS[way], payload=payload, **fields)


def be_the_learner(pipe: Pipe, megabytes: int, curve: CurveKeys) -> None:
    """Answer "write WAY" with (seconds, payload) and "zmq" by sending everything."""
    parameters = parameters_of(megabytes)
    flat = torch.cat(list(parameters.values())).numpy().view(np.uint8)
    outlets = {way: outlet_for(way, parameters, curve) for way in BACKENDS}
    context = zmq.Context()
    push = context.socket(zmq.PUSH)
    push.bind("tcp://127.0.0.1:*")
    pipe.send((flat.nbytes, push.getsockopt_string(zmq.LAST_ENDPOINT)))
    sequence = 0
    while (order := pipe.recv()) != "end":
        if order == "zmq":
            for begin in range(0, flat.nbytes, CHUNK_BYTES):
                push.send(flat[begin : begin + CHUNK_BYTES])
            continue
        sequence += 1
        began = time.perf_counter()
        outlets[order].write(sequence)
        pipe.send((time.perf_counter() - began, outlets[order].payload(sequence)))
    for outlet in outlets.values():
        outlet.close()
    context.destroy(linger=0)


def pull_all(socket: Any, into: Any) -> None:
    position = 0
    while position < into.nbytes:
        chunk = np.frombuffer(socket.recv(copy=False).buffer, dtype=np.uint8)
        into[position : position + len(chunk)] = chunk
        position += len(chunk)


async def transfers(megabytes: int, rounds: int) -> Times:
    keys = CurveKeys.make(listeners=["learner-0"], others=["generator-0"])
    ours, theirs = multiprocessing.get_context("spawn").Pipe()
    process = multiprocessing.get_context("spawn").Process(
        target=be_the_learner, args=(theirs, megabytes, keys["learner-0"])
    )
    process.start()
    times: Times = {}
    context = zmq.Context()
    try:
        num_bytes, address = ours.recv()
        pull = context.socket(zmq.PULL)
        pull.connect(address)
        source, target = np.ones(num_bytes, dtype=np.uint8), np.ones(num_bytes, dtype=np.uint8)
        inlets = {way: inlet_for(way, keys["generator-0"]) for way in BACKENDS}
        for number in range(rounds + 2):  # the first two touch every page for the first time
            timed: dict[str, float] = {}
            began = time.perf_counter()
            np.copyto(target, source)
            timed["memcpy"] = time.perf_counter() - began
            ours.send("zmq")
            began = time.perf_counter()
            pull_all(pull, target)
            timed["zmq"] = time.perf_counter() - began
            for way, inlet in inlets.items():
                ours.send(way)
                timed[f"{way}_write"], payload = ours.recv()
                began = time.perf_counter()
                assert await inlet.fetch(update_for(way, payload)) is not None
                timed[f"{way}_fetch"] = time.perf_counter() - began
            if number >= 2:
                for name, seconds in timed.items():
                    times.setdefault(name, []).append(seconds)
        for inlet in inlets.values():
            await inlet.close()
        ours.send("end")
    finally:
        context.destroy(linger=0)
        process.join(30)
        process.kill()
    return times


def make_model(folder: pathlib.Path) -> dict[str, torch.Tensor]:
    """A Llama of 7.6M parameters, random, in float32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=2048,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=8,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=256,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder)
    return dict(model.named_parameters())


async def loads(rounds: int) -> Times:
    from actors.engine import Engine
    from streamrl.config import config_from_tree

    times: Times = {}
    with tempfile.TemporaryDirectory() as folder:
        parameters = make_model(pathlib.Path(folder))
        tree = {"model": {"max_length": 128}, "weight_sync": {"backend": "shm"}}
        engine = Engine(config_from_tree(tree), model_path=folder)
        await engine.start()
        ways = {way: (outlet_for(way, parameters, None), inlet_for(way, None)) for way in ("shm", "tcp")}
        for number in range(1, rounds + 2):
            for way, (outlet, inlet) in ways.items():
                outlet.write(number)
                steps = [time.perf_counter()]
                payload = await inlet.fetch(update_for(way, outlet.payload(number)))
                assert payload is not None
                steps.append(time.perf_counter())
                await engine.pause()
                steps.append(time.perf_counter())
                await engine.load(payload, label=f"{way}{number}")
                steps.append(time.perf_counter())
                await engine.resume()
                steps.append(time.perf_counter())
                await engine.score(PROBE, request_id=f"probe-{way}-{number}")
                steps.append(time.perf_counter())
                if number > 1:
                    spans = {
                        "fetch": steps[1] - steps[0],
                        "pause": steps[4] - steps[1],
                        "load": steps[3] - steps[2],
                        "probe": steps[5] - steps[4],
                    }
                    for name, seconds in spans.items():
                        times.setdefault(f"engine_{way}_{name}", []).append(seconds)
        for outlet, inlet in ways.values():
            await inlet.close()
            outlet.close()
        await engine.stop()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mb", type=int, default=270)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--no-engine", action="store_true", help="leave out the engine, which takes long to start")
    options = parser.parse_args()
    times = asyncio.run(transfers(options.mb, options.rounds))
    if not options.no_engine:
        times |= asyncio.run(loads(options.rounds))
    medians = {name: statistics.median(values) for name, values in times.items()}
    ratios = {f"{way}_fetch_over_memcpy": medians[f"{way}_fetch"] / medians["memcpy"] for way in BACKENDS}
    ratios |= {f"{way}_fetch_over_zmq": medians[f"{way}_fetch"] / medians["zmq"] for way in ("tcp", "tcp_curve")}
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    print(
        json.dumps(
            {
                "bench": "weight_sync",
                "commit": commit.stdout.strip(),
                "machine": f"{platform.machine()}, {os.cpu_count()} cores",
                "mb": options.mb,
                "rounds": options.rounds,
                "load": round(os.getloadavg()[0], 1),
                "ms": {name: round(1000 * seconds, 1) for name, seconds in medians.items()},
                "ratios": {name: round(ratio, 2) for name, ratio in ratios.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
