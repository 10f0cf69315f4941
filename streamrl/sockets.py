"""ZeroMQ sockets in the event loop: the only file that imports zmq. What is said over them is in `transport.py`.

A `Pipe` is one socket with a context of its own, so that closing it leaves no socket and no thread behind. It does what
zmq.asyncio does, without a future for each message: at the size of a rollout that costs more than the message
(bench/bench_wire.py). Waits: `messages` and `events` for the other side, ended by cancelling the task that iterates;
`send` never; `close` at most `FLUSH_MS`.

Security: `CurveKeys`. A listening pipe with keys lets in only peers that prove they hold one of the run's keys, and
says whose each message is (`sender_key`); ZeroMQ itself refuses the others, before a frame of theirs is read, and
reports each as an event "refused", or as "broken" if the stranger saw first that they do not fit.
"""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Sequence
from typing import Literal

import msgspec
import zmq
from zmq import Event
from zmq.auth.asyncio import AsyncioAuthenticator
from zmq.utils.monitor import parse_monitor_message

from streamrl.errors import ConfigError
from streamrl.frames import Frame

FLUSH_MS = 500  # how long `close` waits for the last frames to leave
_PIPE_MESSAGES = 1 << 14  # in each direction; the bound in practice is the credit of the two ends
_COPY_BYTES = 16 << 10  # a shorter frame is copied: it would keep all of ZeroMQ's receive buffer alive
_BATCH = 256  # messages read before other tasks have their turn
_REFUSED = Event.HANDSHAKE_FAILED_PROTOCOL | Event.HANDSHAKE_FAILED_AUTH
_BROKEN = Event.HANDSHAKE_FAILED_NO_DETAIL  # the other side went away in the handshake

Sent = Literal["sent", "full", "gone"]
PipeEvent = Literal["refused", "broken", "connected", "disconnected"]


class CurveKeys(msgspec.Struct, frozen=True):
    """What one process holds of a run's keys. Only the control plane carries them.

    Each has a pair of its own for its connections. The listeners share another, and know whose the others' keys are.
    """

    server_public: str
    client_public: str
    client_secret: str
    server_secret: str = ""  # a listener's
    peers: dict[str, str] = {}  # a listener's: name -> client_public

    @classmethod
    def make(cls, *, listeners: Sequence[str], others: Sequence[str] = ()) -> dict[str, CurveKeys]:
        """The keys of a new run, for its processes by name. Listeners may connect too."""
        server_public, server_secret = _new_pair()
        pairs = {name: _new_pair() for name in (*listeners, *others)}
        peers = {name: public for name, (public, _) in pairs.items()}
        return {name: cls(server_public, *pairs[name], server_secret, peers) for name in listeners} | {
            name: cls(server_public, *pairs[name]) for name in others
        }

    def __repr__(self) -> str:  # keys must not reach a log
        return "CurveKeys(...)"

    def callback(self, domain: str, key: bytes) -> bool:
        """pyzmq's CredentialsProvider: only the keys of this run are let in."""
        return key.decode() in self.peers.values()


def _new_pair() -> tuple[str, str]:
    public, secret = zmq.curve_keypair()
    return public.decode(), secret.decode()


