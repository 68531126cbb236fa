"""`sluice top`: a live view of workers, models, queues, tenants and offline runs, drawn in the size of the terminal."""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.table import Table
from rich.text import Text

from sluice.cli.errors import CliError, connected
from sluice.cli.options import REDIS_URL, AsJson, RedisUrl, number
from sluice.cli.terminal.output import format_duration, print_json
from sluice.cli.terminal.view import console, note, printable
from sluice.client import Client
from sluice.contract.batch import Batch
from sluice.contract.keys import LANES
from sluice.contract.models import loaded_share
from sluice.contract.redis_url import MapFile, redacted
from sluice.presence import host_notes, parse_worker, serves
from sluice.queues import QueueHead
from sluice.wording import counted

Sample = dict[str, Any]  # as `--json` prints it
_Row = dict[str, Any]
_NONE = "–"
_LEFT = {"worker", "model", "state", "lane", "tenant", "run", "status"}  # columns of text
_SUMMED = ("rows", "max_rows", "tokens_per_s", "claims_left", "claims_overruled")  # over the workers of a model


def top(
    once: Annotated[bool, typer.Option("--once", help="Print one sample and exit, as without a terminal.")] = False,
    every: Annotated[
        float, typer.Option(parser=number(0.2), metavar="SECONDS", help="Seconds between two samples.")
    ] = 2.0,
    redis_url: RedisUrl = REDIS_URL,
    as_json: AsJson = False,
) -> None:
    """Watch workers, models, queues, tenants and offline runs.

    It goes on until Ctrl-C and waits out an outage; if stdout is no terminal, it prints one sample. Workers publish
    three times in a lease: tokens a second, of the last ten seconds; of the last minute, how long interactive jobs took
    to the first token and from token to token (median/95th percentile), the share of prompt tokens found in the prefix
    cache, and of those that claims expected there (hints), and the jobs left to other workers/taken although another
    was better (left); the memory reserved for running rows, of what the model leaves. Waiting jobs are counted by
    tenant in the oldest 300 of each queue.

    \b
    With --json, print an object for each sample:
      at       Unix seconds
      workers  name, model, state, version, images, and as numbers or null:
               rows, max_rows, offline_rows, jobs_per_s, tokens_per_s, load,
               ttft_p50_ms, ttft_p95_ms, gap_p50_ms, gap_p95_ms,
               prefix_hit_rate (0 to 1), claims_left, claims_overruled,
               prefix_hint_rate (0 to 1), prefix_cache_bytes, memory_bytes,
               memory_limit_bytes, queue_limit, started_at, protocol,
               step_share, offline_step_share (of the time, 0 to 1);
               memory_pressure, memory_reclaim (given back) and machine
               (in_use, hot, on_battery, awake), as text
      models   model, workers (that take jobs), loading (the loaded share of the
               weights, 0 to 1; null: no worker loads it), rows, max_rows,
               tokens_per_s, claims_left, claims_overruled
      queues   model, lane, jobs; of the oldest 300: running, waiting, oldest_s;
               complete (there are no more, or they are put off)
      tenants  model, lane, tenant ("": none), waiting, oldest_s
      runs     id, status, total, completed, failed, paused (of those not ended)
      absent   sentences: servers of SLUICE_REDIS_URLS that did not answer

    Exit codes: 0, or 2 if --once finds no server.

    \b
    Examples:
      sluice top
      sluice top --json --every 10 | jq '.models[] | {model, tokens_per_s}'
    """
    with suppress(KeyboardInterrupt):  # the way to end it
        if once or not (as_json or sys.stdout.isatty()):
            asyncio.run(_print_once(redis_url, as_json))
        elif as_json:
            asyncio.run(_print_each(redis_url, every))
        else:
            with suppress(asyncio.CancelledError):  # by SIGTERM
                asyncio.run(_show(redis_url, every))
            raise typer.Exit(128 + signal.SIGTERM)


async def _print_once(url: str, as_json: bool) -> None:
    async with connected(url) as client:
        sample = await _sample(client)
    if as_json:
        print_json(sample)
    else:
        console().print(TopView(url, sample))


async def _print_each(url: str, every_s: float) -> None:
    async for sample in _samples(url, every_s):
        if isinstance(sample, CliError):
            note(f"sluice: {sample}", style="yellow")
        else:
            print_json(sample)


