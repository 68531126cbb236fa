"""Costs by least squares."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from worker.engine.fitting import LeastSquares

AMOUNTS = st.tuples(*[st.floats(0.01, 10)] * 3)


@given(st.lists(st.tuples(AMOUNTS, st.floats(0, 1)), max_size=30), st.tuples(*[st.floats(1e-3, 10)] * 3))
def test_costs_minimize_the_squared_errors_with_the_prior(
    measured: list[tuple[tuple[float, ...], float]], prior: tuple[float, ...]
) -> None:
    fit = LeastSquares(prior)
    for amounts, seconds in measured:
        fit.observe(amounts, seconds)
    costs = fit.costs()
    if min(costs) > 0:  # else some are cut off at 0
        weights = [0.998 ** (len(measured) - 1 - i) for i in range(len(measured))]
        for k, weight in enumerate(prior):
            slope = weight * costs[k]
            for (amounts, seconds), decayed in zip(measured, weights, strict=True):
                predicted = sum(amount * cost for amount, cost in zip(amounts, costs, strict=True))
                slope += decayed * amounts[k] * (predicted - seconds)
            assert slope == pytest.approx(0, abs=1e-6)


def test_a_measurement_changes_the_costs_and_a_caller_cannot() -> None:
    fit = LeastSquares((1e-6, 1e-6))
    fit.observe((1, 0), 2.0)
    fit.costs()[0] = 7.0
    assert fit.costs() == pytest.approx([2, 0], abs=1e-4)
    fit.observe((0, 1), 3.0)
    assert fit.costs() == pytest.approx([2, 3], abs=1e-4)


def test_costs_are_never_negative() -> None:
    fit = LeastSquares((1e-6, 1e-6))
    fit.observe((1, 1), 1.0)
    fit.observe((1, 2), 0.5)
    assert min(fit.costs()) == 0
