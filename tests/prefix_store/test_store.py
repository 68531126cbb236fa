import errno
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors import safe_open

from tests.prefix_store.segments import MODEL, assert_right, files, nbytes, read, segment, store, written
from tests.selection import examples
from worker.prefix_store import folder as folder_module
from worker.prefix_store.folder import Folder, Unwritable
from worker.prefix_store.names import LOCK, parse_name
from worker.prefix_store.records import ModelRecord
from worker.prefix_store.scan import Scan
from worker.prefix_store.store import PrefixStore, StoreOptions
from worker.prefix_store.writer import NewSegment

PATH = tuple(range(100))


def conversation() -> list[NewSegment]:
    """Return three segments that follow one another, the last with a state."""
    return [segment(PATH[:40]), segment(PATH[:70], 40), segment(PATH, 70, state=True)]


def test_a_prefix_is_read_as_it_was_written_by_another_process(tmp_path: Path) -> None:
    written(tmp_path, *conversation())
    opened = store(tmp_path)
    chain = opened.find("", (*PATH, 7), stateful=True)
    assert chain is not None
    segments = read(opened, chain)
    opened.close(5)
    assert chain.tokens == PATH
    assert len(segments) == 3
    assert [each.header.layout for each in segments] == ['{"kind": "test"}'] * 3
    assert [each.header.shapes for each in segments] == [((4096,), (2, 1024), (0,))] * 3
    assert_right(chain, segments)


def test_a_key_of_an_image_is_kept(tmp_path: Path) -> None:
    path = (1, *[-(1 << 255)] * 50, 2)
    written(tmp_path, segment(path))
    opened = store(tmp_path)
    (only,) = read(opened, opened.find("", path, stateful=False))
    opened.close(5)
    assert only.header.tokens == path


def test_the_safetensors_package_opens_a_file(tmp_path: Path) -> None:
    written(tmp_path, segment(PATH, size=4096))
    (file,) = files(tmp_path)
    with safe_open(str(file), "numpy") as opened:
        assert opened.metadata()["format"] == "sluice-prefix"
        assert opened.get_slice("000001").get_shape() == [2, 1024]


def test_a_segment_is_written_once(tmp_path: Path) -> None:
    written(tmp_path, segment(PATH), segment(PATH), segment(PATH, state=True), segment(PATH))
    (file,) = files(tmp_path)
    name = parse_name(file.name)
    assert name is not None
    assert name.has_state


def test_a_store_finds_what_another_one_writes_into_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.prefix_store.writer._RESCAN_S", 0.02)
    opened = store(tmp_path)
    written(tmp_path, segment(PATH))
    until = time.monotonic() + 10
    while (chain := opened.find("", PATH, stateful=False)) is None:
        assert time.monotonic() < until
        time.sleep(0.01)
    assert_right(chain, read(opened, chain))
    opened.close(5)


# The quota


def test_the_quota_holds_for_all_models_and_the_least_recently_used_goes_first(tmp_path: Path) -> None:
    quota = 40_000
    for number in range(12):
        written(tmp_path, segment((number,)), model=f"model {number % 3}", max_bytes=quota)
        os.utime(files(tmp_path)[0], None)
        assert nbytes(tmp_path) <= quota + 1000  # the lock and the day's record
    found = [store(tmp_path, model=f"model {number % 3}", max_bytes=quota) for number in range(12)]
    kept = [number for number, each in enumerate(found) if each.find("", (number,), stateful=False)]
    for each in found:
        each.close(5)
    assert kept
    assert kept == sorted(kept)
    assert 11 in kept


def test_files_of_others_count_and_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    foreign = tmp_path / "sub" / "model.safetensors"
    foreign.write_bytes(bytes(30_000))
    written(tmp_path, segment((1,)), segment((2,)), segment((3,)), max_bytes=45_000)
    assert len(files(tmp_path)) == 1
    assert nbytes(tmp_path) <= 45_000
    foreign.write_bytes(bytes(60_000))
    written(tmp_path, segment((4,)), max_bytes=45_000)
    assert files(tmp_path) == []
    assert foreign.stat().st_size == 60_000


def test_the_quota_is_enforced_at_start_and_stale_files_go_first(tmp_path: Path) -> None:
    written(tmp_path, segment((1,)), segment((2,)))
    stale = tmp_path / "sluice-prefix-v0-something.safetensors"
    stale.write_bytes(bytes(5_000))
    store(tmp_path, max_bytes=22_000).close(5)
    assert not stale.exists()
    assert len(files(tmp_path)) == 2
    store(tmp_path, max_bytes=12_000).close(5)
    assert len(files(tmp_path)) == 1


def test_ten_thousand_foreign_files_do_not_delay_the_start(tmp_path: Path) -> None:
    for number in range(10_000):
        (tmp_path / f"{number}.bin").write_bytes(b"x")
    began = time.process_time()
    opened = store(tmp_path, max_bytes=20_000)
    assert time.process_time() - began < 5  # about one second; the benchmark measures it
    opened.writer.write(segment((1,), size=4096))
    opened.close(30)
    assert len(files(tmp_path)) == 1


