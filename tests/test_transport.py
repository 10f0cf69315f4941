"""Listener and Connection over real sockets: sessions, heartbeats, reconnect, CURVE, limits, teardown."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from streamrl import transport, wire
from streamrl.errors import ClosedError, ConfigError, DeadlineExceededError
from streamrl.transport import Connection, CurveKeys, Listener, Message

FAST: dict[str, float] = {"heartbeat_s": 0.05, "peer_timeout_s": 0.4}


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


@asynccontextmanager
async def listening(**options: Any) -> AsyncIterator[tuple[Listener, str]]:
    listener = Listener(**(FAST | options))
    address = await listener.start()
    try:
        yield listener, address
    finally:
        await listener.close()


@asynccontextmanager
async def connected(address: str, name: str = "peer", **options: Any) -> AsyncIterator[Connection]:
    connection = Connection(address, name=name, **(FAST | options))
    await connection.connect(hello=b"hello", timeout_s=5)
    try:
        yield connection
    finally:
        await connection.close()


@asynccontextmanager
async def raw_socket(address: str) -> AsyncIterator[zmq.asyncio.Socket]:
    """A DEALER that follows no protocol but ZeroMQ's."""
    with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(address)
        yield socket


def hello_of(name: str) -> bytes:
    return b"H" + wire.pack(wire.Hello(name=name, life="1", payload=b""))[0]


async def next_kind(end: Listener | Connection, kind: str) -> Message:
    message = await asyncio.wait_for(end.receive(), 5)
    assert message.kind == kind, message
    return message


async def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 5
    while not condition():
        assert time.monotonic() < deadline, "the condition was not met in time"
        await asyncio.sleep(0.005)


async def kill(listener: Listener) -> None:
    """As the death of its process: the socket is gone and nobody said goodbye."""
    await transport._cancel(listener._tasks)
    await listener._free()


def test_the_handshake_carries_a_hello_and_a_welcome() -> None:
    async def main() -> None:
        async with listening(welcome=lambda name, payload: name.encode() + b"/" + payload) as (listener, address):
            connection = Connection(address, name="generator-0", **FAST)
            assert await connection.connect(hello=b"v3", timeout_s=5) == b"generator-0/v3"
            joined = await next_kind(listener, "joined")
            assert (joined.peer, joined.frames) == ("generator-0", [b"v3"])
            await connection.close()

    run(main())


def test_messages_of_a_session_arrive_complete_and_in_order_both_ways() -> None:
    async def main() -> None:
        async with listening() as (listener, address), connected(address) as connection:
            await next_kind(listener, "joined")
            for i in range(500):
                assert await connection.send([b"up", str(i).encode(), b""])
                assert await listener.send("peer", [b"down", str(i).encode()])
            for i in range(500):
                assert (await next_kind(listener, "data")).frames == [b"up", str(i).encode(), b""]
                assert (await next_kind(connection, "data")).frames == [b"down", str(i).encode()]

    run(main())


def test_the_connect_deadline_says_where_and_what_it_waited_for() -> None:
    async def main() -> None:
        start = time.monotonic()
        with pytest.raises(
            DeadlineExceededError,
            match=r"generator-0 waited 0.2 s for the handshake of tcp://127.0.0.1:9: nobody answers there",
        ):
            await Connection("tcp://127.0.0.1:9", name="generator-0", **FAST).connect(timeout_s=0.2)
        assert time.monotonic() - start < 1

        with socket.create_server(("127.0.0.1", 0)) as silent:
            address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
            with pytest.raises(DeadlineExceededError, match="the port is open, but no welcome came"):
                await Connection(address, name="generator-0", **FAST).connect(timeout_s=0.3)

    run(main())


def test_what_is_no_address_is_refused_at_once() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match=r"address \(localhost\): .* An address is tcp://HOST:PORT"):
            await Connection("localhost", name="generator-0", **FAST).connect(timeout_s=5)

    run(main())


