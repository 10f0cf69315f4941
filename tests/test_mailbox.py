"""The closable queue."""

from __future__ import annotations

import asyncio

import pytest

from streamrl.errors import ClosedError
from streamrl.mailbox import Mailbox


def test_items_come_out_in_order_and_after_a_close_what_is_left_comes_first() -> None:
    async def main() -> None:
        mailbox: Mailbox[int] = Mailbox()
        for i in range(3):
            await mailbox.put(i)
        mailbox.close("the end")
        assert await mailbox.get() == 0
        assert await mailbox.get_all() == [1, 2]
        for _ in range(2):
            with pytest.raises(ClosedError, match="the end"):
                await mailbox.get()
        with pytest.raises(ClosedError, match="the end"):
            mailbox.put_nowait(4)

    asyncio.run(main())


def test_a_full_mailbox_makes_its_writer_wait_until_there_is_room() -> None:
    async def main() -> None:
        mailbox: Mailbox[int] = Mailbox(capacity=2)
        writer = asyncio.create_task(write(mailbox, 10))
        await asyncio.sleep(0.01)
        assert len(mailbox) == 2 and mailbox.full and not writer.done()
        assert [await mailbox.get() for _ in range(10)] == list(range(10))
        await writer

    async def write(mailbox: Mailbox[int], count: int) -> None:
        for i in range(count):
            await mailbox.put(i)

    asyncio.run(main())


def test_close_ends_every_wait_of_readers_and_writers() -> None:
    async def main() -> None:
        empty: Mailbox[int] = Mailbox()
        full: Mailbox[int] = Mailbox(capacity=1)
        full.put_nowait(0)
        waits = [asyncio.create_task(w) for w in (empty.get(), empty.get(), full.put(1))]
        await asyncio.sleep(0.01)
        empty.close("first")
        empty.close("second")
        full.close("first")
        for wait in waits:
            with pytest.raises(ClosedError, match="first"):
                await asyncio.wait_for(wait, 1)

    asyncio.run(main())


def test_a_reader_that_gives_up_takes_no_item_with_it() -> None:
    async def main() -> None:
        mailbox: Mailbox[int] = Mailbox()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.01):
                await mailbox.get()
        mailbox.put_nowait(1)
        assert await mailbox.get() == 1

    asyncio.run(main())


def test_a_broken_background_task_closes_the_mailbox_that_it_fills() -> None:
    async def main() -> None:
        mailbox: Mailbox[int] = Mailbox()

        async def work() -> None:
            mailbox.put_nowait(1)
            raise ZeroDivisionError("a bug")

        mailbox.fill(work())
        assert await mailbox.get() == 1
        with pytest.raises(ClosedError, match="ZeroDivisionError"):
            await asyncio.wait_for(mailbox.get(), 1)

    asyncio.run(main())
