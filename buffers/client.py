"""The two clients of the buffer process: `GeneratorClient` (asyncio) and `LearnerClient` (blocking).

Delivery. A generator keeps each rollout and failure until the buffer has acknowledged (uid, member, attempt), and sends
all of them again when the link comes up again; the buffer recognises what it has. Its hello says what it holds, so that
leases and cancels that were lost with the link are made good. A learner rank asks its open question again.

Bounded memory. A generator may have sent `window_rollouts` / `window_bytes` (from the buffer's welcome) without
acknowledgement; then `send` waits. The buffer leases no more members than were asked for.

    GeneratorClient.next_lease, next_cancel   wait for the buffer process (admission, cancellations)
    GeneratorClient.send, fail                wait for acknowledgements, only when the window is full
    GeneratorClient.close                     waits for the last acknowledgements, until its deadline
    LearnerClient.sample, advance             wait for the buffer process, until their deadline
The end of the run, or `close`, ends every wait: ClosedError, or None from `sample`.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import itertools
import logging
import threading
from collections.abc import Coroutine, Iterator
from typing import Any, TypeVar

import msgspec
import numpy as np

from buffers.shards import Shard
from streamrl import wire
from streamrl.errors import ClosedError, DeadlineExceededError
from streamrl.mailbox import Mailbox
from streamrl.records import Failure, IntArray, Lease, Rollout, RolloutGroup
from streamrl.transport import HEARTBEAT_S, PEER_TIMEOUT_S, Connection, CurveKeys, Message

Result = TypeVar("Result")

# One message: far more than its own costs, and little enough that sender, sockets and receiver work at the same time.
DELIVERY_BYTES = 1 << 20

logger = logging.getLogger(__name__)


class GeneratorClient:
    """One generator's end; lives in the generator's event loop.

    `request(k)` grants credit for k members; a lease spends one per member. Ask again for each member that ended,
    by result, failure or cancellation.
    """

    def __init__(
        self,
        address: str,
        *,
        name: str,
        curve: CurveKeys | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        peer_timeout_s: float = PEER_TIMEOUT_S,
    ) -> None:
        self._connection = Connection(
            address, name=name, curve=curve, heartbeat_s=heartbeat_s, peer_timeout_s=peer_timeout_s
        )
        self._leases: Mailbox[tuple[Lease, IntArray]] = Mailbox()
        self._cancels: Mailbox[str] = Mailbox()
        self._held: dict[tuple[str, int], int] = {}  # (uid, member) -> attempt; leased and not acknowledged
        self._outbox: list[wire.Parcel] = []
        self._outbox_bytes = 0
        self._unsaid_credit = 0  # granted and not yet sent
        self._unsent = asyncio.Event()  # something of these two
        self._sent: dict[int, list[wire.Parcel]] = {}  # by number of the delivery, rollouts first
        self._numbers = itertools.count()
        self._layout = np.empty(DELIVERY_BYTES // 4, dtype=np.int32)  # in which deliveries are laid out
        self._num_unacknowledged = 0  # in the outbox or sent
        self._unacknowledged_bytes = 0
        self._window = wire.GeneratorWelcome(window_rollouts=1, window_bytes=1)
        self._room = asyncio.Event()
        self._credit = 0
        self._version = wire.Report(incarnation=0, policy_version=0)
        self._reported = False
        self._ended: str | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self.outcomes: collections.Counter[str] = collections.Counter()
        """Acknowledged rollouts and failures by status: accepted, duplicate, stale, rejected, failed."""

    @property
    def unacknowledged(self) -> int:
        """Rollouts and failures sent, not yet acknowledged."""
        return self._num_unacknowledged

    async def connect(self, *, timeout_s: float) -> None:
        """Handshake with the buffer process.

        Raises:
            DeadlineExceededError: it did not answer in time.
            ClosedError: it refused, with its sentence.
        """
        welcome = await self._connection.connect(hello=self._hello, timeout_s=timeout_s)
        self._take_welcome(welcome)
        self._tasks = [self._leases.fill(work) for work in (self._receive(), self._send_unsent())]

    async def report_version(self, *, incarnation: int, policy_version: int) -> None:
        """The engine now serves this version, proven. Without a report no member is leased."""
        self._version = wire.Report(incarnation=incarnation, policy_version=policy_version)
        self._reported = True
        await self._connection.send(wire.pack(self._version))

    async def request(self, num_members: int) -> None:
        """Grant credit for that many more members."""
        self._credit += num_members
        self._unsaid_credit += num_members
        self._unsent.set()

    async def next_lease(self) -> tuple[Lease, IntArray]:
        """The next members to generate, with their prompt_ids [P]. Waits; ClosedError at the end of the run."""
        while True:
            lease, prompt_ids = await self._leases.get()
            if self._ended is not None:
                raise ClosedError(self._ended)
            wanted = [
                (member, attempt)
                for member, attempt in zip(lease.members, lease.attempts, strict=True)
                if self._held.get((lease.uid, member)) == attempt
            ]
            if len(wanted) < len(lease.members):  # cancelled before it was taken
                await self.request(len(lease.members) - len(wanted))
            if wanted:
                members, attempts = zip(*wanted, strict=True)
                return msgspec.structs.replace(lease, members=members, attempts=attempts), prompt_ids

    async def next_cancel(self) -> str:
        """The next uid whose members should be aborted. Waits; ClosedError at the end of the run."""
        return await self._cancels.get()

    async def send(self, rollout: Rollout) -> None:
        """Deliver it, whatever happens to the link. Waits only while the window is full.

        Raises:
            ClosedError: the run is over, or the client was closed.
            FrameError: it is larger than the wire allows; report it with `fail`.
        """
        await self._deliver(wire.Parcel.of(rollout))

    async def fail(self, failure: Failure) -> None:
        """As `send`, for a member that could not be generated or scored."""
        await self._deliver(wire.Parcel.of(failure))

    async def close(self, *, timeout_s: float) -> None:
        """Wait for the last acknowledgements within the limit, then free the socket."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self.unacknowledged and self._ended is None and self._tasks:
                    self._room.clear()
                    await self._room.wait()
        if self.unacknowledged:
            logger.warning("%s closes with %d rollouts unacknowledged", self._connection.name, self.unacknowledged)
        self._end("the client was closed")
        await self._connection.close()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _deliver(self, parcel: wire.Parcel) -> None:
        if self._outbox_bytes + parcel.num_bytes > DELIVERY_BYTES:
            await asyncio.sleep(0)  # a message is full: it is under way while the caller makes the next
        while self._ended is None and not self._fits(parcel.num_bytes):
            self._room.clear()
            await self._room.wait()
        if self._ended is not None:
            raise ClosedError(self._ended)
        self._num_unacknowledged += 1
        self._unacknowledged_bytes += parcel.num_bytes
        self._outbox.append(parcel)
        self._outbox_bytes += parcel.num_bytes
        self._unsent.set()

    async def _send_unsent(self) -> None:
        """What is ready at one moment goes out together, then the credit that was granted meanwhile."""
        while self._ended is None:
            self._unsent.clear()
            outbox, self._outbox, self._outbox_bytes = self._outbox, [], 0
            for parcels in portions_of(outbox):
                rollouts = [p for p in parcels if isinstance(p.content, Rollout)]
                failures = [p for p in parcels if isinstance(p.content, Failure)]
                number = next(self._numbers)
                self._sent[number] = [*rollouts, *failures]
                frames = wire.encode_delivery(rollouts, failures, number=number, room=self._layout)
                await self._connection.send(frames)
            credit = self._unsaid_credit
            if credit and await self._connection.send(wire.pack(wire.Request(num_members=credit))):
                self._unsaid_credit = 0
            await self._unsent.wait()

    def _fits(self, num_bytes: int) -> bool:
        if not self._num_unacknowledged:
            return True
        return (
            self._num_unacknowledged < self._window.window_rollouts
            and self._unacknowledged_bytes + num_bytes <= self._window.window_bytes
        )

    def _hello(self) -> bytes:
        self._unsaid_credit = 0
        hello = wire.GeneratorHello(
            incarnation=self._version.incarnation,
            policy_version=self._version.policy_version if self._reported else -1,
            credit=self._credit,
            held=[(uid, member, attempt) for (uid, member), attempt in self._held.items()],
        )
        return bytes(wire.pack(hello)[0])

    def _take_welcome(self, payload: wire.Frame) -> None:
        self._window, _ = wire.WELCOME_FROM_BUFFER.unpack([payload])
        self._room.set()

    async def _receive(self) -> None:
        """Ends when the connection does."""
        with contextlib.suppress(ClosedError):
            while self._ended is None:
                message = await self._connection.receive()
                if message.kind == "joined":
                    await self._resume(message)
                elif message.kind == "data":
                    self._handle(message)
        self._end("the buffer process closed the connection")

    async def _resume(self, message: Message) -> None:
        """A new session: what the hello does not say, and what was not acknowledged, again."""
        self._take_welcome(message.frames[0])
        if self._reported:
            await self._connection.send(wire.pack(self._version))
        sent, self._sent = self._sent, {}
        self._outbox = [*itertools.chain.from_iterable(sent.values()), *self._outbox]
        self._outbox_bytes = sum(parcel.num_bytes for parcel in self._outbox)
        self._unsent.set()

    def _handle(self, message: Message) -> None:
        try:
            body, arrays = wire.TO_GENERATOR.unpack(message.frames)
            if isinstance(body, Lease):
                body, prompt_ids = wire.lease_from(body, arrays)
        except wire.FrameError as error:
            logger.warning("dropped a message of the buffer process: %s", error)
            return
        match body:
            case Lease():
                self._credit -= len(body.members)
                for member, attempt in zip(body.members, body.attempts, strict=True):
                    self._held[body.uid, member] = attempt
                self._leases.put_nowait((body, prompt_ids))
            case wire.Acks():
                self._forget(body)
                self._room.set()
            case wire.Cancel():
                for uid, member in [key for key in self._held if key[0] == body.uid]:
                    del self._held[uid, member]
                self._cancels.put_nowait(body.uid)
            case wire.End():
                self._end(body.reason)

    def _forget(self, acks: wire.Acks) -> None:
        others = {place: status for place, status, _ in acks.others}
        for place, parcel in enumerate(self._sent.pop(acks.number, ())):  # not there: sent again after a reconnect
            self._num_unacknowledged -= 1
            self._unacknowledged_bytes -= parcel.num_bytes
            content = parcel.content
            usual = "accepted" if isinstance(content, Rollout) else "failed"
            self.outcomes[others.get(place, usual)] += 1
            if self._held.get((content.uid, content.member)) == content.attempt:
                del self._held[content.uid, content.member]

    def _end(self, reason: str) -> None:
        if self._ended is None:
            self._ended = reason
            self._leases.close(reason)
            self._cancels.close(reason)
            self._room.set()
            self._unsent.set()


