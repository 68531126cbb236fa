"""A heartbeat that shows if a thread still makes progress."""

import asyncio
import time

_EVERY_S = 0.5


class Heartbeat:
    """Written by the watched thread, read by others. A thread with nothing to do pauses it, and is not stalled then."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._beat: float | None = None

    def beat(self) -> None:
        """Record that the thread makes progress now."""
        self._beat = time.monotonic()

    async def keep_beating(self) -> None:
        """Beat on the event loop until cancelled."""
        try:
            while True:
                self.beat()
                await asyncio.sleep(_EVERY_S)
        finally:
            self.pause()

    def pause(self) -> None:
        """Stop counting until the next beat, since the thread has nothing to do."""
        self._beat = None

    def refresh(self) -> None:
        """Restart the count from now, unless it is paused."""
        if self._beat is not None:
            self.beat()

    def stalled_s(self) -> float:
        """Seconds since the last beat; 0 if paused."""
        beat = self._beat
        return 0.0 if beat is None else time.monotonic() - beat
