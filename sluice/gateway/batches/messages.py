"""`/v1/messages/batches`: Anthropic's Message Batches, which are the folder's runs of the endpoint `/v1/messages`. The
requests of one are written as the run's input file, which is one of its tenant's files."""

import hashlib
import json
import re
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any
from uuid import uuid4

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from sluice.batch.endpoints import MESSAGES
from sluice.batch.folder import run_paths
from sluice.batch.lines import BadLine, read_line
from sluice.batch.outcomes import NOT_JSON
from sluice.batch.store import StoredFile
from sluice.contract.batch import Batch
from sluice.contract.keys import MAX_REQUEST_BYTES
from sluice.gateway import idempotency
from sluice.gateway.batches.folder import Shared, limit_of, on_disk
from sluice.gateway.batches.runs import NewRun, Runs
from sluice.gateway.body import in_thread_if_long, json_response
from sluice.gateway.caller import Caller
from sluice.gateway.errors import anthropic_endpoint
from sluice.gateway.gateway import Gateway
from sluice.gateway.workers import served_name
from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError
from sluice.interfaces.fields import requested_model

_PATH = f"{MESSAGES}/batches"
_CANCELED = ("batch_cancelled", "cancelled")  # codes of lines


def routes(gateway: Gateway, shared: Shared, runs: Runs) -> list[Route]:
    """Return the routes of message batches."""
    batches = _MessageBatches(gateway, shared, runs)
    one = f"{_PATH}/{{id}}"
    return [
        Route(_PATH, anthropic_endpoint(batches.create), methods=["POST"]),
        Route(_PATH, anthropic_endpoint(batches.list), methods=["GET"]),
        Route(one, anthropic_endpoint(batches.retrieve), methods=["GET"]),
        Route(one, anthropic_endpoint(batches.delete), methods=["DELETE"]),
        Route(f"{one}/cancel", anthropic_endpoint(batches.cancel), methods=["POST"]),
        Route(f"{one}/results", anthropic_endpoint(batches.results), methods=["GET"]),
    ]


