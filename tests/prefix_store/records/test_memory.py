"""What running workers hold in memory can be seen, as far as it is on disk."""

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.prefix_store.segments import MODEL, nbytes, segment, store, written
from worker.prefix_store.names import model_digest
from worker.prefix_store.records import HeldNode, MemoryRecord, SegmentUse, read_memory
from worker.prefix_store.scan import scan_folder

DIGEST = model_digest(MODEL)
PATH = tuple(range(30))
HELD = (
    7_000,
    (
        HeldNode(None, "", PATH[:5], 100, 3),
        HeldNode(0, "", PATH[5:10], 200, 2),
        HeldNode(1, "", PATH[10:], 1_000, 1),
        HeldNode(2, "", (98, 99), 5_700, 0),  # on no disk
    ),
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    written(tmp_path, segment(PATH[:10]), segment(PATH, 10))
    return tmp_path


def seen(folder: Path) -> tuple[int, dict[int, SegmentUse]]:
    """Return the bytes in memory, and the use of each segment by its end."""
    scan = scan_folder(folder)
    total, uses = read_memory(folder, scan.memory)
    ends = {name.digest: name.end for name in scan.names}
    return total, {ends[digest]: use for (_, digest), use in uses.items()}


def records(folder: Path) -> list[Path]:
    return sorted(folder.glob("sluice-prefix-memory-*"))


def test_bytes_in_memory_are_those_since_the_last_segment_on_disk(folder: Path) -> None:
    opened = store(folder)
    opened.memory.show(*HELD)
    opened.writer.scan()
    assert seen(folder) == (7_000, {10: SegmentUse(300, 2), 30: SegmentUse(1_000, 1)})
    opened.close(20)
    assert records(folder) == []


def test_workers_are_added_up(folder: Path) -> None:
    opened = [store(folder), store(folder)]
    for each in opened:
        each.memory.show(*HELD)
        each.writer.scan()
    assert seen(folder) == (14_000, {10: SegmentUse(600, 4), 30: SegmentUse(2_000, 2)})
    for each in opened:
        each.close(20)


def test_what_another_tenant_or_key_has_stored_is_not_named(folder: Path) -> None:
    key = bytes(32)
    for opened, namespace in ((store(folder, key=key), ""), (store(folder), "acme")):
        opened.memory.show(7_000, tuple(replace(node, namespace=namespace) for node in HELD[1]))
        opened.writer.scan()
        assert seen(folder) == (7_000, {})
        opened.close(20)


def test_the_record_of_a_worker_that_has_died_is_ignored_and_removed_by_the_next(folder: Path) -> None:
    killed = MemoryRecord(DIGEST, b"")
    killed.show(*HELD)
    killed.renew(folder, scan_folder(folder), 10_000)
    (record,) = records(folder)
    assert record.stat().st_mode & 0o777 == 0o600
    store(folder).close(20)
    assert records(folder) == [record]
    long_ago = time.time() - 20
    os.utime(record, (long_ago, long_ago))
    assert seen(folder) == (0, {})
    store(folder).close(20)
    assert records(folder) == []


def test_a_record_stays_fresh_without_being_written_again(folder: Path) -> None:
    record = MemoryRecord(DIGEST, b"")
    record.show(*HELD)
    scan = scan_folder(folder)
    assert record.renew(folder, scan, 10_000)
    (file,) = records(folder)
    os.utime(file, (1, 1))
    inode = file.stat().st_ino
    assert record.renew(folder, scan, 10_000) == {}
    assert file.stat().st_ino == inode
    assert seen(folder)[0] == 7_000


def test_what_is_written_later_is_named_then(folder: Path) -> None:
    record = MemoryRecord(DIGEST, b"")
    record.show(*HELD)
    record.renew(folder, scan_folder(folder), 10_000)
    written(folder, segment((*PATH, 98, 99), 30))
    record.renew(folder, scan_folder(folder), 10_000)
    assert seen(folder)[1][32] == SegmentUse(5_700, 0)


def test_parts_that_were_hashed_before_are_found_after_others_have_gone(folder: Path) -> None:
    record = MemoryRecord(DIGEST, b"")
    held = HELD[1]
    for nodes in (held, held[:3], (held[0], HeldNode(0, "", PATH[5:10], 50, 9))):
        record.show(1, nodes)
        record.renew(folder, scan_folder(folder), 10_000)
    assert seen(folder) == (1, {10: SegmentUse(150, 9)})


@pytest.mark.parametrize(
    "damage",
    ["", "[]", '{"bytes": -1}', '{"bytes": "1", "segments": []}', '{"segments": {"a": [1], "b": [1, -1], "c": 3}}'],
)
def test_a_damaged_record_is_ignored(folder: Path, damage: str) -> None:
    record = MemoryRecord(DIGEST, b"")
    record.show(*HELD)
    record.renew(folder, scan_folder(folder), 10_000)
    records(folder)[0].write_text(damage)
    assert seen(folder) == (0, {})


def test_a_record_is_not_written_beyond_the_quota(folder: Path) -> None:
    full = store(folder, max_bytes=nbytes(folder) + 10)
    full.memory.show(*HELD)
    full.writer.scan()
    assert records(folder) == []
    full.close(20)
