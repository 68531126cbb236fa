"""A job's events in OpenAI's format, for a backend that serves OpenAI clients.

    lines = await openai.sse(openai.chunks(client.stream(job.id)))
    return StreamingResponse(lines, media_type="text/event-stream")

OpenAI has no field for reasoning. It is sent as `reasoning`, next to `content`, as in Sluice's results and in vLLM.
"""

import json
import math
import re
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any, NoReturn

from redis.exceptions import RedisError

from sluice.contract.events import (
    Cancelled,
    Delta,
    Event,
    Failed,
    Finished,
    JobError,
    Progress,
    Restarted,
    Started,
    Usage,
)
from sluice.contract.keys import DEFAULT_MODEL, MODEL_NAME
from sluice.contract.refusals import reason_of
from sluice.errors import (
    JobCancelled,
    JobFailed,
    NoWorker,
    QueueFull,
    ServerFull,
    ServerUnreachable,
    SluiceError,
    UnknownJob,
)
from sluice.http_errors import ErrorForm
from sluice.wording import cancelled_sentence, full_sentence, json_problem

Chunk = dict[str, Any]  # a `chat.completion.chunk`

# By the type of a failed job.
_OF_JOBS = {
    str(form.code): form
    for form in (
        ErrorForm.INVALID_REQUEST, ErrorForm.UNSUPPORTED, ErrorForm.TOO_LARGE, ErrorForm.OVERLOADED, ErrorForm.DEADLINE,
        ErrorForm.INTERNAL,
    )
}  # fmt: skip
WORKER_RETRY_S = 5.0  # until a worker may have changed it: one that restarts loads its model, jobs that end free memory


class JobRestarted(SluiceError):
    """The job restarts on another worker, and OpenAI's format cannot retract the streamed text.

    The job itself continues: `client.result` returns the whole answer.
    """


class BadRequest(SluiceError):
    """The body of the HTTP request cannot be queued; `param` is the invalid field, or None."""

    def __init__(self, message: str, param: str | None = None) -> None:
        super().__init__(message, param)
        self.message = message
        self.param = param

    def __str__(self) -> str:
        return self.message


