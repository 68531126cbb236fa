"""Liveness and readiness of a worker.

Each part is a function that returns its problem, or None. Probes call the parts on threads of their own, so that they
are answered even if the event loop hangs.
"""

from collections.abc import Callable, Mapping

from worker.monitoring.heartbeat import Heartbeat

Part = Callable[[], str | None]

_SILENT_S = 10.0  # longer than any step of the engine, and any pause of the event loop that is not a hang


class Health:
    """Liveness and readiness by part. A worker that loads its model is alive, but not ready."""

    def __init__(self, watchdog_s: float) -> None:
        """`watchdog_s`: seconds after which a stalled process ends itself; probes report the stall earlier."""
        self._silent_s = min(_SILENT_S, watchdog_s / 2)
        self._alive: Mapping[str, Part] = {}
        self._ready: Mapping[str, Part] = {"model": lambda: "it is loading"}

    def set_checks(self, heartbeats: Mapping[str, Heartbeat], parts: Mapping[str, Part]) -> None:
        """Set the checks of a loaded worker: alive while its heartbeats beat, and ready if its parts are too."""
        self._alive = {name: self._is_stalled(heartbeat) for name, heartbeat in heartbeats.items()}
        self._ready = {"model": lambda: None, **parts}

    def alive(self) -> dict[str, str]:
        """Return "ok" or the problem, by part."""
        return _run_checks(self._alive)

    def ready(self) -> dict[str, str]:
        """Return "ok" or the problem, by part; those of `alive` included."""
        return _run_checks({**self._alive, **self._ready})

    def _is_stalled(self, heartbeat: Heartbeat) -> Part:
        def part() -> str | None:
            silent_s = heartbeat.stalled_s()
            return f"no heartbeat for {silent_s:.0f} s" if silent_s > self._silent_s else None

        return part


def _run_checks(parts: Mapping[str, Part]) -> dict[str, str]:
    return {name: part() or "ok" for name, part in parts.items()}