async def _show(url: str, every_s: float) -> None:
    """Show samples on the terminal, whose screen and cursor are restored when the task ends, by SIGTERM too."""
    view, task = TopView(url), asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    with Live(view, console=console(), screen=True, refresh_per_second=2) as live:  # to follow the terminal's size
        async for sample in _samples(url, every_s):
            view.update(sample)
            live.refresh()


async def _samples(url: str, every_s: float) -> AsyncIterator[Sample | CliError]:
    """Yield samples without end, and in an outage why there is none."""
    while True:
        try:
            async with connected(url) as client:
                while True:
                    yield await _sample(client)
                    await asyncio.sleep(every_s)
        except CliError as error:
            yield error
        await asyncio.sleep(every_s)


async def _sample(client: Client) -> Sample:
    found = filter(None, map(parse_worker, await client.workers()))
    workers = sorted(found, key=lambda each: (each["model"], each["name"]))
    heads = await client.queue_heads()
    loading = await _loading(client)
    return {
        "at": round(time.time(), 3),
        "workers": workers,
        "models": [_model(name, workers, loading) for name in sorted({*loading, *(each["model"] for each in workers)})],
        "queues": [_queue(head) for head in heads],
        "tenants": [tenant for head in heads for tenant in _tenants(head)],
        "runs": [_run(batch) for batch in await client.batches() if not batch.ended],
        "absent": [*client.absent],
    }


async def _loading(client: Client) -> dict[str, float]:
    """Return the models that supervisors load, with the share of the weights that the furthest has loaded."""
    loading = dict[str, float]()
    for models in (await client.supervised_models()).values():
        for name, model in models.items():
            if model["state"] == "loading":
                loading[name] = max(loading.get(name, 0.0), round(loaded_share(model), 3))
    return loading


def _model(name: str, workers: list[dict[str, Any]], loading: Mapping[str, float]) -> dict[str, Any]:
    own = [each for each in workers if each["model"] == name]
    sums = {field: sum(each[field] or 0 for each in own) for field in _SUMMED}
    return {"model": name, "workers": sum(map(serves, own)), "loading": loading.get(name), **sums}


def _queue(head: QueueHead) -> dict[str, Any]:
    waiting = sum(jobs for jobs, _ in head.waiting.values())
    oldest_s = max((oldest_s for _, oldest_s in head.waiting.values()), default=0.0)
    of_head = {"running": head.running, "waiting": waiting, "oldest_s": round(oldest_s, 1), "complete": head.complete}
    return {"model": head.model, "lane": head.lane, "jobs": head.jobs, **of_head}


def _tenants(head: QueueHead) -> list[dict[str, Any]]:
    return [
        {"model": head.model, "lane": head.lane, "tenant": tenant, "waiting": jobs, "oldest_s": round(oldest_s, 1)}
        for tenant, (jobs, oldest_s) in head.waiting.items()
    ]


def _run(batch: Batch) -> dict[str, Any]:
    counts = batch.request_counts
    done = {"total": counts.total, "completed": counts.completed, "failed": counts.failed}
    return {"id": batch.id, "status": batch.status, **done, "paused": batch.sluice.paused_at is not None}


