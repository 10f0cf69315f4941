"""Supervises one run from the first handshake to the last ledger.

The data flow it watches, and who ends each wait:

    BufferServer --lease--> Generator --rollout--> BufferServer --shard--> Learner --weights--> Generator
       |  waits for: a trained or discarded group (admission), credit from a generator
       |               Generator  waits for: a lease (buffer), an engine step (vLLM)
       |                                         BufferServer  waits for: B complete groups (generators)
       |                                                                 Learner  waits for: its shard (buffer)

The controller itself consumes step records (learner rank 0) and one status a second from every process, and produces
metrics, events, evaluations and the live view. It waits for: step records, unblocked by the learner or by the stall
limit; statuses, unblocked by a deadline. Death of any process ends the run non-zero with its name and cause; a process
that does not answer for `UNRESPONSIVE_S` counts as dead.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pathlib
import signal
import time
from collections.abc import Awaitable, Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import psutil

from actors.live_view import LiveView
from actors.run_view import RunView
from streamrl.config import Config
from streamrl.errors import DeadlineExceededError, ProcessDiedError, StreamrlError
from streamrl.records import BufferStats, GeneratorStatus, LearnerStatus, Prompt
from streamrl.run_directory import LEDGER_FILE, write_json
from streamrl.tracking import Tracker

STATUS_INTERVAL_S = 1.0
UNRESPONSIVE_S = 40.0
FINAL_EVAL_LIMIT_S = 60.0
LAST_RECORDS_S = 2.0
SAME_REQUEST_S = 1.0
BUSY_FROM_STEP = 10  # busy shares are measured after the first ten steps


class Process(Protocol):
    """A process of the run: a name, a pid, and async calls that raise `ProcessDiedError` or `DeadlineExceededError`."""

    name: str
    pid: int

    async def call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the run ended."""

    exit_code: int
    reason: str = ""
    policy_version: int = 0
    ledger: BufferStats = field(default_factory=BufferStats)
    learner_busy: float = 0.0  # share of the time after the first ten steps
    generator_busy: float = 0.0


