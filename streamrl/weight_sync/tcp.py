"""Backend `tcp`: any host. Every learner rank serves its own shards; a generator collects them into its shadow.

    TcpOutlet (each rank)                            TcpInlet (a generator)
      a snapshot of the rank's part, two slots         one link to each rank
      <-------------- ChunkRequest(sequence, index) --   at most WINDOW asked for and not yet in the shadow
      -- Chunk(index, crc) + bytes, or Gone ---------->  checked, laid where it belongs, the next one asked for

Invariants:
- A generator asks for every chunk, so that what is on the way to it is bounded, and a link that broke goes on at the
  chunk where it broke. A generator that does not ask costs nobody anything.
- A chunk is laid down only if its checksum is the one of the bytes that were published.
- `write` never waits for a generator. It takes the slot that nobody reads from, the older one of two; if generators
  read from both, the newer one, so that the one who has read longest gets to the end: a link slower than the learner's
  steps is late, never starved. Who has not asked for PIN_S does not count as reading.

Waits: `fetch` for the ranks' answers, `timeout_s` in all. On the learner's side only the loop thread waits, for
requests, until `close`.
"""

from __future__ import annotations

import asyncio
import bisect
import secrets
import threading
import time
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import msgspec
import numpy as np
import torch

from streamrl.errors import ClosedError, DeadlineExceededError, WeightSyncError, WireError
from streamrl.records import WeightUpdate
from streamrl.transport import Connection, Listener, Message
from streamrl.weight_sync.backend import InletSettings, OutletSettings
from streamrl.weight_sync.layout import Layout, Part, Payload, Run
from streamrl.weight_sync.loop_thread import LoopThread
from streamrl.weight_sync.segment import Shadow
from streamrl.wire import Codec, Frame, pack

CHUNK_BYTES = 4 << 20
WINDOW = 2  # chunks of one rank asked for at a time: one on the wire while the other is checked
PIN_S = 5.0  # how long after its last request a generator still counts as reading a version
_TRIES = 3  # of one chunk, whose checksum did not fit
_ADDRESS_BYTES = 256


class ChunkRequest(msgspec.Struct, frozen=True):
    """Generator to rank."""

    sequence: int
    index: int


class Chunk(msgspec.Struct, frozen=True):
    """Rank to generator; with the bytes as its one array."""

    sequence: int
    index: int
    crc: int


class Gone(msgspec.Struct, frozen=True):
    """Rank to generator: that version is not here, or no longer."""

    sequence: int