def test_a_refused_peer_gets_the_sentence() -> None:
    def welcome(name: str, payload: bytes) -> bytes:
        raise ConfigError("rank 2 of 3: this run has learner.ranks=2")

    async def main() -> None:
        async with listening(welcome=welcome) as (listener, address):
            with pytest.raises(ClosedError, match=r"refused learner-2: rank 2 of 3: this run has learner.ranks=2"):
                await Connection(address, name="learner-2", **FAST).connect(timeout_s=5)
            assert listener.num_refused == 1

    run(main())


def test_a_peer_of_another_schema_version_is_refused_with_a_sentence() -> None:
    async def main() -> None:
        async with listening() as (listener, address), raw_socket(address) as raw:
            await raw.send(b"H" + msgspec.msgpack.encode([99, "Hello", [], {"all": "new"}]))
            sentence = await raw.recv()
            assert sentence.startswith(b"R")
            assert b"wire schema 99, this process speaks 2" in sentence
            assert listener.num_refused == 1

    run(main())


def test_a_connection_reconnects_by_itself_when_the_listener_is_killed_and_comes_back() -> None:
    async def main() -> None:
        listener = Listener(**FAST)
        address = await listener.start()
        says = iter([b"first", b"second", b"third"])
        connection = Connection(address, name="peer", **FAST)
        await connection.connect(hello=lambda: next(says), timeout_s=5)
        await kill(listener)
        assert "broke" in (await next_kind(connection, "left")).reason
        assert not await connection.send([b"nobody is there"])
        async with listening(bind=address, welcome=lambda name, payload: b"again") as (listener, _):
            assert (await next_kind(connection, "joined")).frames == [b"again"]
            joined = await next_kind(listener, "joined")
            assert joined.frames[0] in (b"second", b"third")
            assert await connection.send([b"here I am"])
            assert (await next_kind(listener, "data")).frames == [b"here I am"]
            await connection.close()

    run(main())


def test_a_silent_peer_has_left_and_has_to_start_again() -> None:
    async def main() -> None:
        async with listening() as (listener, address), raw_socket(address) as raw:
            await raw.send(hello_of("frozen"))
            await next_kind(listener, "joined")
            start = time.monotonic()
            left = await next_kind(listener, "left")
            assert left.peer == "frozen" and "silent" in left.reason
            assert 0.3 < time.monotonic() - start < 1.5
            assert not await listener.send("frozen", [b"x"])
            await raw.send(b"DI was only asleep")
            while (answer := await raw.recv()) != b"X":
                assert answer in (b"W", b"B")

    run(main())


def test_a_silent_listener_is_left_and_joined_anew() -> None:
    async def main() -> None:
        async with listening() as (listener, address), connected(address) as connection:
            beat = listener._tasks[1]
            beat.cancel()  # it lives, but says nothing any more
            assert "silent" in (await next_kind(connection, "left")).reason
            await next_kind(connection, "joined")
            assert [(await next_kind(listener, "joined")).peer for _ in range(2)] == ["peer", "peer"]

    run(main())


def test_a_killed_peer_has_left_within_a_few_heartbeats_and_a_goodbye_at_once() -> None:
    async def main() -> None:
        async with listening(peer_timeout_s=60.0) as (listener, address):
            async with connected(address, "polite"):
                await next_kind(listener, "joined")
            assert (await next_kind(listener, "left")).reason == "goodbye"
            async with raw_socket(address) as raw:
                await raw.send(hello_of("killed"))
                await next_kind(listener, "joined")
            start = time.monotonic()
            assert (await next_kind(listener, "left")).peer == "killed"
            assert time.monotonic() - start < 1

    run(main())


def test_a_newer_process_of_the_same_name_replaces_the_older_one() -> None:
    async def main() -> None:
        async with listening() as (listener, address), connected(address, "generator-0") as old:
            await next_kind(listener, "joined")
            async with connected(address, "generator-0") as new:
                assert "replaced by a newer process" in (await next_kind(listener, "left")).reason
                await next_kind(listener, "joined")
                with pytest.raises(ClosedError, match="replaced by a newer process"):
                    await asyncio.wait_for(old.receive(), 5)
                await listener.send("generator-0", [b"to the new one"])
                assert (await next_kind(new, "data")).frames == [b"to the new one"]

    run(main())


