"""What may be said about the weights in an engine: a version label counts only once its probe has agreed.

Each load of weights gets a label of its own, and the engine reports for every token the label of the weights that
sampled it. A rollout may leave the generator only when all its labels are proven; while one is pending it waits here,
and if one is refuted it has failed, even when a second load of the same version is proven later.

Waits: `proven` for the probe of a pending label; `prove` or `refute` ends it, `close` at the latest.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from streamrl.errors import ClosedError

_REMEMBERED = 4096  # labels; no rollout lives through so many updates


class LoadedVersion(msgspec.Struct, frozen=True, order=True):
    """What one label stands for."""

    incarnation: int
    policy_version: int
    load: int  # counts the loads of this generator


@dataclass
class _Entry:
    version: LoadedVersion
    verdict: asyncio.Future[bool]


class VersionGate:
    """The labels of one engine, and the verdict on each. Lives in one event loop."""

    def __init__(self) -> None:
        self._entries: dict[str, _Entry] = {}
        self._loads = itertools.count()
        self.label = ""
        """The label of the weights in the engine, proven or not; empty before the first load."""
        self.proven_version: LoadedVersion | None = None
        """The last one that was proven, if any; the engine may hold a newer one, still pending."""

    def begin(self, incarnation: int, policy_version: int) -> str:
        """A new pending label for weights that are about to be loaded; it becomes `label` by `loaded`."""
        version = LoadedVersion(incarnation, policy_version, next(self._loads))
        label = f"{incarnation}.{policy_version}.{version.load}"
        self._entries[label] = _Entry(version, asyncio.get_running_loop().create_future())
        if len(self._entries) > _REMEMBERED:
            del self._entries[next(iter(self._entries))]
        return label

    def loaded(self, label: str) -> None:
        """The engine's weights are now the ones of `label`, still pending."""
        self.label = label

    def prove(self, label: str) -> None:
        self._entries[label].verdict.set_result(True)
        self.proven_version = self._entries[label].version

    def refute(self, label: str) -> None:
        self._entries[label].verdict.set_result(False)

    async def proven(self, labels: Iterable[str]) -> bool:
        """Whether all of `labels` are proven; waits for those that are pending.

        Raises:
            ClosedError: closed before the verdict.
        """
        for label in labels:
            if not await asyncio.shield(self._entries[label].verdict):
                return False
        return True

    def version_of(self, label: str) -> LoadedVersion:
        return self._entries[label].version

    def close(self) -> None:
        """Pending labels never get a verdict now; whoever waits has ClosedError."""
        for entry in self._entries.values():
            if not entry.verdict.done():
                entry.verdict.set_exception(ClosedError("the generator stops"))
                entry.verdict.exception()  # mark as seen: there may be no waiter
