"""How a Linux machine is doing: files of the kernel, which are read within a millisecond. A person who uses it is not
recognized."""

import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from worker.host.courtesy import Pressure, Signals

# Percent of the last ten seconds in which some tasks, or all at once, have waited for memory. systemd-oomd begins to
# kill at 60 % of all; a machine that is only busy has 0.
_SOME_WAIT, _ALL_WAIT = 10.0, 20.0


class Linux:
    """A `Host`: see `worker.host.watch`."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._root = root
        self._files = [file for file in self._pressure_files() if file.is_file()]

    @property
    def awake_command(self) -> list[str]:
        command = shutil.which("systemd-inhibit")
        named = ["--what=idle", "--who=sluice", "--why=jobs run"]
        return [command, *named] if command else []

    def read(self, *, busy: bool = True) -> Signals:
        pressure = max(map(_pressure, self._files), default=Pressure.NORMAL)
        return Signals(pressure, hot=self._is_hot(), on_battery=self._is_on_battery())

    def _pressure_files(self) -> Iterator[Path]:
        """Yield the files of pressure: the machine's, and the control group's."""
        yield self._root / "proc/pressure/memory"
        groups = [line.removeprefix("0::/") for line in _text(self._root / "proc/self/cgroup").splitlines()]
        for mounted in (self._root / "sys/fs/cgroup", self._root / "sys/fs/cgroup/unified"):
            # Inside a container the path may be the host's; then only the root group exists.
            yield from (mounted / group / "memory.pressure" for group in {*groups, ""} if ":" not in group)

    def _is_hot(self) -> bool:
        return any(map(_is_hot, (self._root / "sys/class/thermal").glob("thermal_zone*")))

    def _is_on_battery(self) -> bool:
        supplies = [*(self._root / "sys/class/power_supply").glob("*")]
        if any(_text(each / "type") == "Mains" and _text(each / "online") == "1" for each in supplies):
            return False
        # A battery of scope Device is a mouse's.
        batteries = (
            each for each in supplies if _text(each / "type") == "Battery" and _text(each / "scope") != "Device"
        )
        return any(_text(each / "status") == "Discharging" for each in batteries)


def _pressure(file: Path) -> Pressure:
    """Return the pressure by a PSI file, such as `some avg10=0.12 avg60=0.03 avg300=0.00 total=4440`."""
    waited = {
        who: float(percent) for who, percent in re.findall(r"^(\w+) avg10=(\d{1,3}\.\d\d) ", _text(file), re.MULTILINE)
    }
    if waited.get("full", 0.0) >= _ALL_WAIT:
        return Pressure.CRITICAL
    return Pressure.WARNING if waited.get("some", 0.0) >= _SOME_WAIT else Pressure.NORMAL


def _is_hot(zone: Path) -> bool:
    """Return True if a zone is at the temperature that it calls hot, or within 5 °C of the one at which the system
    stops. Temperatures are in 0.001 °C."""
    now = _number(zone / "temp")
    for kind in zone.glob("trip_point_*_type"):
        trip = _number(kind.with_name(kind.name.replace("_type", "_temp")))
        margin = {"hot": 0, "critical": 5_000}.get(_text(kind))
        if margin is not None and 0 < trip <= now + margin:
            return True
    return False


def _number(file: Path) -> int:
    text = _text(file)
    return int(text) if text.removeprefix("-").isdecimal() else 0


def _text(file: Path) -> str:
    """Return the text of a file; "" if it is missing or cannot be read, as that of a sensor that sleeps."""
    try:
        return file.read_text("utf-8", "replace").strip()
    except OSError:
        return ""
