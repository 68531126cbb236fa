"""Which tokens of a long prompt are worth computing, by a draft's scores alone.

A chunk counts as much as its best token: what is asked for is often shorter than a chunk, and a mean would dilute it.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

from worker.schedule.request import Range, tokens_in

# Tokens. On the tiny model 8 and 16 were alike, and 32 worse where little was kept.
CHUNK = 16
REGION = 1024  # tokens, whole chunks; the best chunk of each is kept whatever the others score


def select_ranges(scores: Sequence[float], keep: float, protected: Iterable[Range] = ()) -> list[Range]:
    """In order, apart from each other. `keep` is the share of all these tokens, the protected ones among them: so many
    are kept, and less than a chunk more. The protected ones and the best chunk of each region stay even where they
    alone are more, so that from one kept token to the next there are less than two regions."""
    tokens = len(scores)
    if keep >= 1:
        return merged([(0, tokens)], tokens)
    kept = merged(protected, tokens)
    best = sorted(_pieces(kept, tokens), key=lambda piece: -max(scores[slice(*piece)]))
    floor = _floor(kept, best)
    lacking = round(keep * tokens) - tokens_in(kept) - tokens_in(floor)
    return merged([*kept, *floor, *_first(lacking, best, set(floor))], tokens)


def merged(ranges: Iterable[Range], tokens: int) -> list[Range]:
    """As far as they lie within so many tokens: in order, and apart from each other."""
    apart: list[Range] = []
    for start, end in sorted((max(0, start), min(end, tokens)) for start, end in ranges):
        if start >= end:
            continue
        if apart and start <= apart[-1][1]:
            start, end = apart[-1][0], max(apart.pop()[1], end)
        apart.append((start, end))
    return apart


def outside(ranges: Iterable[Range], tokens: int) -> list[Range]:
    """The tokens of so many that are in none of these."""
    apart = [(0, 0), *merged(ranges, tokens), (tokens, tokens)]
    return [(start, end) for (_, start), (end, _) in pairwise(apart) if start < end]


def _pieces(kept: Sequence[Range], tokens: int) -> Iterator[Range]:
    """What is between, cut where chunks begin."""
    for start, end in outside(kept, tokens):
        yield from pairwise([start, *range(start - start % CHUNK + CHUNK, end, CHUNK), end])


def _floor(kept: Iterable[Range], best: Iterable[Range]) -> list[Range]:
    """The best piece of each region of which nothing is kept."""
    seen = {region for start, end in kept for region in range(start // REGION, (end - 1) // REGION + 1)}
    floor: list[Range] = []
    for piece in best:
        if (region := piece[0] // REGION) not in seen:
            seen.add(region)
            floor.append(piece)
    return floor


def _first(tokens: int, best: Iterable[Range], there: set[Range]) -> Iterator[Range]:
    """Of those that are not there: as many as bring so many tokens."""
    for start, end in best:
        if tokens <= 0:
            return
        if (start, end) not in there:
            yield start, end
            tokens -= end - start
