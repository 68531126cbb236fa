"""Runs Python's full garbage collections, which hold the interpreter's lock for as long as they visit all live objects.

Python starts them by itself while a large request is read, since that allocates many objects: 10,000 messages make each
one take 0.2 s, in which no token is delivered. Here they run on a timer, and wait while there are many objects. Young
objects are still collected as usual, and reference counts still free most objects at once.
"""

import asyncio
import gc
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

logger = logging.getLogger("sluice")

_INTERVAL_S = 5.0
_FEW = 50_000  # objects: visiting them takes some 10 ms; a worker with 32 streams has 10,000
_MANY_MORE = 2_000_000  # objects since the last collection, some hundred bytes each: memory would run out otherwise
_NEVER = 1_000_000_000  # collections of the middle generation before Python starts a full one


def pause_collections() -> None:
    """Collect nothing until `resume_collections`. Imports and the load of a model create hundreds of thousands of
    objects and hardly any garbage; visiting them again and again would lengthen the start."""
    gc.disable()


def resume_collections() -> None:
    """End the pause. Objects alive now are not visited again."""
    gc.freeze()
    gc.enable()


@asynccontextmanager
async def collect_on_a_timer(interval_s: float = _INTERVAL_S) -> AsyncIterator[None]:
    """Take over full collections within the context. Objects alive at its start are not visited again."""
    thresholds = gc.get_threshold()
    gc.freeze()
    gc.set_threshold(*thresholds[:2], _NEVER)
    collecting = asyncio.create_task(_collect(interval_s))
    try:
        yield
    finally:
        collecting.cancel()
        gc.set_threshold(*thresholds)
        gc.unfreeze()


async def _collect(interval_s: float) -> None:
    remaining = 0
    while True:
        await asyncio.sleep(interval_s)
        objects = count_old()
        if is_due(objects, remaining):
            gc.collect()
            remaining = count_old()
            logger.debug("garbage collection: %d objects before, %d after", objects, remaining)


def count_old() -> int:
    """Return the number of objects that a full collection would visit, without the youngest."""
    return len(gc.get_objects(generation=2))


def is_due(objects: int, remaining: int) -> bool:
    """Return True if a full collection is quick, or can wait no longer. `objects`: number now. `remaining`: number
    after the last collection."""
    return objects <= _FEW or objects - remaining >= _MANY_MORE
