"""The plan of a run, step by step. Uses no MLX, clock or files."""

from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from models.training.curriculum import FULL, SMALL, Lesson

Size = Literal["full", "small"]
SIZES: tuple[Size, ...] = get_args(Size)
CURRICULA = {"full": FULL, "small": SMALL}


@dataclass(frozen=True, slots=True)
class Plan:
    """The parameters that determine a run."""

    size: Size
    steps: int
    seed: int

    @classmethod
    def scaled(cls, size: Size, scale: float, seed: int) -> "Plan":
        """Return a plan for a share of the usual number of steps."""
        return cls(size, max(1, round(CURRICULA[size].steps * scale)), seed)

    def lesson(self, step: int) -> Lesson:
        """Return the parameters of a step."""
        return CURRICULA[self.size].lesson(step, self.steps)

    def dice(self, step: int) -> Random:
        """Return the random generator of a step. Each step has its own, so a resumed run draws the same chats."""
        return Random(f"{self.seed}/{step}")

    def tokens_from(self, step: int) -> int:
        """Return the number of tokens of this step and all later ones."""
        return sum(self.lesson(later).tokens for later in range(step, self.steps))
