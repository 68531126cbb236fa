"""The contract as a backend needs it: key names, and events as plain dataclasses.

Equivalent to the daemon's `schemas`, which a backend must not import (it often has its own module of that name); a test
compares the two.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal, TypeVar

Lane = Literal["interactive", "batch"]
Function = Literal["chat", "count"]  # a kind of job
LANES: tuple[Lane, ...] = ("interactive", "batch")

MODEL_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}"
JOB_ID = r"[A-Za-z0-9._-]{1,128}"

TENANT_CHARACTERS = 128  # at most, as in `user` and `safety_identifier`
CACHE_KEY_CHARACTERS = 256  # at most
CONTROL = "sluice:control"
DEAD = "sluice:dead"
WORKERS = "sluice:worker:*"
BATCHES = "sluice:batch:*"
QUEUES = "sluice:queue:*"
CANCEL_S = 3600  # how long a cancel request is stored
JOB_LIFE_S = 86_400  # life of a job that has not ended: arq's default for a queued body
# For a job that a client ends: the defaults of SLUICE_LOG_TTL_S and SLUICE_RESULT_TTL_S.
LOG_TTL_S = 600
RESULT_TTL_S = 3600
WAITING = "waiting"  # the phase of the progress that a reader makes


def queue_key(model: str, lane: Lane) -> str:
    """Sorted set: ids of the queued and running jobs. The score is the time of submission in Unix milliseconds; a job
    whose score is in the future waits until then."""
    return f"sluice:queue:{model}:{lane}"


def parse_queue_key(key: bytes) -> tuple[str, Lane] | None:
    """Return the model and the lane; None if the key is not the key of a queue."""
    match = re.fullmatch(f"sluice:queue:({MODEL_NAME}):(interactive|batch)", key.decode("utf-8", "replace"))
    if match is None:
        return None
    return match[1], "batch" if match[2] == "batch" else "interactive"


def queue_problem(key: str) -> str | None:
    """Return why no worker takes jobs from a key that begins like a queue's, and what would be right; None for the key
    of a queue."""
    model, _, lane = key.removeprefix("sluice:queue:").partition(":")
    if not re.fullmatch(MODEL_NAME, model):
        return f"{model[:80]!r} is not the name of a model; a name matches {MODEL_NAME}"
    if lane in LANES:
        return None
    what = f"{lane[:80]!r} is not a lane" if lane else "it has no lane"
    return f"{what}; queue jobs in {queue_key(model, 'interactive')} or {queue_key(model, 'batch')}"


def log_key(job_id: str) -> str:
    """List: the job's events, as JSON."""
    return f"sluice:log:{job_id}"


def channel(job_id: str) -> str:
    """Pub/sub channel of the job's events."""
    return f"sluice:ch:{job_id}"


def result_key(job_id: str) -> str:
    """String: the job's stored result, as JSON."""
    return f"sluice:result:{job_id}"


def job_key(job_id: str) -> str:
    """Hash: the job's state and the fields that workers schedule by."""
    return f"sluice:job:{job_id}"


def cancel_key(job_id: str) -> str:
    """String: set while a request to cancel the job is stored."""
    return f"sluice:cancel:{job_id}"


def wake_channel(model: str) -> str:
    """Pub/sub channel that makes idle workers of the model check the queue."""
    return f"sluice:wake:{model}"


def model_key(model: str) -> str:
    """Hash: one field for each worker of the model, with its queue limit, its rate in jobs per second, and until when
    they are valid."""
    return f"sluice:model:{model}"


def batch_key(batch_id: str) -> str:
    """String: the status of an offline run, as JSON."""
    return f"sluice:batch:{batch_id}"


def batch_channel(batch_id: str) -> str:
    """Pub/sub channel of the status changes of an offline run."""
    return f"sluice:batch:{batch_id}"


def batch_cancel_key(batch_id: str) -> str:
    """String: set if the cancellation of the run is requested."""
    return f"sluice:batch:{batch_id}:cancel"


def body_key(job_id: str) -> str:
    """String: the body of a queued or running job, in arq's format."""
    return f"arq:job:{job_id}"


