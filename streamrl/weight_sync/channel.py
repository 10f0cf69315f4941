"""The versioned weight channel: the learner publishes, generators fetch, load, prove and acknowledge.

    WeightPublisher (every learner rank)                       WeightSubscriber (one per generator)
      Outlet.write, barrier
      rank 0: WeightUpdate  --- Listener / Connection --->       next(): the newest not yet seen
              acks()        <-- WeightAck ----------------       fetch(): Inlet.fetch; acknowledge()

How the weights themselves travel is the backend's business (backend.py).

Invariants: an update is announced only when every rank's part of it is out; a peer that joins, or comes back, is sent
the current update; updates are never queued, a slow generator skips to the newest; the learner waits for no
generator. What `next` returns is monotone in (incarnation, policy_version): a restarted learner's older version follows
a newer one of its earlier life, and nothing of an earlier life follows it.

Waits. `WeightPublisher.publish` waits for the other ranks in one barrier (ended by them, or by the process group's
time limit). `WeightSubscriber.connect` waits for the publisher's welcome (its deadline), `next` for the next
publication (the learner ends it, or `close`), `fetch` for the backend (its deadline, or the end of the channel).
"""

from __future__ import annotations

import asyncio
import logging
import time
from typing import Any

import msgspec
import torch

from streamrl.config import WeightSyncConfig
from streamrl.errors import ClosedError, WireError
from streamrl.records import WeightAck, WeightUpdate
from streamrl.transport import Connection, CurveKeys, Listener, Message
from streamrl.weight_sync.backend import (
    Inlet,
    InletSettings,
    Outlet,
    OutletSettings,
    Parameters,
    make_inlet,
    make_outlet,
)
from streamrl.weight_sync.loop_thread import LoopThread
from streamrl.wire import Codec, Frame, pack

logger = logging.getLogger(__name__)


class ProbeSet(msgspec.Struct, frozen=True):
    """Fixed token sequences whose log-probs prove an update. Each has at least two tokens, at most max_length - 1,
    since the engine samples one more."""

    sequences: list[list[int]]

    @property
    def num_scored(self) -> int:
        """Tokens that have a log-prob: all but the first of each sequence."""
        return sum(len(sequence) - 1 for sequence in self.sequences)


_from_publisher = Codec(WeightUpdate)
_from_subscriber = Codec(WeightAck)
_probe_decoder = msgspec.msgpack.Decoder(ProbeSet)


