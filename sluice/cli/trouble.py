"""What a person can put right, said in a sentence with a way out."""

import math
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from redis.exceptions import AuthenticationError, ConnectionError, RedisError, TimeoutError

from sluice import wire
from sluice.client import Client
from sluice.errors import NoWorker, QueueFull, UnknownJob
from sluice.redis_url import UNREADABLE, public

INSTALL_WORKER = "in a checkout of Sluice, pip install './sluice[cli]' '.[worker]'"
_EXIT_QUEUE_FULL = 4


class Trouble(Exception):
    """Ends the command with this sentence and exit code."""

    def __init__(self, sentence: str, *, exit_code: int = 2) -> None:
        super().__init__(sentence)
        self.exit_code = exit_code


@asynccontextmanager
async def connected(url: str) -> AsyncIterator[Client]:
    """A client whose server has answered. What may go wrong with it inside comes out as `Trouble`."""
    async with _client(url) as client:
        try:
            await _reach(client, url)
            yield client
        except RedisError as error:
            raise Trouble(_explain(error, url)) from None
        except UnknownJob as error:
            way_out = f"Check the id, and that {public(url)} is the server it was submitted to."
            raise Trouble(f"{error}. {way_out}") from None
        except NoWorker as missing:
            raise Trouble(f"{str(missing).rstrip('?')}. Nothing was queued. {start_worker(missing.model)}") from None
        except QueueFull as full:
            raise Trouble(_explain_full(full), exit_code=_EXIT_QUEUE_FULL) from None


def start_worker(model: str) -> str:
    """Tell how to start a worker that serves the model."""
    name = "" if model == "default" else f" --name {model}"
    return f"Start one: sluice worker --model FOLDER_OR_HUB_ID{name}"


def check_job_id(job_id: str) -> None:
    try:
        wire.check_job_id(job_id)
    except ValueError as error:
        raise Trouble(f"{error}.") from None


def _client(url: str) -> Client:
    try:
        return Client(url)
    except ValueError as error:
        raise Trouble(f"{error}.") from None


async def _reach(client: Client, url: str) -> None:
    try:
        await client.ping()
    except (ValueError, TypeError):  # of a host's name, or of an option that is read at the first connection
        raise Trouble(f"{public(url)!r} is not the URL of a server: {UNREADABLE}.") from None


def _explain(error: RedisError, url: str) -> str:
    said = str(error).rstrip(".") + "."
    match error:
        case AuthenticationError():
            way_out = "Put the password into the URL: redis://:PASSWORD@HOST:PORT/0."
            return f"the server at {public(url)} wants other credentials: {said} {way_out}"
        case ConnectionError() | TimeoutError():
            way_out = "`sluice up --model FOLDER_OR_HUB_ID` starts one with a worker; --redis-url names another."
            return f"no server answers at {public(url)}: {said} {way_out}"
    return f"the server at {public(url)} refused: {said} Is it a Redis or Valkey that we may write to?"


def _explain_full(full: QueueFull) -> str:
    lengths = f"length {full.length:,}, limit {full.limit:,}"
    return f"the queue is full ({lengths}), and nothing was queued. Try again in {math.ceil(full.retry_after_s):,} s."
