"""The shared segment: one file in /dev/shm that carries each published version from the learner's ranks to the
engines.

Layout: a header page, the manifest (name, dtype, shape and offset of every parameter), then two slots, used in turn.
A slot is a page of counters followed by the payload. Each learner rank writes its own shard of every parameter
straight to its place in the payload, so nothing is gathered and no rank holds more than it already has.

Invariants:
- A slot is whole for sequence number s if, for every rank, `begin == end == s`: a rank sets `begin` before its first
  byte and `end` after its last (a seqlock with one writer per counter). Sequence s uses slot s % 2, so the version
  before it stays readable while s is being written.
- A reader copies the payload out and looks at the counters before and after: a copy that a writer overtook is refused
  (`TornReadError`), never returned. A reader takes no lock, so it can never hold up the learner.
- The header carries a nonce, drawn anew by each `create`: an announcement of one life of the learner is never served
  from the segment of another.

The counters order memory by themselves on x86-64, where stores are seen in program order. Elsewhere the barrier and
the socket between the last store and the first read do, and the log-prob probe after every update is the backstop.
Nothing here waits.
"""

from __future__ import annotations

import hashlib
import mmap
import os
import pathlib
import re
import secrets
from collections.abc import Mapping
from typing import Self

import msgspec
import numpy as np
import torch
from torch.distributed.tensor import DTensor, Shard

from streamrl.errors import WeightSyncError

NUM_SLOTS = 2
SHM_ENGINE = "streamrl_shm"
"""Name of the vLLM weight-transfer engine that reads the segment."""
OWNER_VARIABLE = "STREAMRL_ENGINE_OWNER"
"""Environment variable of vLLM's processes: pid of the generator, which must outlive them."""
_MAGIC = b"SRLSHM01"
_PAGE = 4096
_ALIGNMENT = 64
_MAX_RANKS = _PAGE // 16  # two uint64 counters per rank on the slot's counter page


class TornReadError(WeightSyncError):
    """The slot was overwritten while it was read, or before: a newer version is out, take that one."""


class ParameterEntry(msgspec.Struct, frozen=True, array_like=True):
    """Where one parameter lies in the payload."""

    name: str
    dtype: str  # torch name without the prefix: "float32"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the payload
    num_bytes: int


class _Header(msgspec.Struct, frozen=True, array_like=True):
    nonce: str
    world_size: int
    payload_bytes: int
    entries: list[ParameterEntry]


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


