"""How a Mac is doing: by libSystem, and by the output of programs of macOS."""

import ctypes
import re
import subprocess
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from worker.host.courtesy import Pressure, Signals

_PRESSURES = {1: Pressure.NORMAL, 2: Pressure.WARNING, 4: Pressure.CRITICAL}  # DISPATCH_MEMORYPRESSURE_*


class MacOS:
    """A `Host`: see `worker.host.watch`."""

    awake_command: Sequence[str] = ("/usr/bin/caffeinate", "-i")

    def __init__(self, library: Any = None) -> None:
        """`library`: libSystem."""
        self._library = library or ctypes.CDLL(None)
        self._heat = ctypes.c_int(-1)
        name = b"com.apple.system.thermalpressurelevel"  # OSThermalNotification.h
        self._knows_heat = self._library.notify_register_check(name, ctypes.byref(self._heat)) == 0
        self._slow, self._slow_at = Signals(), float("-inf")

    def read(self, *, busy: bool = True) -> Signals:
        # Seconds: each time starts two programs, of some 10 ms, and without jobs only metrics and `top` show them.
        if time.monotonic() - self._slow_at >= (5.0 if busy else 300.0):
            idle_s = _idle_s(_output("/usr/sbin/ioreg", "-c", "IOHIDSystem", "-r", "-d", "1"))
            on_battery = _is_on_battery(_output("/usr/bin/pmset", "-g", "batt"))
            self._slow, self._slow_at = Signals(idle_s=idle_s, on_battery=on_battery), time.monotonic()
        return replace(self._slow, pressure=self._pressure(), hot=self._is_hot())

    def _pressure(self) -> Pressure:
        level, size = ctypes.c_int(), ctypes.c_size_t(ctypes.sizeof(ctypes.c_int))
        name = b"kern.memorystatus_vm_pressure_level"
        failed = self._library.sysctlbyname(name, ctypes.byref(level), ctypes.byref(size), None, ctypes.c_size_t(0))
        return Pressure.NORMAL if failed else _PRESSURES.get(level.value, Pressure.NORMAL)

    def _is_hot(self) -> bool:
        """Return True from "heavy" on, which NSProcessInfo calls serious: macOS slows the machine down."""
        state = ctypes.c_uint64()
        failed = not self._knows_heat or self._library.notify_get_state(self._heat, ctypes.byref(state))
        return not failed and state.value >= 2


def _idle_s(registry: str) -> float | None:
    """Return the seconds since the last input, by ioreg: `"HIDIdleTime" = 8417083`, in nanoseconds."""
    found = re.search(r'"HIDIdleTime" = (\d+)', registry)
    return int(found[1]) / 1e9 if found else None


def _is_on_battery(status: str) -> bool:
    """Return True if pmset prints `Now drawing from 'Battery Power'`."""
    return "'Battery Power'" in status.partition("\n")[0]


def _output(*command: str) -> str:
    """Return what a program prints; "" if it fails."""
    try:
        return subprocess.run(command, capture_output=True, timeout=5, check=True).stdout.decode("utf-8", "replace")
    except (OSError, subprocess.SubprocessError):
        return ""
