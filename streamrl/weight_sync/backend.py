"""The seam between the channel and the ways weights travel.

A backend has three parts, one in each process that weights pass through:

    learner rank    `Outlet`    write: this rank's part of a version is out when it returns
    generator       `Inlet`     fetch: everything that can be done beside generation: receive, check, prepare
    engine          a loader    vllm_plugin.py: what is left, under the pause; named by `LOADERS`

The channel (channel.py) carries announcements between the first two, and asks neither to wait for the other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

import msgspec
import torch

from streamrl.records import WeightUpdate
from streamrl.sockets import CurveKeys

LOADERS = {"shm": "streamrl_shadow", "tcp": "streamrl_shadow"}
"""weight_sync.backend -> vLLM's name of the weight-transfer engine that loads what its `Inlet` has fetched."""

Parameters = Mapping[str, torch.Tensor]


class OutletSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a learner rank's end is made of."""

    run_name: str  # unique on this machine among the runs that live now
    rank: int
    world_size: int
    parameters: Parameters  # checkpoint name -> tensor or DTensor, the same on every rank
    dtype: torch.dtype | None  # of the payload; None keeps each parameter's own
    bind: str  # address for sockets of the backend's own
    curve: CurveKeys | None


class InletSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What a generator's end is made of."""

    name: str  # of the generator
    curve: CurveKeys | None
    timeout_s: float  # for one version to be fetched


class Outlet(Protocol):
    """The end of one learner rank, called from the training thread."""

    def start(self, barrier: Callable[[], None]) -> None:
        """Open what is needed. All ranks call it; `barrier` waits for all of them.

        Raises:
            WeightSyncError: it cannot be had on this machine.
        """

    def write(self, sequence: int) -> int:
        """Put out this rank's part of the parameters as they are now, as version number `sequence` (1, 2, ...).

        The version before stays available meanwhile. Never waits for a generator. Returns the bytes written.
        """

    def payload(self, sequence: int) -> dict[str, Any]:
        """On rank 0, once every rank has written it: what an `Inlet` must be told to fetch it."""

    def close(self) -> None:
        """Free everything; idempotent, bounded."""


class Inlet(Protocol):
    """The end of one generator; lives in its event loop."""

    @property
    def num_bytes(self) -> int:
        """Bytes of one version; 0 before the first."""

    async def fetch(self, update: WeightUpdate) -> dict[str, Any] | None:
        """Bring a version so near to the engine that only the load is left.

        Returns:
            What the loader must be told, valid until the next `fetch`; None if the version has been overwritten: a
            newer one is out.

        Raises:
            WeightSyncError: it did not come within the time limit, or not as it was sent.
        """

    async def close(self) -> None:
        """Free everything; idempotent, bounded."""


def make_outlet(backend: str, settings: OutletSettings) -> Outlet:
    """The learner rank's end of `weight_sync.backend`."""
    from streamrl.weight_sync.shm import ShmOutlet
    from streamrl.weight_sync.tcp import TcpOutlet

    makers: dict[str, Callable[[OutletSettings], Outlet]] = {"shm": ShmOutlet, "tcp": TcpOutlet}
    return makers[backend](settings)


def make_inlet(backend: str, settings: InletSettings) -> Inlet:
    """The generator's end of `weight_sync.backend`."""
    from streamrl.weight_sync.shm import ShmInlet
    from streamrl.weight_sync.tcp import TcpInlet

    makers: dict[str, Callable[[InletSettings], Inlet]] = {"shm": ShmInlet, "tcp": TcpInlet}
    return makers[backend](settings)
