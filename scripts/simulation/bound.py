"""The most answers that can be good, whatever the order and the share of prompts: rules are judged against it."""

from collections.abc import Sequence
from dataclasses import dataclass

from scripts.benchmarks.serve.figures import GOOD_FIRST_S
from scripts.simulation.arrivals import Arrival
from scripts.simulation.costs import Costs


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
