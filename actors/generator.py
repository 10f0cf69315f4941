"""Prompts to rollouts, without a pause: one engine, kept full, whose weights change under the running requests.

    lease (buffer) -> members -> engine -> gate (are the weights proven?) -> reward -> rollout (buffer)
    weight update (learner) -> pause -> load -> resume -> probe -> report the version

Invariants:
- A rollout leaves only when every token of it was sampled by weights whose probe agreed with the learner's
  (`VersionGate`), and the version is reported only then. A disagreement is answered by one full reload; the second
  one ends the generator.
- A request that had no token yet when the weights changed is started again, so that no token of a new version is
  sampled on a prompt that old weights have read. The prefix cache is salted with the label of the weights for the
  same reason.
- A member ends in exactly one of: a rollout sent, a failure sent, or silence because its uid was cancelled.
- The seed of a request depends on (run seed, uid, member, attempt) and on nothing else.

Waits: for a lease (the buffer ends it), for engine steps (vLLM), for a verdict of the gate (the probe, within
weight_sync.timeout_s), for a reward (its time limit), for the next weight update (the learner). `stop` ends them all.
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
import itertools
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
from buffers.client import GeneratorClient

from actors.engine import Completion, Engine, EngineFailure
from actors.rewards import RewardWorker
from actors.version_gate import VersionGate
from streamrl.config import Config
from streamrl.errors import ClosedError, ProcessDiedError, RewardError, StreamrlError, WeightSyncError
from streamrl.records import (
    Failure,
    GeneratorStatus,
    IntArray,
    Lease,
    Rollout,
    RolloutTimings,
    Wait,
    WeightAck,
    WeightUpdate,
)
from streamrl.transport import CurveKeys
from streamrl.weight_sync.channel import ProbeSet, WeightSubscriber

_FLUSH_S = 2.0  # for finished rollouts to reach the buffer in `stop`
_FAIL_S = 5.0  # for the members of refuted weights to be reported


class UnprovenWeights(StreamrlError):
    """A member's tokens were sampled by weights that the learner's probe refuted."""


class Generator:
    """One generator process of a run."""

    def __init__(self, config: Config, *, index: int, model_path: str, curve: CurveKeys | None = None) -> None:
        self.name = f"generator-{index}"
        self._config = config
        self._model_path = model_path
        self._curve = curve
        self._engine = Engine(config, model_path=model_path)
        self._rewards = RewardWorker(config)
        self._gate = VersionGate()
        self._tokenizer: Any = None
        self._stop_ids: list[int] = []
        self._client: GeneratorClient | None = None
        self._subscriber: WeightSubscriber | None = None
        self._probe = ProbeSet([])
        self._broken: asyncio.Future[None] | None = None
        self._stopped = asyncio.Event()
        self._open = asyncio.Event()  # requests may enter the engine
        self._refused = False  # the weights in the engine are wrong for good
        self._wanted = asyncio.Event()  # there may be room for more members
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}
        self._granted = 0  # credit given to the buffer, not yet leased
        self._running = 0  # members leased and not yet through the engine
        self._scoring = 0
        self._evaluations = asyncio.Semaphore(config.generator.concurrency)
        self._request_numbers = itertools.count()
        self._meter = _Meter()
        self._last_sync: WeightAck | None = None
        self._syncs = 0
        self._tokens = self._finished = self._failed = 0
        self._wait: Wait | None = None

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring engine, tokenizer and reward processes up."""
        await asyncio.gather(self._engine.start(), self._rewards.start())
        from transformers import AutoTokenizer

        self._tokenizer = await asyncio.to_thread(AutoTokenizer.from_pretrained, self._model_path)
        if self._tokenizer.eos_token_id is not None:
            self._stop_ids = [self._tokenizer.eos_token_id]

    async def connect(self, *, buffer_address: str, weight_address: str, incarnation: int) -> None:
        """Join the buffer and the weight channel, then load and prove the current version.

        Raises:
            DeadlineExceededError: one of them did not answer within weight_sync.timeout_s.
            WeightSyncError: the first weights could not be proven.
        """
        limit = self._config.weight_sync.timeout_s
        self._broken = asyncio.get_running_loop().create_future()
        self._client = GeneratorClient(buffer_address, name=self.name, curve=self._curve)
        self._subscriber = WeightSubscriber(weight_address, name=self.name, curve=self._curve)
        self._probe = await self._subscriber.connect(timeout_s=limit)
        await self._client.connect(timeout_s=limit)
        self._wait_for("the first weights", "learner-0")
        while self._gate.proven_version is None:
            try:
                update = await asyncio.wait_for(self._subscriber.next(), limit)
            except TimeoutError:
                raise WeightSyncError(f"{self.name}: no weights were published within {limit:g} s") from None
            if update.incarnation >= incarnation:
                await self._apply(update)
        self._wait = None

    async def run(self) -> None:
        """Serve until `stop`, or until the buffer and the learner have ended. Raises what broke."""
        assert self._broken is not None, "run before connect"
        self._meter.begin()
        self._wanted.set()
        self._wait_for("a lease", "buffer")
        loops: list[asyncio.Task[None]] = [
            asyncio.create_task(work())
            for work in (self._take_leases, self._take_cancels, self._grant, self._follow_weights, self._engine.died)
        ]
        stopped = asyncio.create_task(self._stopped.wait())
        ends: list[asyncio.Future[Any]] = [*loops, stopped, self._broken]
        try:
            done, _ = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if stopped in done:
                return
            for end in done:
                try:
                    end.result()
                except ClosedError:
                    continue  # the other side has ended in good order
                except ProcessDiedError as error:
                    raise ProcessDiedError(f"{self.name}: {error}") from error
        finally:
            for task in (*loops, stopped):
                task.cancel()
            await asyncio.gather(*loops, stopped, return_exceptions=True)

    async def stop(self) -> None:
        """Drop what is in the engine, flush what is finished, end the engine's process; idempotent, bounded."""
        self._stopped.set()
        members = [task for tasks in self._tasks.values() for task in tasks]
        for task in members:
            task.cancel()
        await asyncio.gather(*members, return_exceptions=True)
        self._gate.close()
        if self._client is not None:
            await self._client.close(timeout_s=_FLUSH_S)
        if self._subscriber is not None:
            await self._subscriber.close()
        await asyncio.gather(self._rewards.close(), self._engine.stop())

    async def status(self) -> GeneratorStatus:
        """What can be said without asking anyone."""
        proven = self._gate.proven_version
        return GeneratorStatus(
            name=self.name,
            policy_version=proven.policy_version if proven else -1,
            incarnation=proven.incarnation if proven else 0,
            running=self._running,
            scoring=self._scoring,
            unacknowledged=self._client.unacknowledged if self._client else 0,
            generated_tokens=self._tokens,
            finished_rollouts=self._finished,
            failed_members=self._failed,
            busy_s=self._meter.busy_s,
            uptime_s=self._meter.uptime_s,
            kv_usage=self._engine.kv_usage,
            last_sync=self._last_sync,
            syncs=self._syncs,
            wait=self._wait,
        )

    # -- members -------------------------------------------------------------------------------------------------

    async def _grant(self) -> None:
        """Ask the buffer for as many members as the engine has room for, unless rewards cannot keep up."""
        assert self._client is not None
        concurrency = self._config.generator.concurrency
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            room = concurrency - self._running - self._granted
            if room > 0 and self._scoring < concurrency and not self._refused:
                self._granted += room
                await self._client.request(room)

    async def _take_leases(self) -> None:
        assert self._client is not None
        while True:
            lease, prompt_ids = await self._client.next_lease()
            self._granted -= len(lease.members)
            self._count(running=len(lease.members))
            for member, attempt in zip(lease.members, lease.attempts, strict=True):
                task = asyncio.create_task(self._serve(lease, prompt_ids, member, attempt))
                self._tasks.setdefault(lease.uid, set()).add(task)
                task.add_done_callback(functools.partial(self._on_served, lease.uid))

    async def _take_cancels(self) -> None:
        assert self._client is not None
        while True:
            for task in self._tasks.get(await self._client.next_cancel(), ()):
                task.cancel()

    def _on_served(self, uid: str, task: asyncio.Task[None]) -> None:
        self._tasks[uid].discard(task)
        if not self._tasks[uid]:
            del self._tasks[uid]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    async def _serve(self, lease: Lease, prompt_ids: IntArray, member: int, attempt: int) -> None:
        """One member, from its lease to a rollout or a failure."""
        assert self._client is not None
        leased_at = time.monotonic()
        try:
            try:
                completion = await self._complete(
                    prompt_ids.tolist(),
                    key=f"{lease.uid}/{member}/{attempt}",
                    temperature=self._config.generator.temperature,
                    seed=_seed(self._config.run.seed, lease.uid, member, attempt),
                )
            finally:
                self._count(running=-1)
            sampled_at = time.monotonic()
            self._count(scoring=1)
            try:
                await self._require_proven(completion)
                text = self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)
                reward, parts = await self._rewards.score(lease.task, text)
            finally:
                self._count(scoring=-1)
        except (RewardError, UnprovenWeights, EngineFailure) as error:
            self._failed += 1
            await self._client.fail(
                Failure(uid=lease.uid, member=member, attempt=attempt, reason=_reason(error), detail=str(error)[:1000])
            )
            return
        versions = np.empty(len(completion.token_ids), dtype=np.int32)
        for label, begin, end in completion.spans:
            versions[begin:end] = self._gate.version_of(label).policy_version
        self._tokens += len(completion.token_ids)
        self._finished += 1
        scored_at = time.monotonic()
        await self._client.send(
            Rollout(
                uid=lease.uid,
                member=member,
                attempt=attempt,
                prompt_ids=prompt_ids,
                response_ids=np.array(completion.token_ids, dtype=np.int32),
                old_log_probs=np.array(completion.log_probs, dtype=np.float32),
                versions=versions,
                incarnation=min(self._gate.version_of(label).incarnation for label in completion.labels),
                reward=reward,
                reward_parts=parts,
                finish_reason="stop" if completion.finish_reason == "stop" else "length",
                generator=self.name,
                timings=RolloutTimings(
                    queue_s=completion.first_token_at - leased_at,
                    generate_s=sampled_at - completion.first_token_at,
                    reward_s=scored_at - sampled_at,
                    finished_at=time.time(),
                ),
            )
        )

    async def _complete(self, prompt_ids: list[int], *, key: str, temperature: float, seed: int) -> Completion:
        """One response, started again for as long as the weights change before its first token.

        Raises:
            UnprovenWeights: the weights in the engine are known to be wrong.
            EngineFailure: the engine failed this request.
        """
        limit = min(self._config.generator.max_new_tokens, self._config.model.max_length - len(prompt_ids))
        while True:
            await self._open.wait()
            if self._refused:
                raise UnprovenWeights("the engine's weights are not the learner's")
            label = self._gate.label
            completion = await self._engine.generate(
                prompt_ids,
                request_id=f"{key}-{next(self._request_numbers)}",
                temperature=temperature,
                max_tokens=limit,
                stop_ids=self._stop_ids,
                seed=seed,
                salt=label,
            )
            if completion.finish_reason == "abort":
                continue
            # The engine may have scheduled it between the look at `_unstarted` and the pause.
            if completion.labels[0] == label:
                return completion

    async def _require_proven(self, completion: Completion) -> None:
        if not await self._gate.proven(completion.labels):
            raise UnprovenWeights(f"sampled by {', '.join(completion.labels)}, of which one was refuted by the probe")

    # -- weights -------------------------------------------------------------------------------------------------

    async def _follow_weights(self) -> None:
        assert self._subscriber is not None
        while True:
            await self._apply(await self._subscriber.next())

    async def _apply(self, update: WeightUpdate) -> None:
        """Load and prove one version; skip it when it is overwritten meanwhile, since a newer one is then out."""
        limit = self._config.weight_sync.timeout_s
        try:
            async with asyncio.timeout(limit):
                await self._load_and_prove(update)
        except TimeoutError:
            raise WeightSyncError(
                f"{self.name}: version {update.policy_version} was not loaded and proven within "
                f"weight_sync.timeout_s ({limit:g} s)"
            ) from None

    async def _load_and_prove(self, update: WeightUpdate) -> None:
        assert self._subscriber is not None and self._client is not None
        pause_s = transfer_s = probe_s = 0.0
        difference = float("inf")
        for _ in range(2):
            label = self._gate.begin(update.incarnation, update.policy_version)
            began = time.perf_counter()
            if not await self._load(update, label):
                self._gate.refute(label)
                return
            loaded = time.perf_counter()
            transfer_s += self._meter.last_load_s
            pause_s += loaded - began
            difference = await self._probe_difference(update, label)
            probe_s += time.perf_counter() - loaded
            if difference <= self._tolerance:
                break
            self._gate.refute(label)
        proven = difference <= self._tolerance
        reason = "" if proven else f"probe differs by {difference:.3g}, tolerance {self._tolerance:.3g}"
        ack = WeightAck(
            generator=self.name,
            incarnation=update.incarnation,
            policy_version=update.policy_version,
            ok=proven,
            reason=reason,
            pause_s=pause_s,
            transfer_s=transfer_s,
            probe_s=probe_s,
            total_s=time.time() - update.published_at,
            num_bytes=self._subscriber.num_bytes,
            probe_max_diff=difference,
        )
        self._last_sync = ack
        self._syncs += 1
        if proven:
            self._gate.prove(label)
            await self._client.report_version(incarnation=update.incarnation, policy_version=update.policy_version)
        await self._subscriber.acknowledge(ack)
        if not proven:
            await self._refuse()
            raise WeightSyncError(f"{self.name}: version {update.policy_version} loaded twice, and its {reason}")

    async def _load(self, update: WeightUpdate, label: str) -> bool:
        """Change the engine's weights under the running requests. False: it is overwritten, and nothing changed."""
        assert self._subscriber is not None
        if not self._subscriber.holds(update):
            return False
        self._open.clear()
        self._meter.pause()
        await self._engine.pause()
        try:
            await self._engine.abort_unstarted()
            began = time.perf_counter()
            try:
                await self._engine.load(update.payload, label=label)
            except Exception as error:  # vLLM passes a worker's error on as a bare Exception
                if self._subscriber.holds(update):
                    raise WeightSyncError(
                        f"{self.name}: version {update.policy_version} did not load: {error}"
                    ) from error
                return False
            self._meter.last_load_s = time.perf_counter() - began
            self._gate.loaded(label)
        finally:
            await self._engine.resume()
            self._meter.resume()
            self._open.set()
        return True

    async def _probe_difference(self, update: WeightUpdate, label: str) -> float:
        """Largest |log-prob difference| to the learner over the probe's tokens; inf if one is not a number."""
        scores = await self._engine.score(self._probe.sequences, request_id=f"probe-{label}")
        expected = np.array(update.probe_log_probs)
        difference = np.abs(np.array(scores) - expected) if len(scores) == len(expected) else np.array([np.inf])
        return float(np.nan_to_num(difference, nan=np.inf, posinf=np.inf).max(initial=0.0))

    async def _refuse(self) -> None:
        """Stop serving: members that the refuted weights have touched fail, and so do those that have not begun."""
        self._refused = True
        members = [task for tasks in self._tasks.values() for task in tasks]
        if members:
            await asyncio.wait(members, timeout=_FAIL_S)

    @property
    def _tolerance(self) -> float:
        chosen = self._config.weight_sync.probe_tolerance
        return chosen or (1e-3 if self._config.model.dtype == "float32" else 0.1)

    # -- evaluation ----------------------------------------------------------------------------------------------

    async def evaluate(
        self, prompts: Sequence[tuple[list[int], dict[str, Any]]], *, temperature: float, seed: int
    ) -> list[dict[str, Any]]:
        """Answer and score prompts beside the generation that goes on; proven weights only.

        Returns:
            One dict per prompt: reward, length (tokens), text, min_version, max_version; and `error` with reward 0.0
            where the reward could not be computed.
        """
        tasks = [
            asyncio.create_task(self._evaluate_one(index, ids, task, temperature, seed))
            for index, (ids, task) in enumerate(prompts)
        ]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            for task in tasks:
                task.cancel()

    async def _evaluate_one(
        self, index: int, prompt_ids: list[int], task: dict[str, Any], temperature: float, seed: int
    ) -> dict[str, Any]:
        while True:
            async with self._evaluations:
                completion = await self._complete(
                    prompt_ids, key=f"eval-{index}", temperature=temperature, seed=_seed(seed, "eval", index, 0)
                )
            if await self._gate.proven(completion.labels):
                break
        text = self._tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        versions = [self._gate.version_of(label).policy_version for label in completion.labels]
        result = {
            "reward": 0.0,
            "length": len(completion.token_ids),
            "text": text,
            "min_version": min(versions),
            "max_version": max(versions),
        }
        try:
            result["reward"], _ = await self._rewards.score(task, text)
        except RewardError as error:
            result["error"] = f"{error.reason}: {error}"
        return result

    # -- counters ------------------------------------------------------------------------------------------------

    def _count(self, *, running: int = 0, scoring: int = 0) -> None:
        self._running += running
        self._scoring += scoring
        self._meter.occupy(self._running > 0)
        if self._running:
            self._wait = None
        elif self._wait is None:
            self._wait_for("a lease", "buffer")
        self._wanted.set()

    def _wait_for(self, what: str, owner: str) -> None:
        self._wait = Wait(waiter=self.name, waiting_for=what, owner=owner, since=time.time())


class _Meter:
    """Busy and serving time: busy is with members in the engine and generation not paused."""

    def __init__(self) -> None:
        self._began = 0.0
        self._busy_s = 0.0
        self._occupied = False
        self._paused = False
        self._mark = 0.0
        self.last_load_s = 0.0

    def begin(self) -> None:
        self._began = self._mark = time.monotonic()

    def occupy(self, occupied: bool) -> None:
        self._settle()
        self._occupied = occupied

    def pause(self) -> None:
        self._settle()
        self._paused = True

    def resume(self) -> None:
        self._settle()
        self._paused = False

    @property
    def busy_s(self) -> float:
        self._settle()
        return self._busy_s

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._began if self._began else 0.0

    def _settle(self) -> None:
        now = time.monotonic()
        if self._began and self._occupied and not self._paused:
            self._busy_s += now - self._mark
        self._mark = now


def _seed(run_seed: int, uid: str, member: int, attempt: int) -> int:
    """63 bits that depend on these four and on nothing else."""
    text = f"{run_seed}/{uid}/{member}/{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def _reason(error: Exception) -> str:
    if isinstance(error, RewardError):
        return error.reason
    return "unproven_weights" if isinstance(error, UnprovenWeights) else "engine_error"
