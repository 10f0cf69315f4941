"""The buffer process: leases to generators, rollouts into the ReplayBuffer, shards to learner ranks.

    PromptSource --next--> LeaseBook --Lease--> generator --Rollout, Failure--> ReplayBuffer --ShardHead, groups--> rank
                              ^  |                ^  |                              |
                              |  +-----Cancel-----+  +--Request (credit)            +--Ack--> generator
                              +--- members that failed, were lost with their generator, or never arrived

Everything happens in reaction to messages, a group deadline or `stop`; there is no polling. After the messages that
have arrived, in this order: what was settled is acknowledged, waiting ranks are served if their batch is complete,
credit is turned into leases as far as admission allows.
Members go only to generators that have proven weights of version g >= v - S, else they would be born stale. A new group
also needs room by `ReplayBuffer.capacity`, counted from g and not from v: the learner's new version opens no room
to a generator that has yet to load it. It goes out whole if some credit lets it.

Waits: `run` waits for the next message or group deadline; peers, the clock or `stop` end it. Nothing else waits: sends
never do (streamrl/transport.py), so one message is handled to its end before the next.
"""

from __future__ import annotations

import asyncio
import collections
import logging
import pathlib
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from buffers.desk import ShardDesk
from buffers.leases import SOMEBODY_ELSE, LeaseBook, note_of
from buffers.outcomes import InsertOutcome
from buffers.replay import ReplayBuffer
from streamrl import wire
from streamrl.config import BufferConfig, Config, check_config
from streamrl.errors import ClosedError, ConfigError
from streamrl.records import BufferStats, Failure, Prompt, Rollout, Wait
from streamrl.transport import HEARTBEAT_S, PEER_TIMEOUT_S, CurveKeys, Listener, Message

WINDOW_ROLLOUTS = 1024  # what one generator may have sent without an acknowledgement
WINDOW_BYTES = 16 << 20  # or one rollout: enough to fill the link, little enough to stay in the cache

logger = logging.getLogger(__name__)


