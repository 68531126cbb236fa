import errno
import logging
import shutil
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.prefix_store.segments import MODEL, assert_right, files, read, segment, store, written
from worker.prefix_store import reader as reader_module
from worker.prefix_store.folder import Folder
from worker.prefix_store.format import Header, OnRead
from worker.prefix_store.index import Chain
from worker.prefix_store.names import FileName
from worker.prefix_store.reader import Destination, LoadedSegment, Reader
from worker.prefix_store.store import PrefixStore, StoreOptions

PATH = tuple(range(30))


class Held:
    """Counts the files that are read, and holds them back until `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.names: list[FileName] = []
        self._go = threading.Event()
        read_segment = Reader._read_segment

        def held(reader: Reader, name: FileName, chain: Chain, with_state: bool) -> LoadedSegment | None:
            self.names.append(name)
            assert self._go.wait(20)
            return read_segment(reader, name, chain, with_state)

        monkeypatch.setattr(Reader, "_read_segment", held)

    def go(self) -> None:
        self._go.set()

    def wait(self) -> None:
        """Wait until a file is being read."""
        until(lambda: bool(self.names))


def until(done: Any) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Held:
    return Held(monkeypatch)


@pytest.fixture
def opened(tmp_path: Path) -> PrefixStore:
    """A store with two prefixes that share their first file."""
    written(tmp_path, segment(PATH[:10]), segment(PATH[:20], 10), segment((*PATH[:10], 99), 10))
    return store(tmp_path)


def chain_of(opened: PrefixStore, tokens: tuple[int, ...]) -> Chain:
    chain = opened.find("", tokens, stateful=False)
    assert chain is not None
    return chain


def test_callers_that_want_the_same_files_share_one_reading(held: Held, opened: PrefixStore) -> None:
    chain = chain_of(opened, PATH)
    readings = [opened.reader.read(chain) for _ in range(100)]
    held.go()
    until(lambda: all(reading.done for reading in readings))
    opened.close(5)
    assert held.names == [*chain.files]
    assert_right(chain, readings[-1].segments)


def test_chains_that_begin_alike_read_their_common_files_once(held: Held, opened: PrefixStore) -> None:
    one, other = chain_of(opened, PATH), chain_of(opened, (*PATH[:10], 99))
    readings = [opened.reader.read(one), opened.reader.read(other)]
    held.go()
    until(lambda: all(reading.done for reading in readings))
    opened.close(5)
    assert held.names == [*one.files, other.files[-1]]
    assert_right(other, readings[1].segments)


def test_a_finished_reading_is_not_shared(opened: PrefixStore) -> None:
    chain = chain_of(opened, PATH)
    first = opened.reader.read(chain)
    until(lambda: first.done)
    assert opened.reader.read(chain) is not first
    opened.close(5)


def test_a_reading_that_no_caller_holds_ends_with_its_current_file(held: Held, opened: PrefixStore) -> None:
    reading = opened.reader.read(chain_of(opened, PATH))
    held.wait()
    del reading
    held.go()
    opened.close(5)
    assert len(held.names) == 1


def test_a_cancelled_reading_is_done_without_segments(held: Held, opened: PrefixStore) -> None:
    reading = opened.reader.read(chain_of(opened, PATH))
    held.wait()
    reading.cancel()
    held.go()
    opened.close(5)
    assert (reading.done, reading.segments, len(held.names)) == (True, (), 1)


def test_nothing_is_found_while_a_reading_takes_too_long_and_the_log_has_one_line(
    held: Held, opened: PrefixStore, caplog: pytest.LogCaptureFixture
) -> None:
    chain = chain_of(opened, PATH)
    readings = [opened.reader.read(chain) for _ in range(3)]
    held.wait()
    with caplog.at_level(logging.WARNING, "sluice.prefix_store"):
        for reading in readings:
            opened.reader.give_up(reading, 0.5)
    assert opened.find("", PATH, stateful=False) is None
    held.go()
    until(lambda: opened.find("", PATH, stateful=False) is not None)
    assert_right(chain, read(opened, chain))
    opened.close(5)
    assert len(caplog.records) == 1


def test_reads_are_slow_while_rows_decode_and_fast_again_when_none_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("worker.prefix_store.reader._SHARED_BYTES_S", 2e5)  # instead of 300 MB a second
    written(tmp_path, *(segment((number,), size=200_000) for number in range(2)))
    opened = store(tmp_path)
    opened.reader.limit_reads(decoding=True)
    began = time.monotonic()
    slow = opened.reader.read(chain_of(opened, (0,)))
    until(lambda: slow.done)
    assert time.monotonic() - began >= 1.4  # 300,000 bytes; the first pauses are added up
    opened.reader.limit_reads(decoding=False)
    fast = opened.reader.read(chain_of(opened, (1,)))
    until(lambda: fast.done)
    opened.close(5)
    assert time.monotonic() - began < 20
    assert (len(slow.segments), len(fast.segments)) == (1, 1)


def test_closing_ends_a_pause_of_the_reader(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("worker.prefix_store.reader._SHARED_BYTES_S", 1e3)
    written(tmp_path, segment(PATH, size=200_000))  # takes minutes at this rate
    opened = store(tmp_path)
    opened.reader.limit_reads(decoding=True)
    reading = opened.reader.read(chain_of(opened, PATH))
    until(lambda: not opened.reader.no_reads.is_set())
    opened.close(5)
    opened.reader.limit_reads(decoding=True)
    opened.reader.thread.join(20)
    assert not opened.reader.thread.is_alive()
    assert reading.done


class Decoding(Destination):
    """Decodes with this function."""

    def __init__(self, decode: Callable[[Header, list[Any], OnRead], list[Any]]) -> None:
        self._decode = decode

    def decode(self, header: Header, buffers: list[Any], on_done: OnRead) -> list[Any]:
        return self._decode(header, buffers, on_done)


def store_into(folder: Path, destination: Destination) -> PrefixStore:
    """Return an open store that reads into this."""
    opened = PrefixStore(StoreOptions(folder, 10_000_000), MODEL, destination)
    opened.open()
    return opened


def decoding(folder: Path, destination: Destination) -> PrefixStore:
    """Return a store that has read one file of 8,192 bytes."""
    written(folder, segment(PATH))
    opened = store_into(folder, destination)
    reading = opened.reader.read(chain_of(opened, PATH))
    until(lambda: reading.done)
    assert len(reading.segments) == 1
    return opened


def test_the_time_of_decoding_counts_for_the_speed_of_reading(tmp_path: Path) -> None:
    def slow(header: Header, buffers: list[Any], on_done: OnRead) -> list[Any]:
        time.sleep(0.2)
        return buffers

    opened = decoding(tmp_path, Decoding(slow))
    assert opened.reader.bytes_per_s <= 350.1e6  # 0.7 of the first estimate, and 0.3 of 41 KB a second at most
    opened.close(5)


def test_what_decoding_writes_counts_for_the_limit_beside_rows(tmp_path: Path) -> None:
    def wide(header: Header, buffers: list[Any], on_done: OnRead) -> list[Any]:
        on_done(3 * 8192)
        return buffers

    opened = decoding(tmp_path, Decoding(wide))
    opened.reader.limit_reads(decoding=True)
    assert opened.reader.bytes_per_s == 300e6 / 4
    opened.close(5)


def test_a_file_that_cannot_be_decoded_is_a_miss(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def fail(header: Header, buffers: list[Any], on_done: OnRead) -> list[Any]:
        raise MemoryError("kumquat")

    written(tmp_path, segment(PATH))
    opened = store_into(tmp_path, Decoding(fail))
    with caplog.at_level(logging.WARNING, "sluice.prefix_store"):
        assert read(opened, chain_of(opened, PATH)) == ()
    assert opened.find("", PATH, stateful=False) is None
    opened.close(5)
    assert "kumquat" in caplog.text


def test_an_unexpected_error_is_logged_and_ends_no_later_reading(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(header: Header, buffers: list[Any], on_done: OnRead) -> list[Any]:
        if header.name.end == 20:
            raise ArithmeticError("kumquat")
        return buffers

    written(tmp_path, segment(PATH[:10]), segment(PATH[:20], 10))
    opened = store_into(tmp_path, Decoding(fail))
    with caplog.at_level(logging.WARNING, "sluice.prefix_store"):
        assert len(read(opened, chain_of(opened, PATH))) == 1
    assert chain_of(opened, PATH).tokens == PATH[:10]
    assert len(read(opened, chain_of(opened, PATH))) == 1
    assert opened.reader.no_reads.is_set()
    opened.close(5)
    (record,) = caplog.records
    assert record.exc_info
    assert "kumquat" in caplog.text


# Files that cannot be read


class Scans:
    """Counts the scans of folders, one every 20 ms."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        enforce = Folder.enforce

        def counted(folder: Folder) -> None:
            enforce(folder)
            self.count += 1

        monkeypatch.setattr("worker.prefix_store.writer._RESCAN_S", 0.02)
        monkeypatch.setattr(Folder, "enforce", counted)

    def wait(self) -> None:
        """Wait until the index has what the folder has now."""
        after = self.count + 3  # one may have begun before, and the index follows a scan
        until(lambda: self.count >= after)


