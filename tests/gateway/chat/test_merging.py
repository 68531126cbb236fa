"""Several streams as one: all items, the first error, and no source left open."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from sluice.gateway.chat import interleaved


class Source:
    """Yields numbers, and then raises `error` if there is one. Counts what was read of it."""

    def __init__(self, length: int, error: Exception | None = None) -> None:
        self._length, self._error = length, error
        self.read, self.closed = 0, False

    async def items(self) -> AsyncGenerator[int]:
        try:
            for number in range(self._length):
                self.read += 1
                yield number
                await asyncio.sleep(0)
            if self._error:
                raise self._error
        finally:
            self.closed = True


@pytest.mark.parametrize("count", [1, 3])
async def test_every_item_of_every_source_comes_once_and_in_its_order(count: int) -> None:
    sources = [Source(200 + index) for index in range(count)]
    found: list[list[int]] = [[] for _ in sources]
    async for index, item in interleaved([source.items() for source in sources]):
        found[index].append(item)
    assert found == [list(range(200 + index)) for index in range(count)]


@pytest.mark.parametrize("count", [1, 3])
async def test_the_first_error_is_raised_after_the_items_before_it_and_closes_all(count: int) -> None:
    sources = [Source(2, LookupError("a")), *(Source(10_000) for _ in range(count - 1))]
    found = list[int]()

    async def read() -> None:
        async for index, item in interleaved([source.items() for source in sources]):
            found.extend([item] if index == 0 else [])

    with pytest.raises(LookupError):
        await read()
    assert found == [0, 1]
    assert all(source.closed for source in sources)


async def test_a_consumer_that_stops_reading_stops_the_sources_soon_and_closes_them_when_it_leaves() -> None:
    sources = [Source(10_000), Source(10_000)]
    async with aclosing(interleaved([source.items() for source in sources])) as items:
        await anext(items)
        for _ in range(500):
            await asyncio.sleep(0)
        assert sum(source.read for source in sources) < 100
    assert all(source.closed for source in sources)
