import asyncio
import gc
import weakref
from collections.abc import Iterator

import pytest

from worker.process.daemon import (
    collect_on_a_timer,
    count_old,
    is_due,
    pause_collections,
    resume_collections,
)

LONG_S = 60.0


@pytest.fixture(autouse=True)
def _nothing_is_frozen() -> Iterator[None]:
    """Undo what conftest.py does for all tests."""
    gc.unfreeze()
    yield
    gc.freeze()


class Node:
    """An object that can be a part of a cycle."""

    def __init__(self) -> None:
        self.other: object = None


def full_collections() -> int:
    return int(gc.get_stats()[2]["collections"])


async def test_a_large_request_starts_no_full_collection() -> None:
    before = full_collections()
    large = [{"content": [number]} for number in range(300_000)]
    assert full_collections() > before  # Python's own rule
    del large
    async with collect_on_a_timer(LONG_S):
        before = full_collections()
        large = [{"content": [number]} for number in range(300_000)]
        assert full_collections() == before
        assert len(large) == 300_000


async def test_cycles_that_outlived_young_collections_are_freed_on_the_timer() -> None:
    async with collect_on_a_timer(0.01):
        node = Node()
        node.other = node
        gc.collect(1)
        found = weakref.ref(node)
        del node
        async with asyncio.timeout(5):
            while found() is not None:
                await asyncio.sleep(0.01)


async def test_young_cycles_are_freed_without_the_timer() -> None:
    async with collect_on_a_timer(LONG_S):
        node = Node()
        node.other = node
        found = weakref.ref(node)
        del node
        kept = [[number] for number in range(5_000)]
        assert found() is None
        assert len(kept) == 5_000


async def test_objects_alive_at_the_start_are_not_visited() -> None:
    kept = [[number] for number in range(100_000)]
    async with collect_on_a_timer(LONG_S):
        assert count_old() < len(kept)
    assert count_old() >= len(kept)


async def test_python_s_own_rule_holds_again_after_the_context() -> None:
    before = gc.get_threshold(), gc.get_freeze_count()
    async with collect_on_a_timer(LONG_S):
        assert gc.get_freeze_count() > 0
    assert (gc.get_threshold(), gc.get_freeze_count()) == before


def test_a_collection_waits_while_there_are_many_objects() -> None:
    assert is_due(50_000, 0)
    assert not is_due(60_000, 0)
    assert not is_due(5_000_000, 4_000_000)


def test_a_collection_waits_no_longer_than_memory_allows() -> None:
    assert is_due(2_500_000, 0)
    assert is_due(6_100_000, 4_000_000)


def test_a_pause_of_collections_ends_and_leaves_out_the_objects_that_were_made_in_it() -> None:
    pause_collections()
    try:
        before = gc.get_stats()
        kept = [[number] for number in range(100_000)]
        assert gc.get_stats() == before
        resume_collections()
        assert gc.isenabled()
        assert count_old() < len(kept)
    finally:
        gc.enable()
        gc.unfreeze()
