"""Which backend `weight_sync.backend: auto` stands for, and why. Imports nothing heavy: the plan asks it too."""

from __future__ import annotations

import platform
from typing import Any

import msgspec

from streamrl.config import Config
from streamrl.errors import ConfigError


class Placement(msgspec.Struct, frozen=True, kw_only=True):
    """Where the two ends of the channel run.

    Example: Placement(learner_hosts=("a",), generator_hosts=("a", "b")).
    """

    learner_hosts: tuple[str, ...]
    generator_hosts: tuple[str, ...]

    @classmethod
    def on_this_host(cls) -> Placement:
        host = platform.node()
        return cls(learner_hosts=(host,), generator_hosts=(host,))

    @property
    def hosts(self) -> list[str]:
        return sorted({*self.learner_hosts, *self.generator_hosts})


def choose_backend(config: Config, placement: Placement) -> tuple[str, str]:
    """(backend, reason) for a run; what the config names, or the quickest that this placement allows.

    Raises:
        ConfigError: the named backend cannot reach every generator.
    """
    wanted, hosts = config.weight_sync.backend, placement.hosts
    if wanted == "shm" and len(hosts) > 1:
        raise ConfigError(
            f"weight_sync.backend (shm): shared memory is of one host, and this run is on {len(hosts)} "
            f"({', '.join(hosts)}). Set weight_sync.backend=tcp."
        )
    if wanted != "auto":
        return wanted, "weight_sync.backend says so"
    if len(hosts) > 1:
        return "tcp", f"learner and generators are on {len(hosts)} hosts"
    return "shm", "learner and generators are on one host"


def with_backend(config: Config, backend: Any) -> Config:
    """The config as the processes of the run get it: the choice is made."""
    return msgspec.structs.replace(config, weight_sync=msgspec.structs.replace(config.weight_sync, backend=backend))