def test_a_stall_of_this_process_is_not_taken_for_the_silence_of_its_peers() -> None:
    async def main() -> None:
        async with listening() as (listener, address), connected(address) as connection:
            await next_kind(listener, "joined")
            for _ in range(3):
                time.sleep(0.5)  # longer than peer_timeout_s
                await asyncio.sleep(0.06)
            await connection.send([b"still here"])
            assert (await next_kind(listener, "data")).frames == [b"still here"]

    run(main())


def test_a_listener_that_is_not_read_holds_a_bounded_number_of_messages_and_loses_none() -> None:
    async def main() -> None:
        async with listening() as (listener, address), connected(address) as connection:
            for i in range(3 * transport.INBOX_MESSAGES):
                assert await connection.send([str(i).encode()])
            await asyncio.sleep(0.6)  # longer than peer_timeout_s
            assert len(listener._inbox) <= transport.INBOX_MESSAGES + 1
            await next_kind(listener, "joined")
            for i in range(3 * transport.INBOX_MESSAGES):
                assert (await next_kind(listener, "data")).frames == [str(i).encode()]

    run(main())


def test_only_the_keys_of_the_run_are_let_in_and_strangers_are_counted() -> None:
    keys, other = (CurveKeys.make(listeners=["buffer"], others=["one of us"]) for _ in range(2))
    server_public = keys["buffer"].server_public
    strangers = {
        "without keys": None,
        "of another run": other["one of us"],
        "that knows only the public server key": msgspec.structs.replace(
            other["one of us"], server_public=server_public
        ),
    }

    async def main() -> None:
        async with listening(curve=keys["buffer"]) as (listener, address):
            for name, curve in strangers.items():
                refused = listener.num_refused
                with pytest.raises((ClosedError, DeadlineExceededError), match="CURVE"):
                    await Connection(address, name=name, curve=curve, **FAST).connect(timeout_s=0.4)
                assert listener.num_refused > refused, name
            async with connected(address, "one of us", curve=keys["one of us"]) as connection:
                await connection.send([b"secret"])
                assert (await next_kind(listener, "joined")).peer == "one of us"
                assert (await next_kind(listener, "data")).frames == [b"secret"]

    run(main())


def test_a_routing_id_is_worth_nothing_without_the_keys_of_its_peer() -> None:
    keys = CurveKeys.make(listeners=["buffer"], others=["generator-0", "generator-1"])

    async def main() -> None:
        async with (
            listening(curve=keys["buffer"]) as (listener, address),
            connected(address, "generator-0", curve=keys["generator-0"]),
        ):
            own = listener._peers["generator-0"].routing_id
            for key, taken in ((keys["generator-1"].client_public, 0), (keys["generator-0"].client_public, 1)):
                assert len(listener._handle(own, [b"Dforged"], key)) == taken

    run(main())


def test_keys_do_not_reach_a_log() -> None:
    keys = CurveKeys.make(listeners=["buffer"])
    said = repr(keys) + str(keys["buffer"]) + f"{[keys]}"
    assert keys["buffer"].server_secret not in said and keys["buffer"].client_secret not in said


@pytest.mark.parametrize(
    "bind", ["tcp://0.0.0.0:0", "tcp://*:0", "tcp://192.168.0.1:5000", "tcp://127.0.0.1.evil.org:1"]
)
def test_other_hosts_are_let_in_only_with_keys(bind: str) -> None:
    with pytest.raises(ConfigError, match="needs CURVE keys"):
        Listener(bind=bind)
    Listener(bind=bind, curve=CurveKeys.make(listeners=["buffer"])["buffer"])


