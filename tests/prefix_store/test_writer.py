import errno
import logging
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.prefix_store.segments import files, segment, store, written
from worker.outcomes import NotStored
from worker.prefix_store import folder as folder_module
from worker.prefix_store.folder import Folder
from worker.prefix_store.listing import Listing
from worker.prefix_store.names import is_pin
from worker.prefix_store.store import PrefixStore
from worker.prefix_store.writer import NewSegment, WriteReport

PATH = tuple(range(30))


def all_written(opened: PrefixStore) -> None:
    """Wait until nothing waits to be written."""
    assert opened.writer.wait_for_room(1 << 40, time.monotonic() + 20)


def test_files_whose_start_is_on_no_disk_are_forgotten(tmp_path: Path) -> None:
    written(tmp_path, segment(PATH, 10), segment((*PATH[:10], 99), 10))
    opened = store(tmp_path)
    opened.forget("", PATH)
    opened.close(10)
    (left,) = files(tmp_path)
    assert "-10-11-" in left.name


def test_a_segment_that_waits_to_be_written_is_forgotten(tmp_path: Path) -> None:
    opened = store(tmp_path)
    opened.writer.write(segment(PATH))
    opened.forget("", PATH)
    opened.close(10)
    assert files(tmp_path) == []


def test_a_scan_does_not_bring_back_a_forgotten_prefix_whose_removal_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tmp_path, segment(PATH))
    opened, go = store(tmp_path), threading.Event()
    monkeypatch.setattr(opened._folder, "write", lambda *_, **__: go.wait(20))
    opened.writer.write(segment((99,)))  # the removal waits for it
    opened.forget("", PATH)
    opened.writer.scan()
    assert files(tmp_path)
    assert opened.find("", PATH, stateful=False) is None
    go.set()
    opened.close(20)
    assert files(tmp_path) == []


def test_a_forgotten_prefix_that_is_written_again_is_found(tmp_path: Path) -> None:
    written(tmp_path, segment(PATH))
    opened = store(tmp_path)
    opened.forget("", PATH)
    opened.writer.write(segment(PATH))
    all_written(opened)
    assert opened.find("", PATH, stateful=False) is not None
    opened.close(20)
    assert len(files(tmp_path)) == 1


def test_a_forgotten_file_that_cannot_be_removed_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError

    written(tmp_path, segment(PATH))
    opened = store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        opened.forget("", PATH)
        opened.close(20)
    opened.writer.scan()
    assert len(files(tmp_path)) == 1
    assert opened.find("", PATH, stateful=False) is None


def test_forgotten_files_are_removed_once_the_folder_can_be_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    enforce, fails = Folder.enforce, [True]

    def failing(folder: Folder) -> None:
        if fails:
            fails.clear()
            raise OSError(errno.EIO, "kumquat")
        enforce(folder)

    written(tmp_path, segment(PATH))
    opened = store(tmp_path)
    monkeypatch.setattr(Folder, "enforce", failing)
    opened.forget("", PATH)
    opened.forget("", (99,))
    opened.close(20)
    assert files(tmp_path) == []


@pytest.mark.parametrize("stored_before", [False, True])
def test_a_pinned_segment_outlives_the_others(tmp_path: Path, stored_before: bool) -> None:
    if stored_before:
        written(tmp_path, segment((1,)))
    plain = segment((1,))
    opened = store(tmp_path)
    opened.writer.write(NewSegment(plain.path, plain.has_state, plain.content, pinned=True))
    opened.close(10)
    assert sum(is_pin(each.name) for each in tmp_path.iterdir()) == 1
    written(tmp_path, segment((2,)), segment((3,)), max_bytes=22_000)
    again = store(tmp_path)
    assert again.find("", (1,), stateful=False) is not None
    again.close(5)


def test_the_bytes_of_a_file_are_known_at_once(tmp_path: Path) -> None:
    opened = store(tmp_path)
    opened.writer.write(segment(PATH))
    all_written(opened)
    chain = opened.find("", PATH, stateful=False)
    opened.close(5)
    assert chain is not None
    assert chain.sizes == (files(tmp_path)[0].stat().st_size,)


# What becomes of segments that are stored on request


def reported(opened: PrefixStore, *segments: NewSegment) -> WriteReport:
    """Write and pin segments; return the report once it is done, and close the store."""
    report = WriteReport()
    for each in segments:
        assert opened.writer.write(replace(each, pinned=True, report=report))
    opened.close(20)
    assert report.done
    return report


def test_the_bytes_of_new_files_are_reported(tmp_path: Path) -> None:
    first = reported(store(tmp_path), segment(PATH))
    again = reported(store(tmp_path), segment(PATH))
    assert (first.written_bytes, first.refusal) == (files(tmp_path)[0].stat().st_size, None)
    assert (again.written_bytes, again.refusal) == (0, None)


