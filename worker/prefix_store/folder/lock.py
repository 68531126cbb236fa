"""The lock of the folder. Processes take it in turn, each for milliseconds, and one that was stopped keeps it."""

import fcntl
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from worker.prefix_store.files.names import LOCK

_WAIT_S = 10.0  # a scan of 10,000 files, the longest that a process does with the lock, takes about one second
_LAST_WAIT_S = 1.0  # while the worker ends
_POLL_S = 0.005


class FolderLock:
    """The lock of a folder."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / LOCK
        self._ending = threading.Event()

    def shorten_waits(self) -> None:
        """Wait for a second at most from now on, also if a wait has begun. May be called on any thread."""
        self._ending.set()

    @contextmanager
    def held(self) -> Iterator[None]:
        """Hold the lock; creates the folder. Raises TimeoutError if another process does not release it, and other
        kinds of OSError."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)  # it may have been deleted
        file = self._acquire()
        try:
            yield
        finally:
            os.close(file)

    def _acquire(self) -> int:
        """Return the open file that has the lock. Polls, since a wait in the system cannot be ended."""
        began_s = time.monotonic()
        while (file := self._try()) is None:
            waited_s = time.monotonic() - began_s
            if waited_s >= (_LAST_WAIT_S if self._ending.is_set() else _WAIT_S):
                raise TimeoutError(
                    f"another process has kept the lock of the folder for {waited_s:.0f} s; continue or end it"
                )
            time.sleep(_POLL_S)
        return file

    def _try(self) -> int | None:
        """Return the open file that has the lock; None if another process has it. Opened anew each time: a lock
        on a deleted file protects nothing."""
        file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o600)
        is_held = False
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_held = os.path.samestat(os.fstat(file), self._path.stat())
        except (BlockingIOError, FileNotFoundError):
            return None
        finally:
            if not is_held:
                os.close(file)
        return file if is_held else None
