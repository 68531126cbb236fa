"""Reads from disk are counted for all workers together."""

import json
from pathlib import Path

import pytest

from tests.prefix_store.segments import MODEL, files, nbytes, read, segment, store, written
from worker.prefix_store import records as records_module
from worker.prefix_store.index import Chain
from worker.prefix_store.names import hits_record, model_digest
from worker.prefix_store.records import HitRecord, read_hits
from worker.prefix_store.scan import scan_folder
from worker.prefix_store.store import PrefixStore

DIGEST = model_digest(MODEL)
PATH = tuple(range(30))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    written(tmp_path, segment(PATH[:10]), segment(PATH, 10))
    return tmp_path


def chain_of(opened: PrefixStore) -> Chain:
    chain = opened.find("", PATH, stateful=False)
    assert chain is not None
    return chain


def test_workers_add_their_reads_when_they_end(folder: Path) -> None:
    for number in range(1, 4):
        opened = store(folder)
        chain = chain_of(opened)
        read(opened, chain)
        opened.close(20)
        assert read_hits(folder, DIGEST) == {name.digest: number for name in chain.files}


def test_workers_add_their_reads_when_they_scan_and_none_twice(folder: Path) -> None:
    one, other = store(folder), store(folder)
    chain = chain_of(one)
    for opened in (one, other, one):
        read(opened, chain_of(opened))
        opened.writer.scan()
    opened.writer.scan()
    assert read_hits(folder, DIGEST) == {name.digest: 3 for name in chain.files}
    assert (folder / hits_record(DIGEST)).stat().st_mode & 0o777 == 0o600
    one.close(20)
    other.close(20)
    assert read_hits(folder, DIGEST) == {name.digest: 3 for name in chain.files}


def test_entries_of_files_that_are_gone_are_dropped(folder: Path) -> None:
    opened = store(folder)
    chain = chain_of(opened)
    read(opened, chain)
    opened.writer.scan()
    read(opened, chain)
    (folder / str(chain.files[-1])).unlink()
    opened.writer.scan()
    assert read_hits(folder, DIGEST) == {chain.files[0].digest: 2}
    opened.close(20)


@pytest.mark.parametrize("damage", ["{", '{"%s": -1, "other": 4}', '{"%s": true}', "[" * 5000])
def test_a_damaged_record_is_ignored_and_rewritten(folder: Path, damage: str) -> None:
    opened = store(folder)
    chain = chain_of(opened)
    (folder / hits_record(DIGEST)).write_text(damage.replace("%s", chain.files[0].digest))
    read(opened, chain)
    opened.writer.scan()
    assert read_hits(folder, DIGEST) == {name.digest: 1 for name in chain.files}
    opened.close(20)


def test_a_record_that_is_too_large_is_ignored(folder: Path) -> None:
    (folder / hits_record(DIGEST)).write_text(json.dumps({"a" * 32: 1, "b": "c" * (1 << 20)}))
    assert read_hits(folder, DIGEST) == {}


def test_a_record_holds_the_last_and_the_most_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records_module, "_MAX_ENTRIES", 2)
    written(folder, *(segment((number,)) for number in range(2, 5)))
    scan = scan_folder(folder)
    first, second, third, *_ = scan.names
    for names in ([first, second, second], [third]):
        record = HitRecord(DIGEST)
        for name in names:
            record.add(name)
        record.renew(folder, scan, 10_000)
    assert read_hits(folder, DIGEST) == {third.digest: 1, second.digest: 2}


def test_a_record_counts_for_the_quota_and_is_not_written_beyond_it(folder: Path) -> None:
    full = store(folder, max_bytes=nbytes(folder) + 10)
    read(full, chain_of(full))
    full.writer.scan()
    assert not (folder / hits_record(DIGEST)).exists()
    full.close(20)
    opened = store(folder)
    read(opened, chain_of(opened))
    opened.writer.scan()
    known = opened._folder._known
    assert known is not None
    assert known.nbytes == nbytes(folder)
    assert len(files(folder)) == 2
    opened.close(20)