class _MessageBatches:
    """Answers requests for message batches."""

    def __init__(self, gateway: Gateway, shared: Shared, runs: Runs) -> None:
        self._gateway, self._shared = gateway, shared
        self._runs = runs

    async def create(self, request: Request) -> Response:
        """Answer `POST /v1/messages/batches`."""
        caller = await self._caller(request)
        body = await self._gateway.read_body(request, caller, lambda content: (content, []))
        if "batch" not in caller.lanes:
            raise ApiError(ErrorForm.LANE_NOT_ALLOWED, "this key may not use the lane batch.")
        models = self._gateway.settings.model_map
        lines = await in_thread_if_long(body.length, _lines, body.content, caller, models)
        run_id = f"batch_{uuid4().hex}"
        if (key := idempotency.key_of(request)) is not None:
            run_id = idempotency.job_id(caller, _PATH, key, "batch_")
        await caller.count_request()
        return await json_response(_public(await self._create(caller, run_id, lines), request))

    async def _create(self, caller: Caller, run_id: str, lines: Sequence[bytes]) -> Batch:
        """Hand a run over to the workers, unless one of this id was, for another request with the same key."""
        if (known := await self._known(caller, run_id, lines)) is not None:
            return known
        life_s = 29 * 86_400  # of the requests and the results: as Anthropic's
        file, batch = await on_disk(self._store, caller, run_id, lines, life_s), None
        try:
            asked = NewRun(file.id, MESSAGES, "24h", output_expires_s=life_s, requests=len(lines))
            batch = await self._runs.create(caller, run_id, asked)
        except ApiError:
            if (known := await self._known(caller, run_id, lines)) is None:  # else another request was faster
                raise
            return known
        finally:
            if batch is None:
                await on_disk(self._shared.store.delete, caller.tenant, file)
        return batch

    async def _known(self, caller: Caller, run_id: str, lines: Sequence[bytes]) -> Batch | None:
        """Return the run of this id. Raises `ApiError` if it has other lines."""
        if (state := await on_disk(self._shared.find, caller.tenant, run_id)) is None:
            return None
        file = await on_disk(self._shared.store.find, caller.tenant, state.batch.sluice.input_file or "")
        if file is not None and file.sha256 != await on_disk(_digest, lines):
            raise ApiError(ErrorForm.IDEMPOTENCY_KEY_REUSED, "Idempotency-Key: it came with another body before.")
        return await self._runs.find(caller, run_id)

    async def list(self, request: Request) -> Response:
        """Answer `GET /v1/messages/batches`: the newest first."""
        caller, query = await self._caller(request), request.query_params
        after, before = query.get("after_id"), query.get("before_id")
        if after is not None and before is not None:
            raise ApiError(ErrorForm.INVALID_VALUE, "before_id: give it or after_id, not both.", param="before_id")
        limit = limit_of(request, 1_000, 20)
        page, has_more = await self._runs.page(caller, limit, after, before=before, url=MESSAGES)
        return await json_response(
            {
                "data": [_public(batch, request) for batch in page],
                "has_more": has_more,
                "first_id": page[0].id if page else None,
                "last_id": page[-1].id if page else None,
            }
        )

    async def retrieve(self, request: Request) -> Response:
        """Answer `GET /v1/messages/batches/{id}`."""
        return await json_response(_public(await self._find(await self._caller(request), request), request))

    async def cancel(self, request: Request) -> Response:
        """Answer `POST /v1/messages/batches/{id}/cancel`. A batch that has ended stays as it is."""
        caller = await self._caller(request)
        batch = await self._find(caller, request)
        if not batch.ended:
            batch = await self._runs.cancel(caller, batch.id)
        return await json_response(_public(batch, request))

    async def delete(self, request: Request) -> Response:
        """Answer `DELETE /v1/messages/batches/{id}`: its results and requests are removed with it."""
        caller = await self._caller(request)
        batch = await self._find(caller, request)
        if not batch.ended:
            message = f"{batch.id} has not ended; cancel it, or wait for its end."
            raise ApiError(ErrorForm.INVALID_REQUEST, message, param="id")
        await self._runs.delete(caller, batch)
        return await json_response({"id": batch.id, "type": "message_batch_deleted"})

    async def results(self, request: Request) -> Response:
        """Answer `GET /v1/messages/batches/{id}/results`: a line for each request, in any order."""
        batch = await self._find(await self._caller(request), request)
        if not batch.ended:
            message = f"{batch.id} has no results yet: it has not ended."
            raise ApiError(ErrorForm.INVALID_REQUEST, message, param="id")
        part = self._shared.folder.done if batch.status == "completed" else self._shared.folder.failed
        paths = run_paths(part / batch.id)
        return StreamingResponse(_results([paths.output, paths.errors]), media_type="application/x-jsonl")

    async def _caller(self, request: Request) -> Caller:
        caller = await self._gateway.authenticate(request)
        await self._shared.open()
        return caller

    async def _find(self, caller: Caller, request: Request) -> Batch:
        batch = await self._runs.find(caller, request.path_params["id"])
        if batch.endpoint != MESSAGES:
            message = f"{batch.id} is a batch of {batch.endpoint}; it is at /v1/batches."
            raise ApiError(ErrorForm.NOT_FOUND, message, param="id")
        return batch

    def _store(self, caller: Caller, run_id: str, lines: Sequence[bytes], life_s: int) -> StoredFile:
        new = self._shared.store.new(caller.tenant, sum(map(len, lines)), caller.batch_bytes)
        try:
            for line in lines:
                new.write(line)
            return new.publish(f"{run_id}.jsonl", "batch", life_s, max_held=caller.batch_bytes)
        finally:
            new.discard()


def _digest(lines: Sequence[bytes]) -> str:
    return hashlib.sha256(b"".join(lines)).hexdigest()


def _lines(body: Mapping[str, Any], caller: Caller, models: Mapping[str, str]) -> list[bytes]:
    """Return the lines of the input file. Raises `ApiError`."""
    if unknown := next((name for name in body if name != "requests"), None):
        raise ApiError(ErrorForm.UNSUPPORTED_PARAMETER, f"{unknown[:80]}: Extra inputs are not permitted")
    requests, most = body.get("requests"), 50_000  # lines of a run's file
    if not isinstance(requests, list) or not 1 <= len(requests) <= most:
        raise ApiError(ErrorForm.INVALID_TYPE, f"requests: it must be a list of 1 to {most:,} requests.")
    seen, lines = set[str](), list[bytes]()
    served = set[str]()
    for place, each in enumerate(requests):
        match each:
            case {"custom_id": str(custom_id), "params": dict(params), **rest} if not rest:
                pass
            case _:
                message = f"requests.{place}: it must be an object with a custom_id and params alone."
                raise ApiError(ErrorForm.INVALID_REQUEST, message)
        if not re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", custom_id):
            message = f"requests.{place}.custom_id: it must have 1 to 64 letters, digits, hyphens and underscores."
            raise ApiError(ErrorForm.INVALID_VALUE, message)
        if custom_id in seen:
            raise ApiError(ErrorForm.INVALID_VALUE, f"requests.{place}.custom_id: {custom_id} is there twice.")
        seen.add(custom_id)
        served.add(served_name(caller, requested_model(params), models))
        if len(served) > 100:  # of a run's file
            raise ApiError(ErrorForm.INVALID_VALUE, "requests: they name more than 100 models; divide them.")
        line = {"custom_id": custom_id, "method": "POST", "url": MESSAGES, "body": params}
        lines.append(_encoded(line, place, models))
    return lines


