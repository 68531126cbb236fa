"""`python -m worker` with the endless tokenizer, one of whose services fails when a job runs."""

import asyncio
from collections.abc import Callable

from sluice.contract.keys import Lane
from tests.end_to_end import endless_tokenizer
from worker.__main__ import main
from worker.engine.tokenizer import MLXTokenizer
from worker.queue.presence import Presence
from worker.queue.running import RunningJobs

_publish = Presence.run
_UNTIL_IT_TOKENIZES_S = 0.5


async def _fail(presence: Presence, running: RunningJobs, on_waiting: Callable[[Lane, int], None]) -> None:
    keeping = asyncio.create_task(_publish(presence, running, on_waiting))
    while not sum(running.by_lane().values()):
        await asyncio.sleep(0.02)
    await asyncio.sleep(_UNTIL_IT_TOKENIZES_S)
    keeping.cancel()
    raise RuntimeError("no service today")


if __name__ == "__main__":
    MLXTokenizer.encode = endless_tokenizer.encode  # type: ignore[method-assign]
    Presence.run = _fail  # type: ignore[method-assign]
    main()
