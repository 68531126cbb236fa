"""`/v1/files`: a body is parsed and written to disk as it arrives, and is never whole in memory."""

import re
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import ClientDisconnect, Request
from starlette.responses import FileResponse, Response
from starlette.routing import Route

from sluice.batch.source import MAX_FILE_BYTES
from sluice.batch.store import FileStore, NewFile, StoredFile
from sluice.gateway.batches.folder import Shared, limit_of, on_disk, page_of, seconds_of
from sluice.gateway.body import json_response
from sluice.gateway.caller import Caller
from sluice.gateway.errors import endpoint
from sluice.gateway.gateway import Gateway
from sluice.gateway.sse import ClientDisconnected
from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError

_PATH = "/v1/files"
_FORM_BYTES = 65_536  # more than a body has besides the file
_PIECE_BYTES = 262_144  # parsed and written in one call in a thread: about a millisecond


def routes(gateway: Gateway, shared: Shared) -> list[Route]:
    """Return the routes of files."""

    async def caller_of(request: Request) -> Caller:
        caller = await gateway.authenticate(request)
        await shared.open()
        return caller

    async def create(request: Request) -> Response:
        caller = await caller_of(request)
        return await json_response(public(await receive(request, caller, _form(caller, shared.store))))

    async def list_files(request: Request) -> Response:
        caller = await caller_of(request)
        return await json_response(await on_disk(_page, shared.store, caller, request))

    async def retrieve(request: Request) -> Response:
        caller = await caller_of(request)
        return await json_response(public(await on_disk(_find, shared.store, caller, request)))

    async def content(request: Request) -> Response:
        caller = await caller_of(request)
        file = await on_disk(_find, shared.store, caller, request)
        etag = f'"{file.sha256}"'
        headers = {"etag": etag, "content-type": "application/octet-stream"}
        if _matches(request.headers.get("if-none-match", ""), etag):
            return Response(status_code=304, headers={"etag": etag})
        path = shared.store.data(caller.tenant, file.id)
        return FileResponse(path, headers=headers, filename=file.filename, stat_result=await on_disk(path.stat))

    async def delete(request: Request) -> Response:
        caller = await caller_of(request)
        file_id = (await on_disk(_delete, shared, caller, request)).id
        return await json_response({"id": file_id, "object": "file", "deleted": True})

    one = f"{_PATH}/{{id}}"
    return [
        Route(_PATH, endpoint(create), methods=["POST"]),
        Route(_PATH, endpoint(list_files), methods=["GET"]),
        Route(one, endpoint(retrieve), methods=["GET"]),
        Route(f"{one}/content", endpoint(content), methods=["GET"]),
        Route(one, endpoint(delete), methods=["DELETE"]),
    ]


def public(file: StoredFile) -> dict[str, Any]:
    """Return OpenAI's File object."""
    told = {name: value for name, value in asdict(file).items() if name not in ("sha256", "run")}
    return {**told, "object": "file", "status": "processed", "status_details": None, "sluice": {"sha256": file.sha256}}


def _page(store: FileStore, caller: Caller, request: Request) -> dict[str, Any]:
    query, limit = request.query_params, limit_of(request, 10_000, 10_000)
    order, after = query.get("order", "desc"), query.get("after")
    if order not in ("asc", "desc"):
        raise ApiError(ErrorForm.INVALID_VALUE, "order: it must be asc or desc.", param="order")
    ids = store.ids(caller.tenant, newest_first=order == "desc")
    if after is not None:  # ids sort by time, so that the page after a file that was deleted begins where it should
        ids = [each for each in ids if (each < after if order == "desc" else each > after)]
    found = list[StoredFile]()
    for file_id in ids:
        file = store.find(caller.tenant, file_id)
        if file is not None and query.get("purpose") in (None, file.purpose):
            found.append(file)
        if len(found) > limit:
            break
    return page_of([public(file) for file in found[:limit]], has_more=len(found) > limit)


def _find(store: FileStore, caller: Caller, request: Request) -> StoredFile:
    return find_file(store, caller, request.path_params["id"], "id")


def find_file(store: FileStore, caller: Caller, file_id: str, param: str) -> StoredFile:
    """Return a file of the caller's tenant. Blocks. Raises `ApiError` 404."""
    file = store.find(caller.tenant, file_id)
    if file is None:
        message = f"{param}: there is no file {file_id[:80]!r}; it may have been deleted, or have expired."
        raise ApiError(ErrorForm.NOT_FOUND, message, param=param)
    return file


