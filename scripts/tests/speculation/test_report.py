"""The tables."""

import io

from rich.console import Console
from rich.table import Table

from scripts.benchmarks.speculation import report
from scripts.tests.speculation.results import result


def printed(table: Table) -> str:
    console = Console(file=io.StringIO(), width=170)
    console.print(table)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_task_is_named_once_and_each_case_has_a_row() -> None:
    found = [result("recall", rows, "copies", speed=2, accepted=5) for rows in (1, 4)]
    text = printed(report.results_table([*found, result("count", 1, "copies")], "tiny", 3))
    assert [text.count(each) for each in ("recall", "count", "copies", "50%", "2.00")] == [1, 1, 3, 2, 6]
    assert "3 pairs" in text
