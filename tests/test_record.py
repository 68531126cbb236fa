import pytest

from worker.record import decode_rate


@pytest.mark.parametrize(
    ("tokens", "seconds", "rate"),
    [
        (4, 0.00044, 0.0),  # they reached the event loop together
        (4, 0.0, 0.0),
        (3, 10.0, 0.0),
        (0, 0.0, 0.0),
        (4, 2.0, 2.0),
        (100, 0.05, 2000.0),
    ],
)
def test_a_rate_is_told_where_there_is_something_to_measure(tokens: int, seconds: float, rate: float) -> None:
    assert decode_rate(tokens, seconds) == rate
