"""Backend `shm`: one host, one shared segment, and a shadow for each generator.

The ranks write their shards into the run's segment; a generator copies the version out into its shadow beside
generation, and its engine loads from there (vllm_plugin.py). The copy is made in a thread of its own, and waited for by
`fetch`; nobody else waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from streamrl.records import WeightUpdate
from streamrl.weight_sync.backend import InletSettings, OutletSettings
from streamrl.weight_sync.segment import SegmentReader, SegmentWriter, Shadow, TornReadError


class ShmOutlet:
    """One learner rank's end."""

    def __init__(self, settings: OutletSettings) -> None:
        self._settings = settings
        self._segment: SegmentWriter | None = None

    def start(self, barrier: Callable[[], None]) -> None:
        s = self._settings
        if s.rank == 0:
            self._segment = SegmentWriter.create(
                s.run_name, world_size=s.world_size, parameters=s.parameters, dtype=s.dtype
            )
        barrier()
        if s.rank != 0:
            self._segment = SegmentWriter.attach(s.run_name, rank=s.rank)
        assert self._segment is not None
        if any(tensor.is_cuda for tensor in s.parameters.values()):
            self._segment.pin()

    def write(self, sequence: int) -> int:
        assert self._segment is not None, "write before start"
        return self._segment.write(sequence, self._settings.parameters)

    def payload(self, sequence: int) -> dict[str, Any]:
        assert self._segment is not None, "payload before start"
        return self._segment.place(sequence)

    def close(self) -> None:
        if self._segment is not None:
            if self._settings.rank == 0:
                self._segment.unlink()
            self._segment.close()
            self._segment = None


class ShmInlet:
    """One generator's end."""

    def __init__(self, settings: InletSettings) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")  # so one copy at a time
        self._source: SegmentReader | None = None
        self._shadow: Shadow | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._shadow is None else self._shadow.num_bytes

    async def fetch(self, update: WeightUpdate) -> dict[str, Any] | None:
        return await asyncio.get_running_loop().run_in_executor(self._thread, self._copy, update.payload)

    def _copy(self, payload: dict[str, Any]) -> dict[str, Any] | None:
        try:
            source = self._attach(payload)
            if source is None:
                return None
            shadow = self._shadow = Shadow.of(source.layout, instead_of=self._shadow)
            source.copy(payload["sequence"], shadow.begin(payload["sequence"]))
        except TornReadError:
            return None
        return shadow.finish(payload["sequence"])

    def _attach(self, payload: dict[str, Any]) -> SegmentReader | None:
        if self._source is None or self._source.nonce != payload["nonce"]:
            if self._source is not None:
                self._source.close()
                self._source = None
            try:
                self._source = SegmentReader.open(payload["segment"])
            except FileNotFoundError:
                return None
        return self._source if self._source.nonce == payload["nonce"] else None

    async def close(self) -> None:
        await asyncio.to_thread(self._thread.shutdown)
        for memory in (self._source, self._shadow):
            if memory is not None:
                memory.close()
        self._source = self._shadow = None