def test_a_listener_is_started_once() -> None:
    async def main() -> None:
        listener = Listener()
        address = await listener.start()
        with pytest.raises(RuntimeError, match="started before"):
            await listener.start()
        connection = Connection(address, name="a")
        await connection.connect(timeout_s=5)
        await connection.close()
        await listener.close()

    run(main())


def test_an_address_in_use_is_refused_at_start_and_leaks_nothing() -> None:
    async def main() -> None:
        async with listening() as (_, address):
            with pytest.raises(ConfigError, match=rf"bind \({address}\): Address already in use"):
                await Listener(bind=address).start()

    run(main())


def test_a_frame_above_the_limit_costs_its_sender_the_connection_and_nobody_else() -> None:
    async def main() -> None:
        async with listening(max_frame_bytes=10_000) as (listener, address), connected(address, "small") as small:
            await next_kind(listener, "joined")
            async with raw_socket(address) as raw:
                monitor = raw.get_monitor_socket(zmq.EVENT_DISCONNECTED)
                await raw.send_multipart([b"D", b"x" * 100_000])
                assert await monitor.poll(5000)
                raw.disable_monitor()
                monitor.close()
            assert await small.send([b"x" * 9_000])
            assert len((await next_kind(listener, "data")).frames[0]) == 9_000

    run(main())


def test_messages_that_follow_no_protocol_are_counted_logged_once_and_dropped(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        async with listening() as (listener, address), raw_socket(address) as raw:
            for _ in range(10):
                await raw.send_multipart([b"?", b"what"])
                await raw.send_multipart([b"D"] * 40)
                await raw.send(b"H\xc1\xc1")
                await raw.send_multipart([b""])
            async with connected(address) as connection:
                await connection.send([b"fine"])
                await next_kind(listener, "joined")
                await next_kind(listener, "data")
            await until(lambda: listener.num_malformed == 40)

    with caplog.at_level(logging.WARNING):
        run(main())
    assert sum("dropped" in record.message for record in caplog.records) == 1


def test_close_ends_every_wait_within_a_second() -> None:
    async def main() -> None:
        async with listening() as (listener, address), connected(address) as connection:
            await next_kind(listener, "joined")
            waits = [asyncio.create_task(end.receive()) for end in (listener, connection, connection)]
            await asyncio.sleep(0.01)
            start = time.monotonic()
            await connection.close()
            await listener.close()
            for wait in waits[1:]:
                with pytest.raises(ClosedError):
                    await wait
            assert (await waits[0]).kind == "left"
            with pytest.raises(ClosedError):
                await listener.receive()
            assert time.monotonic() - start < 1

    run(main())


def test_a_listener_that_closes_says_why() -> None:
    async def main() -> None:
        listener = Listener(**FAST)
        address = await listener.start()
        async with connected(address) as connection:
            await listener.close(reason="the run is over")
            with pytest.raises(ClosedError, match="the run is over"):
                await asyncio.wait_for(connection.receive(), 5)

    run(main())


def test_closing_leaks_no_socket_no_thread_and_no_task() -> None:
    keys, other = (CurveKeys.make(listeners=["peer"])["peer"] for _ in range(2))

    async def once(curve: CurveKeys | None) -> None:
        tasks = asyncio.all_tasks()
        async with listening(curve=curve) as (listener, address):
            async with connected(address, curve=curve) as connection:
                await connection.send([b"x"])
                await next_kind(listener, "joined")
            with pytest.raises((ClosedError, DeadlineExceededError)):
                await Connection(address, name="peer", curve=other).connect(timeout_s=0.05)
        assert asyncio.all_tasks() <= tasks

    async def main() -> None:
        for _ in range(2):
            await once(None)
            await once(keys)
        before = (len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task")))
        for _ in range(5):
            await once(None)
            await once(keys)
        after = (len(os.listdir("/proc/self/fd")), threading.active_count(), len(os.listdir("/proc/self/task")))
        assert after <= before or all(a <= b + 1 for a, b in zip(after, before, strict=True)), (before, after)

    run(main())
