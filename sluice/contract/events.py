"""A job's events: each is one JSON object, in a list and on a channel. `seq` is the index in the list.

The JSON Schema is made of these classes: the text below a field describes it there, and its metadata bound it.
"""

import json
import types
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cache
from typing import Any, Literal, TypeVar, cast, get_args, get_origin, get_type_hints

FinishReason = Literal["stop", "length", "tool_calls"]
ErrorType = Literal["invalid_request", "unsupported", "too_large", "overloaded", "deadline", "internal"]
ProgressPhase = Literal["waiting", "loading", "encoding", "scoring", "prefill"]
FinalType = Literal["finished", "failed", "cancelled"]
FINAL: tuple[FinalType, ...] = get_args(FinalType)
COUNT: dict[str, Any] = {"ge": 0}  # of a field: its least value


def _says(text: str) -> dict[str, Any]:
    """Describe a field for the classes that inherit it, which do not inherit the text below it."""
    return {"description": text}


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a job."""

    prompt_tokens: int = field(metadata=COUNT)
    completion_tokens: int = field(metadata=COUNT)
    """Sampled tokens: the sum of all `token_ids`."""
    cached_tokens: int = field(metadata=COUNT)
    """Prompt tokens taken from the prefix cache."""
    image_tokens: int | None = field(default=None, metadata=COUNT)
    """Prompt tokens that stand for images; absent if there were none."""
    kept_tokens: int | None = field(default=None, metadata=COUNT)
    """Prompt tokens that SpecPrefill kept; absent if it did not apply."""
    reasoning_tokens: int | None = field(default=None, metadata=COUNT)
    """Answer tokens of the reasoning, with its markers; absent if the model has no markers around it."""
    accepted_prediction_tokens: int | None = field(default=None, metadata=COUNT)
    """Answer tokens that the request's `prediction` held; absent without a prediction."""
    rejected_prediction_tokens: int | None = field(default=None, metadata=COUNT)
    """Tokens of the prediction that were tried in vain; absent without a prediction."""


@dataclass(frozen=True, slots=True)
class Timings:
    """Durations in seconds, and the decode rate in tokens per second."""

    queue_s: float
    """From submission to this attempt's claim."""
    prefill_s: float
    """From the claim to the end of the prompt."""
    ttft_s: float
    """From the claim to the first token."""
    decode_s: float
    """From the first token to the last."""
    tokens_per_s: float
    """Tokens after the first per second, from the first to the last, as the engine made them; 0 if there are fewer than
    two in this attempt."""
    load_s: float | None = None
    """The part of `queue_s` in which the worker started and loaded its model; absent if the model was loaded before."""


@dataclass(frozen=True, slots=True)
class JobError:
    """Why a job failed."""

    type: ErrorType
    message: str
    retryable: bool
    """The same request may succeed later."""
    param: str | None = None
    """The field of the request that caused it; absent if none did or it is not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Fields common to all events. A type that a later worker adds is read as a bare event."""

    id: str
    seq: int = field(metadata=COUNT | _says("The index in the job's list: 0, 1, 2 ... through all attempts."))
    attempt: int = field(metadata={"ge": 1} | _says("Number of the claim that sent it."))
    ts: float = field(metadata=_says("Unix seconds of the server's clock, as estimated by the worker."))
    type: str

    @property
    def final(self) -> bool:
        """True for the last event of a job."""
        return self.type in FINAL

    @property
    def stored(self) -> bool:
        """True for the events of workers; False for one that the reader itself made, which has no `seq` of its own."""
        return True


@dataclass(frozen=True, slots=True, kw_only=True)
class Started(Event):
    """The first attempt begins."""

    type: Literal["started"]
    model: str
    fingerprint: str = field(
        metadata=_says("Identifies the model: attempts with the same fingerprint and seed sample the same tokens.")
    )
    worker: str
    seed: int = field(metadata=_says("The request's, or the one that was drawn."))


@dataclass(frozen=True, slots=True, kw_only=True)
class Resumed(Started):
    """A new attempt continues after the delivered tokens."""

    type: Literal["resumed"]  # type: ignore[assignment]  # it begins an attempt too


