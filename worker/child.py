"""Processes for work that no thread can do, since it cannot be stopped there or holds the interpreter's lock."""

import asyncio
import sys
from dataclasses import dataclass
from pathlib import Path

_ROOT = Path(__file__).parents[1]  # where the package `worker` is found


@dataclass(frozen=True, slots=True)
class Ended:
    status: int  # negative: the signal that ended it
    output: bytes
    errors: bytes


async def run_child(module: str, given: bytes) -> Ended:
    """Run `python -m module` once, with `given` on its standard input. If the caller is cancelled, the process ends."""
    # A session of its own: an interrupt from the terminal is meant for the worker.
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, cwd=_ROOT, start_new_session=True,
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        output, errors = await process.communicate(given)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return Ended(process.returncode, output, errors)
