"""The routes of chat completions."""

import asyncio
import hashlib
import re
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sluice.gateway import committed
from sluice.gateway.body import json_response, told
from sluice.gateway.caller import Caller
from sluice.gateway.chat.stream import answer_frames, completion_of, error_frame, outcome_of, seen_by
from sluice.gateway.errors import ApiError, endpoint
from sluice.gateway.fields import flag, refusal
from sluice.gateway.gateway import Gateway
from sluice.gateway.idempotency import expired
from sluice.gateway.jobs import AnswerJobs, Available, StoredAnswer, unknown
from sluice.gateway.monitoring import AnswerTimer, identify
from sluice.gateway.sse import unless_disconnected
from sluice.gateway.tools import RequestTools, read_chat_tools
from sluice.gateway.workers import requested_model
from sluice.http_errors import ErrorForm
from sluice.openai import wants_usage

ID_PREFIX = "chatcmpl-"
MAX_CHOICES = 128  # OpenAI's
_SEVERAL = re.compile(rf"{ID_PREFIX}[0-9a-f]{{32}}-n(\d{{1,3}})")


@dataclass(frozen=True, slots=True)
class _ChatFields:
    """The fields of a request that the gateway handles itself. `body` is the request of one choice, without `n`."""

    body: dict[str, Any]
    choices: int
    stream: bool
    include_usage: bool
    tools: RequestTools

    def choice(self, index: int) -> dict[str, Any]:
        """Return the request of a choice: with a seed of its own, if the request has one."""
        seed = self.body.get("seed")
        if index == 0 or type(seed) is not int:
            return self.body
        return {**self.body, "seed": _derived(seed, index)}


def read_request(body: Mapping[str, Any], length: int, max_bytes: int) -> _ChatFields:
    """Read a request whose body has `length` bytes. Raises `ApiError`; the worker checks all other fields."""
    choices = 1 if body.get("n") is None else body["n"]
    if type(choices) is not int or not 1 <= choices <= MAX_CHOICES:
        raise refusal("n", f"it must be a whole number from 1 to {MAX_CHOICES}.")
    if choices > 1 and choices * length > max_bytes:
        message = f"n: {choices} choices of a body of {length:,} bytes exceed {max_bytes:,} bytes; ask for fewer."
        raise ApiError(ErrorForm.BODY_TOO_LARGE, message, param="n")
    stream = flag(body.get("stream"), "stream", False)
    one, tools = read_chat_tools({name: value for name, value in body.items() if name != "n"})
    return _ChatFields(one, choices, stream, wants_usage(body), tools)