@pytest.fixture
def scans(monkeypatch: pytest.MonkeyPatch) -> Scans:
    return Scans(monkeypatch)


def failing(monkeypatch: pytest.MonkeyPatch, error: int) -> None:
    def fail(*_: object) -> Header:
        raise OSError(error, "kumquat")

    monkeypatch.setattr(reader_module, "read_header", fail)


@pytest.mark.parametrize("mended_by", ["a copy", "its permissions"])
def test_a_file_that_cannot_be_read_is_left_alone_until_it_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scans: Scans, caplog: pytest.LogCaptureFixture, mended_by: str
) -> None:
    written(tmp_path, segment(PATH))
    (file,) = files(tmp_path)
    opened = store(tmp_path)
    with caplog.at_level(logging.WARNING, "sluice.prefix_store"), monkeypatch.context() as patch:
        failing(patch, errno.EIO)
        assert read(opened, chain_of(opened, PATH)) == ()
        scans.wait()
        assert opened.find("", PATH, stateful=False) is None
    assert len(caplog.records) == 1
    if mended_by == "a copy":
        shutil.copy(file, tmp_path / "copy")
        (tmp_path / "copy").rename(file)
    else:
        file.chmod(0o640)
    until(lambda: opened.find("", PATH, stateful=False))
    assert len(read(opened, chain_of(opened, PATH))) == 1
    opened.close(5)


