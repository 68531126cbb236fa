"""A web backend for chats: POST queues a job, GET streams its events to the browser, DELETE cancels it."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from redis.exceptions import RedisError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from sluice import Client, sse

PAGE = Path(__file__).with_name("index.html")
UNKNOWN_S = 2.0  # short, since a job exists as soon as it is submitted


def create_app(redis_url: str, *, model: str = "default") -> Starlette:
    """Return the web application. `model`: the served name that chats are for."""

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Any]]:
        async with Client(redis_url) as client:
            yield {"client": client, "model": model}

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
    """Queue a job, and return its id. By default its worker cancels it after 10 s without a reader."""
    body = {"on_disconnect": "cancel", **await read_object(http)}
    try:
        job = await http.state.client.submit(body, model=http.state.model, id=str(uuid4()))
    except ValueError as error:
        raise HTTPException(400, f"The job cannot be queued: {error}.") from None
    return JSONResponse({"id": job.id}, 202)


async def events(http: Request) -> Response:
    """Stream a job's events as server-sent events, after those that the browser has."""
    frames = sse.frames(
        http.state.client,
        str(http.path_params["id"]),
        last_event_id=http.headers.get("last-event-id") or http.query_params.get("after"),
        unknown_s=UNKNOWN_S,
    )
    return StreamingResponse(frames, headers=sse.HEADERS)


async def cancel(http: Request) -> Response:
    """Cancel a job."""
    await http.state.client.cancel(str(http.path_params["id"]))
    return Response(status_code=204)


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
