"""`BackgroundReader`: an asynchronous generator, read in a task."""

import asyncio
from collections.abc import AsyncGenerator

import pytest

from sluice.streaming import BackgroundReader


class Numbers:
    """A source that counts, and knows how far it came and whether it was closed."""

    def __init__(self) -> None:
        self.reached, self.closed = 0, False

    async def count(self, to: int, *, pace_s: float = 0.0) -> AsyncGenerator[int]:
        try:
            for self.reached in range(to):
                yield self.reached
                await asyncio.sleep(pace_s)
        finally:
            await asyncio.sleep(0)
            self.closed = True


async def all_of(source: BackgroundReader[int]) -> list[int]:
    found = []
    while items := await source.take():
        found += items
    return found


async def test_a_slow_consumer_gets_everything_and_the_source_waits_for_it() -> None:
    numbers = Numbers()
    source = BackgroundReader(numbers.count(2000))
    first = await source.take()
    await asyncio.sleep(0.05)
    assert numbers.reached < 300
    assert first + await all_of(source) == list(range(2000))
    assert numbers.closed


async def test_a_take_that_is_cancelled_loses_nothing() -> None:
    source, found = BackgroundReader(Numbers().count(40, pace_s=0.005)), list[int]()
    while found[-1:] != [39]:
        try:
            async with asyncio.timeout(0.002):
                found += await source.take()
        except TimeoutError:
            pass
    assert found == list(range(40))
    assert await source.take() == []


@pytest.mark.parametrize("begun", [False, True])
async def test_closing_waits_until_the_source_is_closed(begun: bool) -> None:
    numbers = Numbers()
    source = BackgroundReader(numbers.count(10, pace_s=60))
    if begun:
        assert await source.take() == [0]
    await source.close()
    assert numbers.closed == begun


async def test_what_the_source_raises_is_raised_after_its_items() -> None:
    async def broken() -> AsyncGenerator[int]:
        yield 1
        raise TimeoutError

    source = BackgroundReader(broken())
    assert await source.take() == [1]
    for _ in range(2):
        with pytest.raises(TimeoutError):
            await source.take()
