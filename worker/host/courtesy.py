"""Decides what a worker leaves to others on its machine: time while a person uses it, and while it is hot or on
battery; memory while that is short. How the machine is doing comes from `Linux` and `MacOS`."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from math import inf

from sluice.contract.keys import Lane


class Pressure(IntEnum):
    """How short of memory the machine is, in the levels of macOS."""

    NORMAL = 0
    WARNING = 1
    CRITICAL = 2


@dataclass(frozen=True, slots=True)
class Signals:
    """The state of the machine."""

    pressure: Pressure = Pressure.NORMAL
    idle_s: float | None = None  # seconds since a person's last input; None: unknown
    hot: bool = False  # so that the system slows it down, or is about to
    on_battery: bool = False

    @property
    def in_use(self) -> bool:
        """True if a person uses the machine: pauses of a minute are common while reading."""
        return self.idle_s is not None and self.idle_s < 60.0

    @property
    def reasons(self) -> list[str]:
        """The names of the reasons for leaving time to others."""
        return [name for name in ("in_use", "hot", "on_battery") if getattr(self, name)]


class Reclaim(IntEnum):
    """Memory that a worker gives back, at each level with that of the levels before it."""

    NOTHING = 0
    HALF_CACHES = 1  # half of the prefix cache
    CACHES = 2  # the prefix cache
    OFFLINE_ROWS = 3  # offline rows are preempted, and wait
    NEW_JOBS = 4  # new jobs wait for running ones to end

    def free_rows(self, free: Mapping[Lane, int], rows: int) -> dict[Lane, int]:
        """Return the rows for which jobs are claimed, of the `free` ones: what waits in the queue can run elsewhere. A
        worker without an interactive job takes one all the same. `rows`: in use by interactive jobs."""
        open_rows = {lane: count for lane, count in free.items() if lane != "batch" or self < Reclaim.OFFLINE_ROWS}
        most = inf if self < Reclaim.NEW_JOBS else max(0, 1 - rows)
        return {lane: int(min(most, open_rows.get(lane, 0))) for lane in free}


@dataclass(frozen=True, slots=True)
class Throttle:
    """What a worker leaves to others now. The shares are those of the time that its steps take."""

    share: float = 1.0  # while an interactive job runs
    offline_share: float = 1.0  # while only offline jobs run
    reclaim: Reclaim = Reclaim.NOTHING

    def share_for(self, lanes: Iterable[Lane]) -> float:
        """Return the share of the time that steps take for jobs of these lanes."""
        return self.share if self.share == self.offline_share or "interactive" in lanes else self.offline_share


_MOST = {Pressure.NORMAL: Reclaim.NOTHING, Pressure.WARNING: Reclaim.CACHES, Pressure.CRITICAL: Reclaim.NEW_JOBS}
# Seconds until more is given back, if what was given back has not helped: macOS and PSI average over some seconds.
_MORE_AFTER_S = {Pressure.NORMAL: 0.0, Pressure.WARNING: 5.0, Pressure.CRITICAL: 1.0}
_CALM_S, _MOST_CALM_S = 15.0, 600.0


class Courtesy:
    """Turns signals into a `Throttle`, with hysteresis: memory is given back level by level, and taken again level by
    level after a time without pressure, which doubles whenever the pressure comes back soon."""

    def __init__(self, setting: str) -> None:
        """`setting`: `SLUICE_COURTESY`."""
        shares = {"off": (1.0, 1.0), "auto": (1.0, 0.25)}  # a reader may be the person who uses the machine
        self._is_off = setting == "off"
        self._share, self._offline_share = shares.get(setting) or (float(setting), float(setting))
        self._hot_at = self._eased_at = -inf
        self._level, self._changed_at = Reclaim.NOTHING, -inf
        self._calm_since: float | None = None
        self._calm_s = _CALM_S

    def decide(self, signals: Signals, now: float) -> Throttle:
        """Return what to leave to others. Call it every second or so. `now`: monotonic seconds."""
        if self._is_off:
            return Throttle()
        self._hot_at = now if signals.hot else self._hot_at
        is_hot = now - self._hot_at < 30.0  # seconds; else it is hot again as soon as it has cooled down a little
        level = self._reclaim(signals.pressure, now)
        if is_hot or signals.reasons:
            return Throttle(self._share, self._offline_share, level)
        return Throttle(reclaim=level)

    def _reclaim(self, pressure: Pressure, now: float) -> Reclaim:
        most = _MOST[pressure]
        if self._level <= most:
            self._calm_since = None
            if self._level < most and now - self._changed_at >= _MORE_AFTER_S[pressure]:
                self._raise(now)
            return self._level
        self._calm_since = now if self._calm_since is None else self._calm_since
        if now - max(self._calm_since, self._changed_at) >= self._calm_s:
            self._level, self._changed_at = Reclaim(self._level - 1), now
            self._eased_at = now
        return self._level

    def _raise(self, now: float) -> None:
        if self._eased_at > -inf:  # what was taken again may be the reason
            soon = now - self._eased_at < 2 * self._calm_s
            self._calm_s = min(_MOST_CALM_S, 2 * self._calm_s) if soon else _CALM_S
            self._eased_at = -inf
        self._level, self._changed_at = Reclaim(self._level + 1), now