def read_body(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of an HTTP body, with a `model` that is a valid queue name. Raises `BadRequest`.

    The worker validates all other fields.
    """
    body = read_object(raw)
    model = DEFAULT_MODEL if body.get("model") is None else body["model"]
    if not isinstance(model, str) or not re.fullmatch(MODEL_NAME, model):
        raise BadRequest(f"model: it must be a name that matches {MODEL_NAME}.", "model")
    return {**body, "model": model}


def read_object(raw: bytes) -> dict[str, Any]:
    """Return the JSON object of an HTTP body. Raises `BadRequest`."""
    try:
        body = json.loads(raw, parse_constant=_refuse_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise BadRequest(f"The body is not JSON: {json_problem(error)}.") from None
    if not isinstance(body, dict):
        raise BadRequest("The body must be a JSON object.")
    return body


def wants_usage(body: Mapping[str, Any]) -> bool:
    """Return True if the request's `stream_options` set `include_usage`."""
    options = body.get("stream_options")
    return isinstance(options, dict) and options.get("include_usage") is True


def _finite(digits: str) -> float:
    if not math.isfinite(value := float(digits)):
        raise ValueError(f"{digits[:20]} is larger than any float")
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON value")


async def chunks(events: AsyncGenerator[Event], *, include_usage: bool = False) -> AsyncGenerator[Chunk]:
    """Yield the chunks of a whole job, from its first event; closes `events`. Progress and resumption yield no chunk,
    but after the first one: if the last live worker goes, if one comes back, and while the model is loaded again, a
    chunk with an empty delta and `"sluice": {"phase": "waiting", "workers": ...}`. `sse` makes a comment of it.

    `include_usage` is that of OpenAI's `stream_options`. Raises `JobFailed`, `JobCancelled`, `JobRestarted`, and every
    error of the stream of events.
    """
    answer = Answer(include_usage=include_usage)
    async with aclosing(events):
        async for event in events:
            for chunk in answer.chunks(event):
                yield chunk
            if include_usage and isinstance(event, Finished):
                yield answer.usage_chunk(usage_of(event.usage))


async def sse(chunks: AsyncGenerator[Chunk]) -> AsyncGenerator[str]:
    """Return the body of the HTTP response, as server-sent events. Waits for the first chunk, until the job starts.

    An error before that is raised here, while an HTTP status can still be chosen: see `error_reply`. A later error is
    sent in the stream, and OpenAI clients raise it.
    """
    return _lines(await anext(chunks), chunks)


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """An HTTP error response; the headers tell OpenAI clients if and when to retry."""

    status: int
    body: dict[str, Any]
    headers: dict[str, str]
    form: ErrorForm


def error_reply(error: SluiceError) -> ErrorReply:
    """Return the HTTP response for an error of `read_body`, `Client.submit` or `sse`."""
    match error:
        case BadRequest(param=param):
            return _reply(ErrorForm.INVALID_REQUEST, str(error), retryable=False, param=param)
        case NoWorker(served=()):  # the workers may be restarting
            return _reply(ErrorForm.OVERLOADED, full_sentence(str(error)), retryable=True, wait_s=WORKER_RETRY_S)
        case NoWorker():
            return _reply(ErrorForm.MODEL_NOT_FOUND, full_sentence(str(error)), retryable=False, param="model")
        case JobFailed(error=failed) if exceeds_context(failed):
            place = failed.param or "messages"
            return _reply(ErrorForm.CONTEXT_EXCEEDED, failed.message, retryable=False, param=place)
        case JobFailed(error=JobError("invalid_request", message, False, str(param))) if is_of_image(param):
            return _reply(ErrorForm.BAD_IMAGE, message, retryable=False, param=param)
        case JobFailed(error=failed):
            form = _OF_JOBS.get(failed.type, ErrorForm.INTERNAL)
            wait_s = WORKER_RETRY_S if failed.type == "overloaded" else None
            return _reply(
                form, failed.message, retryable=failed.retryable, wait_s=wait_s, param=failed.param, code=failed.type
            )
        case JobCancelled(reason=reason):
            return _reply(ErrorForm.CANCELLED, cancelled_sentence(reason), retryable=False)
        case UnknownJob():
            return _reply(ErrorForm.UNKNOWN_JOB, full_sentence(str(error)), retryable=False)
        case QueueFull(retry_after_s=wait_s):
            return _reply(ErrorForm.OVERLOADED, full_sentence(str(error)), retryable=True, wait_s=wait_s)
        case ServerFull() | ServerUnreachable():
            wait_s = WORKER_RETRY_S if isinstance(error, ServerFull) else None
            return _reply(ErrorForm.OVERLOADED, _queue_sentence(error), retryable=True, wait_s=wait_s)
    return _reply(ErrorForm.INTERNAL, str(error), retryable=True)


def exceeds_context(error: JobError) -> bool:
    """Return True if the text of the prompt is too long, so that a shorter conversation would be answered. That is not
    so for an option or an image, which is sent with the request that compacts, too. A worker names no field if the
    whole request does not fit."""
    place = error.param or "messages"
    return error.type == "too_large" and place.startswith("messages") and not is_of_image(place)


def is_of_image(param: str | None) -> bool:
    """Return True if an error is of an image, by the field that it names."""
    return param is not None and param.endswith(".image_url")


def _queue_sentence(error: ServerFull | ServerUnreachable) -> str:
    if reason := reason_of(error):
        return f"The server of the queue takes no request at the moment: {reason}."
    return "The queue does not answer at the moment."


class Answer:
    """Turns the events of one job, from its first one, into the chunks of one choice."""

    def __init__(self, *, include_usage: bool = False, index: int = 0, id: str | None = None) -> None:
        """`index`: that of the choice. `id`: the answer's, if it is not the job's, as with several choices."""
        self._include_usage = include_usage
        self._index = index
        self._id = id
        self._head: Chunk = {}  # fields common to all chunks
        self._sent_text = False

    def chunks(self, event: Event) -> list[Chunk]:
        """Return the chunks of an event, without the usage. Raises `JobFailed`, `JobCancelled`, `JobRestarted`."""
        match event:
            case Restarted() if self._sent_text:
                raise JobRestarted("the job starts over on another worker; the text streamed so far is invalid")
            case Started():
                return self._first_chunks(event)
            case Delta():
                return self._delta_chunks(event)
            case Progress(stored=False) if self._head:
                fields = "phase", "workers", "done", "total"
                return [{**self._chunk({}), "sluice": {name: getattr(event, name) for name in fields}}]
            case Finished():
                chunk = self._chunk({}, finish_reason=event.finish_reason)
                return [{**chunk, "sluice": {"warnings": event.warnings}} if event.warnings else chunk]
            case Failed():
                raise JobFailed(event.error)
            case Cancelled():
                raise JobCancelled(event.reason)
        return []

    def _first_chunks(self, event: Started) -> list[Chunk]:
        if self._head:  # a later attempt
            self._head["system_fingerprint"] = event.fingerprint
            return []
        self._head = {
            "id": self._id or event.id,
            "object": "chat.completion.chunk",
            "created": int(event.ts),
            "model": event.model,
            "system_fingerprint": event.fingerprint,
        }
        return [self._chunk({"role": "assistant"})]

    def _delta_chunks(self, event: Delta) -> list[Chunk]:
        parts = {"reasoning": event.reasoning, "content": event.content, "tool_calls": list(event.tool_calls or ())}
        delta = {name: value for name, value in parts.items() if value}
        if not delta and not event.logprobs:
            return []  # the text of these tokens is not final yet
        self._sent_text = True
        logprobs = {"content": list(event.logprobs), "refusal": None} if event.logprobs else None
        return [self._chunk(delta, logprobs=logprobs)]

    def usage_chunk(self, usage: Mapping[str, Any]) -> Chunk:
        """Return the chunk without choices that ends a stream with `include_usage`."""
        return {**self._head, "choices": [], "usage": usage}

    def _chunk(
        self, delta: dict[str, Any], *, logprobs: dict[str, Any] | None = None, finish_reason: str | None = None
    ) -> Chunk:
        choice = {"index": self._index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}
        no_usage = {"usage": None} if self._include_usage else {}
        return {**self._head, "choices": [choice], **no_usage}


def usage_of(usage: Usage) -> dict[str, Any]:
    """Return a job's usage in the format of the stored result."""
    images = {} if usage.image_tokens is None else {"image_tokens": usage.image_tokens}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens, **images},
        **_completion_details(usage),
    }