def _derived(seed: int, index: int) -> int:
    digest = hashlib.blake2b(f"{seed}:{index}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, signed=True)


def job_ids(base: str, choices: int) -> list[str]:
    """Return the ids of the choices' jobs, all of which follow from the first: `base`, or `base-n3`, `base-n3.1`, …"""
    if choices == 1:
        return [base]
    first = f"{base}-n{choices}"
    return [first, *(f"{first}.{index}" for index in range(1, choices))]


def job_ids_of(first: str) -> list[str]:
    """Return the ids of the jobs of an answer, from the id of the first one."""
    several = _SEVERAL.fullmatch(first)
    return job_ids(first.rpartition("-n")[0], int(several[1])) if several else [first]


_PATH = "/v1/chat/completions"


def routes(gateway: Gateway) -> list[Route]:
    """Return the routes of chat completions."""
    chat = _Chat(gateway)
    return [
        Route(_PATH, endpoint(chat.create), methods=["POST"]),
        Route(f"{_PATH}/{{id}}", endpoint(chat.retrieve)),
        Route(f"{_PATH}/{{id}}/stream", endpoint(chat.resume)),
        Route(f"{_PATH}/{{id}}/cancel", endpoint(chat.cancel), methods=["POST"]),
        Route("/v1/completions", endpoint(chat.refuse_raw_prompt), methods=["POST"]),
    ]


@dataclass(frozen=True, slots=True)
class _Accepted:
    """A request whose jobs are queued. It holds nothing of the body."""

    jobs: AnswerJobs
    model: str  # as the request names it
    stream: bool
    include_usage: bool
    tools: RequestTools
    ignored: tuple[str, ...] = ()


class _Chat:
    """Answers requests for chat completions."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    async def create(self, request: Request) -> Response:
        """Answer `POST /v1/chat/completions`."""
        started = time.monotonic()
        accepted = await self._accept(request)
        jobs = accepted.jobs
        identify(request, jobs.ids[0])
        timer = self._gateway.timer(accepted.model, started, stream=accepted.stream)
        if accepted.stream:
            source = answer_frames(
                jobs.ids,
                partial(self._gateway.jobs.events, timer=timer),
                include_usage=accepted.include_usage,
                tools=accepted.tools,
                ignored=accepted.ignored,
            )
            return await self._gateway.stream(request, jobs, source, error_frame=error_frame)
        results = await self._gateway.whole(request, jobs, self._results(jobs, timer))
        return await json_response(told(completion_of(results, accepted.tools), accepted.ignored))

    async def _accept(self, request: Request) -> _Accepted:
        """Read a request, and queue its jobs or join those that it has queued before."""
        caller = await self._gateway.authenticate(request)
        body = await self._gateway.read_body(request, caller, committed.chat)
        chat = read_request(body.content, body.length, self._gateway.settings.max_body_bytes)
        caller.count_choices(chat.choices)
        caller.held.add((chat.choices - 1) * body.length)  # each job has the whole body

        async def submit(jobs: AnswerJobs) -> None:
            bodies = {job_id: chat.choice(index) for index, job_id in enumerate(jobs.ids)}
            await self._gateway.submission.submit(caller, bodies, jobs)

        async def join(jobs: AnswerJobs, stored: StoredAnswer) -> None:
            """Hold what the server has of the answer. Raises `ApiError` 410 if that has expired."""
            match stored.available:
                case Available.NOTHING:
                    raise expired("the answer has expired; use a new key to have it computed again.")
                case Available.RESULT if chat.stream:
                    raise expired(f"the events of the answer have expired; get it at {_PATH}/{jobs.ids[0]}.")
            caller.held.release()
            caller.held.add(stored.event_bytes if chat.stream or not jobs.has_key else stored.result_bytes)

        jobs, _ = await unless_disconnected(
            request,
            self._gateway.accept(
                request,
                caller,
                body,
                _PATH,
                f"{ID_PREFIX}{uuid.uuid4().hex}",
                submit=submit,
                join=join,
                ids_of=partial(job_ids, choices=chat.choices),
                continues=chat.body.get("on_disconnect") == "continue",
            ),
        )
        model = requested_model(chat.body)
        return _Accepted(jobs, model, chat.stream, chat.include_usage, chat.tools, body.ignored)

    async def _results(self, jobs: AnswerJobs, timer: AnswerTimer | None = None) -> Sequence[dict[str, Any]]:
        """Return the results of all jobs."""
        tasks = [asyncio.create_task(self._gateway.jobs.result(job_id, timer=timer)) for job_id in jobs.ids]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def retrieve(self, request: Request) -> Response:
        """Answer `GET /v1/chat/completions/{id}`: the whole answer, as soon as it has ended."""
        caller, jobs = await self._known(request)
        caller.count_choices(len(jobs.ids))
        await caller.count_request()
        stored = await self._gateway.jobs.stored(jobs.ids)
        if stored.available is Available.NOTHING:
            raise unknown(jobs.ids[0])
        caller.held.add(stored.result_bytes)
        return await json_response(completion_of(await self._gateway.whole(request, jobs, self._results(jobs))))

    async def resume(self, request: Request) -> Response:
        """Answer `GET /v1/chat/completions/{id}/stream`: the stream after the events that `Last-Event-ID` names."""
        caller, jobs = await self._known(request)
        caller.count_choices(len(jobs.ids))
        stored = await self._gateway.jobs.stored(jobs.ids)
        match stored.available:
            case Available.NOTHING:
                raise unknown(jobs.ids[0])
            case Available.RESULT:
                raise expired(f"the events of the answer have expired; get it at {_PATH}/{jobs.ids[0]}.", "id")
        caller.held.add(stored.event_bytes)
        seen = seen_by(request.headers.get("last-event-id"), len(jobs.ids))
        include_usage = request.query_params.get("include_usage") == "true"
        source = answer_frames(jobs.ids, self._gateway.jobs.events, include_usage=include_usage, seen=seen)
        return await self._gateway.stream(request, jobs, source, error_frame=error_frame)

    async def cancel(self, request: Request) -> Response:
        """Answer `POST /v1/chat/completions/{id}/cancel`."""
        _, jobs = await self._known(request)
        outcomes = [await self._gateway.client.cancel(job_id) for job_id in jobs.ids]
        return JSONResponse({"id": jobs.ids[0], "outcome": outcome_of(outcomes)})

    async def refuse_raw_prompt(self, request: Request) -> Response:
        """Answer `POST /v1/completions`. Raises `ApiError` 400, and 401 without a valid key."""
        await self._gateway.authenticate(request)
        message = (
            "/v1/completions is not supported: workers put every prompt into a chat template. Use /v1/chat/completions."
        )
        raise ApiError(ErrorForm.UNSUPPORTED, message)

    async def _known(self, request: Request) -> tuple[Caller, AnswerJobs]:
        """Return the caller, and the jobs that the path names. Raises `ApiError` unless they are the caller's."""
        caller = await self._gateway.authenticate(request)
        ids = job_ids_of(request.path_params["id"])
        await self._gateway.jobs.check_owner(caller, ids[0])
        identify(request, ids[0])
        return caller, AnswerJobs(ids, detached=True)
