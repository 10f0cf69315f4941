"""One learner rank: takes its shard of a batch, trains on it, publishes the weights.

    BufferServer --shards--> [ wait_for_batch <-> train -> publish ] --weights--> Generator
                                   |                   |
                                   |                   +--> one record of metrics a step (rank 0) --> Controller
                                   +-- advance(policy_version) (rank 0) --> BufferServer

With `learner.stream_groups` a batch comes in chunks: forward and backward run on each as it comes, and the optimizer
steps after the last. A step that loses its data or is stopped between two chunks leaves the weights as they were; the
buffer takes its groups back.

Waits, each with a deadline:
- `wait_for_batch`: for the next shard of this rank; ended by the buffer (a shard, or the end of the data), by `stop`,
  or by `run.stall_limit_s`;
- collectives with the other ranks: ended by them, or by the process group's timeout, `run.stall_limit_s` too;
- the answer to `advance`: ended by the buffer or by the client's own deadline.
It never waits for generators: a publication returns when the payload is out.

Everything that touches torch runs in one thread of its own, so that `status`, `next_record` and `stop` answer while
it trains. All ranks decide together whether to go on with each chunk, because a step is a chain of collectives: one
rank without a shard ends the loop on all of them. Invariants: no group beyond the staleness bound is trained
(`StaleRolloutError` ends the run first), and no step is taken with a gradient that is not finite.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from buffers.client import LearnerClient
from buffers.shards import Shard
from streamrl.config import Config
from streamrl.correction import off_policy_warning
from streamrl.critic import Critic
from streamrl.errors import DeadlineExceededError, StaleRolloutError
from streamrl.policy import Policy
from streamrl.records import LearnerStatus, RolloutGroup, Wait
from streamrl.trainer import Trainer
from streamrl.weight_sync.channel import ProbeSet, WeightPublisher

if TYPE_CHECKING:
    from streamrl.transport import CurveKeys

SAMPLE_SLICE_S = 1.0  # how long `stop` may find the loop inside one call to the buffer
PROBE_TOKENS = 16
CLOSE_LIMIT_S = 2.0

_log = logging.getLogger(__name__)
_T = TypeVar("_T")


class Learner:
    """One FSDP2 rank and its training loop. Rank 0 also talks for all: versions, weights, metrics."""

    def __init__(
        self,
        config: Config,
        *,
        rank: int,
        world_size: int,
        incarnation: int,
        model_path: str,
        master: str,
        run_name: str,
        curve: CurveKeys | None = None,
    ) -> None:
        """Nothing is started yet.

        Args:
            rank, world_size: of the process group.
            incarnation: which life of the learner this is; published with every version.
            model_path: a folder of Hugging Face weights.
            master: "host:port" where rank 0 opens the process group.
            run_name: names the shared segment of the weights.
            curve: keys for sockets across hosts.
        """
        self._config = config
        self._rank = rank
        self._world_size = world_size
        self._incarnation = incarnation
        self._model_path = model_path
        self._master = master
        self._run_name = run_name
        self._curve = curve
        self._publisher: WeightPublisher | None = None
        self._name = f"learner-{rank}"

        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="train")
        self._stopping = threading.Event()
        self._finished = asyncio.Event()
        self._running = False
        self._records: asyncio.Queue[dict[str, float] | None] = asyncio.Queue()

        self._version = 0
        self._published = -1
        self._trained_tokens = 0
        self._warned = False
        self._phase = "starting"
        self._phase_since = time.monotonic()
        self._first_wait_at: float | None = None
        self._busy_s = 0.0
        self._spent: dict[str, float] = {}  # seconds in each phase since the step began
        self._wait: Wait | None = None

    # -- called by the controller --------------------------------------------------------------------------------

    async def start(self, buffer_address: str) -> dict[str, str]:
        """Load the model, join the other ranks, connect to the buffer, open the weight channel, publish version 0.

        Returns:
            On rank 0 `{"weight_address": ...}`, where generators subscribe; else nothing.
        """
        return await self._in_thread(lambda: self._start(buffer_address))

    async def run(self) -> int:
        """Train until `run.max_steps`, the end of the data or `stop`; the final policy_version. Raises what broke."""
        loop = asyncio.get_running_loop()
        self._running = True

        def emit(record: dict[str, float]) -> None:
            loop.call_soon_threadsafe(self._records.put_nowait, record)

        try:
            return await self._in_thread(lambda: self._train(emit))
        finally:
            self._enter("done")
            self._records.put_nowait(None)
            self._finished.set()

    async def next_record(self) -> dict[str, float] | None:
        """Rank 0: the metrics of the next optimizer step, `step` among them; None when training is over.

        Waits for the next step; ended by it or by the end of `run`.
        """
        record = await self._records.get()
        if record is None:
            self._records.put_nowait(None)
        return record

    async def status(self) -> LearnerStatus:
        now = time.monotonic()
        working = self._phase in ("train", "publish")
        return LearnerStatus(
            rank=self._rank,
            policy_version=self._version,
            incarnation=self._incarnation,
            phase=self._phase,
            busy_s=self._busy_s + (now - self._phase_since if working else 0.0),
            uptime_s=now - self._first_wait_at if self._first_wait_at is not None else 0.0,
            trained_tokens=self._trained_tokens,
            refused_peers=0 if self._publisher is None else self._publisher.num_refused,
            wait=self._wait,
        )

    async def stop(self) -> None:
        """Finish the current wait, chunk or step and make `run` return; call it on all ranks.

        Waits for `run`: at most one step, or `run.stop_timeout_s`.
        """
        self._stopping.set()
        if self._running:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._finished.wait(), self._config.run.stop_timeout_s)

    async def close(self) -> None:
        """Release sockets, the shared segment and the process group, within `CLOSE_LIMIT_S`."""
        self._stopping.set()
        try:
            await asyncio.wait_for(self._in_thread(self._close), CLOSE_LIMIT_S)
        except TimeoutError:
            _log.warning(
                "%s: still in phase %s while closing; its segment is released all the same", self._name, self._phase
            )
            await asyncio.to_thread(self._release_channel)
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Callable[[], _T]) -> _T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    # -- in the training thread ----------------------------------------------------------------------------------

    def _start(self, buffer_address: str) -> dict[str, str]:
        config = self._config
        torch.set_num_threads(config.learner.threads)
        torch.manual_seed(config.run.seed)
        on_gpu = config.learner.gpus > 0
        if on_gpu:
            torch.cuda.set_device(0)  # Ray shows each rank its own
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_gpu else "gloo",
            init_method=f"tcp://{self._master}",
            rank=self._rank,
            world_size=self._world_size,
            timeout=timedelta(seconds=max(config.run.start_timeout_s, config.run.stall_limit_s)),
        )
        mesh = init_device_mesh("cuda" if on_gpu else "cpu", (self._world_size,))
        self._policy = self._load(mesh)
        reference = self._load(mesh) if config.algorithm.kl_coef > 0 else None
        critic = Critic(self._model_path, config, mesh=mesh) if config.algorithm.has_critic else None
        self._trainer = Trainer(self._policy, config, reference=reference, critic=critic)
        self._client = LearnerClient(buffer_address, rank=self._rank, world_size=self._world_size, curve=self._curve)
        self._client.connect(timeout_s=config.run.start_timeout_s)
        self._probe = self._make_probe()
        self._publisher = WeightPublisher(
            config.weight_sync,
            run_name=self._run_name,
            rank=self._rank,
            world_size=self._world_size,
            incarnation=self._incarnation,
            named_parameters=dict(self._policy.named_parameters()),
            probe=self._probe,
            dtype=getattr(torch, config.model.dtype),
            bind=config.network.bind,
            curve=self._curve,
        )
        address = self._publisher.start()
        self._publish()
        return {"weight_address": address} if self._rank == 0 else {}

    def _load(self, mesh: DeviceMesh) -> Policy:
        config = self._config
        return Policy(
            self._model_path,
            mesh=mesh,
            temperature=config.generator.temperature,
            dtype=config.model.dtype,
            compile=config.learner.compile,
            activation_checkpointing=config.learner.activation_checkpointing,
        )

    def _train(self, emit: Callable[[dict[str, float]], None]) -> int:
        self._first_wait_at = time.monotonic()
        try:
            while self._version < self._config.run.max_steps:
                step_began = time.monotonic()
                self._trainer.begin(self._version)
                self._enter("wait_for_batch")
                self._spent.clear()
                shard = self._add_batch()
                if shard is None:
                    break
                record = self._trainer.finish(shard)
                self._version += 1
                self._trained_tokens += shard.num_tokens
                if self._rank == 0:
                    self._warn(record)
                    self._client.advance(self._version, commit=True)
                self._enter("publish")
                if self._version % self._config.learner.publish_interval == 0:
                    self._publish()
                self._enter("wait_for_batch")
                step_time = time.monotonic() - step_began
                if self._rank == 0:
                    emit(
                        {
                            "step": float(self._version),
                            **record,
                            "learner/step_time_s": step_time,
                            "learner/tokens_per_s": shard.num_tokens / step_time,
                            "learner/rollouts": float(shard.num_rollouts),
                            "learner/response_tokens": float(shard.num_response_tokens),
                            **{f"time/{phase}": seconds for phase, seconds in self._spent.items()},
                        }
                    )
            if not self._stopping.is_set() and self._published != self._version:
                self._publish()  # the final evaluation is of the final weights
            return self._version
        finally:
            self._wait = None

    def _add_batch(self) -> Shard | None:
        """Forward and backward of a whole batch, chunk by chunk. The last shard; None on every rank if one of them
        could not get all of them."""
        for chunk in itertools.count():
            shard = self._next_shard(chunk)
            if shard is None:
                return None
            self._enter("train")
            self._trainer.add(shard.groups)
            if shard.is_last:
                return shard
        raise AssertionError("a batch has a last chunk")

    def _next_shard(self, chunk: int) -> Shard | None:
        """This rank's part of a chunk of the batch; None on every rank if one of them has none."""
        self._enter("wait_for_batch")
        learner = self._config.learner
        before = chunk * learner.stream_groups
        groups = min(learner.stream_groups or learner.groups_per_step, learner.groups_per_step - before)
        limit = self._config.run.stall_limit_s
        deadline = time.monotonic() + limit
        self._wait = Wait(
            waiter=self._name,
            waiting_for=f"{groups} groups for step {self._version + 1}",
            owner="buffer",
            since=time.time(),
        )
        shard = None
        while not self._stopping.is_set():
            left = deadline - time.monotonic()
            if left <= 0:
                raise DeadlineExceededError(
                    f"{self._name} waited {limit:.0f} s (run.stall_limit_s) on the buffer for {groups} groups for step "
                    f"{self._version + 1}"
                )
            try:
                shard = self._client.sample(
                    policy_version=self._version, chunk=chunk, timeout_s=min(SAMPLE_SLICE_S, left)
                )
                break
            except DeadlineExceededError:
                continue
        if shard is not None:
            for group in shard.groups:
                self._refuse_stale(group)
        self._wait = Wait(
            waiter=self._name, waiting_for=f"all ranks at step {self._version + 1}", owner="learners", since=time.time()
        )
        ready = torch.tensor([shard is not None], dtype=torch.int64)
        dist.all_reduce(ready, op=dist.ReduceOp.MIN)
        self._wait = None
        return shard if ready.item() else None

    def _refuse_stale(self, group: RolloutGroup) -> None:
        bound = self._config.buffer.max_staleness
        staleness = self._version - group.min_version
        newest = max(int(r.versions.max()) for r in group.members)
        if staleness > bound or newest > self._version:
            raise StaleRolloutError(
                f"{self._name} was given group {group.uid} with versions {group.min_version} to {newest} at "
                f"policy_version {self._version}; buffer.max_staleness is {bound}. It was not trained on."
            )

    def _warn(self, record: dict[str, float]) -> None:
        """Once when the data goes bad, and again when it has been good in between."""
        warning = off_policy_warning(record)
        if warning and not self._warned:
            _log.warning("step %d: %s", self._version, warning)
        self._warned = bool(warning)

    def _publish(self) -> None:
        assert self._publisher is not None, "start comes first"
        self._publisher.publish(self._version, self._policy.probe_log_probs(self._probe.sequences))
        self._published = self._version

    def _make_probe(self) -> ProbeSet:
        """Sequences of seeded random tokens: they reach rows of the embedding that no prompt would."""
        vocab_size = int(self._policy.model.config.vocab_size)
        length = min(PROBE_TOKENS, self._config.model.max_length - 1)
        generator = np.random.default_rng(self._config.run.seed)
        ids = generator.integers(0, vocab_size, size=(self._config.weight_sync.probe_prompts, length))
        return ProbeSet(sequences=ids.tolist())

    def _enter(self, phase: str) -> None:
        """Begin a phase, and count the seconds that the one before took."""
        now = time.monotonic()
        took = now - self._phase_since
        self._spent[self._phase] = self._spent.get(self._phase, 0.0) + took
        if self._phase in ("train", "publish"):
            self._busy_s += took
        self._phase, self._phase_since = phase, now

    def _close(self) -> None:
        self._release_channel()
        client = getattr(self, "_client", None)
        if client is not None:
            client.close()
        if dist.is_initialized():
            dist.destroy_process_group()

    def _release_channel(self) -> None:
        if self._publisher is not None:
            self._publisher.close()