def local_shard(tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """This rank's part of a parameter and its offset in the full one, per dimension; None if another rank writes it.

    A plain tensor is whole on every rank, so rank 0 writes it (the caller's rule). Of a DTensor that is replicated
    over a mesh dimension (HSDP), the first replica writes. Uneven shards are right, an empty one is None.
    """
    if not isinstance(tensor, DTensor):
        return tensor.detach(), (0,) * tensor.dim()
    mesh = tensor.device_mesh
    offset = [0] * tensor.dim()
    extent = list(tensor.shape)
    coordinate = mesh.get_coordinate()
    assert coordinate is not None, "this rank is outside the mesh of its own parameter"
    for mesh_dim, placement in enumerate(tensor.placements):
        if placement.is_replicate():
            if coordinate[mesh_dim] != 0:
                return None
        elif type(placement) is Shard:  # not its strided subclass, which interleaves
            # torch.chunk semantics: the first chunks have ceil(n / parts) rows, the last ones fewer or none.
            dim = placement.dim
            chunk = -(-extent[dim] // mesh.size(mesh_dim))
            begin = min(chunk * coordinate[mesh_dim], extent[dim])
            offset[dim] += begin
            extent[dim] = min(chunk, extent[dim] - begin)
        else:
            raise WeightSyncError(f"cannot publish a parameter placed as {placement}: reduce it first")
    local: torch.Tensor = tensor.to_local().detach()
    if list(local.shape) != extent:
        raise WeightSyncError(f"a shard is {list(local.shape)} where {extent} was expected: {tensor.placements}")
    return (local, tuple(offset)) if local.numel() else None


class _Mapping:
    """The file mapped into this process, and the views into it that both sides need."""

    def __init__(self, path: pathlib.Path, memory: mmap.mmap) -> None:
        self.path = path
        self._memory = memory
        # Two bytes views: NumPy for copies, and a typed one per counter page.
        self._bytes = np.frombuffer(memory, dtype=np.uint8)
        if bytes(self._bytes[: len(_MAGIC)]) != _MAGIC:
            raise WeightSyncError(f"{path} is not a weight segment of this version of streamrl")
        length = int(self._bytes[8:16].view(np.uint64)[0])
        self.header = msgspec.msgpack.decode(bytes(self._bytes[16 : 16 + length]), type=_Header)
        first = _round_up(16 + length, _PAGE)
        stride = _PAGE + _round_up(self.header.payload_bytes, _PAGE)
        self._begin, self._end, self._payload = [], [], []
        for slot in range(NUM_SLOTS):
            start = first + slot * stride
            counters = self._bytes[start : start + 16 * self.header.world_size].view(np.uint64)
            self._begin.append(counters[: self.header.world_size])
            self._end.append(counters[self.header.world_size :])
            self._payload.append(self._bytes[start + _PAGE : start + _PAGE + self.header.payload_bytes])

    @property
    def nonce(self) -> str:
        return self.header.nonce

    @property
    def num_bytes(self) -> int:
        """Bytes of one version."""
        return self.header.payload_bytes

    def close(self) -> None:
        """Drop the mapping; idempotent. The file itself stays."""
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
        self._places = {e.name: e for e in self.header.entries}

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
        entries, offset = [], 0
        for name, tensor in parameters.items():
            wire = dtype or tensor.dtype
            num_bytes = tensor.numel() * wire.itemsize  # numel of a DTensor is the full parameter's
            entries.append(
                ParameterEntry(name, str(wire).removeprefix("torch."), tuple(tensor.shape), offset, num_bytes)
            )
            offset = _round_up(offset + num_bytes, _ALIGNMENT)
        header = msgspec.msgpack.encode(_Header(secrets.token_hex(8), world_size, offset, entries))
        total = _round_up(16 + len(header), _PAGE) + NUM_SLOTS * (_PAGE + _round_up(offset, _PAGE))

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
            memory[16 : 16 + len(header)] = header
            memory[8:16] = len(header).to_bytes(8, "little")
            memory[:8] = _MAGIC
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
        for name, tensor in parameters.items():
            shard = local_shard(tensor) if isinstance(tensor, DTensor) or self._rank == 0 else None
            if shard is None:
                continue
            local, offset = shard
            target = _tensor_at(self._payload[slot], self._places[name])
            window = target[tuple(slice(o, o + n) for o, n in zip(offset, local.shape, strict=True))]
            window.copy_(local)
            written += window.numel() * window.element_size()
        self._end[slot][self._rank] = sequence
        return written

    def payload(self, sequence: int) -> dict[str, str | int]:
        """What a reader must be told to find version number `sequence`."""
        return {"segment": str(self.path), "nonce": self.nonce, "sequence": sequence}

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
    """A generator's side of the segment; keeps one private copy of a version."""

    _copy: np.ndarray | None = None

    @classmethod
    def open(cls, path: str | pathlib.Path) -> Self:
        """Map an existing segment read-only.

        Raises:
            FileNotFoundError: no learner has made it, or it is gone.
            WeightSyncError: the file is something else.
        """
        path = pathlib.Path(path)
        return cls(path, _map(path, writable=False))

    def read(self, sequence: int) -> list[tuple[str, torch.Tensor]]:
        """A private copy of version number `sequence`, as (name, full tensor); valid until the next `read`.

        Raises:
            TornReadError: that version is not whole, or is being overwritten.
        """
        slot = sequence % NUM_SLOTS
        self._require(sequence)
        if self._copy is None:
            self._copy = np.empty(self.num_bytes, dtype=np.uint8)
        np.copyto(self._copy, self._payload[slot])
        self._require(sequence)
        return [(entry.name, _tensor_at(self._copy, entry)) for entry in self.header.entries]

    def holds(self, sequence: int) -> bool:
        """Whether version number `sequence` is whole at this moment."""
        slot = sequence % NUM_SLOTS
        # `begin` last: a writer that starts between the two looks is then still seen.
        return bool((self._end[slot] == sequence).all() and (self._begin[slot] == sequence).all())

    def _require(self, sequence: int) -> None:
        if not self.holds(sequence):
            raise TornReadError(f"version number {sequence} is not whole in {self.path}, or no longer")


def _map(path: pathlib.Path, *, writable: bool) -> mmap.mmap:
    fd = os.open(path, os.O_RDWR if writable else os.O_RDONLY)
    try:
        access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
        return mmap.mmap(fd, 0, access=access)
    finally:
        os.close(fd)


def _tensor_at(payload: np.ndarray, entry: ParameterEntry) -> torch.Tensor:
    raw = payload[entry.offset : entry.offset + entry.num_bytes]
    return torch.from_numpy(raw).view(getattr(torch, entry.dtype)).view(entry.shape)


def _round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
