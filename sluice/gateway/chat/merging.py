"""Merges several streams into one."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import TypeVar

T = TypeVar("T")

_MAX_AHEAD = 64  # items read ahead of a slow consumer


async def merged(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Yield the items of all sources as they come, each with the index of its source.

    Raises the first error of a source. Closes all sources at the end.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]):
            async for only in sources[0]:
                yield 0, only
        return
    # A reader that has ended is itself the last item of its source.
    items = asyncio.Queue[tuple[int, T] | asyncio.Task[None]]()
    room = asyncio.Semaphore(_MAX_AHEAD)
    readers = [asyncio.create_task(_read(index, source, items, room)) for index, source in enumerate(sources)]
    for reader in readers:
        reader.add_done_callback(items.put_nowait)
    try:
        running = len(readers)
        while running:
            item = await items.get()
            if isinstance(item, asyncio.Task):
                item.result()
                running -= 1
            else:
                room.release()
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(
    index: int,
    source: AsyncGenerator[T],
    items: "asyncio.Queue[tuple[int, T] | asyncio.Task[None]]",
    room: asyncio.Semaphore,
) -> None:
    async with aclosing(source):
        async for item in source:
            await room.acquire()
            items.put_nowait((index, item))
