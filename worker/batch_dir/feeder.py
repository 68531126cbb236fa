"""Runs a feeder as a child process, since files of 200 MB would block the loop that publishes tokens.

The feeder ends when its stdin is closed: on request, or because its worker died in any way.
"""

import asyncio
import logging
from asyncio.subprocess import PIPE, STDOUT
from collections.abc import Mapping, Sequence

from worker.queue.services import wait_first

logger = logging.getLogger("sluice.batch")

_LONGEST_LINE = 1 << 20  # bytes in the feeder's log


async def feed(
    command: Sequence[str],
    env: Mapping[str, str],
    *,
    stopping: asyncio.Event,
    force_stop: asyncio.Event,
    grace_s: float,
) -> bool:
    """Run a feeder to its end, and stop it at `stopping`. Returns False if it failed; the reason is only logged.

    `grace_s`: seconds that it may take to stop; `force_stop` ends them early. Then it is killed.
    """
    try:
        child = await asyncio.create_subprocess_exec(
            *command,
            stdin=PIPE,
            stdout=PIPE,
            stderr=STDOUT,
            limit=_LONGEST_LINE,
            env=env,
            process_group=0,  # so Ctrl-C reaches only the worker
        )
    except OSError as error:
        logger.error("cannot start a feeder: %s", error)
        return False
    assert child.stdin is not None
    assert child.stdout is not None
    log = asyncio.create_task(_log_lines(child.stdout))
    try:
        await wait_first(child.wait(), stopping.wait())
        child.stdin.close()
        await wait_first(child.wait(), force_stop.wait(), timeout_s=grace_s)
    finally:
        if child.returncode is None:
            child.kill()
        last = await log
    if (code := await child.wait()) and not stopping.is_set():
        logger.error("the feeder failed with code %d: %s", code, last)
        return False
    return True


async def _log_lines(lines: asyncio.StreamReader) -> str:
    """Log the lines. Returns the last one."""
    last = ""
    while True:
        try:
            line = await lines.readline()
        except ValueError:
            continue  # longer than the limit; the stream reader has dropped it
        if not line:
            return last
        if text := line.decode("utf-8", "replace").rstrip():
            logger.info("%s", text)
            last = text
