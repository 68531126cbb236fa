"""A server with OpenAI's Files and Batches and nothing of ours, whose answers can be lost, cut off or refused. Its
objects are those of OpenAI's SDK."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from openai.types import Batch, FileDeleted, FileObject
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from tests.support.stack import free_port


@dataclass(frozen=True, slots=True)
class Fault:
    """What becomes of one request whose method and path contain `of`: an HTTP `status` in place of an answer, or its
    answer is lost, or is cut off after `cut` bytes."""

    of: str
    status: int = 0
    headers: tuple[tuple[str, str], ...] = ()
    cut: int = 0


@dataclass
class OpenAIServer:
    """The server's state. A run advances by one state with each request for it, up to `stops_at`."""

    url: str
    faults: list[Fault] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    files: dict[str, tuple[FileObject, bytes]] = field(default_factory=dict)
    batches: dict[str, Batch] = field(default_factory=dict)
    key: str | None = None
    stops_at: str = "completed"
    lists: bool = True  # its runs
    page: int = 2  # runs in a page
    models: tuple[str, ...] = ()
    ranges: bool = False  # of a file's content

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/files", self._upload, methods=["POST"]),
                Route("/v1/files/{id}", self._file, methods=["GET", "DELETE"]),
                Route("/v1/files/{id}/content", self._content),
                Route("/v1/batches", self._create, methods=["POST"]),
                Route("/v1/batches", self._list),
                Route("/v1/batches/{id}", self._retrieve),
                Route("/v1/batches/{id}/cancel", self._cancel, methods=["POST"]),
                Route("/v1/models", self._models),
            ]
        )

    def count(self, of: str) -> int:
        return sum(request.startswith(of) for request in self.requests)

    async def _upload(self, request: Request) -> Response:
        async with request.form() as form:
            upload: Any = form["file"]
            assert form["purpose"] == "batch"
            return JSONResponse(self._store(upload.filename, await upload.read(), "batch").model_dump())

    def _store(self, name: str, content: bytes, purpose: Any) -> FileObject:
        stored = FileObject(
            id=f"file-{len(self.files) + 1}", bytes=len(content), created_at=int(time.time()), filename=name,
            object="file", purpose=purpose, status="processed",
        )  # fmt: skip
        self.files[stored.id] = stored, content
        return stored

    async def _file(self, request: Request) -> Response:
        id = request.path_params["id"]
        if id not in self.files:
            return _error(404, f"No such File object: {id}")
        if request.method == "DELETE":
            del self.files[id]
            return JSONResponse(FileDeleted(id=id, deleted=True, object="file").model_dump())
        return JSONResponse(self.files[id][0].model_dump())

    async def _content(self, request: Request) -> Response:
        found = self.files.get(request.path_params["id"])
        if not found:
            return _error(404, "No such file")
        begin = request.headers.get("range", "bytes=0-").removeprefix("bytes=").removesuffix("-")
        if not self.ranges or begin == "0":
            return Response(found[1])
        self.requests.append(f"range {begin}")
        return Response(found[1][int(begin) :], 206) if int(begin) < len(found[1]) else _error(416, "No such range")

    async def _create(self, request: Request) -> Response:
        given = await request.json()
        assert set(given) == {"input_file_id", "endpoint", "completion_window"}
        batch = Batch(
            id=f"batch_{len(self.batches) + 1}", object="batch", created_at=int(time.time()), status="validating",
            **given,
        )  # fmt: skip
        self.batches[batch.id] = batch
        return JSONResponse(batch.model_dump())

    async def _list(self, request: Request) -> Response:
        if not self.lists:
            return _error(404, "Not found")
        found = list(reversed(self.batches.values()))
        ids = [batch.id for batch in found]
        after = request.query_params.get("after")
        begin = ids.index(after) + 1 if after else 0
        page = found[begin : begin + self.page]
        data = [batch.model_dump() for batch in page]
        return JSONResponse({"object": "list", "data": data, "has_more": len(ids) > begin + self.page})

    async def _retrieve(self, request: Request) -> Response:
        id = request.path_params["id"]
        if id not in self.batches:
            return _error(404, f"No batch found with id '{id}'.")
        batch = self.batches[id]
        if batch.status != self.stops_at:
            self.batches[id] = self._advanced(batch)
        return JSONResponse(self.batches[id].model_dump())

    def _advanced(self, batch: Batch) -> Batch:
        lines = [json.loads(line) for line in self.files[batch.input_file_id][1].splitlines()]
        wrong = [line for line in lines if line["url"] != batch.endpoint]
        now = int(time.time())
        match batch.status:
            case "validating" if wrong:
                problem = {"code": "mismatched_url", "line": 1, "message": "The URL is not the batch's endpoint."}
                errors = {"object": "list", "data": [problem]}
                return Batch.model_validate({**batch.model_dump(), "status": "failed", "errors": errors})
            case "validating":
                counts = {"total": len(lines), "completed": 0, "failed": 0}
                changed = {"status": "in_progress", "in_progress_at": now - 7, "request_counts": counts}
            case "cancelling":
                changed = {"status": "cancelled", "cancelled_at": now}
            case "in_progress":
                good = [line for line in lines if line["custom_id"] != "bad"]
                bad = [line for line in lines if line["custom_id"] == "bad"]
                output = self._store("out", b"".join(map(_answer, good)), "batch_output") if good else None
                errors = self._store("err", b"".join(map(_failure, bad)), "batch_output") if bad else None
                changed = {
                    "status": "completed", "completed_at": now,
                    "request_counts": {"total": len(lines), "completed": len(good), "failed": len(bad)},
                    "output_file_id": output and output.id, "error_file_id": errors and errors.id,
                }  # fmt: skip
            case _:
                return batch
        return Batch.model_validate({**batch.model_dump(), **changed})

    async def _cancel(self, request: Request) -> Response:
        batch = self.batches[request.path_params["id"]]
        if batch.completed_at:
            return _error(409, f"Cannot cancel a batch with status '{batch.status}'.")
        self.batches[batch.id] = batch.model_copy(update={"status": "cancelling"})
        return JSONResponse(self.batches[batch.id].model_dump())

    async def _models(self, request: Request) -> Response:
        if not self.models:
            return _error(404, "Not found")
        return JSONResponse({"object": "list", "data": [{"id": name, "object": "model"} for name in self.models]})


