import time
from pathlib import Path

import pytest

from tests.prefix_store.places import files, place, store, written
from worker.prefix_store.names import is_pin
from worker.prefix_store.store import PrefixStore
from worker.prefix_store.writer import NewPlace

PATH = tuple(range(30))


def all_written(opened: PrefixStore) -> None:
    """Wait until nothing waits to be written."""
    assert opened.wait_for_room(1 << 40, time.monotonic() + 20)


def test_files_whose_start_is_on_no_disk_are_forgotten(tmp_path: Path) -> None:
    written(tmp_path, place(PATH, 10), place((*PATH[:10], 99), 10))
    opened = store(tmp_path)
    opened.forget("", PATH)
    opened.close(10)
    (left,) = files(tmp_path)
    assert "-10-11-" in left.name


def test_a_place_that_waits_to_be_written_is_forgotten(tmp_path: Path) -> None:
    opened = store(tmp_path)
    opened.write(place(PATH))
    opened.forget("", PATH)
    opened.close(10)
    assert files(tmp_path) == []


def test_a_forgotten_prefix_is_not_found_from_then_on(tmp_path: Path) -> None:
    written(tmp_path, place(PATH[:10]), place(PATH, 10))
    opened = store(tmp_path)
    opened.forget("", PATH)
    assert opened.find("", PATH, stateful=False) is None
    opened.close(10)


@pytest.mark.parametrize("stored_before", [False, True])
def test_a_pinned_place_outlives_the_others(tmp_path: Path, stored_before: bool) -> None:
    if stored_before:
        written(tmp_path, place((1,)))
    plain = place((1,))
    opened = store(tmp_path)
    opened.write(NewPlace(plain.path, plain.has_state, plain.place, pinned=True))
    opened.close(10)
    assert sum(is_pin(each.name) for each in tmp_path.iterdir()) == 1
    written(tmp_path, place((2,)), place((3,)), max_bytes=22_000)
    again = store(tmp_path)
    assert again.find("", (1,), stateful=False) is not None
    again.close(5)


def test_the_bytes_of_a_file_are_known_at_once(tmp_path: Path) -> None:
    opened = store(tmp_path)
    opened.write(place(PATH))
    all_written(opened)
    chain = opened.find("", PATH, stateful=False)
    opened.close(5)
    assert chain is not None
    assert chain.sizes == (files(tmp_path)[0].stat().st_size,)
