"""The folder's lock is never waited for without a limit."""

import fcntl
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from worker.prefix_store import folder as folder_module
from worker.prefix_store.folder import Folder
from worker.prefix_store.names import LOCK


@pytest.fixture
def taken(tmp_path: Path) -> Iterator[Path]:
    """A folder whose lock another one has and keeps."""
    with Folder(tmp_path, 0).lock.held():
        yield tmp_path


def attempt(folder: Folder) -> None:
    with folder.lock.held():
        pass


def test_a_lock_that_is_kept_is_waited_for_with_a_limit(taken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "_WAIT_S", 0.02)
    with pytest.raises(TimeoutError):
        attempt(Folder(taken, 0))


def test_a_lock_that_is_released_meanwhile_is_had(tmp_path: Path) -> None:
    waiting = Folder(tmp_path, 0)
    thread = threading.Thread(target=attempt, args=(waiting,))
    with Folder(tmp_path, 0).lock.held():
        thread.start()
    thread.join(20)
    assert not thread.is_alive()
    attempt(waiting)


def test_a_wait_that_has_begun_ends_with_the_worker(taken: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "_WAIT_S", 1e6)
    monkeypatch.setattr(folder_module, "_LAST_WAIT_S", 0.0)
    folder, errors = Folder(taken, 0), list[BaseException]()

    def run() -> None:
        try:
            attempt(folder)
        except TimeoutError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    folder.lock.shorten_waits()
    thread.join(20)
    assert len(errors) == 1


def test_the_lock_of_a_file_that_was_deleted_meanwhile_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flock, deleted = fcntl.flock, list[int]()

    def slow(file: int, how: int) -> Any:
        if not deleted:
            deleted.append(os.fstat(file).st_ino)
            (tmp_path / LOCK).unlink()
        return flock(file, how)

    monkeypatch.setattr(fcntl, "flock", slow)
    with Folder(tmp_path, 0).lock.held():
        monkeypatch.setattr(folder_module, "_WAIT_S", 0.0)
        with pytest.raises(TimeoutError):
            attempt(Folder(tmp_path, 0))
    assert len(deleted) == 1
