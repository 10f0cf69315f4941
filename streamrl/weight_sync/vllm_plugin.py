"""The engine's end of weight sync: vLLM weight-transfer engines of our own, loaded through `vllm.general_plugins`.

vLLM calls `register` once in each of its processes. It makes the backend known, and ties the life of an engine
process to the generator that started it: a generator that gets SIGKILL cannot clean up, and an orphaned engine would
hold its memory for good.

Invariant: an update has loaded one whole version into every form of the weights that the engine computes with, or it
raises; unless that was a `TornReadError`, before anything was touched, the generator must not serve any more.

Waits: only the watcher thread, for the death of the generator; nothing waits on it.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from dataclasses import dataclass
from typing import Any

import torch
from tqdm import tqdm  # type: ignore[import-untyped]
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

from streamrl.weight_sync.direct_load import DirectLoad
from streamrl.weight_sync.segment import OWNER_VARIABLE, SHADOW_ENGINE, SegmentReader, TornReadError


def register() -> None:
    """Entry point of the plugin group; safe to call twice."""
    owner = int(os.environ.get(OWNER_VARIABLE, "0"))
    if owner and owner != os.getpid():
        _die_with(owner)
        # tqdm would make a named semaphore, which stays in /dev/shm when this process is killed.
        tqdm.set_lock(threading.RLock())
    if SHADOW_ENGINE not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(SHADOW_ENGINE, ShadowLoader)


def _die_with(owner: int) -> None:
    """Kill this process when `owner` ends.

    Not PR_SET_PDEATHSIG: that fires when the *thread* that started this process ends, and it does not reach
    grandchildren.
    """
    try:
        owner_fd = os.pidfd_open(owner)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        raise

    def watch() -> None:
        select.select([owner_fd], [], [])
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="die-with-generator", daemon=True).start()


@dataclass
class ShadowInitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Nothing to agree on beforehand: every update names its shadow."""


@dataclass
class ShadowUpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Where one version lies: what `Shadow.finish` has returned."""

    segment: str  # path
    nonce: str  # of this shadow
    sequence: int


class ShadowLoader(WeightTransferEngine[ShadowInitInfo, ShadowUpdateInfo]):  # type: ignore[misc]
    """Loads one version from the generator's shadow into the engine's model."""

    init_info_cls = ShadowInitInfo
    update_info_cls = ShadowUpdateInfo

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._reader: SegmentReader | None = None
        self._buffer: torch.Tensor | None = None  # a version on the GPU
        self._plan: DirectLoad | None = None
        self._watched = False

    def init_transfer_engine(self, init_info: ShadowInitInfo) -> None:
        pass

    def start_weight_update(self) -> None:
        pass  # the model must stay whole until the version is known to be (see `receive_weights`)

    def finish_weight_update(self) -> None:
        pass

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self.receive_weights(self.parse_update_info(update_info))
        if self.device.type != "cpu":  # the base class synchronizes always, which raises on a CPU
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: ShadowUpdateInfo) -> None:
        """Load the version that the shadow holds.

        Raises:
            TornReadError: it holds another one; the engine still has its old weights.
        """
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        reader = self._attach(update_info)
        if self.device.type == "cuda" and self._load_directly(reader, update_info.sequence):
            return
        weights = reader.view(update_info.sequence)
        # A plain load_weights would fail on a CPU, where the engine has packed its weights, and leave captured CUDA
        # graphs with old storage: the layerwise reload rebuilds each layer and copies it into place.
        initialize_layerwise_reload(self.model)
        self.model.load_weights(iter(weights))
        finalize_layerwise_reload(self.model, self.model_config)
        _mend_tied_heads(self.model)

    def _load_directly(self, reader: SegmentReader, sequence: int) -> bool:
        """By plain copies on the GPU, where an engine leaves dense weights as they were loaded; False if they do not
        make up the whole load, and the model needs one in full."""
        payload = reader.payload(sequence)
        if self._watched and self._plan is None:
            return False
        if self._buffer is None:
            self._buffer = torch.empty(reader.num_bytes, dtype=torch.uint8, device=self.device)
        torch.accelerator.synchronize()  # a step may still be reading the weights
        self._buffer.copy_(payload, non_blocking=True)
        if self._plan is not None:
            self._plan()
        else:
            self._watched = True
            self._plan = DirectLoad.watch(self.model, reader.layout, self._buffer)
            if self._plan is None:
                self._buffer = None
        return self._plan is not None

    def shutdown(self) -> None:
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    def _attach(self, info: ShadowUpdateInfo) -> SegmentReader:
        if self._reader is None or self._reader.nonce != info.nonce:
            self.shutdown()
            self._reader = SegmentReader.open(info.segment, writable=True)
            if self._reader.nonce != info.nonce:
                raise TornReadError(f"{info.segment} is now another shadow")
            if self.device.type == "cuda":
                self._reader.pin()
        return self._reader


def _mend_tied_heads(model: torch.nn.Module) -> None:
    """Pack a tied output head again: the reload fills its storage through the embedding and never sees the head.

    Without this the CPU engine goes on with the old head, silently (log-probs off by more than 1).
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    modules = [m for m in model.modules() if isinstance(m, VocabParallelEmbedding)]
    embeddings = {m.weight.data_ptr() for m in modules if not isinstance(m, ParallelLMHead)}
    for module in modules:
        if isinstance(module, ParallelLMHead) and module.weight.data_ptr() in embeddings:
            module.quant_method.process_weights_after_loading(module)