class Controller:
    """Starts, watches and ends the processes it is given."""

    def __init__(
        self,
        config: Config,
        *,
        run_dir: pathlib.Path,
        buffer: Process,
        learners: Sequence[Process],
        generators: Sequence[Process],
        eval_prompts: Sequence[Prompt],
        tracker: Tracker,
        view: LiveView,
        started: float,
    ) -> None:
        self._config = config
        self._run_dir = run_dir
        self._buffer = buffer
        self._learners = list(learners)
        self._generators = list(generators)
        self._eval_prompts = list(eval_prompts)
        self._tracker = tracker
        self._view = view
        self._run_view = RunView(config=config, started=started)
        self._started = started
        self._last_step_at = time.time()
        self._policy_version = 0
        self._interrupted: int | None = None
        self._interrupted_at = 0.0
        self._busy = _BusyShares()
        self._evaluation: asyncio.Task[None] | None = None
        self._recording: asyncio.Task[None] | None = None
        self._stopping = False
        self._synced: dict[str, int] = {}

    @property
    def _all(self) -> list[Process]:
        return [self._buffer, *self._learners, *self._generators]

    async def run(self) -> Outcome:
        """Run to the end. Raises nothing: what went wrong is the outcome's reason."""
        loop = asyncio.get_running_loop()
        interrupt, hurry = asyncio.Event(), asyncio.Event()
        for signum in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(signum, self._on_signal, signum, interrupt, hurry)
        exit_code, reason = 0, ""
        try:
            await _unless(interrupt, self._start())
            if self._interrupted is None:
                await _unless(interrupt, self._serve())
        except StreamrlError as error:
            exit_code, reason = 1, str(error)
        if self._interrupted is not None and exit_code == 0:
            exit_code = 130 if self._interrupted == signal.SIGINT else 0
            reason = "interrupted" if exit_code else "terminated"
        await _unless(hurry, self._stop(evaluate=exit_code == 0 and self._interrupted is None, failed=exit_code == 1))
        learner_busy, generator_busy = self._busy.shares()
        return Outcome(
            exit_code=exit_code,
            reason=reason,
            policy_version=self._policy_version,
            ledger=self._run_view.buffer,
            learner_busy=learner_busy,
            generator_busy=generator_busy,
        )

    def _on_signal(self, signum: int, interrupt: asyncio.Event, hurry: asyncio.Event) -> None:
        """The first signal ends the run in good order, a later one at once.

        One request may arrive twice, to the process and to its group (timeout(1) does so), hence `SAME_REQUEST_S`.
        """
        now = time.monotonic()
        if self._interrupted is None:
            self._interrupted, self._interrupted_at = signum, now
            interrupt.set()
        elif now - self._interrupted_at > SAME_REQUEST_S:
            hurry.set()

    # -- start ---------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        """Every handshake, under one deadline; a process that fails or dies on the way ends the start at once."""
        limit = self._config.run.start_timeout_s
        deadline = time.monotonic() + limit

        async def call(process: Process, method: str, *args: Any, **kwargs: Any) -> Any:
            return await process.call(method, *args, timeout_s=max(0.1, deadline - time.monotonic()), **kwargs)

        async def start_learners() -> tuple[str, str]:
            buffer_address = await call(self._buffer, "start")
            answers = await _gather(*(call(learner, "start", buffer_address) for learner in self._learners))
            self._view.phase("learner ready")
            return buffer_address, answers[0]["weight_address"]

        async def start_generator(process: Process, turn: asyncio.Semaphore) -> None:
            async with turn:  # T49: engines that all start at once need their peak memory at once
                await call(process, "start")
            self._view.phase(f"{process.name} ready")

        try:
            self._view.phase("starting processes")
            for process, pid in zip(self._all, await _gather(*(call(p, "pid") for p in self._all)), strict=True):
                process.pid = pid
                self._tracker.log_event("start", process=process.name, pid=pid)
            turn = asyncio.Semaphore(max(1, os.cpu_count() or 1))
            (buffer_address, weight_address), *_ = await _gather(
                start_learners(), *(start_generator(process, turn) for process in self._generators)
            )
            await _gather(
                *(
                    call(g, "connect", buffer_address=buffer_address, weight_address=weight_address, incarnation=0)
                    for g in self._generators
                )
            )
        except DeadlineExceededError as error:
            raise DeadlineExceededError(
                f"start-up took longer than run.start_timeout_s ({limit:.0f} s): {error}"
            ) from None
        self._tracker.log_event("ready", seconds=round(time.time() - self._started, 2))
        self._view.phase("ready")

    # -- serve ---------------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        """Until the learner has finished. Raises the first thing that broke."""
        self._last_step_at = time.time()
        await self._evaluate(0)
        self._last_step_at = time.time()
        servers = [
            asyncio.create_task(_must_not_end(p, p.call("run")), name=p.name) for p in (self._buffer, *self._generators)
        ]
        learners = [asyncio.create_task(p.call("run"), name=p.name) for p in self._learners]
        watcher = asyncio.create_task(self._watch())
        self._recording = asyncio.create_task(self._record_steps())
        done = asyncio.gather(*learners)
        try:
            await _first(done, *servers, watcher, self._recording)
            self._policy_version = max(done.result())
        finally:  # the recording goes on until the learner has stopped: see _stop
            for task in (*servers, *learners, watcher, done):
                task.cancel()
            await asyncio.gather(*servers, *learners, watcher, done, return_exceptions=True)
            if self._evaluation is not None:
                self._evaluation.cancel()

    async def _record_steps(self) -> None:
        """Every step record of the learner becomes a line of metrics. Ends with the learner, or at the stall limit."""
        limit = self._config.run.stall_limit_s
        while True:
            try:
                record = await self._learners[0].call("next_record", timeout_s=limit)
            except DeadlineExceededError:
                raise DeadlineExceededError(
                    f"no optimizer step for run.stall_limit_s ({limit:.0f} s). {self._run_view.describe_waits()}"
                ) from None
            if record is None:
                return
            step = int(record.pop("step"))
            if step == 1:
                self._tracker.log_event("first_step", seconds=round(time.time() - self._started, 2))
                self._view.phase("training")
            self._last_step_at = time.time()
            self._policy_version = step
            metrics = {**record, **self._metrics_of_others()}
            self._tracker.log_step(step, metrics)
            self._run_view.add_step(step, metrics)
            self._view.update(self._run_view)
            if step == BUSY_FROM_STEP:
                self._busy.begin(self._run_view)
            interval = self._config.eval.interval_steps
            due = interval and step % interval == 0 and step < self._config.run.max_steps
            if due and not self._stopping and (self._evaluation is None or self._evaluation.done()):
                self._evaluation = asyncio.create_task(self._evaluate(step))

    def _metrics_of_others(self) -> dict[str, float]:
        """What generators, buffer and weight channel said last, under the names of the metrics."""
        view = self._run_view
        metrics: dict[str, float] = {"time/since_launch_s": time.time() - self._started}
        generators = list(view.generators.values())
        if generators:
            metrics |= {
                "generator/tokens_per_s": view.generator_tokens_per_s,
                "generator/running": float(sum(g.running for g in generators)),
                "generator/scoring": float(sum(g.scoring for g in generators)),
                "generator/kv_usage": max(g.kv_usage for g in generators),
                "generator/idle_fraction": 1.0
                - sum(g.busy_s for g in generators) / max(1e-9, sum(g.uptime_s for g in generators)),
                "generator/failed_members": float(sum(g.failed_members for g in generators)),
            }
        acks = [g.last_sync for g in generators if g.last_sync is not None]
        if acks:
            for name in ("transfer_s", "drain_s", "pause_s", "load_s", "probe_s", "total_s", "probe_difference"):
                metrics[f"weight_sync/{name}"] = max(getattr(ack, name) for ack in acks)
            metrics["weight_sync/bytes"] = float(acks[-1].num_bytes)
        stats = view.buffer
        metrics |= {
            "buffer/groups": float(stats.buffered),
            "buffer/in_flight": float(stats.in_flight),
            "buffer/bytes": float(stats.num_bytes),
            "buffer/inserted": float(stats.inserted_rollouts),
            "buffer/issued": float(stats.issued),
            "buffer/trained": float(stats.trained),
            "buffer/refused_peers": float(stats.refused_peers),
            **{f"buffer/discarded/{reason}": float(count) for reason, count in stats.discarded.items()},
        }
        return metrics

    async def _watch(self) -> None:
        """Ask every process for its status once a second; one that stays silent counts as dead."""
        view = self._run_view
        while True:
            begun = time.monotonic()
            buffer, learner, *generators = await _gather(
                _answer(self._buffer, "stats"),
                _answer(self._learners[0], "status"),
                *(_answer(g, "status") for g in self._generators),
                *(_answer(p, "status") for p in self._learners[1:]),
            )
            view.see(
                buffer=msgspec.convert(buffer, BufferStats),
                learner=msgspec.convert(learner, LearnerStatus),
                generators=[msgspec.convert(g, GeneratorStatus) for g in generators[: len(self._generators)]],
            )
            for status in view.generators.values():
                new = status.syncs - self._synced.get(status.name, 0)
                self._synced[status.name] = status.syncs
                for ack in status.recent_syncs[-new:] if new else ():
                    self._tracker.log_event("weight_sync", **msgspec.to_builtins(ack))
            self._view.update(view)
            await asyncio.sleep(max(0.0, STATUS_INTERVAL_S - (time.monotonic() - begun)))

    # -- evaluation ----------------------------------------------------------------------------------------------

    async def _evaluate(self, step: int) -> None:
        """Held-out prompts over all generators, beside training; logged at the version that answered."""
        if not self._eval_prompts:
            return
        shares = [self._eval_prompts[i :: len(self._generators)] for i in range(len(self._generators))]
        temperature = self._config.eval.temperature
        begun = time.time()
        answers = await _gather(
            *(
                g.call(
                    "evaluate",
                    [(prompt.prompt_ids.tolist(), prompt.task) for prompt in share],
                    temperature=temperature,
                    seed=self._config.run.seed,
                    timeout_s=self._config.run.stall_limit_s,
                )
                for g, share in zip(self._generators, shares, strict=True)
                if share
            )
        )
        results = [result for answer in answers for result in answer]
        metrics = {
            "eval/reward": sum(r["reward"] for r in results) / len(results),
            "eval/length": sum(r["length"] for r in results) / len(results),
            "eval/min_version": float(min(r["min_version"] for r in results)),
            "eval/max_version": float(max(r["max_version"] for r in results)),
            "eval/seconds": time.time() - begun,
        }
        self._tracker.log_event("eval", step=step, samples=results[:4])
        self._tracker.log_eval(step, metrics)
        self._run_view.add_eval(step, metrics["eval/reward"])
        self._view.update(self._run_view)

    # -- end -----------------------------------------------------------------------------------------------------

    async def _stop(self, *, evaluate: bool, failed: bool) -> None:
        """End every process in good order within the limits; what does not obey is killed by the caller.

        The learner stops first, so that no step is cut in half; generators next, so that what they finished reaches
        the buffer; the buffer last, so that the ledger holds everything.
        """
        self._stopping = True
        self._view.phase("stopping")
        limit = self._config.run.stop_timeout_s
        if evaluate:
            with contextlib.suppress(StreamrlError, TimeoutError):
                await asyncio.wait_for(self._final_evaluation(), FINAL_EVAL_LIMIT_S)
        await self._quietly(self._learners, "stop", limit / 3)
        await self._end_recording()
        versions = await self._quietly(self._learners, "status", 1.0)
        self._policy_version = max([self._policy_version, *(v.policy_version for v in versions if v is not None)])
        await self._quietly(self._generators, "stop", limit / 3)
        reason = "process_died" if failed else "run_ended"
        (stats,) = await self._quietly(
            [self._buffer], "stop", limit / 3, reason=reason, final_version=self._policy_version
        )
        await self._quietly(self._learners, "close", limit / 5)
        ledger = msgspec.convert(stats, BufferStats) if stats is not None else self._run_view.buffer
        write_json(self._run_dir / LEDGER_FILE, {"final": stats is not None, **msgspec.to_builtins(ledger)})
        self._run_view.buffer = ledger

    async def _end_recording(self) -> None:
        """Take the records of the steps that the learner finished while it was stopped; a dead learner has none."""
        if self._recording is not None:
            await asyncio.wait({self._recording}, timeout=LAST_RECORDS_S)
            self._recording.cancel()
            with contextlib.suppress(StreamrlError, asyncio.CancelledError):
                await self._recording

    async def _final_evaluation(self) -> None:
        """Evaluate the last published version: wait, within a limit, until each generator serves it (T7)."""
        interval = self._config.learner.publish_interval
        wanted = self._policy_version - self._policy_version % interval
        while True:
            statuses = await _gather(*(_answer(g, "status") for g in self._generators))
            if all(status.policy_version >= wanted for status in statuses):
                break
            await asyncio.sleep(0.2)
        await self._evaluate(self._policy_version)

    async def _quietly(self, processes: Sequence[Process], method: str, timeout_s: float, **kwargs: Any) -> list[Any]:
        """Call `method` on all; None for those that are dead or do not answer, which is an event, not an error."""

        async def one(process: Process) -> Any:
            if process.pid and not psutil.pid_exists(process.pid):
                return None
            try:
                return await process.call(method, timeout_s=timeout_s, **kwargs)
            except StreamrlError as error:
                self._tracker.log_event("unclean_stop", process=process.name, method=method, error=str(error))
                return None

        return list(await asyncio.gather(*(one(p) for p in processes)))


