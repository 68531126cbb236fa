from hypothesis import given
from hypothesis import strategies as st

from worker.schedule.cache.disk import StoredFile, files_to_remove, fits_budget, is_worth_loading, writes_early

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


def test_a_prefix_is_written_early_at_its_second_use_only() -> None:
    assert [writes_early(uses) for uses in range(4)] == [False, False, True, False]


def test_loading_must_beat_computing() -> None:
    assert is_worth_loading(1000, [10_000_000], bytes_per_s=1e9, compute_s=1.0)
    assert not is_worth_loading(1000, [10_000_000_000], bytes_per_s=1e9, compute_s=1.0)
    assert not is_worth_loading(8, [1000], bytes_per_s=1e9, compute_s=1.0)
    assert not is_worth_loading(1000, [1000] * 600, bytes_per_s=1e9, compute_s=1.0)
