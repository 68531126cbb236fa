"""The most answers that can be good, whatever the order and the share of prompts: rules are judged against it."""

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass

from scripts.simulation.arrivals import Arrival
from scripts.simulation.costs import Costs
from scripts.simulation.figures import FIRST_TOKEN_S, GAP_S

_MOST_TOKENS = 1 << 16  # of a chunk


@dataclass(frozen=True)
class Bound:
    """Percentages of answers, each at most the one before it."""

    alone: float  # first token in time on an idle machine
    beside: float  # the same beside one row that decodes, whose gaps are as long as they may be
    together: float  # as many of them as can be in time, if all arrivals were known in advance

    @classmethod
    def of(cls, arrivals: Sequence[Arrival], costs: Costs) -> "Bound":
        """Return the bound of these arrivals."""
        alone = [each for each in arrivals if costs.alone_s(each.prompt) <= FIRST_TOKEN_S]
        beside = [each for each in alone if beside_s(each.prompt, costs) <= FIRST_TOKEN_S]
        counts = len(alone), len(beside), most_in_time(beside, costs)
        return cls(*(100 * count / len(arrivals) for count in counts))


def beside_s(prompt: int, costs: Costs) -> float:
    """Return the seconds until the first token of a prompt that is computed between the decode steps of one row, each
    in a gap of `GAP_S`. Infinite if a decode step leaves no time in it."""
    decode_s = costs.forward_s(1, 1)
    chunk = _longest_chunk(GAP_S - decode_s, costs)
    if not chunk:
        return float("inf")
    whole, rest = divmod(max(1, prompt - 1), chunk)
    rest_s = decode_s + costs.forward_s(1, rest) if rest else 0.0
    return whole * GAP_S + rest_s + decode_s


def _longest_chunk(seconds: float, costs: Costs) -> int:
    """Return the tokens of the longest chunk of one prompt that takes at most `seconds`."""
    return bisect(range(1, _MOST_TOKENS), seconds, key=lambda tokens: costs.forward_s(1, tokens))


def most_in_time(arrivals: Sequence[Arrival], costs: Costs) -> int:
    """Return how many prompts can be computed in time at most, each token as in the cheapest shared forward, while a
    step of a single row takes its part of each gap. Further rows, overheads and the last token are not counted.

    As all prompts have the same time, the earlier has the earlier deadline. So they are computed as they arrive, and if
    one is late, the prompt goes without which the others end first (Kise, Ibaraki and Mine, 1978)."""
    speed = 1 - costs.forward_s(1, 1) / GAP_S
    if speed <= 0:
        return 0
    chosen = list[tuple[float, float]]()  # arrival and seconds of work
    for each in sorted(arrivals, key=lambda each: each.at_s):
        chosen.append((each.at_s, (each.prompt - 1) * costs.packed_s / speed))
        if _end_s(chosen) > each.at_s + FIRST_TOKEN_S:
            ends_s = [_end_s(chosen[:index] + chosen[index + 1 :]) for index in range(len(chosen))]
            del chosen[ends_s.index(min(ends_s))]
    return len(chosen)


def _end_s(work: Sequence[tuple[float, float]]) -> float:
    """Return the time at which all of this work has ended, in the order of its arrival."""
    end_s = 0.0
    for at_s, seconds in work:
        end_s = max(end_s, at_s) + seconds
    return end_s
