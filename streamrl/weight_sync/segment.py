"""The shared segment: one piece of memory that carries whole versions of the weights from one process to another.

The learner's ranks make one in /dev/shm, with two slots, used in turn; every generator copies a version out of it into
a shadow, a segment of one slot of its own (`Shadow`), from which its engine loads. A segment is a header page, the
layout of the payload (layout.py), then the slots; a slot is a page of counters followed by the payload. Each learner
rank writes its own shard of every parameter straight to its place, so nothing is gathered and no rank holds more than
it already has.

Invariants:
- A slot is whole for sequence number s if, for every rank, `begin == end == s`: a rank sets `begin` before its first
  byte and `end` after its last (a seqlock with one writer per counter). Sequence s uses slot s % 2, so the version
  before it stays readable while s is being written.
- Who copies the payload out looks at the counters before and after: a copy that a writer overtook is refused
  (`TornReadError`). A reader takes no lock, so it can never hold up the learner.
- A shadow is written by its generator only while its engine does not load, so the engine reads it without a copy. It
  has no name (memfd): it is not bound by the size of /dev/shm and is gone with its processes.
- The header carries a nonce, drawn anew by each `create`: an announcement of one life of the learner is never served
  from the segment of another.

The counters order memory by themselves on x86-64, where stores are seen in program order. Elsewhere the barrier and
the socket between the last store and the first read do, and the log-prob probe after every update is the backstop.
Nothing here waits.
"""

from __future__ import annotations

import hashlib
import logging
import mmap
import os
import pathlib
import re
import secrets
from collections.abc import Mapping
from typing import Any, Self

import msgspec
import numpy as np
import torch

from streamrl.errors import WeightSyncError
from streamrl.weight_sync.layout import Layout, Payload, own_shards, round_up

logger = logging.getLogger(__name__)

NUM_SLOTS = 2
SHADOW_ENGINE = "streamrl_shadow"
"""Name of the vLLM weight-transfer engine that loads from a shadow."""
OWNER_VARIABLE = "STREAMRL_ENGINE_OWNER"
"""Environment variable of vLLM's processes: pid of the generator, which must outlive them."""
_MAGIC = b"SRLSHM02"
_PAGE = 4096
_MAX_RANKS = _PAGE // 16  # two uint64 counters per rank on the slot's counter page


class TornReadError(WeightSyncError):
    """The slot was overwritten while it was read, or before: a newer version is out, take that one."""


class _Header(msgspec.Struct, frozen=True, array_like=True):
    nonce: str
    world_size: int
    num_slots: int
    layout: Layout

    @property
    def slot_bytes(self) -> int:
        return _PAGE + round_up(self.layout.num_bytes, _PAGE)


def _file_bytes(header: _Header, encoded: bytes) -> int:
    return round_up(16 + len(encoded), _PAGE) + header.num_slots * header.slot_bytes


def _begin_file(memory: mmap.mmap, encoded: bytes) -> None:
    memory[16 : 16 + len(encoded)] = encoded
    memory[8:16] = len(encoded).to_bytes(8, "little")
    memory[:8] = _MAGIC


def segment_path(run_name: str) -> pathlib.Path:
    """The segment of a run: readable name plus a hash, so that two run names never share a file."""
    readable = re.sub(r"[^A-Za-z0-9]+", "-", run_name).strip("-")[-48:]
    return pathlib.Path("/dev/shm") / f"streamrl-{readable}-{hashlib.sha256(run_name.encode()).hexdigest()[:12]}"


def unlink_segment(run_name: str) -> bool:
    """Remove what a crashed learner left behind; True if there was something. Mappings in use stay valid."""
    try:
        segment_path(run_name).unlink()
    except FileNotFoundError:
        return False
    return True


