"""Signals of Linux are read from files of the kernel; missing and foreign ones say nothing."""

from pathlib import Path

import pytest

from worker.host.courtesy import Pressure, Signals
from worker.host.linux import Linux

PSI = "some avg10={:.2f} avg60=0.00 avg300=0.00 total=444012\nfull avg10={:.2f} avg60=0.00 avg300=0.00 total=349344\n"
MACHINE = "proc/pressure/memory"


def write(root: Path, files: dict[str, str]) -> Linux:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, "utf-8")
    return Linux(root)


def test_a_machine_without_such_files_is_fine(tmp_path: Path) -> None:
    assert Linux(tmp_path).read() == Signals()


def test_this_machine_can_be_read() -> None:
    signals = Linux().read()
    assert (signals.idle_s, signals.in_use) == (None, False)


@pytest.mark.parametrize(
    ("some", "full", "pressure"),
    [(0.0, 0.0, 0), (9.9, 9.9, 0), (10.0, 0.0, 1), (99.0, 19.9, 1), (60.0, 20.0, 2), (100.0, 100.0, 2)],
)
def test_pressure_is_the_time_that_tasks_have_waited(tmp_path: Path, some: float, full: float, pressure: int) -> None:
    assert write(tmp_path, {MACHINE: PSI.format(some, full)}).read() == Signals(Pressure(pressure))


@pytest.mark.parametrize(
    ("group", "file"),
    [
        ("0::/a.slice/b\n", "sys/fs/cgroup/a.slice/b/memory.pressure"),
        ("0::/of/the/host\n", "sys/fs/cgroup/memory.pressure"),  # as inside a container
        ("9:memory:/old\n0::/a\n", "sys/fs/cgroup/unified/a/memory.pressure"),
    ],
)
def test_that_of_the_control_group_counts_too(tmp_path: Path, group: str, file: str) -> None:
    files = {MACHINE: PSI.format(0, 0), "proc/self/cgroup": group, file: PSI.format(50, 30)}
    assert write(tmp_path, files).read().pressure == Pressure.CRITICAL


@pytest.mark.parametrize("text", ["", "some\n", "some avg10= avg60\n", "\xff\n", "some avg10=a b\n"])
def test_a_file_in_another_form_says_nothing(tmp_path: Path, text: str) -> None:
    assert write(tmp_path, {MACHINE: text}).read() == Signals()


@pytest.mark.parametrize(
    ("trips", "hot"),
    [
        ({"0": ("critical", 100_000)}, False),
        ({"0": ("critical", 95_000)}, True),
        ({"0": ("hot", 91_000)}, False),
        ({"0": ("passive", 50_000), "1": ("hot", 90_000)}, True),
        ({"0": ("critical", 0), "1": ("critical", -274_000)}, False),  # not set
        ({"0": ("passive", 50_000)}, False),  # the system slows down a little, as laptops often do
    ],
)
def test_a_zone_at_its_limit_is_hot(tmp_path: Path, trips: dict[str, tuple[str, int]], hot: bool) -> None:
    zone = "sys/class/thermal/thermal_zone0"
    files = {f"{zone}/temp": "90000\n"}
    for number, (kind, at) in trips.items():
        files |= {f"{zone}/trip_point_{number}_type": f"{kind}\n", f"{zone}/trip_point_{number}_temp": f"{at}\n"}
    assert write(tmp_path, files).read() == Signals(hot=hot)


@pytest.mark.parametrize(
    ("supplies", "on_battery"),
    [
        ({"BAT0": {"type": "Battery", "status": "Discharging"}}, True),
        ({"BAT0": {"type": "Battery", "status": "Discharging"}, "AC": {"type": "Mains", "online": "0"}}, True),
        ({"BAT0": {"type": "Battery", "status": "Discharging"}, "AC": {"type": "Mains", "online": "1"}}, False),
        ({"BAT0": {"type": "Battery", "status": "Charging"}}, False),
        ({"mouse": {"type": "Battery", "status": "Discharging", "scope": "Device"}}, False),
        ({"AC": {"type": "Mains", "online": "0"}}, False),
    ],
)
def test_a_battery_that_is_used_is_found(tmp_path: Path, supplies: dict[str, dict[str, str]], on_battery: bool) -> None:
    files = {f"sys/class/power_supply/{name}/{k}": f"{v}\n" for name, each in supplies.items() for k, v in each.items()}
    assert write(tmp_path, files).read() == Signals(on_battery=on_battery)