def _answer(line: dict[str, Any]) -> bytes:
    body = {"model": line["body"].get("model"), "choices": [{"message": {"content": line["custom_id"]}}]}
    response = {"status_code": 200, "request_id": "r", "body": body}
    return json.dumps({"id": "b", "custom_id": line["custom_id"], "response": response, "error": None}).encode() + b"\n"


def _failure(line: dict[str, Any]) -> bytes:
    response = {"status_code": 400, "request_id": "r", "body": {"error": {"message": "Bad."}}}
    return json.dumps({"id": "b", "custom_id": line["custom_id"], "response": response, "error": None}).encode() + b"\n"


def _error(status: int, message: str) -> Response:
    return JSONResponse({"error": {"message": message, "type": "invalid_request_error", "code": None}}, status)


@dataclass
class _Faulty:
    """The app, between its faults and its clients."""

    server: OpenAIServer
    app: Starlette

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self.app(scope, receive, send)
        told = f"{scope['method']} {scope['path']}"
        self.server.requests.append(told)
        given = dict(scope["headers"]).get(b"authorization", b"").decode()
        if self.server.key and given != f"Bearer {self.server.key}":
            return await _error(401, "Incorrect API key provided.")(scope, receive, send)
        fault = next((each for each in self.server.faults if each.of in told), None)
        if fault is None:
            return await self.app(scope, receive, send)
        self.server.faults.remove(fault)
        if fault.status:
            response = _error(fault.status, f"Fault {fault.status}.")
            response.headers.update(dict(fault.headers))
            return await response(scope, receive, send)

        sent = 0

        async def cut(message: MutableMapping[str, Any]) -> None:
            nonlocal sent
            if message["type"] == "http.response.body":
                body = message["body"][: fault.cut - sent]
                sent += len(body)
                message = {**message, "body": body, "more_body": True}
            await send(message)

        await self.app(scope, receive, cut)  # without its end, for which the connection is closed


@contextmanager
def openai_server(**given: Any) -> Iterator[OpenAIServer]:
    """Serve in a thread until the end of the block."""
    port = free_port()
    state = OpenAIServer(f"http://127.0.0.1:{port}", **given)
    config = uvicorn.Config(_Faulty(state, state.app()), port=port, log_level="critical", timeout_graceful_shutdown=1)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve()))
    thread.start()
    try:
        while not server.started:
            time.sleep(0.005)
        yield state
    finally:
        server.should_exit = True
        thread.join()
