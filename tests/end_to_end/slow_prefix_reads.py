"""`python -m worker` that takes a second to read each file of a prefix, and always waits for it."""

import time
from typing import Any

from worker.__main__ import main
from worker.engine.prefill import queue
from worker.prefix_store.reader import Reader

_read_segment = Reader._read_segment


def _read_slowly(*arguments: Any) -> Any:
    time.sleep(1)
    return _read_segment(*arguments)


if __name__ == "__main__":
    Reader._read_segment = _read_slowly  # type: ignore[assignment]
    queue.load_limit_s = lambda *_, **__: 60.0  # type: ignore[attr-defined]
    main()