def check_model_name(name: str) -> None:
    """Check a model name. Raises ValueError if `MODEL_NAME` does not match."""
    if not re.fullmatch(MODEL_NAME, name):
        raise ValueError(f"a model name must match {MODEL_NAME}, and {name!r} does not")


def check_job_id(job_id: str) -> None:
    """Check a job id. Raises ValueError if `JOB_ID` does not match."""
    if not re.fullmatch(JOB_ID, job_id):
        raise ValueError(f"a job id must match {JOB_ID}, and {job_id!r} does not")


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a job."""

    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    image_tokens: int | None = None
    kept_tokens: int | None = None
    reasoning_tokens: int | None = None
    accepted_prediction_tokens: int | None = None
    rejected_prediction_tokens: int | None = None


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations in seconds, and the decode rate in tokens per second."""

    queue_s: float
    prefill_s: float
    ttft_s: float
    decode_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class JobError:
    """Why a job failed; `retryable` is True if the same request may succeed later. `param` is the field of the request
    that caused it, if the worker names one."""

    type: str
    message: str
    retryable: bool
    param: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Fields common to all events. `seq` counts the job's events over all attempts, from 0; `ts` is in Unix seconds."""

    type: str
    id: str
    seq: int
    attempt: int
    ts: float

    @property
    def final(self) -> bool:
        """True for the last event of a job."""
        return self.type in ("finished", "failed", "cancelled")

    @property
    def stored(self) -> bool:
        """True for the events of workers; False for one that the reader itself made, which has no `seq` of its own."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Event):
    """The first attempt has started."""

    model: str
    fingerprint: str
    worker: str
    seed: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Started):
    """A new attempt continues after the tokens already delivered."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted(Started):
    """A new attempt starts over: discard the text received so far."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Event):
    """Progress before the first token: `done` of `total` tokens of the phase.

    The phase `waiting` is made by the reader when the last live worker of the model has gone, and when one has come
    back; `workers` is then their number, and `seq` that of the last event that this reader has (-1: none).
    """

    phase: str
    done: int
    total: int
    workers: int | None = None

    @property
    def stored(self) -> bool:
        return self.phase != WAITING


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta(Event):
    """New tokens, and the text that became final with them."""

    token_ids: tuple[int, ...]
    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Any], ...] | None = None
    logprobs: tuple[dict[str, Any], ...] | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Event):
    """The job completed."""

    finish_reason: str
    usage: Usage
    timings: Timings
    stop_sequence: str | None = None  # the stop string that ended the answer


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Event):
    """The job ended with an error."""

    error: JobError
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled(Event):
    """The job was cancelled."""

    reason: str
    usage: Usage


EVENTS: dict[str, type[Event]] = {
    "started": Started,
    "progress": Progress,
    "delta": Delta,
    "resumed": Resumed,
    "restarted": Restarted,
    "finished": Finished,
    "failed": Failed,
    "cancelled": Cancelled,
}
_NESTED: dict[str, type[Usage] | type[Timings] | type[JobError]] = {
    "usage": Usage,
    "timings": Timings,
    "error": JobError,
}

D = TypeVar("D")


def parse_event(raw: bytes | str) -> Event:
    """Parse an event. Unknown fields are dropped, and an unknown event type becomes a bare `Event`.

    Raises ValueError if `raw` is not an event of a worker.
    """
    try:
        return _parse_event(json.loads(raw))
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"no event: {type(error).__name__} at {error}") from None


def _parse_event(event: Any) -> Event:
    match event:
        case {"type": str(), "id": str(), "seq": int(), "attempt": int(), "ts": int() | float()}:
            pass
        case _:
            raise ValueError("no event: type, id, seq, attempt or ts is absent or of another type")
    for name, nested in _NESTED.items():
        if name in event:
            event[name] = parse_as(nested, event[name])
    for name, value in event.items():
        if isinstance(value, list):
            event[name] = tuple(value)
    return parse_as(EVENTS.get(event["type"], Event), event)


def parse_as(cls: type[D], values: Mapping[str, Any]) -> D:
    """Create a `cls` from a mapping, dropping unknown fields."""
    return cls(**{name: values[name] for name in _names(cls) if name in values})  # type: ignore[arg-type]


@cache
def _names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))