def _completion_details(usage: Usage) -> dict[str, Any]:
    names = "reasoning_tokens", "accepted_prediction_tokens", "rejected_prediction_tokens"
    counts = {name: tokens for name in names if (tokens := getattr(usage, name)) is not None}
    return {"completion_tokens_details": counts} if counts else {}


async def _lines(first: Chunk, rest: AsyncGenerator[Chunk]) -> AsyncGenerator[str]:
    async with aclosing(rest):
        yield _line(first)
        try:
            async for chunk in rest:
                yield _line(chunk)
        except SluiceError as error:
            yield _line(error_reply(error).body)
        except RedisError:
            message = "The server of the queue refused a request; the backend's log says why."
            yield _line(_reply(ErrorForm.INTERNAL, message, retryable=False).body)
            raise
        else:
            yield "data: [DONE]\n\n"


def waiting_comment(phase: str, workers: int, done: int, total: int) -> str:
    """Return the comment of a stream whose job waits for a worker, or until it has loaded its model, without the empty
    line that would end an event."""
    share = f", {done} of {total} bytes" if total else ""
    return f": {phase}, workers={workers}{share}\n"


def _line(message: dict[str, Any]) -> str:
    match message:
        case {"sluice": {"phase": str(phase), "workers": int(workers), "done": int(done), "total": int(total)}}:
            return waiting_comment(phase, workers, done, total)
    return f"data: {json.dumps(message, separators=(',', ':'))}\n\n"


def _reply(
    form: ErrorForm,
    message: str,
    *,
    retryable: bool,
    wait_s: float | None = None,
    param: str | None = None,
    code: str | None = None,
) -> ErrorReply:
    """`code`: that of a later worker, of which the form knows nothing."""
    error = {"message": f"{form.begins}{message}", "type": form.type, "param": param, "code": code or form.code}
    wait = {} if wait_s is None else {"retry-after": str(max(1, math.ceil(wait_s)))}
    return ErrorReply(form.status, {"error": error}, {"x-should-retry": str(retryable).lower(), **wait}, form)
