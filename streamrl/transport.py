"""Links: one `Listener` per serving process, one `Connection` per peer of it.

A link moves lists of frames (made by `wire.py`) in order. One life of a link is a session: a fresh DEALER socket that
starts with a handshake. When the TCP connection breaks, or the other side is silent for `peer_timeout_s`, the
`Connection` drops the socket with whatever was queued in it and opens a new session by itself. So within a session
nothing is lost or reordered, and across sessions nothing is kept: what must survive is sent again by its owner when
`receive` reports "joined" (see `buffers/client.py`). Credit and acknowledgement are the business of the two ends.

    Connection                                   Listener
      HELLO(name, life, payload)  ------------->   welcome(name, payload), then Message "joined"
      <-------------  WELCOME(payload) | REFUSED(sentence)
      DATA, BEAT  <-------------------------->     DATA, BEAT
      GOODBYE(reason)  <--------------------->     GOODBYE(reason)
      <-------------  RESET (the session is unknown: start another)

The first byte of a message's first frame says which of these it is.

Waits. `Connection.connect` waits for WELCOME; the listener ends it, or its deadline. `receive` waits for the next
message; the other side ends it, or `close` (ClosedError). `send` never waits: a pipe holds far more than any credit,
and a peer that lets it fill has to start a new session. `close` is bounded by `FLUSH_MS`. Silence is counted in
heartbeat ticks of our own, so that a stall of this process is not taken for the silence of its peers.

Security. Loopback unless told otherwise; another address needs `CurveKeys` (streamrl/sockets.py). Who does not hold one
of the run's keys, or says a name that is not its key's, is refused and counted in `Listener.num_refused`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from streamrl.errors import ClosedError, ConfigError, DeadlineExceededError, StreamrlError
from streamrl.frames import MAX_FRAME_BYTES, Frame, FrameError, pack
from streamrl.mailbox import Mailbox
from streamrl.sockets import CurveKeys as CurveKeys
from streamrl.sockets import Pipe
from streamrl.wire import HELLO, Hello

HEARTBEAT_S = 2.0
PEER_TIMEOUT_S = 15.0
MAX_PARTS = 16  # frames of one message
INBOX_MESSAGES = 1024  # received and not yet taken by `receive`; beyond it TCP holds the peers back
_RETRY_S = 0.1  # pause between two sessions
_GRACE_TICKS = 2  # a peer whose link broke has this many heartbeats to come back

_HELLO, _WELCOME, _REFUSED, _RESET, _BEAT, _DATA, _GOODBYE = (bytes([c]) for c in b"HWRXBDG")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Message:
    """What `receive` returns.

    "data": the frames as they were sent. "joined": the peer's session began; the one frame is the hello payload (at a
    Listener) or the welcome payload (at a Connection, only for sessions after the first). "left": the peer is gone,
    or the Connection's link is down and being renewed; the one frame is the reason.
    """

    peer: str  # name of the peer; for a Connection the address
    kind: Literal["data", "joined", "left"]
    frames: list[Frame]

    @property
    def reason(self) -> str:
        """Of a "left"."""
        return bytes(self.frames[0]).decode(errors="replace")


@dataclass(slots=True)
class _Peer:
    name: str
    life: str
    routing_id: bytes
    key: str | None  # what it has proven
    up: bool = True  # whether frames can be sent; what its socket sent before it broke still comes in
    silent_ticks: int = 0


class Listener:
    """The serving end.

    `welcome(name, payload) -> bytes` answers a hello; it refuses the peer by raising a StreamrlError, whose sentence
    the peer gets. A peer that joins under the name of another live one replaces it.
    """

    def __init__(
        self,
        *,
        bind: str = "tcp://127.0.0.1:0",
        curve: CurveKeys | None = None,
        welcome: Callable[[str, bytes], bytes] = lambda name, payload: b"",
        max_frame_bytes: int = MAX_FRAME_BYTES,
        heartbeat_s: float = HEARTBEAT_S,
        peer_timeout_s: float = PEER_TIMEOUT_S,
    ) -> None:
        if curve is None and not re.match(r"(ipc://|tcp://(127\.[\d.]+|localhost|\[::1\]):)", bind):
            raise ConfigError(f"bind ({bind}): reachable from other hosts, which needs CURVE keys. Pass curve=.")
        self._bind = bind
        self._started = False
        self._pipe: Pipe | None = None
        self._curve = curve
        self._welcome = welcome
        self._max_frame_bytes = max_frame_bytes
        self._heartbeat_s = heartbeat_s
        self._max_silent_ticks = max(_GRACE_TICKS, round(peer_timeout_s / heartbeat_s))
        self._inbox: Mailbox[Message] = Mailbox(capacity=INBOX_MESSAGES)
        self._peers: dict[str, _Peer] = {}
        self._by_id: dict[bytes, _Peer] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._complained: set[str] = set()
        self.num_refused = 0  # handshakes: wrong keys, given up by the stranger, wrong schema, or refused by `welcome`
        self.num_malformed = 0  # messages dropped

    async def start(self) -> str:
        """Bind; returns the address that peers connect to.

        Raises:
            ConfigError: the address is in use, or is not one of this host's.
            RuntimeError: it was started before. A second socket would get some of the peers and serve none.
        """
        if self._started:
            raise RuntimeError(f"the listener on {self._bind} was started before; a second start would open another")
        self._started = True
        pipe = await Pipe.listen(self._bind, curve=self._curve, max_frame_bytes=self._max_frame_bytes)
        self._pipe = pipe
        self._tasks = [self._inbox.fill(work) for work in (self._read(pipe), self._beat(), self._count_refused(pipe))]
        return pipe.address

    async def receive(self) -> Message:
        """The next message of any peer, in order per peer. Waits; ClosedError after `close`."""
        return await self._inbox.get()

    async def receive_all(self) -> list[Message]:
        """Everything that has arrived, at least one message. Waits; ClosedError after `close`."""
        return await self._inbox.get_all()

    async def send(self, peer: str, frames: Sequence[Frame]) -> bool:
        """False if the peer is not there (any more); nothing is kept for it then."""
        known = self._peers.get(peer)
        return known is not None and self._post_to(known, [_DATA + frames[0], *frames[1:]])

    async def close(self, *, reason: str = "closed") -> None:
        """Say goodbye to every peer and free the socket. Bounded; may be called twice."""
        self._inbox.close(reason)
        for peer in self._peers.values():
            self._post_to(peer, [_GOODBYE + reason.encode()])
        self._peers.clear()
        self._by_id.clear()
        await _cancel(self._tasks)
        await self._free()

    async def _free(self) -> None:
        pipe, self._pipe = self._pipe, None
        if pipe is not None:
            await pipe.close(flush=True)

    async def _read(self, pipe: Pipe) -> None:
        async for routing_id, *parts in pipe.messages():
            for message in self._handle(bytes(routing_id), parts, pipe.sender_key):
                await self._inbox.put(message)

    def _handle(self, routing_id: bytes, parts: list[Frame], key: str | None) -> list[Message]:
        kind, first = (bytes(parts[0][:1]), parts[0][1:]) if parts else (b"", b"")
        peer = self._by_id.get(routing_id)
        if peer is not None and peer.key != key:  # a peer chooses its routing id, so another's may be used again
            peer = None
        if kind == _HELLO:
            return self._greet(routing_id, [first, *parts[1:]], key)
        if kind not in (_DATA, _BEAT, _GOODBYE) or len(parts) > MAX_PARTS:
            self._complain(peer, f"a message of kind {kind!r} with {len(parts)} frames")
        elif peer is None:
            self._post(routing_id, [_RESET])
        else:
            peer.silent_ticks = 0
            if kind == _DATA:
                return [Message(peer.name, "data", [first, *parts[1:]])]
            if kind == _GOODBYE:
                return [self._remove(peer, b"goodbye")]
        return []

    def _greet(self, routing_id: bytes, frames: list[Frame], key: str | None) -> list[Message]:
        try:
            hello, _ = HELLO.unpack(frames)
            if self._curve is not None and self._curve.peers.get(hello.name) != key:
                raise ConfigError(f"name ({hello.name}): the CURVE keys of this peer are not those of that name")
            welcome = self._welcome(hello.name, hello.payload)
        except StreamrlError as error:
            if isinstance(error, FrameError) and error.reason != "schema":
                self._complain(None, f"a hello: {error}")
            self.num_refused += 1
            self._post(routing_id, [_REFUSED + str(error).encode()])
            return []
        messages: list[Message] = []
        old = self._peers.get(hello.name)
        if old is not None:
            left = self._remove(old, b"replaced by a newer process of the same name")
            if old.life != hello.life:
                self._post(old.routing_id, [_REFUSED + left.reason.encode()])
                messages.append(left)
        self._peers[hello.name] = self._by_id[routing_id] = _Peer(hello.name, hello.life, routing_id, key)
        self._post(routing_id, [_WELCOME + welcome])
        messages.append(Message(hello.name, "joined", [hello.payload]))
        return messages

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            for peer in list(self._peers.values()):
                self._post_to(peer, [_BEAT])
                if self._inbox.full:
                    continue  # we are not reading, so their silence means nothing
                peer.silent_ticks += 1
                if peer.silent_ticks > self._max_silent_ticks and self._peers.get(peer.name) is peer:
                    self._inbox.put_nowait(
                        self._remove(peer, b"silent for too long" if peer.up else b"its connection broke")
                    )

    async def _count_refused(self, pipe: Pipe) -> None:
        async for event in pipe.events():
            self.num_refused += event in ("refused", "broken")

    def _post_to(self, peer: _Peer, parts: list[Frame]) -> bool:
        """If it fails the session is over, and the peer has a moment to start another."""
        if peer.up and not self._post(peer.routing_id, parts):
            peer.up = False
            peer.silent_ticks = max(peer.silent_ticks, self._max_silent_ticks - _GRACE_TICKS)
        return peer.up

    def _post(self, routing_id: bytes, parts: list[Frame]) -> bool:
        assert self._pipe is not None, "start comes first"
        sent = self._pipe.send([routing_id, *parts])
        if sent == "full":
            self._by_id.pop(routing_id, None)  # it lost a frame, so what it says next is answered by RESET
        return sent == "sent"

    def _remove(self, peer: _Peer, reason: bytes) -> Message:
        self._peers.pop(peer.name, None)
        self._by_id.pop(peer.routing_id, None)
        return Message(peer.name, "left", [reason])

    def _complain(self, peer: _Peer | None, what: str) -> None:
        self.num_malformed += 1
        name = "a stranger" if peer is None else peer.name
        if name not in self._complained:
            self._complained.add(name)
            logger.warning("dropped %s from %s; further ones are only counted", what, name)


@dataclass(slots=True)
class _Session:
    pipe: Pipe
    lost: asyncio.Future[str]  # why the session ended
    up: bool = False
    silent_ticks: int = 0


class Connection:
    """The connecting end. `name` is how the listener calls it, unique among the listener's peers."""

    def __init__(
        self,
        address: str,
        *,
        name: str,
        curve: CurveKeys | None = None,
        max_frame_bytes: int = MAX_FRAME_BYTES,
        heartbeat_s: float = HEARTBEAT_S,
        peer_timeout_s: float = PEER_TIMEOUT_S,
    ) -> None:
        self.address = address
        self.name = name
        self._curve = curve
        self._max_frame_bytes = max_frame_bytes
        self._heartbeat_s = heartbeat_s
        self._max_silent_ticks = max(_GRACE_TICKS, round(peer_timeout_s / heartbeat_s))
        self._life = os.urandom(8).hex()
        self._inbox: Mailbox[Message] = Mailbox(capacity=INBOX_MESSAGES)
        self._hello: Callable[[], bytes] = lambda: b""
        self._session: _Session | None = None
        self._trouble = "nobody answers there"  # what the connect deadline reports
        self._verdict: str | None = None  # why the listener ended it for good
        self._task: asyncio.Task[None] | None = None

    @property
    def up(self) -> bool:
        """Whether a session is established at this moment."""
        return self._session is not None and self._session.up

    async def connect(self, *, hello: bytes | Callable[[], bytes] = b"", timeout_s: float) -> bytes:
        """Handshake; returns the welcome payload. A callable hello is asked anew for each session.

        Raises:
            DeadlineExceededError: no welcome within `timeout_s`.
            ClosedError: the listener refused, with its sentence.
            ConfigError: it is no address.
        """
        assert self._task is None, "connect is called once"
        self._hello = hello if callable(hello) else lambda: hello
        self._welcomed: asyncio.Future[bytes] = asyncio.get_running_loop().create_future()
        self._task = self._inbox.fill(self._keep())
        try:
            ends: set[asyncio.Future[Any]] = {self._welcomed, self._task}
            await asyncio.wait(ends, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not self._welcomed.done():
                await self.close()
        if self._welcomed.done():
            return self._welcomed.result()
        if not self._task.cancelled() and (broken := self._task.exception()) is not None:
            raise broken
        if self._verdict is not None:
            raise ClosedError(f"{self.address} refused {self.name}: {self._verdict}")
        what = f"{self.name} waited {timeout_s:g} s for the handshake of {self.address}"
        raise DeadlineExceededError(f"{what}: {self._trouble}")

    async def send(self, frames: Sequence[Frame]) -> bool:
        """False while the link is down: nothing is kept, send it again at the next "joined"."""
        session = self._session
        return session is not None and session.up and self._post(session, [_DATA + frames[0], *frames[1:]])

    async def receive(self) -> Message:
        """The next message. Waits; ClosedError after `close`, or when the listener closed or refused a new session."""
        return await self._inbox.get()

    async def close(self) -> None:
        """Say goodbye, give queued frames `FLUSH_MS` to leave, free the socket. May be called twice."""
        self._inbox.close(f"the connection to {self.address} was closed")
        if self._task is None:
            return
        if self._session is not None and self._session.up:
            self._post(self._session, [_GOODBYE])
        await _cancel([self._task])

    async def _keep(self) -> None:
        """One session after the other, until `close`, or until the listener ends it."""
        while True:
            pipe = await Pipe.connect(self.address, curve=self._curve, max_frame_bytes=self._max_frame_bytes)
            session = self._session = _Session(pipe, asyncio.get_running_loop().create_future())
            try:
                reason = await self._serve(session)
            finally:
                self._session = None
                await pipe.close(flush=session.up)
            if self._verdict is not None:
                self._inbox.close(f"{self.address}: {self._verdict}")
                return
            if session.up:
                await self._inbox.put(Message(self.address, "left", [reason.encode()]))
            await asyncio.sleep(_RETRY_S)

    async def _serve(self, session: _Session) -> str:
        """Returns why the session ended."""
        hello = pack(Hello(name=self.name, life=self._life, payload=self._hello()))
        self._post(session, [_HELLO + hello[0]])
        tasks = [asyncio.create_task(work) for work in (self._read(session), self._watch(session), self._beat(session))]
        try:
            ends: list[asyncio.Future[str]] = [*tasks, session.lost]
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            return done.pop().result()
        finally:
            await _cancel(tasks)

    async def _read(self, session: _Session) -> str:
        async for parts in session.pipe.messages():
            session.silent_ticks = 0
            kind, frames = bytes(parts[0][:1]), [parts[0][1:], *parts[1:]]
            if kind == _DATA:
                await self._inbox.put(Message(self.address, "data", frames))
            elif kind == _WELCOME:
                session.up = True
                if self._welcomed.done():
                    await self._inbox.put(Message(self.address, "joined", frames))
                else:
                    self._welcomed.set_result(bytes(frames[0]))
            elif kind == _RESET:
                return "the listener does not know this session"
            elif kind in (_REFUSED, _GOODBYE):
                self._verdict = bytes(frames[0]).decode(errors="replace")
                return self._verdict
        raise AssertionError("a pipe is read until its session ends")

    async def _watch(self, session: _Session) -> str:
        async for event in session.pipe.events():
            if event == "connected":
                self._trouble = "the port is open, but no welcome came"
                continue
            if not session.up:
                self._trouble = "the handshake failed: CURVE keys differ, or are on one side only"
            while session.pipe.has_unread:  # what came before the break is read first: it may be a goodbye
                await asyncio.sleep(0.001)
            return "the connection broke"
        raise AssertionError("a pipe is watched until its session ends")

    async def _beat(self, session: _Session) -> str:
        while True:
            await asyncio.sleep(self._heartbeat_s)
            if session.up:
                self._post(session, [_BEAT])
            if self._inbox.full:
                continue  # we are not reading, so their silence means nothing
            session.silent_ticks += 1
            if session.silent_ticks > self._max_silent_ticks:
                return "the listener is silent"

    def _post(self, session: _Session, parts: list[Frame]) -> bool:
        sent = session.pipe.send(parts) == "sent"
        if not sent and not session.lost.done():
            session.lost.set_result("the listener does not read")
        return sent


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
