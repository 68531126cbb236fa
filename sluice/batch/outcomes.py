"""Judges the outcomes of lines: their kind and what they took, which of two is better, and what is changed to run a
line again."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, get_args

from sluice.contract.batch import (
    BatchUsage,
    InputTokens,
    LineDetails,
    OutcomeCounts,
    OutcomeKind,
    OutputTokens,
    SlowLine,
    is_retry,
)
from sluice.contract.events import check_of, parse_as

KINDS: tuple[OutcomeKind, ...] = get_args(OutcomeKind)  # the best first
TO_RETRY: tuple[OutcomeKind, ...] = ("invalid", "cut", "failed", "refused")
ANSWERS: tuple[OutcomeKind, ...] = ("answered", "cut", "refused")
_REPLACED = "replaced"
NOT_JSON = "answer_not_json"  # the code of an answer that is not the JSON that was asked for


def read_kinds(names: Iterable[str]) -> tuple[OutcomeKind, ...]:
    """Return the kinds of these names. Raises ValueError for one that is no kind of line to run again."""
    wanted = [*names]
    if unknown := [name for name in wanted if name not in TO_RETRY]:
        raise ValueError(
            f"retry: {unknown[0]!r} is not a kind of line to run again; give some of {', '.join(TO_RETRY)}"
        )
    return tuple(kind for kind in TO_RETRY if kind in wanted)


def details_of(result: Mapping[str, Any], *, wants_json: bool = False) -> LineDetails:
    """Return the kind of a result as the worker wrote it, and what it took."""
    choices, ours = result.get("choices"), _mapping(result.get("sluice"))
    choice = _mapping(choices[0]) if isinstance(choices, list) and choices else {}
    usage, timings = _mapping(result.get("usage")), _mapping(ours.get("timings"))
    into, out = _mapping(usage.get("prompt_tokens_details")), _mapping(usage.get("completion_tokens_details"))
    # Both count from the claim. Without tokens of an answer, as for embeddings, there is only the first.
    begun_s = max(_number(timings.get("prefill_s")), _number(timings.get("ttft_s")))
    seconds = begun_s + _number(timings.get("decode_s"))
    return LineDetails(
        kind=_kind(choice, wants_json),
        finish_reason=reason if check_of(str)(reason := choice.get("finish_reason")) else None,
        seconds=round(seconds, 6),
        machine_s=round(seconds / max(_number(ours.get("rows_mean")), 1.0), 6),
        input_tokens=int(_number(usage.get("prompt_tokens"))),
        cached_tokens=int(_number(into.get("cached_tokens"))),
        output_tokens=int(_number(usage.get("completion_tokens"))),
        reasoning_tokens=int(_number(out.get("reasoning_tokens"))),
    )


def wants_json(job: Mapping[str, Any]) -> bool:
    """Return True if a request of the contract asks for JSON, with or without a schema."""
    return _mapping(job.get("response_format")).get("type") in ("json_object", "json_schema")


def _mapping(value: Any) -> dict[str, Any]:
    """Return the value if it is one that a worker writes: any client can write a result."""
    return value if isinstance(value, dict) else {}


def _number(value: Any) -> float:
    return value if isinstance(value, int | float) and 0 <= value < 1e12 else 0.0


def details_of_line(line: Mapping[str, Any]) -> LineDetails:
    """Return the details in a line of a result file; of one from an earlier version they are read from the body. Raises
    TypeError for details that no run wrote."""
    match line:
        case {"sluice": {"kind": str(kind)} as found} if kind in KINDS:
            details = parse_as(LineDetails, found)
            if not check_of(LineDetails)(details):
                raise TypeError
            return details
        case {"error": {"code": str(code)}, "response": {"body": dict(body)}} if code == NOT_JSON:
            return replace(details_of(body), kind="invalid")
        case {"error": None, "response": {"body": dict(body)}}:
            return details_of(body)
    return LineDetails("failed")


def _kind(choice: Mapping[str, Any], wants_json: bool) -> OutcomeKind:
    if choice.get("finish_reason") == "content_filter" or _mapping(choice.get("message")).get("refusal"):
        return "refused"
    if choice and wants_json and not _is_json(choice):
        return "invalid"
    return "cut" if choice.get("finish_reason") == "length" else "answered"


def _is_json(choice: Mapping[str, Any]) -> bool:
    """Return True for JSON, which then satisfies its schema, since workers enforce it; and for calls without text."""
    message = _mapping(choice.get("message"))
    content = message.get("content") or ""
    if message.get("tool_calls") and not content:
        return True
    try:
        json.loads(str(content))
    except RecursionError:
        return True  # it is nested deeper than Python can read, which is no fault of it
    except ValueError:
        return False
    return True


def is_better(one: LineDetails, other: LineDetails) -> bool:
    """Return True if the first outcome is of a better kind."""
    return KINDS.index(one.kind) < KINDS.index(other.kind)


def most_retries(details: LineDetails, retry: Mapping[str, int], raised: int | None) -> int:
    """Return how many times a line with this outcome may be run again. `retry`: the same by kind, `raised`: the higher
    limit of tokens that it may get; None: no higher one is possible."""
    times = [retry.get(details.kind, 0)] if details.kind != "cut" else []
    # JSON that was cut is invalid, too.
    if details.finish_reason == "length" and raised is not None:
        times.append(retry.get("cut", 0))
    return max(times, default=0)


def raised_limit(asked: int | None, details: LineDetails, bounds: Iterable[int]) -> int | None:
    """Return the limit of tokens with which a cut answer is run again: twice its length, if the `bounds` allow that.
    None if it cannot be longer: then the context or the worker's memory has ended it. `asked`: the limit that it had.
    """
    length = max(details.output_tokens, 1)
    if asked and length < asked:
        return None
    limit = min([2 * length, *bounds])
    return limit if limit > length else None


def limit_of(body: Mapping[str, Any]) -> int | None:
    """Return the limit of tokens in a request; None without one, or if it is no number."""
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    return limit if isinstance(limit, int) else None


def changes_for(body: Mapping[str, Any], last: LineDetails, raised: int | None, retry: int) -> dict[str, Any]:
    """Return the fields to change in a request that is run again after this outcome. `retry`: the number of the job."""
    changes: dict[str, Any] = {}
    if last.finish_reason == "length" and raised is not None:
        changes["max_completion_tokens" if body.get("max_completion_tokens") else "max_tokens"] = raised
    if last.kind in ("invalid", "refused"):
        # Without a seed in the request it follows from the job's id, which is new.
        if (seed := body.get("seed")) is not None:
            changes["seed"] = seed + retry if seed < 2**62 else seed - retry
        if body.get("temperature") == 0:
            changes["temperature"] = 0.7  # at 0 every seed gives the same answer
    return changes


class OutcomeTally:
    """Counts of the lines in the result files, and what they took."""

    def __init__(self) -> None:
        self.retried = 0
        self.failures = Counter[str]()
        self.slowest: tuple[SlowLine, ...] = ()
        self._sums = defaultdict[str, Counter[str]](Counter)  # by kind
        self._replaced = dict[str, LineDetails]()  # by job id: outcomes that were kept, and are in no file

    @property
    def completed(self) -> int:
        """Number of answered lines."""
        return sum(self._sums[kind]["lines"] for kind in ANSWERS)

    @property
    def cut_off(self) -> int:
        """Number of answered lines whose answers reached their limit."""
        return self._sums["cut"]["lines"]

    @property
    def usage(self) -> BatchUsage:
        """Token counts of the answered lines."""
        sums = sum((self._sums[kind] for kind in ANSWERS), Counter[str]())
        into, out = sums["input_tokens"], sums["output_tokens"]
        details = InputTokens(sums["cached_tokens"]), OutputTokens(sums["reasoning_tokens"])
        return BatchUsage(into, out, into + out, *details)

    @property
    def kinds(self) -> dict[str, OutcomeCounts]:
        """Sums by the kind of the outcome, without kinds that no line has."""
        found = {kind: _counts(self._sums[kind]) for kind in (*KINDS, _REPLACED)}
        return {kind: counts for kind, counts in found.items() if counts.lines}

    def keep(self, job_id: str, details: LineDetails) -> None:
        """Count an outcome that is kept while its line is run again."""
        self._uncount(job_id)
        self._replaced[job_id] = details
        self._sums[_REPLACED] += _sums(details)

    def _uncount(self, job_id: str) -> None:
        if replaced := self._replaced.pop(job_id, None):
            self._sums[_REPLACED] -= _sums(replaced)

    def add(self, line: dict[str, Any]) -> None:
        """Count a line of the output or error file."""
        self.retried += is_retry(line["id"])
        details = details_of_line(line)
        self._sums[details.kind] += _sums(details)
        match line:
            case {"error": {"code": str(code)}}:
                self.failures[code] += 1
        if response := line.get("response"):
            self._uncount(response.get("request_id"))  # it was kept, and is the best
        if details.seconds:
            slow = SlowLine(line["custom_id"], details.seconds, details.output_tokens)
            slowest = sorted([*self.slowest, slow], key=lambda each: each.seconds, reverse=True)
            self.slowest = tuple(slowest[:5])


def _sums(details: LineDetails) -> Counter[str]:
    numbers = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
    sums = Counter({name: getattr(details, name) for name in numbers})
    sums.update(lines=1, machine_us=round(details.machine_s * 1e6))
    return sums


def _counts(sums: Counter[str]) -> OutcomeCounts:
    tokens = sums["input_tokens"], sums["cached_tokens"], sums["output_tokens"]
    return OutcomeCounts(sums["lines"], *tokens, round(sums["machine_us"] / 1e6, 3))
