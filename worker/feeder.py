"""A feeder: a child process, because files of 200 MB are nothing for the loop that publishes tokens.

It ends when its stdin does: so it is told to stop, and so it hears that its worker died, however that was.
"""

import asyncio
import logging
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Awaitable, Mapping, Sequence
from typing import Any

logger = logging.getLogger("sluice.batch")

_LONGEST_LINE = 1 << 20  # bytes of its log


async def feed(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    stopping: asyncio.Event,
    hurry: asyncio.Event,
    grace_s: float,
) -> bool:
    """Until it has ended, by itself or because of `stopping`. False where it failed: how, is in the log alone."""
    try:
        child = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            limit=_LONGEST_LINE,
            env=env,
            process_group=0,  # Ctrl-C reaches the worker alone
        )
    except OSError as error:
        logger.error("no feeder can be started: %s", error)
        return False
    assert child.stdin is not None
    assert child.stdout is not None
    words = asyncio.create_task(_pass_on(child.stdout))
    try:
        await either(child.wait(), stopping.wait())
        child.stdin.close()
        await either(child.wait(), hurry.wait(), timeout_s=grace_s)
    finally:
        if child.returncode is None:
            child.kill()
        last = await words
    if (code := await child.wait()) and not stopping.is_set():
        logger.error("the feeder failed with code %d: %s", code, last)
        return False
    return True


async def _pass_on(lines: asyncio.StreamReader) -> str:
    """Returns the last of them."""
    last = ""
    while True:
        try:
            line = await lines.readline()
        except ValueError:
            continue  # too long to be worth reading
        if not line:
            return last
        if said := line.decode("utf-8", "replace").rstrip():
            logger.info("%s", said)
            last = said


async def either(*waits: Awaitable[Any], timeout_s: float | None = None) -> None:
    """Until one of them is over, or the time is."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
