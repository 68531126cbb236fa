"""`python -m worker` with the endless tokenizer, one of whose services fails when a job runs."""

import asyncio

from tests.end_to_end import endless_tokenizer
from worker.__main__ import main
from worker.engine.tokenizer import MLXTokenizer
from worker.queue.worker import QueueWorker

_refresh_presence = QueueWorker._refresh_presence
_UNTIL_IT_TOKENIZES_S = 0.5


async def _fail(worker: QueueWorker) -> None:
    keeping = asyncio.create_task(_refresh_presence(worker))
    while not worker.jobs:
        await asyncio.sleep(0.02)
    await asyncio.sleep(_UNTIL_IT_TOKENIZES_S)
    keeping.cancel()
    raise RuntimeError("no service today")


if __name__ == "__main__":
    MLXTokenizer.encode = endless_tokenizer.encode  # type: ignore[method-assign]
    QueueWorker._refresh_presence = _fail  # type: ignore[method-assign]
    main()
