"""An event loop in a thread of its own, for the sockets of a process whose main thread computes.

Waits: `call` for what it is given, LIMIT_S at most; `close` for the thread, LIMIT_S at most.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

LIMIT_S = 10.0  # for what the loop does at once: binding, sending, closing

T = TypeVar("T")


class LoopThread:
    """Runs from its making to `close`."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def call(self, work: Coroutine[Any, Any, T]) -> T:
        """Run it in the loop and wait for its result."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(LIMIT_S)

    def begin(self, work: Coroutine[Any, Any, None]) -> None:
        """Run it in the loop beside whatever else runs there; it ends by itself before `close`, or is cancelled."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Stop the loop, cancelling what is left in it."""
        self.call(self._cancel_rest())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(LIMIT_S)
        self._loop.close()

    @staticmethod
    async def _cancel_rest() -> None:
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
