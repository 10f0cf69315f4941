"""Composition root: turns a `Config` into the processes of a run, and makes sure that they are gone afterwards.

The only place that applies `ray.remote`. Every process is one Ray actor, a `Host`, that sets its environment and its
log file before it imports and builds one plain class; the controller talks to it through a `RayProcess`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import logging
import os
import pathlib
import signal
import socket
import sys
from collections.abc import Iterator
from typing import Any

import psutil
import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from actors.controller import Controller, Outcome
from actors.live_view import LiveView
from actors.plan import gpus_wanted
from actors.preparation import Preparation, prepare
from streamrl.base_model import load_tokenizer
from streamrl.config import Config
from streamrl.errors import ConfigError, DeadlineExceededError, ProcessDiedError, StreamrlError
from streamrl.run_directory import JOURNAL_DIR, LOGS_DIR, create_run_dir
from streamrl.tracking import RunEnd, Tracker
from streamrl.transport import CurveKeys
from streamrl.weight_sync.choice import Placement, choose_backend, with_backend

MLFLOW_LIMIT_S = 5.0  # to deliver the last metrics; what is left stays in the run directory for `streamrl deliver`
OBJECT_STORE_BYTES = 100 * 1024 * 1024  # only control messages pass through Ray; rollouts and weights do not
_RUN_ENDS: dict[int, RunEnd] = {0: "FINISHED", 1: "FAILED", 2: "FAILED"}


class Host:
    """The Ray actor around one plain class: environment and log file first, then the import.

    vLLM and torch read the environment when they are imported, and vLLM's engine process inherits the log file, so both
    must be in place before `target` is.
    """

    def __init__(self, target: str, arguments: dict[str, Any], *, log_path: str, environment: dict[str, str]) -> None:
        os.environ.update(environment)
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(log, stream.fileno())
        os.close(log)
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(levelname)s %(message)s")
        module, _, name = target.partition(":")
        self._target = getattr(importlib.import_module(module), name)(**arguments)

    async def call(self, method: str, *args: Any, **kwargs: Any) -> Any:
        return await getattr(self._target, method)(*args, **kwargs)

    async def pid(self) -> int:
        return os.getpid()


class RayProcess:
    """One process of the run as the controller sees it: a name, a pid, and calls with a deadline."""

    def __init__(self, name: str, actor: Any, *, log_path: pathlib.Path) -> None:
        self.name = name
        self.pid = 0
        self.log_path = log_path
        self._actor = actor

    async def call(self, method: str, *args: Any, timeout_s: float | None = None, **kwargs: Any) -> Any:
        """Call an async method of the process's class.

        `timeout_s=None` is for calls that last as long as the process serves (`run`): those end with its death.

        Raises:
            DeadlineExceededError: it did not answer within `timeout_s`.
            ProcessDiedError: the process is gone; the message names it and the cause.
        """
        remote = self._actor.pid if method == "pid" else self._actor.call
        arguments = args if method == "pid" else (method, *args)
        try:
            return await asyncio.wait_for(remote.remote(*arguments, **kwargs), timeout_s)
        except TimeoutError as error:
            if isinstance(error, DeadlineExceededError):
                raise
            raise DeadlineExceededError(
                f"{self.name} did not answer {method}() within {timeout_s:.0f} s; its log is {self.log_path}"
            ) from None
        except ray.exceptions.RayTaskError as error:
            cause = error.cause if isinstance(getattr(error, "cause", None), Exception) else error
            if isinstance(cause, StreamrlError):
                raise cause from None
            raise ProcessDiedError(f"{self.name} failed in {method}(): {type(cause).__name__}: {cause}") from None
        except ray.exceptions.RayError as error:  # the actor died, was killed for memory, or its node is gone
            cause = _first_sentence(error)
            raise ProcessDiedError(
                f"{self.name} (pid {self.pid or '?'}) died: {cause} Its log is {self.log_path}"
            ) from None

    def kill(self) -> None:
        with contextlib.suppress(Exception):  # already gone: that is the aim
            ray.kill(self._actor, no_restart=True)


def make_buffer_server(
    config: Config, model_path: str, journal_path: pathlib.Path | None, curve: CurveKeys | None
) -> Any:
    """Build the buffer process's class inside that process."""
    from actors.prompts import make_prompt_source
    from buffers.server import BufferServer

    source = make_prompt_source(config, load_tokenizer(model_path))
    return BufferServer(config, source, journal_path=journal_path, curve=curve)


