"""How much longer steps last than planned. An overrun that repeats is expected again; a single stall of the machine is
not, since no plan prevents it."""

from collections import deque
from collections.abc import Sequence

from worker.schedule.step.forward import PLAIN_STEP, StepKind

# A gap of more than this multiple of its plan is a stall: another process had the processor, or memory was reclaimed.
STALL = 1.5
# Stalls are expected again if this many of the latest gaps overran their plans, ...
OVERRAN, OF_GAPS = 3, 20
# ... or this many of the latest gaps whose steps computed the same: the plan may underestimate these.
OVERRAN_ALIKE, OF_GAPS_ALIKE = 2, 4
_OVERRUN = 1.2  # a gap that lasted more than this multiple of its plan overran; usual ones last nearly as planned
# Before the margin, at most this multiple of a plan is expected: a plan of less than half of the gap leaves hardly time
# for a chunk, and what lasts longer still is not prevented by it.
MOST = 2.0
_GAPS = 150  # the latest ones, by which overruns are expected
_RANK = 3  # the third largest overrun counts: the two above it may be chance
_MARGIN = 1.1  # for larger ones: a row that decodes for 30 steps should see none
_FIRST = 1.1  # before it is measured


class Overruns:
    """Measured seconds of gaps relative to those planned, of the latest gaps that were planned to last long."""

    def __init__(self) -> None:
        self._gaps = deque([(_FIRST, PLAIN_STEP)] * _RANK, _GAPS)  # ratio, and the kind of the step
        self._expected: float | None = None  # by the gaps so far; None: not computed yet

    def observe(self, ratio: float, kind: StepKind = PLAIN_STEP) -> None:
        """Record a gap that lasted `ratio` times as long as planned."""
        self._gaps.append((ratio, kind))
        self._expected = None

    @property
    def expected(self) -> float:
        """The most seconds that a gap is expected to last, relative to those that are planned."""
        if self._expected is None:
            self._expected = _MARGIN * min(MOST, sorted(self._counted())[-_RANK])
        return self._expected

    def _counted(self) -> list[float]:
        """Return the overruns that count: all but stalls that have not repeated. At least `_RANK`."""
        gaps = [*self._gaps]
        if max(ratio for ratio, _ in gaps) <= STALL:
            return [ratio for ratio, _ in gaps]
        repeating = _overran([ratio for ratio, _ in gaps[-OF_GAPS:]], OVERRAN)
        kinds = {kind for _, kind in gaps}
        alike = {
            each
            for each in kinds
            if _overran([ratio for ratio, kind in gaps if kind == each][-OF_GAPS_ALIKE:], OVERRAN_ALIKE)
        }
        since = len(gaps) - OF_GAPS if repeating else len(gaps)
        counted = [ratio for i, (ratio, kind) in enumerate(gaps) if ratio <= STALL or i >= since or kind in alike]
        return [*counted, *[_FIRST] * max(0, _RANK - len(counted))]


def _overran(ratios: Sequence[float], least: int) -> bool:
    return sum(ratio > _OVERRUN for ratio in ratios) >= least
