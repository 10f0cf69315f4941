"""How much of its serving time a generator is busy: members in the engine, and generation not paused."""

from __future__ import annotations

import time


class BusyMeter:
    """Two clocks. Both stand still until `begin`."""

    def __init__(self) -> None:
        self._began = 0.0
        self._busy_s = 0.0
        self._occupied = False
        self._paused = False
        self._mark = 0.0

    def begin(self) -> None:
        """Serving begins now."""
        self._began = self._mark = time.monotonic()

    def occupy(self, occupied: bool) -> None:
        """Whether there is a member in the engine from now on."""
        self._settle()
        self._occupied = occupied

    def pause(self, paused: bool) -> None:
        """Whether generation stands still from now on."""
        self._settle()
        self._paused = paused

    @property
    def busy_s(self) -> float:
        self._settle()
        return self._busy_s

    @property
    def uptime_s(self) -> float:
        return time.monotonic() - self._began if self._began else 0.0

    def _settle(self) -> None:
        now = time.monotonic()
        if self._began and self._occupied and not self._paused:
            self._busy_s += now - self._mark
        self._mark = now
