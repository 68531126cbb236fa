"""`/v1/batches`: the runs of the folder, whichever way they came into it. The folder is the truth about them; Redis has
the counts of those that run."""

import asyncio
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any, get_args, get_type_hints

from redis.exceptions import RedisError
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from sluice.batch.files import RunState
from sluice.batch.folder import place_run, remove_run, run_paths
from sluice.batch.registry import BatchRegistry
from sluice.batch.run import new_batch
from sluice.batch.source import RunOptions
from sluice.batch.store import StoredFile, result_ids
from sluice.contract import keys
from sluice.contract.batch import Batch, RequestCounts
from sluice.errors import SluiceError
from sluice.gateway import idempotency
from sluice.gateway.batches.files import find_file
from sluice.gateway.batches.folder import Shared, limit_of, on_disk, page_of, seconds_of
from sluice.gateway.body import json_response
from sluice.gateway.caller import Caller
from sluice.gateway.errors import endpoint
from sluice.gateway.gateway import Gateway
from sluice.http_errors import ErrorForm
from sluice.interfaces.errors import ApiError

_PATH = "/v1/batches"
_ENDPOINTS: tuple[str, ...] = get_args(get_type_hints(Batch)["endpoint"])
_PRIVATE = ("host", "tenant", "input_file", "output_expires_s", "allowed_models")  # details that clients do not get


def routes(gateway: Gateway, shared: Shared, runs: "Runs") -> list[Route]:
    """Return the routes of batches."""

    async def create(request: Request) -> Response:
        caller = await gateway.authenticate(request)
        await shared.open()
        body = await gateway.read_body(request, caller, lambda content: (content, []))
        asked = _asked(body.content)
        if "batch" not in caller.lanes:
            raise ApiError(ErrorForm.LANE_NOT_ALLOWED, "this key may not use the lane batch.")
        run_id = f"batch_{uuid.uuid4().hex}"
        if (key := idempotency.key_of(request)) is not None:
            run_id = idempotency.job_id(caller, _PATH, key, "batch_")
        await caller.count_request()
        return await json_response(public(await runs.create(caller, run_id, asked)))

    async def list_runs(request: Request) -> Response:
        caller = await gateway.authenticate(request)
        await shared.open()
        limit, after = limit_of(request, 100, 20), request.query_params.get("after")
        page, has_more = await runs.page(caller, limit, after)
        # Of a hundred with a thousand problems each this takes half a second.
        shown = await on_disk(lambda: [public(batch) for batch in shared.with_problems(page)])
        return await json_response(page_of(shown, has_more=has_more))

    async def retrieve(request: Request) -> Response:
        caller = await gateway.authenticate(request)
        await shared.open()
        return await json_response(public(await runs.find(caller, request.path_params["id"])))

    async def cancel(request: Request) -> Response:
        caller = await gateway.authenticate(request)
        await shared.open()
        return await json_response(public(await runs.cancel(caller, request.path_params["id"])))

    return [
        Route(_PATH, endpoint(create), methods=["POST"]),
        Route(_PATH, endpoint(list_runs), methods=["GET"]),
        Route(f"{_PATH}/{{id}}", endpoint(retrieve), methods=["GET"]),
        Route(f"{_PATH}/{{id}}/cancel", endpoint(cancel), methods=["POST"]),
    ]


@dataclass(frozen=True, slots=True)
class NewRun:
    """What a request for a run says."""

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: Mapping[str, str] | None = None
    output_expires_s: int | None = None
    requests: int = 0  # their number, if it is known before the file is read