class Processes:
    """All processes of one run. Spawning returns at once; `Controller` waits for their handshakes."""

    def __init__(self, config: Config, run_dir: pathlib.Path, model_path: str) -> None:
        self._config = config
        self._logs = run_dir / LOGS_DIR
        master = f"127.0.0.1:{_free_port()}"
        ranks = config.learner.ranks
        learner_names = [f"learner-{rank}" for rank in range(ranks)]
        generator_names = [f"generator-{index}" for index in range(config.generator.count)]
        # Ray's calls carry the keys, so who may call the run's actors may join the run, and nobody else.
        keys: dict[str, CurveKeys] = {}
        if not config.network.is_loopback:
            keys = CurveKeys.make(listeners=["buffer", *learner_names], others=generator_names)
        journal_path = None if config.buffer.journal == "off" else run_dir / JOURNAL_DIR
        self.buffer = self._spawn(
            "buffer",
            "actors.launch:make_buffer_server",
            {"config": config, "model_path": model_path, "journal_path": journal_path, "curve": keys.get("buffer")},
            threads=1,
        )
        self.learners = [
            self._spawn(
                name,
                "actors.learner:Learner",
                {
                    "config": config,
                    "rank": rank,
                    "world_size": ranks,
                    "incarnation": 0,
                    "model_path": model_path,
                    "master": master,
                    "run_name": segment_name(run_dir),
                    "curve": keys.get(name),
                },
                threads=config.learner.threads,
                gpus=config.learner.gpus,
            )
            for rank, name in enumerate(learner_names)
        ]
        self.generators = [
            self._spawn(
                name,
                "actors.generator:Generator",
                {"config": config, "index": index, "model_path": model_path, "curve": keys.get(name)},
                threads=config.generator.threads,
                gpus=config.generator.gpus,
            )
            for index, name in enumerate(generator_names)
        ]

    @property
    def all(self) -> list[RayProcess]:
        return [self.buffer, *self.learners, *self.generators]

    def _spawn(self, name: str, target: str, arguments: dict[str, Any], *, threads: int, gpus: float = 0) -> RayProcess:
        log_path = self._logs / f"{name}.log"
        # shm weights and loopback sockets need one host: the driver's. CPUs are not reserved: engines and learner share
        # them on a small machine, and a reservation that cannot be met would wait for ever.
        strategy = NodeAffinitySchedulingStrategy(node_id=ray.get_runtime_context().get_node_id(), soft=False)
        # Progress bars are for terminals, and transformers draws them into the logs.
        environment = {"OMP_NUM_THREADS": str(threads), "HF_HUB_DISABLE_PROGRESS_BARS": "1"}
        actor = (
            ray.remote(Host)
            .options(num_cpus=0, num_gpus=gpus, max_restarts=0, scheduling_strategy=strategy)
            .remote(target, arguments, log_path=str(log_path), environment=environment)
        )
        return RayProcess(name, actor, log_path=log_path)


def launch(config: Config, run_dir: pathlib.Path) -> int:
    """Run to the end and return the exit code: 0 done, 1 failed, 2 refused, 130 interrupted.

    Makes `run_dir` once nothing more can be refused without starting something. Everything the run started is gone when
    this returns.

    Raises:
        ConfigError: the model or the prompts cannot be had, or `run_dir` was taken; nothing was written.
        DeadlineExceededError: another process makes the same model for too long.
    """
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        preparation = prepare(config)
    except _Terminated:
        return 0
    create_run_dir(run_dir, config)
    started = psutil.Process().create_time()
    tracker = Tracker(config, run_dir)
    view = LiveView(config, run_dir, tracker)
    outcome = Outcome(exit_code=1, reason="the run did not start")
    try:
        tracker.log_event("launch", pid=os.getpid(), argv=sys.argv)
        tracker.log_event("base_model", path=preparation.model_path, seconds=round(preparation.model_s, 2))
        tracker.log_event("data", **dataclasses.asdict(preparation.data))
        view.note(f"data     {preparation.data}")
        backend, why = choose_backend(config, Placement.on_this_host())
        tracker.log_event("weight_backend", backend=backend, reason=why)
        view.note(f"weights  {backend}: {why}")
        config = with_backend(config, backend)
        outcome = _run(config, run_dir, preparation, tracker, view, started)
    except ConfigError as error:
        outcome = Outcome(exit_code=2, reason=str(error))
    except StreamrlError as error:
        outcome = Outcome(exit_code=1, reason=str(error))
    except KeyboardInterrupt as error:
        outcome = Outcome(exit_code=0 if isinstance(error, _Terminated) else 130, reason="interrupted during start-up")
    finally:
        tracker.log_event(
            "end",
            exit_code=outcome.exit_code,
            reason=outcome.reason,
            policy_version=outcome.policy_version,
            learner_busy=round(outcome.learner_busy, 4),
            generator_busy=round(outcome.generator_busy, 4),
        )
        end: RunEnd = _RUN_ENDS.get(outcome.exit_code, "KILLED")
        leftover = tracker.close(end=end, timeout_s=MLFLOW_LIMIT_S)
        view.close(outcome)
        if leftover:
            print(leftover, file=sys.stderr)
    if outcome.exit_code in (1, 2):
        print(f"streamrl: {outcome.reason}", file=sys.stderr, flush=True)
    return outcome.exit_code


