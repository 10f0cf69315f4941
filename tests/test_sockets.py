"""Pipes: what the transport relies on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from streamrl.errors import ConfigError
from streamrl.sockets import CurveKeys, Pipe

LIMIT = 1 << 20


def run(work: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(work, 20))


@asynccontextmanager
async def pair() -> AsyncIterator[tuple[Pipe, Pipe]]:
    listening = await Pipe.listen("tcp://127.0.0.1:0", curve=None, max_frame_bytes=LIMIT)
    connecting = await Pipe.connect(listening.address, curve=None, max_frame_bytes=LIMIT)
    try:
        yield listening, connecting
    finally:
        await connecting.close(flush=False)
        await listening.close(flush=False)


def test_a_message_and_its_answer_cross_in_whole_frames() -> None:
    async def main() -> None:
        async with pair() as (listening, connecting):
            assert connecting.send([b"one", b"", memoryview(b"three")]) == "sent"
            peer, *frames = await anext(listening.messages())
            assert frames == [b"one", b"", b"three"]
            assert listening.send([peer, b"answer"]) == "sent"
            assert await anext(connecting.messages()) == [b"answer"]
            assert not connecting.has_unread

    run(main())


def test_a_short_frame_is_copied_and_a_long_one_is_not() -> None:
    async def main() -> None:
        async with pair() as (listening, connecting):
            connecting.send([b"x" * 100, b"x" * 100_000])
            _, short, long = await anext(listening.messages())
            assert isinstance(short, bytes) and isinstance(long, memoryview)
            assert long == b"x" * 100_000

    run(main())


def test_sending_to_nobody_is_said_and_never_waits() -> None:
    async def main() -> None:
        async with pair() as (listening, connecting):
            assert listening.send([b"nobody", b"hello"]) == "gone"
            answers = {connecting.send([b"x" * 1000]) for _ in range(60_000)}
            assert answers == {"sent", "full"}

    run(main())


def test_messages_that_arrive_while_we_send_are_not_overlooked() -> None:
    """A send may consume ZeroMQ's edge-triggered signal of an arrival."""

    async def main() -> None:
        async with pair() as (listening, connecting):
            connecting.send([b"first"])
            messages = listening.messages()
            peer, _ = await anext(messages)
            for i in range(300):
                connecting.send([str(i).encode()])
                for _ in range(20):
                    listening.send([peer, b"noise"])
                assert (await asyncio.wait_for(anext(messages), 1))[1] == str(i).encode()

    run(main())


def test_the_other_side_coming_and_going_is_an_event() -> None:
    async def main() -> None:
        async with pair() as (listening, connecting):
            assert await anext(connecting.events()) == "connected"
            peer = await Pipe.connect(listening.address, curve=None, max_frame_bytes=LIMIT)
            events = listening.events()
            await peer.close(flush=False)
            assert await anext(events) in ("disconnected", "broken")  # the latter if it left in the handshake

    run(main())


def test_a_stranger_is_an_event_on_both_sides() -> None:
    async def main() -> None:
        keys, other = (CurveKeys.make(listeners=["buffer"]) for _ in range(2))
        listening = await Pipe.listen("tcp://127.0.0.1:0", curve=keys["buffer"], max_frame_bytes=LIMIT)
        stranger = await Pipe.connect(listening.address, curve=other["buffer"], max_frame_bytes=LIMIT)
        try:
            assert await anext(listening.events()) in ("refused", "broken")
            events = stranger.events()
            assert await anext(events) == "connected"
            assert await anext(events) in ("refused", "broken", "disconnected")
        finally:
            await stranger.close(flush=False)
            await listening.close(flush=False)

    run(main())


def test_each_message_says_whose_keys_sent_it() -> None:
    async def main() -> None:
        keys = CurveKeys.make(listeners=["buffer"], others=["generator-0", "generator-1"])
        listening = await Pipe.listen("tcp://127.0.0.1:0", curve=keys["buffer"], max_frame_bytes=LIMIT)
        names = ("generator-0", "generator-1", "buffer")
        peers = {n: await Pipe.connect(listening.address, curve=keys[n], max_frame_bytes=LIMIT) for n in names}
        try:
            for _ in range(2):
                for name, peer in peers.items():
                    assert peer.send([name.encode(), bytes(50_000)]) == "sent"
            messages = listening.messages()
            for _ in range(2 * len(peers)):
                _, name, _ = await anext(messages)
                assert listening.sender_key == keys["buffer"].peers[bytes(name).decode()]
        finally:
            for pipe in (*peers.values(), listening):
                await pipe.close(flush=False)

    run(main())


def test_only_listeners_hold_the_secret_of_the_listeners() -> None:
    keys = CurveKeys.make(listeners=["buffer", "learner-0"], others=["generator-0", "generator-1"])
    secrets = {name: k.client_secret for name, k in keys.items()}
    assert len(set(secrets.values())) == 4
    for name in ("generator-0", "generator-1"):
        assert keys[name].server_secret == "" and keys[name].peers == {}
        held = set(msgspec.structs.astuple(keys[name])[:-1])
        assert held & {*secrets.values(), keys["buffer"].server_secret} == {secrets[name]}


def test_a_wrong_address_is_the_users_error_and_leaves_no_thread() -> None:
    async def main() -> None:
        with pytest.raises(ConfigError, match="bind"):
            await Pipe.listen("tcp://999.0.0.1:1", curve=None, max_frame_bytes=LIMIT)
        with pytest.raises(ConfigError, match="An address is tcp://HOST:PORT"):
            await Pipe.connect("nowhere", curve=None, max_frame_bytes=LIMIT)

    before = threading.active_count()
    run(main())
    assert threading.active_count() == before