class PartManifest(msgspec.Struct, frozen=True):
    """What a rank says in its welcome."""

    nonce: str
    layout: Layout
    runs: list[Run]
    num_bytes: int
    chunk_bytes: int

    @property
    def num_chunks(self) -> int:
        return -(-self.num_bytes // self.chunk_bytes)


_from_generator = Codec(ChunkRequest)
_from_rank = Codec(Chunk, Gone)
_manifest_decoder = msgspec.msgpack.Decoder(PartManifest)


# -- the learner's side ----------------------------------------------------------------------------------------------


class _Slot:
    """One published version of a rank's part; guarded by the outlet's lock."""

    def __init__(self, num_bytes: int) -> None:
        self.bytes: Payload = np.empty(num_bytes, dtype=np.uint8)
        self.sequence = 0
        """0 while it is being written."""
        self.crcs: dict[int, int] = {}
        self.readers: dict[str, float] = {}
        """Generator -> monotonic time of its last request, until it has asked for everything."""

    def is_read(self) -> bool:
        horizon = time.monotonic() - PIN_S
        return any(asked > horizon for asked in self.readers.values())


class TcpOutlet:
    """One learner rank's end."""

    def __init__(self, settings: OutletSettings) -> None:
        self._settings = settings
        self._nonce = secrets.token_hex(8)
        layout = Layout.of(settings.parameters, dtype=settings.dtype)
        self._part = Part(layout, settings.parameters, rank=settings.rank)
        manifest = PartManifest(self._nonce, layout, self._part.runs, self._part.num_bytes, CHUNK_BYTES)
        self._num_chunks = manifest.num_chunks
        self._slots = [_Slot(self._part.num_bytes) for _ in range(2)]
        self._lock = threading.Lock()
        welcome = msgspec.msgpack.encode(manifest)
        self._listener = Listener(bind=settings.bind, curve=settings.curve, welcome=lambda name, payload: welcome)
        self._loop: LoopThread | None = None
        self._ranks: list[dict[str, str]] = []

    def start(self, barrier: Callable[[], None]) -> None:
        self._loop = LoopThread("weight-server")
        address = self._loop.call(self._listener.start())
        self._loop.begin(self._serve())
        self._ranks = _from_all_ranks({"address": address, "nonce": self._nonce}, self._settings.world_size)

    def write(self, sequence: int) -> int:
        with self._lock:
            slot = self._writable()
            slot.sequence = 0
            slot.crcs.clear()
            slot.readers.clear()
        written = self._part.write(slot.bytes)
        with self._lock:
            slot.sequence = sequence
        return written

    def _writable(self) -> _Slot:
        older, newer = sorted(self._slots, key=lambda slot: slot.sequence)
        return newer if older.is_read() else older

    def payload(self, sequence: int) -> dict[str, Any]:
        return {"ranks": self._ranks, "sequence": sequence}

    def close(self) -> None:
        if self._loop is not None:
            loop, self._loop = self._loop, None
            try:
                loop.call(self._listener.close(reason="the learner has ended"))
            finally:
                loop.close()

    async def _serve(self) -> None:
        while True:
            try:
                message = await self._listener.receive()
            except ClosedError:
                return
            if message.kind == "left":
                with self._lock:
                    for slot in self._slots:
                        slot.readers.pop(message.peer, None)
            elif message.kind == "data":
                answer = self._answer(message)
                if answer is not None:
                    await self._listener.send(message.peer, answer)  # who has left asks again when it is back

    def _answer(self, message: Message) -> list[Frame] | None:
        try:
            request, _ = _from_generator.unpack(message.frames)
        except WireError:
            return None  # what it meant to ask for, its time limit will tell
        index = request.index
        with self._lock:
            slot = next((s for s in self._slots if s.sequence == request.sequence > 0), None)
            if slot is None or not 0 <= index < self._num_chunks:
                return pack(Gone(request.sequence))
            if index + 1 < self._num_chunks:
                slot.readers[message.peer] = time.monotonic()
            else:
                slot.readers.pop(message.peer, None)
            # A copy, and made under the lock: the training thread may begin to overwrite the slot right after it.
            chunk = slot.bytes[index * CHUNK_BYTES : (index + 1) * CHUNK_BYTES].copy()
            crc = slot.crcs.get(index)
            if crc is None:
                crc = slot.crcs[index] = zlib.crc32(chunk.data)
        return pack(Chunk(request.sequence, index, crc), [chunk])


def _from_all_ranks(mine: dict[str, str], world_size: int) -> list[dict[str, str]]:
    """Everybody's, in the order of ranks. All ranks call it; it waits for them like a barrier."""
    if world_size == 1:
        return [mine]
    encoded = msgspec.json.encode(mine)
    assert len(encoded) <= _ADDRESS_BYTES, "an address is short"
    row = torch.tensor(list(encoded.ljust(_ADDRESS_BYTES)), dtype=torch.uint8)
    rows = [torch.empty_like(row) for _ in range(world_size)]
    torch.distributed.all_gather(rows, row)
    return [msgspec.json.decode(bytes(row.tolist()), type=dict[str, str]) for row in rows]


# -- the generator's side --------------------------------------------------------------------------------------------


class TcpInlet:
    """One generator's end."""

    def __init__(self, settings: InletSettings) -> None:
        self._settings = settings
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights")
        self._links: list[_RankLink] = []
        self._shadow: Shadow | None = None

    @property
    def num_bytes(self) -> int:
        return 0 if self._shadow is None else self._shadow.num_bytes

    async def fetch(self, update: WeightUpdate) -> dict[str, Any] | None:
        try:
            async with asyncio.timeout(self._settings.timeout_s):
                return await self._fetch(update.payload["ranks"], update.payload["sequence"])
        except (TimeoutError, DeadlineExceededError):
            progress = ", ".join(link.progress for link in self._links)
            raise WeightSyncError(
                f"{self._settings.name}: version {update.policy_version} did not arrive within weight_sync.timeout_s "
                f"({self._settings.timeout_s:g} s): {progress}"
            ) from None

    async def _fetch(self, ranks: list[dict[str, str]], sequence: int) -> dict[str, Any] | None:
        if [link.nonce for link in self._links] != [rank["nonce"] for rank in ranks]:
            await self._connect(ranks)
        if not all(link.manifest.nonce == link.nonce for link in self._links):
            return None  # another life of the learner listens there
        shadow = self._shadow = Shadow.of(self._links[0].manifest.layout, instead_of=self._shadow)
        into = shadow.begin(sequence)
        parts = [asyncio.create_task(link.fetch(sequence, into)) for link in self._links]
        try:
            for part in asyncio.as_completed(parts):
                if not await part:
                    return None
        finally:
            for task in parts:
                task.cancel()
            await asyncio.gather(*parts, return_exceptions=True)
        return shadow.finish(sequence)

    async def _connect(self, ranks: list[dict[str, str]]) -> None:
        await self._disconnect()
        self._links = [_RankLink(index, rank, self._settings, self._thread) for index, rank in enumerate(ranks)]
        await asyncio.gather(*(link.connect() for link in self._links))

    async def _disconnect(self) -> None:
        links, self._links = self._links, []
        await asyncio.gather(*(link.close() for link in links))

    async def close(self) -> None:
        await self._disconnect()
        await asyncio.to_thread(self._thread.shutdown)
        if self._shadow is not None:
            self._shadow.close()
            self._shadow = None


class _RankLink:
    """The link to one learner rank."""

    def __init__(self, rank: int, place: dict[str, str], settings: InletSettings, thread: ThreadPoolExecutor) -> None:
        self.rank = rank
        self.nonce = place["nonce"]
        self.manifest = PartManifest("", Layout(0, []), [], 0, CHUNK_BYTES)
        self._settings = settings
        self._connection = Connection(place["address"], name=settings.name, curve=settings.curve)
        self._thread = thread  # one for all links: what a cancelled fetch has begun to lay down is over by the next
        self._asked: dict[int, int] = {}  # chunk -> tries
        self._next = 0

    @property
    def progress(self) -> str:
        return f"{self._next - len(self._asked)} of {self.manifest.num_chunks} chunks from rank {self.rank}"

    async def connect(self) -> None:
        welcome = await self._connection.connect(timeout_s=self._settings.timeout_s)
        self.manifest = _manifest_decoder.decode(welcome)
        self._sources = [run.source for run in self.manifest.runs]

    async def close(self) -> None:
        await self._connection.close()

    async def fetch(self, sequence: int, into: Payload) -> bool:
        """Lay this rank's part into the payload; False if the version is gone.

        Raises:
            WeightSyncError: a chunk came damaged `_TRIES` times.
            ClosedError: the rank has ended.
        """
        self._asked, self._next = {}, 0
        while await self._ask_on(sequence):
            message = await self._connection.receive()
            if message.kind == "joined":
                if _manifest_decoder.decode(message.frames[0]).nonce != self.nonce:
                    return False
                for index in self._asked:
                    await self._connection.send(pack(ChunkRequest(sequence, index)))
            elif message.kind == "data":
                answer, arrays = _from_rank.unpack(message.frames)
                if answer.sequence != sequence:
                    continue  # of a fetch that was given up
                if isinstance(answer, Gone):
                    return False
                if answer.index in self._asked:
                    await self._take(answer, arrays[0], into)
        return True

    async def _ask_on(self, sequence: int) -> bool:
        """Keep `WINDOW` chunks asked for. False if there is none left to wait for."""
        while self._next < self.manifest.num_chunks and len(self._asked) < WINDOW:
            self._asked[self._next] = 1
            await self._connection.send(pack(ChunkRequest(sequence, self._next)))  # while it is down: at "joined"
            self._next += 1
        return bool(self._asked)

    async def _take(self, chunk: Chunk, raw: Payload, into: Payload) -> None:
        laid = await asyncio.get_running_loop().run_in_executor(self._thread, self._lay, chunk, raw, into)
        if laid:
            del self._asked[chunk.index]
        elif self._asked[chunk.index] < _TRIES:
            self._asked[chunk.index] += 1
            await self._connection.send(pack(ChunkRequest(chunk.sequence, chunk.index)))
        else:
            raise WeightSyncError(
                f"{self._settings.name}: chunk {chunk.index} of rank {self.rank} came damaged {_TRIES} times"
            )

    def _lay(self, chunk: Chunk, raw: Payload, into: Payload) -> bool:
        """In the thread. Whether the bytes are the published ones; they are in their places then."""
        manifest = self.manifest
        begin = chunk.index * manifest.chunk_bytes
        end = begin + len(raw)
        if end != min(begin + manifest.chunk_bytes, manifest.num_bytes) or zlib.crc32(raw.data) != chunk.crc:
            return False
        first = bisect.bisect_right(self._sources, begin) - 1
        for run in manifest.runs[max(0, first) :]:
            if run.source >= end:
                break
            low, high = max(run.source, begin), min(run.source + run.num_bytes, end)
            if low < high:
                target = run.target + low - run.source
                into[target : target + high - low] = raw[low - begin : high - begin]
        return True
