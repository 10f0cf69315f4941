"""The doctor's second half: one engine, the learner's policy and the weight channel, each proving the other.

Everything is what a run uses: `Engine`, `Policy`, `WeightPublisher` and `WeightFollower`, in this one process and its
engine's. Waits: for the engine to start (run.start_timeout_s), for engine steps and for updates
(weight_sync.timeout_s).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh

from actors.busy_meter import BusyMeter
from actors.doctor import Check, Trouble
from actors.engine import Engine
from actors.parity import log_prob_differences, sample_rollouts
from actors.preparation import prepare
from actors.weight_follower import WeightFollower
from streamrl.config import Config
from streamrl.errors import StreamrlError, WeightSyncError
from streamrl.policy import Policy
from streamrl.records import WeightUpdate
from streamrl.transport import CurveKeys
from streamrl.weight_sync.channel import ProbeSet, WeightPublisher
from streamrl.weight_sync.choice import Placement, choose_backend, with_backend
from streamrl.weight_sync.probe import TOLERANCE, probe_difference

SAMPLES = 32
PERTURBATION = 0.1
"""Each weight is multiplied by 1 + this much noise: far above the rounding of any dtype."""
_PROBE_TOKENS = 16

T = TypeVar("T")


@contextlib.contextmanager
def engine_checks(config: Config) -> Iterator[list[Check]]:
    """The checks in their order; what they have started is gone afterwards."""
    patient = _Patient(config)
    try:
        yield [
            ("engine start", patient.start),
            ("log-prob parity", patient.compare),
            ("weight sync", patient.sync),
            ("wrong weights", patient.plant),
        ]
    finally:
        patient.close()


class _Patient:
    def __init__(self, config: Config) -> None:
        backend, self._why = choose_backend(config, Placement.on_this_host())
        self._config = with_backend(config, backend)
        self._loop = asyncio.new_event_loop()
        self._engine: Engine | None = None
        self._publisher: WeightPublisher | None = None
        self._follower: WeightFollower | None = None
        self._version = 0

    def _await(self, work: Awaitable[T], limit_s: float) -> T:
        async def limited() -> T:
            async with asyncio.timeout(limit_s):
                return await work

        try:
            return self._loop.run_until_complete(limited())
        except TimeoutError:
            raise Trouble(f"it took longer than {limit_s:g} s") from None

    def start(self) -> str:
        config = self._config
        preparation = prepare(config)
        self._model_path = preparation.model_path
        self._prompts = [p.prompt_ids.tolist() for p in preparation.eval_prompts]
        on_gpu = config.learner.gpus > 0
        self._engine = Engine(config, model_path=self._model_path)
        self._await(self._engine.start(), config.run.start_timeout_s)
        dist.init_process_group("cpu:gloo,cuda:nccl" if on_gpu else "gloo", store=HashStore(), rank=0, world_size=1)
        self._policy = Policy(
            self._model_path,
            mesh=init_device_mesh("cuda" if on_gpu else "cpu", (1,)),
            temperature=config.generator.temperature,
            dtype=config.model.dtype,
        )
        return f"vLLM serves {config.model.path} in {config.model.dtype}"

    def compare(self) -> str:
        """Log-probs of sampled tokens: as the engine reports them, and as the policy computes them."""
        assert self._engine is not None
        config, engine = self._config, self._engine
        vocabulary = int(self._policy.model.config.vocab_size)
        numbers = np.random.default_rng(0)
        prompts = self._prompts or numbers.integers(0, vocabulary, size=(SAMPLES, 8)).tolist()
        sampling = sample_rollouts(engine, prompts, config.generator, count=SAMPLES, stop_ids=[])
        rollouts = self._await(sampling, config.weight_sync.timeout_s)
        found = log_prob_differences(self._policy, rollouts, max_tokens=config.learner.micro_batch_tokens).abs()
        text = f"{len(found)} tokens, mean difference {found.mean():.2g}, largest {found.max():.2g}"
        tolerance = TOLERANCE[config.model.dtype]
        if not float(found.max() if config.model.dtype == "float32" else found.mean()) <= tolerance:
            raise Trouble(
                f"{text}: engine and learner compute different functions (more than {tolerance:g}). The model's "
                "architecture is not right in one of them; choose another model.path, or model.dtype=float32 to see "
                "whether it is rounding."
            )
        return text

    def sync(self) -> str:
        """Perturb the policy, publish, and see the engine compute the new function; then no longer the old one."""
        config = self._config
        numbers = np.random.default_rng(config.run.seed)
        vocabulary = int(self._policy.model.config.vocab_size)
        length = min(_PROBE_TOKENS, config.model.max_length - 1)
        count = config.weight_sync.probe_prompts
        self._probe = ProbeSet(numbers.integers(0, vocabulary, size=(count, length)).tolist())
        # Keys even on loopback, so that this path is seen too.
        keys = CurveKeys.make(listeners=["learner-0"], others=["doctor"])
        self._publisher = WeightPublisher(
            config.weight_sync,
            run_name=f"doctor-{os.getpid()}",
            rank=0,
            world_size=1,
            incarnation=0,
            named_parameters=dict(self._policy.named_parameters()),
            probe=self._probe,
            dtype=getattr(torch, config.model.dtype),
            bind=config.network.bind,
            curve=keys["learner-0"],
        )
        address = self._publisher.start()
        before = self._policy.probe_log_probs(self._probe.sequences)
        self._perturb()
        after = self._policy.probe_log_probs(self._probe.sequences)
        self._publisher.publish(self._version, after)
        assert self._engine is not None
        self._follower = WeightFollower(config, name="doctor", engine=self._engine, meter=BusyMeter())
        limit = config.weight_sync.timeout_s
        self._await(self._follower.connect(address, curve=keys["doctor"]), limit)
        self._await(self._follower.first(_nobody, incarnation=0), 2 * limit)
        ack = self._follower.last_sync
        assert ack is not None
        moved = probe_difference(before, after, dtype=config.model.dtype)
        return (
            f"{config.weight_sync.backend}: {self._why}; {ack.num_bytes / 1e6:,.1f} MB, a pause of "
            f"{1000 * ack.pause_s:.0f} ms, off by {ack.probe_difference:.2g} after weights that moved it by {moved:.2g}"
        )

    def plant(self) -> str:
        """Publish weights that are not what their probe says: the channel must refuse them."""
        assert self._publisher is not None and self._follower is not None
        claimed = self._policy.probe_log_probs(self._probe.sequences)
        self._perturb()
        self._version += 1
        self._publisher.publish(self._version, claimed)
        try:
            self._await(_until_broken(self._follower), 2 * self._config.weight_sync.timeout_s)
        except WeightSyncError as error:
            ack = self._follower.last_sync
            if ack is not None and not ack.ok:
                return f"refused, as they must be: {ack.reason}"
            raise Trouble(f"wrong weights ended otherwise than by the probe: {error}") from None
        raise Trouble(
            "weights that differ from what was announced were taken for right. Lower weight_sync.probe_tolerance "
            f"(now {self._config.weight_sync.probe_tolerance:g}), or leave it at 0."
        )

    @torch.no_grad()
    def _perturb(self) -> None:
        torch.manual_seed(self._version + 1)
        for parameter in self._policy.parameters():
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            local.mul_(1 + PERTURBATION * torch.randn_like(local))

    def close(self) -> None:
        ends: list[Callable[[], Any]] = []
        if self._follower is not None:
            follower = self._follower
            ends.append(lambda: self._await(follower.close(), 10.0))
        if self._publisher is not None:
            ends.append(self._publisher.close)
        if self._engine is not None:
            engine = self._engine
            ends.append(lambda: self._await(engine.stop(), 30.0))
        if dist.is_initialized():
            ends.append(dist.destroy_process_group)
        for end in ends:
            with contextlib.suppress(StreamrlError):
                end()
        self._loop.run_until_complete(self._loop.shutdown_default_executor())
        self._loop.close()


async def _until_broken(follower: WeightFollower) -> None:
    """Ends with the first update that was loaded, right or wrong."""
    loads = follower.syncs

    async def taken(update: WeightUpdate) -> None:
        raise _Taken

    with contextlib.suppress(_Taken):
        await follower.follow(taken)
    assert follower.syncs > loads


class _Taken(Exception):
    """The planted update was proven."""


async def _nobody(update: WeightUpdate) -> None:
    """There is no buffer to report a version to."""
