"""`Interruption`: a block that others can end."""

import asyncio

import pytest

from sluice.transport import Interruption


class Late(Exception):
    pass


async def interrupted_soon(block: Interruption) -> None:
    asyncio.get_running_loop().call_soon(block.interrupt, Late())
    await asyncio.sleep(60)


async def test_the_block_raises_the_error_and_its_task_goes_on() -> None:
    with pytest.raises(Late), Interruption() as block:
        await interrupted_soon(block)
    await asyncio.sleep(0)
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0


async def test_a_task_that_others_cancel_is_cancelled() -> None:
    async def work() -> None:
        with Interruption():
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])
    assert task.cancelled()


async def test_a_task_that_is_cancelled_and_interrupted_is_cancelled() -> None:
    blocks = list[Interruption]()

    async def work() -> None:
        with Interruption() as block:
            blocks.append(block)
            await asyncio.sleep(60)

    task = asyncio.create_task(work())
    await asyncio.sleep(0)
    task.cancel()
    blocks[0].interrupt(Late())
    await asyncio.wait([task])
    assert task.cancelled()


@pytest.mark.parametrize("is_outer", [True, False])
async def test_of_nested_blocks_the_one_that_is_interrupted_raises(is_outer: bool) -> None:
    raised = list[str]()

    async def work() -> None:
        with Interruption() as outer:
            try:
                with Interruption() as inner:
                    await interrupted_soon(outer if is_outer else inner)
            except Late:
                raised.append("inner")
                raise

    with pytest.raises(Late):
        await work()
    assert raised == ([] if is_outer else ["inner"])


async def test_a_block_that_has_ended_is_not_interrupted() -> None:
    with Interruption() as block:
        pass
    block.interrupt(Late())
    await asyncio.sleep(0)


async def test_what_the_block_does_at_its_end_is_done_before_the_error() -> None:
    done = list[str]()

    async def work() -> None:
        with Interruption() as block:
            try:
                await interrupted_soon(block)
            finally:
                await asyncio.sleep(0)
                done.append("cleaned up")

    with pytest.raises(Late):
        await work()
    assert done == ["cleaned up"]


async def test_a_block_that_has_lost_an_interruption_is_interrupted_again() -> None:
    lost = list[str]()

    async def work() -> None:
        with Interruption() as block:
            try:
                await interrupted_soon(block)
            except asyncio.CancelledError:
                lost.append("the first")
            await interrupted_soon(block)

    with pytest.raises(Late):
        await work()
    task = asyncio.current_task()
    assert task is not None
    assert (lost, task.cancelling()) == (["the first"], 0)
