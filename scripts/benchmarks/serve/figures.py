"""The figures of a run, computed from what its clients measured."""

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import pairwise
from typing import Any

# A good answer: its first token and its longest gap in seconds, at most.
GOOD_FIRST_S = 2.0
GOOD_GAP_S = 0.3


@dataclass(frozen=True, slots=True)
class Answer:
    """Measurements of one turn at its client; seconds count from the time at which the turn was due."""

    due_s: float  # from the start of the run
    sent_s: float  # how much later the client began its first attempt
    arrivals: tuple[float, ...]  # of the pieces of the answer
    max_tokens: int
    tokens: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None  # None: the server does not report them
    tokens_before: int | None = None  # of the prompt of the turn before; None: it is the first
    tenant: str | None = None
    server_first_s: float | None = None  # seconds to the first token as the server reports it
    error: str | None = None

    @property
    def first_s(self) -> float:
        """Seconds to the first token; infinite for an answer without tokens."""
        return self.arrivals[0] if self.arrivals else math.inf

    @property
    def end_s(self) -> float:
        """Seconds to the last token; infinite for an answer without tokens."""
        return self.arrivals[-1] if self.arrivals else math.inf

    @property
    def gaps(self) -> list[float]:
        """Seconds between neighbouring pieces."""
        return [after - before for before, after in pairwise(self.arrivals)]

    @property
    def good(self) -> bool:
        """True if the answer is complete, began in time and never paused for long."""
        in_time = self.first_s <= GOOD_FIRST_S and max(self.gaps, default=0.0) <= GOOD_GAP_S
        return self.error is None and in_time


def percentile(values: Iterable[float], share: float) -> float:
    """Return the value at this share of the sorted values, interpolated between neighbours; NaN for no values."""
    ordered = sorted(values)
    if not ordered:
        return math.nan
    place = share * (len(ordered) - 1)
    low, high = ordered[math.floor(place)], ordered[math.ceil(place)]
    return low if low == high else low + (high - low) * (place - math.floor(place))


@dataclass(frozen=True, slots=True)
class Quantiles:
    """The distribution of a figure in seconds, or of a ratio; NaN if there were no values."""

    p50: float
    p95: float
    p99: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> "Quantiles":
        """Return the quantiles of these values."""
        values = list(values)
        return cls(*(percentile(values, share) for share in (0.5, 0.95, 0.99, 1.0)))


@dataclass(frozen=True, slots=True)
class Figures:
    """The figures of one run. An answer that failed counts as sent and not good, and in no distribution."""

    requests: float
    failed: float
    good: float  # share of the requests
    good_per_s: float  # goodput
    worst_tenant_good: float  # share, of the tenant with the smallest
    seconds: float  # from the first arrival to the last token
    tokens: float
    tokens_per_s: float
    prompt_tokens: float
    cached_tokens: float
    of_bare: float  # seconds that bare forwards would take, divided by `seconds`
    first: Quantiles
    later_first: Quantiles  # of all turns of a conversation but its first
    found: float  # share of the tokens of the prompt before, in later turns, that were found in a cache
    gap: Quantiles  # of all gaps
    longest_gap: Quantiles  # of each answer's longest gap
    end: Quantiles
    slowdown: Quantiles  # first token, divided by the prompt's own cost alone
    client_late_s: float  # how much later than due the client sent a turn, at most
    client_extra_s: float  # first token at the client after the one that the server reports, median
    offline_tokens_per_s: float = 0.0

    @classmethod
    def of(
        cls,
        answers: Sequence[Answer],
        *,
        bare_s: float = math.nan,
        alone_s: Callable[[int], float] | None = None,
        offline: Sequence[Answer] = (),
    ) -> "Figures":
        """Return the figures. `bare_s`: seconds that the bare forwards of all answers take; `alone_s`: those of a
        prompt of that length in tokens. Raises ValueError if no turn was answered."""
        done = [answer for answer in answers if answer.error is None and answer.arrivals]
        if not done:
            raise ValueError("no turn was answered")
        seconds = max(answer.due_s + answer.end_s for answer in done) - min(answer.due_s for answer in answers)
        tokens = sum(answer.tokens for answer in done)
        good = sum(answer.good for answer in answers)
        return cls(
            requests=len(answers),
            failed=len(answers) - len(done),
            good=good / len(answers),
            good_per_s=good / seconds,
            worst_tenant_good=_worst_tenant(answers),
            seconds=seconds,
            tokens=tokens,
            tokens_per_s=tokens / seconds,
            prompt_tokens=sum(answer.prompt_tokens for answer in done),
            cached_tokens=sum(answer.cached_tokens or 0 for answer in done),
            of_bare=bare_s / seconds,
            first=Quantiles.of(answer.first_s for answer in done),
            later_first=Quantiles.of(answer.first_s for answer in done if answer.tokens_before is not None),
            found=_found(done),
            gap=Quantiles.of(gap for answer in done for gap in answer.gaps),
            longest_gap=Quantiles.of(max(answer.gaps) for answer in done if answer.gaps),
            end=Quantiles.of(answer.end_s for answer in done),
            slowdown=Quantiles.of(answer.first_s / alone_s(answer.prompt_tokens) for answer in done if alone_s),
            client_late_s=max(answer.sent_s for answer in answers),
            client_extra_s=percentile(_extra(done), 0.5),
            offline_tokens_per_s=sum(answer.tokens for answer in offline) / seconds,
        )

    @classmethod
    def median(cls, runs: Sequence["Figures"]) -> "Figures":
        """Return the median of each figure over several runs."""
        return cls(**{field.name: _median([getattr(run, field.name) for run in runs]) for field in fields(cls)})

    def as_json(self) -> dict[str, Any]:
        """Return the figures as JSON values; figures without a value are null."""
        return {name: finite(value) for name, value in asdict(self).items()}


def _worst_tenant(answers: Iterable[Answer]) -> float:
    by_tenant = dict[str | None, list[bool]]()
    for answer in answers:
        by_tenant.setdefault(answer.tenant, []).append(answer.good)
    return min(sum(each) / len(each) for each in by_tenant.values())


def _found(answers: Iterable[Answer]) -> float:
    later = [(each.cached_tokens, each.tokens_before) for each in answers if each.tokens_before]
    reported = [(min(cached, before), before) for cached, before in later if cached is not None and before]
    return sum(cached for cached, _ in reported) / sum(before for _, before in reported) if reported else math.nan


def _extra(answers: Iterable[Answer]) -> list[float]:
    return [answer.first_s - answer.server_first_s for answer in answers if answer.server_first_s is not None]


def _median(values: Sequence[Any]) -> Any:
    """Return the median of numbers, or of quantiles name by name. Values that are not finite are left out."""
    if isinstance(values[0], Quantiles):
        names = [field.name for field in fields(Quantiles)]
        return Quantiles(*(_median([getattr(value, name) for value in values]) for name in names))
    return statistics.median([value for value in values if math.isfinite(value)] or [math.nan])


def finite(value: Any) -> Any:
    """Return the value for JSON, which has no NaN: None for a number that is not finite, in dictionaries too."""
    if isinstance(value, dict):
        return {name: finite(each) for name, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value
