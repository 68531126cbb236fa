"""Sets resource limits of a child process."""

import os
import resource
import sys

_NICENESS = 10  # a decode step comes first when all cores are busy


def limit_resources(*, cpu_s: int, address_bytes: int) -> None:
    """Limit the calling process. SIGXCPU ends it when its CPU time is spent. The address limit holds on Linux only."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    if sys.platform == "linux":  # macOS does not enforce this one
        resource.setrlimit(resource.RLIMIT_AS, (address_bytes, address_bytes))


def lower_priority() -> None:
    """Let the worker's own threads run before the calling process when all cores are busy."""
    os.nice(_NICENESS)