class TopView:
    """The last sample, drawn anew for each size of the terminal."""

    def __init__(self, url: str, sample: Sample | None = None) -> None:
        """`sample`: if there is one, it is drawn whole; else the view fits into the terminal."""
        self._server = Path(url).name if isinstance(url, MapFile) else redacted(url)
        self._fits = sample is None
        self._sample = sample
        self._problem = ""

    def update(self, found: Sample | CliError) -> None:
        """Take over a sample, or the reason that there is none: then the last one is still shown."""
        if isinstance(found, CliError):
            self._problem = str(found)
        else:
            self._sample, self._problem = found, ""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        sample, width = self._sample, options.max_width
        notices = [*self._notices()]
        yield Text(self._summary(), "bold", no_wrap=True, overflow="ellipsis")
        yield from notices
        if sample is None:
            return
        parts = [
            # Columns: then there are more numbers.
            _worker_rows(sample["workers"], wide=width >= 110, widest=width >= 135),
            _model_rows(sample, fleet=width >= 80),
            _tenant_rows(sample["tenants"]),
            _run_rows(sample["runs"]),
        ]
        # Without the summary; and a part begins with an empty line and the names of its columns.
        used = 1 + sum(len(each.wrap(console, width)) for each in notices) + 2 * sum(bool(rows) for _, rows in parts)
        shares = _shares(console.height - used, [len(rows) for _, rows in parts])
        for (names, rows), share in zip(parts, shares, strict=True):
            if rows:
                is_whole = not self._fits or share >= len(rows)
                shown = rows if is_whole else rows[: max(1, share - 1)]  # a line tells the number of the others
                yield from _table(names, shown, len(rows) - len(shown), width)

    def _notices(self) -> Iterator[Text]:
        sample = self._sample
        if self._problem:
            age = f" Last seen {format_duration(time.time() - sample['at'])} ago." if sample else ""
            yield Text(printable(f"{self._problem}{age} Trying again."), "yellow")
        for each in sample["absent"] if sample else ():
            yield Text(printable(each), "yellow")
        noted = (
            [f"{each['name']}: {notes}" for each in sample["workers"] if (notes := host_notes(each))] if sample else []
        )
        if len(noted) > 3:
            noted[2:] = [f"and {len(noted) - 2} more workers leave something to others on their machines"]
        yield from (Text(printable(each), "yellow") for each in noted)
        if sample and not sample["workers"]:
            yield Text("No worker is alive. Start one: sluice worker --model FOLDER_OR_HUB_ID", "yellow")

    def _summary(self) -> str:
        sample = self._sample
        if sample is None:
            return f"sluice top · {self._server}"
        rows, most, rate = (sum(each[of] for each in sample["models"]) for of in ("rows", "max_rows", "tokens_per_s"))
        load = f"{counted(len(sample['workers']), 'worker')} · {rows:,} of {most:,} rows · {rate:,.0f} tokens/s"
        return printable(f"{datetime.fromtimestamp(sample['at']):%H:%M:%S} · {load} · {self._server}")


