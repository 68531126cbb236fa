"""Files of a request that waits to be admitted are brought into the page cache."""

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.engine.driver import Run
from tests.engine.prefix.test_cache import lonely
from tests.engine.prefix.test_disk import ANSWER, DOCUMENT, stored
from tests.engine.tiny import model, prompt
from worker.engine.prefix.disk import DiskPrefixes
from worker.prefix_store.reader import _PageCache
from worker.prefix_store.store import StoreOptions

FAMILIES = pytest.mark.parametrize("family", ["llama", "qwen3_5"])
LIMIT = "worker.engine.prefill.queue.load_limit_s"


@pytest.fixture(autouse=True)
def always_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LIMIT, lambda *_, **__: 60.0)


@pytest.fixture
def hold(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Let pieces be brought only after the event is set."""
    go = threading.Event()
    bring_piece = _PageCache.bring_piece

    def held(cache: _PageCache) -> None:
        assert go.wait(20)
        bring_piece(cache)

    monkeypatch.setattr(_PageCache, "bring_piece", held)
    yield go
    go.set()


class OneRow(Run):
    """An engine with one place for rows, which another request has taken."""

    def __init__(self, family: str, folder: Path) -> None:
        super().__init__(
            model(family),
            rows=1,
            prefix_bytes=10**9,
            open_disk=lambda opened: DiskPrefixes(
                opened.network, opened.cache_fingerprint, StoreOptions(folder, 10**9), lambda: None
            ),
        )
        self.add("first", prompt(9, 3), max_tokens=30)
        self.step()
        self.add("late", DOCUMENT, max_tokens=ANSWER)
        self.step()
        assert self.waiting == ["late"]

    @property
    def brought(self) -> _PageCache:
        assert self.engine._disk is not None
        return self.engine._disk.store.reader._page_cache


def until(done: Callable[[], bool]) -> None:
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end
        time.sleep(0.001)


@FAMILIES
def test_files_are_read_ahead_before_the_request_is_admitted(tmp_path: Path, family: str) -> None:
    stored(family, tmp_path, DOCUMENT)
    run = OneRow(family, tmp_path)
    until(lambda: bool(run.brought._accepted) and not run.brought.has_work)
    assert run.waiting == ["late"]
    run.drain()
    assert tuple(run.generated["late"]) == lonely(family, DOCUMENT, ANSWER)
    assert run.cached["late"] >= len(DOCUMENT) - 1
    assert not run.engine._prefills._ahead
    run.engine.close()


@FAMILIES
def test_for_a_removed_request_nothing_more_is_read(tmp_path: Path, family: str, hold: threading.Event) -> None:
    stored(family, tmp_path, DOCUMENT)
    run = OneRow(family, tmp_path)
    until(lambda: run.brought.has_work)
    (reference,) = run.brought._accepted
    assert reference() is not None
    run.engine.remove("late")
    assert reference() is None
    hold.set()
    until(lambda: not run.brought.has_work)
    run.drain()
    run.engine.close()


def test_files_are_not_read_ahead_if_computing_is_expected_to_be_faster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stored("llama", tmp_path, DOCUMENT)
    monkeypatch.setattr(LIMIT, lambda *_, **__: None)
    run = OneRow("llama", tmp_path)
    assert not run.engine._prefills._ahead
    run.drain()
    run.engine.close()


def test_nothing_is_read_ahead_of_what_memory_holds(tmp_path: Path) -> None:
    stored("llama", tmp_path, DOCUMENT)
    run = OneRow("llama", tmp_path)
    run.drain()
    run.add("again", DOCUMENT, max_tokens=ANSWER)
    assert not run.engine._prefills._ahead
    run.drain()
    run.engine.close()
