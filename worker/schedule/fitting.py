"""Costs estimated from measurements as they arrive: least squares with exponential decay of old measurements."""

from collections.abc import Sequence

_DECAY = 0.998  # of the weight of earlier measurements, for each new one: it halves after about 350


class LeastSquares:
    """Online ridge regression of seconds on a fixed number of amounts."""

    def __init__(self, prior: Sequence[float]) -> None:
        """`prior`: for each amount, the weight of the prior that it costs nothing, in measurements of amount 1."""
        self._prior = prior
        self._squares = [[0.0] * len(prior) for _ in prior]
        self._products = [0.0] * len(prior)

    def observe(self, amounts: Sequence[float], seconds: float) -> None:
        """Record a measurement: `amounts` together took `seconds`. Amounts should have similar magnitude, near 1."""
        for i, a in enumerate(amounts):
            self._products[i] = self._products[i] * _DECAY + a * seconds
            self._squares[i] = [earlier * _DECAY + a * b for earlier, b in zip(self._squares[i], amounts, strict=True)]

    def costs(self) -> list[float]:
        """Return the estimated seconds for one unit of each amount, at least 0."""
        squares = [list(line) for line in self._squares]
        for i, weight in enumerate(self._prior):
            squares[i][i] += weight
        return [max(0.0, cost) for cost in _solve(squares, self._products)]


def _solve(squares: list[list[float]], products: list[float]) -> list[float]:
    """Solve by Gauss-Jordan elimination with partial pivoting. `squares` is positive definite, so no pivot is 0."""
    rows = [[*line, product] for line, product in zip(squares, products, strict=True)]
    for k in range(len(rows)):
        pivot = max(range(k, len(rows)), key=lambda i: abs(rows[i][k]))
        rows[k], rows[pivot] = rows[pivot], rows[k]
        for i in range(len(rows)):
            if i != k:
                factor = rows[i][k] / rows[k][k]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[k], strict=True)]
    return [row[-1] / row[k] for k, row in enumerate(rows)]
