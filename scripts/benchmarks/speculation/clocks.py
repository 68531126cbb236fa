"""The clocks by which steps are measured."""

import time
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Clocks:
    """What the clocks show, or the time between two readings of them. Other work of the machine makes steps take more
    wall time, and hardly more CPU time."""

    wall_s: float = 0.0
    cpu_s: float = 0.0  # CPU time of the process: the host's work, and on a CPU the computing too
    host_s: float = 0.0  # CPU time of the engine's thread, the host's work; MLX computes in another thread

    @classmethod
    def now(cls) -> "Clocks":
        """Read the clocks. Called by the engine's thread."""
        return cls(time.perf_counter(), time.process_time(), time.thread_time())

    def __sub__(self, other: "Clocks") -> "Clocks":
        return Clocks(self.wall_s - other.wall_s, self.cpu_s - other.cpu_s, self.host_s - other.host_s)

    def __add__(self, other: "Clocks") -> "Clocks":
        return Clocks(self.wall_s + other.wall_s, self.cpu_s + other.cpu_s, self.host_s + other.host_s)