class _Mapping:
    """The file mapped into this process, and the views into it that both sides need."""

    def __init__(self, path: pathlib.Path, memory: mmap.mmap) -> None:
        self.path = path
        self._memory = memory
        self._pinned = False
        # Two bytes views: NumPy for copies, and a typed one per counter page.
        self._bytes = np.frombuffer(memory, dtype=np.uint8)
        if bytes(self._bytes[: len(_MAGIC)]) != _MAGIC:
            raise WeightSyncError(f"{path} is not a weight segment of this version of streamrl")
        length = int(self._bytes[8:16].view(np.uint64)[0])
        self.header = msgspec.msgpack.decode(bytes(self._bytes[16 : 16 + length]), type=_Header)
        first = round_up(16 + length, _PAGE)
        self._begin, self._end, self._payload = [], [], []
        for slot in range(self.header.num_slots):
            start = first + slot * self.header.slot_bytes
            counters = self._bytes[start : start + 16 * self.header.world_size].view(np.uint64)
            self._begin.append(counters[: self.header.world_size])
            self._end.append(counters[self.header.world_size :])
            self._payload.append(self._bytes[start + _PAGE : start + _PAGE + self.num_bytes])

    @property
    def nonce(self) -> str:
        return self.header.nonce

    @property
    def num_bytes(self) -> int:
        """Bytes of one version."""
        return self.header.layout.num_bytes

    @property
    def layout(self) -> Layout:
        return self.header.layout

    def place(self, sequence: int) -> dict[str, str | int]:
        """What a reader must be told to find version number `sequence`."""
        return {"segment": str(self.path), "nonce": self.nonce, "sequence": sequence}

    def pin(self) -> None:
        """Let this process's GPU read and write the memory by itself. Where the system refuses (the limit of locked
        memory), copies stay right and take the way through the CPU."""
        cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        error = cuda.cudaHostRegister(self._bytes.ctypes.data, self._bytes.nbytes, 0)
        self._pinned = error == cuda.cudaError.success
        if not self._pinned:
            logger.warning("%s is not pinned (%s): weights take longer to and from the GPU", self.path, error)

    def close(self) -> None:
        """Drop the mapping; idempotent. The file itself stays."""
        if self._pinned:
            cuda: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
            cuda.cudaHostUnregister(self._bytes.ctypes.data)
            self._pinned = False
        self._begin, self._end, self._payload = [], [], []
        self._bytes = np.empty(0, dtype=np.uint8)
        try:
            self._memory.close()
        except BufferError:  # a view handed out is still alive; the mapping goes with it
            pass


class SegmentWriter(_Mapping):
    """One learner rank's side of the segment."""

    def __init__(self, path: pathlib.Path, memory: mmap.mmap, *, rank: int) -> None:
        super().__init__(path, memory)
        self._rank = rank
        self._places = {e.name: e for e in self.header.layout.entries}

    @classmethod
    def create(
        cls,
        run_name: str,
        *,
        world_size: int,
        parameters: Mapping[str, torch.Tensor],
        dtype: torch.dtype | None = None,
    ) -> Self:
        """Make the segment (rank 0). Replaces what an earlier life of the run left.

        Args:
            run_name: unique on this machine among the runs that live now.
            world_size: learner ranks that will write.
            parameters: name -> tensor or DTensor; full shapes are laid out.
            dtype: of the payload; None keeps each parameter's own.

        Raises:
            WeightSyncError: if /dev/shm is too small.
        """
        if world_size > _MAX_RANKS:
            raise WeightSyncError(f"learner.ranks ({world_size}): the shm backend takes at most {_MAX_RANKS}")
        header = _Header(secrets.token_hex(8), world_size, NUM_SLOTS, Layout.of(parameters, dtype=dtype))
        encoded = msgspec.msgpack.encode(header)
        total = _file_bytes(header, encoded)

        path = segment_path(run_name)
        draft = path.with_name(f"{path.name}.{os.getpid()}.tmp")
        fd = os.open(draft, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        try:
            try:
                os.posix_fallocate(fd, 0, total)  # a full /dev/shm must fail here, not as SIGBUS in the first store
            except OSError as error:
                raise WeightSyncError(
                    f"/dev/shm has no room for {total / 1e6:.0f} MB of weights ({NUM_SLOTS} versions): "
                    f"{error.strerror}. Free or enlarge it (container: --shm-size)."
                ) from None
            memory = mmap.mmap(fd, total)
            _begin_file(memory, encoded)
            os.replace(draft, path)
        except BaseException:
            draft.unlink(missing_ok=True)
            raise
        finally:
            os.close(fd)
        return cls(path, memory, rank=0)

    @classmethod
    def attach(cls, run_name: str, *, rank: int) -> Self:
        """Map the segment that rank 0 has made."""
        path = segment_path(run_name)
        return cls(path, _map(path, writable=True), rank=rank)

    def write(self, sequence: int, parameters: Mapping[str, torch.Tensor]) -> int:
        """Write this rank's shard of every parameter as version number `sequence` (1, 2, ...).

        Returns the bytes written. The version is whole once every rank has returned from this call.
        """
        slot = sequence % NUM_SLOTS
        self._begin[slot][self._rank] = sequence
        written = 0
        for name, local, offset in own_shards(parameters, rank=self._rank):
            target = self._places[name].tensor(self._payload[slot])
            window = target[tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))]
            window.copy_(local, non_blocking=True)
            written += window.numel() * window.element_size()
        if self._pinned:
            torch.cuda.current_stream().synchronize()
        self._end[slot][self._rank] = sequence
        return written

    def unlink(self) -> None:
        """Remove the file, if it is still the one made here."""
        try:
            current = SegmentReader.open(self.path)
        except FileNotFoundError:
            return
        ours = current.nonce == self.nonce
        current.close()
        if ours:
            self.path.unlink(missing_ok=True)


