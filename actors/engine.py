"""One vLLM engine behind a small face: generate, score, load weights, stop. The only importer of vllm in actors.

vLLM reads the environment when it is imported and starts its engine core in a process of its own, so the import
happens in `start`, after the environment is set. That process dies with this one (`weight_sync.vllm_plugin`).

Waits: `start` for the engine core's hand-shake (vLLM's own limit), `generate` and `score` for engine steps (`abort`,
`stop` or the engine's death ends them), `load` for the engine's worker, `stop` for the process to go (STOP_TIMEOUT_S,
then it is killed).
"""

from __future__ import annotations

import asyncio
import importlib
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil

from streamrl.config import CPU_KV_CACHE_BYTES, Config
from streamrl.errors import ProcessDiedError, StreamrlError
from streamrl.weight_sync.backend import LOADERS
from streamrl.weight_sync.segment import OWNER_VARIABLE

STOP_TIMEOUT_S = 1.0
_NEVER_STREAM = 1 << 30  # tokens between two outputs of a request; the first and the last one are always sent
_GPU_BATCH_TOKENS = 8192  # in one engine step; a wave of new prompts takes a few steps instead of dozens
_CPU_BLOCK_SIZE = 32  # tokens; the smallest the CPU kernels like, so that short prompts fill blocks at all


@dataclass(frozen=True, kw_only=True, slots=True)
class Completion:
    """What the engine made of one request.

    Example: Completion(token_ids=[7, 1], log_probs=[-0.1, -0.7], spans=[("0.4.4", 0, 1), ("0.5.5", 1, 2)],
    finish_reason="stop"): the second token was sampled by the weights with the label 0.5.5.
    """

    token_ids: list[int]  # [T]
    log_probs: list[float]  # [T] at the sampling temperature
    spans: list[tuple[str, int, int]]  # (label, start, end) over [0, T)
    finish_reason: str  # stop | length | abort
    first_token_at: float  # monotonic; 0.0 if there was none

    @property
    def labels(self) -> list[str]:
        """Of the weights that sampled it, oldest first."""
        return [label for label, _, _ in self.spans]


class EngineFailure(StreamrlError):
    """One request failed inside the engine; the engine goes on."""


