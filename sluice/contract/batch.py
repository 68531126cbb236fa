"""Offline runs: their ids, the ids of the jobs of their lines, by which a resumed run finds its jobs, and their status,
which is OpenAI's Batch object with our fields under `sluice`. The JSON Schema is made of these classes.
"""

import json
import re
import uuid
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal, Self

from sluice.contract.events import COUNT, parse_as, parse_counts

BatchState = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
OutcomeKind = Literal["answered", "cut", "refused", "invalid", "failed"]
"""Of a line: `cut` and `refused` lines are answers, and `invalid` ones (not the JSON that was asked for) failures."""
Url = Literal["/v1/chat/completions", "/v1/responses", "/v1/embeddings", "/v1/messages"]
ENDED: frozenset[BatchState] = frozenset({"failed", "completed", "expired", "cancelled"})
_FED: frozenset[BatchState] = frozenset(
    {"in_progress", "finalizing", "cancelling"}
)  # a process feeds it, or it is paused
_RUN = re.compile(r"batch_(?:[A-Za-z0-9._-]{1,40}_)?[0-9a-f]{12,32}")
_RETRY = re.compile(r"-\d+-r(\d+)\Z")


def new_run_id(stem: str = "") -> str:
    """Return a unique run id. `stem`: the input file's name without its suffix, a readable part of the id."""
    word = re.sub(r"[^A-Za-z0-9._-]+", "-", stem)[:40].strip("-")
    word = re.sub(r"^batch(?:[._-]+|$)", "", word)  # the id begins with that
    return f"batch_{word}_{uuid.uuid4().hex[:12]}" if word else f"batch_{uuid.uuid4().hex}"


def is_run_id(name: str) -> bool:
    """True if the name is a run id."""
    return _RUN.fullmatch(name) is not None


def line_job_id(run_id: str, line: int, retry: int = 0) -> str:
    """Return the id of the job for a line (from 1) and retry (from 0)."""
    return f"{run_id}-{line}-r{retry}" if retry else f"{run_id}-{line}"


def retry_of(job_id: str) -> int:
    """Return the retry in the id of a line's job; 0 for the first job."""
    found = _RETRY.search(job_id)
    return int(found[1]) if found else 0


def is_retry(job_id: str) -> bool:
    """True if the id is that of a retry, and not of the first job for its line."""
    return retry_of(job_id) > 0


@dataclass(frozen=True, slots=True)
class RequestCounts:
    """Numbers of lines."""

    total: int
    completed: int
    failed: int


NO_LINES = RequestCounts(0, 0, 0)


@dataclass(frozen=True, slots=True)
class InputTokens:
    """Breakdown of the prompt tokens."""

    cached_tokens: int = field(metadata=COUNT)
    """Prompt tokens taken from the prefix cache."""


@dataclass(frozen=True, slots=True)
class OutputTokens:
    """Breakdown of the completion tokens."""

    reasoning_tokens: int = field(metadata=COUNT)


@dataclass(frozen=True, slots=True)
class BatchUsage:
    """Sums over all answers."""

    input_tokens: int = field(metadata=COUNT)
    output_tokens: int = field(metadata=COUNT)
    total_tokens: int = field(metadata=COUNT)
    input_tokens_details: InputTokens
    output_tokens_details: OutputTokens


@dataclass(frozen=True, slots=True)
class Problem:
    """An error for which an input file is refused."""

    code: str
    """The name of the rule."""
    message: str
    line: int | None = None
    """Counted from 1; null if the error is in the file as a whole."""
    param: str | None = None
    """The field."""


@dataclass(frozen=True, slots=True)
class Problems:
    """OpenAI's list of problems."""

    data: tuple[Problem, ...]
    object: Literal["list"] = "list"


@dataclass(frozen=True, slots=True)
class LineDetails:
    """The outcome of one line, and what it took; numbers are 0 if no job of it was answered."""

    kind: OutcomeKind
    finish_reason: str | None = None
    seconds: float = 0.0
    """From the worker's claim to the last token."""
    machine_s: float = 0.0
    """Its share of that time: the rows of a step share it."""
    input_tokens: int = field(default=0, metadata=COUNT)
    cached_tokens: int = field(default=0, metadata=COUNT)
    output_tokens: int = field(default=0, metadata=COUNT)
    reasoning_tokens: int = field(default=0, metadata=COUNT)


@dataclass(frozen=True, slots=True)
class OutcomeCounts:
    """Sums over the lines of one kind."""

    lines: int = field(metadata=COUNT)
    input_tokens: int = field(metadata=COUNT)
    cached_tokens: int = field(metadata=COUNT)
    output_tokens: int = field(metadata=COUNT)
    machine_s: float


