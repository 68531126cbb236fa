"""A web backend for chats: POST queues a job, GET streams its events to the browser, DELETE cancels it."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from redis.exceptions import RedisError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from sluice import Client, sse

PAGE = Path(__file__).with_name("index.html")
UNKNOWN_S = 2.0  # short, since a job exists as soon as it is submitted


def create_app(redis_url: str, *, model: str = "default", leave_s: float = 5.0) -> Starlette:
    """Return the web application. `leave_s`: seconds within which a browser that lost its stream may reconnect."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Any]]:
        async with Client(redis_url) as client:
            yield {"client": client, "model": model, "leave_s": leave_s, "open_streams": Counter()}

    routes = [
        Route("/", page),
        Route("/chat", submit, methods=["POST"]),
        Route("/chat/{id:uuid}/events", events),
        Route("/chat/{id:uuid}", cancel, methods=["DELETE"]),
    ]
    return Starlette(
        routes=routes, lifespan=lifespan, exception_handlers={HTTPException: refused, RedisError: server_away}
    )


async def page(http: Request) -> Response:
    """Return the page."""
    return FileResponse(PAGE)


async def submit(http: Request) -> Response:
    """Queue a job, and return its id."""
    body = await read_object(http)
    try:
        job = await http.state.client.submit(body, model=http.state.model, id=str(uuid4()))
    except ValueError as error:
        raise HTTPException(400, f"The job cannot be queued: {error}.") from None
    return JSONResponse({"id": job.id}, 202)


async def events(http: Request) -> Response:
    """Stream a job's events."""
    return EventStream(http, str(http.path_params["id"]))


async def cancel(http: Request) -> Response:
    """Cancel a job."""
    await http.state.client.cancel(str(http.path_params["id"]))
    return Response(status_code=204)


class EventStream(StreamingResponse):
    """Streams a job's events as server-sent events, and cancels the job if the browser does not reconnect."""

    def __init__(self, http: Request, job_id: str) -> None:
        self._state, self._job_id, self._ended = http.state, job_id, False
        last_event_id = http.headers.get("last-event-id") or http.query_params.get("after")
        super().__init__(self._frames(last_event_id), headers=sse.HEADERS)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the stream. One that broke off counts as open until the browser has had time to reconnect."""
        with self._counted():
            await super().__call__(scope, receive, send)
            await asyncio.sleep(0 if self._ended else self._state.leave_s)
        if not self._ended and not self._state.open_streams[self._job_id]:
            await self._state.client.cancel(self._job_id)

    @contextmanager
    def _counted(self) -> Iterator[None]:
        open_streams: Counter[str] = self._state.open_streams
        open_streams[self._job_id] += 1
        try:
            yield
        finally:
            open_streams[self._job_id] -= 1
            if not open_streams[self._job_id]:
                del open_streams[self._job_id]

    async def _frames(self, last_event_id: str | None) -> AsyncIterator[bytes]:
        frames = sse.frames(self._state.client, self._job_id, last_event_id=last_event_id, unknown_s=UNKNOWN_S)
        async with aclosing(frames):
            async for frame in frames:
                yield frame
        self._ended = True


async def read_object(http: Request) -> dict[str, Any]:
    """Return the JSON object of a body. Raises HTTPException."""
    try:
        body = await http.json()
    except (ValueError, RecursionError):
        raise HTTPException(400, "The body is not JSON.") from None
    if not isinstance(body, dict):
        raise HTTPException(400, 'The body must be an object, such as {"messages": [...]}.')
    return body


async def refused(http: Request, error: Exception) -> Response:
    """Return an HTTPException as JSON."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"error": {"message": error.detail}}, error.status_code, error.headers)


async def server_away(http: Request, error: Exception) -> Response:
    """Return status 503 if the queue's server does not answer."""
    return JSONResponse({"error": {"message": "The queue's server does not answer. Try again in a moment."}}, 503)
