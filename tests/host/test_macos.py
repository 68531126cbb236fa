"""Signals of a Mac are read from libSystem and from its programs' output, here from stand-ins for both."""

from typing import Any

import pytest

from worker.host import macos
from worker.host.courtesy import Pressure, Signals
from worker.host.macos import MacOS

REGISTRY = """\
+-o IOHIDSystem  <class IOHIDSystem, id 0x100000529, registered, matched, active, busy 0 (0 ms), retain 24>
    {
      "HIDPointerAcceleration" = 45056
      "HIDIdleTime" = 8417083125
    }
"""
BATTERY = "Now drawing from 'Battery Power'\n -InternalBattery-0 (id=4653155)\t87%; discharging; 5:02 remaining\n"
MAINS = "Now drawing from 'AC Power'\n -InternalBattery-0 (id=4653155)\t100%; charged; 0:00 remaining present: true\n"


class Library:
    """libSystem with these states. A failing call returns a number other than 0."""

    def __init__(self, pressure: int = 1, heat: int = 0, *, fails: bool = False) -> None:
        self.pressure, self.heat, self._failed = pressure, heat, int(fails)

    def sysctlbyname(self, name: bytes, value: Any, size: Any, new: None, new_size: Any) -> int:
        assert (name, size._obj.value) == (b"kern.memorystatus_vm_pressure_level", 4)
        value._obj.value = self.pressure
        return -self._failed

    def notify_register_check(self, name: bytes, token: Any) -> int:
        assert name == b"com.apple.system.thermalpressurelevel"
        token._obj.value = 7
        return self._failed

    def notify_get_state(self, token: Any, state: Any) -> int:
        assert token.value == 7
        state._obj.value = self.heat
        return self._failed


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What programs print, by their names."""
    outputs = {"/usr/sbin/ioreg": REGISTRY, "/usr/bin/pmset": MAINS}
    monkeypatch.setattr(macos, "_output", lambda program, *_: outputs[program])
    return outputs


def test_a_mac_that_is_used(printed: dict[str, str]) -> None:
    assert MacOS(Library()).read() == Signals(Pressure.NORMAL, idle_s=8.417083125)


def test_a_mac_on_battery_without_a_keyboard(printed: dict[str, str]) -> None:
    printed |= {"/usr/sbin/ioreg": "", "/usr/bin/pmset": BATTERY}
    assert MacOS(Library()).read() == Signals(on_battery=True)


@pytest.mark.parametrize(("level", "pressure"), [(1, 0), (2, 1), (4, 2), (0, 0), (3, 0)])
def test_its_pressure_is_the_kernel_s(printed: dict[str, str], level: int, pressure: int) -> None:
    assert MacOS(Library(pressure=level)).read().pressure == Pressure(pressure)


@pytest.mark.parametrize(("heat", "hot"), [(0, False), (1, False), (2, True), (3, True), (4, True)])
def test_it_is_hot_from_heavy_on(printed: dict[str, str], heat: int, hot: bool) -> None:
    assert MacOS(Library(heat=heat)).read().hot is hot


def test_calls_that_fail_say_nothing(printed: dict[str, str]) -> None:
    assert MacOS(Library(4, 3, fails=True)).read() == Signals(idle_s=8.417083125)


def test_programs_are_started_every_five_seconds_and_pressure_read_each_time(
    printed: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library()
    mac = MacOS(library)
    mac.read()
    printed["/usr/bin/pmset"], library.pressure = BATTERY, 4
    signals = mac.read()
    assert (signals.on_battery, signals.pressure) == (False, Pressure.CRITICAL)
    mac._slow_at -= 5.0
    assert mac.read().on_battery


def test_programs_are_started_every_five_minutes_while_no_job_runs(printed: dict[str, str]) -> None:
    mac = MacOS(Library())
    mac.read(busy=False)
    printed["/usr/bin/pmset"] = BATTERY
    mac._slow_at -= 299.0
    assert not mac.read(busy=False).on_battery
    assert mac.read().on_battery
    printed["/usr/bin/pmset"] = MAINS
    mac._slow_at -= 300.0
    assert not mac.read(busy=False).on_battery


def test_a_program_that_is_missing_or_fails_prints_nothing() -> None:
    assert macos._output("/no/such/program") == macos._output("false") == ""
    assert macos._output("echo", "yes") == "yes\n"
