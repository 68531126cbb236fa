"""The curriculum: the whole run as data, and the selection for each step of a shorter run."""

import math
from dataclasses import dataclass
from itertools import accumulate

MIN_ROWS = 2  # even of the longest rows, so that no step uses a single chat
FILLER_TOKENS = 10  # a filler sentence has 9.5 on average


@dataclass(frozen=True, slots=True)
class Cosine:
    """A learning rate: a linear rise over `warmup` steps, times half a cosine from `peak` to `peak * floor`."""

    begin: int
    end: int
    peak: float
    floor: float
    warmup: int = 100

    def at(self, step: float) -> float:
        """Return the learning rate at a step."""
        done = (step - self.begin) / (self.end - self.begin)
        fall = self.floor + (1 - self.floor) * (1 + math.cos(math.pi * done)) / 2
        return self.peak * fall * min(1.0, (step - self.begin + 1) / self.warmup)


@dataclass(frozen=True, slots=True)
class Phase:
    """A part of the curriculum."""

    steps: int
    lengths: tuple[int, ...]  # tokens of a row, taken in turn
    fillers: int  # largest number of sentences around the codes to find
    copying: float  # the share of chats that only copy
    learning_rate: Cosine


@dataclass(frozen=True, slots=True)
class Lesson:
    """The parameters of one step."""

    rows: int
    length: int
    fillers: int
    copying: float
    learning_rate: float

    @property
    def tokens(self) -> int:
        """Tokens in the batch."""
        return self.rows * self.length


@dataclass(frozen=True, slots=True)
class Curriculum:
    """The phases of a whole run."""

    phases: tuple[Phase, ...]
    batch_tokens: int

    @property
    def steps(self) -> int:
        """Number of steps of a whole run."""
        return sum(phase.steps for phase in self.phases)

    def lesson(self, step: int, steps: int) -> Lesson:
        """Return the parameters of a step in a run of `steps` steps. A short run passes through all phases too."""
        position = step * self.steps / steps
        phase = self._phase(position)
        length = phase.lengths[step % len(phase.lengths)]
        return Lesson(
            rows=max(MIN_ROWS, self.batch_tokens // length),
            length=length,
            # With more sentences than fit, the question would be cut off.
            fillers=min(phase.fillers, length // FILLER_TOKENS),
            copying=phase.copying,
            learning_rate=phase.learning_rate.at(position),
        )

    def _phase(self, position: float) -> Phase:
        ends = accumulate(phase.steps for phase in self.phases)
        return next(phase for phase, end in zip(self.phases, ends, strict=True) if position < end)


_LEARN = Cosine(begin=0, end=7000, peak=3e-3, floor=0.04)
_LENGTHEN = Cosine(begin=7000, end=8800, peak=1e-3, floor=0.03)
FULL = Curriculum(
    batch_tokens=4096,
    phases=(
        # Copying has to form first, and it forms on short rows that do little else; it shows around step 700.
        Phase(2800, lengths=(128,), fillers=2, copying=0.8, learning_rate=_LEARN),
        Phase(2100, lengths=(320,), fillers=10, copying=0.4, learning_rate=_LEARN),
        Phase(2100, lengths=(900,), fillers=40, copying=0.35, learning_rate=_LEARN),
        Phase(1800, lengths=(2304, 1152, 2304, 384), fillers=240, copying=0.25, learning_rate=_LENGTHEN),
    ),
)
_TRY = Cosine(begin=0, end=200, peak=1e-2, floor=0.1, warmup=5)
SMALL = Curriculum(
    batch_tokens=256,
    phases=(Phase(200, lengths=(64, 96), fillers=1, copying=0.2, learning_rate=_TRY),),
)