class _BusyShares:
    """Busy share of both sides between step `BUSY_FROM_STEP` and the last status."""

    def __init__(self) -> None:
        self._view: RunView | None = None
        self._learner = self._generators = (0.0, 0.0)

    def begin(self, view: RunView) -> None:
        self._view = view
        self._learner, self._generators = self._totals(view)

    def shares(self) -> tuple[float, float]:
        if self._view is None:
            return 0.0, 0.0
        learner, generators = self._totals(self._view)
        return _share(self._learner, learner), _share(self._generators, generators)

    @staticmethod
    def _totals(view: RunView) -> tuple[tuple[float, float], tuple[float, float]]:
        generators = view.generators.values()
        return (
            (view.learner.busy_s, view.learner.uptime_s),
            (sum(g.busy_s for g in generators), sum(g.uptime_s for g in generators)),
        )


def _share(begin: tuple[float, float], end: tuple[float, float]) -> float:
    return min(1.0, (end[0] - begin[0]) / max(1e-9, end[1] - begin[1]))


async def _answer(process: Process, method: str) -> Any:
    try:
        return await process.call(method, timeout_s=UNRESPONSIVE_S)
    except DeadlineExceededError:
        raise ProcessDiedError(
            f"{process.name} (pid {process.pid}) has not answered for {UNRESPONSIVE_S:.0f} s"
        ) from None


async def _must_not_end(process: Process, running: Awaitable[Any]) -> None:
    await running
    raise ProcessDiedError(f"{process.name} (pid {process.pid}) stopped serving while the run went on")


async def _gather(*awaitables: Coroutine[Any, Any, Any]) -> list[Any]:
    """Like asyncio.gather, but the first failure cancels the rest."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(a) for a in awaitables]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def _first(wanted: asyncio.Future[Any], *others: asyncio.Task[Any]) -> None:
    """Wait for `wanted`; a failure of any other comes first. Others may end well."""
    pending: set[asyncio.Future[Any]] = {wanted, *others}
    while not wanted.done():
        done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for future in done:
            if future is not wanted:
                future.result()
    wanted.result()


async def _unless(interrupt: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end or until `interrupt` is set."""
    task = asyncio.create_task(work)
    waiter = asyncio.create_task(interrupt.wait())
    try:
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiter.cancel()
        if not task.done():
            task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