class PromptSource(Protocol):
    """Which prompt next. Not thread-safe: one owner, the buffer server."""

    @property
    def exhausted(self) -> bool:
        """Whether `next` gives None from now on."""

    def next(self) -> Prompt | None:
        """The next prompt instance, or None at the end of the data."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


class _Attempt(Protocol):
    """A rollout, its head or a failure."""

    @property
    def uid(self) -> str: ...
    @property
    def member(self) -> int: ...
    @property
    def attempt(self) -> int: ...


@dataclass(slots=True)
class _Generator:
    name: str
    credit: int  # members asked for and not leased yet
    policy_version: int  # proven; -1 before the first report
    idle_since: float = 0.0  # unix time since which its credit has been waiting; 0 if it is not


class BufferServer:
    """See the module docstring.

    Args:
        source: where prompts come from; the server owns it.
        bind: address to listen on, if it is not a free port of config.network.host.
        curve: keys of a listener; needed unless the address is a loopback one.
        journal_path: folder of the journal, needed unless buffer.journal is `off`. If a server before this one left its
            journal there, this one goes on where that was: `source` must be at the start of the data.
        peer_timeout_s: silence after which a generator's members are leased to others.
    """

    def __init__(
        self,
        config: Config,
        source: PromptSource,
        *,
        bind: str = "",
        curve: CurveKeys | None = None,
        journal_path: str | pathlib.Path | None = None,
        heartbeat_s: float = HEARTBEAT_S,
        peer_timeout_s: float = PEER_TIMEOUT_S,
    ) -> None:
        self._config = config
        self._source = source
        self.buffer = ReplayBuffer(
            config.buffer,
            group_size=config.algorithm.num_members,
            has_baseline=config.algorithm.has_baseline,
            groups_per_step=config.learner.groups_per_step,
            issued_only=True,
            journal_path=journal_path,
            seed=config.run.seed,
        )
        self.leases = LeaseBook()
        for group in self.buffer.open_groups():
            self.leases.restore(group)
        for _ in range(self.buffer.stats().issued):
            source.next()
        self._desk = ShardDesk(
            self.buffer,
            groups_per_step=config.learner.groups_per_step,
            stream_groups=config.learner.stream_groups,
            ranks=config.learner.ranks,
            exhausted=lambda: source.exhausted,
        )
        self._listener = Listener(
            bind=bind or config.network.bind,
            curve=curve,
            welcome=self._welcome,
            heartbeat_s=heartbeat_s,
            peer_timeout_s=peer_timeout_s,
        )
        self._peer_timeout_s = peer_timeout_s
        self._generators: dict[str, _Generator] = {}
        self._ranks: dict[str, int] = {}  # peer -> rank
        self._arrived: list[tuple[str, wire.Delivery, list[wire.Array]]] = []  # generator, and what it sent
        self._malformed: collections.Counter[str] = collections.Counter()  # by peer
        self._pause: asyncio.Timeout | None = None  # of `run`, while it waits
        self._ended: str | None = None

    async def start(self) -> str:
        """Returns the address that clients connect to."""
        return await self._listener.start()

    async def run(self) -> None:
        """Serve until `stop`.

        Raises:
            StaleRolloutError: the bound is broken; the run must end.
        """
        absent_at = time.monotonic() + self._peer_timeout_s if self.leases.num_held(SOMEBODY_ELSE) else None
        while self._ended is None:
            due = min((d for d in (self.buffer.next_deadline(), absent_at) if d is not None), default=None)
            wait_s = None if due is None else due - time.monotonic()
            if wait_s is not None and wait_s <= 0:
                await self._close_groups(self.buffer.expire())
                if absent_at is not None and time.monotonic() >= absent_at:
                    absent_at = None
                    await self._leave(SOMEBODY_ELSE, "the server was restarted")
            else:
                self._pause = asyncio.timeout(wait_s)
                messages: list[Message] = []
                try:
                    async with self._pause:
                        messages = await self._listener.receive_all()
                except TimeoutError:
                    pass  # a deadline has come, or was moved by `reconfigure`
                except ClosedError:
                    return
                finally:
                    self._pause = None
                if self._ended is not None:
                    return
                for message in messages:
                    await self._handle(message)
                await self._insert_arrived()
            for peer, answer in self._desk.answers():
                await self._listener.send(peer, answer)
            await self._dispatch()

    async def stats(self) -> BufferStats:
        """The ledger, and who waits for whom."""
        stats = self.buffer.stats()
        rejected = dict(stats.rejected_rollouts)
        malformed = sum(self._malformed.values()) + self._listener.num_malformed
        if malformed:
            rejected["malformed"] = rejected.get("malformed", 0) + malformed
        return msgspec.structs.replace(
            stats,
            rejected_rollouts=rejected,
            refused_peers=self._listener.num_refused,
            waits=self._waits(stats),
        )

    async def reconfigure(self, settings: BufferConfig) -> list[str]:
        """Change the `buffer` section while it runs, all but the journal. What follows from that happens at once.

        Returns the uids that a smaller max_staleness discarded; their members are cancelled.

        Raises:
            ConfigError: the settings contradict the others of the run, or change the journal; nothing was changed.
            ClosedError: the run has ended.
        """
        config = msgspec.structs.replace(self._config, buffer=settings)
        check_config(config)
        if settings.journal != self._config.buffer.journal:
            raise ConfigError(
                f"buffer.journal ({settings.journal}): cannot be changed while the run goes on, which began with "
                f"{self._config.buffer.journal}. Leave it as it is."
            )
        discarded = self.buffer.reconfigure(settings)
        self._config = config
        await self._close_groups(discarded)
        if self._pause is not None and not self._pause.expired():
            self._pause.reschedule(0.0)  # there may be room, a batch, or a nearer deadline now
        return discarded

    async def stop(self, *, reason: str, final_version: int) -> BufferStats:
        """End the run: undo the use of a batch that the learner did not finish (`final_version` is its last version),
        discard what is in flight, tell every client, free the socket. Returns the final ledger. Bounded."""
        if self._ended is None:
            self._ended = reason
            if self.buffer.sampled_at(final_version):
                self.buffer.rollback(final_version)
            elif final_version > self.buffer.stats().policy_version:
                self.buffer.advance(final_version)
            self.buffer.discard_in_flight(reason)
            for peer in [*self._generators, *self._ranks]:
                await self._send(peer, wire.End(reason=reason))
            await self._listener.close(reason=reason)
            self.buffer.close()
        return await self.stats()

    # -- peers --

    def _welcome(self, name: str, payload: bytes) -> bytes:
        hello, _ = wire.HELLO_TO_BUFFER.unpack([payload])
        if isinstance(hello, wire.GeneratorHello):
            welcome = wire.GeneratorWelcome(window_rollouts=WINDOW_ROLLOUTS, window_bytes=WINDOW_BYTES)
            return bytes(wire.pack(welcome)[0])
        ranks = self._config.learner.ranks
        if hello.world_size != ranks or hello.rank >= ranks:
            raise ConfigError(f"rank {hello.rank} of {hello.world_size}: this run has learner.ranks={ranks}")
        if name != f"learner-{hello.rank}":
            raise ConfigError(f"name ({name}): it is not that of learner rank {hello.rank}")
        return b""

    async def _handle(self, message: Message) -> None:
        peer = message.peer
        if message.kind == "data":
            try:
                body, arrays = wire.TO_BUFFER.unpack(message.frames)
            except wire.FrameError as error:
                self._count_malformed(peer, error)
                return
            if peer in self._generators:
                await self._handle_generator(self._generators[peer], body, arrays)
                return
        await self._insert_arrived()  # what follows builds on it
        if message.kind == "joined":
            await self._join(peer, message.frames[0])
        elif message.kind == "left":
            await self._leave(peer, message.reason)
        else:
            await self._handle_rank(peer, self._ranks[peer], body)

    async def _join(self, peer: str, payload: wire.Frame) -> None:
        hello, _ = wire.HELLO_TO_BUFFER.unpack([payload])
        if isinstance(hello, wire.LearnerHello):
            self._ranks[peer] = hello.rank
            return
        self._generators[peer] = _Generator(peer, hello.credit, hello.policy_version)
        for uid in self.leases.reconcile(peer, hello.held):
            await self._send(peer, wire.Cancel(uid=uid))

    async def _leave(self, peer: str, reason: str) -> None:
        """What it held is generated by others."""
        self._desk.leave(self._ranks.pop(peer, -1))
        self._generators.pop(peer, None)
        held = self.leases.held_by(peer)
        if held:
            logger.warning("%s left with %d members, which others generate now: %s", peer, len(held), reason)
        for uid, member, attempt in held:
            if self.leases.is_current(uid, member, attempt):
                await self._fail(Failure(uid=uid, member=member, attempt=attempt, reason="generator_lost"))

    def _count_malformed(self, peer: str, error: wire.FrameError) -> None:
        self._malformed[peer] += 1
        if self._malformed[peer] == 1:
            logger.warning("dropped a message of %s: %s; further ones are only counted", peer, error)

    # -- generators --

    async def _handle_generator(self, generator: _Generator, body: Any, arrays: list[wire.Array]) -> None:
        match body:
            case wire.Delivery():
                self._arrived.append((generator.name, body, arrays))
            case wire.Request():
                generator.credit += body.num_members
            case wire.Report():
                generator.policy_version = body.policy_version
            case _:
                self._count_malformed(generator.name, wire.FrameError("kind", f"{type(body).__name__} of a generator"))

    async def _insert_arrived(self) -> None:
        """The rollouts that came together go into the buffer together; each delivery is acknowledged as a whole."""
        arrived, self._arrived = self._arrived, []
        decoded = [self._rollouts_of(*delivery) for delivery in arrived]
        sound = [rollout for rollouts in decoded for rollout in rollouts if isinstance(rollout, Rollout)]
        outcomes = iter(self.buffer.insert_many(sound, from_wire=True) if sound else [])
        for (generator, delivery, _), rollouts in zip(arrived, decoded, strict=True):
            others: list[tuple[int, str, str]] = []
            for place, rollout in enumerate(rollouts):
                if isinstance(rollout, Rollout):
                    status, reason = await self._settle(rollout, next(outcomes))
                else:
                    self._count_malformed(generator, rollout)
                    await self._fail_current(delivery.heads[place], "malformed")
                    status, reason = "rejected", "malformed"
                if status != "accepted":
                    others.append((place, status, reason))
            for failure in delivery.failures:
                await self._fail(failure)
            await self._send(generator, wire.Acks(number=delivery.number, others=others))

    def _rollouts_of(
        self, generator: str, delivery: wire.Delivery, arrays: list[wire.Array]
    ) -> list[Rollout | wire.FrameError]:
        try:
            return wire.rollouts_from(delivery, arrays)
        except wire.FrameError as error:
            if not delivery.heads:
                self._count_malformed(generator, error)
            return [error] * len(delivery.heads)

    async def _settle(self, rollout: Rollout, outcome: InsertOutcome) -> tuple[str, str]:
        if outcome.group_discarded:
            await self._close_groups([rollout.uid])
        elif outcome.status == "accepted":
            self.leases.settle(rollout.uid, rollout.member)
        elif outcome.status == "rejected":
            await self._fail_current(rollout, outcome.reason)
        return outcome.status, outcome.reason

    async def _fail_current(self, what: _Attempt, reason: str) -> None:
        """If somebody was to deliver this very attempt, the member is still missing."""
        if self.leases.is_current(what.uid, what.member, what.attempt):
            await self._fail(Failure(uid=what.uid, member=what.member, attempt=what.attempt, reason=reason))

    async def _fail(self, failure: Failure) -> None:
        decision = self.buffer.fail(failure)
        if decision.action == "refill":
            self.leases.refill(failure.uid, failure.member, decision.attempt)
        elif decision.action in ("wait", "given_up"):
            self.leases.settle(failure.uid, failure.member)
        elif decision.action == "discarded":
            await self._close_groups([failure.uid])

    async def _close_groups(self, uids: Iterable[str]) -> None:
        """Nothing of these groups is wanted any more."""
        for uid in uids:
            for generator in self.leases.close(uid):
                await self._send(generator, wire.Cancel(uid=uid))

    async def _dispatch(self) -> None:
        """Turn credit into leases: refills to anyone, new groups whole. Nothing more happens until the next event."""
        if not any(g.credit for g in self._generators.values()):
            return
        oldest = self.buffer.stats().policy_version - self._config.buffer.max_staleness
        while True:
            ready = [g for g in self._generators.values() if g.credit and g.policy_version >= max(0, oldest)]
            if not self.leases.has_pending:
                ready = [g for g in ready if self._has_room(g) and self._is_admitted(g)]
                if not ready or not self._open_group():
                    break
            if not ready:
                break
            generator = max(ready, key=lambda g: g.credit)
            leased = self.leases.take(generator.name, generator.credit)
            assert leased is not None
            lease, prompt_ids = leased
            if await self._listener.send(generator.name, wire.encode_lease(lease, prompt_ids)):
                generator.credit -= len(lease.members)
            else:  # its link is down; its next hello says its credit again
                generator.credit = 0
                for member, attempt in zip(lease.members, lease.attempts, strict=True):
                    self.leases.refill(lease.uid, member, attempt)
        for generator in self._generators.values():
            idle = generator.credit > 0 and self._has_room(generator)
            generator.idle_since = (generator.idle_since or time.time()) if idle else 0.0

    def _has_room(self, generator: _Generator) -> bool:
        """For a whole group; or for a part, where waiting for room for a whole one would leave too much of it idle."""
        size = self._config.algorithm.num_members
        return generator.credit >= size or generator.credit + self.leases.num_held(generator.name) < 4 * size

    def _is_admitted(self, generator: _Generator) -> bool:
        return not self._source.exhausted and self.buffer.capacity(policy_version=generator.policy_version) > 0

    def _open_group(self) -> bool:
        prompt = self._source.next()
        if prompt is None:
            return False
        self.buffer.issue(prompt.uid, note=note_of(prompt))
        self.leases.open(prompt, group_size=self._config.algorithm.num_members)
        return True

    # -- learner ranks --

    async def _handle_rank(self, peer: str, rank: int, body: Any) -> None:
        match body:
            case wire.Sample(policy_version=version) | wire.Advance(policy_version=version):
                current = self.buffer.stats().policy_version
                if version < current:
                    detail = f"version {version} is below the buffer's ({current})"
                    await self._send(peer, wire.Answer(request=body.request, status="refused", detail=detail))
                    return
                await self._close_groups(self.buffer.advance(version))
                if isinstance(body, wire.Sample):
                    self._desk.ask(rank, peer, body)
                    return
                if body.commit:
                    self.buffer.commit(version)
                await self._send(peer, wire.Answer(request=body.request, status="done"))
            case _:
                self._count_malformed(peer, wire.FrameError("kind", f"{type(body).__name__} of a learner rank"))

    def _waits(self, stats: BufferStats) -> list[Wait]:
        waits = self._desk.waits(stats)
        oldest = max(0, stats.policy_version - stats.max_staleness)
        for g in self._generators.values():
            if not g.idle_since:
                continue
            if g.policy_version < oldest:
                what = f"weights of version {oldest} or newer"
            elif self._source.exhausted:
                what = "the end of the run: there are no more prompts"
            else:
                what = f"admission: {stats.capacity} groups may be started"
            waits.append(Wait(waiter=g.name, waiting_for=what, owner="learner", since=g.idle_since))
        return waits

    async def _send(self, peer: str, message: msgspec.Struct) -> None:
        """A message that is lost with its session is made good by the next hello, or sent again on request."""
        await self._listener.send(peer, wire.pack(message))