def test_a_file_that_cannot_be_read_is_written_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, segment(PATH))
    opened = store(tmp_path)
    with monkeypatch.context() as patch:
        failing(patch, errno.EACCES)
        assert read(opened, chain_of(opened, PATH)) == ()
    opened.writer.write(segment(PATH))
    until(lambda: opened.find("", PATH, stateful=False))
    assert len(read(opened, chain_of(opened, PATH))) == 1
    opened.close(5)


def test_a_file_is_found_again_if_only_the_process_had_no_files_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scans: Scans
) -> None:
    written(tmp_path, segment(PATH))
    opened = store(tmp_path)
    with monkeypatch.context() as patch:
        failing(patch, errno.EMFILE)
        assert read(opened, chain_of(opened, PATH)) == ()
    until(lambda: opened.find("", PATH, stateful=False))
    opened.close(5)


def test_a_damaged_file_that_cannot_be_removed_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, scans: Scans
) -> None:
    def fail(path: Path, missing_ok: bool = False) -> None:
        raise PermissionError

    written(tmp_path, segment(PATH))
    files(tmp_path)[0].write_bytes(b"kumquat")
    opened = store(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Path, "unlink", fail)
        assert read(opened, chain_of(opened, PATH)) == ()
    scans.wait()
    assert len(files(tmp_path)) == 1
    assert opened.find("", PATH, stateful=False) is None
    opened.close(5)


def test_writes_give_way_to_reads(held: Held, opened: PrefixStore) -> None:
    reading = opened.reader.read(chain_of(opened, PATH))
    held.wait()
    assert not opened.writer._pace._no_other_work.is_set()  # type: ignore[union-attr]
    held.go()
    until(lambda: reading.done)
    until(lambda: opened.writer._pace._no_other_work.is_set())  # type: ignore[union-attr]
    opened.close(5)


# States


class KVOnly(Destination):
    """Reads as if the second tensor held the state."""

    def num_kv_tensors(self, header: Header) -> int:
        return 1


@pytest.fixture
def stateful(tmp_path: Path) -> PrefixStore:
    """A store with a prefix of three files with states."""
    path = tuple(range(30))
    written(tmp_path, *(segment(path[:end], end - 10, state=True) for end in (10, 20, 30)))
    return store_into(tmp_path, KVOnly())


def states_of(segments: tuple[LoadedSegment, ...]) -> list[tuple[int, bool]]:
    return [(len(each.arrays), each.has_state) for each in segments]


def test_of_the_states_along_a_prefix_only_the_last_one_is_read(stateful: PrefixStore) -> None:
    chain = chain_of(stateful, PATH)
    assert states_of(read(stateful, chain)) == [(1, False), (1, False), (3, True)]
    assert states_of(read(stateful, chain_of(stateful, PATH[:20]))) == [(1, False), (3, True)]
    stateful.close(5)


def test_a_state_is_read_although_another_caller_has_the_file_without_it(stateful: PrefixStore) -> None:
    longer = read(stateful, chain_of(stateful, PATH))
    shorter = read(stateful, chain_of(stateful, PATH[:20]))
    again = read(stateful, chain_of(stateful, PATH))
    assert states_of(shorter) == [(1, False), (3, True)]
    assert shorter[0] is longer[0] is again[0]
    stateful.close(5)


def test_files_whose_states_are_bad_are_not_used(stateful: PrefixStore, tmp_path: Path) -> None:
    chain = chain_of(stateful, PATH)
    for name in chain.files[1:]:
        damage(tmp_path / str(name))
    assert states_of(read(stateful, chain)) == [(3, True)]
    assert len(files(tmp_path)) == 1
    stateful.close(5)


def damage(file: Path) -> None:
    """Change the last byte, which is of a state."""
    file.write_bytes(file.read_bytes()[:-1] + b"\xff")
