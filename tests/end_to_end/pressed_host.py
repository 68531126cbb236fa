"""`python -m worker` on a simulated machine, whose time runs fifty times as fast: its pressure is a number in the file
PRESSURE_FILE."""

import os
import time
from pathlib import Path

from tests.fakes import Clock
from tests.host.simulated import SimulatedHost
from worker.__main__ import main
from worker.host import courtesy, watch
from worker.host.courtesy import Pressure, Signals


class _Host(SimulatedHost):
    def read(self, *, busy: bool = True) -> Signals:
        return Signals(Pressure(int(Path(os.environ["PRESSURE_FILE"]).read_text("utf-8"))))


class _FastClock(Clock):
    def monotonic(self) -> float:
        return 50 * time.monotonic()


if __name__ == "__main__":
    watch.this_host = _Host
    courtesy._MOST_CALM_S = courtesy._CALM_S = 2.0  # so that levels are taken back between two pressures
    watch.time = _FastClock()  # type: ignore[assignment]
    watch.HostWatch.__init__.__kwdefaults__["every_s"] = 0.02
    main()
