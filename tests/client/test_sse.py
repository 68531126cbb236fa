"""Server-sent events: what a browser receives from a Starlette and from a WSGI backend."""

import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import httpx
import pytest
import uvicorn
from redis import Redis
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.routing import Route

from sluice import Client, SyncClient, sse
from sluice.contract import keys
from sluice.sse import seq_of
from tests.client.streaming import HELLO, event
from tests.support.stack import free_port

LOG = [event(0), event(1, content="ü\u2028\n"), event(2, "cancelled")]
FRAMES = [b"id: 0\nevent: delta", b"id: 1\nevent: delta", b"id: 2\nevent: cancelled"]
BODY = b"retry: 500\n\n" + b"".join(b"%s\ndata: %s\n\n" % pair for pair in zip(FRAMES, LOG, strict=True))
OPTIONS: dict[str, Any] = {"keep_alive_s": 0.1, "unknown_s": 0.5}


@contextmanager
def starlette(redis_url: str) -> Iterator[str]:
    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[dict[str, Client]]:
        async with Client(redis_url) as client:
            yield {"client": client}

    async def events(http: Request) -> StreamingResponse:
        last = http.headers.get("last-event-id")
        frames = sse.frames(http.state.client, http.path_params["id"], last_event_id=last, **OPTIONS)
        return StreamingResponse(frames, headers=sse.HEADERS)

    port, app = free_port(), Starlette(routes=[Route("/{id}", events)], lifespan=lifespan)
    server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="critical", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join()


class Quiet(WSGIRequestHandler):
    def log_message(self, format: str, *args: object) -> None:
        pass


@contextmanager
def wsgi(redis_url: str) -> Iterator[str]:
    """Serve a generator as Django and Flask do."""
    client = SyncClient(redis_url)

    def app(environ: dict[str, Any], start_response: Callable[..., object]) -> Iterator[bytes]:
        start_response("200 OK", list(sse.HEADERS.items()))
        job_id, last = environ["PATH_INFO"].removeprefix("/"), environ.get("HTTP_LAST_EVENT_ID")
        return sse.sync_frames(client, job_id, last_event_id=last, **OPTIONS)

    with client, make_server("127.0.0.1", 0, app, handler_class=Quiet) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def events_of(reply: httpx.Response) -> bytes:
    """Return the body without comments, which fill the silences of a busy machine too."""
    return reply.content.replace(sse.KEEP_ALIVE, b"")


@pytest.fixture(params=[starlette, wsgi])
def http(request: pytest.FixtureRequest, redis_url: str) -> Iterator[httpx.Client]:
    with request.param(redis_url) as url, httpx.Client(base_url=url, timeout=60) as http:
        yield http


@pytest.fixture
def server(redis_url: str) -> Iterator[Redis]:
    with Redis.from_url(redis_url) as server:
        yield server


def write(server: Redis, *events: bytes) -> None:
    for raw in events:
        server.rpush(keys.log("a"), raw)
        server.publish(keys.channel("a"), raw)


def wait_until(true: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_subscribed(server: Redis) -> bool:
    return bool(server.pubsub_numsub(keys.channel("a"))[0][1])  # type: ignore[index]


def test_a_job_is_a_frame_for_each_event_with_the_worker_s_json(http: httpx.Client, server: Redis) -> None:
    write(server, *LOG)
    reply = http.get("/a")
    assert reply.headers["content-type"] == "text/event-stream"
    assert events_of(reply) == BODY


def test_a_browser_that_comes_back_goes_on_after_its_last_event(http: httpx.Client, server: Redis) -> None:
    write(server, *LOG[:2])
    with http.stream("GET", "/a") as reply:
        lines = (line for line in reply.iter_lines() if line.startswith("id: "))
        seen = [next(lines), next(lines)]
    write(server, LOG[2])
    reply = http.get("/a", headers={"Last-Event-ID": seen[-1].removeprefix("id: ")})
    assert events_of(reply) == b"retry: 500\n\n" + BODY[BODY.index(FRAMES[2]) :]
    assert events_of(http.get("/a", headers={"Last-Event-ID": "2"})) == b"retry: 500\n\n"


@pytest.mark.parametrize("header", ["seven", "-5", "1.5", "", "99999999999999999999999", "9" * 5000])
def test_a_last_event_id_that_is_no_seq_counts_for_none(http: httpx.Client, server: Redis, header: str) -> None:
    write(server, *LOG)
    assert events_of(http.get("/a", headers={"Last-Event-ID": header})) == BODY


def test_a_seq_is_read_as_decimal_digits() -> None:
    assert [seq_of(header) for header in ("7", " 7 ", "007", str(2**53))] == [7, 7, 7, 2**53]
    assert [seq_of(header) for header in (None, "", "-1", "1_0", "٧", "²", "0x7", str(2**53 + 1))] == [-1] * 8


def test_silence_is_filled_with_comments_and_events_still_come(http: httpx.Client, server: Redis) -> None:
    server.set(keys.body("a"), "{}")
    with http.stream("GET", "/a") as reply:
        lines = reply.iter_lines()
        comments = (line for line in lines if line.startswith(":"))
        assert [next(comments) for _ in range(3)] == [": keep-alive"] * 3
        write(server, *LOG)
        assert [line for line in lines if line.startswith("id: ")] == ["id: 0", "id: 1", "id: 2"]


async def test_an_unknown_job_is_reported_at_once_unless_it_may_be_submitted_later(redis_url: str) -> None:
    async with Client(redis_url) as client:
        started = time.monotonic()
        body = b"".join([frame async for frame in sse.frames(client, "nobody")])
    assert b"event: unknown" in body
    assert time.monotonic() - started < 1


@pytest.mark.parametrize("job_id", ["nobody", "no%20id"])
def test_a_job_that_nobody_knows_is_one_event_and_an_end(http: httpx.Client, job_id: str) -> None:
    body = http.get(f"/{job_id}").text
    assert [line for line in body.splitlines() if line.startswith("event: ")] == ["event: unknown"]
    assert "message" in json.loads(body.split("data: ")[1])


def test_a_browser_that_leaves_ends_its_subscription(http: httpx.Client, server: Redis) -> None:
    server.set(keys.body("a"), json.dumps(HELLO))
    with http.stream("GET", "/a") as reply:
        lines = reply.iter_lines()  # forgotten, it would close the connection
        next(lines)
        wait_until(lambda: is_subscribed(server))
    wait_until(lambda: not is_subscribed(server))
