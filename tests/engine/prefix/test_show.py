"""People see which prefixes on disk memory holds too."""

from pathlib import Path

import pytest

from tests.engine.prefix.test_disk import ANSWER, DOCUMENT, Worker, settled, stored, turn_of
from tests.engine.tiny import prompt
from worker.prefix_store.listing import Listing

FAMILIES = pytest.mark.parametrize("family", ["llama", "qwen3_5"])


@pytest.fixture(autouse=True)
def always_worthwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.engine.prefill.queue.load_limit_s", lambda *_, **__: 60.0)


def scanned(run: Worker) -> None:
    """Let the store do what it does every few seconds."""
    assert run.engine._disk is not None
    run.engine._disk.store.writer.scan()


def held_bytes(run: Worker) -> int:
    assert run.engine._caches.prefix is not None
    return run.engine._caches.prefix._tree.nbytes


@FAMILIES
def test_a_loaded_prefix_is_listed_with_its_bytes_in_memory_and_its_hits(tmp_path: Path, family: str) -> None:
    stored(family, tmp_path, DOCUMENT)
    again = Worker(family, tmp_path)
    again.say(family, DOCUMENT)
    scanned(again)
    listing = Listing(tmp_path)
    (found,) = listing.prefixes
    assert 0 < found.held.nbytes <= listing.memory_bytes == held_bytes(again)
    assert found.hits == 1
    again.say(family, turn_of(family, DOCUMENT))
    scanned(again)
    listing = Listing(tmp_path)
    assert listing.memory_bytes == held_bytes(again)
    assert listing.prefixes[0].hits == 1  # this hit was one in memory
    again.engine._caches.set_limit(0)
    settled(again)
    again.say(family, prompt(40, 3))
    scanned(again)
    assert {each.held.nbytes for each in Listing(tmp_path).prefixes} == {0}
    again.close()
    assert Listing(tmp_path).memory_bytes == 0


@pytest.mark.parametrize(("pause_s", "while_busy"), [(1e9, False), (0, True)])
def test_what_memory_holds_is_handed_over_when_the_engine_becomes_idle_and_rarely_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pause_s: float, while_busy: bool
) -> None:
    monkeypatch.setattr("worker.engine.prefix.disk._SHOW_S", pause_s)
    run, shown = Worker("llama", tmp_path), list[int]()
    assert run.engine._disk is not None
    monkeypatch.setattr(run.engine._disk.store.memory, "show", lambda nbytes, nodes: shown.append(nbytes))
    run.add("row", prompt(200, 2), max_tokens=ANSWER)
    while not run.generated["row"]:
        run.step()
    assert bool(shown) == while_busy
    while len(run.engine):
        run.step()
    count = len(shown)
    run.step()
    assert len(shown) == count  # nothing has changed
    assert shown[-1] == held_bytes(run)
    run.close()
