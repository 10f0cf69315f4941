"""A bounded asyncio queue that can be closed (Python 3.13's `Queue.shutdown`, for 3.11).

`get` waits for an item, `put` for room; whoever fills or drains the other end ends the wait, or `close`, after
which what is still queued can be got and then every caller has ClosedError.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import Coroutine
from typing import Any, Generic, TypeVar

from streamrl.errors import ClosedError

Item = TypeVar("Item")

logger = logging.getLogger(__name__)


class Mailbox(Generic[Item]):
    """Items in order, from one event loop. `capacity` items at most; 0 for no bound (the senders have credit)."""

    def __init__(self, *, capacity: int = 0) -> None:
        self._capacity = capacity
        self._items: collections.deque[Item] = collections.deque()
        self._arrived = asyncio.Event()
        self._room = asyncio.Event()
        self._closed: str | None = None

    def __len__(self) -> int:
        return len(self._items)

    @property
    def full(self) -> bool:
        return 0 < self._capacity <= len(self._items)

    async def put(self, item: Item) -> None:
        """Waits for room."""
        while self.full and self._closed is None:
            self._room.clear()
            await self._room.wait()
        self.put_nowait(item)

    def put_nowait(self, item: Item) -> None:
        """Ignores the capacity."""
        if self._closed is not None:
            raise ClosedError(self._closed)
        self._items.append(item)
        self._arrived.set()

    async def get(self) -> Item:
        """Waits for an item."""
        await self._wait()
        self._room.set()
        return self._items.popleft()

    async def get_all(self) -> list[Item]:
        """Waits for an item, and takes the others that are there too."""
        await self._wait()
        self._room.set()
        items = list(self._items)
        self._items.clear()
        return items

    async def _wait(self) -> None:
        while not self._items:
            if self._closed is not None:
                raise ClosedError(self._closed)
            self._arrived.clear()
            await self._arrived.wait()

    def fill(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run `work`, which fills the mailbox, in a task. If it breaks, the mailbox closes: no reader hangs."""

        def done(task: asyncio.Task[None]) -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.error("a background task broke", exc_info=error)
                self.close(f"a background task broke: {error!r}")

        task = asyncio.create_task(work)
        task.add_done_callback(done)
        return task

    def close(self, reason: str) -> None:
        """Only the first reason counts."""
        if self._closed is None:
            self._closed = reason
            self._arrived.set()
            self._room.set()
