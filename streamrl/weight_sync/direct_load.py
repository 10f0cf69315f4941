"""Loading a version by plain copies: what a model's own `load_weights` does, watched once and then repeated.

`load_weights` of an engine's model spends its time in Python over names (0.2 s for the 272 tensors of SmolLM2-135M),
not in moving bytes. Which bytes go where never changes, so the first load is watched, every copy from the payload into
a parameter is noted, and later loads are those copies alone, in one batch: stacked projections and tied embeddings are
what the model's own loader made of them.

Invariant: a plan exists only if every byte of the payload was seen to go, unchanged and once, into memory of the
model's parameters. Where the model converts, reorders or drops something there is none, and the caller loads in full.
Nothing here waits.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from streamrl.weight_sync.layout import Layout


class DirectLoad:
    """The copies of one model, from one payload buffer on its device."""

    def __init__(self, targets: list[Tensor], sources: list[Tensor]) -> None:
        self._targets = targets
        self._sources = sources

    @classmethod
    def watch(cls, model: Any, layout: Layout, payload: Tensor) -> DirectLoad | None:
        """Load what is in `payload` by `model.load_weights`, which must be right for a plain call, and note the copies.

        Args:
            model: has `parameters()` and `load_weights([(name, tensor), ...])`.
            layout: of the payload.
            payload: [layout.num_bytes] uint8 on the model's device; later loads read it again.

        Returns:
            None if the copies are not the whole of the load: the model may then be half loaded.
        """
        weights = device_views(layout, payload)
        parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
        with _Watcher(payload, parameters) as watcher:
            model.load_weights(iter(weights))
        if not _covers(layout, watcher.sources):
            return None
        return cls(watcher.targets, watcher.sources)

    @torch.no_grad()
    def __call__(self) -> None:
        """Copy what is in the payload now; enqueued on the device's current stream."""
        torch._foreach_copy_(self._targets, self._sources)


def device_views(layout: Layout, payload: Tensor) -> list[tuple[str, Tensor]]:
    """The parameters in a flat uint8 payload, where they lie."""
    return [
        (e.name, payload[e.offset : e.offset + e.num_bytes].view(getattr(torch, e.dtype)).view(e.shape))
        for e in layout.entries
    ]


class _Watcher(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes copies from the payload's memory into the parameters', of equal shape and dtype."""

    def __init__(self, payload: Tensor, parameters: set[int]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._payload = payload.untyped_storage().data_ptr()
        self._parameters = parameters
        self.targets: list[Tensor] = []
        self.sources: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[:2]
            if (
                source.untyped_storage().data_ptr() == self._payload
                and target.untyped_storage().data_ptr() in self._parameters
                and (target.shape, target.dtype) == (source.shape, source.dtype)
            ):
                self.targets.append(target.detach())
                self.sources.append(source.detach())
        return func(*args, **(kwargs or {}))


def _covers(layout: Layout, sources: Sequence[Tensor]) -> bool:
    """Whether the sources are every byte of every parameter, each once."""
    starts = [entry.offset for entry in layout.entries]
    pieces: list[list[tuple[int, int]]] = [[] for _ in starts]
    for source in sources:
        if not source.is_contiguous():
            return False  # its bytes are not an interval; no loader of a dense model takes a transposed one
        begin = int(source.storage_offset()) * source.element_size()
        index = bisect.bisect_right(starts, begin) - 1
        pieces[index].append((begin, begin + source.numel() * source.element_size()))
    for entry, intervals in zip(layout.entries, pieces, strict=True):
        position = entry.offset
        for begin, end in sorted(intervals):
            if begin != position:
                return False
            position = end
        if position != entry.offset + entry.num_bytes:
            return False
    return True
