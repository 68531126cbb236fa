import asyncio

import pytest

from sluice.contract.keys import Lane
from worker.turns import Turns


async def order_of(turns: Turns, waiting: list[tuple[Lane, str, str]]) -> list[str]:
    """Take the only slot, let these wait for it, and return the names in the order in which they got it."""
    order = list[str]()

    async def visit(lane: Lane, tenant: str, name: str) -> None:
        async with turns.slot(lane, tenant):
            order.append(name)

    await turns.take("interactive", "")
    visits = [asyncio.ensure_future(visit(*each)) for each in waiting]
    await asyncio.sleep(0)
    turns.give_back()
    await asyncio.wait_for(asyncio.gather(*visits), 5)
    return order


async def test_tenants_take_turns_however_many_wait_of_one() -> None:
    waiting: list[tuple[Lane, str, str]] = [("interactive", "a", f"a{i}") for i in range(4)]
    waiting += [("interactive", "b", "b0"), ("interactive", "c", "c0"), ("interactive", "b", "b1")]
    assert await order_of(Turns(1), waiting) == ["a0", "b0", "c0", "a1", "b1", "a2", "a3"]


async def test_interactive_turns_come_before_offline_ones() -> None:
    waiting: list[tuple[Lane, str, str]] = [("batch", "a", "offline"), ("interactive", "b", "one")]
    assert await order_of(Turns(1), waiting) == ["one", "offline"]


async def test_of_a_tenants_jobs_the_one_comes_first_that_has_had_a_slot_the_shortest() -> None:
    turns, got = Turns(1), list[str]()
    await turns.take("interactive", "a")
    waiting = {
        "long": turns.queue("interactive", "a", 3.0),
        "short": turns.queue("interactive", "a", 0.2),
        "new": turns.queue("interactive", "a"),
        "other": turns.queue("interactive", "b", 9.0),
    }
    for _ in waiting:
        turns.give_back()
        got += [name for name, turn in waiting.items() if turn.done() and name not in got]
    assert got == ["new", "other", "short", "long"]


async def test_a_cancelled_wait_leaves_the_slot_to_the_next() -> None:
    turns = Turns(1)
    await turns.take("interactive", "")
    gone = asyncio.ensure_future(turns.take("interactive", "a"))
    stays = asyncio.ensure_future(turns.take("interactive", "b"))
    await asyncio.sleep(0)
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    turns.give_back()
    await asyncio.wait_for(stays, 5)


async def test_a_wait_that_is_cancelled_as_its_turn_comes_gives_the_slot_back() -> None:
    turns = Turns(1)
    await turns.take("interactive", "")
    gone = asyncio.ensure_future(turns.take("interactive", "a"))
    await asyncio.sleep(0)
    turns.give_back()
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    await asyncio.wait_for(turns.take("interactive", "b"), 5)


async def test_reserved_slots_are_left_to_interactive_jobs() -> None:
    turns = Turns(2, reserved=1)
    await turns.take("batch", "a")
    offline = turns.queue("batch", "a")
    await asyncio.wait_for(turns.take("interactive", "a"), 5)
    turns.give_back()
    assert not offline.done()
    turns.give_back()
    assert offline.done()
