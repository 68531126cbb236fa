"""What something costs, learned from measurements while they are made: least squares, in which old ones fade."""

from collections.abc import Sequence

_DECAY = 0.998  # of what earlier measurements weigh: half of it is gone after some 350


class LeastSquares:
    def __init__(self, prior: Sequence[float]) -> None:
        """`belief` that each share costs nothing, in measurements that would say so."""
        self._prior = prior
        self._squares = [[0.0] * len(prior) for _ in prior]
        self._products = [0.0] * len(prior)

    def observe(self, amounts: Sequence[float], seconds: float) -> None:
        """Of each share so much was in it, and it took so long. Amounts are best of one size, near 1."""
        for i, a in enumerate(amounts):
            self._products[i] = self._products[i] * _DECAY + a * seconds
            self._squares[i] = [kept * _DECAY + a * b for kept, b in zip(self._squares[i], amounts, strict=True)]

    def costs(self) -> list[float]:
        """Of one of each share, in seconds; never below 0."""
        squares = [list(line) for line in self._squares]
        for i, belief in enumerate(self._prior):
            squares[i][i] += belief
        return [max(0.0, cost) for cost in _solve(squares, self._products)]


def _solve(squares: list[list[float]], products: list[float]) -> list[float]:
    """Gauss, with the largest pivot. The squares are positive definite, so there is one."""
    rows = [[*line, product] for line, product in zip(squares, products, strict=True)]
    for k in range(len(rows)):
        pivot = max(range(k, len(rows)), key=lambda i: abs(rows[i][k]))
        rows[k], rows[pivot] = rows[pivot], rows[k]
        for i in range(len(rows)):
            if i != k:
                factor = rows[i][k] / rows[k][k]
                rows[i] = [a - factor * b for a, b in zip(rows[i], rows[k], strict=True)]
    return [row[-1] / row[k] for k, row in enumerate(rows)]
