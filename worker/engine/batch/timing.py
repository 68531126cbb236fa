"""Time decode steps, separately from other work of the device."""

import time


class Stopwatch:
    """A step runs on the device while the host continues, so its start is not always known. It is known if the device
    was idle and the step was then waited for, or if the step directly followed another; other steps are not timed."""

    def __init__(self) -> None:
        self._launched_at: float | None = None  # of the running step, if the device was idle
        self._ended_at: float | None = None  # of the step before it, if the next followed directly
        self._verified_at: float | None = None  # the end of the last step, if that has verified drafts
        self.running = False

    def launched(self, began: float) -> float | None:
        """Record that a step was launched and that the one before it has just ended. Returns the seconds that the
        earlier step took, or None if unknown. `began`: time.perf_counter() before the launch."""
        now = time.perf_counter()
        taken = now - self._ended_at if self._ended_at else None
        self._launched_at, self._ended_at = (None, now) if self.running else (began, None)
        self._verified_at = None
        self.running = True
        return taken

    def ended(self) -> float | None:
        """Record that the running step has ended and that the device is idle. Returns its seconds, or None if
        unknown."""
        taken = time.perf_counter() - self._launched_at if self._launched_at else None
        self._launched_at = self._ended_at = None
        self.running = False
        return taken

    def verified(self) -> None:
        """Record that a step has ended in which all rows have verified drafts: the device is idle."""
        self._verified_at = time.perf_counter()

    def take_host_s(self) -> float:
        """Return the seconds of the host's work since the last step, if that has verified drafts; else 0, and if called
        again. They are a part of the next step, if that verifies drafts too: the device waits for it."""
        since, self._verified_at = self._verified_at, None
        return time.perf_counter() - since if since else 0.0

    def invalidate(self) -> None:
        """Discard the pending measurement: the device does other work during the running step or before the next."""
        self._launched_at = self._ended_at = self._verified_at = None