def test_the_budget_of_a_day_holds_across_restarts(tmp_path: Path) -> None:
    for number in range(5):
        written(tmp_path, segment((number,)), daily=25_000)
    assert len(files(tmp_path)) == 2


def test_what_exceeds_the_pending_bytes_is_not_accepted_unless_it_waits_alone(tmp_path: Path) -> None:
    opened = store(tmp_path, pending=5_000)
    assert opened.writer.write(segment((1,)))  # larger than that
    assert not opened.writer.write(segment((2,), size=1024))
    opened.close(5)
    assert not opened.writer.write(segment((3,), size=1024))
    assert opened.writer.pending_bytes == 0


# Damage


def damaged(folder: Path, change: str) -> None:
    for file in files(folder):
        content = bytearray(file.read_bytes())
        where = random.randrange(len(content))
        if change == "bit":
            content[where] ^= 1 << random.randrange(8)
        elif change == "truncated":
            del content[where:]
        else:
            content += b"x"
        file.write_bytes(content)


@pytest.mark.parametrize("change", ["bit", "truncated", "longer"])
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=examples(100))
@given(seed=st.integers(0, 1 << 32))
def test_a_damaged_file_is_a_miss_and_removed(tmp_path: Path, change: str, seed: int) -> None:
    random.seed(seed)
    shutil.rmtree(tmp_path)
    written(tmp_path, segment(PATH, size=512))
    damaged(tmp_path, change)
    opened = store(tmp_path)
    chain = opened.find("", PATH, stateful=False)
    assert read(opened, chain) == ()
    assert opened.find("", PATH, stateful=False) is None
    opened.close(5)
    assert files(tmp_path) == []


def test_content_of_another_file_is_a_miss(tmp_path: Path) -> None:
    written(tmp_path, segment((1,)), model="one")
    written(tmp_path, segment((1,)), model=MODEL)
    mine, other = sorted(files(tmp_path), key=lambda file: str(file).count(MODEL))
    content = mine.read_bytes()
    mine.write_bytes(other.read_bytes())
    other.write_bytes(content)
    for model in ("one", MODEL):
        opened = store(tmp_path, model=model)
        assert read(opened, opened.find("", (1,), stateful=False)) == ()
        opened.close(5)
    assert files(tmp_path) == []


def test_a_chain_is_read_up_to_a_bad_file(tmp_path: Path) -> None:
    written(tmp_path, *conversation())
    opened = store(tmp_path)
    chain = opened.find("", PATH, stateful=False)
    assert chain is not None
    (tmp_path / str(chain.files[1])).write_bytes(b"")
    assert len(read(opened, chain)) == 1
    opened.close(5)


def test_a_folder_that_is_deleted_while_running_is_created_again(tmp_path: Path) -> None:
    folder = tmp_path / "prefixes"
    opened = store(folder)
    opened.writer.write(segment((1,)))
    opened.writer.wait_for_room(1 << 40, time.monotonic() + 10)
    shutil.rmtree(folder)
    assert read(opened, opened.find("", (1,), stateful=False)) == ()
    assert opened.writer.write(segment((2,)))
    opened.close(10)
    assert len(files(folder)) == 1


def test_a_full_disk_pauses_writing_and_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def full(*_: object) -> None:
        calls.append(1)
        raise OSError(errno.ENOSPC, "No space left on device")

    opened = store(tmp_path)
    monkeypatch.setattr(folder_module, "write_segment", full)
    for number in range(3):
        opened.writer.write(segment((number,)))
    opened.close(10)
    assert len(calls) == 1
    assert not [file for file in tmp_path.iterdir() if file.name.endswith(".part")]
    assert files(tmp_path) == []


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_keeps_no_store_from_opening_and_the_quota_is_enforced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, segment((1,)), segment((2,)))
    monkeypatch.setattr(ModelRecord, "renew", full_disk)
    opened = PrefixStore(StoreOptions(tmp_path, 12_000, label="a"), MODEL)
    with caplog.at_level(logging.WARNING, "sluice.prefix_store"):
        opened.open()
    assert len(files(tmp_path)) == 1
    assert len(read(opened, opened.find("", (2,), stateful=False))) == 1
    opened.close(5)
    assert len(caplog.records) == 1


def test_a_failed_scan_leaves_the_index_as_it_is_and_is_logged_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, segment(PATH))
    monkeypatch.setattr("worker.prefix_store.writer._RESCAN_S", 0.02)
    opened, scans = store(tmp_path), list[Path]()

    def failing(folder: Path) -> Scan:
        scans.append(folder)
        raise OSError(errno.EIO, "kumquat")

    with caplog.at_level(logging.WARNING, "sluice.prefix_store"):
        monkeypatch.setattr(folder_module, "scan_folder", failing)
        until = time.monotonic() + 20
        while len(scans) < 3:
            assert time.monotonic() < until
            time.sleep(0.01)
        opened.close(10)
    assert opened.find("", PATH, stateful=False) is not None
    assert len(caplog.records) == 1


