"""Liveness and readiness of a worker, and the heartbeats that show if a thread still makes progress.

Each part is a function that returns its problem, or None. Probes call the parts on threads of their own, so that they
are answered even if the event loop hangs.
"""

import asyncio
import time
from collections.abc import Callable, Mapping


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
                await asyncio.sleep(0.5)
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


HealthPart = Callable[[], str | None]


class Health:
    """Liveness and readiness by part. A worker that loads its model is alive, but not ready."""

    def __init__(self, watchdog_s: float) -> None:
        """`watchdog_s`: seconds after which a stalled process ends itself; probes report the stall earlier."""
        # Longer than any step of the engine, and any pause of the event loop that is not a hang.
        self._silent_s = min(10.0, watchdog_s / 2)
        self._alive: Mapping[str, HealthPart] = {}
        self._ready: Mapping[str, HealthPart] = {"model": lambda: "it is loading"}

    def set_checks(self, heartbeats: Mapping[str, Heartbeat], parts: Mapping[str, HealthPart]) -> None:
        """Set the checks of a loaded worker: alive while its heartbeats beat, and ready if its parts are too."""
        self._alive = {name: self._is_stalled(heartbeat) for name, heartbeat in heartbeats.items()}
        self._ready = {"model": lambda: None, **parts}

    def alive(self) -> dict[str, str]:
        """Return "ok" or the problem, by part."""
        return _run_checks(self._alive)

    def ready(self) -> dict[str, str]:
        """Return "ok" or the problem, by part; those of `alive` included."""
        return _run_checks({**self._alive, **self._ready})

    def _is_stalled(self, heartbeat: Heartbeat) -> HealthPart:
        def part() -> str | None:
            silent_s = heartbeat.stalled_s()
            return f"no heartbeat for {silent_s:.0f} s" if silent_s > self._silent_s else None

        return part


def _run_checks(parts: Mapping[str, HealthPart]) -> dict[str, str]:
    return {name: part() or "ok" for name, part in parts.items()}
