"""An offline run on the terminal: on its way, and when it is over."""

import time
from collections import deque
from datetime import datetime
from types import TracebackType
from typing import Self

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from sluice.batch.status import Batch
from sluice.cli.errors import CliError
from sluice.cli.terminal.output import format_duration, print_table
from sluice.cli.terminal.view import note, notes
from sluice.wording import counted

_PACE_OVER_S = 60.0
_RATE_S = 1.0  # the least over which a rate is measured
_LINE_EVERY_S = 10.0  # where there is no terminal for a bar
_MOST_SHOWN = 20  # problems on a terminal; the status object has more


def read_models(given: list[str]) -> dict[str, str]:
    """`gpt-4o-mini=default`, each."""
    pairs = [said.partition("=") for said in given]
    for name, equals, served in pairs:
        if not (name and equals and served):
            raise CliError(f"{name + equals + served!r} maps no model: write NAME=SERVED, as in gpt-4o-mini=default.")
    return {name.strip(): served.strip() for name, _, served in pairs}


class Pace:
    """Rates over the last minute."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int, int]] = deque()

    def add(self, batch: Batch) -> None:
        """Record a status."""
        now = time.monotonic()
        self._seen.append((now, _ended(batch), batch.usage.output_tokens))
        while now - self._seen[0][0] > _PACE_OVER_S:
            self._seen.popleft()

    def tokens_per_s(self) -> float:
        """Return completion tokens per second."""
        return self._per_s(2)

    def left(self, lines: int) -> str:
        """Return the estimated time for this number of lines, as text."""
        rate = self._per_s(1)
        return f"{format_duration(lines / rate)} left" if rate else "time left unknown"

    def _per_s(self, of: int) -> float:
        first, last = self._seen[0], self._seen[-1]
        seconds = last[0] - first[0]
        return (last[of] - first[of]) / seconds if seconds >= _RATE_S else 0.0


class Watch:
    """A bar on a terminal, and elsewhere a line now and then."""

    def __init__(self) -> None:
        self._pace = Pace()
        columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[more]}")
        self._bar = Progress(*columns, console=notes, disable=not notes.is_terminal, transient=True)
        self._task = self._bar.add_task("reading the file", total=None, more="")
        self._line_at, self.begun = time.monotonic(), False

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._bar.stop()

    def told(self, batch: Batch) -> None:
        """Show a status."""
        if not self.begun:
            self._begin(batch)
        self._pace.add(batch)
        counts, done = batch.request_counts, _ended(batch)
        left = self._pace.left(counts.total - done)
        rate = self._pace.tokens_per_s()
        more = " · ".join([f"{counts.failed:,} failed", *([f"{rate:,.0f} tokens/s"] if rate else []), left])
        self._bar.update(self._task, description=batch.status, total=counts.total, completed=done, more=more)
        if not notes.is_terminal and time.monotonic() - self._line_at >= _LINE_EVERY_S:
            self._line_at = time.monotonic()
            note(f"{done:,} of {counted(counts.total, 'line')} · {more}")

    def _begin(self, batch: Batch) -> None:
        done = _ended(batch)
        known = f", {done:,} of them done before" if done else ""
        note(f"{batch.id}: {counted(batch.request_counts.total, 'line')}{known}")
        self.begun = True


def print_report(batch: Batch) -> None:
    """Print the final table."""
    counts, usage, told = batch.request_counts, batch.usage, batch.sluice
    rows = {
        "status": _status(batch),
        "lines": f"{counts.total:,}: {counts.completed:,} answered, {counts.failed:,} failed",
        "failures": ", ".join(f"{code} × {count:,}" for code, count in sorted(told.failures.items())),
        "queued again": counted(told.retried, "line") if told.retried else "",
        "time": _time(batch),
        "prompt tokens": f"{usage.input_tokens:,}, {usage.input_tokens_details.cached_tokens:,} of them cached",
        "answer tokens": _answer_tokens(batch),
        "models": ", ".join(f"{name} × {lines:,}" for name, lines in told.models.items()),
        "answers": batch.output_file_id or "",
        "failed lines": batch.error_file_id or "",
        "machine": told.host,
    }
    print_table(batch.id, {"": "left", "offline run": "left"}, [row for row in rows.items() if row[1]])


def print_problems(batch: Batch) -> None:
    """Print the first problems."""
    problems = batch.errors.data if batch.errors else ()
    for problem in problems[:_MOST_SHOWN]:
        place = f"line {problem.line:,}: " if problem.line else ""
        note(f"{place}{problem.code}: {problem.message}", style="red")
    if len(problems) > _MOST_SHOWN:
        note(f"and {len(problems) - _MOST_SHOWN:,} more: --json has them.", style="red")


def state_shown(batch: Batch) -> str:
    """The state in a word, and how long nobody has fed the run."""
    since = batch.sluice.paused_at
    return batch.status if since is None else f"paused for {format_duration(max(0.0, time.time() - since))}"


def _status(batch: Batch) -> str:
    since = batch.sluice.paused_at
    if since is None:
        return batch.status
    at = f"{datetime.fromtimestamp(since):%Y-%m-%d %H:%M:%S}"
    return f"{batch.status}, paused since {at}: no process feeds it. Run its command again to resume it"


def _ended(batch: Batch) -> int:
    return batch.request_counts.completed + batch.request_counts.failed


def _time(batch: Batch) -> str:
    seconds = batch.sluice.seconds
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)


def _answer_tokens(batch: Batch) -> str:
    tokens, seconds = batch.usage.output_tokens, batch.sluice.seconds
    return f"{tokens:,}, {tokens / seconds:,.0f} a second" if seconds >= _RATE_S else f"{tokens:,}"