class Runs:
    """The runs of a folder, as their tenants may have them. All methods raise `ApiError`, and `create` and `cancel`
    `SluiceError`."""

    def __init__(self, gateway: Gateway, shared: Shared) -> None:
        self._gateway, self._shared = gateway, shared
        self._registry = BatchRegistry(gateway.client.redis)

    async def create(self, caller: Caller, run_id: str, asked: NewRun) -> Batch:
        """Hand a run over to the workers, unless one of this id was. Its status is announced first: what a crash leaves
        of it is a status without a run, which the folder does not have."""
        if (known := await on_disk(self._shared.find, caller.tenant, run_id)) is not None:
            return _same(known.batch, asked)
        file = await on_disk(find_file, self._shared.store, caller, asked.input_file_id, "input_file_id")
        state = self._state(caller, run_id, asked)
        await self._gateway.client.retries.run(lambda: self._registry.announce(state.batch))
        try:
            batch = await on_disk(self._place, caller, state, file)
        except ApiError:
            with suppress(SluiceError, RedisError):
                await self._gateway.client.retries.run(lambda: self._registry.withdraw(state.batch))
            raise
        return batch if batch is state.batch else _same(batch, asked)

    async def find(self, caller: Caller, run_id: str) -> Batch:
        """Return the present state of a run."""
        state = await on_disk(self._shared.find, caller.tenant, run_id)
        if state is None:
            message = f"there is no batch {run_id[:80]!r}."
            raise ApiError(ErrorForm.NOT_FOUND, message, param="id")
        (batch,) = await self._present([state.batch])
        return batch

    async def page(
        self, caller: Caller, limit: int, after: str | None, *, before: str | None = None, url: str | None = None
    ) -> tuple[list[Batch], bool]:
        """Return the runs that follow one, or are `before` one, the newest first; and True if there are more. `url`: of
        their endpoint; None: all."""
        found = await on_disk(self._shared.runs, caller.tenant)
        runs = [run for run in found if url in (None, run.endpoint)]
        if before is not None:
            rest = runs[: _place_of(before, runs, "before_id")]
            page, more = rest[max(len(rest) - limit, 0) :], len(rest) > limit
        else:
            start = 0 if after is None else _place_of(after, runs, "after") + 1
            page, more = runs[start : start + limit], len(runs) > start + limit
        return await self._present(page), more

    async def delete(self, caller: Caller, batch: Batch) -> None:
        """Remove a run that has ended: its status, its files, and those that clients have of it."""
        store = self._shared.store
        for file_id in filter(None, (batch.sluice.input_file, *result_ids(batch))):
            if (file := await on_disk(store.find, caller.tenant, file_id)) is not None:
                await on_disk(store.delete, caller.tenant, file)
        await on_disk(remove_run, self._shared.folder, batch.id)
        with suppress(SluiceError, RedisError):  # it expires
            await self._gateway.client.retries.run(lambda: self._registry.withdraw(batch))

    async def cancel(self, caller: Caller, run_id: str) -> Batch:
        """Request the cancellation of a run, and return its state."""
        batch = await self.find(caller, run_id)
        if batch.ended:
            message = f"{batch.id} cannot be cancelled: it is {batch.status}."
            raise ApiError(ErrorForm.CONFLICT, message, param="id")
        await self._gateway.client.retries.run(lambda: self._registry.request_cancel(batch.id))
        return batch if batch.status == "cancelling" else batch.enter("cancelling", time.time())

    def _state(self, caller: Caller, run_id: str, asked: NewRun) -> RunState:
        models = self._gateway.settings.model_map
        options = RunOptions(models, asked.completion_window, asked.metadata, id=run_id, tenant=caller.tenant)
        batch = new_batch(run_paths(self._shared.folder.running / run_id), options)
        details = replace(
            batch.sluice,
            input_file=asked.input_file_id,
            output_expires_s=asked.output_expires_s,
            allowed_models=None if caller.models is None else sorted(caller.models),
        )
        counts = RequestCounts(asked.requests, 0, 0)
        batch = replace(batch, sluice=details, request_counts=counts, endpoint=asked.endpoint)  # type: ignore[arg-type]
        return RunState(batch, "", models)

    def _place(self, caller: Caller, state: RunState, file: StoredFile) -> Batch:
        """Put the run into the inbox, unless another request with the same key just did. Blocks."""
        store, limit = self._shared.store, caller.batch_runs
        with store.locked(caller.tenant):  # so that the limit holds for runs that come at the same time
            if (known := self._shared.find(caller.tenant, state.batch.id)) is not None:
                return known.batch
            open_runs = [run for run in self._shared.runs(caller.tenant) if not run.ended]
            if limit is not None and len(open_runs) >= limit:
                message = f"This key may have {limit:,} batches that wait or run; wait for one, or cancel one."
                raise ApiError(ErrorForm.TOO_MANY_RUNS, message, retryable=False)
            place_run(self._shared.folder, state, store.data(caller.tenant, file.id))
        return state.batch

    async def _present(self, batches: Sequence[Batch]) -> list[Batch]:
        """Return the states with the counts that Redis has of them. Without Redis they are those of the folder."""
        ids = [batch.id for batch in batches if not batch.ended]
        told, asked_at = dict[str, Batch](), dict[str, float]()
        with suppress(RedisError, OSError, TimeoutError):
            async with asyncio.timeout(2.0):
                told = {run.id: run for run in await self._registry.read_all([keys.batch(id).encode() for id in ids])}
                asked_at = await self._registry.cancels_requested_at(ids)
        return [_newest(batch, told.get(batch.id), asked_at.get(batch.id)) for batch in batches]


