"""Status of an offline run: OpenAI's Batch object, with our fields under `sluice`. Mirrors `schemas.batch`."""

import json
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

from sluice.batch.names import is_retry
from sluice.wire import parse_as

State = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
ENDED: frozenset[State] = frozenset({"failed", "completed", "expired", "cancelled"})
_FED: frozenset[State] = frozenset({"in_progress", "finalizing", "cancelling"})  # a process feeds it, or it is paused


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Numbers of lines."""

    total: int = 0
    completed: int = 0
    failed: int = 0


@dataclass(frozen=True, slots=True)
class InputTokens:
    """Breakdown of the prompt tokens."""

    cached_tokens: int = 0  # taken from the prefix cache


@dataclass(frozen=True, slots=True)
class OutputTokens:
    """Breakdown of the completion tokens."""

    reasoning_tokens: int = 0


@dataclass(frozen=True, slots=True)
class BatchUsage:
    """Token counts of the answers in the output file."""

    input_tokens: int = 0
    output_tokens: int = 0
    total_tokens: int = 0
    input_tokens_details: InputTokens = InputTokens()
    output_tokens_details: OutputTokens = OutputTokens()


@dataclass(frozen=True, slots=True)
class Problem:
    """Reason why an input file is refused; `line` counts from 1, and is None if the problem concerns the whole file."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


@dataclass(frozen=True, slots=True)
class Problems:
    """OpenAI's list of problems."""

    data: tuple[Problem, ...]
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True)
class BatchDetails:
    """Fields that OpenAI's object does not have."""

    host: str = ""  # the machine that has the files
    seconds: float = 0.0  # since the first line was queued, pauses included
    models: dict[str, int] = field(default_factory=dict)  # number of lines by served model
    retried: int = 0  # lines that were queued more than once
    failures: dict[str, int] = field(default_factory=dict)  # number of failed lines by error code
    cut_off: int = 0  # answered lines whose answers reached their limit of tokens
    paused_at: int | None = None  # Unix seconds of its feeder's last report; None if the run is not paused


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The status of a run. Times are Unix seconds. Files are named by their paths on `sluice.host`."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Literal["/v1/chat/completions"] = "/v1/chat/completions"
    model: str | None = None  # the served model, if it is the same for all lines
    errors: Problems | None = None
    input_file_id: str
    completion_window: str
    status: State
    output_file_id: str | None = None
    error_file_id: str | None = None  # None until a line has failed
    created_at: int
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = RequestCounts()
    usage: BatchUsage = BatchUsage()
    metadata: dict[str, str] | None = None
    sluice: BatchDetails = BatchDetails()

    @property
    def ended(self) -> bool:
        """True in a final state."""
        return self.status in ENDED

    def enter(self, state: State, now: float) -> Self:
        """Return a copy in another state, entered at `now`."""
        since: dict[str, Any] = {f"{state}_at": int(now)}
        return replace(self, status=state, **since)

    def paused(self, since: float) -> Self:
        """Return a copy marked as paused since then; unchanged if the run waits in an inbox or has ended."""
        if self.status not in _FED or self.sluice.paused_at is not None:
            return self
        return replace(self, sluice=replace(self.sluice, paused_at=int(since)))

    def to_json(self) -> str:
        """Serialize to compact JSON."""
        return json.dumps(asdict(self), separators=(",", ":"))

    @classmethod
    def from_json(cls, raw: str | bytes) -> Self:
        """Parse a status, dropping unknown fields."""
        return parse_as(cls, _nested(json.loads(raw)))


def _nested(raw: dict[str, Any]) -> dict[str, Any]:
    parsed = dict(raw)
    if errors := raw.get("errors"):
        parsed["errors"] = Problems(tuple(parse_as(Problem, each) for each in errors["data"]))
    parsed["request_counts"] = parse_as(RequestCounts, raw.get("request_counts") or {})
    parsed["usage"] = _usage(raw.get("usage") or {})
    parsed["sluice"] = parse_as(BatchDetails, raw.get("sluice") or {})
    return parsed


def _usage(raw: dict[str, Any]) -> BatchUsage:
    return parse_as(
        BatchUsage,
        {
            **raw,
            "input_tokens_details": parse_as(InputTokens, raw.get("input_tokens_details") or {}),
            "output_tokens_details": parse_as(OutputTokens, raw.get("output_tokens_details") or {}),
        },
    )


class RunCounts:
    """Counts of the lines in the result files, and their tokens."""

    def __init__(self) -> None:
        self.completed, self.retried = 0, 0
        self.cut_off = 0
        self.failures = Counter[str]()
        self._tokens = Counter[str]()

    @property
    def failed(self) -> int:
        """Number of failed lines."""
        return self.failures.total()

    @property
    def usage(self) -> BatchUsage:
        """Token counts of the answered lines."""
        into, out = self._tokens["prompt"], self._tokens["completion"]
        cached, reasoning = self._tokens["cached"], self._tokens["reasoning"]
        return BatchUsage(into, out, into + out, InputTokens(cached), OutputTokens(reasoning))

    def add(self, line: dict[str, Any]) -> None:
        """Count a line of the output or error file."""
        self.retried += is_retry(line["id"])
        match line:
            case {"error": {"code": str(code)}}:
                self.failures[code] += 1
            case {"response": {"body": dict(body)}}:
                self.completed += 1
                self.cut_off += _is_cut_off(body)
                self._add_usage(body.get("usage") or {})

    def _add_usage(self, usage: dict[str, Any]) -> None:
        self._tokens["prompt"] += usage.get("prompt_tokens", 0)
        self._tokens["completion"] += usage.get("completion_tokens", 0)
        self._tokens["cached"] += (usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
        self._tokens["reasoning"] += (usage.get("completion_tokens_details") or {}).get("reasoning_tokens", 0)


def _is_cut_off(body: dict[str, Any]) -> bool:
    match body:
        case {"choices": [{"finish_reason": "length"}, *_]}:
            return True
    return False
