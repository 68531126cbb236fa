"""`sluice submit`: queues a job without waiting for it."""

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from functools import partial
from typing import Annotated, Any

import typer

from sluice.cli import option_values
from sluice.cli.errors import CliError, connected
from sluice.cli.options import MODEL, REDIS_URL, AsJson, LaneChoice, ModelName, RedisUrl
from sluice.cli.terminal.follow import EXIT_CODES, submit_job
from sluice.cli.terminal.inputs import read_message, read_request
from sluice.cli.terminal.output import print_json
from sluice.cli.terminal.view import note, notes
from sluice.client import Client
from sluice.errors import JobCancelled, JobFailed
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
            parser=option_values.number(0),
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
    served = model or _model_of(request) or MODEL
    queue = partial(submit_job, request=request, model=served, lane=lane, job_id=id, wait_worker_s=wait_worker)
    raise typer.Exit(asyncio.run(_submit(redis_url, queue, wait=wait, as_json=as_json)))


def _request(message: str | None, file: str | None) -> dict[str, Any]:
    match message, file:
        case str(), None:
            return {"messages": [{"role": "user", "content": read_message(message)}]}
        case None, str():
            return read_request(file)
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
