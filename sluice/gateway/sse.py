"""Server-sent events of the front: frames, heartbeats in long waits, and the response that carries them."""

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

from starlette.responses import StreamingResponse

from sluice.sse import HEADERS, KEEP_ALIVE, RETRY, seq_of, take
from sluice.streaming.streams import ReadAhead

__all__ = ["DONE", "HEADERS", "KEEP_ALIVE", "RETRY", "frame", "response", "seq_of", "with_heartbeats"]

DONE = b"data: [DONE]\n\n"


def frame(data: Any, *, event: str | None = None, id: int | str | None = None) -> bytes:
    """Return one event with JSON data. `id` comes back as `Last-Event-ID` when the client reconnects."""
    lines = [f"id: {id}"] if id is not None else []
    if event is not None:
        lines.append(f"event: {event}")
    lines.append(f"data: {json.dumps(data, separators=(',', ':'))}")
    return "\n".join([*lines, "", ""]).encode()


async def with_heartbeats(
    frames: AsyncGenerator[bytes], heartbeat_s: float, heartbeat: bytes = KEEP_ALIVE
) -> AsyncGenerator[bytes]:
    """Yield the frames, joined when several are ready, and a heartbeat after each `heartbeat_s` seconds without one.

    Closes `frames`. An error of theirs is raised after the frames before it, so the body breaks off.
    """
    source = ReadAhead(frames)
    try:
        while (ready := await take(source, heartbeat_s)) != []:
            yield heartbeat if ready is None else b"".join(ready)
    finally:
        await asyncio.shield(source.close())


def response(body: AsyncGenerator[bytes], headers: Mapping[str, str] | None = None) -> StreamingResponse:
    """Return the HTTP response of a stream."""
    return StreamingResponse(body, headers={**HEADERS, **(headers or {})})