def portions_of(parcels: list[wire.Parcel]) -> Iterator[list[wire.Parcel]]:
    """In order, each as long as a delivery should be."""
    portion: list[wire.Parcel] = []
    num_bytes = 0
    for parcel in parcels:
        if portion and (num_bytes + parcel.num_bytes > DELIVERY_BYTES or len(portion) == wire.MAX_DELIVERED):
            yield portion
            portion, num_bytes = [], 0
        portion.append(parcel)
        num_bytes += parcel.num_bytes
    if portion:
        yield portion


class LearnerClient:
    """One learner rank's end: blocking calls, over an event loop in a thread of its own. Calls may come from any one
    thread at a time; `close` from any other ends them."""

    def __init__(
        self,
        address: str,
        *,
        rank: int,
        world_size: int,
        curve: CurveKeys | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        peer_timeout_s: float = PEER_TIMEOUT_S,
    ) -> None:
        self._hello = bytes(wire.pack(wire.LearnerHello(rank=rank, world_size=world_size))[0])
        self._rank = rank
        self._connection = Connection(
            address, name=f"learner-{rank}", curve=curve, heartbeat_s=heartbeat_s, peer_timeout_s=peer_timeout_s
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=f"learner-{rank}-buffer", daemon=True)
        self._requests = itertools.count(1)
        self._question: _Question | None = None
        self._ended: str | None = None  # the run is over, by the buffer's word
        self._broken: ClosedError | None = None  # the connection is
        self._pump: asyncio.Task[None] | None = None

    def connect(self, *, timeout_s: float) -> None:
        """Handshake with the buffer process; see `GeneratorClient.connect`."""
        self._thread.start()
        try:
            self._call(self._connect(timeout_s))
        except BaseException:
            self.close()
            raise

    def sample(self, *, policy_version: int, chunk: int = 0, timeout_s: float) -> Shard | None:
        """This rank's shard of a chunk of the step at `policy_version`; None at the end of the data or of the run.

        Chunks are asked for in order, up to the one with `is_last`; without `learner.stream_groups` that is the first.

        Raises:
            DeadlineExceededError: the chunk was not complete within `timeout_s`.
            ClosedError: the client was closed meanwhile.
            RuntimeError: the buffer refused, e.g. a version below its own.
        """
        return self._call(self._sample(policy_version, chunk, timeout_s))

    def advance(self, policy_version: int, *, commit: bool, timeout_s: float = 60.0) -> None:
        """Rank 0, after the optimizer step: the version is now `policy_version`; with `commit`, every earlier step is
        final. Returns when the buffer has noted it; at the end of the run at once. Raises as `sample`."""
        self._call(self._advance(policy_version, commit, timeout_s))

    def close(self) -> None:
        """End every wait and free socket and thread. May be called twice, from any thread."""
        if not self._thread.is_alive():
            return
        self._call(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _call(self, work: Coroutine[Any, Any, Result]) -> Result:
        if not self._thread.is_alive():
            work.close()
            raise ClosedError("the client is closed, or was never connected")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    async def _connect(self, timeout_s: float) -> None:
        await self._connection.connect(hello=self._hello, timeout_s=timeout_s)
        self._pump = asyncio.create_task(self._receive())

    async def _sample(self, policy_version: int, chunk: int, timeout_s: float) -> Shard | None:
        request = next(self._requests)
        message = wire.Sample(request=request, policy_version=policy_version, chunk=chunk)
        what = f"its shard of step {policy_version}{f' (chunk {chunk})' if chunk else ''}"
        return await self._ask(request, message, timeout_s, what)

    async def _advance(self, policy_version: int, commit: bool, timeout_s: float) -> None:
        request = next(self._requests)
        message = wire.Advance(request=request, policy_version=policy_version, commit=commit)
        await self._ask(request, message, timeout_s, f"the note of version {policy_version}")

    async def _ask(self, request: int, message: msgspec.Struct, timeout_s: float, what: str) -> Shard | None:
        if self._broken is not None:
            raise self._broken
        if self._ended is not None:
            return None
        question = self._question = _Question(request, wire.pack(message), self._loop.create_future())
        await self._connection.send(question.frames)
        try:
            async with asyncio.timeout(timeout_s):
                return await question.answer
        except TimeoutError:
            link = "up" if self._connection.up else "down"
            raise DeadlineExceededError(
                f"learner-{self._rank} waited {timeout_s:g} s for {what} from the buffer process at "
                f"{self._connection.address}; the link is {link}"
            ) from None
        finally:
            self._question = None

    async def _receive(self) -> None:
        """Ends when the connection does."""
        try:
            while True:
                message = await self._connection.receive()
                if message.kind == "joined" and self._question is not None:
                    await self._connection.send(self._question.frames)
                elif message.kind == "data":
                    self._handle(message)
        except ClosedError as error:
            self._break(str(error))

    def _handle(self, message: Message) -> None:
        try:
            body, arrays = wire.TO_LEARNER.unpack(message.frames)
            if isinstance(body, wire.End):
                self._ended = body.reason
                if self._question is not None and not self._question.answer.done():
                    self._question.answer.set_result(None)
            elif self._question is not None and body.request == self._question.request:
                self._question.take(body, arrays)
        except wire.FrameError as error:
            logger.warning("dropped a message of the buffer process: %s", error)

    def _break(self, reason: str) -> None:
        if self._broken is None and self._ended is None:
            self._broken = ClosedError(reason)
        if self._question is not None and not self._question.answer.done():
            self._question.answer.set_exception(ClosedError(reason))

    async def _close(self) -> None:
        self._break("the client was closed")
        await self._connection.close()
        if self._pump is not None:
            await asyncio.wait([self._pump])


class _Question:
    """One open request of a rank, and the answer as far as it has come."""

    def __init__(self, request: int, frames: list[wire.Frame], answer: asyncio.Future[Shard | None]) -> None:
        self.request = request
        self.frames = frames
        self.answer = answer
        self._head: wire.ShardHead | None = None
        self._groups: list[RolloutGroup] = []

    def take(self, body: Any, arrays: list[wire.Array]) -> None:
        """One message of the answer. A head starts it anew: it was asked again after a reconnect."""
        if self.answer.done():
            return
        match body:
            case wire.ShardHead():
                self._head, self._groups = body, []
            case wire.GroupMessage():
                self._groups.append(wire.group_from(body, arrays))
            case wire.Answer(status="refused", detail=detail):
                self.answer.set_exception(RuntimeError(f"the buffer process refused: {detail}"))
            case wire.Answer():
                self.answer.set_result(None)
        head = self._head
        if head is not None and len(self._groups) == head.num_shard_groups and not self.answer.done():
            self.answer.set_result(
                Shard(
                    groups=self._groups,
                    num_groups=head.num_groups,
                    num_rollouts=head.num_rollouts,
                    num_tokens=head.num_tokens,
                    num_response_tokens=head.num_response_tokens,
                    is_last=head.is_last,
                )
            )
