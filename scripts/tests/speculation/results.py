"""Results with given figures."""

from collections.abc import Mapping

from scripts.benchmarks.speculation.figures import Case, Clocks, Pair, Result, Run


def run(
    tokens: int = 10, *, rate: int = 1000, gap_s: float = 0.01, drafts: Mapping[str, tuple[int, int]] | None = None
) -> Run:
    """A run with one answer of `tokens` tokens, and `rate` tokens per second by all clocks."""
    return Run({"0.0": tuple(range(tokens))}, tokens, rate, Clocks(1.0, 1.0, 1.0), 2.0, gap_s, drafts or {})


def result(
    task: str, rows: int, proposer: str, *, speed: float = 1.0, accepted: int = 0, gap_s: float = 0.01
) -> Result:
    """A result of one pair, with 10 tokens, of which drafts have brought `accepted`."""
    drafts = {"copy": (2 * accepted, accepted)} if accepted else {}
    drafted = run(rate=round(1000 * speed), gap_s=gap_s, drafts=drafts)
    return Result(Case(task, rows, proposer), (Pair(run(), drafted),))
