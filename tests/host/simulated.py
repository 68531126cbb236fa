"""A machine whose state a test sets: the twin of `Linux` and `MacOS`."""

from collections.abc import Sequence

from worker.host.courtesy import Pressure, Signals


class SimulatedHost:
    """A `Host`. A `problem` is raised by the next readings."""

    def __init__(self, awake_command: Sequence[str] = ()) -> None:
        self.signals, self.awake_command = Signals(), awake_command
        self.problem: Exception | None = None
        self.readings, self.busy = 0, False  # of the last reading: jobs run

    def press(self, pressure: Pressure) -> None:
        self.signals = Signals(pressure)

    def read(self, *, busy: bool = True) -> Signals:
        self.readings += 1
        self.busy = busy
        if self.problem:
            raise self.problem
        return self.signals