@dataclass(frozen=True, slots=True, kw_only=True)
class Restarted(Started):
    """A new attempt starts over: drop the text so far."""

    type: Literal["restarted"]  # type: ignore[assignment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress(Event):
    """Progress before the first token; at most four events a second. A reader makes those with `workers`, which are
    never in the list: of the phase `waiting` when the last live worker of the model has gone, and when one has come
    back; and of the phase `loading` while the model is loaded for the job, with the bytes of its weights."""

    type: Literal["progress"]
    seq: int = field(metadata={"ge": -1})
    """The index in the job's list; of one that a reader makes, the last index that it has."""
    attempt: int = field(metadata=COUNT)
    """Number of the claim that sent it; 0 if a reader waits for the first."""
    phase: ProgressPhase
    done: int = field(metadata=COUNT)
    total: int = field(metadata=COUNT)
    workers: int | None = field(default=None, metadata=COUNT)
    """Live workers of the model; only of one that a reader makes."""

    @property
    def stored(self) -> bool:
        return self.workers is None


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta(Event):
    """Output since the last delta. Text that may be the start of a stop string is held back."""

    type: Literal["delta"]
    token_ids: tuple[int, ...]
    """Each sampled token is in exactly one delta, even if its text is held back. None after a stop."""
    content: str | None = None
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Any], ...] | None = None
    """OpenAI's delta form."""
    logprobs: tuple[dict[str, Any], ...] | None = None
    """OpenAI's form, one entry per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished(Event):
    """The job completed."""

    type: Literal["finished"]
    finish_reason: FinishReason
    stop_sequence: str | None = None
    """The one of the request's `stop` strings that ended the answer."""
    usage: Usage
    timings: Timings
    warnings: list[str] | None = None
    """As in the result: what the model could not do as the request asks, or why it ended early."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failed(Event):
    """The job ended with an error."""

    type: Literal["failed"]
    error: JobError
    usage: Usage


@dataclass(frozen=True, slots=True, kw_only=True)
class Cancelled(Event):
    """The job was cancelled."""

    type: Literal["cancelled"]
    reason: str
    usage: Usage


FinalEvent = Finished | Failed | Cancelled
JobEvent = Started | Progress | Delta | Resumed | Restarted | FinalEvent
EVENTS: dict[str, type[Event]] = {get_args(kind.__annotations__["type"])[0]: kind for kind in get_args(JobEvent)}
_NESTED: dict[str, type[Timings] | type[JobError]] = {"timings": Timings, "error": JobError}

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
    if "usage" in event:
        event["usage"] = parse_counts(Usage, event["usage"])
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


def parse_counts(cls: type[D], values: Mapping[str, Any]) -> D:
    """Create a `cls` from a mapping, dropping unknown fields. A count that is absent is 0."""
    absent = {each.name: 0 for each in fields(cls) if each.default is MISSING}  # type: ignore[arg-type]
    return parse_as(cls, {**absent, **values})


@cache
def check_of(kind: Any) -> Callable[[Any], bool]:
    """Return a check of the values of a dataclass or of one of its fields, which a person or any client may have
    written: True for those of its types, whose numbers may be times."""
    origin, args = get_origin(kind), get_args(kind)
    checks = [] if origin is Literal else [check_of(each) for each in args if each is not ...]
    if origin is Literal:
        return lambda value: value in args
    if origin is types.UnionType:
        return lambda value: any(check(value) for check in checks)
    if origin in (list, tuple):
        return lambda value: isinstance(value, list | tuple) and all(map(checks[0], value))
    if origin is not None:
        return lambda value: (
            isinstance(value, dict) and all(map(checks[0], value)) and all(map(checks[1], value.values()))
        )
    if is_dataclass(kind):
        fields_of = [(name, check_of(of)) for name, of in get_type_hints(kind).items()]
        return lambda value: (
            isinstance(value, cast(type, kind)) and all(check(getattr(value, name)) for name, check in fields_of)
        )
    if kind in (int, float):  # the longest completion window ends before 1e14
        return lambda value: type(value) in (int, float) and -1e14 < value < 1e14
    if kind is Any:
        return lambda value: True
    return lambda value: isinstance(value, kind)


@cache
def _names(cls: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(cls))