_STOPPED = """
import fcntl, os, signal, sys
fcntl.flock(os.open(sys.argv[1], os.O_RDWR), fcntl.LOCK_EX)
os.kill(os.getpid(), signal.SIGSTOP)
"""


def test_a_stopped_process_that_has_the_lock_stops_writes_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    written(tmp_path, segment((1,)))
    stopped = subprocess.Popen([sys.executable, "-S", "-c", _STOPPED, str(tmp_path / LOCK)])
    try:
        assert os.WIFSTOPPED(os.waitpid(stopped.pid, os.WUNTRACED)[1])
        monkeypatch.setattr("worker.prefix_store.folder._WAIT_S", 0.05)
        with caplog.at_level(logging.WARNING, "sluice.prefix_store"):
            opened = store(tmp_path)
            assert opened.writer.write(segment((2,)))
            assert len(read(opened, opened.find("", (1,), stateful=False))) == 1
            opened.close(20)
        assert not opened.writer.thread.is_alive()
    finally:
        stopped.kill()
        stopped.wait()
    assert len(files(tmp_path)) == 1
    assert len(caplog.records) == 2  # that nothing is written for a while, and what was lost


def test_a_wait_for_room_at_the_end_is_not_held_up_by_a_kept_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.prefix_store.folder._WAIT_S", 1e6)
    monkeypatch.setattr("worker.prefix_store.folder._LAST_WAIT_S", 0.05)
    opened = store(tmp_path)
    with Folder(tmp_path, 0).lock.held():
        opened.writer.write(segment((1,)))
        assert opened.writer.wait_for_room(1 << 40, time.monotonic() + 20)
    opened.close(20)
    assert files(tmp_path) == []


def test_an_error_while_writes_pause_does_not_prolong_the_pause(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = store(tmp_path)
    opened.writer._pause(Unwritable("kumquat"))
    until_s = opened.writer._paused_until_s
    opened.writer._attempt(full_disk)
    assert opened.writer._paused_until_s == until_s
    opened.close(5)


# Permissions


def test_all_files_and_a_new_folder_are_readable_by_their_owner_only(tmp_path: Path) -> None:
    folder = tmp_path / "prefixes"
    for _ in range(2):
        opened = PrefixStore(StoreOptions(folder, 10_000_000, label="models/a"), MODEL)
        opened.open()
        opened.writer.write(replace(segment((1,)), pinned=True, ends_pinned=True))
        opened.close(20)
        modes = {each.name: each.stat().st_mode & 0o777 for each in folder.iterdir()}
        assert {"model", "written.json"} <= {name.split("-")[2] for name in modes}
        assert {*modes.values()} == {0o600}
        for each in folder.glob("*model*"):
            each.chmod(0o644)  # as earlier versions wrote it
    assert folder.stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize(("mode", "warnings"), [(0o755, 1), (0o700, 0)])
def test_a_folder_that_others_may_open_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, mode: int, warnings: int
) -> None:
    tmp_path.chmod(mode)
    with caplog.at_level("WARNING", "sluice.prefix_store"):
        store(tmp_path).close(5)
    assert len(caplog.records) == warnings


# A writer that is killed

_WRITER = """
import itertools, pathlib, sys, time
from tests.prefix_store.segments import segment, store
opened = store(pathlib.Path(sys.argv[1]), max_bytes=int(sys.argv[2]), pending=1_000_000)
opened.writer._unlimited.set()
print("open", flush=True)
for number in itertools.count():
    path = tuple(range(number % 50 * 3, number % 50 * 3 + 60))
    for each in (segment(path[:20], size=20_000), segment(path, 20, state=True, size=60_000)):
        while not opened.writer.write(each):
            time.sleep(0.001)
"""


def test_a_killed_writer_leaves_whole_files_and_keeps_the_quota(tmp_path: Path) -> None:
    quota, largest = 1_000_000, 130_000
    for _ in range(examples(200, by_default=4)):
        writer = subprocess.Popen(
            [sys.executable, "-c", _WRITER, str(tmp_path), str(quota)], stdout=subprocess.PIPE, text=True
        )
        assert writer.stdout is not None
        assert writer.stdout.readline() == "open\n"
        time.sleep(random.uniform(0, 0.1))
        writer.send_signal(signal.SIGKILL)
        writer.wait()
        writer.stdout.close()
        assert nbytes(tmp_path) <= quota + largest
        check_all(tmp_path, quota)
    assert files(tmp_path)


def check_all(folder: Path, quota: int) -> None:
    """Read everything: each segment that is found must be whole and right."""
    opened = store(folder, max_bytes=quota)
    assert not [file for file in folder.iterdir() if file.name.endswith(".part")]
    before = files(folder)
    for number in range(50):
        path = tuple(range(number * 3, number * 3 + 60))
        if chain := opened.find("", path, stateful=False):
            segments = read(opened, chain)
            assert len(segments) == len(chain.files)
            assert_right(chain, segments)
    opened.close(10)
    assert files(folder) == before