class Engine:
    """An `AsyncLLM` set up so that the log-probs it reports are the behaviour policy's. Lives in one event loop."""

    def __init__(self, config: Config, *, model_path: str) -> None:
        self._config = config
        self._model_path = model_path
        self._llm: Any = None
        self._processes: list[psutil.Process] = []
        self._requests: dict[str, bool] = {}  # of `generate`: whether the first token is there
        self._reserved_tokens = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._death: asyncio.Future[None] | None = None

    # -- life ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Bring the engine up.

        Raises:
            ProcessDiedError: it did not come up; vLLM's own message is in the log.
        """
        os.environ.update(engine_environment(self._config))
        try:
            await asyncio.to_thread(self._build)
        except Exception as error:  # vLLM lets through whatever broke: RuntimeError, ValueError, OSError, ...
            raise ProcessDiedError(f"the engine did not start: {type(error).__name__}: {error}") from error
        loop = asyncio.get_running_loop()
        self._death = loop.create_future()
        for process in self._llm.engine_core.resources.engine_manager.processes:
            self._processes.append(psutil.Process(process.pid))
            loop.add_reader(process.sentinel, self._on_death, process)

    def _build(self) -> None:
        """In a thread: importing vLLM and waiting for its engine core takes long.

        Returns nothing, because the thread would keep what it returned alive, and vLLM complains if an engine is
        still there when the interpreter ends.
        """
        args = importlib.import_module("vllm.engine.arg_utils").AsyncEngineArgs
        async_llm = importlib.import_module("vllm.v1.engine.async_llm").AsyncLLM
        self._llm = async_llm.from_engine_args(args(**engine_arguments(self._config, self._model_path)))

    def _on_death(self, process: Any) -> None:
        asyncio.get_running_loop().remove_reader(process.sentinel)
        if self._death is not None and not self._death.done():
            self._death.set_result(None)

    async def died(self) -> None:
        """Wait for the engine core's process to end on its own. Raises ProcessDiedError then."""
        assert self._death is not None, "the engine was not started"
        await asyncio.shield(self._death)
        raise ProcessDiedError(f"the engine core (pid {self._processes[0].pid}) died")

    async def stop(self) -> None:
        """End every request and the engine core's process; idempotent. Gone when this returns."""
        llm, self._llm = self._llm, None
        if llm is None:
            return
        family = list(self._processes)
        for process in self._processes:
            try:
                family += process.children(recursive=True)
            except psutil.NoSuchProcess:
                continue
        if llm.output_handler is not None:  # it would report the end of the process as an error
            llm.output_handler.cancel()
        await asyncio.to_thread(llm.shutdown, STOP_TIMEOUT_S)
        _, alive = await asyncio.to_thread(psutil.wait_procs, family, STOP_TIMEOUT_S)
        for process in alive:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        await asyncio.to_thread(psutil.wait_procs, alive, STOP_TIMEOUT_S)

    @property
    def pids(self) -> list[int]:
        """Of the engine core's process."""
        return [process.pid for process in self._processes]

    @property
    def kv_usage(self) -> float:
        """Share of the KV cache that the requests in the engine need when each is at its longest."""
        if self._llm is None:
            return 0.0
        cache = self._llm.vllm_config.cache_config
        return float(min(1.0, self._reserved_tokens / (cache.num_gpu_blocks * cache.block_size)))

    # -- requests ------------------------------------------------------------------------------------------------

    async def generate(
        self,
        prompt_ids: Sequence[int],
        *,
        request_id: str,
        temperature: float,
        max_tokens: int,
        stop_ids: Sequence[int],
        seed: int,
        salt: str,
    ) -> Completion:
        """Sample one response. Cancelling the caller aborts the request.

        Args:
            prompt_ids: [P], at least one.
            request_id: unique among the requests in the engine.
            stop_ids: tokens that end the response; the one sampled is part of it.
            salt: of the prefix cache; blocks are shared only among requests with the same salt.

        Raises:
            ProcessDiedError: the engine died.
            EngineFailure: this request failed, the engine goes on.
        """
        params = _sampling_params(
            temperature=temperature,
            max_tokens=max_tokens,
            stop_token_ids=list(stop_ids),
            seed=seed,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            stream_interval=_NEVER_STREAM,
            skip_clone=True,
        )
        token_ids: list[int] = []
        log_probs: list[float] = []
        first_token_at = 0.0
        longest = len(prompt_ids) + max_tokens
        self._requests[request_id] = False
        self._idle.clear()
        self._reserved_tokens += longest
        try:
            async for output in self._outputs(prompt_ids, params, request_id, salt):
                part = output.outputs[0]
                token_ids += part.token_ids
                log_probs += part.logprobs.logprobs if part.logprobs else ()
                if token_ids and not first_token_at:
                    self._requests[request_id] = True
                    first_token_at = time.monotonic()
        finally:
            del self._requests[request_id]
            if not self._requests:
                self._idle.set()
            self._reserved_tokens -= longest
        return Completion(
            token_ids=token_ids,
            log_probs=log_probs,
            spans=[(span.version, span.start, span.end) for span in part.weight_versions or ()],
            finish_reason=part.finish_reason,
            first_token_at=first_token_at,
        )

    async def score(self, sequences: Sequence[Sequence[int]], *, request_id: str) -> list[float]:
        """Log-probs at temperature 1 of every token but the first of each sequence, flat.

        Each sequence is read anew: `prompt_logprobs` makes vLLM skip the prefix cache, and a salt of its own keeps
        what it leaves there from everybody else.
        """
        params = _sampling_params(temperature=1.0, max_tokens=1, prompt_logprobs=0, detokenize=False)

        async def one(index: int, sequence: Sequence[int]) -> list[float]:
            name = f"{request_id}-{index}"
            output: Any = None
            async for answer in self._outputs(sequence, params, name, salt=name):
                output = answer
            scored = zip(sequence[1:], output.prompt_logprobs[1:], strict=True)
            return [float(entry[token].logprob) for token, entry in scored]

        answers = await asyncio.gather(*(one(i, sequence) for i, sequence in enumerate(sequences)))
        return [value for answer in answers for value in answer]

    async def drained(self) -> None:
        """Wait until no request of `generate` is in the engine; their ends end the wait."""
        await self._idle.wait()

    async def abort_unstarted(self) -> None:
        """End every request of `generate` that has no token yet; its completion has finish_reason `abort`."""
        await self._llm.abort([name for name, started in self._requests.items() if not started])

    async def abort_all(self) -> None:
        """End every request of `generate` where it is."""
        await self._llm.abort(list(self._requests))

    async def _outputs(self, token_ids: Sequence[int], params: Any, request_id: str, salt: str) -> Any:
        from vllm.inputs.engine import tokens_input
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        if self._llm is None:
            raise ProcessDiedError("the engine was stopped")
        prompt = tokens_input(list(token_ids), cache_salt=salt)
        try:
            async for output in self._llm.generate(prompt, params, request_id):
                yield output
        except EngineDeadError:
            raise ProcessDiedError(f"the engine core (pid {self.pids[0]}) died") from None
        except (EngineGenerateError, ValueError) as error:  # vLLM's validation errors are ValueErrors
            raise EngineFailure(f"{type(error).__name__}: {error.__cause__ or error}") from error

    # -- weights -------------------------------------------------------------------------------------------------

    async def pause(self) -> None:
        """Freeze every request where it is, KV cache kept. Nothing is scheduled until `resume`.

        Outputs of the steps before may still be on their way. vLLM's `pause_generation` is this call and a sleep of
        20 ms for them, which would be most of the pause of a small model.
        """
        await self._llm.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        await self._llm.resume_generation()

    async def forget(self) -> None:
        """In the paused engine: drop what the old weights have read. Every request reads its prompt and its response so
        far again after `resume`, and goes on from there.

        Raises:
            Exception: as vLLM wraps it, if some of it could not be dropped.
        """
        await self._llm.reset_prefix_cache(reset_running_requests=True)

    async def load(self, payload: dict[str, Any], *, label: str) -> None:
        """Load one version into the paused engine; every token sampled after `resume` carries `label`.

        Raises:
            Exception: whatever the worker raised, as vLLM wraps it. The engine must not serve any more.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.start_weight_update()
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=payload))
        await self._llm.finish_weight_update(label)


def engine_environment(config: Config) -> dict[str, str]:
    """What vLLM must find in the environment before it is imported. A variable the user has set stays."""
    wanted = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a forked engine core would not load the plugin again
        "TOKENIZERS_PARALLELISM": "false",
    }
    if config.generator.enforce_eager:
        # vLLM compiles a few sampling helpers whatever enforce_eager says: 3 s, and a C++ compiler, for nothing.
        wanted["TORCHDYNAMO_DISABLE"] = "1"
    if config.generator.gpus > 0:
        wanted["VLLM_USE_FLASHINFER_SAMPLER"] = "0"  # compiled at start-up, and only for top-k and top-p
    else:
        threads = str(config.generator.threads)
        wanted |= {
            "OMP_NUM_THREADS": threads,
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            # The CPU platform would start a worker process below the engine core to bind its threads; with nobind
            # there is nothing to bind, and one process less is 10 s of start-up and 0.7 GB.
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        }
    return {OWNER_VARIABLE: str(os.getpid())} | {k: os.environ.get(k, v) for k, v in wanted.items()}


def engine_arguments(config: Config, model_path: str) -> dict[str, Any]:
    """The arguments of vLLM's AsyncEngineArgs."""
    g, model = config.generator, config.model
    # Seats beside `concurrency`: evaluation may fill as many again, and a probe must never queue behind either.
    seats = 2 * g.concurrency + config.weight_sync.probe_prompts
    arguments: dict[str, Any] = {
        "model": model_path,
        "skip_tokenizer_init": True,
        "dtype": model.dtype,
        "seed": config.run.seed,
        "max_model_len": model.max_length,
        "max_num_seqs": seats,
        "max_num_batched_tokens": max(2048, seats, model.max_length),
        "enforce_eager": g.enforce_eager,
        "distributed_executor_backend": "uni",
        "logprobs_mode": "processed_logprobs",  # at the sampling temperature, as the learner computes them
        "generation_config": "vllm",  # not the model folder's own sampling defaults
        "enable_prefix_caching": True,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "weight_transfer_config": {"backend": LOADERS[config.weight_sync.backend]},
    }
    if g.gpus == 0:
        arguments |= {
            "kv_cache_memory_bytes": g.kv_cache_bytes or CPU_KV_CACHE_BYTES,
            "block_size": _CPU_BLOCK_SIZE,
            # vLLM takes back the random state of a seeded request whose prompt it has read in part, which raises on a
            # CPU and ends the engine core. Whole prompts fit: max_num_batched_tokens >= max_model_len.
            "enable_chunked_prefill": False,
        }
    else:
        arguments |= {
            "gpu_memory_utilization": g.gpu_memory_utilization,
            # Set, it makes vLLM skip the measuring of what is free, which engines that start beside it would spoil.
            "kv_cache_memory_bytes": g.kv_cache_bytes or None,
            "max_num_batched_tokens": max(_GPU_BATCH_TOKENS, seats, model.max_length),
        }
    return arguments


def _sampling_params(**settings: Any) -> Any:
    from vllm.sampling_params import RequestOutputKind, SamplingParams

    # DELTA, because vLLM heeds stream_interval there only; elsewhere it would wake this process for every token.
    kind = RequestOutputKind.DELTA if "stream_interval" in settings else RequestOutputKind.FINAL_ONLY
    return SamplingParams(output_kind=kind, **settings)
