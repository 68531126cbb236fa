"""Several writers in one folder: none waits for the content of another, and together they keep the quota."""

import errno
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

import pytest

from tests.prefix_store.segments import files, nbytes, segment
from worker.outcomes import NotStored
from worker.prefix_store import folder as folder_module
from worker.prefix_store.folder import Folder, Unwritable
from worker.prefix_store.format import read_file_header
from worker.prefix_store.names import WRITTEN, FileName
from worker.prefix_store.scan import scan_folder

QUOTA = 1_000_000
BOOKKEEPING = 1_000  # bytes: the lock and the day's record


def name(number: int, *, state: bool = False) -> FileName:
    return FileName("0" * 32, "1" * 32, f"{number:032x}", 0, 1, state)


def write(
    folder: Folder, number: int, on_written: Callable[[int], object] = lambda nbytes: None, *, size: int = 20_000
) -> int | NotStored:
    return folder.write(name(number), segment((number,), size=size).content, on_written=on_written)


def size_of_a_file(tmp_path: Path) -> int:
    written = write(Folder(tmp_path / "measured", QUOTA), 0)
    assert isinstance(written, int)
    return written


def unfinished(folder: Path) -> list[Path]:
    return [file for file in folder.iterdir() if file.name.endswith(".part")]


@contextmanager
def slowly(folder: Folder, number: int) -> Iterator[None]:
    """Be in the middle of writing a file while the context is open; then finish it."""
    begun, go = threading.Event(), threading.Event()

    def pause(nbytes: int) -> None:
        begun.set()
        assert go.wait(20)

    thread = threading.Thread(target=write, args=(folder, number, pause))
    thread.start()
    assert begun.wait(20)
    try:
        yield
    finally:
        go.set()
        thread.join(20)
    assert not thread.is_alive()


def test_a_file_appears_while_another_writer_is_at_its_own(tmp_path: Path) -> None:
    slow, other = (Folder(tmp_path, QUOTA) for _ in range(2))
    with slowly(slow, 1):
        size = write(other, 2)
        other.enforce()
        assert [file.name for file in files(tmp_path)] == [str(name(2))]
        assert len(unfinished(tmp_path)) == 1  # its writer lives
    assert [file.name for file in files(tmp_path)] == [str(name(1)), str(name(2))]
    for number in (1, 2):
        header = read_file_header(tmp_path / str(name(number)), name(number))
        assert header.data_start + header.ends[-1] == size


def test_two_writers_of_the_same_file_leave_it_whole(tmp_path: Path) -> None:
    slow, other = (Folder(tmp_path, QUOTA) for _ in range(2))
    with slowly(slow, 1):
        assert isinstance(write(other, 1), int)
    assert read_file_header(tmp_path / str(name(1)), name(1)).tokens == (1,)
    assert unfinished(tmp_path) == []


def test_an_unfinished_file_of_a_living_writer_counts_for_the_quota(tmp_path: Path) -> None:
    size = size_of_a_file(tmp_path)
    quota = 2 * size + BOOKKEEPING
    folder = tmp_path / "shared"
    slow, other = (Folder(folder, quota) for _ in range(2))
    with slowly(slow, 1):
        assert nbytes(folder) >= size  # from the start
        for number in range(2, 6):
            assert write(other, number) == size
            assert nbytes(folder) <= quota
        assert [file.name for file in files(folder)] == [str(name(5))]
        assert write(other, 6, size=35_000) is NotStored.QUOTA  # and nothing is removed in vain
    assert {file.name for file in files(folder)} == {str(name(1)), str(name(5))}
    assert nbytes(folder) <= quota


