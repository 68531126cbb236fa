"""`python -m worker` that loads its model when the file LOAD_FILE exists."""

import os
import time
from pathlib import Path

from worker import app
from worker.__main__ import main
from worker.settings import Settings

_open = app._open


def _wait_and_open(settings: Settings, memory: int, *_: object) -> object:
    while not Path(os.environ["LOAD_FILE"]).exists():
        time.sleep(0.01)
    return _open(settings, memory)


if __name__ == "__main__":
    app._open = _wait_and_open  # type: ignore[assignment]
    main()
