import pytest

from worker.chat.recorder import TokenPace


@pytest.mark.parametrize(
    ("at", "rate"),
    [
        ([], 0.0),
        ([7.0], 0.0),
        ([7.0, 7.5], 2.0),
        ([7.0, 7.25, 8.0], 2.0),
        ([1.0, 1.0], 0.0),  # a clock that did not move
    ],
)
def test_a_rate_is_told_from_the_second_token_on(at: list[float], rate: float) -> None:
    pace = TokenPace()
    for when in at:
        pace.count(when)
    assert pace.tokens_per_s() == rate
