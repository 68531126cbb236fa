"""Converts long JSON outside of the event loop, in a few threads."""

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

from starlette.responses import Response

_INLINE_BYTES = 65_536  # converting this much takes about a millisecond
_INLINE_VALUES = 1_000
# Python's JSON holds the interpreter, so more threads convert no faster. Other work has threads of its own.
_pool = ThreadPoolExecutor(2, thread_name_prefix="sluice-text")

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what the work returns, done in one of the threads. Raises its errors."""
    return await asyncio.get_running_loop().run_in_executor(_pool, partial(work, *args, **kwargs))


async def in_thread_if_long(length: int, work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what the work on `length` bytes returns. Raises its errors."""
    if length <= _INLINE_BYTES:
        return work(*args, **kwargs)
    return await in_thread(work, *args, **kwargs)


async def to_json(value: Any) -> bytes:
    """Return a value as JSON. Half a surrogate pair is written as an escape."""
    return await in_thread(_written, value) if is_long(value) else _written(value)


async def json_response(value: Any, headers: Mapping[str, str] | None = None) -> Response:
    """Return a value as a JSON response. Half a surrogate pair from a request is written as an escape."""
    return Response(await to_json(value), media_type="application/json", headers=dict(headers or {}))


def is_long(value: Any) -> bool:
    """Return True if a JSON value has more than 64 KiB of text or 1,000 parts. Reads no more of it than that."""
    pending = [value]
    characters = values = 0
    while pending:
        match pending.pop():
            case str(text):
                characters += len(text)
            case dict(members):
                values += len(members)
                characters += sum(map(len, members)) if len(members) <= _INLINE_VALUES else 0
                pending.extend(members.values() if values <= _INLINE_VALUES else ())
            case list(items) | tuple(items):
                values += len(items)
                pending.extend(items if values <= _INLINE_VALUES else ())
        if characters > _INLINE_BYTES or values > _INLINE_VALUES:
            return True
    return False


def _written(value: Any) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()
