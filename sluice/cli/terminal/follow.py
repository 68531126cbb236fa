"""From a request to its ending, shown on the way."""

import asyncio
import signal
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

from sluice.cli.errors import CliError, connected, start_worker
from sluice.cli.terminal.view import Show, note
from sluice.client import Client
from sluice.errors import CancelNotStored, NoWorker, describe_served
from sluice.submission import Submitted
from sluice.wire import Event, Lane, parse_event

PATIENCE_S = 2.0  # a cancel takes a step of the engine; longer, and nobody was there to hear it

EXIT_CODES = {"finished": 0, "failed": 1, "cancelled": 3}


async def ask(
    url: str, model: str, lane: Lane | None, request: dict[str, Any], shown: AbstractContextManager[Show]
) -> Event | None:
    """Return the final event; None if Ctrl-C requested a cancel that no worker has confirmed yet."""
    async with connected(url) as client:
        with _interrupt() as pressed:
            job = await submit_job(client, request, model=model, lane=lane)
            with shown as show:
                return await _answer(client, job.id, show, pressed)


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
        raise CliError(f"this cannot be queued: {error}.") from None
    if not job.new:
        note(f"{job.id} was submitted before, so this request was not queued. Use another id to run it.", "yellow")
    if job.state == "queued":
        await mention_missing_worker(client, model)
    return job


async def mention_missing_worker(client: Client, model: str, *, waits: str = "the job waits") -> bool:
    """True if the model is served; if not, say so, and what to do."""
    served = {worker["model"] for worker in await client.workers() if "model" in worker}
    if model in served:
        return True
    missing = NoWorker(model, sorted(served))
    close = f"did you mean {missing.close}? " if missing.close else ""
    others = f" ({close}--model names another: {describe_served(missing.served)})" if served else ""
    note(f"no worker serves {model!r} right now{others}; {waits} in the queue. {start_worker(model)}", style="yellow")
    return False


async def check_images(url: str, model: str) -> None:
    """Refuse images that no worker of the model takes. A model without a worker may take them later."""
    async with connected(url) as client:
        takes = {worker.get("images", "yes") for worker in await client.workers() if worker.get("model") == model}
    if takes == {"no"}:
        raise CliError(f"{model} takes no images. Choose a vision model with --model, or ask without the image.")


async def mention_waiting(client: Client, job_id: str) -> None:
    """Say what a job waits for if nobody serves its model."""
    model = await client.waits_for(job_id)
    if model is None or model in {worker.get("model") for worker in await client.workers()}:
        return
    name = "" if model == "default" else f" --name {model}"
    note(
        f"{job_id} waits for a worker that serves {model!r}, and there is none. Start one: sluice worker --model "
        f"FOLDER_OR_HUB_ID{name}; or end the job: sluice cancel {job_id}",
        style="yellow",
    )


async def follow(client: Client, job_id: str, show: Show, *, after: int = -1, unknown_s: float = 10.0) -> Event:
    """Show events after `after` and return the final one."""
    async for raw in client.stream_json(job_id, unknown_s=unknown_s):
        event = parse_event(raw)
        if event.seq > after:
            show(raw, event)
        if event.final:
            return event
    raise AssertionError("a stream ends with a final event")


async def _answer(client: Client, job_id: str, show: Show, pressed: asyncio.Event) -> Event | None:
    following = asyncio.create_task(follow(client, job_id, show))
    waiting = asyncio.create_task(pressed.wait())
    await asyncio.wait([following, waiting], return_when=asyncio.FIRST_COMPLETED)
    if pressed.is_set() and not following.done():
        with suppress(CancelNotStored):  # the workers were told
            await client.cancel(job_id)
        await asyncio.wait([following], timeout=PATIENCE_S)
    waiting.cancel()
    if following.done():
        return following.result()
    following.cancel()
    note(f"the cancel is requested, but the worker has not answered yet: sluice tail {job_id}")
    return None


@contextmanager
def _interrupt() -> Iterator[asyncio.Event]:
    """Set by Ctrl-C. A second one ends the command, whatever it waits for."""
    pressed, loop = asyncio.Event(), asyncio.get_running_loop()

    def press() -> None:
        pressed.set()
        loop.remove_signal_handler(signal.SIGINT)

    loop.add_signal_handler(signal.SIGINT, press)
    try:
        yield pressed
    finally:
        loop.remove_signal_handler(signal.SIGINT)