def _shares(lines: int, sizes: list[int]) -> list[int]:
    """Share lines among parts of these sizes: the small ones are shown whole, and all others alike; two lines each at
    least, a row and the number of the others."""
    shares = dict[int, int]()
    for place, i in enumerate(sorted(range(len(sizes)), key=sizes.__getitem__)):
        shares[i] = min(sizes[i], max(2, lines // (len(sizes) - place)))
        lines -= shares[i]
    return [shares[i] for i in range(len(sizes))]


def _table(names: Sequence[str], rows: Sequence[Sequence[str]], hidden: int, width: int) -> RenderResult:
    """Draw rows, of which `hidden` more do not fit. The first column gives way to the others."""
    cells = [[Text(printable(cell).replace("\n", " ")) for cell in row] for row in rows]
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold cyan", pad_edge=False)
    for name in names:
        table.add_column(Text(name), justify="left" if name in _LEFT else "right", no_wrap=True, overflow="ellipsis")
    others = [max(len(name), *lengths) for name, lengths in zip(names, _lengths(cells), strict=True)][1:]
    for first, *more in cells:
        first.truncate(max(8, width - sum(others) - len(others)), overflow="ellipsis")
        table.add_row(first, *more)
    yield Text("")
    yield table
    if hidden > 0:
        yield Text(f"and {hidden:,} more", "dim")


def _lengths(cells: list[list[Text]]) -> list[list[int]]:
    """Return the widths of the cells by column."""
    return [[cell.cell_len for cell in column] for column in zip(*cells, strict=True)]


def _worker_rows(workers: list[_Row], *, wide: bool, widest: bool) -> tuple[list[str], list[list[str]]]:
    draining = any(each["state"] != "running" for each in workers)
    columns: dict[str, Callable[[_Row], str]] = {
        "worker": lambda each: each["name"],
        "model": lambda each: each["model"] if wide else _cut(each["model"], 14),
        "state": lambda each: each["state"],
        "rows": lambda each: f"{_whole(each['rows'])}/{_whole(each['max_rows'])}",
        "tok/s": lambda each: _whole(each["tokens_per_s"]),
        "jobs/s": lambda each: _NONE if each["jobs_per_s"] is None else f"{each['jobs_per_s']:.2f}",
        "first s": lambda each: _pair(each["ttft_p50_ms"], each["ttft_p95_ms"], 1000),
        "gap ms": lambda each: _pair(each["gap_p50_ms"], each["gap_p95_ms"], 1),
        "hits": lambda each: _share(each["prefix_hit_rate"]),
        "hints": lambda each: _share(each["prefix_hint_rate"]),
        "left": _left,
        "memory": lambda each: f"{_size(each['memory_bytes'])}/{_size(each['memory_limit_bytes'])}",
        "prefixes": lambda each: _size(each["prefix_cache_bytes"]),
    }
    hidden = {*(() if wide else ("jobs/s", "prefixes")), *(() if widest else ("hints", "left"))}
    columns = {name: of for name, of in columns.items() if name not in hidden}
    if not wide and not draining:
        del columns["state"]
    return [*columns], [[of(each) for of in columns.values()] for each in workers]


def _left(each: _Row) -> str:
    """Return the jobs left to other workers, and those taken although another was better."""
    if each["claims_left"] is None or each["claims_overruled"] is None:
        return _NONE
    return f"{each['claims_left']:,}/{each['claims_overruled']:,}"


def _model_rows(sample: Sample, *, fleet: bool) -> tuple[list[str], list[list[str]]]:
    models = {each["model"]: each for each in sample["models"]}
    queues = {(each["model"], each["lane"]): each for each in sample["queues"]}
    sums = "workers", "rows", "max_rows", "tokens_per_s", "claims_left", "claims_overruled"
    none = {**dict.fromkeys(sums, 0), "loading": None}
    rows = []
    for name in sorted({*models, *(model for model, _ in queues)}):
        model = models.get(name, none)
        workers = f"{model['workers']:,}" if model["loading"] is None else f"loads {model['loading']:.0%}"
        load = [workers, f"{model['rows']:,}/{model['max_rows']:,}", _whole(model["tokens_per_s"])]
        hints = [each["prefix_hint_rate"] for each in sample["workers"] if each["model"] == name]
        known = [rate for rate in hints if rate is not None]
        rate = sum(known) / len(known) if known else None
        load += [_left(model), _share(rate)] if fleet else []
        rows.append([name, *load, *(cell for lane in LANES for cell in _lane(queues.get((name, lane))))])
    names = ["model", "workers", "rows", "tok/s", *(["left", "hints"] if fleet else [])]
    return [*names, "interactive", "oldest", "batch", "oldest"], rows


def _lane(queue: _Row | None) -> tuple[str, str]:
    """Return the jobs that wait, and since when; with a + if only some of the queue were looked at."""
    if queue is None:
        return _NONE, ""
    more = "" if queue["complete"] else "+"
    return f"{queue['waiting']:,}{more} wait", _age(queue["oldest_s"]) if queue["waiting"] else ""


def _tenant_rows(tenants: list[_Row]) -> tuple[list[str], list[list[str]]]:
    oldest = sorted(tenants, key=lambda each: (-each["oldest_s"], each["tenant"]))
    rows = [
        [each["tenant"] or _NONE, _cut(each["model"], 20), each["lane"], f"{each['waiting']:,}", _age(each["oldest_s"])]
        for each in oldest
    ]
    return ["tenant", "model", "lane", "waiting", "oldest"], rows


def _run_rows(runs: list[_Row]) -> tuple[list[str], list[list[str]]]:
    rows = [
        [
            each["id"], "paused" if each["paused"] else each["status"],
            f"{each['completed'] + each['failed']:,}/{each['total']:,}", f"{each['failed']:,}",
        ]
        for each in runs
    ]  # fmt: skip
    return ["run", "status", "lines", "failed"], rows


def _cut(text: str, longest: int) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


def _share(share: float | None) -> str:
    return _NONE if share is None else f"{share:.0%}"


def _whole(number: float | None) -> str:
    return _NONE if number is None else f"{number:.0f}"


def _pair(half: float | None, most: float | None, unit: int) -> str:
    """Return a median and a 95th percentile."""
    if half is None or most is None:
        return _NONE
    return "/".join(f"{value / unit:.0f}" if value >= 10 * unit else f"{value / unit:.1f}" for value in (half, most))


def _size(size: float | None) -> str:
    if size is None:
        return _NONE
    unit, divisor = ("G", 1e9) if size >= 999.5e6 else ("M", 1e6)
    value = size / divisor
    return f"{value:.1f}{unit}" if value < 10 else f"{value:.0f}{unit}"


def _age(seconds: float) -> str:
    """Return the largest unit of a duration, so that a column is narrow; two for minutes."""
    return format_duration(seconds).replace(" min ", "m").replace(" min", "m").replace(" s", "s")
