"""Asks a group of rows for drafts ever more rarely while these are not worthwhile."""

LONGEST_PAUSE = 15  # steps between two in which drafts are asked for: what begins to pay is noticed after 16 at most
PAUSE_AFTER_JOIN = 3  # steps: a new row may be worth drafts, and rows may join in each step
_PATIENCE = 8  # asks of a worker without a pause at the beginning, while costs are measured


class Backoff:
    """Decides in which steps of a group its proposers are asked: in each while drafts are worthwhile, else after a
    pause that doubles each time."""

    def __init__(self, other: "Backoff | None" = None) -> None:
        """`other`: of the group that was asked last, from which a new group takes its pause."""
        self._patience: int = other._patience if other else _PATIENCE
        self._pause: int = min(other._pause, PAUSE_AFTER_JOIN) if other else 0  # steps
        self._left = 0  # steps

    def advance(self) -> bool:
        """Advance by a step, and return True if proposers are asked in it. Then `observe` must be called."""
        if self._left == 0:
            return True
        self._left -= 1
        return False

    def observe(self, worthwhile: bool) -> None:
        """Record if the drafts of the step are worthwhile."""
        if worthwhile:
            self._pause = 0
        elif self._patience:
            self._patience -= 1
        else:
            self._pause = min(2 * self._pause + 1, LONGEST_PAUSE)
        self._left = self._pause

    def join(self) -> None:
        """Record that rows have joined the group: shorten the pause, so that they are asked soon. However often rows
        join, `PAUSE_AFTER_JOIN` steps remain between two asks that are not worthwhile."""
        waited = self._pause - self._left
        self._pause = min(self._pause, PAUSE_AFTER_JOIN)
        self._left = max(0, self._pause - waited)
