"""Chat completions: their routes, and the events of an answer's jobs as server-sent events in OpenAI's form."""

import asyncio
import hashlib
import re
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from sluice.cancellation import CancelOutcome
from sluice.contract.events import Event, Finished, Progress
from sluice.gateway import sse
from sluice.gateway.body import json_response
from sluice.gateway.caller import Caller
from sluice.gateway.errors import endpoint
from sluice.gateway.gateway import Gateway
from sluice.gateway.idempotency import expired
from sluice.gateway.jobs import AnswerJobs, Available, StoredAnswer, unknown
from sluice.gateway.monitoring import AnswerTimer, identify
from sluice.gateway.sse import unless_disconnected
from sluice.http_errors import ErrorForm
from sluice.interfaces import committed
from sluice.interfaces.committed import told
from sluice.interfaces.errors import ApiError, openai_body
from sluice.interfaces.fields import flag, refusal, requested_model
from sluice.interfaces.tools import CustomCalls, RequestTools, read_chat_tools, with_custom_calls
from sluice.openai import Answer, usage_of, wants_usage
from sluice.streaming import LAST_SEQ

Events = Callable[[str], AsyncGenerator[Event]]  # the events of a job, from the first


async def answer_frames(
    job_ids: Sequence[str],
    events: Events,
    *,
    include_usage: bool,
    seen: Sequence[int] = (),
    tools: RequestTools | None = None,
    ignored: Sequence[str] = (),
) -> AsyncGenerator[bytes]:
    """Yield the frames of an answer with a choice for each job, without those of the events of each job up to `seen`.
    `tools`: of the request, for the calls of its custom ones; `ignored`: what was left out of it, for the first frame.

    The id of a frame is the position in each job's events. Raises as `Answer.chunks` and `Jobs.events` do.
    """
    seen = seen or [-1] * len(job_ids)
    position = list(seen)
    answers = [Answer(include_usage=include_usage, index=i, id=job_ids[0]) for i in range(len(job_ids))]
    calls = [CustomCalls(tools or RequestTools()) for _ in job_ids]
    finished: dict[int, Finished] = {}
    async with aclosing(interleaved([events(job_id) for job_id in job_ids])) as merged_events:
        async for index, event in merged_events:
            if isinstance(event, Progress) and not event.stored:
                yield sse.waiting(event)
                continue
            chunks = [calls[index].in_chunk(chunk) for chunk in answers[index].chunks(event)]
            if event.seq > seen[index]:
                position[index] = event.seq
                for chunk in chunks:  # one at most
                    yield sse.frame(told(chunk, ignored), id=_id(position))
                    ignored = ()
            if isinstance(event, Finished):
                finished[index] = event
    if include_usage:
        usage = total_usage([usage_of(finished[index].usage) for index in range(len(job_ids))])
        yield sse.frame(answers[0].usage_chunk(usage))
    yield sse.DONE


def _id(position: Sequence[int]) -> str:
    return ".".join(map(str, position))


def seen_by(last_event_id: str | None, jobs: int) -> list[int]:
    """Return the last event of each job that the client has, by its `Last-Event-ID`; -1 for none. Raises `ApiError` 400
    for an id that no frame of these jobs has."""
    if not last_event_id:
        return [-1] * jobs
    if not re.fullmatch(r"(?:-1|\d{1,16})(?:\.(?:-1|\d{1,16}))*", last_event_id, re.ASCII):
        raise sse.bad_last_event_id()
    seqs = [int(seq) for seq in last_event_id.split(".")]
    if len(seqs) != jobs or not 0 <= max(seqs) <= LAST_SEQ:
        raise sse.bad_last_event_id()
    return seqs


def error_frame(error: ApiError) -> bytes:
    """Return the last frame of a stream that failed; OpenAI clients raise it."""
    return sse.frame(openai_body(error))


T = TypeVar("T")


async def interleaved(sources: Sequence[AsyncGenerator[T]]) -> AsyncGenerator[tuple[int, T]]:
    """Yield the items of all sources as they come, each with the index of its source.

    Raises the first error of a source. Closes all sources at the end.
    """
    if len(sources) == 1:
        async with aclosing(sources[0]):
            async for only in sources[0]:
                yield 0, only
        return
    # A reader that has ended is itself the last item of its source.
    items = asyncio.Queue[tuple[int, T] | asyncio.Task[None]]()
    room = asyncio.Semaphore(64)  # items read ahead of a slow consumer
    readers = [asyncio.create_task(_read(index, source, items, room)) for index, source in enumerate(sources)]
    for reader in readers:
        reader.add_done_callback(items.put_nowait)
    try:
        running = len(readers)
        while running:
            item = await items.get()
            if isinstance(item, asyncio.Task):
                item.result()
                running -= 1
            else:
                room.release()
                yield item
    finally:
        for reader in readers:
            reader.cancel()
        await asyncio.gather(*readers, return_exceptions=True)


async def _read(
    index: int,
    source: AsyncGenerator[T],
    items: "asyncio.Queue[tuple[int, T] | asyncio.Task[None]]",
    room: asyncio.Semaphore,
) -> None:
    async with aclosing(source):
        async for item in source:
            await room.acquire()
            items.put_nowait((index, item))


UsageFields = Mapping[str, Any]


def completion_of(results: Sequence[Mapping[str, Any]], tools: RequestTools | None = None) -> dict[str, Any]:
    """Return one completion with a choice for each result; one result is returned unchanged, but for the calls of
    custom tools."""
    if tools is not None and tools.targets:
        results = [with_custom_calls(result, tools) for result in results]
    first = dict(results[0])
    if len(results) == 1:
        return first
    choices = [{**result["choices"][0], "index": index} for index, result in enumerate(results)]
    ours = {"choices": [result.get("sluice") for result in results]}
    return {**first, "choices": choices, "usage": total_usage([result["usage"] for result in results]), "sluice": ours}


def outcome_of(outcomes: Sequence[CancelOutcome]) -> CancelOutcome:
    """Return the outcome of cancelling all choices: "requested" while one runs, "ended" if all had ended before."""
    order: Sequence[CancelOutcome] = ("requested", "cancelled", "ended")
    return next(outcome for outcome in order if outcome in outcomes)


def total_usage(usages: Sequence[UsageFields]) -> dict[str, Any]:
    """Return the usage of all choices: the prompt's of the first, since it is the same, and the sum of the rest."""
    first = dict(usages[0])
    if len(usages) == 1:
        return first
    completion = sum(usage["completion_tokens"] for usage in usages)
    details = _sums([usage.get("completion_tokens_details") or {} for usage in usages])
    total = {"completion_tokens": completion, "total_tokens": first["prompt_tokens"] + completion}
    return {**first, **total, **({"completion_tokens_details": details} if details else {})}


def _sums(counts: Sequence[UsageFields]) -> dict[str, Any]:
    names = dict.fromkeys(name for each in counts for name in each)
    return {name: sum(each.get(name) or 0 for each in counts) for name in names}


ID_PREFIX = "chatcmpl-"
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


def read_chat_request(body: Mapping[str, Any], length: int, max_bytes: int) -> _ChatFields:
    """Read a request whose body has `length` bytes. Raises `ApiError`; the worker checks all other fields."""
    choices = 1 if body.get("n") is None else body["n"]
    if type(choices) is not int or not 1 <= choices <= 128:
        raise refusal("n", "it must be a whole number from 1 to 128.")  # as OpenAI's
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
        chat = read_chat_request(body.content, body.length, self._gateway.settings.max_body_bytes)
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
