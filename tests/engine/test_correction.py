"""The correction of predicted memory by measurements, in bytes. Real measurements are in test_admission."""

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.admission_controller import Calibration, corrected

GB = 10**9


@given(st.floats(0.6, 3.9), st.integers(1, 1000))
def test_a_correction_finds_a_steady_error_from_either_side(error: float, seed: int) -> None:
    factor = 1.0 + seed % 3
    for _ in range(200):
        factor = corrected(factor, 100_000_000, int(error * 100_000_000))
    assert factor == pytest.approx(error, rel=0.01)


@given(st.lists(st.tuples(st.integers(1, 10**11), st.integers(0, 10**12)), max_size=30))
def test_a_correction_stays_within_bounds(seen: list[tuple[int, int]]) -> None:
    factor = 1.0
    for predicted, measured in seen:
        factor = corrected(factor, predicted, measured)
    assert 0.5 <= factor <= 4.0


def test_correction_rises_quickly_and_falls_slowly() -> None:
    up, down = corrected(1.0, 10**9, 15 * 10**8), corrected(1.0, 10**9, 5 * 10**8)
    assert up - 1.0 > 5 * (1.0 - down) > 0


def test_small_measurements_correct_nothing() -> None:
    assert corrected(1.0, 1_000_000, 9_000_000) == 1.0


def compared(calibration: Calibration, predicted: int, measured: int) -> list[tuple[int, int]]:
    """Return the comparisons of 64 such steps."""
    found = list[tuple[int, int]]()
    for _ in range(64):
        calibration.record_step(predicted, measured)
        found += filter(None, [calibration.compare()])
    return found


def test_step_above_its_prediction_corrects_at_once() -> None:
    calibration = Calibration()
    assert not calibration.record_step(GB, GB)
    assert calibration.record_step(GB, 2 * GB)
    assert calibration.factor == 2.0


def test_step_within_the_prediction_of_the_last_one_corrects_nothing() -> None:
    calibration = Calibration()
    calibration.record_step(3 * GB, 3 * GB)
    assert not calibration.record_step(GB, 3 * GB)
    assert calibration.factor == 1.0


def test_comparison_of_64_steps_has_their_largest_values_and_lowers_predictions() -> None:
    calibration = Calibration()
    assert compared(calibration, 2 * GB, GB) == [(2 * GB, GB)]
    lower = calibration.factor
    assert lower < 1.0
    assert compared(calibration, GB, GB // 2) == [(round(lower * GB), GB // 2)]


def test_steps_without_a_prediction_are_not_compared() -> None:
    assert compared(Calibration(), 0, GB) == []


def test_of_steps_like_the_one_recorded_last_every_sixteenth_is_recorded() -> None:
    calibration, recorded = Calibration(), list[int]()
    calibration.record_step(GB, GB)
    for step in range(2, 65):
        if not calibration.skip_step(GB):
            calibration.record_step(GB, GB)
            recorded.append(step)
    assert recorded == [16, 32, 48, 64]
    assert calibration.compare() == (GB, GB)


def test_step_above_the_prediction_recorded_last_is_not_skipped() -> None:
    calibration = Calibration()
    calibration.record_step(GB, 2 * GB)
    assert calibration.skip_step(2 * GB)
    assert not calibration.skip_step(2 * GB + 1)
    assert calibration.record_step(GB, 2 * GB + 1)


def test_steps_skipped_count_in_the_measured_bytes_of_the_comparison() -> None:
    calibration = Calibration()
    for step in range(64):
        calibration.record_step(2 * GB, GB) if step % 16 in (0, 15) else calibration.skip_step(2 * GB - step)
    assert calibration.compare() == (2 * GB, 2 * GB - 1)


@given(st.integers(0, 10**6), st.floats(0.2, 3.0), st.integers(1, 60))
def test_skipping_leaves_predictions_at_least_as_high_as_recording_every_step(
    seed: int, error: float, usual_steps: int
) -> None:
    dice, calibration, every, skipped = Random(seed), Calibration(), Calibration(), 0
    predicted, alike = 0, False
    for _ in range(300):
        alike = alike and dice.random() > 1 / usual_steps
        # The same rows become longer; other rows may need anything.
        predicted = predicted + dice.randrange(GB // 50) if alike else dice.randrange(4 * GB)
        measured = int(error * predicted * dice.choice((0.9, 1.0, 1.0, 1.1)))
        every.record_step(predicted, measured)
        if alike and calibration.skip_step(measured):
            skipped += 1
        else:
            calibration.record_step(predicted, measured)
        assert (calibration.compare() is None) == (every.compare() is None)
        assert calibration.factor >= every.factor - 1e-9
        alike = True
    assert skipped > 0 or usual_steps < 10
