"""Prefixes of outdated weights or libraries are recognized."""

import os
from pathlib import Path

from tests.prefix_store.segments import segment
from worker.prefix_store.names import model_record
from worker.prefix_store.records import ModelRecord, outdated_digests, read_records
from worker.prefix_store.store import PrefixStore, StoreOptions

OLD, NEW, OTHER = "0" * 32, "1" * 32, "2" * 32


def record(digest: str, used_s: float, label: str = "a", *, encrypted: bool = False) -> ModelRecord:
    return ModelRecord(digest, label, encrypted, used_s)


def test_a_model_is_outdated_if_another_of_its_label_has_been_used_since() -> None:
    assert outdated_digests([record(OLD, 0), record(NEW, 1000), record(OTHER, 0, "b")]) == {OLD}


def test_models_that_workers_use_at_the_same_time_are_not_outdated() -> None:
    assert outdated_digests([record(OLD, 1000), record(NEW, 1005)]) == frozenset()


def test_workers_with_and_without_a_key_do_not_outdate_one_another() -> None:
    assert outdated_digests([record(OLD, 0), record(NEW, 1000, encrypted=True)]) == frozenset()


def test_a_record_is_read_as_it_was_written_and_renewed(tmp_path: Path) -> None:
    for label in ("a", "b", "b"):
        ModelRecord(OLD, label, encrypted=True).renew(tmp_path)
        (found,) = read_records(tmp_path, [OLD, NEW])
        assert (found.digest, found.label, found.encrypted) == (OLD, label, True)
        os.utime(tmp_path / model_record(OLD), (1, 1))
    (tmp_path / model_record(NEW)).write_text("[]")
    assert [each.digest for each in read_records(tmp_path, [OLD, NEW])] == [OLD]


def test_a_store_records_its_model_and_keeps_the_records_of_others(tmp_path: Path) -> None:
    for fingerprint in ("one", "other"):
        opened = PrefixStore(StoreOptions(tmp_path, 20_000, label="a"), fingerprint)
        opened.open()
        for number in range(4):
            opened.writer.write(segment((number,)))
        opened.close(20)
    assert len([*tmp_path.glob("sluice-prefix-model-*.json")]) == 2
