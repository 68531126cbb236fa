"""`sluice why`: where the time of a job went."""

import asyncio
import math
from dataclasses import asdict, replace
from functools import partial
from typing import Annotated, Any

import typer
from redis.asyncio import Redis

from sluice.cli.errors import CliError, connected, refuse_bad_id
from sluice.cli.options import REDIS_URL, AsJson, RedisUrl
from sluice.cli.terminal.output import print_json, print_table
from sluice.cli.terminal.view import note
from sluice.contract import keys
from sluice.contract.events import FINAL, Failed, parse_event
from sluice.contract.phases import Happened, JobPhases, Phase

_LEASE, _FINAL = b"lease", b"final event"  # beside the fields of the job's hash
_HELP = {
    "queue": "waits for a worker with a free row",
    "load": "the worker starts, and loads its model",
    "prepare": "template, tokens, images, grammar",
    "admission": "waits for the engine, or for memory",
    "prefill": "the prompt is computed",
    "decode": "the answer is computed",
    "preempted": "waits, since others need its memory",
    "first_token": "the first token",
    "preempt": "left for others",
    "resume": "goes on",
    "takeover": "its worker had died; this one goes on",
    "requeue": "its worker had stopped; this one goes on",
}


def why(
    id: Annotated[str, typer.Argument(help="Id of the job, as printed by `sluice submit`.", metavar="ID")],
    redis_url: RedisUrl = REDIS_URL,
    as_json: AsJson = False,
) -> None:
    """Show where the time of a job went, over all its attempts.

    It can be asked while the job waits or runs, and for an hour after its end (SLUICE_RESULT_TTL_S). Times are seconds
    since its submission. With --json, print {"id", "state", "model", "lane", "phases", "moments"}, with Unix seconds;
    a phase that lasts has no `ended`. The error of a job that failed goes to stderr. Exit code 2: the job is unknown,
    or its state has expired.

    \b
    Examples:
      sluice why report-7
      sluice why report-7 --json | jq '.phases[] | select(.ended - .began > 1)'
    """
    refuse_bad_id(id)
    state, known, now = asyncio.run(_read(redis_url, id))
    if state is None:
        raise CliError(f"job {id!r} is unknown: never submitted, or it has expired.")
    named = {name: known.get(name.encode(), b"").decode("utf-8", "replace") for name in ("model", "lane")}
    job = {"state": state, **named}
    read = JobPhases.read(known.get(b"phases"))
    phases, moments = [*read.phases()] or _told_by(known, job["state"]), [*read.moments()]
    finished_at = _seconds(known.get(b"finished_at"))
    if state in FINAL and finished_at is not None and phases and phases[-1].ended is None:  # no worker has ended it
        phases[-1] = replace(phases[-1], ended=max(phases[-1].began, finished_at))
    if as_json:
        print_json({"id": id, **job, "phases": [*map(asdict, phases)], "moments": [*map(asdict, moments)]})
    elif phases:
        _print(id, job, phases, moments, now)
    else:
        note(f"{id} is {state}; nothing else is known of it.")
    if state == "failed":
        note(_failure(known[_FINAL]))
    if state == "running" and not known.get(_LEASE):
        note("its worker is gone; another one of the model takes it over.", style="yellow")


async def _read(url: str, job_id: str) -> tuple[str | None, dict[bytes, bytes], float]:
    """Return the job's state, None for an unknown job; the fields of its hash, its lease, and its final event if it has
    failed; and the server's time."""
    async with connected(url) as client:
        at = await client.of_job(job_id)
        state = await at.state(job_id)  # first, since it ends a job whose deadline has passed
        known, now = await at.retries.run(partial(_read_fields, at.redis, job_id))
        newer = known.get(b"state")
        return newer.decode("utf-8", "replace") if newer else state, known, now


async def _read_fields(redis: Redis, job_id: str) -> tuple[dict[bytes, bytes], float]:
    async with redis.pipeline() as pipe:  # a transaction: the end of a job deletes its lease
        pipe.hgetall(keys.job(job_id))
        pipe.get(f"arq:in-progress:{job_id}")
        pipe.time()
        fields, owner, (seconds, microseconds) = await pipe.execute()
    final: bytes | None = await redis.get(keys.result(job_id)) if fields.get(b"state") == b"failed" else None
    return {**fields, _LEASE: owner or b"", _FINAL: final or b""}, seconds + microseconds / 1e6


def _told_by(known: dict[bytes, bytes], state: str) -> list[Phase]:
    """Return the phases of a job of which no worker has recorded any: it waits, or was just claimed."""
    queued_at, started_at, finished_at = (
        _seconds(known.get(name)) for name in (b"queued_at", b"started_at", b"finished_at")
    )
    attempt, worker = int(_seconds(known.get(b"attempt")) or 0), known.get(b"worker", b"").decode("utf-8", "replace")
    phases = [] if queued_at is None else [Phase("queue", attempt, worker, queued_at, started_at or finished_at)]
    if started_at is not None and state != "queued":
        phases.append(Phase("prepare", attempt, worker, started_at, finished_at))
    return phases


def _failure(final: bytes) -> str:
    """Return why a job has failed, by its final event."""
    try:
        event = parse_event(final)
    except ValueError:
        event = None
    return f"{event.error.type}: {event.error.message}" if isinstance(event, Failed) else "its error has expired."


def _seconds(stored: bytes | None) -> float | None:
    try:
        seconds = float(stored or b"nan")
    except ValueError:
        return None
    return seconds if math.isfinite(seconds) else None


def _print(id: str, job: dict[str, str], phases: list[Phase], moments: list[Happened], now: float) -> None:
    ended = job["state"] in FINAL
    began = phases[0].began
    last = max(phase.ended if phase.ended is not None else now for phase in phases)
    total = max(last - began, 1e-6)
    rows = list[tuple[float, int, tuple[str, ...]]]()
    for phase in phases:
        seconds = max(0.0, (now if phase.ended is None else phase.ended) - phase.began)
        name = phase.name if ended or phase.ended is not None else f"{phase.name} ..."
        rows.append((phase.began, 1, _row(phase, name, began, f"{seconds:.3f}", f"{seconds / total:.0%}")))
    rows += [(moment.at, 0, _row(moment, moment.name, began, "", "")) for moment in moments]
    columns: dict[str, Any] = dict.fromkeys(("at", "seconds", "share"), "right")
    print_table(
        f"{id}: {job['state']}, {total:.3f} s, {job['model']}, {job['lane']}",
        {"attempt": "right", "worker": "left", "phase": "left", **columns, "": "left"},
        [row for _, _, row in sorted(rows, key=lambda each: each[:2])],
    )


def _row(what: Phase | Happened, name: str, began: float, seconds: str, share: str) -> tuple[str, ...]:
    at = what.began if isinstance(what, Phase) else what.at
    return (str(what.attempt), what.worker, name, f"{at - began:.3f}", seconds, share, _HELP.get(what.name, ""))
