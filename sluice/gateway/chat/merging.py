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
    items = asyncio.Queue[tuple[int, T] | Exception | None](_MAX_AHEAD)
    readers = [asyncio.create_task(_read(index, source, items)) for index, source in enumerate(sources)]
    try:
        ended = 0
        while ended < len(sources):
            item = await items.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                ended += 1
            else:
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(
    index: int, source: AsyncGenerator[T], items: "asyncio.Queue[tuple[int, T] | Exception | None]"
) -> None:
    try:
        async with aclosing(source):
            async for item in source:
                await items.put((index, item))
    except Exception as error:  # raised again by the consumer
        await items.put(error)
    else:
        await items.put(None)