def _run(
    config: Config, run_dir: pathlib.Path, preparation: Preparation, tracker: Tracker, view: LiveView, started: float
) -> Outcome:
    with _ray_session(config), view:
        processes = Processes(config, run_dir, preparation.model_path)
        controller = Controller(
            config,
            run_dir=run_dir,
            buffer=processes.buffer,
            learners=processes.learners,
            generators=processes.generators,
            eval_prompts=preparation.eval_prompts,
            tracker=tracker,
            view=view,
            started=started,
        )
        try:
            return asyncio.run(controller.run())
        finally:
            _end(processes, run_dir, tracker)


@contextlib.contextmanager
def _ray_session(config: Config) -> Iterator[None]:
    """A Ray cluster for this run, or a connection to the user's."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Ray's own choice of 15 starves whichever process shares a core with anything else that computes on this machine.
    os.environ.setdefault("RAY_worker_niceness", "0")
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR", "include_dashboard": False}
    if config.ray.address:
        options |= {"address": config.ray.address}
        del options["include_dashboard"]
    else:
        # Not left out: Ray would then join a cluster that it finds on this machine.
        options |= {"address": "local", "object_store_memory": OBJECT_STORE_BYTES}
    try:
        ray.init(**options)
    except (ConnectionError, ray.exceptions.RayError) as error:
        raise ConfigError(
            f"ray.address ({config.ray.address}): no Ray cluster takes this run ({error}). Start one with "
            "`ray start --head`, or leave ray.address empty to start one for this run. A cluster that asks for a token "
            "needs RAY_AUTH_MODE=token and the cluster's token in ~/.ray/auth_token."
        ) from None
    try:
        wanted = gpus_wanted(config)
        free = ray.available_resources().get("GPU", 0.0)
        if wanted > free:
            raise ConfigError(
                f"generator.gpus ({config.generator.gpus:g}) x generator.count ({config.generator.count}) + "
                f"learner.gpus ({config.learner.gpus:g}) x learner.ranks ({config.learner.ranks}) = {wanted:g} GPUs, "
                f"and Ray has {free:g} free. Ask for fewer, or share one with generator.gpus=0.25."
            )
        yield
    finally:
        ray.shutdown()


def _end(processes: Processes, run_dir: pathlib.Path, tracker: Tracker) -> None:
    """Whatever the controller could not end in good order ends here, by force."""
    from streamrl.weight_sync.segment import unlink_segment

    family = []
    for process in processes.all:
        if process.pid and psutil.pid_exists(process.pid):
            with contextlib.suppress(psutil.NoSuchProcess):
                family += [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
    for process in processes.all:
        process.kill()
    _, alive = psutil.wait_procs(family, timeout=3)
    # Resource trackers go last: they free the semaphores of their killed parent, and end then.
    for spare in ("resource_tracker", ""):
        for survivor in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                command = " ".join(survivor.cmdline())
                if not spare or spare not in command:
                    tracker.log_event("killed", pid=survivor.pid, command=command.strip()[:200])
                    survivor.kill()
        _, alive = psutil.wait_procs(alive, timeout=2)
    unlink_segment(segment_name(run_dir))


def segment_name(run_dir: pathlib.Path) -> str:
    """Name of the run's shared segment: unique per run directory and driver."""
    return f"{run_dir.name}-{os.getpid()}"


class _Terminated(KeyboardInterrupt):
    """SIGTERM, handled like Ctrl-C but with exit code 0."""


def _first_sentence(error: Exception) -> str:
    """Ray explains a death in a page; what the user needs is one line of it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if "creation task" in str(error):  # the class's own error, at the end of its traceback
        return f"{lines[-1]} (while starting)."
    for line in lines:
        if "exit detail" in line or "memory" in line.lower():
            return line.split(". ")[0].rstrip(".") + "."
    return f"{type(error).__name__}."


def _interrupt(signum: int, frame: Any) -> None:
    raise _Terminated


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
