import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.speculation.offer import Acceptance

KIND = ("copy", 3)


def shared(prior: float = 0.5) -> Acceptance:
    return Acceptance(lambda kind: prior)


@given(st.lists(st.booleans(), max_size=300), st.floats(0.01, 0.99))
def test_a_rate_is_a_probability(observed: list[bool], prior: float) -> None:
    row = shared(prior).of_row()
    for right in observed:
        row.observe(KIND, right)
    assert 0 < row.rate(KIND) < 1


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 1.0])
def test_a_rate_approaches_the_share_of_right_tokens(share: float) -> None:
    together = shared()
    for number in range(1_000):
        together.of_row().observe(KIND, number % 10 < 10 * share)
    assert together.of_row().rate(KIND) == pytest.approx(share, abs=0.05)


def test_a_new_row_begins_with_what_others_have_seen() -> None:
    together = shared(0.5)
    first = together.of_row()
    for _ in range(50):
        first.observe(KIND, False)
    assert together.of_row().rate(KIND) < 0.1
    assert together.of_row().rate(("copy", 8)) == 0.5


def test_a_row_forgets_sooner_than_all_rows() -> None:
    together = shared()
    row = together.of_row()
    for _ in range(200):
        row.observe(KIND, False)
    for _ in range(20):
        row.observe(KIND, True)
    assert row.rate(KIND) > 0.5 > together.of_row().rate(KIND)
