"""`/v1/uploads`: a file that comes in parts, in any order and side by side, and then is one of `/v1/files`."""

import hashlib
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sluice.batch.source import MAX_FILE_BYTES
from sluice.batch.store import FileStore, NewFile, StoredFile, Upload
from sluice.gateway.batches.files import FileForm, life_s, plain, public, receive, wrong_purpose
from sluice.gateway.batches.folder import Shared, on_disk
from sluice.gateway.body import json_response
from sluice.gateway.caller import Caller
from sluice.gateway.errors import endpoint
from sluice.gateway.gateway import Gateway
from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError

_PATH = "/v1/uploads"


def routes(gateway: Gateway, shared: Shared) -> list[Route]:
    """Return the routes of uploads."""

    async def caller_of(request: Request) -> Caller:
        caller = await gateway.authenticate(request)
        await shared.open()
        return caller

    async def body_of(request: Request, caller: Caller) -> Mapping[str, Any]:
        return (await gateway.read_body(request, caller, lambda content: (content, []))).content

    async def create(request: Request) -> Response:
        caller = await caller_of(request)
        asked = _asked(await body_of(request, caller))
        await caller.count_request()
        upload = await on_disk(shared.store.new_upload, caller.tenant, *asked, max_held=caller.batch_bytes)
        return await json_response(_shown(upload))

    async def add(request: Request) -> Response:
        caller = await caller_of(request)
        upload = await on_disk(_find, shared.store, caller, request)
        part = await receive(request, caller, _form(caller, shared.store, upload))
        told = {"id": _part_id(part), "object": "upload.part", "created_at": part.created_at, "upload_id": upload.id}
        return await json_response(told)

    async def complete(request: Request) -> Response:
        caller = await caller_of(request)
        part_ids, md5 = _named_parts(await body_of(request, caller))
        async with _locked(shared.store, caller, request) as upload:
            if upload.status == "cancelled":
                raise _has_ended(upload)
            file = None if upload.file is None else await on_disk(shared.store.find, caller.tenant, upload.file)
            if upload.status == "pending":
                file = await _join(upload, part_ids, md5, caller.batch_bytes)
                upload = await on_disk(upload.end, "completed", file.id)
            return await json_response(_shown(upload, file))

    async def cancel(request: Request) -> Response:
        caller = await caller_of(request)
        async with _locked(shared.store, caller, request) as upload:
            if upload.status == "completed":
                raise _has_ended(upload)
            return await json_response(_shown(await on_disk(upload.end, "cancelled")))

    one = f"{_PATH}/{{id}}"
    return [
        Route(_PATH, endpoint(create), methods=["POST"]),
        Route(f"{one}/parts", endpoint(add), methods=["POST"]),
        Route(f"{one}/complete", endpoint(complete), methods=["POST"]),
        Route(f"{one}/cancel", endpoint(cancel), methods=["POST"]),
    ]


def _shown(upload: Upload, file: StoredFile | None = None) -> dict[str, Any]:
    """Return OpenAI's Upload object."""
    return {
        "id": upload.id,
        "object": "upload",
        "bytes": upload.bytes,
        "created_at": upload.created_at,
        "expires_at": upload.expires_at,
        "filename": upload.filename,
        "purpose": "batch",
        "status": upload.status,
        "file": file and public(file),
    }


def _asked(body: Mapping[str, Any]) -> tuple[str, int, int]:
    """Return the name of the file, its bytes, and the seconds until it expires. Raises `ApiError`."""
    names = ("purpose", "filename", "bytes", "mime_type", "expires_after")
    _refuse_others(body, names, "an upload")
    if body.get("purpose") != "batch":
        raise wrong_purpose(body.get("purpose"))
    for name in ("filename", "mime_type"):  # any type: what a file is, `purpose` tells
        if not isinstance(body.get(name), str):
            form = ErrorForm.MISSING_PARAMETER if body.get(name) is None else ErrorForm.INVALID_TYPE
            raise ApiError(form, f"{name}: it must be a string.", param=name)
    match body.get("bytes"):
        case bool():
            pass
        case int(length) if 0 <= length <= MAX_FILE_BYTES:
            return plain(body["filename"]), length, life_s(body.get("expires_after"))
        case int(length) if length > MAX_FILE_BYTES:
            message = f"bytes: a file has at most {MAX_FILE_BYTES:,}; send it in several files."
            raise ApiError(ErrorForm.BODY_TOO_LARGE, message, param="bytes")
    message = "bytes: it must be the number of bytes of the file, as an integer."
    raise ApiError(ErrorForm.INVALID_TYPE, message, param="bytes")


def _named_parts(body: Mapping[str, Any]) -> tuple[Sequence[str], str | None]:
    """Return the ids of the parts in their order, and the digest that the file should have. Raises `ApiError`."""
    _refuse_others(body, ("part_ids", "md5"), "a completion")
    match body.get("part_ids"):
        case list(part_ids) if all(isinstance(each, str) for each in part_ids):
            pass
        case _:
            message = "part_ids: it must be a list of ids, in the order of the file."
            raise ApiError(ErrorForm.INVALID_VALUE, message, param="part_ids")
    if len(set(part_ids)) < len(part_ids):
        raise ApiError(ErrorForm.INVALID_VALUE, "part_ids: an id is there twice.", param="part_ids")
    match body.get("md5"):
        case None:
            return part_ids, None
        case str(digest) if re.fullmatch("[0-9a-fA-F]{32}", digest):
            return part_ids, digest.lower()
    raise ApiError(ErrorForm.INVALID_VALUE, "md5: it must be 32 hexadecimal digits.", param="md5")


