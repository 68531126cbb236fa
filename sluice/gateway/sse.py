"""Server-sent events of the gateway: frames, heartbeats in long waits, and the response that carries them."""

import asyncio
import json
import re
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Mapping
from contextlib import AsyncExitStack
from typing import Any, TypeVar

from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from sluice.contract.events import Progress
from sluice.errors import SluiceError
from sluice.gateway.errors import log_refusal
from sluice.gateway.protection import at_end
from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError, from_client
from sluice.openai import waiting_comment
from sluice.sse import HEADERS, take
from sluice.streaming import LAST_SEQ, BackgroundReader
from sluice.transport import Interruption

CONNECTION = "connection"  # in the state of a request: receives messages without the time limit of a body
_DISCONNECT_WATCH = "disconnect_watch"  # likewise

T = TypeVar("T")


class ClientDisconnected(ApiError):
    """The client closed its connection before the response began."""

    def __init__(self) -> None:
        super().__init__(ErrorForm.CANCELLED, "The client closed its connection.")
        self.args = ()


class _DisconnectWatch:
    """Waits in one task for the client of a request to leave, through all stages of the request: a task for each stage
    would cost as much as the stage."""

    def __init__(self, receive: Receive) -> None:
        """`receive`: of a request whose body has been read, or is of no interest. It has no time limit: a client that
        does not send the body it has announced may leave at any time."""
        self._has_left = False
        self._block: Interruption | None = None
        self.task = asyncio.create_task(self._wait(receive))

    async def _wait(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._has_left = True
        self._interrupt()

    def _interrupt(self) -> None:
        block, self._block = self._block, None  # a second interruption would disturb the block's end
        if block is not None:
            block.interrupt(ClientDisconnected())

    async def interrupting(self, work: Coroutine[Any, Any, T]) -> T:
        """Return what the work returns; cancel it when the client leaves. Raises `ClientDisconnected`."""
        with Interruption() as self._block:
            if self._has_left:  # the work is begun all the same: its end is what cancels the jobs
                asyncio.get_running_loop().call_soon(self._interrupt)
            try:
                return await work
            finally:
                self._block = None


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what the work returns; cancel it if the client disconnects first. Raises `ClientDisconnected`.

    What is left of the request's body is dropped. The middleware around every request ends the wait for the client.
    """
    state = request.scope.setdefault("state", {})
    if _DISCONNECT_WATCH not in state:
        state[_DISCONNECT_WATCH] = _DisconnectWatch(state.get(CONNECTION, request.receive))
        at_end(request).callback(state[_DISCONNECT_WATCH].task.cancel)
    watch: _DisconnectWatch = state[_DISCONNECT_WATCH]
    return await watch.interrupting(work)


async def until_ended(tasks: Collection[asyncio.Task[Any]]) -> None:
    """Wait until all tasks have ended. A caller that is cancelled waits for them all the same: they must be short."""
    try:
        await asyncio.wait(tasks)
    except asyncio.CancelledError:
        await asyncio.wait(tasks)
        for task in tasks:
            raised_by(task)  # retrieved, or asyncio logs it
        raise


def raised_by(task: asyncio.Task[Any]) -> BaseException | None:
    """Return what a task raised, its cancellation included; None if it has not ended, or without an error."""
    if task.cancelled():
        return asyncio.CancelledError()
    return task.exception() if task.done() else None


DONE = b"data: [DONE]\n\n"
# A comment without an empty line: after an event with an id, an empty line is an event without data to OpenAI's SDK.
KEEP_ALIVE = b": keep-alive\n"
_RETRY = b"retry: 500\n"  # milliseconds; a part of the first event, for the same reason

Frames = AsyncGenerator[bytes]
_encode = json.JSONEncoder(separators=(",", ":")).encode  # json.dumps would make an encoder for each frame


def frame(data: Any, *, event: str | None = None, id: int | str | None = None) -> bytes:
    """Return one event with JSON data. `id` comes back as `Last-Event-ID` when the client reconnects."""
    lines = [f"id: {id}"] if id is not None else []
    if event is not None:
        lines.append(f"event: {event}")
    lines.append(f"data: {_encode(data)}")
    return "\n".join([*lines, "", ""]).encode()


def waiting(event: Progress) -> bytes:
    """Return the comment for a job that waits for a worker, or until it has loaded its model. It has no id: what the
    client has stays the same."""
    return waiting_comment(event.phase, event.workers or 0, event.done, event.total).encode()


def bad_last_event_id() -> ApiError:
    """Return the error for a `Last-Event-ID` that no event can have."""
    message = "Last-Event-ID: it must be the id of an event of this stream; leave it out to read from the beginning."
    return ApiError(ErrorForm.INVALID_VALUE, message, param="Last-Event-ID")


def seq_of_header(last_event_id: str | None) -> int:
    """Return the number in a `Last-Event-ID` header; -1, which precedes all events, without one. Raises `ApiError` 400
    for anything else."""
    if not last_event_id:
        return -1
    if not re.fullmatch(r"\d{1,16}", last_event_id, re.ASCII) or int(last_event_id) > LAST_SEQ:
        raise bad_last_event_id()
    return int(last_event_id)


async def stream(
    request: Request,
    frames: Frames,
    *,
    heartbeat_s: float,
    error_frame: Callable[[ApiError], bytes],
    headers: Mapping[str, str] | None = None,
    heartbeat: Callable[[], bytes] = lambda: KEEP_ALIVE,
) -> Response:
    """Return the response that sends the frames, with a heartbeat after each `heartbeat_s` seconds without one: what
    `heartbeat` returns when all frames so far have been sent.

    Waits for the first frame, but no longer than `heartbeat_s`: an error of `frames` until then is raised here, while a
    status can still be chosen, and a later one is sent as `error_frame`, the last. Closes `frames`, also when the
    client leaves, in a task of their own. Raises `ClientDisconnected`.
    """
    source = BackgroundReader(frames)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(_close, source)
        first = await unless_disconnected(request, take(source, heartbeat_s))
        stack.pop_all()
    body = _body(source, first, heartbeat_s, heartbeat, error_frame)
    return _Stream(source, body, headers={**HEADERS, **(headers or {})})


async def _close(source: BackgroundReader[bytes]) -> None:
    await asyncio.shield(source.close())


class _Stream(StreamingResponse):
    """Closes the source of its body in every case, also if the body was never begun. Starlette's own response starts a
    task group of anyio, whose import and start would delay the first streams."""

    def __init__(self, source: BackgroundReader[bytes], body: Frames, headers: Mapping[str, str]) -> None:
        super().__init__(body, headers=headers)
        self._source = source

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await unless_disconnected(Request(scope, receive), self.stream_response(send))
        except ClientDisconnected:
            pass
        finally:
            await _close(self._source)


async def _body(
    source: BackgroundReader[bytes],
    ready: list[bytes] | None,
    heartbeat_s: float,
    heartbeat: Callable[[], bytes],
    error_frame: Callable[[ApiError], bytes],
) -> Frames:
    """Yield frames, joined if several are ready; `ready` is the first result of `take`."""
    opening = _RETRY
    try:
        while ready != []:
            yield opening + (heartbeat() if ready is None else b"".join(ready))
            opening = b""
            ready = await take(source, heartbeat_s)
    except ApiError as error:
        yield opening + error_frame(error)
    except (SluiceError, RedisError) as error:
        log_refusal(error)
        yield opening + error_frame(from_client(error))
