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
weight_sync.timeout_s), for a reward (its time limit), for a weight update (`WeightFollower`). `stop` ends them all.
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

from actors.busy_meter import BusyMeter
from actors.engine import Completion, Engine, EngineFailure
from actors.rewards import RewardWorker
from actors.weight_follower import WeightFollower
from buffers.client import GeneratorClient
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
    WeightUpdate,
)
from streamrl.transport import CurveKeys

_FLUSH_S = 2.0  # for finished rollouts to reach the buffer in `stop`
_DRAIN_S = 2.0  # for the members of refused weights to be reported as failed


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
        self._meter = BusyMeter()
        self._weights = WeightFollower(config, name=self.name, engine=self._engine, meter=self._meter)
        self._gate = self._weights.gate
        self._rewards = RewardWorker(config)
        self._tokenizer: Any = None
        self._stop_ids: list[int] = []
        self._client: GeneratorClient | None = None
        self._broken: asyncio.Future[None] | None = None
        self._stopped = asyncio.Event()
        self._wanted = asyncio.Event()  # there may be room for more members
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}
        self._granted = 0  # credit given to the buffer, not yet leased
        self._running = 0  # members leased and not yet through the engine
        self._scoring = 0
        self._evaluations = asyncio.Semaphore(config.generator.concurrency)
        self._request_numbers = itertools.count()
        self._tokens = self._finished = self._failed = 0
        self._wait: Wait | None = None

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring engine, tokenizer and reward processes up."""
        # Rewards first: their processes must not inherit the engine's environment.
        await asyncio.gather(self._rewards.start(), self._engine.start())
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
        self._broken = asyncio.get_running_loop().create_future()
        self._client = GeneratorClient(buffer_address, name=self.name, curve=self._curve)
        await self._client.connect(timeout_s=self._config.weight_sync.timeout_s)
        self._wait_for("the first weights", "learner-0")
        await self._weights.connect(weight_address, curve=self._curve)
        await self._weights.first(self._report, incarnation=incarnation)
        self._wait = None

    async def run(self) -> None:
        """Serve until `stop`, or until the buffer and the learner have ended. Raises what broke."""
        assert self._broken is not None, "run before connect"
        self._meter.begin()
        self._wanted.set()
        self._wait_for("a lease", "buffer")
        loops: list[asyncio.Task[None]] = [
            asyncio.create_task(work())
            for work in (self._take_leases, self._take_cancels, self._grant, self._follow, self._engine.died)
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
                except WeightSyncError:
                    await self._drain()
                    raise
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
        if self._client is not None:
            await self._client.close(timeout_s=_FLUSH_S)
        await asyncio.gather(self._weights.close(), self._rewards.close(), self._engine.stop())

    async def _drain(self) -> None:
        """After refused weights: give every member a moment to be reported as failed."""
        members = [task for tasks in self._tasks.values() for task in tasks]
        if members:
            await asyncio.wait(members, timeout=_DRAIN_S)

    async def _follow(self) -> None:
        await self._weights.follow(self._report)

    async def _report(self, update: WeightUpdate) -> None:
        assert self._client is not None
        await self._client.report_version(incarnation=update.incarnation, policy_version=update.policy_version)

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
            syncs=self._weights.syncs,
            recent_syncs=tuple(self._weights.recent_syncs),
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
            if room > 0 and self._scoring < concurrency and not self._weights.refused:
                self._granted += room
                await self._client.request(room)

    async def _take_leases(self) -> None:
        assert self._client is not None
        while True:
            lease, prompt_ids = await self._client.next_lease()
            self._granted -= len(lease.members)
            self._count(running=len(lease.members))
            for member, attempt in zip(lease.members, lease.attempts, strict=True):
                seat = _Seat(self)
                task = asyncio.create_task(self._serve(lease, prompt_ids, member, attempt, seat))
                self._tasks.setdefault(lease.uid, set()).add(task)
                task.add_done_callback(functools.partial(self._on_served, lease.uid, seat))

    async def _take_cancels(self) -> None:
        assert self._client is not None
        while True:
            for task in self._tasks.get(await self._client.next_cancel(), ()):
                task.cancel()

    def _on_served(self, uid: str, seat: _Seat, task: asyncio.Task[None]) -> None:
        seat.leave()
        self._tasks[uid].discard(task)
        if not self._tasks[uid]:
            del self._tasks[uid]
        if not task.cancelled() and (error := task.exception()) is not None:
            self._break(error)

    def _break(self, error: BaseException) -> None:
        if self._broken is not None and not self._broken.done():
            self._broken.set_exception(error)

    async def _serve(self, lease: Lease, prompt_ids: IntArray, member: int, attempt: int, seat: _Seat) -> None:
        """One member, from its lease to a rollout or a failure."""
        assert self._client is not None
        leased_at = time.monotonic()
        try:
            completion = await self._complete(
                prompt_ids.tolist(),
                key=f"{lease.uid}/{member}/{attempt}",
                temperature=self._temperature_of(member),
                seed=_seed(self._config.run.seed, lease.uid, member, attempt),
            )
            seat.leave()
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

    def _temperature_of(self, member: int) -> float:
        """0 decodes the baseline member greedily."""
        algorithm = self._config.algorithm
        greedy = algorithm.has_baseline and member == algorithm.group_size
        return 0.0 if greedy else self._config.generator.temperature

    async def _complete(self, prompt_ids: list[int], *, key: str, temperature: float, seed: int) -> Completion:
        """One response, started again for as long as the weights change before its first token.

        Raises:
            UnprovenWeights: the weights in the engine are known to be wrong.
            EngineFailure: the engine failed this request.
        """
        limit = min(self._config.generator.max_new_tokens, self._config.model.max_length - len(prompt_ids))
        while True:
            await self._weights.open.wait()
            if self._weights.refused:
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
            # Else its first token was on the way when the unstarted requests were aborted.
            if completion.labels[0] == label:
                return completion

    async def _require_proven(self, completion: Completion) -> None:
        if not await self._gate.proven(completion.labels):
            raise UnprovenWeights(f"sampled by {', '.join(completion.labels)}, of which one was refuted by the probe")

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


class _Seat:
    """A member's place in the engine, left once: by the member, or by the end of its task if that never began."""

    def __init__(self, generator: Generator) -> None:
        self._generator: Generator | None = generator

    def leave(self) -> None:
        if self._generator is not None:
            self._generator._count(running=-1)
            self._generator = None


def _seed(run_seed: int, uid: str, member: int, attempt: int) -> int:
    """63 bits that depend on these four and on nothing else."""
    text = f"{run_seed}/{uid}/{member}/{attempt}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1


def _reason(error: Exception) -> str:
    if isinstance(error, RewardError):
        return error.reason
    return "unproven_weights" if isinstance(error, UnprovenWeights) else "engine_error"