def _delete(shared: Shared, caller: Caller, request: Request) -> StoredFile:
    file = _find(shared.store, caller, request)
    for run in shared.runs(caller.tenant):
        if run.sluice.input_file == file.id and not run.ended:
            message = f"{file.id} is the input of {run.id}, which has not ended; cancel it first."
            raise ApiError(ErrorForm.CONFLICT, message, param="id")
    shared.store.delete(caller.tenant, file)
    return file


def _matches(header: str, etag: str) -> bool:
    return any(each.strip().removeprefix("W/") in (etag, "*") for each in header.split(","))


@dataclass(frozen=True, slots=True)
class FileForm:
    """A form with one file. `begin`, with the least bytes that will come, returns the file to write; `end`, with its
    name and the other parts, puts it among the others. Both block, and raise `ApiError`, `StoreFull`, OSError."""

    file: str  # the part with the file
    fields: tuple[str, ...]  # the other parts
    max_bytes: int
    begin: Callable[[int], NewFile]
    end: Callable[[NewFile, str, dict[str, str]], StoredFile]


def _form(caller: Caller, store: FileStore) -> FileForm:
    def end(new: NewFile, filename: str, fields: dict[str, str]) -> StoredFile:
        if (purpose := fields.get("purpose")) != "batch":
            raise wrong_purpose(purpose)
        store.check_space(caller.tenant, 0, caller.batch_bytes)  # beside parts too; the file is there already
        return new.publish(filename, "batch", _life_s(fields), max_held=caller.batch_bytes)

    return FileForm(
        "file",
        ("purpose", "expires_after[anchor]", "expires_after[seconds]"),
        MAX_FILE_BYTES,
        lambda least_bytes: store.new(caller.tenant, least_bytes, caller.batch_bytes),
        end,
    )


def wrong_purpose(purpose: object) -> ApiError:
    """Return the error for a file of another purpose."""
    message = f"purpose: it must be batch, not {purpose!r:.80}; files serve as inputs of /v1/batches alone."
    return ApiError(ErrorForm.INVALID_VALUE, message, param="purpose")


def _boundary(request: Request, form: FileForm) -> bytes:
    """Return what separates the parts of the body. Raises `ApiError` for a body that is no form or is too long."""
    if request.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity"):
        message = "Content-Encoding: a form with a file has to be sent plain."
        raise ApiError(ErrorForm.BODY_ENCODING, message, param="Content-Encoding")
    kind, options = parse_options_header(request.headers.get("content-type", ""))
    boundary = options.get(b"boundary", b"")
    if kind != b"multipart/form-data" or not 1 <= len(boundary) <= 200:
        message = f"The body must be multipart/form-data with the parts {' and '.join([form.file, *form.fields[:1]])}."
        raise ApiError(ErrorForm.INVALID_REQUEST, message)
    if int(request.headers.get("content-length") or 0) > form.max_bytes + _FORM_BYTES:
        raise _too_long(form)
    return boundary


def _too_long(form: FileForm) -> ApiError:
    message = f"{form.file}: it has more than {form.max_bytes:,} bytes; send it in several."
    return ApiError(ErrorForm.BODY_TOO_LARGE, message, param=form.file)


async def receive(request: Request, caller: Caller, form: FileForm) -> StoredFile:
    """Store the file of a form. Raises `ApiError`."""
    boundary = _boundary(request, form)
    await caller.count_request()
    caller.held.add(2 * _PIECE_BYTES)
    announced = int(request.headers.get("content-length") or 0)
    new = await on_disk(form.begin, max(announced - _FORM_BYTES, 0))
    try:
        body = _Body(boundary, form, new)
        await _receive(request, form, body)
        return await on_disk(body.publish)
    finally:
        await on_disk(new.discard)


async def _receive(request: Request, form: FileForm, body: "_Body") -> None:
    """Write the body's file to disk. Raises `ApiError`."""
    piece, received = bytearray(), 0
    try:
        async for part in request.stream():
            received += len(part)
            if received > form.max_bytes + _FORM_BYTES:  # the parser skips any number of bytes around the form
                raise _too_long(form)
            piece += part
            if len(piece) >= _PIECE_BYTES:
                await on_disk(body.write, bytes(piece))
                piece.clear()
    except ClientDisconnect:
        raise ClientDisconnected from None
    await on_disk(body.write, bytes(piece))


