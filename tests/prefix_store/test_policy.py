import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.outcomes import NotStored, StoreResult
from worker.prefix_store.policy import (
    LoadSize,
    StoredFile,
    files_to_remove,
    fits_budget,
    load_limit_s,
    store_result,
    writes_early,
)

stored = st.builds(
    StoredFile,
    key=st.uuids(),
    nbytes=st.integers(0, 100),
    used_s=st.sampled_from([0.0, 1.0, 2.0]),
    end=st.integers(0, 3),
    removable=st.booleans(),
)


@given(st.lists(stored, unique_by=lambda file: file.key), st.integers(-10, 400))
def test_as_few_files_as_needed_are_removed_the_oldest_use_first(files: list[StoredFile[object]], excess: int) -> None:
    removed = [next(file for file in files if file.key == key) for key in files_to_remove(files, excess)]
    assert all(file.removable for file in removed)
    freed = sum(file.nbytes for file in removed)
    left = [file for file in files if file.removable and file not in removed]
    assert freed >= excess or not left
    if removed:
        assert freed - removed[-1].nbytes < excess
        assert all((file.used_s, -file.end) >= (removed[-1].used_s, -removed[-1].end) for file in left)


def test_of_one_prefix_the_end_is_removed_first() -> None:
    files = [StoredFile(str(end), 10, 5.0, end) for end in (10, 30, 20)]
    assert files_to_remove(files, 15) == ["30", "20"]


def test_a_budget_counts_the_file_that_is_written() -> None:
    assert fits_budget(10, 90, 100)
    assert not fits_budget(11, 90, 100)
    assert fits_budget(11, 90, None)


def test_a_prefix_is_written_early_from_its_second_use_on_until_it_is_handed_over() -> None:
    assert [writes_early(uses, handed_over=False) for uses in range(4)] == [False, False, True, True]
    assert not any(writes_early(uses, handed_over=True) for uses in range(4))


def limit_s(tokens: int, *files: int, compute_s: float = 1.0, waiting: int = 0, least: int = 32) -> float | None:
    return load_limit_s(LoadSize(tokens, 0, files, 1e9, waiting), compute_s, min_tokens=least)


def test_loading_must_beat_computing() -> None:
    assert limit_s(1000, 10_000_000) == 1.0
    assert limit_s(1000, 10_000_000_000) is None
    assert limit_s(8, 1000) is None
    assert limit_s(8, 1000, least=0) == 1.0
    assert limit_s(1000, *[1000] * 600) is None


def test_what_is_read_before_counts_as_time_of_loading() -> None:
    assert limit_s(1000, 10_000_000, waiting=900_000_000) == 1.0
    assert limit_s(1000, 10_000_000, waiting=1_000_000_000) is None


def test_a_short_delay_is_no_reason_to_give_up() -> None:
    limit = limit_s(1000, 10_000, compute_s=0.01)
    assert limit is not None
    assert limit > 0.1


@pytest.mark.parametrize(
    ("tokens", "on_disk", "refusal", "missing"),
    [
        (100, 100, None, None),
        (100, 85, None, None),  # the last boundary
        (100, 84, None, NotStored.NOT_CACHED),
        (100, 84, NotStored.QUOTA, NotStored.QUOTA),
        (100, 0, NotStored.DAILY_LIMIT, NotStored.DAILY_LIMIT),
        (15, 0, None, NotStored.TOO_SHORT),
        (16, 0, None, NotStored.NOT_CACHED),
    ],
)
def test_a_prefix_that_is_not_stored_up_to_its_last_boundary_has_a_reason(
    tokens: int, on_disk: int, refusal: NotStored | None, missing: NotStored | None
) -> None:
    assert store_result(tokens, on_disk, 7, refusal, spacing=16) == StoreResult(on_disk, 7, missing)


def test_without_states_a_prefix_is_whole_only_with_its_last_token() -> None:
    assert store_result(9, 8, 0, None, spacing=1).missing is NotStored.NOT_CACHED
    assert store_result(9, 9, 0, None, spacing=1).missing is None
