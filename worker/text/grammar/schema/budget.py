"""Limits the work of comparing the parts of one schema."""

MOST_STEPS = 300_000  # some 0.3 s


class BudgetExceeded(Exception):
    """The limit of a schema's steps is reached."""


class Budget:
    """Steps left for one schema. Every loop over a client's list takes one step for each member that it visits."""

    def __init__(self, steps: int = MOST_STEPS) -> None:
        self._left = steps

    def take(self, count: int = 1) -> None:
        """Subtract `count` steps. Raises `BudgetExceeded` if fewer are left."""
        self._left -= count
        if self._left < 0:
            raise BudgetExceeded
