"""Asks a group of rows for drafts ever more rarely while these are not worthwhile."""

LONGEST_PAUSE = 15  # steps between two in which drafts are asked for: what begins to pay is noticed after 16 at most
_PATIENCE = 8  # asks without a pause at the beginning, while prompts are indexed


class Backoff:
    """Decides in which steps of a group its proposers are asked: in each while drafts are worthwhile, else after a
    pause that doubles each time."""

    def __init__(self) -> None:
        self._pause = self._left = 0  # steps
        self._patience = _PATIENCE

    def is_due(self) -> bool:
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
