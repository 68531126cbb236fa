"""Limit of the steps that rewriting a schema may take to compare its parts."""

MOST_STEPS = 300_000  # some 0.3 s


class Spent(Exception):
    """No step is left."""


class Budget:
    """Steps that are left. Every walk over a client's lists takes one for each member that it visits."""

    def __init__(self, steps: int = MOST_STEPS) -> None:
        self._left = steps

    def take(self, count: int = 1) -> None:
        """Raises `Spent`."""
        self._left -= count
        if self._left < 0:
            raise Spent