class WeightPublisher:
    """The learner's side, one per rank, called from the training thread; blocking."""

    def __init__(
        self,
        config: WeightSyncConfig,
        *,
        run_name: str,
        rank: int,
        world_size: int,
        incarnation: int,
        named_parameters: Parameters,
        probe: ProbeSet,
        dtype: torch.dtype | None = None,
        bind: str = "tcp://127.0.0.1:0",
        curve: CurveKeys | None = None,
    ) -> None:
        """Nothing is opened yet.

        Args:
            config: with the backend chosen: `auto` is none.
            run_name: unique on this machine among the runs that live now.
            named_parameters: checkpoint name -> tensor or DTensor, the same on every rank; read at each `publish`.
            dtype: of the payload; None keeps each parameter's own.
            bind: address for subscribers; another than loopback needs `curve`, the run's keys.
        """
        self._backend = config.backend
        self._outlet: Outlet = make_outlet(
            config.backend,
            OutletSettings(
                run_name=run_name,
                rank=rank,
                world_size=world_size,
                parameters=dict(named_parameters),
                dtype=dtype,
                bind=bind,
                curve=curve,
            ),
        )
        self._rank = rank
        self._world_size = world_size
        self._incarnation = incarnation
        self._probe = probe
        self._bind = bind
        self._curve = curve
        self._announcer: _Announcer | None = None
        self._sequence = 0

    def start(self) -> str:
        """Open the backend and, on rank 0, the listener. All ranks call it.

        Returns:
            The address for subscribers; empty on ranks other than 0.

        Raises:
            WeightSyncError: the backend cannot be had on this machine.
        """
        self._outlet.start(self._barrier)
        if self._rank != 0:
            return ""
        self._announcer = _Announcer(self._probe, bind=self._bind, curve=self._curve)
        return self._announcer.address

    def publish(self, policy_version: int, probe_log_probs: list[float]) -> dict[str, float]:
        """Write this rank's part of the weights as they are now, and announce them once every rank's is out.

        All ranks call it. Waits for the other ranks, never for a generator.

        Returns:
            `write_s`, `barrier_s`, `announce_s`, and `bytes` written by this rank.
        """
        assert len(probe_log_probs) == self._probe.num_scored, "one log-prob per scored probe token"
        self._sequence += 1
        started = time.perf_counter()
        num_bytes = self._outlet.write(self._sequence)
        written = time.perf_counter()
        self._barrier()
        together = time.perf_counter()
        if self._announcer is not None:
            self._announcer.announce(
                WeightUpdate(
                    incarnation=self._incarnation,
                    policy_version=policy_version,
                    backend=self._backend,
                    payload=self._outlet.payload(self._sequence),
                    probe_log_probs=probe_log_probs,
                    published_at=time.time(),
                )
            )
        return {
            "write_s": written - started,
            "barrier_s": together - written,
            "announce_s": time.perf_counter() - together,
            "bytes": float(num_bytes),
        }

    def acks(self) -> list[WeightAck]:
        """What generators have answered since the last call; empty on ranks other than 0."""
        return [] if self._announcer is None else self._announcer.take_acks()

    @property
    def num_refused(self) -> int:
        """Connections that were turned away, most of them strangers'; 0 on ranks other than 0."""
        return 0 if self._announcer is None else self._announcer.num_refused

    def close(self) -> None:
        """Say goodbye to the subscribers and take the weights back; idempotent, bounded."""
        if self._announcer is not None:
            self._announcer.close()
            self._announcer = None
        self._outlet.close()

    def _barrier(self) -> None:
        if self._world_size > 1:
            torch.distributed.barrier()


class _Announcer:
    """Rank 0's listener, in an event loop thread of its own."""

    def __init__(self, probe: ProbeSet, *, bind: str, curve: CurveKeys | None) -> None:
        welcome = msgspec.msgpack.encode(probe)
        self._loop = LoopThread("weight-announcer")
        self._listener = Listener(bind=bind, curve=curve, welcome=lambda name, payload: welcome)
        self._peers: set[str] = set()
        self._current: list[Frame] = []
        self._acks: list[WeightAck] = []
        try:
            self.address = self._loop.call(self._listener.start())
        except BaseException:
            self._loop.close()
            raise
        self._loop.begin(self._serve())

    @property
    def num_refused(self) -> int:
        return self._listener.num_refused

    def announce(self, update: WeightUpdate) -> None:
        self._loop.call(self._announce(pack(update)))

    def take_acks(self) -> list[WeightAck]:
        acks, self._acks = self._acks, []  # one reference is swapped, so the loop thread cannot lose an ack
        return acks

    def close(self) -> None:
        try:
            self._loop.call(self._listener.close(reason="the learner has ended"))
        finally:
            self._loop.close()

    async def _announce(self, frames: list[Frame]) -> None:
        self._current = frames
        for peer in self._peers:
            await self._listener.send(peer, frames)  # a peer that is away gets the current one when it is back

    async def _serve(self) -> None:
        while True:
            try:
                message = await self._listener.receive()
            except ClosedError:
                return
            await self._take(message)

    async def _take(self, message: Message) -> None:
        if message.kind == "joined":
            self._peers.add(message.peer)
            if self._current:
                await self._listener.send(message.peer, self._current)
        elif message.kind == "left":
            self._peers.discard(message.peer)
        else:
            try:
                ack, _ = _from_subscriber.unpack(message.frames)
            except WireError as error:
                logger.warning("dropped an acknowledgement of %s: %s", message.peer, error)
                return
            self._acks.append(ack)


