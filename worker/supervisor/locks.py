"""Locked files of this user's supervisors and of their workers, which say how much memory these may take."""

import fcntl
import logging
import os
import re
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from worker.supervisor.decision import Situation

logger = logging.getLogger("sluice.supervisor")


class WorkerLocks:
    """Locks that a supervisor and its workers hold while they live: the system releases them, however a process ends.

    So a supervisor finds the workers of one that was killed: they end their jobs first, and their memory is not free
    before."""

    def __init__(self, folder: Path | None = None) -> None:
        """`folder`: None for the one of this user on this machine."""
        self._folder = folder or Path(tempfile.gettempdir()) / f"sluice-models-{os.getuid()}"
        self._id, self._workers = secrets.token_hex(8), 0
        self._left = list[Path]()
        try:
            self._folder.mkdir(0o700, exist_ok=True)
            if self._folder.stat().st_uid != os.getuid():
                raise PermissionError(None, "it is another user's")
            self._own = self._take(self._id)
            living = self._delete_ended()
        except OSError as error:
            logger.warning("%s: %s; a killed supervisor's workers are not counted", self._folder, error.strerror)
        else:
            self._left = [
                file for file in living if (id := _supervisor_of(file)) and not _is_locked(file.with_name(id))
            ]

    def lock_worker(self, nbytes: int) -> int | None:
        """Return the descriptor of a lock for a worker that may take so many bytes: to pass on, and to close. None if
        there can be no lock."""
        self._workers += 1
        with suppress(OSError):
            self._delete_ended()
            return self._take(f"{self._id}-{self._workers}-{nbytes}")
        return None

    def left(self) -> list[Situation]:
        """Return those workers that ended supervisors had left behind at the start of this one, and that still live."""
        self._left = [file for file in self._left if _is_locked(file)]
        return [
            Situation(file.name, int(file.name.rpartition("-")[2]), in_memory=True, leaving=True) for file in self._left
        ]

    def _take(self, name: str) -> int:
        hidden = self._folder / f".{name}"
        descriptor = os.open(hidden, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        hidden.rename(self._folder / name)  # other supervisors delete a visible file that has no lock
        return descriptor

    def _delete_ended(self) -> list[Path]:
        """Delete the files of ended processes, and return the others."""
        files = [file for file in self._folder.iterdir() if not file.name.startswith(".")]
        living = [file for file in files if _is_locked(file)]
        for file in {*files} - {*living}:
            with suppress(OSError):  # another supervisor has, or it is none of ours
                file.unlink()
        return living


def _supervisor_of(file: Path) -> str | None:
    """Return the supervisor that started the worker of this file; None if it is not that of a worker."""
    found = re.fullmatch(r"(\w+)-\d+-\d{1,15}", file.name)
    return found and found[1]


def _is_locked(file: Path) -> bool:
    """Return True if a process holds the file's lock."""
    try:
        with file.open("rb") as opened:
            fcntl.flock(opened, fcntl.LOCK_SH | fcntl.LOCK_NB)  # shared: two may ask at once
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False
