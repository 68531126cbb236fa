"""Whether a thread still moves."""

import asyncio
import time

_EVERY_S = 0.5


class Heartbeat:
    """Beaten by the thread that it is about, read by another. One with nothing to do rests, and is not missed."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._beat: float | None = None

    def beat(self) -> None:
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
        self._beat = None

    def refresh(self) -> None:
        """Count from now, unless at rest."""
        if self._beat is not None:
            self.beat()

    def stalled_s(self) -> float:
        beat = self._beat
        return 0.0 if beat is None else time.monotonic() - beat