class SegmentReader(_Mapping):
    """Who only reads: a generator the learner's segment, its engine the shadow."""

    @classmethod
    def open(cls, path: str | pathlib.Path, *, writable: bool = False) -> Self:
        """Map an existing segment.

        Args:
            writable: for `view`: torch wants memory that it could write to.

        Raises:
            FileNotFoundError: no learner has made it, or it is gone.
            WeightSyncError: the file is something else.
        """
        path = pathlib.Path(path)
        return cls(path, _map(path, writable=writable))

    def copy(self, sequence: int, into: Payload) -> None:
        """Copy version number `sequence`; `into` has `num_bytes` bytes.

        Raises:
            TornReadError: that version is not whole, or is being overwritten; what is in `into` is not a version.
        """
        self._require(sequence)
        np.copyto(into, self._payload[sequence % self.header.num_slots])
        self._require(sequence)

    def view(self, sequence: int) -> list[tuple[str, torch.Tensor]]:
        """Version number `sequence` where it lies, as (name, full tensor), from a writer that does not overwrite it
        meanwhile: of a shadow.

        Raises:
            TornReadError: the segment holds another version, or none.
        """
        self._require(sequence)
        payload = self._payload[sequence % self.header.num_slots]
        return [(entry.name, entry.tensor(payload)) for entry in self.layout.entries]

    def payload(self, sequence: int) -> torch.Tensor:
        """The bytes of version number `sequence`, where they lie; as `view`."""
        self._require(sequence)
        return torch.from_numpy(self._payload[sequence % self.header.num_slots])

    def holds(self, sequence: int) -> bool:
        """Whether version number `sequence` is whole at this moment."""
        slot = sequence % self.header.num_slots
        # `begin` last: a writer that starts between the two looks is then still seen.
        return bool((self._end[slot] == sequence).all() and (self._begin[slot] == sequence).all())

    def _require(self, sequence: int) -> None:
        if not self.holds(sequence):
            raise TornReadError(f"version number {sequence} is not whole in {self.path}, or no longer")


class Shadow(_Mapping):
    """A generator's copy of the version that its engine loads next."""

    def __init__(self, layout: Layout) -> None:
        """Raises WeightSyncError if the machine has no memory for it."""
        header = _Header(secrets.token_hex(8), 1, 1, layout)
        encoded = msgspec.msgpack.encode(header)
        total = _file_bytes(header, encoded)
        self._fd = os.memfd_create("streamrl-shadow")
        try:
            os.posix_fallocate(self._fd, 0, total)
        except OSError as error:
            os.close(self._fd)
            what = f"no memory for a copy of {total / 1e6:.0f} MB of weights: {error.strerror}"
            raise WeightSyncError(what) from None
        memory = mmap.mmap(self._fd, total)
        _begin_file(memory, encoded)
        super().__init__(pathlib.Path(f"/proc/{os.getpid()}/fd/{self._fd}"), memory)

    @classmethod
    def of(cls, layout: Layout, *, instead_of: Shadow | None) -> Shadow:
        """A shadow for this layout: the one given if it fits; else it is closed, for it will not be loaded again."""
        if instead_of is not None:
            if instead_of.layout == layout:
                return instead_of
            instead_of.close()
        return cls(layout)

    def begin(self, sequence: int) -> Payload:
        """Nothing is whole from now on; the bytes to fill with version number `sequence`."""
        self._begin[0][0] = sequence
        return self._payload[0]

    def finish(self, sequence: int) -> dict[str, str | int]:
        """It is whole now. Returns what the engine must be told to find it."""
        assert self._begin[0][0] == sequence, "finish what was begun"
        self._end[0][0] = sequence
        return self.place(sequence)

    def close(self) -> None:
        if not self._memory.closed:
            os.close(self._fd)
        super().close()


def _map(path: pathlib.Path, *, writable: bool) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return mmap.mmap(fd, 0, access=access)
    finally:
        os.close(fd)