def _refuse_others(body: Mapping[str, Any], names: Sequence[str], of: str) -> None:
    if unknown := next((name for name in body if name not in names), None):
        message = f"{unknown[:80]}: it is not a field of {of}; use {', '.join(names)}."
        raise ApiError(ErrorForm.UNSUPPORTED_PARAMETER, message, param=unknown[:80])


def _find(store: FileStore, caller: Caller, request: Request) -> Upload:
    upload_id = request.path_params["id"]
    upload = store.find_upload(caller.tenant, upload_id)
    if upload is None:
        message = f"id: there is no upload {upload_id[:80]!r}; it expires an hour after it was created."
        raise ApiError(ErrorForm.NOT_FOUND, message, param="id")
    return upload


@asynccontextmanager
async def _locked(store: FileStore, caller: Caller, request: Request) -> AsyncIterator[Upload]:
    """Yield an upload that no other request completes or cancels meanwhile. Raises `ApiError`."""
    upload = await on_disk(_find, store, caller, request)
    with ExitStack() as stack:
        if not await on_disk(stack.enter_context, upload.locked()):
            message = "id: another request is completing this upload; send it again."
            raise ApiError(ErrorForm.CONFLICT, message, param="id", retryable=True)
        upload = await on_disk(_find, store, caller, request)  # as the request before has left it
        has_file = upload.file is not None and await on_disk(store.find, caller.tenant, upload.file) is not None
        if upload.status == "pending" and has_file:  # a gateway died before it could end it
            upload = await on_disk(upload.end, "completed", upload.file)
        yield upload


def _has_ended(upload: Upload) -> ApiError:
    message = f"id: {upload.id} is {upload.status} already; create another upload."
    return ApiError(ErrorForm.CONFLICT, message, param="id")


def _form(caller: Caller, store: FileStore, upload: Upload) -> FileForm:
    """Return the form of a part."""

    def check(more_bytes: int) -> None:
        sent = sum(part.bytes for part in upload.parts()) + more_bytes
        if more_bytes > upload.bytes or sent > 2 * upload.bytes:  # a part comes twice if its first answer was lost
            message = f"data: the upload was created for {upload.bytes:,} bytes, and its parts would have {sent:,}"
            raise ApiError(ErrorForm.INVALID_VALUE, f"{message}; create another for this file.", param="data")

    def begin(least_bytes: int) -> NewFile:
        if upload.status != "pending":
            raise _has_ended(upload)
        check(least_bytes)
        if len(upload.parts()) >= 1_000:  # each request for the upload reads the lengths of all
            message = "data: the upload has 1,000 parts; send larger ones in another upload."
            raise ApiError(ErrorForm.INVALID_VALUE, message, param="data")
        store.check_space(caller.tenant, least_bytes, caller.batch_bytes)
        return upload.new_part()

    def end(new: NewFile, filename: str, _: dict[str, str]) -> StoredFile:
        check(new.length)
        store.check_space(caller.tenant, 0, caller.batch_bytes)  # the part is there already
        return new.publish(filename, "batch", None)

    return FileForm("data", (), 64 * 1024 * 1024, begin, end)  # OpenAI's limit, and what its SDK sends


def _part_id(part: StoredFile) -> str:
    return f"part_{part.id.removeprefix('file-')}"


async def _join(upload: Upload, part_ids: Sequence[str], md5: str | None, max_held: int | None) -> StoredFile:
    """Make the parts one file. Raises `ApiError`."""
    known = {_part_id(part): part for part in await on_disk(upload.parts)}
    if absent := next((each for each in part_ids if each not in known), None):
        message = f"part_ids: there is no part {absent[:80]!r} of this upload; add it, and name the id of the answer."
        raise ApiError(ErrorForm.INVALID_VALUE, message, param="part_ids")
    parts = [known[each] for each in part_ids]
    if (sent := sum(part.bytes for part in parts)) != upload.bytes:
        message = f"part_ids: these parts have {sent:,} bytes, and the upload was created for {upload.bytes:,}."
        raise ApiError(ErrorForm.INVALID_VALUE, f"{message} Name all parts of the file.", param="part_ids")
    new, digest = await on_disk(upload.new_file), hashlib.md5(usedforsecurity=False)
    try:
        joining = upload.join(parts, new, digest)
        while await on_disk(next, joining, False):
            pass
        if md5 not in (None, digest.hexdigest()):
            message = f"md5: the file has {digest.hexdigest()}; check the order of part_ids, or send its parts again."
            raise ApiError(ErrorForm.INVALID_VALUE, message, param="md5")
        return await on_disk(new.publish, upload.filename, "batch", upload.life_s, max_held=max_held)
    finally:
        await on_disk(new.discard)