def _encoded(line: Mapping[str, Any], place: int, models: Mapping[str, str]) -> bytes:
    """Return a line, which the run's feeder will accept: a bad one would end the run without a result for any. Raises
    `ApiError`."""
    try:  # as long as in the body: with escapes, some text would have twice as many bytes
        raw = json.dumps(line, separators=(",", ":"), ensure_ascii=False).encode() + b"\n"
    except UnicodeEncodeError:  # for half of a surrogate pair
        raw = json.dumps(line, separators=(",", ":")).encode() + b"\n"
    if len(raw) > MAX_REQUEST_BYTES:
        raise ApiError(ErrorForm.BODY_TOO_LARGE, f"requests.{place}: it has more than {MAX_REQUEST_BYTES:,} bytes.")
    try:
        read_line(raw, models)
    except BadLine as bad:
        raise ApiError(ErrorForm.INVALID_VALUE, f"requests.{place}: {bad.message}") from None
    return raw


def _public(batch: Batch, request: Request) -> dict[str, Any]:
    """Return Anthropic's object of a run."""
    running = "canceling" if batch.status == "cancelling" else "in_progress"
    ended_at = max(filter(None, (batch.completed_at, batch.failed_at, batch.expired_at, batch.cancelled_at)), default=0)
    return {
        "id": batch.id,
        "type": "message_batch",
        "processing_status": "ended" if batch.ended else running,
        "request_counts": _counts(batch),
        "created_at": _time(batch.created_at),
        "expires_at": _time(batch.expires_at or batch.created_at),
        "cancel_initiated_at": _time(batch.cancelling_at) if batch.cancelling_at else None,
        "ended_at": _time(ended_at) if batch.ended else None,
        "archived_at": None,
        "results_url": f"{request.base_url}{_PATH[1:]}/{batch.id}/results" if batch.ended else None,
    }


def _counts(batch: Batch) -> dict[str, int]:
    """Return how the requests have ended. As at Anthropic, all are processing until the batch has ended."""
    counts, failures = batch.request_counts, batch.sluice.failures
    if not batch.ended:
        return {"processing": counts.total, "succeeded": 0, "errored": 0, "canceled": 0, "expired": 0}
    succeeded = counts.completed + failures.get(NOT_JSON, 0)
    canceled, expired = sum(failures.get(code, 0) for code in _CANCELED), failures.get("batch_expired", 0)
    errored = counts.total - succeeded - canceled - expired
    return {"processing": 0, "succeeded": succeeded, "errored": errored, "canceled": canceled, "expired": expired}


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


async def _results(paths: Sequence[Path]) -> AsyncGenerator[bytes]:
    """Yield the results of a run, a few lines at a time."""
    for path in paths:
        try:
            file = await on_disk(path.open, "rb")
        except ApiError:  # no line has ended so
            continue
        with file:
            while lines := await on_disk(_next_results, file):
                yield lines


def _next_results(file: Iterator[bytes]) -> bytes:
    most = 16  # of 16 MB at most each
    return b"".join(map(_result, islice(file, most)))


def _result(raw: bytes) -> bytes:
    """Return the result of a line of the run's files."""
    line = json.loads(raw)
    code = (line["error"] or {}).get("code")
    result: dict[str, Any]
    if code is None or code == NOT_JSON:  # Anthropic does not judge answers
        result = {"type": "succeeded", "message": line["response"]["body"]}
    elif code in _CANCELED or code == "batch_expired":
        result = {"type": "expired" if code == "batch_expired" else "canceled"}
    elif line["response"] is not None:
        result = {"type": "errored", "error": line["response"]["body"]}
    else:
        told = {"type": "api_error", "message": line["error"]["message"]}
        result = {"type": "errored", "error": {"type": "error", "error": told, "request_id": None}}
    return json.dumps({"custom_id": line["custom_id"], "result": result}, separators=(",", ":")).encode() + b"\n"
