"""Calls of many tasks in few round trips."""

import asyncio
from collections.abc import Sequence

import pytest

from sluice.transport import RoundTrips


class Server:
    """Answers each number with itself; negative ones are errors, and 0 fails the round trip."""

    def __init__(self) -> None:
        self.trips: list[list[int]] = []
        self.may_answer = asyncio.Event()

    async def send(self, calls: Sequence[int]) -> list[int | Exception]:
        self.trips.append([*calls])
        await self.may_answer.wait()
        if 0 in calls:
            raise OSError("lost")
        return [ValueError(str(call)) if call < 0 else call for call in calls]


async def called(trips: RoundTrips[int, int], *calls: int) -> list[asyncio.Task[int]]:
    tasks = [asyncio.create_task(trips.call(call)) for call in calls]
    for _ in range(5):
        await asyncio.sleep(0)
    return tasks


async def test_calls_that_come_while_a_round_trip_is_under_way_share_the_next_one() -> None:
    server = Server()
    trips = RoundTrips(server.send)
    first = await called(trips, 1)
    more = await called(trips, 2, 3) + await called(trips, 4)
    assert server.trips == [[1]]
    server.may_answer.set()
    assert await asyncio.gather(*first, *more) == [1, 2, 3, 4]
    assert server.trips == [[1], [2, 3, 4]]


async def test_an_error_of_one_call_is_raised_by_it_alone() -> None:
    server = Server()
    server.may_answer.set()
    right, wrong = await called(RoundTrips(server.send), 1, -1)
    assert await right == 1
    with pytest.raises(ValueError, match="-1"):
        await wrong


async def test_a_lost_round_trip_is_raised_by_all_its_calls_and_the_next_one_is_sent() -> None:
    server = Server()
    server.may_answer.set()
    trips = RoundTrips(server.send)
    lost = await called(trips, 1, 0)
    assert [type(each) for each in await asyncio.gather(*lost, return_exceptions=True)] == [OSError, OSError]
    assert await trips.call(2) == 2


async def test_a_cancelled_call_leaves_the_others_of_its_round_trip(caplog: pytest.LogCaptureFixture) -> None:
    server = Server()
    trips = RoundTrips(server.send)
    one, other = await called(trips, 1, 2)
    one.cancel()
    server.may_answer.set()
    assert await other == 2
    assert one.cancelled()
    assert caplog.records == []


async def test_a_round_trip_without_an_answer_holds_up_the_next_one_for_a_moment_only() -> None:
    server = Server()
    trips = RoundTrips(server.send)
    tasks = await called(trips, 1) + await called(trips, 2)
    async with asyncio.timeout(5):
        while server.trips != [[1], [2]]:
            await asyncio.sleep(0.01)
    server.may_answer.set()
    assert await asyncio.gather(*tasks) == [1, 2]


async def test_a_round_trip_has_a_hundred_calls_at_most() -> None:
    server = Server()
    server.may_answer.set()
    trips = RoundTrips(server.send)
    assert await asyncio.gather(*(trips.call(call) for call in range(1, 251))) == [*range(1, 251)]
    assert [len(each) for each in server.trips] == [100, 100, 50]
