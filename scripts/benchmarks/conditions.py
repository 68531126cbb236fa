"""The conditions of a measurement, for the JSON files of figures."""

import os
import platform
import time

THREADS = "OPENBLAS_NUM_THREADS"  # read by OpenBLAS when it is loaded


def conditions() -> dict[str, str]:
    """Return the time, the machine, and what decides how fast a CPU multiplies matrices."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M:%S %z"),
        "machine": f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores",
        "preloaded": os.environ.get("LD_PRELOAD", ""),
        THREADS: os.environ.get(THREADS, ""),
    }