def _newest(batch: Batch, told: Batch | None, cancel_asked_at: float | None) -> Batch:
    """Return the state of the folder, or what Redis has of a run that has not ended."""
    if told is not None and told.sluice.tenant == batch.sluice.tenant and not told.ended:
        batch = told
    if cancel_asked_at is not None and batch.status != "cancelling":
        batch = batch.enter("cancelling", cancel_asked_at)
    return batch


def _same(batch: Batch, asked: NewRun) -> Batch:
    """Return a run that a request finds by its `Idempotency-Key`. Raises `ApiError` if it asks for another."""
    found = NewRun(
        batch.sluice.input_file or "",
        batch.endpoint,
        batch.completion_window,
        batch.metadata,
        batch.sluice.output_expires_s,
    )
    if found != asked:
        raise ApiError(ErrorForm.IDEMPOTENCY_KEY_REUSED, "Idempotency-Key: it came with another body before.")
    return batch


def _place_of(run_id: str, runs: Sequence[Batch], param: str) -> int:
    place = next((place for place, run in enumerate(runs) if run.id == run_id), None)
    if place is None:
        raise ApiError(ErrorForm.INVALID_VALUE, f"{param}: there is no such batch.", param=param)
    return place


def public(batch: Batch) -> dict[str, Any]:
    """Return OpenAI's Batch object of a run, with ids of files in place of paths."""
    told = asdict(batch)
    output, errors = result_ids(batch)
    details = {name: value for name, value in told["sluice"].items() if name not in _PRIVATE}
    for problem in (told["errors"] or {"data": ()})["data"]:
        if problem["code"] == "refused":  # it names paths
            problem["message"] = "The files of this run were changed or cannot be read; its operator has the details."
    # OpenAI's clients require an input; a run that was submitted to the folder has none here.
    own = {"input_file_id": batch.sluice.input_file or "", "output_file_id": output, "error_file_id": errors}
    return {**told, **own, "sluice": details}


def _asked(body: Mapping[str, Any]) -> NewRun:
    """Read the body of a request for a run. Raises `ApiError`."""
    names = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")
    if unknown := next((name for name in body if name not in names), None):
        message = f"{unknown[:80]}: it is not a field of a batch; use {', '.join(names)}."
        raise ApiError(ErrorForm.UNSUPPORTED_PARAMETER, message, param=unknown[:80])
    for name in names[:3]:
        if not isinstance(body.get(name), str):
            form = ErrorForm.MISSING_PARAMETER if body.get(name) is None else ErrorForm.INVALID_TYPE
            raise ApiError(form, f"{name}: it must be a string.", param=name)
    if body["endpoint"] not in _ENDPOINTS:
        message = f"endpoint: it must be {' or '.join(_ENDPOINTS)}."
        raise ApiError(ErrorForm.UNSUPPORTED_VALUE, message, param="endpoint")
    try:
        RunOptions(completion_window=body["completion_window"])
    except ValueError as error:
        raise ApiError(ErrorForm.INVALID_VALUE, f"{error}.", param="completion_window") from None
    expires = body.get("output_expires_after")
    return NewRun(
        body["input_file_id"],
        body["endpoint"],
        body["completion_window"],
        _metadata(body.get("metadata")),
        None if expires is None else seconds_of(expires, "output_expires_after"),
    )


def _metadata(value: object) -> dict[str, str] | None:
    """Check the metadata of a run by OpenAI's limits. Raises `ApiError`."""
    match value:
        case None:
            return None
        case dict(pairs) if len(pairs) <= 16 and all(
            len(key) <= 64 and isinstance(text, str) and len(text) <= 512 for key, text in pairs.items()
        ):
            return pairs
    message = "metadata: it must be an object of at most 16 strings of 512 characters, with keys of 64."
    raise ApiError(ErrorForm.INVALID_VALUE, message, param="metadata")
