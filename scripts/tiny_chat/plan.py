"""The plan of a run, step by step: no MLX, no clock, no files."""

from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from scripts.tiny_chat.curriculum import FULL, SMALL, Lesson

Size = Literal["full", "small"]
SIZES: tuple[Size, ...] = get_args(Size)
CURRICULA = {"full": FULL, "small": SMALL}


@dataclass(frozen=True, slots=True)
class Plan:
    size: Size
    steps: int
    seed: int

    @classmethod
    def scaled(cls, size: Size, scale: float, seed: int) -> "Plan":
        return cls(size, max(1, round(CURRICULA[size].steps * scale)), seed)

    def lesson(self, step: int) -> Lesson:
        return CURRICULA[self.size].lesson(step, self.steps)

    def dice(self, step: int) -> Random:
        """A step's own, so a run that goes on draws what it would have drawn."""
        return Random(f"{self.seed}/{step}")

    def tokens_from(self, step: int) -> int:
        return sum(self.lesson(later).tokens for later in range(step, self.steps))
