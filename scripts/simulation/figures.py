"""What the clients of a simulation have seen."""

import statistics
from collections.abc import Sequence
from dataclasses import asdict, astuple, dataclass
from itertools import pairwise

from scripts.benchmarks.serve.figures import GOOD_FIRST_S, GOOD_GAP_S, percentile
from scripts.simulation.arrivals import Arrival, Request
from scripts.simulation.costs import Costs
from scripts.simulation.machine import Machine


@dataclass(frozen=True)
class Bound:
    """Percentages of answers, each at most the one before it."""

    alone: float  # first token in time on an idle machine
    together: float  # as many of them as can be in time, if all arrivals were known in advance

    @classmethod
    def of(cls, arrivals: Sequence[Arrival], costs: Costs) -> "Bound":
        """Return the bound of these arrivals."""
        alone = [each for each in arrivals if costs.alone_s(each.prompt) <= GOOD_FIRST_S]
        counts = len(alone), most_in_time(alone, costs)
        return cls(*(100 * count / len(arrivals) for count in counts))


def most_in_time(arrivals: Sequence[Arrival], costs: Costs) -> int:
    """Return how many prompts can be computed in time at most, each token as in the cheapest forward. Decoding,
    overheads and the last token are not counted.

    As all prompts have the same time, the earlier has the earlier deadline. So they are computed as they arrive, and if
    one is late, the one is dropped without which the others end earliest (Kise, Ibaraki and Mine, 1978)."""
    chosen = list[tuple[float, float]]()  # arrival and seconds of work
    for each in sorted(arrivals, key=lambda each: each.at_s):
        chosen.append((each.at_s, (each.prompt - 1) * costs.cheapest_s))
        if _end_s(chosen) > each.at_s + GOOD_FIRST_S:
            ends_s = [_end_s(chosen[:index] + chosen[index + 1 :]) for index in range(len(chosen))]
            del chosen[ends_s.index(min(ends_s))]
    return len(chosen)


def _end_s(work: Sequence[tuple[float, float]]) -> float:
    """Return the time at which all of this work has ended, in the order of its arrival."""
    end_s = 0.0
    for at_s, seconds in work:
        end_s = max(end_s, at_s) + seconds
    return end_s


@dataclass(frozen=True)
class Figures:
    """Figures of one run, or medians of several."""

    good_percent: float
    first_p50_s: float
    first_p95_s: float
    first_max_s: float
    longest_gap_s: float
    tokens_per_s: float
    slowdown_p95: float  # time to the first token, relative to the prompt's bare forwards alone
    tokens_per_forward: float  # of prefill

    @classmethod
    def of(cls, machine: Machine, costs: Costs) -> "Figures":
        """Return the figures of a run that has ended."""
        requests = machine.requests
        firsts = [_first_s(request) for request in requests]
        gaps = [_longest_gap_s(request) for request in requests]
        slowdowns = [
            first_s / costs.alone_s(request.arrival.prompt) for first_s, request in zip(firsts, requests, strict=True)
        ]
        good = [first_s <= GOOD_FIRST_S and gap_s <= GOOD_GAP_S for first_s, gap_s in zip(firsts, gaps, strict=True)]
        return cls(
            100 * sum(good) / len(good),
            statistics.median(firsts),
            percentile(firsts, 0.95),
            max(firsts),
            max(gaps),
            sum(request.arrival.answer for request in requests) / machine.now_s,
            percentile(slowdowns, 0.95),
            machine.prompt_tokens / max(1, machine.forwards),
        )

    @classmethod
    def median(cls, runs: Sequence["Figures"]) -> "Figures":
        """Return the median of each figure."""
        return cls(*(statistics.median(values) for values in zip(*map(astuple, runs), strict=True)))

    def as_dict(self) -> dict[str, float]:
        """Return the figures by name, rounded for JSON."""
        return {name: round(value, 3) for name, value in asdict(self).items()}


def _first_s(request: Request) -> float:
    return request.token_times_s[0] - request.arrival.at_s


def _longest_gap_s(request: Request) -> float:
    return max((after - before for before, after in pairwise(request.token_times_s)), default=0.0)
