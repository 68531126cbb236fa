"""How long decode steps take, told apart from what else the device does."""

import time


class Stopwatch:
    """A step is under way while the host goes on, so its beginning is not always known. It is where the device was
    idle and the step was waited for by itself, and where one step followed another: the others are not timed."""

    def __init__(self) -> None:
        self._launched_at: float | None = None  # of the step under way, on an idle device
        self._ended_at: float | None = None  # of the step before it
        self.running = False

    def launched(self, began: float) -> float | None:
        """A step was, and the one before it has ended just now: so long has that one taken."""
        now = time.perf_counter()
        taken = now - self._ended_at if self._ended_at else None
        self._launched_at, self._ended_at = (None, now) if self.running else (began, None)
        self.running = True
        return taken

    def ended(self) -> float | None:
        """The step under way has, and the device is idle."""
        taken = time.perf_counter() - self._launched_at if self._launched_at else None
        self._launched_at = self._ended_at = None
        self.running = False
        return taken

    def disturbed(self) -> None:
        """The device does something else, beside the step under way or before the next one."""
        self._launched_at = self._ended_at = None
