"""The cost of verify forwards, in plain steps."""

from scripts.benchmarks.speculation.cost import WIDTHS, Cost


def test_a_cost_is_relative_to_the_plain_step_of_its_round() -> None:
    seconds = [(1.0, 2.0), (10.0, 15.0), (2.0, 6.0)]  # of a plain step, and of any other
    cost = Cost.of(8, [{width: plain_s if width == 1 else wider_s for width in WIDTHS} for plain_s, wider_s in seconds])
    assert (cost.rows, cost.plain_s) == (8, 2.0)
    assert cost.relative == {width: 1.0 if width == 1 else 2.0 for width in WIDTHS}
    assert cost.as_json()["plain_ms"] == 2000.0
