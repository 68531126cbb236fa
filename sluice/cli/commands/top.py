"""`sluice top`: a live view of workers, models, queues, tenants and offline runs."""

import asyncio
import signal
import sys
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from typing import Annotated, Any

import typer
from rich.live import Live

from sluice.cli.errors import CliError, connected
from sluice.cli.options import REDIS_URL, AsJson, RedisUrl, number
from sluice.cli.terminal.output import print_json
from sluice.cli.terminal.top_view import Sample, TopView
from sluice.cli.terminal.view import console, note
from sluice.client import Client
from sluice.contract.batch import Batch
from sluice.contract.models import loaded_share
from sluice.presence import parse_worker, serves
from sluice.queues import QueueHead

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
