"""Keeps long texts of clients off the event loop."""

import asyncio
from collections.abc import Callable
from typing import ParamSpec, TypeVar

_INLINE_BYTES = 65_536  # converting this much takes about a millisecond

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread_if_long(length: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what the work on `length` bytes returns. Raises its errors."""
    if length <= _INLINE_BYTES:
        return work(*args, **kwargs)
    return await asyncio.to_thread(work, *args, **kwargs)
