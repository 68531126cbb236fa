"""Submits jobs and shows their events up to the final one."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from sluice.cli.errors import CliError, connected, start_worker
from sluice.cli.terminal.view import ShowEvent, note
from sluice.client import Client
from sluice.contract.events import Event, parse_event
from sluice.contract.keys import DEFAULT_MODEL, Lane
from sluice.errors import CancelNotStored, NoWorker, describe_served
from sluice.submission import Submitted

CANCEL_WAIT_S = 2.0  # a cancel takes one step of the engine; after this time no live worker runs the job

EXIT_CODES = {"finished": 0, "failed": 1, "cancelled": 3}


async def ask(
    url: str, model: str, lane: Lane | None, request: dict[str, Any], printer: AbstractContextManager[ShowEvent]
) -> Event | None:
    """Submit a request and show its events. Return the final one; None if Ctrl-C requested a cancel that no worker has
    confirmed yet. Raises `CliError`."""
    async with connected(url) as client:
        with on_interrupt() as interrupted:
            job = await submit_job(client, request, model=model, lane=lane)
            with printer as show:
                return await _answer(client, job.id, show, interrupted)


def exit_code(ending: Event | None) -> int:
    """Return the exit code for a final event; None counts as cancelled."""
    return EXIT_CODES[ending.type if ending else "cancelled"]


async def submit_job(
    client: Client,
    request: dict[str, Any],
    *,
    model: str,
    lane: Lane | None,
    job_id: str | None = None,
    wait_worker_s: float | None = None,
) -> Submitted:
    """Submit a job and print notes about it. Raises `CliError`."""
    try:
        job = await client.submit(request, model=model, lane=lane, id=job_id, wait_worker_s=wait_worker_s)
    except ValueError as error:
        raise CliError(f"the job cannot be queued: {error}.") from None
    if not job.new:
        note(f"{job.id} was submitted before, so this request was not queued. Use another id to run it.", "yellow")
    if job.state == "queued":
        await mention_missing_worker(client, model)
    return job


async def mention_missing_worker(client: Client, model: str, *, waits: str = "the job waits") -> bool:
    """Return True if the model is served; otherwise print a note with the remedy. `waits`: a clause for the note."""
    served = await client.served_models()
    if model in served:
        return True
    model = (await client.aliases()).get(model, model)
    no_worker = NoWorker(model, sorted(served))
    close = f"did you mean {no_worker.close}? " if no_worker.close else ""
    others = f" ({close}--model selects another: {describe_served(no_worker.served)})" if served else ""
    note(f"no worker serves {model!r} right now{others}; {waits} in the queue. {start_worker(model)}", style="yellow")
    return False


async def check_images(url: str, model: str) -> None:
    """Raises `CliError` if workers serve the model and none of them accepts images."""
    async with connected(url) as client:
        workers = await client.workers()
        served_as = (await client.aliases()).get(model, model)
        names = {model} if model in {worker.get("model") for worker in workers} else {served_as}
        takes = {worker.get("images", "yes") for worker in workers if worker.get("model") in names}
    if takes == {"no"}:
        raise CliError(f"{model} does not accept images. Choose a vision model with --model, or leave the image out.")


async def mention_waiting(client: Client, job_id: str) -> None:
    """Print a note if a queued job waits for a model without a worker."""
    model = await client.waits_for(job_id)
    if model is None or model in await client.served_models():
        return
    name = "" if model == DEFAULT_MODEL else f" --name {model}"
    note(
        f"{job_id} waits for a worker that serves {model!r}, and none is alive. Start one: sluice worker --model "
        f"FOLDER_OR_HUB_ID{name}; or cancel the job: sluice cancel {job_id}",
        style="yellow",
    )


async def follow(client: Client, job_id: str, show: ShowEvent, *, after: int = -1, unknown_s: float = 10.0) -> Event:
    """Show the events after sequence number `after`, and return the final one. Raises as `Client.stream` does."""
    async for raw in client.stream_json(job_id, unknown_s=unknown_s):
        event = parse_event(raw)
        if event.seq > after or not event.stored:
            show(raw, event)
        if event.final:
            return event
    raise AssertionError("a stream ends with a final event")


async def _answer(client: Client, job_id: str, show: ShowEvent, interrupted: asyncio.Event) -> Event | None:
    following = asyncio.create_task(follow(client, job_id, show))
    waiting = asyncio.create_task(interrupted.wait())
    await asyncio.wait([following, waiting], return_when=asyncio.FIRST_COMPLETED)
    if interrupted.is_set() and not following.done():
        with suppress(CancelNotStored):  # the workers received the request
            await client.cancel(job_id)
        await asyncio.wait([following], timeout=CANCEL_WAIT_S)
    waiting.cancel()
    if following.done():
        return following.result()
    following.cancel()
    note(f"the cancel is requested, but the worker has not confirmed it yet. Follow it: sluice tail {job_id}")
    return None


@contextmanager
def on_interrupt() -> Iterator[asyncio.Event]:
    """Yield an event that the first Ctrl-C sets; a second one raises KeyboardInterrupt."""
    interrupted, loop = asyncio.Event(), asyncio.get_running_loop()

    def interrupt() -> None:
        interrupted.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, interrupt)
    try:
        yield interrupted
    finally:
        loop.remove_signal_handler(signal.SIGINT)
