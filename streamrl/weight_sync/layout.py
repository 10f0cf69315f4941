"""How the parameters of a model lie in one flat payload, and which part of each parameter a learner rank owns.

Every backend that moves bytes uses this one layout: parameters in order, each at an aligned offset, whole and
contiguous. A rank owns the bytes of its own shards, so nothing is gathered and no byte has two owners.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping

import msgspec
import numpy as np
import numpy.typing as npt
import torch
from torch.distributed.tensor import DTensor, Shard

from streamrl.errors import WeightSyncError

ALIGNMENT = 64  # bytes

Payload = npt.NDArray[np.uint8]


class ParameterEntry(msgspec.Struct, frozen=True, array_like=True):
    """Where one parameter lies in the payload.

    Example: ParameterEntry("lm_head.weight", "bfloat16", (98, 128), 1024, 25088).
    """

    name: str
    dtype: str  # torch name without the prefix: "float32"
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the payload
    num_bytes: int

    def tensor(self, payload: Payload) -> torch.Tensor:
        """The parameter as a view of the payload."""
        raw = payload[self.offset : self.offset + self.num_bytes]
        return torch.from_numpy(raw).view(getattr(torch, self.dtype)).view(self.shape)


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """The payload of one version."""

    num_bytes: int
    entries: list[ParameterEntry]

    @classmethod
    def of(cls, parameters: Mapping[str, torch.Tensor], *, dtype: torch.dtype | None = None) -> Layout:
        """Lay out full parameters, of tensors or DTensors alike; `dtype` None keeps each parameter's own."""
        entries, offset = [], 0
        for name, tensor in parameters.items():
            wire = dtype or tensor.dtype
            num_bytes = tensor.numel() * wire.itemsize  # numel of a DTensor is the full parameter's
            text = str(wire).removeprefix("torch.")
            entries.append(ParameterEntry(name, text, tuple(tensor.shape), offset, num_bytes))
            offset = round_up(offset + num_bytes, ALIGNMENT)
        return cls(offset, entries)


def own_shards(
    parameters: Mapping[str, torch.Tensor], *, rank: int
) -> Iterator[tuple[str, torch.Tensor, tuple[int, ...]]]:
    """(name, local part, its offset in the full parameter) of everything that this rank publishes.

    A plain tensor is whole on every rank, so rank 0 publishes it.
    """
    for name, tensor in parameters.items():
        shard = local_shard(tensor) if isinstance(tensor, DTensor) or rank == 0 else None
        if shard is not None:
            yield name, *shard


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


class Run(msgspec.Struct, frozen=True, array_like=True):
    """Bytes that lie together both in a rank's part (`source`) and in the whole payload (`target`)."""

    source: int
    target: int
    num_bytes: int


class Part:
    """The bytes of one rank, end to end: its shards, each at an aligned offset."""

    def __init__(self, layout: Layout, parameters: Mapping[str, torch.Tensor], *, rank: int) -> None:
        self._parameters = parameters
        self._rank = rank
        self._places: dict[str, ParameterEntry] = {}
        self.runs: list[Run] = []
        """Where its bytes belong, in the order in which they lie here."""
        self.num_bytes = 0
        entries = {entry.name: entry for entry in layout.entries}
        for name, local, offset in own_shards(parameters, rank=rank):
            full = entries[name]
            size = getattr(torch, full.dtype).itemsize
            place = ParameterEntry(name, full.dtype, tuple(local.shape), self.num_bytes, local.numel() * size)
            self._places[name] = place
            source = place.offset
            for start, count in _contiguous(full.shape, offset, place.shape):
                self.runs.append(Run(source, full.offset + start * size, count * size))
                source += count * size
            self.num_bytes = round_up(place.offset + place.num_bytes, ALIGNMENT)

    def write(self, into: Payload) -> int:
        """Write the shards as they are now. Returns the bytes written."""
        for name, local, _ in own_shards(self._parameters, rank=self._rank):
            self._places[name].tensor(into).copy_(local)
        return sum(place.num_bytes for place in self._places.values())


def _contiguous(shape: tuple[int, ...], offset: tuple[int, ...], extent: tuple[int, ...]) -> Iterator[tuple[int, int]]:
    """The window [offset, offset + extent) of a tensor as (first element, number of elements) that lie together."""
    inner = len(shape)
    while inner > 0 and extent[inner - 1] == shape[inner - 1]:
        inner -= 1  # the window is whole in these dimensions
    outer = max(0, inner - 1)  # and a slice of this one, so from here on it lies together
    count = math.prod(extent[outer:])
    strides = [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
    for index in itertools.product(*(range(n) for n in extent[:outer])):
        position = [*(o + i for o, i in zip(offset, index, strict=False)), *offset[outer:]]
        yield sum(p * stride for p, stride in zip(position, strides, strict=True)), count


def round_up(value: int, unit: int) -> int:
    return -(-value // unit) * unit