def test_the_bytes_of_unfinished_files_count_for_the_budget_of_the_day(tmp_path: Path) -> None:
    daily = 3 * size_of_a_file(tmp_path) // 2
    slow, other = (Folder(tmp_path, QUOTA, daily) for _ in range(2))
    with slowly(slow, 1):
        assert write(other, 2) is NotStored.DAILY_LIMIT
    assert len(files(tmp_path)) == 1


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), RuntimeError("unexpected")])
def test_a_failed_write_leaves_nothing_and_gives_its_bytes_back_to_the_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    size = size_of_a_file(tmp_path)
    folder = Folder(tmp_path / "shared", QUOTA, 3 * size // 2)

    def fail(*_: object) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(folder_module, "write_segment", fail)
        with pytest.raises(Unwritable if isinstance(error, OSError) else RuntimeError):
            write(folder, 1)
    assert unfinished(folder.path) == []
    assert write(folder, 2) == size


def written_today(folder: Folder) -> int:
    """Return the bytes that count for the budget of the day."""
    nbytes = json.loads((folder.path / WRITTEN).read_text())["bytes"]
    assert isinstance(nbytes, int)
    return nbytes


def test_what_a_failed_write_has_written_counts_for_the_budget_of_the_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(file: BinaryIO, *_: object) -> None:
        file.write(bytes(1_000))
        raise OSError(errno.EIO, "failing")

    monkeypatch.setattr(folder_module, "write_segment", fail)
    folder = Folder(tmp_path, QUOTA, QUOTA)
    with pytest.raises(Unwritable):
        write(folder, 1)
    assert written_today(folder) == 1_000


def test_a_write_that_fails_after_midnight_gives_nothing_back_to_the_new_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    day = [1]
    monkeypatch.setattr(folder_module, "_today", lambda: day[0])
    late, other = (Folder(tmp_path, QUOTA, QUOTA) for _ in range(2))

    def fail(nbytes: int) -> None:
        day[0] = 2
        write(other, 2, size=1_000)
        raise OSError(errno.EIO, "failing")

    with pytest.raises(Unwritable):
        write(late, 1, fail)
    assert written_today(late) == (tmp_path / str(name(2))).stat().st_size


def test_a_file_is_written_if_the_day_s_record_cannot_be_updated_afterwards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, renamed = Folder(tmp_path, QUOTA), Path.rename

    def fail(path: Path, target: Path) -> Path:
        if files(tmp_path) and path.name.startswith(WRITTEN):
            raise OSError(errno.ENOSPC, "full")
        return renamed(path, target)

    monkeypatch.setattr(Path, "rename", fail)
    assert write(folder, 1) == (tmp_path / str(name(1))).stat().st_size


def test_a_file_that_cannot_be_removed_counts_and_another_one_is_removed_the_next_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlink = Path.unlink

    def fail(path: Path, missing_ok: bool = False) -> None:
        if path.name == str(name(1)):
            raise PermissionError
        unlink(path, missing_ok)

    monkeypatch.setattr(Path, "unlink", fail)
    quota = 2 * size_of_a_file(tmp_path) + BOOKKEEPING
    folder = Folder(tmp_path / "small", quota)
    results = [write(folder, number) for number in (1, 2, 3, 3)]
    assert results[2] is NotStored.QUOTA
    assert [file.name for file in files(folder.path)] == [str(name(1)), str(name(3))]
    assert nbytes(folder.path) <= quota


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path: Path) -> None:
    with pytest.raises(OSError):  # noqa: PT011
        scan_folder(tmp_path / "gone")


def test_files_of_two_writers_at_a_time_keep_the_quota(tmp_path: Path) -> None:
    quota = 5 * size_of_a_file(tmp_path) + BOOKKEEPING
    shared, sizes = tmp_path / "shared", list[int]()
    folders = [Folder(shared, quota) for _ in range(2)]

    def run(first: int) -> None:
        for number in range(first, first + 15):
            write(folders[first > 0], number, lambda _: sizes.append(nbytes(shared)))

    threads = [threading.Thread(target=run, args=(first,)) for first in (0, 100)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert max(sizes) <= quota
    assert len(files(shared)) == 5
    assert unfinished(shared) == []


_WRITER = """
import pathlib, sys
from tests.prefix_store.test_folder import QUOTA, write
from worker.prefix_store.folder import Folder
write(Folder(pathlib.Path(sys.argv[1]), QUOTA), 1, lambda nbytes: (print("writing", flush=True), sys.stdin.read()))
"""


def test_an_unfinished_file_of_another_process_is_removed_once_it_has_died(tmp_path: Path) -> None:
    writer = subprocess.Popen(
        [sys.executable, "-c", _WRITER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    assert writer.stdin is not None
    folder = Folder(tmp_path, QUOTA)
    try:
        assert writer.stdout.readline() == "writing\n"
        assert isinstance(write(folder, 2), int)
        folder.enforce()
        assert len(unfinished(tmp_path)) == 1
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        writer.stdin.close()
    folder.enforce()
    assert unfinished(tmp_path) == []
    assert len(files(tmp_path)) == 1


def test_an_unfinished_file_that_is_not_locked_is_removed(tmp_path: Path) -> None:
    (tmp_path / name(1).temporary("gone")).write_bytes(bytes(5_000))
    Folder(tmp_path, QUOTA).enforce()
    assert unfinished(tmp_path) == []


def test_an_unfinished_file_of_another_program_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "film.part").write_bytes(bytes(5_000))
    Folder(tmp_path, QUOTA).enforce()
    assert (tmp_path / "film.part").exists()
