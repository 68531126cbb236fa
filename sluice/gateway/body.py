"""Reads the JSON object of a request's body within limits."""

import asyncio
from typing import Any

from starlette.requests import Request

from sluice.gateway.errors import ApiError
from sluice.openai import BadRequest, read_object

_INLINE_BYTES = 65_536  # a longer body is parsed in a thread


async def read_json(request: Request, max_bytes: int) -> dict[str, Any]:
    """Return the JSON object of the body. Raises `ApiError`: 413 beyond `max_bytes`, 400 for anything but an object."""
    raw = await read_bytes(request, max_bytes)
    try:
        if len(raw) <= _INLINE_BYTES:
            return read_object(raw)
        return await asyncio.to_thread(read_object, raw)
    except BadRequest as error:
        raise ApiError(400, str(error), code="invalid_request", param=error.param) from None


async def read_bytes(request: Request, max_bytes: int) -> bytes:
    """Return the body. Raises `ApiError` 413 as soon as it is known to be longer than `max_bytes`."""
    parts, length = [], 0
    async for part in request.stream():
        parts.append(part)
        length += len(part)
        if length > max_bytes:
            raise ApiError(413, f"The body has more than {max_bytes:,} bytes; send less.", code="too_large")
    return b"".join(parts)