class WeightSubscriber:
    """A generator's side; lives in its event loop."""

    def __init__(self, address: str, *, name: str, curve: CurveKeys | None = None, timeout_s: float = 60.0) -> None:
        """`timeout_s`: for one version to be fetched."""
        self._connection = Connection(address, name=name, curve=curve)
        self._settings = InletSettings(name=name, curve=curve, timeout_s=timeout_s)
        self._newest: WeightUpdate | None = None
        self._returned: WeightUpdate | None = None
        self._arrived = asyncio.Event()
        self._closed = ""
        self._unsent: list[WeightAck] = []
        self._inlet: Inlet | None = None
        self._task: asyncio.Task[None] | None = None

    async def connect(self, *, timeout_s: float) -> ProbeSet:
        """Handshake with the publisher.

        Raises:
            DeadlineExceededError: it did not answer in time.
        """
        probe = _probe_decoder.decode(await self._connection.connect(timeout_s=timeout_s))
        self._task = asyncio.create_task(self._receive())
        return probe

    async def next(self) -> WeightUpdate:
        """The newest update that was not returned before; older ones are skipped.

        Raises:
            ClosedError: the learner has ended the channel, or `close` was called.
        """
        while self._newest is None:
            if self._closed:
                raise ClosedError(self._closed)
            self._arrived.clear()
            await self._arrived.wait()
        self._returned, self._newest = self._newest, None
        return self._returned

    async def fetch(self, update: WeightUpdate) -> dict[str, Any] | None:
        """Bring a version so near to the engine that only the load is left; generation goes on meanwhile.

        Returns:
            What the engine's loader must be told, valid until the next `fetch`; None if the version was overwritten,
            or another life of the learner has published meanwhile: `next` has a newer one, or will have.

        Raises:
            WeightSyncError: it did not come within `timeout_s`, or not as it was sent.
            ClosedError: the learner has ended the channel.
        """
        if self._inlet is None:
            self._inlet = make_inlet(update.backend, self._settings)
        fetching = asyncio.create_task(self._inlet.fetch(update))
        pointless = asyncio.create_task(self._pointless(update))
        try:
            await asyncio.wait((fetching, pointless), return_when=asyncio.FIRST_COMPLETED)
            return fetching.result() if fetching.done() else pointless.result()
        finally:
            for task in (fetching, pointless):
                task.cancel()
            await asyncio.gather(fetching, pointless, return_exceptions=True)

    async def _pointless(self, update: WeightUpdate) -> None:
        """Wait until nothing more can come of `update`; ClosedError if nothing more will be published either."""
        while self._newest is None or self._newest.incarnation == update.incarnation:
            if self._closed:
                raise ClosedError(self._closed)
            self._arrived.clear()
            await self._arrived.wait()

    @property
    def num_bytes(self) -> int:
        """Bytes of one version, once one was fetched."""
        return 0 if self._inlet is None else self._inlet.num_bytes

    async def acknowledge(self, ack: WeightAck) -> None:
        """Tell the learner; kept until the link is up again if it is down."""
        self._unsent.append(ack)
        await self._send_acks()

    async def close(self) -> None:
        """Idempotent, bounded."""
        await self._connection.close()
        if self._task is not None:
            await self._task
        if self._inlet is not None:
            await self._inlet.close()
            self._inlet = None

    async def _send_acks(self) -> None:
        while self._unsent and await self._connection.send(pack(self._unsent[0])):
            self._unsent.pop(0)

    async def _receive(self) -> None:
        while True:
            try:
                message = await self._connection.receive()
            except ClosedError as error:
                self._closed = str(error)
                self._arrived.set()
                return
            if message.kind == "joined":
                await self._send_acks()
            elif message.kind == "data":
                try:
                    update, _ = _from_publisher.unpack(message.frames)
                except WireError as error:
                    logger.warning("dropped an announcement of %s: %s", message.peer, error)
                    continue
                self._take(update)

    def _take(self, update: WeightUpdate) -> None:
        seen = self._newest or self._returned
        if seen is not None:
            if (update.incarnation, update.policy_version) <= (seen.incarnation, seen.policy_version):
                return  # after a reconnect the current one comes again, and a replaced learner may still be talking
            if update.policy_version < seen.policy_version:
                logger.warning(
                    "the learner was restarted: version %d of its life %d is replaced by version %d of its life %d",
                    seen.policy_version, seen.incarnation, update.policy_version, update.incarnation,
                )  # fmt: skip
        self._newest = update
        self._arrived.set()
