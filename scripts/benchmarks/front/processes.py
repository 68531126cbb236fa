"""CPU time and memory of other processes."""

import platform
import subprocess
from pathlib import Path


def cpu_s(pid: int) -> float:
    """Return the CPU seconds that a process has used, in steps of 10 ms."""
    if platform.system() == "Linux":
        fields = Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / 100  # user and system time in ticks, which are 10 ms
    *larger, seconds = _ps(pid, "time").split(":")
    minutes = 0
    for unit in larger:
        minutes = 60 * minutes + int(unit)
    return 60 * minutes + float(seconds)


def resident_bytes(pid: int) -> int:
    """Return the memory that a process occupies."""
    return 1024 * int(_ps(pid, "rss"))


def _ps(pid: int, column: str) -> str:
    command = ["ps", "-o", f"{column}=", "-p", str(pid)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
