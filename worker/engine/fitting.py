"""Costs estimated from measurements as they arrive: least squares with exponential decay of old measurements."""

from collections.abc import Sequence


class LeastSquares:
    """Online ridge regression of seconds on a fixed number of amounts."""

    def __init__(self, prior: Sequence[float]) -> None:
        """`prior`: for each amount, the weight of the prior that it costs nothing, in measurements of amount 1."""
        self._prior = prior
        self._squares = [[0.0] * len(prior) for _ in prior]
        self._products = [0.0] * len(prior)
        self._costs: list[float] | None = None  # by the measurements so far; None: not computed yet

    def observe(self, amounts: Sequence[float], seconds: float) -> None:
        """Record a measurement: `amounts` together took `seconds`. Amounts should have similar magnitude, near 1."""
        self._costs = None
        kept = 0.998  # of the weight of earlier measurements: it halves after about 350
        for i, a in enumerate(amounts):
            self._products[i] = self._products[i] * kept + a * seconds
            self._squares[i] = [earlier * kept + a * b for earlier, b in zip(self._squares[i], amounts, strict=True)]

    def costs(self) -> list[float]:
        """Return the estimated seconds for one unit of each amount, at least 0."""
        if self._costs is None:
            rows = [[*line, product] for line, product in zip(self._squares, self._products, strict=True)]
            for i, weight in enumerate(self._prior):
                rows[i][i] += weight
            self._costs = [max(0.0, cost) for cost in _solve(rows)]
        return [*self._costs]


def _solve(rows: list[list[float]]) -> list[float]:
    """Solve a system whose matrix is symmetric and positive definite, so that Gauss's elimination needs no pivoting.
    `rows`: each with its right side; they are changed. Runs in every step, so its loops are plain."""
    count = len(rows)
    for k, pivot in enumerate(rows):
        for i in range(k + 1, count):
            row = rows[i]
            factor = row[k] / pivot[k]
            for j in range(k + 1, count + 1):
                row[j] -= factor * pivot[j]
    solved = [0.0] * count
    for k in range(count - 1, -1, -1):
        row = rows[k]
        value = row[count]
        for j in range(k + 1, count):
            value -= row[j] * solved[j]
        solved[k] = value / row[k]
    return solved
