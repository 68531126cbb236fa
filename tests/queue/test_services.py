"""Coroutines that run together end together, whatever ends first."""

import asyncio
from collections.abc import Callable, Coroutine

import pytest

from worker.queue.services import run_with_services

SOON_S = 10.0


async def endless() -> None:
    await asyncio.Event().wait()


async def failing() -> None:
    await asyncio.sleep(0.01)
    raise RuntimeError("no service today")


def losing_a_cancellation(ended: list[str], name: str) -> Callable[[], Coroutine[None, None, None]]:
    """As a wait whose cancellation comes in the same turn of the loop as its end."""

    async def lose() -> None:
        try:
            await endless()
        except asyncio.CancelledError:
            pass
        try:
            await endless()
        finally:
            ended.append(name)

    return lose


async def test_services_end_with_the_work() -> None:
    ended: list[str] = []
    async with asyncio.timeout(SOON_S):
        await run_with_services(asyncio.sleep(0.02), endless, losing_a_cancellation(ended, "service"))
    assert ended == ["service"]


async def test_a_service_that_fails_ends_the_work_and_the_other_services_although_both_lose_a_cancellation() -> None:
    ended: list[str] = []
    work = losing_a_cancellation(ended, "work")()
    async with asyncio.timeout(SOON_S):
        with pytest.raises(ExceptionGroup) as caught:
            await run_with_services(work, failing, losing_a_cancellation(ended, "service"))
    assert [str(error) for error in caught.value.exceptions] == ["no service today"]
    assert sorted(ended) == ["service", "work"]


async def test_an_error_of_the_work_ends_the_services() -> None:
    ended: list[str] = []
    async with asyncio.timeout(SOON_S):
        with pytest.raises(ExceptionGroup) as caught:
            await run_with_services(failing(), losing_a_cancellation(ended, "service"))
    assert [str(error) for error in caught.value.exceptions] == ["no service today"]
    assert ended == ["service"]


async def test_a_cancellation_from_outside_ends_all() -> None:
    ended: list[str] = []
    work = losing_a_cancellation(ended, "work")()
    running = asyncio.create_task(run_with_services(work, losing_a_cancellation(ended, "service")))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert sorted(ended) == ["service", "work"]
