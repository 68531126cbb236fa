"""What the checks of a client have printed, and the table of all clients."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table

_NOT_CALLED = "[dim]·[/]"


@dataclass(frozen=True, slots=True)
class Report:
    """The results of one client: the reason of each call that failed, and None for one that passed. `problem` is why
    the checks did not all run."""

    client: str
    version: str
    calls: dict[str, str | None]
    problem: str | None = None

    @property
    def passed(self) -> bool:
        """True if the client was installed and all of its calls passed."""
        return self.problem is None and bool(self.calls) and not any(self.calls.values())


def read_report(client: str, lines: Iterable[str], problem: str | None = None) -> Report:
    """Return the report of the lines that the checks have printed. Clients print lines of their own, too."""
    version, calls = "?", dict[str, str | None]()
    for line in lines:
        match line.split("\t"):
            case ["version", found]:
                version = found
            case ["pass", call]:
                calls[call] = None
            case ["fail", call, reason]:
                calls[call] = reason
    return Report(client, version, calls, problem)


def failures(reports: Sequence[Report]) -> list[str]:
    """Return a line for each call that failed, and for each client whose checks did not all run."""
    failed = [
        f"{report.client}, {call}: {reason}" for report in reports for call, reason in report.calls.items() if reason
    ]
    return failed + [f"{report.client}: {report.problem}" for report in reports if report.problem]


def table(reports: Sequence[Report]) -> Table:
    """Return the table: a row for each call, and a column for each client."""
    shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    shown.add_column("call", no_wrap=True)
    for report in reports:
        shown.add_column(f"{report.client}\n{report.version}", justify="center")
    for call in dict.fromkeys(call for report in reports for call in report.calls):
        shown.add_row(call, *(_cell(report, call) for report in reports))
    return shown


def _cell(report: Report, call: str) -> str:
    if call not in report.calls:
        return _NOT_CALLED
    return "[green]pass[/]" if report.calls[call] is None else "[bold red]FAIL[/]"
