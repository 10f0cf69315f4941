"""Keeps one engine at the learner's newest version, and proves each version before it counts.

    next update -> fetch -> pause -> load -> resume -> probe -> proven: report and acknowledge
                     ^                                       -> refuted, once: fetch and load again, in full
                beside generation                            -> refuted twice: the end

Invariants:
- A version is reported only after the engine has loaded it and its log-probs of the probe agreed with the learner's.
- A request that had no token yet when the weights changed is aborted, to be started again by its owner: no token of a
  new version is sampled on a prompt that old weights have read.
- No request enters the engine while its weights change (`open`).
- A version that was overwritten before it was fetched is skipped; the engine keeps what it has.
- Generation stands still for the load alone, whatever becomes of the running requests (weight_sync.in_flight).

Waits: `connect` and `first` for the learner, each within weight_sync.timeout_s; `follow` for the next publication (the
learner ends it, or `close`), and within it for the backend and for engine steps, each update within
weight_sync.timeout_s.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from actors.busy_meter import BusyMeter
from actors.engine import Engine
from actors.version_gate import VersionGate
from streamrl.config import Config
from streamrl.errors import WeightSyncError
from streamrl.records import WeightAck, WeightUpdate
from streamrl.transport import CurveKeys
from streamrl.weight_sync.channel import ProbeSet, WeightSubscriber
from streamrl.weight_sync.probe import TOLERANCE, probe_difference

_LOADS = 2  # of one version: the second one is for a load that went wrong in a way that does not repeat

_REMEMBERED_SYNCS = 16  # for who asks for the status; more than there can be between two looks at it

Report = Callable[[WeightUpdate], Awaitable[None]]


@dataclass
class _Swap:
    """Seconds of the steps around the load, summed over the loads of one version."""

    drain_s: float = 0.0
    pause_s: float = 0.0
    load_s: float = 0.0


class WeightFollower:
    """The generator's side of weight sync. Lives in its event loop."""

    def __init__(self, config: Config, *, name: str, engine: Engine, meter: BusyMeter) -> None:
        self._name = name
        self._engine = engine
        self._meter = meter
        self._limit_s = config.weight_sync.timeout_s
        self._tolerance = config.weight_sync.probe_tolerance or TOLERANCE[config.model.dtype]
        self._dtype = config.model.dtype
        self._in_flight = config.weight_sync.in_flight
        self._drain_s = config.weight_sync.drain_s
        self._subscriber: WeightSubscriber | None = None
        self._probe = ProbeSet([])
        self.gate = VersionGate()
        self.open = asyncio.Event()
        """Set while requests may enter the engine."""
        self.refused = False
        """The weights in the engine are wrong for good."""
        self.recent_syncs: collections.deque[WeightAck] = collections.deque(maxlen=_REMEMBERED_SYNCS)
        self.syncs = 0

    @property
    def last_sync(self) -> WeightAck | None:
        return self.recent_syncs[-1] if self.recent_syncs else None

    async def connect(self, address: str, *, curve: CurveKeys | None) -> None:
        """Join the channel.

        Raises:
            DeadlineExceededError: the learner did not answer in time.
        """
        self._subscriber = WeightSubscriber(address, name=self._name, curve=curve, timeout_s=self._limit_s)
        self._probe = await self._subscriber.connect(timeout_s=self._limit_s)

    async def first(self, report: Report, *, incarnation: int) -> None:
        """Load and prove the current version of this life of the learner, or of a later one.

        Raises:
            WeightSyncError: there was none in time, or it could not be proven.
        """
        assert self._subscriber is not None, "first before connect"
        while self.gate.proven_version is None:
            try:
                update = await asyncio.wait_for(self._subscriber.next(), self._limit_s)
            except TimeoutError:
                raise WeightSyncError(f"{self._name}: no weights came within {self._limit_s:g} s") from None
            if update.incarnation >= incarnation:
                await self._apply(update, report)

    async def follow(self, report: Report) -> None:
        """Apply every update that comes, the newest at any time, until the channel ends (ClosedError).

        Raises:
            WeightSyncError: an update did not load, was not proven twice, or took longer than weight_sync.timeout_s.
        """
        assert self._subscriber is not None, "follow before connect"
        while True:
            await self._apply(await self._subscriber.next(), report)

    async def close(self) -> None:
        self.gate.close()
        if self._subscriber is not None:
            await self._subscriber.close()

    async def _apply(self, update: WeightUpdate, report: Report) -> None:
        try:
            async with asyncio.timeout(self._limit_s):
                ack = await self._load_and_prove(update)
        except TimeoutError:
            raise WeightSyncError(
                f"{self._name}: version {update.policy_version} was not loaded and proven within "
                f"weight_sync.timeout_s ({self._limit_s:g} s)"
            ) from None
        if ack is None:
            return
        assert self._subscriber is not None
        self.recent_syncs.append(ack)
        self.syncs += 1
        if ack.ok:
            await report(update)
        await self._subscriber.acknowledge(ack)
        if not ack.ok:
            await self._refuse()
            raise WeightSyncError(
                f"{self._name}: version {update.policy_version} was loaded {_LOADS} times, {ack.reason}"
            )

    async def _refuse(self) -> None:
        """The engine must not serve any more: end what is in it, and let nothing in."""
        self.refused = True
        self.open.set()  # whoever waits there sees `refused`
        await self._engine.abort_all()

    async def _load_and_prove(self, update: WeightUpdate) -> WeightAck | None:
        """None: the version was overwritten, and a newer one is out."""
        assert self._subscriber is not None
        transfer_s = probe_s = 0.0
        swap = _Swap()
        for _ in range(_LOADS):
            began = time.perf_counter()
            payload = await self._subscriber.fetch(update)
            if payload is None:
                return None
            fetched = time.perf_counter()
            label = self.gate.begin(update.incarnation, update.policy_version)
            await self._load(update, payload, label, swap)
            resumed = time.perf_counter()
            difference = await self._probe_difference(update, label)
            transfer_s += fetched - began
            probe_s += time.perf_counter() - resumed
            proven = difference <= self._tolerance
            if proven:
                self.gate.prove(label)
                break
            self.gate.refute(label)
        return WeightAck(
            generator=self._name,
            incarnation=update.incarnation,
            policy_version=update.policy_version,
            ok=proven,
            reason="" if proven else f"its probe is off by {difference:.3g}, more than {self._tolerance:.3g}",
            transfer_s=transfer_s,
            drain_s=swap.drain_s,
            pause_s=swap.pause_s,
            load_s=swap.load_s,
            probe_s=probe_s,
            total_s=time.time() - update.published_at,
            num_bytes=self._subscriber.num_bytes,
            probe_difference=difference,
        )

    async def _load(self, update: WeightUpdate, payload: dict[str, Any], label: str, swap: _Swap) -> None:
        """Change the weights under the running requests."""
        self.open.clear()
        began = time.perf_counter()
        if self._in_flight == "drain":
            with contextlib.suppress(TimeoutError):  # what runs on is kept
                await asyncio.wait_for(self._engine.drained(), self._drain_s)
        drained = time.perf_counter()
        self._meter.pause(True)
        await self._engine.pause()
        await self._engine.abort_unstarted()
        paused = time.perf_counter()
        try:
            await self._engine.load(payload, label=label)
            loaded = time.perf_counter()
            if self._in_flight == "recompute":
                await self._engine.forget()
        except Exception as error:  # vLLM passes a worker's error on as a bare Exception
            await self._refuse()  # the model may be half loaded, so it stays paused
            what = f"{self._name}: version {update.policy_version} did not load: {error}"
            raise WeightSyncError(what) from error
        self.gate.loaded(label)
        await self._engine.resume()
        self._meter.pause(False)
        self.open.set()
        swap.drain_s += drained - began
        swap.load_s += loaded - paused
        swap.pause_s += time.perf_counter() - drained

    async def _probe_difference(self, update: WeightUpdate, label: str) -> float:
        scores = await self._engine.score(self._probe.sequences, request_id=f"probe-{label}")
        return probe_difference(scores, update.probe_log_probs, dtype=self._dtype)
