"""A job's events as server-sent events, for a browser's `EventSource`. Works with any web framework:

    frames = sse.frames(client, job_id, last_event_id=request.headers.get("last-event-id"))
    return StreamingResponse(frames, headers=sse.HEADERS)

`sync_frames` does the same with a `SyncClient`, for Django's `StreamingHttpResponse` or Flask's `Response`.

Each frame's `id` is the event's `seq`, its `event` the type, its `data` the JSON that the worker wrote. Progress with
`workers`, which tells if workers live and how far the model is loaded, is made here and has no `id`. An EventSource
that loses its connection reconnects with the last id and continues after it. The page must close it on `finished`,
`failed`, `cancelled` and `unknown`; otherwise it reconnects.
"""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import TypeVar

from redis.exceptions import ResponseError

from sluice.client import Client
from sluice.contract import keys
from sluice.errors import UnknownJob, UnreadableLog
from sluice.streaming import LAST_SEQ, BackgroundReader
from sluice.sync import iterating

HEADERS = {
    "Content-Type": "text/event-stream",
    "Cache-Control": "no-store",
    "X-Accel-Buffering": "no",  # or nginx buffers the events
}
RETRY = b"retry: 500\n\n"  # milliseconds; by default browsers reconnect after 3 to 5 seconds
KEEP_ALIVE = b": keep-alive\n\n"
_UNKNOWN = "There is no such job, or its events have expired."


T = TypeVar("T")


async def frames(
    client: Client,
    job_id: str,
    *,
    last_event_id: str | None = None,
    keep_alive_s: float = 15.0,  # proxies cut a connection after 30 to 60 seconds of silence
    unknown_s: float = 0.0,
) -> AsyncGenerator[bytes]:
    """Yield the body of an HTTP response: the events after `last_event_id`, up to the final one.

    `last_event_id` is the request's header `Last-Event-ID`; all events are sent if it is None or not a `seq`. A comment
    is sent after each `keep_alive_s` seconds without an event. A job without a trace for `unknown_s` seconds ends as
    the event `unknown`, and so does an invalid id: at once, unless a browser may ask before its job is submitted. So
    does a job whose events cannot be read, for an EventSource would ask for them again and again.
    Raises `ServerUnreachable` as `Client.stream` does: the response breaks off, and an EventSource reconnects.
    """
    yield RETRY
    try:
        keys.check_job_id(job_id)
    except ValueError:
        yield _unknown(_UNKNOWN)
        return
    source = BackgroundReader(client.stream_json(job_id, after=seq_of(last_event_id), unknown_s=unknown_s))
    try:
        while (events := await take(source, keep_alive_s)) != []:
            for event in events or ():
                yield _frame(event)
            if events is None:
                yield KEEP_ALIVE
    except UnknownJob:
        yield _unknown(_UNKNOWN)
    except (UnreadableLog, ResponseError):
        yield _unknown("The events of this job cannot be read.")
        raise  # for the log of the web server
    finally:
        await source.close()


sync_frames = iterating(frames)


def seq_of(last_event_id: str | None) -> int:
    """Return the number in a `Last-Event-ID` header; -1, which precedes all events, for anything else."""
    digits = (last_event_id or "").strip()
    if not (digits.isascii() and digits.isdigit() and len(digits) <= len(str(LAST_SEQ))):
        return -1
    return int(digits) if int(digits) <= LAST_SEQ else -1


async def take(source: BackgroundReader[T], silence_s: float) -> list[T] | None:
    """Return the pending items, [] at the end, or None after `silence_s` seconds without an item."""
    try:
        async with asyncio.timeout(silence_s) as limit:
            return await source.take()
    except TimeoutError:
        if not limit.expired():
            raise
        return await source.take() if source.is_ready else None  # an item and the limit came at the same moment


def _unknown(message: str) -> bytes:
    return b"event: unknown\ndata: %s\n\n" % json.dumps({"message": message}).encode()


def _frame(event: bytes) -> bytes:
    parsed = json.loads(event)
    is_stored = (
        parsed["type"] != "progress" or "workers" not in parsed
    )  # else without an id: an EventSource keeps the last one
    id = b"id: %d\n" % parsed["seq"] if is_stored else b""
    return b"%sevent: %s\ndata: %s\n\n" % (id, parsed["type"].encode(), event)
