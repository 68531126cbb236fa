"""What keeps the store's threads out of the way of the engine's: a low priority, and a steady rate."""

import ctypes
import os
import sys
import threading
import time
from contextlib import suppress


def lower_priority(*, awaited: bool = False) -> None:
    """Let the system prefer all threads of normal priority to the calling one. Only on Linux, where each thread has a
    niceness of its own, and on macOS, where it has a quality of service; elsewhere it does nothing. `awaited`: requests
    wait for the thread, so macOS is left alone, which would also delay its reads on an idle machine."""
    if sys.platform == "linux":
        thread = threading.get_native_id()
        with suppress(OSError):
            # Beside a computing thread, one with 10 more gets about a tenth of a core. 19 is the system's highest.
            niceness = os.getpriority(os.PRIO_PROCESS, thread) + 10
            os.setpriority(os.PRIO_PROCESS, thread, min(niceness, 19))
    elif sys.platform == "darwin" and not awaited:
        with suppress(OSError, AttributeError):
            utility = 0x11  # of macOS's sys/qos.h: work that the user does not wait for
            ctypes.CDLL(None).pthread_set_qos_class_self_np(utility, 0)


class Pace:
    """Holds a rate by pauses after small pieces of work, and gives way to other work, so that the machine's memory bus
    and disk are never taken for long. For one thread, except the events."""

    def __init__(
        self, bytes_per_s: float, unlimited: threading.Event, no_other_work: threading.Event | None = None
    ) -> None:
        """`unlimited`: while it is set there are no pauses. `no_other_work`: set while there is none; None: there is
        never any."""
        self._bytes_per_s = bytes_per_s
        self._unlimited, self._no_other_work = unlimited, no_other_work
        self.nbytes = 0  # so far
        self._due_s = 0.0  # time.monotonic() at which the work done so far is due

    def __call__(self, nbytes: int) -> None:
        """Pause for as long as `nbytes` more bytes are ahead of the rate, and for other work. Blocks."""
        now_s = time.monotonic()
        self.nbytes += nbytes
        if self._unlimited.is_set():
            self._due_s = now_s
            return
        shortest_s = 0.001  # shorter pauses are added up
        self._due_s = max(self._due_s, now_s - shortest_s) + nbytes / self._bytes_per_s
        ahead_s = self._due_s - now_s
        if ahead_s >= shortest_s:
            self._unlimited.wait(ahead_s)
        if self._no_other_work and not self._unlimited.is_set():
            self._no_other_work.wait(nbytes / 30e6)  # bytes a second, beside other work that does not end