class _Body:
    """A form that is parsed piece by piece: its file goes to disk, and its fields are short."""

    def __init__(self, boundary: bytes, form: FileForm, new: NewFile) -> None:
        self._form, self._new = form, new
        self._fields = dict[str, bytearray]()
        self._headers = dict[bytes, bytes]()
        self._header, self._value = bytearray(), bytearray()
        self._part: bytearray | None = None  # None: the file
        self._length, self._ended = 0, False
        self._filename: str | None = None
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": lambda data, start, end: self._header.extend(data[start:end]),
                "on_header_value": lambda data, start, end: self._value.extend(data[start:end]),
                "on_header_end": self._end_header,
                "on_headers_finished": self._begin_data,
                "on_part_data": self._add,
                "on_end": self._end,
            },
        )

    def write(self, data: bytes) -> None:
        """Parse a piece of the body. Blocks. Raises `ApiError`, and OSError."""
        try:
            self._parser.write(data)
        except FormParserError as error:
            raise ApiError(ErrorForm.INVALID_REQUEST, f"The body is no valid multipart/form-data: {error}.") from None

    def publish(self) -> StoredFile:
        """Check the form, and put the file among the others. Blocks. Raises `ApiError`, `StoreFull`, OSError."""
        if not self._ended:
            raise ApiError(ErrorForm.INVALID_REQUEST, "The body ends before the form does; send it again.")
        if self._filename is None:
            name = self._form.file
            message = f"{name}: there is no such part with a filename; send the file in it."
            raise ApiError(ErrorForm.MISSING_PARAMETER, message, param=name)
        fields = {name: bytes(value).decode(errors="replace") for name, value in self._fields.items()}
        return self._form.end(self._new, self._filename, fields)

    def _begin(self) -> None:
        self._headers, self._part = {}, bytearray()

    def _end_header(self) -> None:
        self._headers[bytes(self._header).lower()] = bytes(self._value)
        self._header.clear()
        self._value.clear()

    def _begin_data(self) -> None:
        _, options = parse_options_header(self._headers.get(b"content-disposition", b""))
        name = options.get(b"name", b"").decode(errors="replace")
        if name == self._form.file and b"filename" in options:
            if self._filename is not None:
                raise ApiError(ErrorForm.INVALID_VALUE, f"{name}: there are two; send one in a request.", param=name)
            self._filename = plain(options[b"filename"].decode(errors="replace"))
            self._part = None
            return
        if name not in self._form.fields or name in self._fields:
            parts = ", ".join([self._form.file, *self._form.fields])
            message = f"{name[:80]!r} is not a part of this form, or is there twice; send {parts}."
            raise ApiError(ErrorForm.UNSUPPORTED_PARAMETER, message)
        self._part = self._fields.setdefault(name, bytearray())

    def _add(self, data: bytes, start: int, end: int) -> None:
        if self._part is not None:
            self._part += data[start:end]
            if len(self._part) > 1_000:  # far more than any of these has
                raise ApiError(ErrorForm.INVALID_VALUE, "A part other than the file has more than 1,000 bytes.")
            return
        self._length += end - start
        if self._length > self._form.max_bytes:
            raise _too_long(self._form)
        self._new.write(data[start:end])

    def _end(self) -> None:
        self._ended = True


def _life_s(fields: dict[str, str]) -> int:
    name = "expires_after"
    given: dict[str, object] = {
        key: fields[f"{name}[{key}]"] for key in ("anchor", "seconds") if f"{name}[{key}]" in fields
    }
    with suppress(KeyError, ValueError):
        given["seconds"] = int(str(given["seconds"]))
    return life_s(given or None)


def life_s(expires_after: object) -> int:
    """Return the seconds until a file is removed. Raises `ApiError`."""
    return 30 * 86_400 if expires_after is None else seconds_of(expires_after, "expires_after")  # OpenAI's for batches


def plain(filename: str) -> str:
    """Return a name that can be shown: it is stored as text, and never used as a path."""
    return re.sub(r"[\x00-\x1f\x7f\ud800-\udfff]", "", filename[:1_000])[:255] or "file"
