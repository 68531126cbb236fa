"""Files of waiting requests are brought into the page cache, while nothing else is read."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.prefix_store.segments import assert_right, files, read, segment, store, written
from worker.prefix_store import reader as reader_module
from worker.prefix_store.index import Chain
from worker.prefix_store.reader import Reader, _PageCache, advise
from worker.prefix_store.store import PrefixStore

PATH = tuple(range(30))
OTHER = (*PATH[:10], 99)
PIECE = 1000


class Pieces:
    """Records the pieces that are brought, and holds each back until `go`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self._go = threading.Event()
        bring_piece = _PageCache.bring_piece

        def held(cache: _PageCache) -> None:
            self.count += 1
            assert self._go.wait(20)
            bring_piece(cache)

        monkeypatch.setattr(_PageCache, "bring_piece", held)

    def go(self) -> None:
        self._go.set()


@pytest.fixture
def pieces(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pieces]:
    monkeypatch.setattr("worker.prefix_store.reader._PIECE_BYTES", PIECE)
    held = Pieces(monkeypatch)
    yield held
    held.go()


@pytest.fixture
def opened(tmp_path: Path) -> PrefixStore:
    """A store with two prefixes that share their first file."""
    written(tmp_path, segment(PATH[:10]), segment(PATH[:20], 10), segment(OTHER, 10))
    return store(tmp_path)


def chain_of(opened: PrefixStore, tokens: tuple[int, ...]) -> Chain:
    chain = opened.find("", tokens, stateful=False)
    assert chain is not None
    return chain


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)


def num_pieces(opened: PrefixStore, chain: Chain) -> int:
    """Return the pieces of these files, and one that finds no more."""
    return sum(-(-size // PIECE) for size in chain.sizes) + 1


def has_work(opened: PrefixStore) -> bool:
    return opened.reader._page_cache.has_work


@pytest.mark.parametrize("has_call", [True, False])
def test_all_files_of_a_waiting_request_are_brought(
    pieces: Pieces, opened: PrefixStore, monkeypatch: pytest.MonkeyPatch, has_call: bool
) -> None:
    if not has_call:  # as on macOS
        monkeypatch.setattr("worker.prefix_store.format._WILLNEED", None)
    chain = chain_of(opened, PATH)
    waiting = opened.reader.read_ahead(chain)
    pieces.go()
    until(lambda: pieces.count == num_pieces(opened, chain) and not has_work(opened))
    assert_right(chain, read(opened, chain))
    assert waiting.chain == chain
    opened.close(5)


def test_of_a_request_that_was_removed_nothing_more_is_read(pieces: Pieces, opened: PrefixStore) -> None:
    waiting = opened.reader.read_ahead(chain_of(opened, PATH))
    until(lambda: pieces.count == 1)
    del waiting
    pieces.go()
    until(lambda: not has_work(opened))
    assert pieces.count == 1
    opened.close(5)


def test_a_load_comes_before_what_is_left_to_read_ahead(
    pieces: Pieces, opened: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    at = list[int]()
    read_segment = Reader._read_segment
    monkeypatch.setattr(Reader, "_read_segment", lambda *given: at.append(pieces.count) or read_segment(*given))
    waiting = opened.reader.read_ahead(chain_of(opened, PATH))
    until(lambda: pieces.count == 1)
    reading = opened.reader.read(chain_of(opened, OTHER))
    pieces.go()
    until(lambda: reading.done and not has_work(opened))
    assert at == [1, 1]
    assert waiting.chain.files
    opened.close(5)


def test_files_that_exceed_the_limit_together_are_not_read_ahead(
    pieces: Pieces, opened: PrefixStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = chain_of(opened, PATH)
    monkeypatch.setattr(reader_module, "_MAX_AHEAD_BYTES", chain.nbytes)
    waiting = [opened.reader.read_ahead(each) for each in (chain, chain_of(opened, OTHER))]
    pieces.go()
    until(lambda: pieces.count == num_pieces(opened, chain) and not has_work(opened))
    assert len(waiting) == 2
    opened.close(5)


def test_a_bad_file_ends_reading_ahead_and_no_load(pieces: Pieces, opened: PrefixStore, tmp_path: Path) -> None:
    for file in files(tmp_path):
        file.write_bytes(b"short")
    chain = chain_of(opened, PATH)
    waiting = opened.reader.read_ahead(chain)
    pieces.go()
    until(lambda: pieces.count == 1 and not has_work(opened))
    assert len(files(tmp_path)) == 3  # the load removes them
    assert read(opened, chain) == ()
    assert waiting.chain == chain
    opened.close(5)


def test_nothing_is_found_while_reading_ahead_hangs(pieces: Pieces, opened: PrefixStore) -> None:
    chain = chain_of(opened, PATH)
    waiting = opened.reader.read_ahead(chain)
    until(lambda: pieces.count == 1)
    reading = opened.reader.read(chain)
    opened.reader.give_up(reading, 0.5)
    assert opened.find("", PATH, stateful=False) is None
    pieces.go()
    until(lambda: opened.find("", PATH, stateful=False) is not None)
    assert waiting.chain == chain
    opened.close(5)


def test_a_file_that_is_gone_is_no_error(tmp_path: Path) -> None:
    advise(tmp_path / "gone", 10)
