"""`sluice submit`, `sluice tail` and `sluice cancel`: queue a job, follow it, cancel it."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer

from sluice.cli.errors import CliError, connected, refuse_bad_id
from sluice.cli.options import REDIS_URL, AsJson, LaneChoice, ModelName, RedisUrl, integer, number
from sluice.cli.terminal.follow import CANCEL_WAIT_S, EXIT_CODES, exit_code, follow, mention_waiting, submit_job
from sluice.cli.terminal.inputs import read_message, read_request_file
from sluice.cli.terminal.output import print_json
from sluice.cli.terminal.view import ShowEvent, event_printer, note, notes
from sluice.client import Client
from sluice.contract.events import Event
from sluice.contract.keys import DEFAULT_MODEL
from sluice.errors import CancelNotStored, JobCancelled, JobFailed, UnknownJob
from sluice.submission import Submitted


def submit(
    message: Annotated[
        str | None, typer.Argument(metavar="MESSAGE", help="The message; `-` reads it from stdin.")
    ] = None,
    file: Annotated[
        str | None,
        typer.Option(metavar="PATH", help="A request as JSON: the body of a chat completion. `-` reads stdin."),
    ] = None,
    id: Annotated[
        str | None,
        typer.Option(metavar="ID", help="Id of the job; each id is queued once only.  [default: a new one]"),
    ] = None,
    wait: Annotated[bool, typer.Option("--wait", help="Wait for the result, and print it as JSON.")] = False,
    wait_worker: Annotated[
        float | None,
        typer.Option(
            parser=number(0),
            metavar="SECONDS",
            help="Wait up to this long for a worker of the model, and queue nothing without one; 0 does not wait.  "
            "[default: queue it without a worker too]",
        ),
    ] = None,
    lane: LaneChoice = None,
    model: ModelName = None,
    redis_url: RedisUrl = REDIS_URL,
    as_json: AsJson = False,
) -> None:
    """Queue a job, and print its id.

    With --json, print {"id", "new", "state", "served"}; `new` is false if a job with that id exists already: then
    nothing is queued. `served` is false if no worker serves the model. With --wait, print the result instead, with the
    exit codes of `sluice chat`. Exit code 4: the queue is full, and nothing was queued.

    \b
    Examples:
      sluice submit "Count to 12." --lane batch
      sluice submit --file request.json --id report-7 --wait
    """
    request = _request(message, file)
    served = model or _model_of(request) or DEFAULT_MODEL
    queue = partial(submit_job, request=request, model=served, lane=lane, job_id=id, wait_worker_s=wait_worker)
    raise typer.Exit(asyncio.run(_submit(redis_url, queue, wait=wait, as_json=as_json)))


def _request(message: str | None, file: str | None) -> dict[str, Any]:
    match message, file:
        case str(), None:
            return {"messages": [{"role": "user", "content": read_message(message)}]}
        case None, str():
            return read_request_file(file)
    raise CliError("give either a message or --file: see sluice submit --help.")


def _model_of(request: dict[str, Any]) -> str | None:
    """Return the model that the request names; None if it names none."""
    model = request.get("model")
    return model if isinstance(model, str) else None


async def _submit(url: str, queue: Callable[[Client], Awaitable[Submitted]], *, wait: bool, as_json: bool) -> int:
    async with connected(url) as client:
        job = await queue(client)
        if wait:
            return await _print_result(client, job.id, indent=None if as_json else 2)
        _print_submitted(job, as_json=as_json)
        return 0


def _print_submitted(job: Submitted, *, as_json: bool) -> None:
    if as_json:
        print_json(asdict(job))
        return
    print(job.id)
    note(f"{job.state}. Follow it: sluice tail {job.id}")


async def _print_result(client: Client, job_id: str, *, indent: int | None) -> int:
    with notes.status(f"waiting for the result of {job_id}", spinner_style="dim"):
        ending, result = await _result(client, job_id)
    print_json(result, indent)
    return EXIT_CODES[ending]


async def _result(client: Client, job_id: str) -> tuple[str, dict[str, Any]]:
    """Wait for the job, and return its final state with the object to print."""
    try:
        return "finished", await client.result(job_id)
    except JobFailed as failed:
        note(str(failed), style="red")
        return "failed", {"id": job_id, "type": "failed", "error": asdict(failed.error)}
    except JobCancelled as cancelled:
        return "cancelled", {"id": job_id, "type": "cancelled", "reason": cancelled.reason}


def tail(
    id: Annotated[str, typer.Argument(help="Id of the job, as printed by `sluice submit`.", metavar="ID")],
    after: Annotated[
        int, typer.Option(parser=integer(), metavar="SEQ", help="Show only the events after this `seq`.")
    ] = -1,
    redis_url: RedisUrl = REDIS_URL,
    as_json: AsJson = False,
) -> None:
    """Follow a job from its first event to its end.

    Ctrl-C stops following; the job continues. Exit codes: 0 finished, 1 failed, 3 cancelled.

    \b
    Example:
      sluice tail $(sluice submit "Count to 12.")
    """
    refuse_bad_id(id)
    last = asyncio.run(_tail(redis_url, id, event_printer(as_json=as_json, announce=True), after))
    raise typer.Exit(exit_code(last))


async def _tail(url: str, job_id: str, printer: AbstractContextManager[ShowEvent], after: int) -> Event:
    async with connected(url) as client:
        await mention_waiting(client, job_id)
        with printer as show:
            # Not unknown for long, since an id is printed only after the job was queued.
            return await follow(client, job_id, show, after=after, unknown_s=1.0)


_UNKNOWN = "unknown: never submitted, or its events have expired"


def cancel(
    ids: Annotated[list[str], typer.Argument(help="Ids of the jobs.", metavar="ID")],
    redis_url: RedisUrl = REDIS_URL,
) -> None:
    """Cancel queued or running jobs, and print the outcome of each.

    A waiting job ends at once, even without a worker; a running job is ended by its worker.

    Exit codes: 0 if all ids are known, else 2.

    \b
    Example:
      sluice cancel report-7 report-8
    """
    for job_id in ids:
        refuse_bad_id(job_id)
    outcomes = asyncio.run(_cancel_all(redis_url, ids))
    for job_id, outcome in zip(ids, outcomes, strict=True):
        print(f"{job_id}  {outcome}")
    raise typer.Exit(2 if _UNKNOWN in outcomes else 0)


async def _cancel_all(url: str, ids: list[str]) -> list[str]:
    async with connected(url) as client:
        return await asyncio.gather(*(_cancel(client, job_id) for job_id in ids))


async def _cancel(client: Client, job_id: str) -> str:
    """Cancel one job and return the outcome as text. An unknown id is skipped: the stored request would cancel a later
    job with that id."""
    match await client.state(job_id):
        case None:
            return _UNKNOWN
        case "queued" | "running":
            return await _request_cancel(client, job_id)
        case state:
            return f"already {state}"


async def _request_cancel(client: Client, job_id: str) -> str:
    try:
        await client.cancel(job_id)
    except CancelNotStored:
        return f"{await _outcome(client, job_id)} (the workers got the request, but the full server did not store it)"
    return await _outcome(client, job_id)


async def _outcome(client: Client, job_id: str) -> str:
    try:
        async with asyncio.timeout(CANCEL_WAIT_S):
            last = await follow(client, job_id, lambda *_: None)
    except TimeoutError:
        return f"requested; the worker that runs it has not answered in {CANCEL_WAIT_S:g} s"
    except UnknownJob:
        return _UNKNOWN
    return "cancelled" if last.type == "cancelled" else f"already {last.type}"
