"""Prints an offline run on the terminal: its progress and its report."""

import time
from collections import deque
from datetime import datetime
from types import TracebackType
from typing import Self

from rich.console import JustifyMethod
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from sluice.cli.errors import CliError
from sluice.cli.terminal.output import format_duration, print_table
from sluice.cli.terminal.view import note, notes
from sluice.contract.batch import Batch, BatchDetails
from sluice.wording import counted


def read_models(options: list[str]) -> dict[str, str]:
    """Parse options such as `gpt-4o-mini=default` into a mapping. Raises `CliError`."""
    pairs = [option.partition("=") for option in options]
    for name, equals, served in pairs:
        if not (name and equals and served):
            raise CliError(
                f"{name + equals + served!r} is not a mapping: write NAME=SERVED, as in gpt-4o-mini=default."
            )
        if "*" in name.strip()[:-1]:
            raise CliError(
                f"{name.strip()!r}: a * stands for the end of a name; write it last, as in claude-*=default."
            )
    return {name.strip(): served.strip() for name, _, served in pairs}


class _RunPace:
    """Rates over the last minute."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, int, int]] = deque()

    def add(self, batch: Batch) -> None:
        """Record a status."""
        now = time.monotonic()
        self._samples.append((now, _ended(batch), batch.usage.output_tokens))
        while now - self._samples[0][0] > 60.0:  # seconds
            self._samples.popleft()

    def tokens_per_s(self) -> float:
        """Return completion tokens per second."""
        return self._per_s(2)

    def left(self, lines: int) -> str:
        """Return the estimated time for `lines` more lines, as text."""
        rate = self._per_s(1)
        return f"{format_duration(lines / rate)} left" if rate else "time left unknown"

    def _per_s(self, column: int) -> float:
        first, last = self._samples[0], self._samples[-1]
        seconds = last[0] - first[0]
        return (last[column] - first[column]) / seconds if seconds >= 1.0 else 0.0


class ProgressView:
    """Shows the progress of a run: a bar on a terminal, otherwise a line every ten seconds."""

    def __init__(self) -> None:
        self._pace = _RunPace()
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[more]}")
        self._bar = Progress(*columns, console=notes, disable=not notes.is_terminal, transient=True)
        self._task = self._bar.add_task("reading the file", total=None, more="")
        self._line_at, self.started = time.monotonic(), False

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def update(self, batch: Batch) -> None:
        """Show a status."""
        if not self.started:
            self._start(batch)
        self._pace.add(batch)
        counts, done = batch.request_counts, _ended(batch)
        left = self._pace.left(counts.total - done)
        rate = self._pace.tokens_per_s()
        cut_off = [f"{batch.sluice.cut_off:,} cut off"] if batch.sluice.cut_off else []
        more = " · ".join([*cut_off, f"{counts.failed:,} failed", *([f"{rate:,.0f} tokens/s"] if rate else []), left])
        self._bar.update(self._task, description=batch.status, total=counts.total, completed=done, more=more)
        if not notes.is_terminal and time.monotonic() - self._line_at >= 10.0:  # seconds
            self._line_at = time.monotonic()
            note(f"{done:,} of {counted(counts.total, 'line')} · {more}")

    def _start(self, batch: Batch) -> None:
        done = _ended(batch)
        known = f", {done:,} of them done earlier" if done else ""
        note(f"{batch.id}: {counted(batch.request_counts.total, 'line')}{known}")
        self.started = True


def print_report(batch: Batch) -> None:
    """Print what a run has done, what its lines took by kind of outcome, and its slowest lines."""
    counts = batch.request_counts
    usage = batch.usage
    details = batch.sluice
    retry = ", ".join(f"{_KINDS.get(kind, kind)} at most {times} times" for kind, times in details.retry.items())
    rows = {
        "status": _status(batch),
        "lines": f"{counts.total:,}: {counts.completed:,} answered{_cut_off(details)}, {counts.failed:,} failed",
        "failures": ", ".join(f"{code} × {count:,}" for code, count in sorted(details.failures.items())),
        "queued again": counted(details.retried, "line") if details.retried else "",
        "run again": retry,
        "time": _time(batch),
        "machine time": _machine_time(sum(each.machine_s for each in details.kinds.values())) if details.kinds else "",
        "speed": _speed(batch),
        "prompt tokens": f"{usage.input_tokens:,}, {usage.input_tokens_details.cached_tokens:,} of them cached"
        f"{_share(usage.input_tokens_details.cached_tokens, usage.input_tokens)}",
        "answer tokens": f"{usage.output_tokens:,}",
        "models": ", ".join(f"{name} × {lines:,}" for name, lines in details.models.items()),
        "answers": batch.output_file_id or "",
        "failed lines": batch.error_file_id or "",
        "machine": details.host,
    }
    print_table(batch.id, {"": "left", "offline run": "left"}, [row for row in rows.items() if row[1]])
    if details.kinds:
        _print_kinds(details)
    if details.slowest:
        columns: dict[str, JustifyMethod] = {"line": "left", "time": "right", "answer tokens": "right"}
        lines = [
            (_shorten(each.custom_id), f"{each.seconds:,.2f} s", f"{each.output_tokens:,}") for each in details.slowest
        ]
        print_table("Slowest lines", columns, lines)


def _print_kinds(details: BatchDetails) -> None:
    """Print what lines took by the kind of their outcome."""
    numbers = ("lines", "prompt tokens", "cached", "answer tokens", "machine time")
    columns: dict[str, JustifyMethod] = {"": "left", **dict.fromkeys(numbers, "right")}
    rows = [
        (
            _KINDS.get(kind, kind),
            f"{sums.lines:,}",
            f"{sums.input_tokens:,}",
            _percent(sums.cached_tokens, sums.input_tokens),
            f"{sums.output_tokens:,}",
            _machine_time(sums.machine_s),
        )
        for kind, sums in details.kinds.items()
    ]
    print_table("Outcomes", columns, rows)


_KINDS = {"cut": "cut off", "invalid": "not JSON"}


def _machine_time(seconds: float) -> str:
    return f"{seconds / 3600:,.2f} h" if seconds >= 36 else f"{seconds:,.1f} s"


def _speed(batch: Batch) -> str:
    seconds = batch.sluice.seconds
    if seconds < 1.0:
        return ""
    return f"{60 * _ended(batch) / seconds:,.0f} lines/min, {batch.usage.output_tokens / seconds:,.0f} tokens/s"


def _percent(part: int, whole: int) -> str:
    return f"{100 * part / whole:.0f} %" if whole else ""


def _share(part: int, whole: int) -> str:
    return f" ({_percent(part, whole)})" if part else ""


def _shorten(custom_id: str) -> str:
    return custom_id if len(custom_id) <= 40 else f"{custom_id[:39]}…"


def print_problems(batch: Batch) -> None:
    """Print the first 20 problems; the status object has more."""
    problems = batch.errors.data if batch.errors else ()
    for problem in problems[:20]:
        place = f"line {problem.line:,}: " if problem.line else ""
        note(f"{place}{problem.code}: {problem.message}", style="red")
    if unlisted := len(problems[20:]):
        note(f"and {unlisted:,} more: see --json.", style="red")


def describe_state(batch: Batch) -> str:
    """Return the state, or for how long the run has been paused."""
    since = batch.sluice.paused_at
    return batch.status if since is None else f"paused for {format_duration(max(0.0, time.time() - since))}"


def _status(batch: Batch) -> str:
    since = batch.sluice.paused_at
    if since is None:
        return batch.status
    at = f"{datetime.fromtimestamp(since):%Y-%m-%d %H:%M:%S}"
    return f"{batch.status}, paused since {at}: no process feeds it. Run its command again to resume it"


def _cut_off(details: BatchDetails) -> str:
    refused = details.kinds["refused"].lines if "refused" in details.kinds else 0
    apart = {"cut off": details.cut_off, "refused": refused}
    parts = [f"{count:,} {name}" for name, count in apart.items() if count]
    return f" ({', '.join(parts)})" if parts else ""


def _ended(batch: Batch) -> int:
    return batch.request_counts.completed + batch.request_counts.failed


def _time(batch: Batch) -> str:
    seconds = batch.sluice.seconds
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)


def print_runs(runs: list[Batch]) -> None:
    """Print a table of several runs."""
    print_table(
        "Offline runs",
        {"id": "left", "status": "left", "answered": "right", "failed": "right", "lines": "right", "created": "right"},
        [
            (
                run.id,
                describe_state(run),
                f"{run.request_counts.completed:,}",
                f"{run.request_counts.failed:,}",
                f"{run.request_counts.total:,}",
                f"{format_duration(time.time() - run.created_at)} ago",
            )
            for run in runs
        ],
    )