@pytest.mark.parametrize(
    ("limits", "refusal"), [({"max_bytes": 8_000}, NotStored.QUOTA), ({"daily": 8_000}, NotStored.DAILY_LIMIT)]
)
def test_a_segment_that_is_not_written_is_reported_with_the_reason(
    tmp_path: Path, limits: dict[str, int], refusal: NotStored
) -> None:
    report = reported(store(tmp_path, **limits), segment(PATH))  # type: ignore[arg-type]
    assert (report.written_bytes, report.refusal, files(tmp_path)) == (0, refusal, [])


def test_a_failed_write_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder_module, "write_segment", full)
    report = reported(store(tmp_path), segment((1,)), segment((2,)))
    assert report.refusal is NotStored.DISK
    assert not [each for each in tmp_path.iterdir() if is_pin(each.name)]


def test_an_unexpected_error_is_logged_once_and_loses_one_segment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    write_segment, fails = folder_module.write_segment, [True]

    def failing(*given: Any) -> None:
        if fails:
            fails.clear()
            raise RuntimeError("kumquat")
        write_segment(*given)

    monkeypatch.setattr(folder_module, "write_segment", failing)
    monkeypatch.setattr("worker.prefix_store.writer._PAUSE_S", 0.0)
    opened, report = store(tmp_path), WriteReport()
    with caplog.at_level(logging.WARNING, "sluice.prefix_store"):
        opened.writer.write(replace(segment((1,)), report=report))
        opened.writer.write(segment((2,)))
        all_written(opened)
        assert opened.writer.thread.is_alive()
        opened.close(20)
    assert (report.done, report.refusal, opened.writer.pending_bytes) == (True, NotStored.DISK, 0)
    assert len(files(tmp_path)) == 1
    assert [bool(record.exc_info) for record in caplog.records] == [True, False]
    assert "kumquat" in caplog.text
    assert caplog.records[-1].args == (1,)


def test_a_failed_scan_does_not_end_the_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scans = list[int]()

    def failing(folder: Folder) -> None:
        scans.append(1)
        raise RuntimeError("kumquat")

    opened = store(tmp_path)
    monkeypatch.setattr(Folder, "enforce", failing)
    with caplog.at_level(logging.WARNING, "sluice.prefix_store"):
        for number in range(3):
            opened.forget("", (number,))
        opened.close(20)
    assert len(scans) == 3
    assert len(caplog.records) == 1


def test_what_follows_a_refused_segment_is_not_written(tmp_path: Path) -> None:
    large, small = segment(PATH[:10], size=30_000), segment(PATH, 10, size=512)
    report = reported(store(tmp_path, max_bytes=20_000), large, small)
    assert (report.refusal, files(tmp_path)) == (NotStored.QUOTA, [])


def test_a_segment_whose_file_was_deleted_is_written_again(tmp_path: Path) -> None:
    written(tmp_path, segment(PATH))
    opened = store(tmp_path)
    files(tmp_path)[0].unlink()
    opened.writer.write(segment(PATH))
    opened.close(20)
    assert len(files(tmp_path)) == 1


def test_a_segment_is_written_if_the_stored_file_of_its_end_continues_nothing(tmp_path: Path) -> None:
    written(tmp_path, segment(PATH, 10))
    written(tmp_path, segment(PATH))
    opened = store(tmp_path)
    chain = opened.find("", PATH, stateful=False)
    opened.close(5)
    assert chain is not None
    assert chain.tokens == PATH


# Pins


@pytest.mark.parametrize("by", ["the writer", "the command"])
def test_a_pin_stays_when_a_segment_is_written_again_with_its_state(tmp_path: Path, by: str) -> None:
    plain = segment(PATH)
    if by == "the writer":
        reported(store(tmp_path), plain)
    else:
        written(tmp_path, plain)
        listing = Listing(tmp_path)
        listing.pin(listing.prefixes[0])
    written(tmp_path, segment(PATH, state=True))
    (file,) = files(tmp_path)
    assert [each.name for each in tmp_path.iterdir() if is_pin(each.name)] == [f"{file.name}.pin"]
    store(tmp_path, max_bytes=1).close(5)
    assert files(tmp_path) == [file]


def test_the_pin_of_a_file_that_is_gone_is_removed(tmp_path: Path) -> None:
    reported(store(tmp_path), segment(PATH))
    files(tmp_path)[0].unlink()
    store(tmp_path).close(5)
    assert not [each for each in tmp_path.iterdir() if is_pin(each.name)]


def test_files_beside_a_pinned_one_make_room_in_the_same_second(tmp_path: Path) -> None:
    opened = store(tmp_path, max_bytes=35_000)
    for number in range(3):
        pinned = number == 0
        opened.writer.write(replace(segment((number,)), pinned=pinned))
    opened.writer.write(segment((3,)))
    opened.close(20)
    again = store(tmp_path)
    found = [number for number in range(4) if again.find("", (number,), stateful=False)]
    again.close(5)
    assert found == [0, 2, 3]