@dataclass(frozen=True, slots=True)
class SlowLine:
    """One of the slowest lines."""

    custom_id: str
    seconds: float
    output_tokens: int = field(metadata=COUNT)


@dataclass(frozen=True, slots=True)
class BatchDetails:
    """Fields that OpenAI's object does not have."""

    host: str
    """Host name of the machine that has the files."""
    seconds: float
    """Time since the first line was queued, pauses included."""
    models: dict[str, int]
    """Number of lines by served model."""
    retried: int
    """Lines that were queued more than once."""
    failures: dict[str, int]
    """Number of failed lines by their code in the error file."""
    cut_off: int = 0
    """Answered lines whose answers reached their limit of tokens."""
    paused_at: int | None = None
    """Last report of its feeder; null while a feeder runs."""
    tenant: str | None = None
    """The tenant of the key that created it, which its jobs have; null for a run of the operator."""
    kinds: dict[str, OutcomeCounts] = field(default_factory=dict)
    """Sums by kind of outcome; `replaced`: of answers that were run again, and replaced by better ones."""
    slowest: tuple[SlowLine, ...] = ()
    """The five slowest lines, the slowest first."""
    retry: dict[str, int] = field(default_factory=dict)
    """How many times a line of a kind is run again within the run; others are not."""
    rerun_at: int | None = None
    """Unix seconds at which lines of the ended run were last queued again; the completion window began anew."""
    input_file: str | None = None
    """Id of the uploaded file; null if the run was not created over HTTP."""
    output_expires_s: int | None = None
    """Seconds for which its files of answers and errors are kept; null for ever."""
    allowed_models: list[str] | None = None
    """Names of models that its lines may have; null for any."""
    not_before: int | None = None
    """It waits in its folder until then."""
    priority: int = 0
    """Lines of its folder's runs with a higher one are queued first, of the same tenant and model."""
    estimated_end_at: int | None = None
    """By the lines that ended in the last ten minutes; null if none did, or unless in_progress."""
    left: dict[str, int] = field(default_factory=dict)
    """Number of unfinished lines by served model; empty unless in_progress."""


NO_DETAILS = BatchDetails("", 0.0, {}, 0, {})


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """State of a run. Times are Unix seconds, and files are paths on the machine that feeds the run."""

    id: str
    object: Literal["batch"] = "batch"
    endpoint: Url = "/v1/chat/completions"
    model: str | None = None
    """The served model, if it is the same for all lines."""
    errors: Problems | None = None
    input_file_id: str
    completion_window: str
    """A number with unit s, m, h or d."""
    status: BatchState
    output_file_id: str | None = None
    error_file_id: str | None = None
    """Set when a line has failed."""
    created_at: int
    in_progress_at: int | None = None
    expires_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts
    usage: BatchUsage = field(default_factory=lambda: BatchUsage(0, 0, 0, InputTokens(0), OutputTokens(0)))
    metadata: dict[str, str] | None = None
    sluice: BatchDetails = field(default_factory=lambda: NO_DETAILS)

    @property
    def ended(self) -> bool:
        """True in a final state."""
        return self.status in ENDED

    def enter(self, state: BatchState, now: float) -> Self:
        """Return a copy in another state, entered at `now`."""
        since: dict[str, Any] = {f"{state}_at": int(now)}
        return replace(self, status=state, **since)

    def paused(self, since: float) -> Self:
        """Return a copy marked as paused since then; unchanged if the run waits in an inbox or has ended."""
        if self.status not in _FED or self.sluice.paused_at is not None:
            return self
        return replace(self, sluice=replace(self.sluice, paused_at=int(since), estimated_end_at=None))

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
    parsed["request_counts"] = parse_counts(RequestCounts, raw.get("request_counts") or {})
    usage = raw.get("usage") or {}
    into = parse_counts(InputTokens, usage.get("input_tokens_details") or {})
    out = parse_counts(OutputTokens, usage.get("output_tokens_details") or {})
    parsed["usage"] = parse_counts(BatchUsage, {**usage, "input_tokens_details": into, "output_tokens_details": out})
    details = {**asdict(NO_DETAILS), **(raw.get("sluice") or {})}
    details["kinds"] = {kind: parse_counts(OutcomeCounts, sums) for kind, sums in details["kinds"].items()}
    details["slowest"] = tuple(parse_as(SlowLine, line) for line in details["slowest"])
    parsed["sluice"] = parse_as(BatchDetails, details)
    return parsed