class Pipe:
    """See the module docstring. Made by `listen` or `connect`, within the event loop that will use it."""

    def __init__(self, kind: int, *, max_frame_bytes: int) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._authenticator: AsyncioAuthenticator | None = None
        self._socket = self._context.socket(kind)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.MAXMSGSIZE, max_frame_bytes)
        self._socket.set_hwm(_PIPE_MESSAGES)
        self._monitor = self._socket.get_monitor_socket(_REFUSED | _BROKEN | Event.CONNECTED | Event.DISCONNECTED)
        self._sender: zmq.Frame | None = None
        self._ready: dict[zmq.Socket[bytes], asyncio.Event] = {}
        for socket in (self._socket, self._monitor):
            self._ready[socket] = asyncio.Event()
            asyncio.get_running_loop().add_reader(socket.FD, self._ready[socket].set)

    @classmethod
    async def listen(cls, bind: str, *, curve: CurveKeys | None, max_frame_bytes: int) -> Pipe:
        """A ROUTER: every message begins with the routing id of its peer.

        Raises:
            ConfigError: the address is in use, or is not one of this host's.
        """
        pipe = cls(zmq.ROUTER, max_frame_bytes=max_frame_bytes)
        pipe._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        if curve is not None:
            assert curve.server_secret, "only the keys of a listener can listen"
            pipe._authenticator = AsyncioAuthenticator(pipe._context)
            pipe._authenticator.start()
            pipe._authenticator.configure_curve_callback(credentials_provider=curve)
            pipe._socket.curve_server = True
            pipe._socket.curve_publickey = curve.server_public.encode()
            pipe._socket.curve_secretkey = curve.server_secret.encode()
        try:
            pipe._socket.bind(bind)
        except zmq.ZMQError as error:
            await pipe.close(flush=False)
            raise ConfigError(f"bind ({bind}): {error}. Choose another port, or 0 for any.") from None
        return pipe

    @classmethod
    async def connect(cls, address: str, *, curve: CurveKeys | None, max_frame_bytes: int) -> Pipe:
        """A DEALER. It is there at once; the connection is made, and made again, in the background.

        Raises:
            ConfigError: it is no address at all.
        """
        pipe = cls(zmq.DEALER, max_frame_bytes=max_frame_bytes)
        if curve is not None:
            pipe._socket.curve_serverkey = curve.server_public.encode()
            pipe._socket.curve_publickey = curve.client_public.encode()
            pipe._socket.curve_secretkey = curve.client_secret.encode()
        try:
            pipe._socket.connect(address)
        except zmq.ZMQError as error:
            await pipe.close(flush=False)
            raise ConfigError(f"address ({address}): {error}. An address is tcp://HOST:PORT.") from None
        return pipe

    @property
    def address(self) -> str:
        """That peers connect to."""
        return self._socket.getsockopt_string(zmq.LAST_ENDPOINT)

    @property
    def has_unread(self) -> bool:
        return self._socket.poll(0) != 0

    @property
    def sender_key(self) -> str | None:
        """The public key that the sender of the message just read has proven; None without keys."""
        return None if self._authenticator is None or self._sender is None else str(self._sender["User-Id"])

    def send(self, parts: Sequence[Frame]) -> Sent:
        """ "full": the other side does not read. "gone": no such peer (any more). In both cases nothing was queued."""
        try:
            self._socket.send_multipart(parts, flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            return "full" if error.errno == errno.EAGAIN else "gone"
        finally:
            self._ready[self._socket].set()  # sending may swallow the signal that something has arrived: look again
        return "sent"

    def messages(self) -> AsyncIterator[list[Frame]]:
        """Messages as they come, for ever."""
        return self._read(self._socket)

    async def events(self) -> AsyncIterator[PipeEvent]:
        """What happens to the connections, for ever."""
        async for parts in self._read(self._monitor):
            event = parse_monitor_message([bytes(part) for part in parts])["event"]
            if event & _REFUSED:
                yield "refused"
            elif event == _BROKEN:
                yield "broken"
            else:
                yield "connected" if event == Event.CONNECTED else "disconnected"

    async def _read(self, socket: zmq.Socket[bytes]) -> AsyncIterator[list[Frame]]:
        ready = self._ready[socket]
        while True:
            ready.clear()
            try:
                for _ in range(_BATCH):
                    frame = socket.recv(zmq.NOBLOCK, copy=False)
                    parts = [_bytes_of(frame)]
                    while frame.more:
                        frame = socket.recv(zmq.NOBLOCK, copy=False)
                        parts.append(_bytes_of(frame))
                    if socket is self._socket:
                        self._sender = frame
                    yield parts
                await asyncio.sleep(0)
            except zmq.Again:
                await ready.wait()

    async def close(self, *, flush: bool) -> None:
        """Free everything; with `flush`, after giving queued frames `FLUSH_MS` to leave."""
        for socket in self._ready:
            asyncio.get_running_loop().remove_reader(socket.FD)
        if self._authenticator is not None:
            self._authenticator.stop()
        self._socket.disable_monitor()
        self._monitor.close(linger=0)
        self._socket.close(linger=FLUSH_MS if flush else 0)
        await asyncio.to_thread(self._context.term)


def _bytes_of(frame: zmq.Frame) -> bytes | memoryview:
    return frame.bytes if len(frame) < _COPY_BYTES else frame.buffer
